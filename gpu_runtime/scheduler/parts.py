"""Computes how many bytes of a divided model each card takes.

Pure. `splitting` decides which cards are used.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from ..facts import Footprint


def equal_parts(footprint: Footprint, count: int) -> tuple[int, ...] | None:
    """Equal parts of the model for `count` cards; None if the model has too few pieces.

    The parts differ by a byte at most. If the model can be cut only between pieces, each cut is at
    the nearest piece boundary.
    """
    size = footprint.bytes
    if not footprint.pieces:
        part, rest = divmod(size, count)
        larger, smaller = (part + 1,), (part,)
        return larger * rest + smaller * (count - rest)
    return _equal_pieces(footprint.pieces, size, count)


@lru_cache(32)  # one decision needs the parts of each number of cards several times
def _equal_pieces(pieces: tuple[int, ...], size: int, count: int) -> tuple[int, ...] | None:
    ideal = [size * (index + 1) / count for index in range(count)]
    return _cut(_sums(pieces, size), ideal, [size] * count)


def parts_in_proportion(footprint: Footprint, free: Sequence[int]) -> tuple[int, ...] | None:
    """Parts in proportion to the free bytes of each card; None if the model does not fit."""
    size, total = footprint.bytes, sum(free)
    if min(free) <= 0 or total < size:
        return None
    if footprint.pieces:
        return pieces_in_proportion(running_sums(footprint), free)
    ends = [size * until // total for until in accumulate(free)]
    parts = [end - start for start, end in pairwise([0, *ends])]
    _move_excess(parts, free)
    # Every card gets at least one byte, however small the model is.
    while 0 in parts and max(parts) > 1:
        largest = parts.index(max(parts))
        empty = parts.index(0)
        parts[largest] -= 1
        parts[empty] += 1
    return tuple(parts)


def _move_excess(parts: list[int], free: Sequence[int]) -> None:
    """Moves bytes from parts that are too large for their card to cards that have room.

    After rounding, a part may be one byte too large. In this case another card has room for the
    byte.
    """
    over = 0
    for index, most in enumerate(free):
        if parts[index] > most:
            over += parts[index] - most
            parts[index] = most
    for index, most in enumerate(free):
        more = min(over, most - parts[index])
        parts[index] += more
        over -= more


def pieces_in_proportion(sums: Sequence[int], free: Sequence[int]) -> tuple[int, ...] | None:
    """Parts of whole pieces in proportion to the free bytes of each card; None if nothing fits.

    If proportional parts are not possible, each card is filled in order.
    """
    if _filled(sums, free)[0] < len(sums):
        return None
    until = list(accumulate(free))
    size, total = sums[-1], until[-1]
    ideal = [size * end / total for end in until]
    return _cut(sums, ideal, free) or _fill_in_order(sums, free)


def running_sums(footprint: Footprint) -> Sequence[int]:
    """The bytes up to each boundary between pieces, scaled to the total `footprint.bytes`."""
    return _sums(footprint.pieces, footprint.bytes)


@lru_cache(8)
def _sums(pieces: tuple[int, ...], size: int) -> tuple[int, ...]:
    sums = tuple(accumulate(pieces))
    total = sums[-1]
    if total == size:
        return sums
    # The measured size of the model differs from the sum of its pieces.
    return tuple([until * size // total for until in sums])


def can_cut(sums: Sequence[int], free: Sequence[int]) -> bool:
    """Whether every card has free bytes, and `pieces_in_proportion` would find parts."""
    reached, every_card = _filled(sums, free)
    if reached < len(sums):
        return False
    # Usually every card gets a piece, and the slower search is not needed.
    return every_card or (min(free) > 0 and pieces_in_proportion(sums, free) is not None)


def _filled(sums: Sequence[int], free: Sequence[int]) -> tuple[int, bool]:
    """Fills each card in order. Returns how many pieces fit, and whether every card got a piece."""
    reached = taken = 0
    every_card = True
    for size in free:
        end = bisect_right(sums, taken + size, reached)
        if end > reached:
            reached, taken = end, sums[end - 1]
        else:
            every_card = False
    return reached, every_card


def _cut(
    sums: Sequence[int],
    ideal: Sequence[float],
    most: Sequence[int],
) -> tuple[int, ...] | None:
    """The bytes of consecutive whole pieces on each card; None if no such division is found.

    Each cut is as near as possible to its `ideal` running sum. No card gets more bytes than its
    number in `most`. A later card may be smaller than its next piece. In this case the result may
    be None although there is a division with other cuts.
    """
    count, pieces = len(most), len(sums)
    if pieces < count:
        return None
    least = _least_ends(sums, most)
    parts = []
    start = taken = 0
    for index, size in enumerate(most):
        furthest = bisect_right(sums, taken + size, start)
        cards_after = count - 1 - index
        low = max(start + 1, least[index])
        high = min(furthest, pieces - cards_after)
        if low > high:
            return None
        start = _nearest(sums, ideal[index], low, high)
        parts.append(sums[start - 1] - taken)
        taken = sums[start - 1]
    return tuple(parts) if start == pieces else None


def _least_ends(sums: Sequence[int], most: Sequence[int]) -> list[int]:
    """For each card, the lowest boundary (a number of pieces) at which its part may end.

    If a part ended before its lowest boundary, the cards after it could not hold all remaining
    pieces.
    """
    left = len(sums)
    ends = [left] * len(most)
    for index in range(len(most) - 1, 0, -1):
        rest = sums[left - 1] - most[index] if left else 0
        left = bisect_left(sums, rest, 0, left - 1) + 1 if rest > 0 else 0
        ends[index - 1] = left
    return ends


def _fill_in_order(sums: Sequence[int], free: Sequence[int]) -> tuple[int, ...] | None:
    """The bytes of consecutive whole pieces on each card; None if there is no such division.

    Each card takes as many pieces as the cards after it allow.
    """
    parts = []
    start = taken = 0
    for size, ends in zip(free, _possible_ends(sums, free), strict=True):
        furthest = bisect_right(sums, taken + size, start)
        place = bisect_right(ends, furthest)
        if not place or ends[place - 1] <= start:
            return None
        start = ends[place - 1]
        parts.append(sums[start - 1] - taken)
        taken = sums[start - 1]
    return tuple(parts)


def _possible_ends(sums: Sequence[int], free: Sequence[int]) -> list[list[int]]:
    """For each card, the boundaries (numbers of pieces) at which its part may end.

    From each of these boundaries, the cards after it can hold all remaining pieces, with at least
    one piece on each card.
    """
    ends = [[len(sums)]]
    least, until = _least_ends(sums, free), list(accumulate(free))
    for index in range(len(free) - 1, 0, -1):
        later, found = ends[-1], []
        most = bisect_right(sums, until[index - 1])  # pieces that the cards before can hold
        for start in range(max(1, least[index - 1]), most + 1):
            place = bisect_right(later, start)
            if place < len(later) and sums[later[place] - 1] - sums[start - 1] <= free[index]:
                found.append(start)
        ends.append(found)
    return ends[::-1]


def _nearest(
    sums: Sequence[int],
    ideal: float,
    low: int,
    high: int,
) -> int:
    """The index from `low` to `high` whose running sum is nearest to `ideal`.

    If two running sums are equally near, the lower index is returned.
    """
    end = bisect_left(sums, ideal, low - 1, high - 1) + 1
    if end > low and ideal - sums[end - 2] <= sums[end - 1] - ideal:
        return end - 1
    return end
