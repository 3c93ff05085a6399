"""This process as an owner in the ledger: it requests memory, and loads and evicts its models.

Only this folder knows the scheduler and also the ledgers, devices and backends. It decides nothing
itself: each decision is a function of the scheduler that runs in one transaction of `session.py`.
"""
