"""The ledger `keeper:///DIRECTORY`: one process, the keeper, keeps the book of a host.

`core.py` decides what the keeper answers, without sockets, clock or files. `server.py` is the keeper's
process, `ledger.py` the client in every runtime, and `wire.py` what is between them: the sockets, and the
memory in which the keeper publishes the book.
"""
