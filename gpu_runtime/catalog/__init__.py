"""The catalogue: models on disk, which every process that shares it knows.

It reads and writes files, and derives a ModelSpec from an entry. It loads no model, and knows no
scheduler.
"""
