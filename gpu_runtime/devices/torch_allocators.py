"""Which figures torch's allocator has, and `Peak`: the most bytes that it has allocated.

A user may replace torch's allocator. CUDA's allocator (`cudaMallocAsync`) counts bytes, but lists
no blocks. A pluggable allocator, such as RMM's, has no figures: torch raises an error for each of
them.
"""

from __future__ import annotations

import weakref
from typing import Any


def counts_bytes(cuda: Any) -> bool:
    """Whether the allocator of `cuda` (torch.cuda) counts its bytes and accepts a limit."""
    return _name(cuda) != "pluggable"


def lists_blocks(cuda: Any) -> bool:
    """Whether the allocator of `cuda` lists its blocks of memory."""
    return _name(cuda) == "native"


def _name(cuda: Any) -> str:
    """`native`, `cudaMallocAsync` or `pluggable`; `native` for another kind of accelerator."""
    return getattr(cuda, "get_allocator_backend", lambda: "native")()


class Peak:
    """The most bytes that torch has allocated on one card since this object was made.

    torch records only one peak for each card. Before `reset_peak` resets it for one reader, each
    Peak of the card stores the peak until then.
    """

    def __init__(self, cuda: Any, card: str) -> None:
        """`cuda` is torch.cuda, and `card` torch's name of the card, such as cuda:0."""
        self._cuda, self.card, self._earlier = cuda, card, 0
        reset_peak(cuda, card)
        _peaks.add(self)

    @property
    def bytes(self) -> int:
        """The most bytes until now."""
        return max(self._earlier, self._cuda.max_memory_allocated(self.card))

    def keep(self) -> None:
        """Stores the peak until now, because torch's own peak is about to be reset."""
        self._earlier = self.bytes


_peaks: weakref.WeakSet[Peak] = weakref.WeakSet()


def reset_peak(cuda: Any, card: str) -> None:
    """Sets torch's peak on `card` to the bytes that are allocated now."""
    for peak in list(_peaks):
        if peak.card == card:
            peak.keep()
    cuda.reset_peak_memory_stats(card)
