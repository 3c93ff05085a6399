"""torch's record of the lines that allocated memory of a real card.

It is switched on for a kernel after its first out-of-memory error, and not before: each allocation then takes some
microseconds more. torch's tools show the same record (`torch.cuda.memory._dump_snapshot`), and
`torch.cuda.memory._record_memory_history(None)` ends it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...units import show_bytes
from ...user_frames import line_of, runs_users_code

MOST_ENTRIES = 10_000  # allocations and releases that torch keeps
MOST_LINES = 10  # of the user's, the largest first
ALLOCATED = "active_allocated"  # torch's word for the state of a block that is in use

log = logging.getLogger("gpu_runtime")


def start(card: torch.device) -> None:
    """Lets torch record allocations from now on, if `card` is a CUDA card in use and torch does not record already."""
    if not _uses(card) or torch._C._cuda_isHistoryEnabled():
        return
    try:
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=MOST_ENTRIES)
    except Exception as error:  # another allocator keeps no record, and the story goes without
        log.debug("torch does not record allocations: %s", error)


def _uses(card: torch.device) -> bool:
    return card.type == "cuda" and torch.cuda.is_initialized()


def read(card: torch.device) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What torch has recorded of `card`; two empty tuples without a record.

    The first are the user's lines of the last allocation that failed, the innermost last. The second are the lines
    that allocated what is in use now, such as `1.2 GiB  Cell In[7], line 3, in step: h = up(x)`, the largest first.
    """
    if not _uses(card) or not torch._C._cuda_isHistoryEnabled():
        return (), ()
    snapshot = torch.cuda.memory._snapshot()
    traces = snapshot["device_traces"][card.index or 0]
    failed = next((one for one in reversed(traces) if one["action"] == "oom"), None)
    return tuple(_lines(failed["frames"])) if failed else (), _allocated(snapshot, card.index or 0)


def _allocated(snapshot: Mapping[str, Any], index: int) -> tuple[str, ...]:
    sizes: Counter[str] = Counter()
    for segment in snapshot["segments"]:
        for block in segment["blocks"] if segment["device"] == index else ():
            if block["state"] == ALLOCATED:
                lines = _lines(block.get("frames", ()))
                # A block from before the record has no frames.
                sizes[lines[-1] if lines else "before the record began"] += block["size"]
    return tuple(f"{show_bytes(size)}  {line}" for line, size in sizes.most_common(MOST_LINES))


def _lines(frames: Iterable[Mapping[str, Any]]) -> list[str]:
    """The user's lines among `frames`, which begin with the innermost; the innermost is the last."""
    users = [one for one in frames if runs_users_code(one["filename"])]
    return [line_of(one["filename"], one["line"], one["name"]) for one in reversed(users)]
