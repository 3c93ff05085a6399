"""Measures and records a host: device figures and their history, events, sizes of models.

Nothing is decided here, and no other folder depends on the records. If a record cannot be written,
the failure is logged and the program continues.
"""
