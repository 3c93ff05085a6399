"""How many bytes a model needs: weights, KV cache and activations, from what is known before a load.

Pure: nothing here reads a file, a device or a clock. `owner/footprints.py` reads the sources and
stores the measurements.
"""
