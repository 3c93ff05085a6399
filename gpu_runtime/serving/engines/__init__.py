"""Adapters: one way to call every kind of engine, in OpenAI's format. Each adapter serves one model for one call.

Nothing here decides which model answers, or when. How an engine is started is in `gpu_runtime.backends`.
"""
