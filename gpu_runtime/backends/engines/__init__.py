"""Engines that are OpenAI-compatible HTTP servers: one recipe module for each engine, and the server's lifecycle.

To add an engine, write its recipe here and add a line in `registry.py`. Requests to these servers are queued and routed
in `gpu_runtime.serving`.
"""
