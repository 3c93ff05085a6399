"""The ledger in a Redis: one page for each host, written by a script on the server.

As for SQLite, each owner has local files: its lock file, its doorbell (the socket that wakes it),
and its maps, names and answers. Only modules of this folder import the package redis.
"""
