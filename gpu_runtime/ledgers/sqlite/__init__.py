"""The ledger in an SQLite file.

The Redis ledger also uses the module `files`, for its local directory. The code that all ledgers
share is one folder up. Nothing here decides.
"""
