"""The ledger in an SQLite file, and a ledger's directory, which the Redis ledger has too.

What all ledgers share is one folder up; nothing here decides.
"""
