"""This process as an owner in the ledger: it requests memory, and loads and evicts its models.

This is the only package that uses the scheduler together with the ledgers, devices and backends.
The package decides nothing itself: each decision is a function of the scheduler. `session.py` runs
the function in one transaction.
"""
