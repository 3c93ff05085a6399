"""Allocators: torch's figures and maps, and a simulation of its caching allocator."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from .. import threads
from ..facts import AllocatorBlock, AllocatorMap, BlockState, SegmentMap
from ..units import MIB

# -- a simulation of torch's caching allocator, which only counts bytes and holds no memory
#
# Pure. A state goes in, and a state comes out. The caller replaces its state in one assignment, so an
# interrupt cannot leave a state half-changed. `process_memory` holds the memory.
#
# Requests are rounded to 512 bytes and cut from segments. A request below 1 MiB is cut from a segment
# of 2 MiB, and a request below 10 MiB from a segment of 20 MiB. A larger request gets its own
# segment, whose size is a multiple of 2 MiB. A run is a stretch of a segment. A freed run joins its
# free neighbours and stays reserved.
#
# Source: PyTorch, c10/cuda/CUDACachingAllocator.cpp. There are two differences, so that an allocation
# always succeeds if enough bytes are free. First, the capacity counts requested bytes, not rounded
# bytes. Second, if room is short, free runs inside segments in use are released too, as torch does
# with expandable segments.

STEP = 512
# Keys of runs without an allocation. FREE bytes stay reserved; HOLE bytes were released.
FREE, HOLE = 0, -1


class Run(NamedTuple):
    """A stretch of a segment that is allocated, free, or released."""

    size: int
    key: int  # FREE, HOLE, or the positive key of its allocation
    requested: int = 0


class Segment(NamedTuple):
    """Memory taken from the device in one piece."""

    id: int
    small: bool
    runs: tuple[Run, ...]

    @property
    def span(self) -> int:
        """The sum of the bytes of all runs."""
        return sum(run.size for run in self.runs)

    @property
    def in_use(self) -> bool:
        """Whether any run of the segment is allocated."""
        return any(run.key > FREE for run in self.runs)

    @property
    def free(self) -> int:
        """The bytes of all free runs."""
        return sum(run.size for run in self.runs if run.key == FREE)


class Segments(NamedTuple):
    """All memory that one process holds on one device."""

    segments: tuple[Segment, ...] = ()
    next_id: int = 1

    def runs(self) -> Iterator[Run]:
        """The runs of all segments."""
        for segment in self.segments:
            yield from segment.runs

    @property
    def requested(self) -> int:
        """Bytes that callers requested."""
        return sum(run.requested for run in self.runs())

    @property
    def allocated(self) -> int:
        """Bytes that callers requested, rounded up to whole steps of 512 bytes."""
        return sum(run.size for run in self.runs() if run.key > FREE)

    @property
    def reserved(self) -> int:
        """Bytes taken from the device, allocated or free."""
        return sum(run.size for run in self.runs() if run.key != HOLE)


def rounded(size: int, step: int = STEP) -> int:
    """The `size` in whole steps of `step` bytes.

    >>> rounded(1), rounded(512), rounded(0)
    (512, 512, 0)
    """
    return -(-size // step) * step


def allocate(
    state: Segments, sizes: Sequence[int], keys: Sequence[int], room: int
) -> tuple[Segments, int, int, bool]:
    """Allocates one run of bytes for each of `sizes`, side by side in one segment.

    Returns the new state, the segment's id, the offset of the first run in it, and whether cached
    memory had to be released first. `keys` identify the runs, one key for each of `sizes`. `room` is how many bytes
    may be reserved in total. The caller has checked that the requested bytes fit into `room`.
    """
    runs = tuple(Run(rounded(size), key, size) for size, key in zip(sizes, keys, strict=True))
    need = sum(run.size for run in runs)
    small = need < MIB
    fits = [  # the free runs with enough bytes, with their positions
        (run.size, number, position)
        for number, segment in enumerate(state.segments)
        if segment.small == small
        for position, run in enumerate(segment.runs)
        if run.key == FREE and run.size >= need
    ]
    if fits:
        size, number, position = min(fits)
        segment = state.segments[number]
        before, after = segment.runs[:position], segment.runs[position + 1 :]
        cut = segment._replace(runs=_joined((*before, *runs, Run(size - need, FREE), *after)))
        segments = (*state.segments[:number], cut, *state.segments[number + 1 :])
        offset = sum(run.size for run in before)
        return state._replace(segments=segments), segment.id, offset, False
    size = _segment_size(need)
    retried = state.reserved + size > room
    if retried:
        state = emptied(state)
    if state.reserved + need > room:
        state = trimmed(state)
    size = max(need, min(size, room - state.reserved))
    segment = Segment(state.next_id, small, _joined((*runs, Run(size - need, FREE))))
    state = Segments((*state.segments, segment), state.next_id + 1)
    return state, segment.id, 0, retried


def release(state: Segments, keys: Collection[int]) -> Segments:
    """The state without the runs whose key is in `keys`; free neighbours are joined. Unknown keys change nothing."""
    segments = []
    for segment in state.segments:
        if any(run.key in keys for run in segment.runs):
            runs = [Run(run.size, FREE) if run.key in keys else run for run in segment.runs]
            segment = segment._replace(runs=_joined(runs))
        segments.append(segment)
    return state._replace(segments=tuple(segments))


def emptied(state: Segments) -> Segments:
    """The `state` without unused segments, as after torch.cuda.empty_cache()."""
    return state._replace(segments=tuple(segment for segment in state.segments if segment.in_use))


def trimmed(state: Segments) -> Segments:
    """The `state` with all free runs released, also in segments that are in use."""
    segments = []
    for segment in emptied(state).segments:
        runs = [Run(run.size, HOLE) if run.key == FREE else run for run in segment.runs]
        segments.append(segment._replace(runs=_joined(runs)))
    return state._replace(segments=tuple(segments))


def _segment_size(need: int) -> int:
    if need < MIB:
        return 2 * MIB
    return 20 * MIB if need < 10 * MIB else rounded(need, 2 * MIB)


def _joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Leaves out empty `runs`, and joins neighbours that are both free or both released."""
    joined: list[Run] = []
    for run in runs:
        if not run.size:
            continue
        if joined and run.key <= FREE and joined[-1].key == run.key:
            joined[-1] = Run(joined[-1].size + run.size, run.key)
        else:
            joined.append(run)
    return tuple(joined)


# -- maps of allocators: the segments and blocks into which torch divides the memory of a device
#
# Pure. An allocator's own figures go in, and an AllocatorMap comes out. `owner/allocator_maps.py`
# adds the owner and the time to a map, and publishes it.

MOST_BLOCKS = 8192  # blocks in all maps of one owner: at most 500 KiB as JSON
# Bytes that torch maps or unmaps at a time in an expandable segment.
PAGE_BYTES = {"small": 2 * MIB, "large": 20 * MIB}
# torch's names for the states of a block. Any other name means that the block is freed, but a
# stream still uses it.
_STATES = {"active_allocated": BlockState.ALLOCATED, "inactive": BlockState.INACTIVE}


def of_segments(
    device: str, state: Segments, alloc_retries: int = 0, ooms: int = 0
) -> AllocatorMap:
    """The map of a simulated card, from the `state` of its allocator.

    Simulated segments have no real addresses, so they get consecutive addresses. `alloc_retries`
    and `ooms` are the allocator's counters for this `device`.
    """
    starts = itertools.accumulate((segment.span for segment in state.segments), initial=0)
    kinds = ["small" if segment.small else "large" for segment in state.segments]
    segments = [
        SegmentMap(start, segment.span, kind, _runs(segment))
        for start, kind, segment in zip(starts, kinds, state.segments, strict=False)
    ]
    return _map_of(device, segments, kinds, alloc_retries, ooms)


def of_torch(
    device: str, number: int, segments: Iterable[Mapping[str, Any]], stats: Mapping[str, Any]
) -> AllocatorMap:
    """The map of the card that torch calls `cuda:NUMBER` and the book calls `device`.

    `segments` is the result of `torch.cuda.memory_snapshot()`, and `stats` the result of
    `torch.cuda.memory_stats()`. The two calls show slightly different moments. So a number that is
    in both results is taken from `segments`.

    Source: torch/cuda/memory.py, `_snapshot`; c10/cuda/CUDACachingAllocator.cpp, `release_blocks`.
    """
    own = [segment for segment in segments if segment["device"] == number]
    own.sort(key=lambda segment: segment["address"])
    kinds = [segment["segment_type"] for segment in own]
    retries, ooms = stats.get("num_alloc_retries", 0), stats.get("num_ooms", 0)
    return _map_of(device, list(map(_torch_segment, own)), kinds, retries, ooms)


def _map_of(
    device: str, segments: Sequence[SegmentMap], kinds: Iterable[str], alloc_retries: int, ooms: int
) -> AllocatorMap:
    """The map of these `segments`. `kinds` says of each whether it is for small or large requests."""
    sizes: dict[BlockState, list[int]] = {state: [0] for state in BlockState}
    for segment in segments:
        for block in segment.blocks:
            sizes[block.state].append(block.bytes)
    return AllocatorMap(
        owner="",
        device=device,
        wall=0.0,
        allocated_bytes=sum(sizes[BlockState.ALLOCATED]),
        reserved_bytes=sum(segment.bytes for segment in segments) - sum(sizes[BlockState.RELEASED]),
        inactive_bytes=sum(sizes[BlockState.INACTIVE]),
        releasable_bytes=sum(map(_releasable, segments, kinds)),
        largest_free_bytes=max(sizes[BlockState.INACTIVE]),
        alloc_retries=alloc_retries,
        ooms=ooms,
        segments=tuple(segments),
    )


def _torch_segment(described: Mapping[str, Any]) -> SegmentMap:
    blocks = []
    for block in described["blocks"]:
        state = _STATES.get(block["state"], BlockState.PENDING)
        blocks.append(AllocatorBlock(block["size"], state))
    start, size = described["address"], described["total_size"]
    return SegmentMap(start, size, _kind(described), _joined_blocks(blocks))


def bounded(maps: Sequence[AllocatorMap], most: int = MOST_BLOCKS) -> tuple[AllocatorMap, ...]:
    """The `maps`, reduced to at most `most` blocks together. The totals of each map stay exact.

    If there are too many segments, the largest are kept, and the map has only the number and the
    bytes of the others. If a segment has too many blocks, small neighbouring blocks are joined.
    """
    each = most // max(1, len(maps))
    return tuple(_bounded(map, each) for map in maps)


def _runs(segment: Segment) -> tuple[AllocatorBlock, ...]:
    states = {FREE: BlockState.INACTIVE, HOLE: BlockState.RELEASED}
    usual = BlockState.ALLOCATED
    return _joined_blocks(
        AllocatorBlock(run.size, states.get(run.key, usual)) for run in segment.runs
    )


def _joined_blocks(blocks: Iterable[AllocatorBlock]) -> tuple[AllocatorBlock, ...]:
    """The `blocks`, with neighbouring blocks of the same state joined into one block."""
    joined: list[AllocatorBlock] = []
    for block in blocks:
        last = joined[-1] if joined else None
        if last is not None and last.state is block.state:
            joined[-1] = AllocatorBlock(last.bytes + block.bytes, block.state, last.count + 1)
        else:
            joined.append(block)
    return tuple(joined)


def _kind(segment: Mapping[str, Any]) -> str:
    if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
        return "private"
    return "expandable" if segment.get("is_expandable") else segment["segment_type"]


def _releasable(segment: SegmentMap, type: str) -> int:
    """Bytes that `torch.cuda.empty_cache()` releases: of an expandable segment pages, else all of it or nothing."""
    if segment.kind == "expandable":
        return _whole_free_pages(segment, PAGE_BYTES[type])
    if segment.kind == "private" or segment.in_use:
        return 0
    return sum(block.bytes for block in segment.blocks if block.state is BlockState.INACTIVE)


def _whole_free_pages(segment: SegmentMap, page_bytes: int) -> int:
    """Bytes of all pages of a segment that contain only free bytes."""
    released = start = 0
    for block in segment.blocks:
        end = start + block.bytes
        if block.state is BlockState.INACTIVE:
            first_page = -(-start // page_bytes)
            pages = max(0, end // page_bytes - first_page)
            released += pages * page_bytes
        start = end
    return released


def _bounded(map: AllocatorMap, most: int) -> AllocatorMap:
    if sum(len(segment.blocks) for segment in map.segments) <= most:
        return map
    rows = max(1, most // 4)
    largest = sorted(map.segments, key=lambda segment: -segment.bytes)
    left_out = largest[rows:]
    kept = sorted(largest[:rows], key=lambda segment: segment.address)
    quota = _quota([len(segment.blocks) for segment in kept], most)
    return replace(
        map,
        segments=tuple(replace(segment, blocks=_coarse(segment, quota)) for segment in kept),
        left_out=len(left_out),
        left_out_bytes=sum(segment.bytes for segment in left_out),
    )


def _quota(counts: Sequence[int], most: int) -> int:
    """How many blocks a segment may keep, so that all segments together keep at most `most`.

    `counts` has the number of blocks of each segment. A segment with fewer blocks than the result
    keeps all its blocks. What such segments do not need is divided among the larger ones.

    >>> _quota([2, 3, 100], 25)
    20
    """
    left, segments = most, len(counts)
    for count in sorted(counts):
        if count * segments >= left:
            return left // segments
        left, segments = left - count, segments - 1
    return max(counts, default=0)


def _coarse(segment: SegmentMap, most: int) -> tuple[AllocatorBlock, ...]:
    """The blocks of the `segment`, joined so that at most `most` are left.

    If there are too many blocks, neighbours are joined into groups of at most `step` bytes; a
    larger block stays alone. A group of several blocks becomes one block of mixed state. Two
    consecutive groups together have more than `step` bytes. So there are at most
    2 * bytes / step + 1 groups. `step` is chosen so that this number is `most`.
    """
    if len(segment.blocks) <= most:
        return segment.blocks
    step = 2 * segment.bytes / max(1, most - 1)
    groups: list[list[AllocatorBlock]] = [[]]
    size = 0
    for block in segment.blocks:
        if groups[-1] and most > 1 and size + block.bytes > step:
            groups.append([])
            size = 0
        groups[-1].append(block)
        size += block.bytes
    return tuple(group[0] if len(group) == 1 else _mixed(group) for group in groups)


def _mixed(group: Sequence[AllocatorBlock]) -> AllocatorBlock:
    free = sum(block.bytes for block in group if block.state is BlockState.INACTIVE)
    return AllocatorBlock(
        sum(block.bytes for block in group),
        BlockState.MIXED,
        sum(block.count for block in group),
        free,
    )


# -- which figures torch's allocator has, and `Peak`: the most bytes that it has allocated
#
# A user may replace torch's allocator. CUDA's allocator (`cudaMallocAsync`) counts bytes, but lists
# no blocks. A pluggable allocator, such as RMM's, has no figures: torch raises an error for each of
# them.


def counts_bytes(cuda: Any) -> bool:
    """Whether the allocator of `cuda` (torch.cuda) counts its bytes and accepts a limit."""
    return _name(cuda) != "pluggable"


def lists_blocks(cuda: Any) -> bool:
    """Whether the allocator of `cuda` lists its blocks of memory."""
    return _name(cuda) == "native"


def total_bytes(cuda: Any, card: str) -> int:
    """The bytes of `card` as torch counts them.

    The driver keeps some hundred MiB of a card for itself. NVML counts them in the card's total; CUDA does not.
    """
    return int(cuda.get_device_properties(card).total_memory)


def part_of(cuda: Any, card: str, size: int) -> float:
    """The part of `card` that `size` bytes are, as torch counts the card; at most 1."""
    return min(1.0, size / total_bytes(cuda, card))


def limit(cuda: Any, card: str, part: float) -> None:
    """Lets torch reserve at most this `part` of `card`. The caller's current card stays the same.

    torch 2.4 makes `card` the current card, and a context there. So a thread of its own makes the call.

    Source: c10/cuda/CUDACachingAllocator.cpp, `setMemoryFraction`.
    """
    threads.start(partial(cuda.set_per_process_memory_fraction, part, card)).wait()


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
