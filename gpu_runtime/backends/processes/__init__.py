"""Child processes that run engines: their start, logs, visible cards, restarts and end.

The protocols and command lines of the engines are in `llama_cpp` and `engines`.
"""
