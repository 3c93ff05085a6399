"""Measures and records a host: device figures and their history, events, sizes of models.

No decision is made here, and no other folder depends on these records. If a record cannot be
written, that is logged and the program continues.
"""
