"""The ledger in an SQLite file, and the files in a ledger's directory, which the Redis ledger uses
too.

What all ledgers share is one folder up; nothing here decides.
"""
