"""Maps of allocators: the segments and blocks into which torch divides the memory of a device.

Pure. An allocator's own figures go in, and an AllocatorMap comes out. `owner/allocator_maps.py`
adds the owner and the time to a map; `ledgers/allocator_files.py` stores maps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ..facts import AllocatorBlock, AllocatorMap, BlockState, SegmentMap
from ..units import MIB
from .simulated_allocator import FREE, HOLE, Segment, Segments, emptied

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
    segments = []
    for start, segment in zip(starts, state.segments, strict=False):
        kind = "small" if segment.small else "large"
        segments.append(SegmentMap(start, segment.span, kind, _runs(segment)))
    return AllocatorMap(
        owner="",
        device=device,
        wall=0.0,
        allocated_bytes=state.allocated,
        reserved_bytes=state.reserved,
        inactive_bytes=state.reserved - state.allocated,
        releasable_bytes=state.reserved - emptied(state).reserved,
        largest_free_bytes=state.largest_free,
        alloc_retries=alloc_retries,
        ooms=ooms,
        segments=tuple(segments),
    )


def of_torch(
    device: str,
    number: int,
    segments: Iterable[Mapping[str, Any]],
    stats: Mapping[str, Any],
) -> AllocatorMap:
    """The map of the card that torch calls `cuda:NUMBER` and the book calls `device`.

    `segments` is the result of `torch.cuda.memory_snapshot()`, and `stats` the result of
    `torch.cuda.memory_stats()`. The two calls show slightly different moments. So a number that is
    in both results is taken from `segments`.

    Source: torch/cuda/memory.py, `_snapshot`; c10/cuda/CUDACachingAllocator.cpp, `release_blocks`.
    """
    own = [segment for segment in segments if segment["device"] == number]
    own.sort(key=lambda segment: segment["address"])
    maps = tuple(_torch_segment(segment) for segment in own)
    blocks = [block for segment in maps for block in segment.blocks]
    free = [block.bytes for block in blocks if block.state is BlockState.INACTIVE]
    kinds = (described["segment_type"] for described in own)
    return AllocatorMap(
        owner="",
        device=device,
        wall=0.0,
        allocated_bytes=sum(b.bytes for b in blocks if b.state is BlockState.ALLOCATED),
        reserved_bytes=sum(segment.bytes for segment in maps),
        inactive_bytes=sum(free),
        releasable_bytes=sum(map(_releasable, maps, kinds)),
        largest_free_bytes=max(free, default=0),
        alloc_retries=stats.get("num_alloc_retries", 0),
        ooms=stats.get("num_ooms", 0),
        segments=maps,
    )


def _torch_segment(described: Mapping[str, Any]) -> SegmentMap:
    blocks = []
    for block in described["blocks"]:
        state = _STATES.get(block["state"], BlockState.PENDING)
        blocks.append(AllocatorBlock(block["size"], state))
    start, size = described["address"], described["total_size"]
    return SegmentMap(start, size, _kind(described), _joined(blocks))


def bounded(maps: Sequence[AllocatorMap], most: int = MOST_BLOCKS) -> tuple[AllocatorMap, ...]:
    """The `maps`, reduced to at most `most` blocks together. The totals of each map stay exact.

    If there are too many segments, the largest are kept, and the map has only the number and the
    bytes of the others. If a segment has too many blocks, small neighbouring blocks are joined.
    """
    each = most // max(1, len(maps))
    return tuple(_bounded(one, each) for one in maps)


def _runs(segment: Segment) -> tuple[AllocatorBlock, ...]:
    states = {FREE: BlockState.INACTIVE, HOLE: BlockState.RELEASED}
    usual = BlockState.ALLOCATED
    return _joined(AllocatorBlock(run.size, states.get(run.key, usual)) for run in segment.runs)


def _joined(blocks: Iterable[AllocatorBlock]) -> tuple[AllocatorBlock, ...]:
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
    """Bytes of a segment that `torch.cuda.empty_cache()` releases.

    A normal segment is released whole or not at all. An expandable segment is released page by
    page.
    """
    if segment.kind == "expandable":
        return _whole_free_pages(segment, PAGE_BYTES[type])
    if segment.kind == "private" or segment.in_use:
        return 0
    return segment.bytes


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


def _bounded(one: AllocatorMap, most: int) -> AllocatorMap:
    if sum(len(segment.blocks) for segment in one.segments) <= most:
        return one
    rows = max(1, most // 4)
    largest = sorted(one.segments, key=lambda segment: -segment.bytes)
    left_out = largest[rows:]
    kept = sorted(largest[:rows], key=lambda segment: segment.address)
    quota = _quota([len(segment.blocks) for segment in kept], most)
    return replace(
        one,
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
