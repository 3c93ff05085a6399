"""The ledger in a Redis: one page for each host, written by a script on the server.

The owners' lock files, doorbells and maps are local files, as for SQLite. The package redis is
imported only here.
"""
