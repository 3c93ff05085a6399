"""The parts that every server of this package shares: tokens, roles, the gate, and the server's start and end.

The gate checks each request before the request reaches a page or a route.

This folder has no page and no route. The console's pages are in `gpu_panels`, and the HTTP API is in
`gpu_runtime.serving`.
"""
