"""PyTorch modules that run in this process: from live Python (`torch`) and from disk (`transformers`).

This folder also moves modules between memories, splits modules over several cards, and proves that
weights are unchanged. Models that run in separate processes are in `llama_cpp` and `engines`.
"""
