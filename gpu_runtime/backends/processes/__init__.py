"""Child processes that run engines: how they start, what they log, which cards they see, how they end.

The protocols and command lines of the engines themselves live in `llama_cpp` and `engines`.
"""
