"""PyTorch modules that run in this process: from live Python (`torch`) and from disk (`transformers`).

Here are also the moves between memories, the cuts over several cards and the proof that weights are
unchanged. Models in processes of their own live in `llama_cpp` and `engines`.
"""
