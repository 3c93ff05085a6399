"""How a model is divided among several cards.

Pure. `balanced` gives every card the same, as tensor parallelism needs; `proportional` gives each in proportion to its
room; `whole` takes each card whole. Cards are claimed in the order of their index. Which cards are emptied for a model
is decided in `eviction_multi`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, combinations, pairwise
from math import ceil, comb

from ..facts import Candidate, Footprint, PlacementRules, Share, where
from ..units import show_bytes

MOST_TRIED = 300  # sets of cards of which every one is tried; beyond it the first and the largest

Room = Mapping[str, int]  # bytes by device id
Holds = Callable[[Room], bool]


def split(
    footprint: Footprint, room: Room, rules: PlacementRules, limits: Room
) -> tuple[Candidate, ...]:
    """The ways to divide the `footprint` that fit into this `room`: one for each number of cards, the fewest first.

    `room` is bytes by device id, in the order of the devices; `limits` are their budgets, needed for whole cards. The
    `rules` name the layout, the devices and how many. A card that cannot take its part is skipped, and the search goes
    on.
    """
    cards = [card for card in room if not rules.devices or card in rules.devices]
    most = min(rules.most_cards or len(cards), len(cards))
    found = []
    for count in range(max(2, rules.least_cards), most + 1):
        for chosen in _sets(footprint, cards, count, room, rules, limits):
            chosen_room = {card: room[card] for card in chosen}
            candidate = divide(footprint, chosen_room, rules, limits)
            if candidate is not None:
                found.append(candidate)
                break
    return tuple(found)


def divide(
    footprint: Footprint, room: Room, rules: PlacementRules, limits: Room
) -> Candidate | None:
    """The `footprint`, divided over all cards of this `room`; None if they cannot hold it so.

    `rules` and `limits` as in `split`.

    >>> gib = 2**30
    >>> divide(Footprint.of(140 * gib), {"cuda:0": 80 * gib, "cuda:1": 80 * gib},
    ...        PlacementRules(layout="balanced"), {}).because
    'cuda:0,1 take 70.0 GiB + 70.0 GiB, of 160 GiB free'
    """
    cards = tuple(room)
    holds = fitting(footprint, cards, rules, limits)
    if not holds(room):
        return None
    parts = _parts(footprint, room, rules, limits)
    if parts is None or 0 in parts:
        return None
    if rules.layout == "whole":
        claims = [limits[card] for card in cards]
    else:
        claims = [_with_overhead(part, rules) for part in parts]
    shares = tuple(map(Share, cards, claims))
    filled = tuple(map(Share, cards, parts)) if claims != list(parts) else ()
    sizes = " + ".join(show_bytes(size) for size in claims)
    free = show_bytes(sum(room.values()))
    because = f"{where(shares)} take {sizes}, of {free} free"
    return Candidate(shares, True, because, filled=filled)


def _parts(
    footprint: Footprint, room: Room, rules: PlacementRules, limits: Room
) -> tuple[int, ...] | None:
    """The model's own bytes on each card, by layout."""
    if rules.layout == "balanced":
        return _equal(footprint, len(room))
    if rules.layout == "whole":
        return _in_proportion(footprint, [limits[card] for card in room])
    free = [_to_spend(size, card, rules) for card, size in room.items()]
    return _in_proportion(footprint, free)


# -- whether it fits ----------------------------------------------------------------------------------------------


def fitting(
    footprint: Footprint, cards: Sequence[str], rules: PlacementRules, limits: Room
) -> Holds:
    """A function of the room on these `cards` that returns whether `divide` can divide the `footprint` over them.

    A part must go to each of the cards. (If it said yes for cards that do not all get a part, no lease would be asked
    to leave them, and the model could be placed nowhere.) `rules` and `limits` as in `split`.
    """
    if footprint.bytes < len(cards):
        return _never_holds
    if rules.layout == "whole":
        return _fitting_whole(footprint, cards, limits)
    if rules.layout == "balanced":
        return _fitting_balanced(footprint, cards, rules)
    return _fitting_proportional(footprint, cards, rules)


def _never_holds(room: Room) -> bool:
    return False


def _fitting_whole(footprint: Footprint, cards: Sequence[str], limits: Room) -> Holds:
    if _in_proportion(footprint, [limits[card] for card in cards]) is None:
        return _never_holds

    def holds(room: Room) -> bool:
        return all([room[card] >= limits[card] for card in cards])

    return holds


def _fitting_balanced(footprint: Footprint, cards: Sequence[str], rules: PlacementRules) -> Holds:
    if footprint.heads and footprint.heads % len(cards):
        return _never_holds
    equal = _equal(footprint, len(cards))
    if equal is None:
        return _never_holds
    # Each card must be able to take the largest part, whichever it gets.
    part = _with_overhead(max(equal), rules)

    def holds(room: Room) -> bool:
        return all([_held_to(room[card], card, rules) >= part for card in cards])

    return holds


def _fitting_proportional(
    footprint: Footprint, cards: Sequence[str], rules: PlacementRules
) -> Holds:
    size = footprint.bytes
    sums = _sums(footprint) if footprint.pieces else []
    plain = not (rules.card_bytes or rules.overhead)
    margin = rules.margin_bytes

    def holds(room: Room) -> bool:  # some hundred times for one plan
        if plain:
            spend = [room[card] - margin for card in cards]
        else:
            spend = [_to_spend(room[card], card, rules) for card in cards]
        if min(spend) <= 0 or sum(spend) < size:
            return False
        if not sums:
            return True
        ends = _packed(sums, spend)
        if ends is None:
            return False
        # Mostly every card has some piece. Then no cut needs to be looked for.
        if all([before < end for before, end in pairwise([0, *ends])]):
            return True
        return _proportionally(sums, spend) is not None

    return holds


def claimed(footprint: Footprint, cards: Sequence[str], rules: PlacementRules, limits: Room) -> int:
    """Bytes that the `footprint` claims of these `cards` together, at most.

    Each card's part of an overhead is rounded up. `rules` and `limits` as in `split`.
    """
    if rules.layout == "whole":
        return sum(limits[card] for card in cards)
    rounding = len(cards) - 1 if rules.overhead else 0
    return _with_overhead(footprint.bytes, rules) + rounding


def may_split(rules: PlacementRules) -> bool:
    """Whether these `rules` allow several cards."""
    return rules.layout != "single" and rules.most_cards != 1


def may_use_one_card(rules: PlacementRules) -> bool:
    """Whether these `rules` allow a single card."""
    return rules.least_cards <= 1 or not may_split(rules)


# -- which cards --------------------------------------------------------------------------------------------------


def _sets(
    footprint: Footprint,
    cards: Sequence[str],
    count: int,
    room: Room,
    rules: PlacementRules,
    limits: Room,
) -> Iterator[tuple[str, ...]]:
    """Sets of `count` cards, in the order in which they are tried."""
    free = _to_give(footprint, cards, count, room, rules, limits)
    able = [card for card in cards if free[card] > 0]
    if len(able) < count:
        return
    balanced = rules.layout == "balanced"
    largest = sorted(able, key=lambda card: -free[card])[:count]
    if not balanced and sum(free[card] for card in largest) < footprint.bytes:
        return
    with_most = tuple(card for card in able if card in largest)
    in_order = _first_in_order(able, free, count, 0 if balanced else footprint.bytes)
    if rules.policy == "most-free":
        yield with_most
        yield in_order
    else:
        yield in_order
        yield with_most
    # A cut between pieces may fail although the bytes suffice.
    if footprint.pieces and comb(len(able), count) <= MOST_TRIED:
        yield from combinations(able, count)


def _to_give(
    footprint: Footprint,
    cards: Sequence[str],
    count: int,
    room: Room,
    rules: PlacementRules,
    limits: Room,
) -> dict[str, int]:
    """Bytes that each card can give to a split over `count` cards; 0 if it cannot take its part."""
    if rules.layout == "whole":
        return {card: limits[card] if room[card] >= limits[card] else 0 for card in cards}
    if rules.layout != "balanced":
        return {card: _to_spend(room[card], card, rules) for card in cards}
    if footprint.heads and footprint.heads % count:
        return dict.fromkeys(cards, 0)
    largest = max(_equal(footprint, count) or (footprint.bytes,))
    part = _with_overhead(largest, rules)
    give = {}
    for card in cards:
        give[card] = room[card] if _held_to(room[card], card, rules) >= part else 0
    return give


def _first_in_order(cards: Sequence[str], free: Room, count: int, size: int) -> tuple[str, ...]:
    """The first `count` cards, in order, that have `size` together. The largest of them must have it."""
    chosen: list[str] = []
    left = size
    for index, card in enumerate(cards):
        missing = count - len(chosen)
        if not missing:
            break
        others = sorted((free[other] for other in cards[index + 1 :]), reverse=True)
        largest = others[: missing - 1]
        if len(largest) == missing - 1 and free[card] + sum(largest) >= left:
            chosen.append(card)
            left -= free[card]
    return tuple(chosen)


def _held_to(free: int, card: str, rules: PlacementRules) -> int:
    """The room on a card, or less if the rules bound what the model may take there."""
    return min(free, rules.card_bytes.get(card, 0)) if rules.card_bytes else free


def _to_spend(free: int, card: str, rules: PlacementRules) -> int:
    """The model's own bytes that a card can take in proportion: without the margin and the overhead."""
    spend = free - rules.margin_bytes
    if rules.card_bytes:
        spend = _held_to(spend, card, rules)
    return int(spend / (1 + rules.overhead)) if rules.overhead else spend


def _with_overhead(part: int, rules: PlacementRules) -> int:
    return ceil(part * (1 + rules.overhead)) if rules.overhead else part


# -- how much to each ---------------------------------------------------------------------------------------------


def _equal(footprint: Footprint, count: int) -> tuple[int, ...] | None:
    """Equal parts, to a byte; or to the nearest piece, if it may be cut only between pieces."""
    size = footprint.bytes
    if not footprint.pieces:
        part, rest = divmod(size, count)
        return tuple(part + (index < rest) for index in range(count))
    ideal = [size * (index + 1) / count for index in range(count)]
    return _cut(_sums(footprint), ideal, [size] * count)


def _in_proportion(footprint: Footprint, free: Sequence[int]) -> tuple[int, ...] | None:
    """Parts in proportion to the free bytes, none larger than those; None if they do not fit."""
    size, total = footprint.bytes, sum(free)
    if min(free) <= 0 or total < size:
        return None
    if footprint.pieces:
        return _proportionally(_sums(footprint), free)
    ends = [size * until // total for until in accumulate(free)]
    parts = [end - start for start, end in pairwise([0, *ends])]
    _move_excess(parts, free)
    # No card is left without a byte, however small the model is.
    while 0 in parts and max(parts) > 1:
        parts[parts.index(max(parts))] -= 1
        parts[parts.index(0)] += 1
    return tuple(parts)


def _move_excess(parts: list[int], free: Sequence[int]) -> None:
    """Moves bytes from parts that are too large for their card to cards that have room.

    A difference of two roundings may be a byte too large; the next card then has a byte to spare.
    """
    over = 0
    for index, most in enumerate(free):
        over += max(0, parts[index] - most)
        parts[index] = min(parts[index], most)
    for index, most in enumerate(free):
        more = min(over, most - parts[index])
        parts[index] += more
        over -= more


def _proportionally(sums: Sequence[int], free: Sequence[int]) -> tuple[int, ...] | None:
    """Whole pieces, in proportion to the free bytes; if they cannot be cut so, each card in turn is filled."""
    until, total = list(accumulate(free)), sum(free)
    ideal = [sums[-1] * end / total for end in until]
    return _cut(sums, ideal, free) or _cut(sums, until, free)


def _sums(footprint: Footprint) -> list[int]:
    """The bytes up to each boundary between pieces, scaled so that all pieces are `footprint.bytes`."""
    sums = list(accumulate(footprint.pieces))
    total = sums[-1]
    if total == footprint.bytes:
        return sums
    # The model was measured, and has another size than its pieces.
    return [until * footprint.bytes // total for until in sums]


def _packed(sums: Sequence[int], most: Sequence[int]) -> list[int] | None:
    """The boundary that each card in turn reaches if it takes all that it can; None if pieces are left over."""
    reached = taken = 0
    ends = []
    for size in most:
        if size > 0:
            reached = bisect_right(sums, taken + size, lo=reached)
            taken = sums[reached - 1] if reached else 0
        ends.append(reached)
    return ends if reached == len(sums) else None


def _cut(
    sums: Sequence[int], ideal: Sequence[float], most: Sequence[int]
) -> tuple[int, ...] | None:
    """Bytes for each card, in consecutive whole pieces; None if it cannot be cut so.

    The cuts are as near to the `ideal` running sums as possible, and no part is above `most`.
    """
    count, pieces = len(most), len(sums)
    if pieces < count or _packed(sums, most) is None:
        return None
    least = _least_ends(sums, most)
    parts = []
    start = 0
    for index in range(count):
        taken = sums[start - 1] if start else 0
        cards_after = count - 1 - index
        low = max(start + 1, least[index])
        high = min(bisect_right(sums, taken + most[index]), pieces - cards_after)
        if low > high:
            return None
        end = _nearest(sums, ideal[index], low, high)
        parts.append(sums[end - 1] - taken)
        start = end
    return tuple(parts) if start == pieces else None


def _least_ends(sums: Sequence[int], most: Sequence[int]) -> list[int]:
    """The boundary that each card must reach at least, so that those after it can hold the rest."""
    left = len(sums)
    ends = [left] * len(most)
    for index in range(len(most) - 1, 0, -1):
        total = sums[left - 1] if left else 0
        rest = total - most[index]
        left = min(left, bisect_left(sums, rest) + 1) if rest > 0 else 0
        ends[index - 1] = left
    return ends


def _nearest(sums: Sequence[int], ideal: float, low: int, high: int) -> int:
    """Of the boundaries from `low` to `high` the one that is nearest to the ideal, the lower of two."""
    first_above = bisect_left(sums, ideal) + 1
    end = min(max(first_above, low), high)
    if end > low and ideal - sums[end - 2] <= sums[end - 1] - ideal:
        return end - 1
    return end
