"""Which figures torch's allocator of a card's memory gives.

A user may replace the allocator. CUDA's own (`cudaMallocAsync`) counts bytes and lists no blocks. A
pluggable one, such as RMM's, gives no figures: torch raises an error for each of them.
"""

from __future__ import annotations

from typing import Any


def counts_bytes(cuda: Any) -> bool:
    """Whether the allocator of `cuda`, which is torch.cuda, counts its bytes and takes a limit."""
    return _name(cuda) != "pluggable"


def lists_blocks(cuda: Any) -> bool:
    """Whether the allocator of `cuda` lists its blocks of memory."""
    return _name(cuda) == "native"


def _name(cuda: Any) -> str:
    """`native`, `cudaMallocAsync` or `pluggable`; `native` for another kind of accelerator."""
    return getattr(cuda, "get_allocator_backend", lambda: "native")()
