"""PyTorch modules that run in this process: from live Python (`torch`) and from disk (`transformers`).

This folder also moves modules between memories, splits them over several cards, and proves that weights
are unchanged. Models that run in processes of their own are in `llama_cpp` and `engines`.
"""
