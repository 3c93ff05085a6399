"""Maps of allocators: how torch, or a simulated card's segments, have cut what they took of a device.

Pure: an allocator's account of itself goes in, facts.AllocatorMap comes out. Whose map it is, and when it was drawn,
is the house's to add. Where a map goes, ledgers/maps.py knows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ..facts import AllocatorBlock, AllocatorMap, BlockState, SegmentMap
from ..units import MIB
from .simulated_allocator import FREE, HOLE, Segment, Segments

MOST_BLOCKS = 8192  # of all of one owner's maps: 500 KiB as JSON at most
PAGE_BYTES = {
    "small": 2 * MIB,
    "large": 20 * MIB,
}  # what torch maps and unmaps of an expandable segment at a time
_STATES = {
    "active_allocated": BlockState.ALLOCATED,
    "inactive": BlockState.INACTIVE,
}  # else: waits for a stream


def of_segments(
    device: str, state: Segments, *, alloc_retries: int = 0, ooms: int = 0
) -> AllocatorMap:
    """A simulated card's map. Its segments are addressed one after another, since no real address is behind them."""
    starts = itertools.accumulate((segment.span for segment in state.segments), initial=0)
    told = tuple(
        SegmentMap(start, segment.span, "small" if segment.small else "large", _runs(segment))
        for start, segment in zip(starts, state.segments, strict=False)
    )
    free = sum(segment.span for segment in state.segments if not segment.in_use)
    holes = sum(
        run.size
        for segment in state.segments
        if not segment.in_use
        for run in segment.runs
        if run.key == HOLE
    )
    return AllocatorMap(
        "",
        device,
        0.0,
        state.allocated,
        state.reserved,
        state.reserved - state.allocated,
        free - holes,
        state.largest_free,
        alloc_retries,
        ooms,
        told,
    )


def of_torch(
    device: str, number: int, segments: Iterable[Mapping[str, Any]], stats: Mapping[str, Any]
) -> AllocatorMap:
    """The map of the card that torch numbers so, from `torch.cuda.memory_snapshot()` and `torch.cuda.memory_stats()`.

    Whatever can be counted in the snapshot is: the statistics are of another moment.
    Source: torch/cuda/memory.py, `_snapshot`; c10/cuda/CUDACachingAllocator.cpp, `release_blocks`.
    """
    said = sorted(
        (segment for segment in segments if segment["device"] == number),
        key=lambda one: one["address"],
    )
    told = tuple(
        SegmentMap(
            one["address"],
            one["total_size"],
            _kind(one),
            _joined(
                AllocatorBlock(block["size"], _STATES.get(block["state"], BlockState.PENDING))
                for block in one["blocks"]
            ),
        )
        for one in said
    )
    blocks = [block for segment in told for block in segment.blocks]
    free = [block.bytes for block in blocks if block.state is BlockState.INACTIVE]
    return AllocatorMap(
        "",
        device,
        0.0,
        sum(block.bytes for block in blocks if block.state is BlockState.ALLOCATED),
        sum(segment.bytes for segment in told),
        sum(free),
        sum(
            _releasable(segment, one["segment_type"])
            for segment, one in zip(told, said, strict=True)
        ),
        max(free, default=0),
        stats.get("num_alloc_retries", 0),
        stats.get("num_ooms", 0),
        told,
    )


def bounded(maps: Sequence[AllocatorMap], most: int = MOST_BLOCKS) -> tuple[AllocatorMap, ...]:
    """The maps with at most that many blocks in all; their figures stay exact.

    Of too many segments the largest are told, and how much is left out; in one of too many blocks, small neighbours
    are told as one.
    """
    each = most // max(1, len(maps))
    return tuple(_bounded(one, each) for one in maps)


def _runs(segment: Segment) -> tuple[AllocatorBlock, ...]:
    states = {FREE: BlockState.INACTIVE, HOLE: BlockState.RELEASED}
    return _joined(
        AllocatorBlock(run.size, states.get(run.key, BlockState.ALLOCATED)) for run in segment.runs
    )


def _joined(blocks: Iterable[AllocatorBlock]) -> tuple[AllocatorBlock, ...]:
    """The blocks, neighbours of one state told as one. Two free neighbours would be one already."""
    joined: list[AllocatorBlock] = []
    for block in blocks:
        if joined and joined[-1].state is block.state:
            joined[-1] = AllocatorBlock(
                joined[-1].bytes + block.bytes, block.state, joined[-1].count + 1
            )
        else:
            joined.append(block)
    return tuple(joined)


def _kind(segment: Mapping[str, Any]) -> str:
    if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
        return "private"
    return "expandable" if segment.get("is_expandable") else segment["segment_type"]


def _releasable(segment: SegmentMap, type: str) -> int:
    """What `torch.cuda.empty_cache()` gives back of a segment: all or nothing, but whole pages of an expandable one."""
    if segment.kind == "expandable":
        page, at, released = PAGE_BYTES[type], 0, 0
        for block in segment.blocks:
            if block.state is BlockState.INACTIVE:
                released += max(0, (at + block.bytes) // page - -(-at // page)) * page
            at += block.bytes
        return released
    return segment.bytes if segment.kind != "private" and not segment.in_use else 0


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
    """The largest number of blocks a segment may tell, so that together they tell no more than `most`.

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
    """The segment's blocks, at most so many: small neighbours are told as one of mixed state.

    Of two groups that follow each other the sum is above the step, so there are at most 2 * bytes / step + 1.
    """
    if len(segment.blocks) <= most:
        return segment.blocks
    step = 2 * segment.bytes / max(1, most - 1)
    groups: list[list[AllocatorBlock]] = [[]]
    size = 0
    for block in segment.blocks:
        if groups[-1] and (size + block.bytes > step and most > 1):
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
