"""Adapters: one way to call every kind of engine, in OpenAI's format. Each adapter serves one model for one call.

Nothing here decides which model answers, or when. `gpu_runtime.backends.engines` starts the engines; a new kind of
engine is added in that package.
"""
