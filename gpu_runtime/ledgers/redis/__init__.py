"""The ledger in a Redis: one page for each host, written by a script on the server.

Each owner has local files: its lock file and its doorbell (the socket that wakes it). Only modules of
this folder import the package redis.
"""
