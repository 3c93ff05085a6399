"""A simulation of torch's caching allocator, which only counts bytes and holds no memory.

Pure. A state goes in, and a state comes out. The caller replaces its state in one assignment, so an
interrupt cannot leave a state half-changed. `process_memory` holds the memory.

Requests are rounded to 512 bytes and cut from segments. A request below 1 MiB is cut from a segment
of 2 MiB, and a request below 10 MiB from a segment of 20 MiB. A larger request gets its own
segment, whose size is a multiple of 2 MiB. A run is a stretch of a segment. A freed run joins its
free neighbours and stays reserved.

Source: PyTorch, c10/cuda/CUDACachingAllocator.cpp. There are two differences, so that an allocation
always succeeds if enough bytes are free. First, the capacity counts requested bytes, not rounded
bytes. Second, if room is short, free runs inside segments in use are released too, as torch does
with expandable segments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from ..units import MIB

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

    @property
    def largest_free(self) -> int:
        """Bytes of the largest free run."""
        return max((run.size for run in self.runs() if run.key == FREE), default=0)


class Spot(NamedTuple):
    """The position of a run: a segment's id and an offset in bytes."""

    segment: int
    offset: int


def rounded(size: int, step: int = STEP) -> int:
    """The `size` in whole steps of `step` bytes.

    >>> rounded(1), rounded(512), rounded(0)
    (512, 512, 0)
    """
    return -(-size // step) * step


def allocate(
    state: Segments, sizes: Sequence[int], keys: Sequence[int], room: int
) -> tuple[Segments, Spot, bool]:
    """Allocates one run of bytes for each of `sizes`, side by side in one segment.

    Returns the new state, the position of the first run, and whether cached memory had to be
    released first. `keys` identify the runs, one key for each of `sizes`. `room` is how many bytes
    may be reserved in total. The caller has checked that the requested bytes fit into `room`.
    """
    runs = tuple(Run(rounded(size), key, size) for size, key in zip(sizes, keys, strict=True))
    need = sum(run.size for run in runs)
    small = need < MIB
    spot = _best_fit(state, need, small)
    if spot is not None:
        return _cut(state, spot, runs, need), spot, False
    size = _segment_size(need)
    retried = state.reserved + size > room
    if retried:
        state = emptied(state)
    if state.reserved + need > room:
        state = trimmed(state)
    size = max(need, min(size, room - state.reserved))
    segment = Segment(state.next_id, small, _joined((*runs, Run(size - need, FREE))))
    after = Segments((*state.segments, segment), state.next_id + 1)
    return after, Spot(segment.id, 0), retried


def release(state: Segments, keys: Collection[int]) -> Segments:
    """Frees the runs whose key is in `keys`, and joins free neighbours. Returns the new state.

    Unknown keys change nothing.
    """
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


def _best_fit(state: Segments, need: int, small: bool) -> Spot | None:
    """The position of the smallest free run with at least `need` bytes; None without such a run.

    If `small` is true, only segments for small requests are searched, else only the others.
    """
    best: tuple[int, Spot] | None = None
    for segment in state.segments:
        if segment.small != small:
            continue
        offset = 0
        for run in segment.runs:
            if run.key == FREE and run.size >= need and (best is None or run.size < best[0]):
                best = run.size, Spot(segment.id, offset)
            offset += run.size
    return best[1] if best else None


def _cut(state: Segments, spot: Spot, runs: tuple[Run, ...], need: int) -> Segments:
    """The state with `runs`, `need` bytes, at the start of the free run at `spot`."""
    segments = []
    for segment in state.segments:
        if segment.id == spot.segment:
            segment = _cut_segment(segment, spot.offset, runs, need)
        segments.append(segment)
    return state._replace(segments=tuple(segments))


def _cut_segment(segment: Segment, at: int, runs: tuple[Run, ...], need: int) -> Segment:
    after: list[Run] = []
    offset = 0
    for run in segment.runs:
        if offset == at and run.key == FREE:
            after += [*runs, Run(run.size - need, FREE)]
        else:
            after.append(run)
        offset += run.size
    return segment._replace(runs=_joined(after))


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
