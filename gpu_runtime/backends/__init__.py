"""Backends. Each backend loads, moves, measures and drops one kind of model.

No backend decides where a model is placed or which model is evicted. The scheduler makes these
decisions, and the owner reserves the memory in the ledger before it calls a backend.
"""
