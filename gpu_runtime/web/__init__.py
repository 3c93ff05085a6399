"""What a server of this package needs besides its routes: tokens and roles, the gate, and the server's start and end.

It knows Tornado and no page: the console's pages are in `gpu_panels`, the HTTP API in `gpu_runtime.serving`.
"""
