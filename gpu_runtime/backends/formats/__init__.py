"""Readers for model files: what their headers declare about size and shape, without any weights.

Nothing here imports torch, loads a model or touches a device.
"""
