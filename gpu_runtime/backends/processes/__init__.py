"""Child processes that run engines: their start, their logs, the cards that they see, and their
end.

The protocols and command lines of the engines are in `llama_cpp` and `engines`.
"""
