"""Engines that are OpenAI-compatible HTTP servers: one recipe per engine, and the server's lifecycle.

Routing and queueing of requests to these servers live in `gpu_runtime.serving`.
"""
