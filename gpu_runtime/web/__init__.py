"""The parts that every server of this package shares: tokens and roles, the gate, start and end of the server.

This folder has no page and no route. The console's pages are in `gpu_panels`, and the HTTP API is in
`gpu_runtime.serving`.
"""
