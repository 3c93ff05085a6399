"""How a model is divided among several cards.

Pure. `balanced` gives every card the same, as tensor parallelism needs; `proportional` gives each in proportion to the
room that it has; `whole` takes each card whole. Cards are claimed in the order of their index. Which cards are emptied
for it is `clearing.py`'s to say.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, combinations, pairwise
from math import ceil, comb

from ..facts import Candidate, Footprint, PlacementRules, Share, where
from ..units import show_bytes

MOST_TRIED = 300  # sets of cards of which every one is tried; beyond it the first in order and those with the most room

Room = Mapping[str, int]


def split(
    footprint: Footprint, room: Room, rules: PlacementRules, limits: Room
) -> tuple[Candidate, ...]:
    """The ways to divide it that fit into this room, one for each number of cards, the fewest first.

    `room` is bytes by device id, in the order of the devices; `limits` their budgets, where whole cards are asked for.
    A card that cannot take its part is skipped; it is not the end of the search.
    """
    cards = [card for card in room if not rules.devices or card in rules.devices]
    most = min(rules.most_cards or len(cards), len(cards))
    found = []
    for count in range(max(2, rules.least_cards), most + 1):
        for chosen in _sets(footprint, cards, count, room, rules, limits):
            if (
                candidate := divide(footprint, {card: room[card] for card in chosen}, rules, limits)
            ) is not None:
                found.append(candidate)
                break
    return tuple(found)


def divide(
    footprint: Footprint, room: Room, rules: PlacementRules, limits: Room
) -> Candidate | None:
    """It, divided over all of these cards; None where they cannot hold it so.

    >>> gib = 2**30
    >>> divide(Footprint.of(140 * gib), {"cuda:0": 80 * gib, "cuda:1": 80 * gib},
    ...        PlacementRules(layout="balanced"), {}).because
    'cuda:0,1 take 70.0 GiB + 70.0 GiB, of 160 GiB free'
    """
    cards = tuple(room)
    if not fitting(footprint, cards, rules, limits)(room):
        return None
    if rules.layout == "balanced":
        parts = _equal(footprint, len(cards))
    else:
        free = [
            limits[card] if rules.layout == "whole" else _to_spend(room[card], card, rules)
            for card in cards
        ]
        parts = _in_proportion(footprint, free)
    if parts is None or 0 in parts:
        return None
    claims = (
        [limits[card] for card in cards]
        if rules.layout == "whole"
        else [_with_overhead(p, rules) for p in parts]
    )
    shares = tuple(map(Share, cards, claims))
    filled = tuple(map(Share, cards, parts)) if claims != list(parts) else ()
    return Candidate(
        shares,
        True,
        f"{where(shares)} take {' + '.join(show_bytes(size) for size in claims)}, of "
        f"{show_bytes(sum(room.values()))} free",
        filled=filled,
    )


def fitting(
    footprint: Footprint, cards: Sequence[str], rules: PlacementRules, limits: Room
) -> Callable[[Room], bool]:
    """A function that tells whether so much room on these cards holds it, a part on each of them: what `divide` divides.

    (Were it to say so of cards that do not all get a part, nobody would be asked to leave them, and it could go nowhere.)
    """
    size = footprint.bytes
    if size < len(cards):
        return lambda room: False
    if rules.layout == "whole":
        if _in_proportion(footprint, [limits[card] for card in cards]) is None:
            return lambda room: False
        return lambda room: all([room[card] >= limits[card] for card in cards])
    if rules.layout == "balanced":
        if footprint.heads and footprint.heads % len(cards):
            return lambda room: False
        equal = _equal(footprint, len(cards))
        if equal is None:
            return lambda room: False
        part = _with_overhead(
            max(equal), rules
        )  # each card must be able to take the largest, whichever it gets
        return lambda room: all([_held_to(room[card], card, rules) >= part for card in cards])
    sums = _sums(footprint) if footprint.pieces else []

    plain, margin = not (rules.card_bytes or rules.overhead), rules.margin_bytes

    def holds(room: Room) -> bool:  # some hundred times for one plan
        spend = [
            room[card] - margin if plain else _to_spend(room[card], card, rules) for card in cards
        ]
        if min(spend) <= 0 or sum(spend) < size:
            return False
        if not sums:
            return True
        ends = _packed(sums, spend)
        if ends is None:
            return False
        all_have_some = all(
            [before < end for before, end in pairwise([0, *ends])]
        )  # mostly: then no cut need be looked for
        return all_have_some or _proportionally(sums, spend) is not None

    return holds


def claimed(footprint: Footprint, cards: Sequence[str], rules: PlacementRules, limits: Room) -> int:
    """Bytes that it claims of these cards together, at most: each card's part of an overhead is rounded up."""
    if rules.layout == "whole":
        return sum(limits[card] for card in cards)
    return _with_overhead(footprint.bytes, rules) + (len(cards) - 1 if rules.overhead else 0)


def could_split(rules: PlacementRules) -> bool:
    """Whether these rules allow several cards."""
    return rules.layout != "single" and rules.most_cards != 1


def one_card_may_do(rules: PlacementRules) -> bool:
    """Whether these rules allow a single card."""
    return rules.least_cards <= 1 or not could_split(rules)


# -- which cards --------------------------------------------------------------------------------------------------


def _sets(
    footprint: Footprint,
    cards: Sequence[str],
    count: int,
    room: Room,
    rules: PlacementRules,
    limits: Room,
) -> Iterator[tuple[str, ...]]:
    """Sets of so many cards, in the order in which they are tried."""
    free = _to_give(footprint, cards, count, room, rules, limits)
    able = [card for card in cards if free[card] > 0]
    if len(able) < count:
        return
    largest = sorted(able, key=lambda card: -free[card])[:count]
    if rules.layout != "balanced" and sum(free[card] for card in largest) < footprint.bytes:
        return
    with_most = tuple(card for card in able if card in largest)
    in_order = _first_in_order(
        able, free, count, 0 if rules.layout == "balanced" else footprint.bytes
    )
    yield from (with_most, in_order) if rules.policy == "most-free" else (in_order, with_most)
    if (
        footprint.pieces and comb(len(able), count) <= MOST_TRIED
    ):  # a cut may fail where the bytes would do
        yield from combinations(able, count)


def _to_give(
    footprint: Footprint,
    cards: Sequence[str],
    count: int,
    room: Room,
    rules: PlacementRules,
    limits: Room,
) -> dict[str, int]:
    """What each card can give to a split over so many; 0 where it cannot take its part."""
    if rules.layout == "whole":
        return {card: limits[card] if room[card] >= limits[card] else 0 for card in cards}
    if rules.layout == "balanced":
        if footprint.heads and footprint.heads % count:
            return dict.fromkeys(cards, 0)
        part = _with_overhead(max(_equal(footprint, count) or (footprint.bytes,)), rules)
        return {
            card: room[card] if _held_to(room[card], card, rules) >= part else 0 for card in cards
        }
    return {card: _to_spend(room[card], card, rules) for card in cards}


def _first_in_order(cards: Sequence[str], free: Room, count: int, size: int) -> tuple[str, ...]:
    """The first so many cards, in order, that have `size` together. The largest of them must have it."""
    chosen: list[str] = []
    left = size
    for place, card in enumerate(cards):
        missing = count - len(chosen)
        if not missing:
            break
        after = sorted((free[other] for other in cards[place + 1 :]), reverse=True)[: missing - 1]
        if len(after) == missing - 1 and free[card] + sum(after) >= left:
            chosen.append(card)
            left -= free[card]
    return tuple(chosen)


def _held_to(free: int, card: str, rules: PlacementRules) -> int:
    """The room on a card, or less where its owner said how much it may take there."""
    return min(free, rules.card_bytes.get(card, 0)) if rules.card_bytes else free


def _to_spend(free: int, card: str, rules: PlacementRules) -> int:
    """The model's own bytes that a card can take in proportion: less the margin, and room for the overhead."""
    spend = free - rules.margin_bytes
    if rules.card_bytes:
        spend = _held_to(spend, card, rules)
    return int(spend / (1 + rules.overhead)) if rules.overhead else spend


def _with_overhead(part: int, rules: PlacementRules) -> int:
    return ceil(part * (1 + rules.overhead)) if rules.overhead else part


# -- how much to each ---------------------------------------------------------------------------------------------


def _equal(footprint: Footprint, count: int) -> tuple[int, ...] | None:
    """Equal parts, to a byte; or to the nearest piece, where it may be cut only between pieces."""
    size = footprint.bytes
    if not footprint.pieces:
        return tuple(size // count + (place < size % count) for place in range(count))
    return _cut(
        _sums(footprint), [size * (place + 1) / count for place in range(count)], [size] * count
    )


def _in_proportion(footprint: Footprint, free: Sequence[int]) -> tuple[int, ...] | None:
    """Parts in proportion to what is free, none larger than that."""
    size, total = footprint.bytes, sum(free)
    if min(free) <= 0 or total < size:
        return None
    if footprint.pieces:
        return _proportionally(_sums(footprint), free)
    ends = [size * until // total for until in accumulate(free)]
    # A difference of two roundings may be a byte too large; the next card then has a byte to spare.
    parts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    over = 0
    for place, most in enumerate(free):
        over += max(0, parts[place] - most)
        parts[place] = min(parts[place], most)
    for place, most in enumerate(free):
        more = min(over, most - parts[place])
        parts[place] += more
        over -= more
    while 0 in parts and max(parts) > 1:  # no card without a byte, however few they are
        parts[parts.index(max(parts))] -= 1
        parts[parts.index(0)] += 1
    return tuple(parts)


def _proportionally(sums: Sequence[int], free: Sequence[int]) -> tuple[int, ...] | None:
    """Whole pieces, in proportion to what is free; where they cannot be cut so, as much to each in turn as it can take."""
    until, total = list(accumulate(free)), sum(free)
    return _cut(sums, [sums[-1] * end / total for end in until], free) or _cut(sums, until, free)


def _sums(footprint: Footprint) -> list[int]:
    """The bytes up to each boundary between pieces, which came out at `footprint.bytes` in all."""
    sums = list(accumulate(footprint.pieces))
    if sums[-1] == footprint.bytes:
        return sums
    return [
        until * footprint.bytes // sums[-1] for until in sums
    ]  # measured, it was another size than its pieces


def _packed(sums: Sequence[int], most: Sequence[int]) -> list[int] | None:
    """The boundary that each card in turn reaches when it takes all that it can; None where pieces are left over."""
    reached, taken, ends = 0, 0, []
    for size in most:
        if size > 0:
            reached = bisect_right(sums, taken + size, lo=reached)
            taken = sums[reached - 1] if reached else 0
        ends.append(reached)
    return ends if reached == len(sums) else None


def _cut(
    sums: Sequence[int], ideal: Sequence[float], most: Sequence[int]
) -> tuple[int, ...] | None:
    """Consecutive pieces for each card, cut as near to the `ideal` running sums as they can, none above `most`."""
    count, pieces = len(most), len(sums)
    if pieces < count or _packed(sums, most) is None:
        return None
    # How far each card must come at least, so that those after it can hold the rest.
    must, left = [pieces] * count, pieces
    for place in range(count - 1, 0, -1):
        total = sums[left - 1] if left else 0
        left = min(left, bisect_left(sums, total - most[place]) + 1) if total > most[place] else 0
        must[place - 1] = left
    parts, start = [], 0
    for place in range(count):
        taken = sums[start - 1] if start else 0
        low = max(start + 1, must[place])
        high = min(bisect_right(sums, taken + most[place]), pieces - (count - 1 - place))
        if low > high:
            return None
        end = _nearest(sums, ideal[place], low, high)
        parts.append(sums[end - 1] - taken)
        start = end
    return tuple(parts) if start == pieces else None


def _nearest(sums: Sequence[int], ideal: float, low: int, high: int) -> int:
    """Of the boundaries from `low` to `high` the one that is nearest to the ideal, the lower of two."""
    end = min(max(bisect_left(sums, ideal) + 1, low), high)  # the first that reaches it
    return end - 1 if end > low and ideal - sums[end - 2] <= sums[end - 1] - ideal else end
