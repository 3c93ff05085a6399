"""The ledger in an SQLite file.

The module `files`, on a ledger's directory, serves the Redis ledger too. The code that all ledgers
share is one folder up. Nothing here decides.
"""
