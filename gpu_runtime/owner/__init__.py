"""This process as an owner in the ledger: it requests memory, and loads and evicts its models.

Only this package knows the scheduler and also the ledgers, devices and backends. The package
decides nothing itself: each decision is a function of the scheduler, which runs in one transaction
of `session.py`.
"""
