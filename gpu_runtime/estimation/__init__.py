"""Estimates the bytes that a model needs before it is loaded: weights, KV cache and activations.

Pure: nothing here reads a file, a device or a clock. `owner/measuring.py` reads the sources and
stores the measurements.
"""
