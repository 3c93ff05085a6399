"""Engines that are OpenAI-compatible HTTP servers: their recipes, and the lifecycle of a server.

Each engine has one recipe module. `recipe.py` says how to add an engine. `gpu_runtime.serving`
queues and routes the requests to these servers.
"""
