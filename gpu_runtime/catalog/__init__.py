"""The catalogue: models that every process sharing it knows, on disk, beyond the life of any process.

It reads and writes files, and derives a ModelSpec from an entry. It loads no model, and knows no scheduler.
"""
