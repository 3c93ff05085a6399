"""The parts that every server of this package shares: tokens and roles, the gate, start and end of the server.

No page and no route is here: the console's pages are in `gpu_panels`, the HTTP API in `gpu_runtime.serving`.
"""
