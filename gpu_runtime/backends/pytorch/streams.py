"""Reads and uses the streams and the allocator of a card, through a module such as `torch.cuda`.

A block of memory belongs to the stream on which it was allocated. After the block is freed, the
allocator gives it to the next request on the same stream, without waiting for other streams. If
offloaded bytes returned to a block of another stream, that stream could reuse the block too early,
while user code still reads it. So bytes return to a block of the stream on which they were
allocated. `record` makes the allocator wait for all other known streams before it reuses the block.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ... import threads
from ...devices import allocators
from ...tracked_objects import instances, subclasses
from ...units import show_bytes
from ...user_frames import line_of, runs_users_code
from ..base import NotStill

log = logging.getLogger("gpu_runtime")

DEFAULT = 0  # the stream that every card has

Segments = Sequence[Mapping[str, Any]]


def module_of(device: torch.device | str) -> Any:
    """torch's module for the kind of `device`; None for the CPU, and if it is not initialised."""
    kind = torch.device(device).type
    module = None if kind in ("cpu", "meta") else getattr(torch, kind, None)
    if module is None or not getattr(module, "is_initialized", bool)():
        return None
    return module


def current_card(name: str) -> contextlib.AbstractContextManager[Any]:
    """A context in which the card that torch calls `name` is torch's current card.

    If the process has not used CUDA yet, it stays so after the context. Otherwise later calls of
    torch could create a CUDA context on card 0, which takes about 400 MB.
    """
    device = torch.device(name)
    if device.type != "cuda":
        return contextlib.nullcontext()
    if not torch.cuda.is_initialized():
        torch.cuda.set_device(device)
    return torch.cuda.device(device)


def segments(device: torch.device | str) -> Segments:
    """The segments of torch's allocator, of all cards of the same kind as `device`.

    Raises NotStill if the user has replaced the allocator by one that does not list them.
    """
    module = module_of(device)
    if module is None or not hasattr(module, "memory_snapshot"):
        return ()
    if not allocators.lists_blocks(module):
        raise NotStill("torch uses another allocator on the card, which does not list its blocks")
    return module.memory_snapshot()


def requested_bytes(device: torch.device | str, peak: bool = False) -> int:
    """The bytes that were requested of the allocator on `device` now, or at the `peak`; 0 if not counted.

    These are the bytes of storages. A block that the allocator gives out can be up to 1 MiB larger: what is left of
    a large block is not cut off. An allocator that counts no requests, cudaMallocAsync, has no such blocks.

    torch's nested figures are read, because its flat figures take ten times as long.

    Source: c10/cuda/CUDACachingAllocator.cpp, `should_split` and `alloc_found_block`.
    """
    module, moment = _counting(device), "peak" if peak else "current"
    stats = module.memory_stats_as_nested_dict(device) if module is not None else {}
    counts = (stats.get(name, {}).get("all", {}) for name in ("requested_bytes", "allocated_bytes"))
    return int(next((size for count in counts if (size := count.get(moment))), 0))


def _counting(device: torch.device | str) -> Any:
    """The module of `device`, as in `module_of`; None if its allocator counts no bytes."""
    module = module_of(device)
    return module if module is not None and allocators.counts_bytes(module) else None


def reset_peak(device: torch.device | str) -> None:
    """Sets the allocator's peak on `device` to the bytes that are allocated now."""
    module = _counting(device)
    if module is not None:
        allocators.reset_peak(module, str(device))


def release_cached(device: torch.device | str) -> None:
    """As `empty_cache`, and also returns the workspaces of cuBLAS.

    The caller ensures that no code of this process uses the card during this call.
    """
    if module_of(device) is torch.cuda:
        torch._C._cuda_clearCublasWorkspaces()
    empty_cache(device)


def empty_cache(device: torch.device | str) -> None:
    """Returns to the card the memory that the allocator keeps for reuse."""
    module = module_of(device)
    if module is not None:
        with module.device(device):
            module.empty_cache()


# -- where blocks lie ------------------------------------------------------------------------------


def homes(addresses: Sequence[int], segments: Iterable[Mapping[str, Any]]) -> list[int | None]:
    """For each address, the stream on which its segment was allocated; None if it is in no segment.

    `segments` have the format of `torch.cuda.memory_snapshot()`.

    >>> homes([520, 9], [{"address": 512, "total_size": 512, "stream": 7}])
    [7, None]
    """
    found = _segments_of(addresses, segments)
    return [None if segment is None else segment["stream"] for segment in found]


def private(addresses: Sequence[int], segments: Iterable[Mapping[str, Any]]) -> bool:
    """Whether one of the `addresses` is in a private pool, whose blocks must keep their place.

    >>> private([520], [{"address": 512, "total_size": 512, "segment_pool_id": (0, 1)}])
    True
    """
    pools = [pool for pool in segments if tuple(pool.get("segment_pool_id", (0, 0))) != (0, 0)]
    return any(segment is not None for segment in _segments_of(addresses, pools))


def captured() -> bool:
    """Whether a CUDA graph exists. If so, no block may change its address.

    Each replay uses the addresses of the capture. Some may be outside the graph's private pool:
    those of inputs, weights, and tensors changed in place.
    """
    return bool(instances(subclasses(torch.cuda.CUDAGraph)))


def _segments_of(
    addresses: Sequence[int], segments: Iterable[Mapping[str, Any]]
) -> list[Mapping[str, Any] | None]:
    """The segment of each address. For 10,000 addresses and 1,000 segments this takes 5 ms."""
    ordered = sorted(segments, key=lambda segment: segment["address"])
    starts = [segment["address"] for segment in ordered]
    found: list[Mapping[str, Any] | None] = []
    for address in addresses:
        place = bisect.bisect_right(starts, address) - 1
        segment = ordered[place] if place >= 0 else None
        if segment is not None and address >= segment["address"] + segment["total_size"]:
            segment = None
        found.append(segment)
    return found


# -- streams ---------------------------------------------------------------------------------------


def pointer(stream: Any) -> int:
    """The number by which snapshots name a stream: the driver's pointer on CUDA."""
    return int(getattr(stream, "cuda_stream", stream.stream_id))


def stream_at(device: torch.device, stream: int) -> Any:
    """The stream with the number `stream` on `device`; see `pointer`.

    torch's `ExternalStream(0)` is no default stream: it returns a new stream, a different one for
    each call. Source: pytorch/pytorch#182960.
    """
    module = module_of(device)
    if stream == DEFAULT:
        return module.default_stream(device)
    return module.ExternalStream(stream, device=device)


def on_stream(device: torch.device, stream: int | None) -> contextlib.AbstractContextManager[Any]:
    """A context in which torch allocates on `device` for the stream with this number; None: the current one."""
    module = module_of(device)
    if module is None or stream is None:
        return contextlib.nullcontext()
    return _current(module, device, stream_at(device, stream))


@contextlib.contextmanager
def _current(module: Any, device: torch.device, stream: Any) -> Iterator[None]:
    """A context in which `device` is the current card, and `stream` the current stream.

    If only the stream were entered, torch would at the end return to the earlier card, with a call
    that creates a CUDA context there. In a new thread the earlier card is card 0.
    """
    with module.device(device), module.stream(stream):
        yield


def copying_out(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which copies from `device` use a stream of their own.

    The bus can copy in both directions at once, but only if each direction has its own stream. The
    caller waits for the whole device before and after the copies.
    """
    module = module_of(device)
    if module is None:
        return contextlib.nullcontext()
    return _current(module, device, module.Stream(device))


def record(
    tensors: Iterable[torch.Tensor],
    device: torch.device,
    home: int | None,
    streams: Collection[int],
) -> None:
    """Records that all `streams`, and the current stream, use the blocks of memory of `tensors`.

    The allocator reuses a freed block only after these streams have done the work that they had at
    that moment. `home` is the stream on `device` to which the blocks belong; it needs no record.
    """
    module = module_of(device)
    if module is None:
        return
    current = module.current_stream(device)
    others = {*streams} - {home, pointer(current)}
    users = [stream_at(device, stream) for stream in others]
    if pointer(current) != home:
        users.append(current)
    for tensor in tensors:
        for user in users:
            tensor.record_stream(user)


# -- rest ------------------------------------------------------------------------------------------

_waiting: dict[torch.device, threads.Running] = {}  # the wait for each card that still works


def not_at_rest(devices: Iterable[torch.device], seconds: float) -> str:
    """Waits until the cards `devices` have finished all their work, and then returns an empty text.

    Returns a sentence about a card that has failed, or has not finished within `seconds`. torch has
    no wait with a limit, so a thread waits for the card. If a card never finishes, its thread stays,
    and the next wait for the card starts no other.
    """
    for device in devices:
        module = module_of(device)
        if module is None:
            continue
        earlier = _waiting.get(device)
        if earlier is not None and not earlier.wait(seconds):
            return _restless(device, seconds)
        failed: list[str] = []
        waiting = threads.start(partial(_synchronise, module, device, failed))
        _waiting[device] = waiting
        if not waiting.wait(seconds):
            return _restless(device, seconds)
        _waiting.pop(device, None)
        if failed:
            return f"{device} has failed: {failed[0]}"
    return ""


def _synchronise(module: Any, device: torch.device, failed: list[str]) -> None:
    """Waits for all work of `device`. If it has failed, as after a failed assert, adds the reason to `failed`."""
    try:
        module.synchronize(device)
    except RuntimeError as error:
        failed.append((str(error).splitlines() or [type(error).__name__])[0])


def _restless(device: torch.device, seconds: float) -> str:
    return f"{device} has not finished its work within {seconds:g} s"


# -- torch's record of the lines that allocated memory of a real card
#
# It is switched on for a kernel after its first out-of-memory error, and not before: each allocation
# then takes some microseconds more. torch's tools show the same record (`torch.cuda.memory._dump_snapshot`),
# and `torch.cuda.memory._record_memory_history(None)` ends it.

MOST_ENTRIES = 10_000  # allocations and releases that torch keeps
MOST_LINES = 10  # of the user's, the largest first
ALLOCATED = "active_allocated"  # torch's word for the state of a block that is in use


def record_lines(card: torch.device) -> None:
    """Lets torch record allocations from now on, if `card` is a CUDA card in use and torch does not record already."""
    if module_of(card) is not torch.cuda or torch._C._cuda_isHistoryEnabled():
        return
    try:
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=MOST_ENTRIES)
    except Exception as error:  # another allocator keeps no record, and the story goes without
        log.debug("torch does not record allocations: %s", error)


def recorded_lines(card: torch.device) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What torch has recorded of `card`; two empty tuples without a record.

    The first are the user's lines of the last allocation that failed, the innermost last. The second are the lines
    that allocated what is in use now, such as `1.2 GiB  Cell In[7], line 3, in step: h = up(x)`, the largest first.
    """
    if module_of(card) is not torch.cuda or not torch._C._cuda_isHistoryEnabled():
        return (), ()
    snapshot = torch.cuda.memory._snapshot()
    traces = snapshot["device_traces"][card.index or 0]
    failed = next((event for event in reversed(traces) if event["action"] == "oom"), None)
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
    users = [frame for frame in frames if runs_users_code(frame["filename"])]
    return [line_of(frame["filename"], frame["line"], frame["name"]) for frame in reversed(users)]
