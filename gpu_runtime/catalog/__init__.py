"""The catalogue: descriptions of models in files, which several processes share.

This folder reads and writes the catalogue's files, and derives a ModelSpec from an entry. It loads
no model and makes no decision about memory.
"""
