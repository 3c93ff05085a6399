"""The parts that every server of this package shares: tokens, roles, the gate, and the server's start and end.

This folder has no page and no route: the console's pages are in `gpu_panels`, the HTTP API in `gpu_runtime.serving`.
"""
