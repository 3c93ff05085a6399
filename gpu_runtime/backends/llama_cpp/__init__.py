"""GGUF models that llama-cpp-python runs, in a worker process or in this process.

The server programs `llama-server` and `llama_cpp.server` are recipes in `engines`.
"""
