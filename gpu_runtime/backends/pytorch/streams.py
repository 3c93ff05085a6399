"""The CUDA stream that each block of torch's caching allocator belongs to.

The allocator gives a freed block to the next request on the same stream, without waiting for other
streams. If bytes returned to a block of another stream, correct side-stream code would find its memory
overwritten too early. So bytes return to a block of the stream on which they were allocated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

PRIVATE = "it is in a private pool of a CUDA graph"  # why a block cannot leave


def homes(addresses: Sequence[int], segments: Iterable[Mapping[str, Any]]) -> list[int | None]:
    """For each address, the stream that its segment was allocated on; None if no segment has it.

    `segments` are those of `torch.cuda.memory_snapshot()`.

    >>> homes([520, 9], [{"address": 512, "total_size": 512, "stream": 7}])
    [7, None]
    """
    spans = sorted((s["address"], s["address"] + s["total_size"], s["stream"]) for s in segments)
    found: list[int | None] = []
    for address in addresses:
        stream = next((at for start, end, at in spans if start <= address < end), None)
        found.append(stream)
    return found


def private(addresses: Sequence[int], segments: Iterable[Mapping[str, Any]]) -> bool:
    """Whether one of the addresses is in a private pool, whose blocks must keep their place.

    >>> private([520], [{"address": 512, "total_size": 512, "segment_pool_id": (0, 1)}])
    True
    """
    pools = [
        (segment["address"], segment["address"] + segment["total_size"])
        for segment in segments
        if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
    ]
    return any(start <= address < end for address in addresses for start, end in pools)


def on_stream(device: torch.device, stream: int | None) -> contextlib.AbstractContextManager[Any]:
    """A context in which torch allocates for `stream` on `device`; without a stream for the current one."""
    if device.type != "cuda" or stream is None:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device))
