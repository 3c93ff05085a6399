"""Divides a model among several cards.

Pure. Each layout divides in its own way:

- `balanced` puts equal parts on all cards, as tensor parallelism needs.
- `proportional` makes each part proportional to the card's room.
- `whole` claims all bytes of each card.

Cards are claimed in the order of their index. The module `eviction_multi` decides which cards are
emptied for a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from math import ceil, comb

from ..facts import Candidate, Footprint, PlacementRules, Share, where
from ..units import show_bytes
from .parts import can_cut, equal_parts, parts_in_proportion, running_sums

# If the model has pieces, and there are at most this many sets of cards, all sets are tried.
# Otherwise only two sets are tried: the first cards with enough room, and the cards with the most
# room.
MOST_TRIED = 300

Room = Mapping[str, int]  # bytes by device id
Holds = Callable[[Room], bool]


def split(
    footprint: Footprint,
    room: Room,
    rules: PlacementRules,
    limits: Room,
) -> tuple[Candidate, ...]:
    """The divisions of the `footprint` that fit: one for each number of cards, fewest cards first.

    `room` is the free bytes by device id, in the order of the devices. `limits` are the devices'
    budgets, which the layout `whole` needs. The `rules` name the layout, the allowed devices and
    the number of cards. If a card cannot take its part, other sets of cards are tried.
    """
    return tuple(divisions(footprint, room, rules, limits))


def divisions(
    footprint: Footprint,
    room: Room,
    rules: PlacementRules,
    limits: Room,
) -> Iterator[Candidate]:
    """Yields the candidates that `split` returns. Each candidate is computed when it is needed."""
    for parts in sets_that_fit(footprint, room, rules, limits):
        yield _divided(room, parts, rules, limits)


def sets_that_fit(
    footprint: Footprint,
    room: Room,
    rules: PlacementRules,
    limits: Room,
) -> Iterator[dict[str, int]]:
    """Yields the sets of cards that `split` tries and that fit: for each card, the model's bytes."""
    cards = [card for card in room if not rules.devices or card in rules.devices]
    if sum([room[card] for card in cards if room[card] > 0]) < footprint.bytes:
        return
    most = min(rules.most_cards or len(cards), len(cards))
    equal = rules.layout == "balanced"
    free = {} if equal else _to_give(cards, room, rules, limits)
    for count in range(max(2, rules.least_cards), most + 1):
        if equal:
            free = _to_give_equally(footprint, cards, count, room, rules)
        sets = _sets(footprint, free, count, rules)
        parts = _first_that_fits(sets, footprint, room, rules, limits)
        if parts is not None:
            yield parts


def _first_that_fits(
    sets: Iterable[tuple[str, ...]],
    footprint: Footprint,
    room: Room,
    rules: PlacementRules,
    limits: Room,
) -> dict[str, int] | None:
    """The parts of the model on the first of the `sets` of cards that can hold it; else None."""
    for cards in sets:
        parts = _parts(footprint, {card: room[card] for card in cards}, rules, limits)
        if parts is not None:
            return parts
    return None


def divide(
    footprint: Footprint,
    room: Room,
    rules: PlacementRules,
    limits: Room,
) -> Candidate | None:
    """The `footprint`, divided over all cards of this `room`; None if the cards cannot hold it.

    `rules` and `limits` are as in `split`.

    >>> gib = 2**30
    >>> divide(Footprint.of(140 * gib), {"cuda:0": 80 * gib, "cuda:1": 80 * gib},
    ...        PlacementRules(layout="balanced"), {}).because
    'cuda:0,1 take 70.0 GiB + 70.0 GiB, of 160 GiB free'
    """
    parts = _parts(footprint, room, rules, limits)
    return None if parts is None else _divided(room, parts, rules, limits)


def _divided(
    room: Room,
    parts_by_card: Room,
    rules: PlacementRules,
    limits: Room,
) -> Candidate:
    cards, parts = tuple(parts_by_card), tuple(parts_by_card.values())
    if rules.layout == "whole":
        claims = [limits[card] for card in cards]
    else:
        claims = [_with_overhead(part, rules) for part in parts]
    shares = tuple(map(Share, cards, claims))
    filled = tuple(map(Share, cards, parts)) if claims != list(parts) else ()
    sizes = " + ".join([show_bytes(size) for size in claims])
    free = show_bytes(sum([room[card] for card in cards]))
    because = f"{where(shares)} take {sizes}, of {free} free"
    return Candidate(shares, True, because, filled=filled)


def _parts(
    footprint: Footprint,
    room: Room,
    rules: PlacementRules,
    limits: Room,
) -> dict[str, int] | None:
    """The model's own bytes on each card of the `room`; None if the cards cannot hold it."""
    if rules.layout in ("balanced", "whole") and not fitting(footprint, tuple(room), rules, limits)(
        room
    ):
        return None
    if rules.layout == "balanced":
        parts = equal_parts(footprint, len(room))
    elif rules.layout == "whole":
        parts = parts_in_proportion(footprint, [limits[card] for card in room])
    else:
        free = [_to_spend(size, card, rules) for card, size in room.items()]
        parts = parts_in_proportion(footprint, free)
    if parts is None or 0 in parts:
        return None
    return dict(zip(room, parts, strict=True))


# -- whether it fits -------------------------------------------------------------------------------


def fitting(
    footprint: Footprint,
    cards: Sequence[str],
    rules: PlacementRules,
    limits: Room,
) -> Holds:
    """Returns a function that takes the room on `cards`, and returns whether the `footprint` fits.

    Every card must get a part, as in `divide`. If a card without a part were accepted,
    `eviction_multi` would evict nothing from that card, and the model could still not be placed.
    `rules` and `limits` are as in `split`.
    """
    if footprint.bytes < len(cards):
        return _never_holds
    if rules.layout == "whole":
        return _fitting_whole(footprint, cards, limits)
    if rules.layout == "balanced":
        return _fitting_balanced(footprint, cards, rules)
    return _fitting_proportional(footprint, rules)


def _never_holds(room: Room) -> bool:
    return False


def _fitting_whole(
    footprint: Footprint,
    cards: Sequence[str],
    limits: Room,
) -> Holds:
    if parts_in_proportion(footprint, [limits[card] for card in cards]) is None:
        return _never_holds

    def holds(room: Room) -> bool:
        return all([room[card] >= limits[card] for card in cards])

    return holds


def _fitting_balanced(
    footprint: Footprint,
    cards: Sequence[str],
    rules: PlacementRules,
) -> Holds:
    if not _share_heads_equally(footprint, len(cards), rules):
        return _never_holds
    equal = equal_parts(footprint, len(cards))
    if equal is None:
        return _never_holds
    # Any card may get the largest part, so every card must have room for it.
    part = _with_overhead(max(equal), rules)
    if any([_held_to(part, card, rules) < part for card in cards]):
        return _never_holds

    def holds(room: Room) -> bool:
        for card in cards:  # a plain loop, because one plan calls this some hundred times
            if room[card] < part:
                return False
        return True

    return holds


def _share_heads_equally(
    footprint: Footprint,
    count: int,
    rules: PlacementRules,
) -> bool:
    """Whether `count` cards can hold equal numbers of attention heads, as tensor parallelism needs.

    If the number of heads is unknown, only a power of two is likely to divide it. So any other
    number of cards is used only if the user named exactly this number.
    """
    if footprint.heads:
        return footprint.heads % count == 0
    if rules.least_cards == count:
        return True
    return count & (count - 1) == 0


def _fitting_proportional(footprint: Footprint, rules: PlacementRules) -> Holds:
    size = footprint.bytes
    sums = running_sums(footprint) if footprint.pieces else ()
    plain = not (rules.card_bytes or rules.overhead)
    margin = rules.margin_bytes

    def holds(room: Room) -> bool:
        """Whether each card can hold its part. One plan calls this function some hundred times."""
        if plain:
            spend = [free - margin for free in room.values()]
        else:
            spend = [_to_spend(free, card, rules) for card, free in room.items()]
        if sums:
            return can_cut(sums, spend)
        return min(spend) > 0 and sum(spend) >= size

    return holds


def claimed(
    footprint: Footprint,
    cards: Sequence[str],
    rules: PlacementRules,
    limits: Room,
) -> int:
    """The most bytes that the `footprint` can claim on these `cards` together.

    The overhead of each card's part is rounded up. `rules` and `limits` are as in `split`.
    """
    if rules.layout == "whole":
        return sum(limits[card] for card in cards)
    rounding = len(cards) - 1 if rules.overhead else 0
    return _with_overhead(footprint.bytes, rules) + rounding


def least_room(footprint: Footprint, count: int, rules: PlacementRules) -> int:
    """Free bytes without which the `footprint` never fits over `count` cards."""
    if rules.layout in ("balanced", "whole"):
        return footprint.bytes
    return footprint.bytes + count * rules.margin_bytes


def may_split(rules: PlacementRules) -> bool:
    """Whether these `rules` allow several cards."""
    return rules.layout != "single" and rules.most_cards != 1


def may_use_one_card(rules: PlacementRules) -> bool:
    """Whether these `rules` allow a single card."""
    return rules.least_cards <= 1 or not may_split(rules)


# -- which cards -----------------------------------------------------------------------------------


def _sets(
    footprint: Footprint,
    free: Room,
    count: int,
    rules: PlacementRules,
) -> Iterator[tuple[str, ...]]:
    """Sets of `count` cards, in the order in which they are tried.

    `free` is the bytes that each card can give to the model.
    """
    able = [card for card in free if free[card] > 0]
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
    # The model is cut only between pieces, so it may not fit although the bytes are enough.
    if footprint.pieces and comb(len(able), count) <= MOST_TRIED:
        yield from combinations(able, count)


def _to_give(
    cards: Sequence[str],
    room: Room,
    rules: PlacementRules,
    limits: Room,
) -> dict[str, int]:
    """Bytes that each card can give to a model whose parts may differ; 0 if the card is not free."""
    if rules.layout == "whole":
        return {card: limits[card] if room[card] >= limits[card] else 0 for card in cards}
    return {card: _to_spend(room[card], card, rules) for card in cards}


def _to_give_equally(
    footprint: Footprint,
    cards: Sequence[str],
    count: int,
    room: Room,
    rules: PlacementRules,
) -> dict[str, int]:
    """Bytes that each card can give to a model in `count` equal parts; 0 if no part fits."""
    if not _share_heads_equally(footprint, count, rules):
        return dict.fromkeys(cards, 0)
    largest = max(equal_parts(footprint, count) or (footprint.bytes,))
    part = _with_overhead(largest, rules)
    give = {}
    for card in cards:
        give[card] = room[card] if _held_to(room[card], card, rules) >= part else 0
    return give


def _first_in_order(
    cards: Sequence[str],
    free: Room,
    count: int,
    size: int,
) -> tuple[str, ...]:
    """The first set of `count` cards, in the order of `cards`, that has `size` bytes together.

    If no set has so many bytes, the result has fewer than `count` cards.
    """
    chosen: list[str] = []
    left = size
    others = sorted((free[card] for card in cards), reverse=True)  # of the cards that come later
    for card in cards:
        missing = count - len(chosen)
        if not missing:
            break
        others.remove(free[card])
        largest = others[: missing - 1]
        if len(largest) == missing - 1 and free[card] + sum(largest) >= left:
            chosen.append(card)
            left -= free[card]
    return tuple(chosen)


def _held_to(
    free: int,
    card: str,
    rules: PlacementRules,
) -> int:
    """The free bytes of a card, or fewer if the rules limit the model's bytes on this card."""
    return min(free, rules.card_bytes.get(card, 0)) if rules.card_bytes else free


def _to_spend(
    free: int,
    card: str,
    rules: PlacementRules,
) -> int:
    """The bytes of the model that a card can hold beside the margin and the overhead."""
    spend = free - rules.margin_bytes
    if rules.card_bytes:
        spend = _held_to(spend, card, rules)
    return int(spend / (1 + rules.overhead)) if rules.overhead else spend


def _with_overhead(part: int, rules: PlacementRules) -> int:
    return ceil(part * (1 + rules.overhead)) if rules.overhead else part
