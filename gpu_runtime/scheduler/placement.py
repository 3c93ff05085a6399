"""Finds the device for a model from the devices' free bytes. One card is preferred to several.

Pure. A candidate that does not fit is returned with the reason. `plan` shows such a candidate, and
`eviction` tries to make room on its card. A model may be divided over several cards, which are
claimed in the order of their index. Each layout divides in its own way:

- `balanced` puts equal parts on all cards, as tensor parallelism needs.
- `proportional` makes each part proportional to the card's room.
- `whole` claims all bytes of each card.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, combinations, pairwise
from math import ceil, comb

from msgspec.structs import replace

from ..errors import BadSetting
from ..facts import (
    LAYOUTS,
    Candidate,
    Event,
    Footprint,
    Grant,
    PlacementRules,
    Share,
    Shares,
    Verdict,
    Wait,
    where,
)
from ..facts.decisions import verdict_kind
from ..units import counted, show_bytes, show_seconds

MOST_RUNNERS_UP = 8  # alternatives that are recorded with a decision, one sentence each


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
        return pieces_in_proportion(_sums(footprint.pieces, footprint.bytes), free)
    # No part is above the free bytes of its card, since `size` is at most `total`.
    ends = [size * until // total for until in accumulate(free)]
    parts = [end - start for start, end in pairwise([0, *ends])]
    # Every card gets at least one byte, however small the model is.
    while 0 in parts and max(parts) > 1:
        largest = parts.index(max(parts))
        empty = parts.index(0)
        parts[largest] -= 1
        parts[empty] += 1
    return tuple(parts)


def pieces_in_proportion(sums: Sequence[int], free: Sequence[int]) -> tuple[int, ...] | None:
    """Parts of whole pieces in proportion to the free bytes of each card; None if nothing fits.

    If proportional parts are not possible, each card is filled in order.
    """
    if _filled(sums, free) < len(sums):
        return None
    until = list(accumulate(free))
    size, total = sums[-1], until[-1]
    ideal = [size * end / total for end in until]
    return _cut(sums, ideal, free) or _fill_in_order(sums, free)


@lru_cache(8)
def _sums(pieces: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The bytes up to each boundary between `pieces`, scaled to the total `size`."""
    sums = tuple(accumulate(pieces))
    total = sums[-1]
    if total == size:
        return sums
    # The measured size of the model differs from the sum of its pieces.
    return tuple([until * size // total for until in sums])


def _filled(sums: Sequence[int], free: Sequence[int]) -> int:
    """How many pieces fit if each card is filled in order."""
    reached = taken = 0
    for size in free:
        end = bisect_right(sums, taken + size, reached)
        if end > reached:
            reached, taken = end, sums[end - 1]
    return reached


def _cut(
    sums: Sequence[int], ideal: Sequence[float], most: Sequence[int]
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


def _nearest(sums: Sequence[int], ideal: float, low: int, high: int) -> int:
    """The index from `low` to `high` whose running sum is nearest to `ideal`.

    If two running sums are equally near, the lower index is returned.
    """
    end = bisect_left(sums, ideal, low - 1, high - 1) + 1
    if end > low and ideal - sums[end - 2] <= sums[end - 1] - ideal:
        return end - 1
    return end


# -- which cards a divided model gets --------------------------------------------------------------


# If the model has pieces, and there are at most this many sets of cards, all sets are tried.
# Otherwise only two sets are tried: the first cards with enough room, and the cards with the most
# room.
MOST_TRIED = 300

Room = Mapping[str, int]  # bytes by device id


def divisions(
    footprint: Footprint, room: Room, rules: PlacementRules, limits: Room
) -> Iterator[Candidate]:
    """Yields the divisions of the `footprint` that fit: one for each number of cards, fewest first.

    `room` is the free bytes by device id, in the order of the devices. `limits` are the devices'
    budgets, which the layout `whole` needs. The `rules` name the layout, the allowed devices and
    the number of cards. If a card cannot take its part, other sets of cards are tried.
    """
    for parts in sets_that_fit(footprint, room, rules, limits):
        yield _divided(room, parts, rules, limits)


def sets_that_fit(
    footprint: Footprint, room: Room, rules: PlacementRules, limits: Room
) -> Iterator[dict[str, int]]:
    """Yields the sets of cards that `divisions` tries and that fit: for each card, the model's bytes."""
    cards = [card for card in room if not rules.devices or card in rules.devices]
    if sum([room[card] for card in cards if room[card] > 0]) < footprint.bytes:
        return
    most = min(rules.most_cards or len(cards), len(cards))
    equal = rules.layout == "balanced"
    free = {} if equal else _to_give(cards, room, rules, limits)
    for count in range(max(2, rules.least_cards), most + 1):
        if equal:
            free = _to_give_equally(footprint, cards, count, room, rules)
        for chosen in _sets(footprint, free, count, rules):
            parts = parts_on(footprint, {card: room[card] for card in chosen}, rules, limits)
            if parts is not None:
                yield parts
                break


def divide(
    footprint: Footprint, room: Room, rules: PlacementRules, limits: Room
) -> Candidate | None:
    """The `footprint`, divided over all cards of this `room`; None if the cards cannot hold it.

    `rules` and `limits` are as in `divisions`.

    >>> gib = 2**30
    >>> divide(Footprint.of(140 * gib), {"cuda:0": 80 * gib, "cuda:1": 80 * gib},
    ...        PlacementRules(layout="balanced"), {}).because
    'cuda:0,1 take 70.0 GiB + 70.0 GiB, of 160 GiB free'
    """
    parts = parts_on(footprint, room, rules, limits)
    return None if parts is None else _divided(room, parts, rules, limits)


def _divided(room: Room, parts_by_card: Room, rules: PlacementRules, limits: Room) -> Candidate:
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


def parts_on(
    footprint: Footprint, room: Room, rules: PlacementRules, limits: Room
) -> dict[str, int] | None:
    """The model's own bytes on each card of the `room`; None if the cards cannot hold it.

    Every card gets a part. If a card without a part were accepted, `eviction` would evict nothing from
    that card, and the model could still not be placed.
    """
    if footprint.bytes < len(room):
        return None
    if rules.layout == "balanced":
        parts = _fitting_equal_parts(footprint, room, rules)
    elif rules.layout == "whole":
        if not all([free >= limits[card] for card, free in room.items()]):
            return None
        parts = parts_in_proportion(footprint, [limits[card] for card in room])
    elif rules.card_bytes or rules.overhead:
        free = [_to_spend(size, card, rules) for card, size in room.items()]
        parts = parts_in_proportion(footprint, free)
    else:
        parts = parts_in_proportion(
            footprint, [free - rules.margin_bytes for free in room.values()]
        )
    if parts is None or 0 in parts:
        return None
    return dict(zip(room, parts, strict=True))


def _fitting_equal_parts(
    footprint: Footprint, room: Room, rules: PlacementRules
) -> tuple[int, ...] | None:
    """Equal parts for the cards of the `room`; None if they cannot share the heads, or have no room."""
    parts = equal_parts(footprint, len(room))
    if parts is None or not _share_heads_equally(footprint, len(room), rules):
        return None
    # Any card may get the largest part, so every card must have room for it.
    part = _with_overhead(max(parts), rules)
    if all([_held_to(free, card, rules) >= part for card, free in room.items()]):
        return parts
    return None


def _share_heads_equally(footprint: Footprint, count: int, rules: PlacementRules) -> bool:
    """Whether `count` cards can hold equal numbers of attention heads, as tensor parallelism needs.

    If the number of heads is unknown, only a power of two is likely to divide it. So any other
    number of cards is used only if the user named exactly this number.
    """
    if footprint.heads:
        return footprint.heads % count == 0
    if rules.least_cards == count:
        return True
    return count & (count - 1) == 0


def claimed(footprint: Footprint, cards: Sequence[str], rules: PlacementRules, limits: Room) -> int:
    """The most bytes that the `footprint` can claim on these `cards` together.

    The overhead of each card's part is rounded up. `rules` and `limits` are as in `divisions`.
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
    footprint: Footprint, free: Room, count: int, rules: PlacementRules
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
    cards: Sequence[str], room: Room, rules: PlacementRules, limits: Room
) -> dict[str, int]:
    """Bytes that each card can give to a model whose parts may differ; 0 if the card is not free."""
    if rules.layout == "whole":
        return {card: limits[card] if room[card] >= limits[card] else 0 for card in cards}
    return {card: _to_spend(room[card], card, rules) for card in cards}


def _to_give_equally(
    footprint: Footprint, cards: Sequence[str], count: int, room: Room, rules: PlacementRules
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


def _first_in_order(cards: Sequence[str], free: Room, count: int, size: int) -> tuple[str, ...]:
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


def _held_to(free: int, card: str, rules: PlacementRules) -> int:
    """The free bytes of a card, or fewer if the rules limit the model's bytes on this card."""
    return min(free, rules.card_bytes.get(card, 0)) if rules.card_bytes else free


def _to_spend(free: int, card: str, rules: PlacementRules) -> int:
    """The bytes of the model that a card can hold beside the margin and the overhead."""
    spend = free - rules.margin_bytes
    if rules.card_bytes:
        spend = _held_to(spend, card, rules)
    return int(spend / (1 + rules.overhead)) if rules.overhead else spend


def _with_overhead(part: int, rules: PlacementRules) -> int:
    return ceil(part * (1 + rules.overhead)) if rules.overhead else part


# -- the candidates for a model --------------------------------------------------------------------


Bytes = Mapping[str, int]  # by device id


def check_layout(name: str) -> str:
    """Returns `name` if it is the name of a layout. Raises BadSetting for other names."""
    if name not in LAYOUTS:
        raise BadSetting("layout", name, f"one of {', '.join(LAYOUTS)}")
    return name


def place(
    footprint: Footprint, room: Bytes, rules: PlacementRules, limits: Bytes | None = None
) -> tuple[Candidate, ...]:
    """The candidates for the `footprint`: first candidates that fit, then candidates that do not.

    Each group starts with its best candidate. Several cards are tried only if no single card has
    the room, or if `rules` require several cards.

    `room` is the bytes that may be granted, by device id. The order of `room` decides between equal
    devices. `limits` are the devices' budgets in bytes; a claim on a whole card has this size. If
    `limits` is None, `room` is used. The `rules` name the policy, layout and allowed devices.
    """
    limits = room if limits is None else limits
    alone = on_one_card(footprint, room, rules, limits) if may_use_one_card(rules) else ()
    if alone and alone[0].fits:
        return alone
    if not may_split(rules):
        return alone
    return (*divisions(footprint, room, rules, limits), *alone)


def on_one_card(
    footprint: Footprint, room: Bytes, rules: PlacementRules, limits: Bytes
) -> tuple[Candidate, ...]:
    """One candidate for each device. The order and the parameters are as in `place`."""
    own, found = footprint.bytes, []
    for device in room:
        if rules.devices and device not in rules.devices:
            continue
        limit, free = limits.get(device, 0), _held_to(room[device], device, rules)
        size = claim(footprint, rules, limit)
        filled = (Share(device, own),) if size != own else ()
        fits = free >= size
        if fits and filled and size == limit:
            because = f"{device} is free and would be taken whole"
        else:
            because = _because(device, size, free, rules)
        found.append(Candidate((Share(device, size),), fits, because, filled=filled))
    sign = -1 if rules.policy == "most-free" else 1

    def key(candidate: Candidate) -> tuple[bool, int]:
        free = room[candidate.shares[0].device]
        return (False, sign * free) if candidate.fits else (True, -free)

    return tuple(sorted(found, key=key))


def claim(footprint: Footprint, rules: PlacementRules, limit: int) -> int:
    """Bytes that the `footprint` claims of one card with the budget `limit`, in bytes.

    A result above `limit` means that the model cannot fit. With the layout `whole`, the claim is
    the whole card. Without a factor in the `rules`, the claim is the estimate in `footprint`. With
    a factor, NDIF's rule applies: the claim is the weights times `rules.factor`. If this product is
    at least `rules.largest_fraction` of the card, the claim is the whole card. The claim is never
    below the estimate.

    >>> rules = PlacementRules(factor=3.0, largest_fraction=0.8)
    >>> [claim(Footprint.of(size), rules, 80) for size in (10, 21, 22, 90)]
    [30, 63, 80, 90]
    """
    size = footprint.bytes
    if rules.layout == "whole":
        return max(size, limit)
    if not rules.factor:
        return size
    weights = sum(part.bytes for part in footprint.parts if part.name == "weights") or size
    wanted = max(size, ceil(weights * rules.factor))
    if wanted < rules.largest_fraction * limit:
        return wanted
    return max(size, limit)


def _because(device: str, size: int, free: int, rules: PlacementRules) -> str:
    if free < size:
        free = max(free, 0)
        missing = show_bytes(size - free)
        return f"{device} has {show_bytes(free)} free, {missing} too little"
    if rules.policy == "most-free":
        return f"{device} has the most free: {show_bytes(free)}"
    rest = show_bytes(free - size)
    return f"{device} has {show_bytes(free)} free and would keep {rest}"


# -- why the other candidates were not chosen ------------------------------------------------------


def with_runners_up(
    events: Iterable[Event],
    verdict: Verdict,
    rules: PlacementRules,
    room_made: Sequence[Candidate] = (),
) -> list[Event]:
    """The `events`, with the alternatives added to the event that records `verdict`.

    `rules` are the placement rules of the request. `room_made` are the ways to make room that were
    compared before this grant. `room_made` is empty if there was room without evictions.
    """
    action = verdict_kind(verdict)
    found = []
    for event in events:
        if event.action == action:
            event = replace(event, runners_up=alternatives(verdict, rules, room_made))
        found.append(event)
    return found


def alternatives(
    verdict: Verdict, rules: PlacementRules, room_made: Sequence[Candidate] = ()
) -> tuple[str, ...]:
    """The places that were considered and not chosen, each in a sentence with the reason.

    The place closest to being chosen is first. `rules` and `room_made` are as in `with_runners_up`.
    """
    considered: Sequence[Candidate] = verdict.considered
    if isinstance(verdict, Grant):
        chosen = verdict.lease.target or verdict.lease.shares
        considered = runners_up(room_made or considered, chosen, rules)[1:]
    elif isinstance(verdict, Wait) and considered:
        considered = runners_up(considered, considered[0].shares, rules)[1:]
    sentences = []
    for option in considered[:MOST_RUNNERS_UP]:
        place = where(option.shares)
        reason = option.because.removeprefix(f"{place} ").rstrip(".")
        sentences.append(f"{place}: {reason}.")
    return tuple(sentences)


def runners_up(
    considered: Iterable[Candidate], taken: Shares, rules: PlacementRules
) -> tuple[Candidate, ...]:
    """The `considered` candidates: the chosen candidate first, then all others with a reason.

    The reason states why the candidate was not chosen. `taken` are the chosen shares. If no
    candidate is on the cards of `taken`, the candidates are returned as they are. `rules` are the
    rules of the choice.
    """
    listed = list(considered)
    cards = _cards(taken)
    chosen = next((c for c in listed if _cards(c.shares) == cards), None)
    if chosen is None:
        return tuple(listed)
    others = []
    for candidate in listed:
        if candidate is not chosen:
            because = _why_not(candidate, chosen, rules)
            others.append(replace(candidate, because=because))
    return chosen, *others


def _cards(shares: Shares) -> tuple[str, ...]:
    return tuple(share.device for share in shares)


def _why_not(other: Candidate, chosen: Candidate, rules: PlacementRules) -> str:
    if other.victims:
        return _why_not_evict(other, chosen, rules)
    if not other.fits:
        return other.because
    if len(other.shares) > len(chosen.shares):
        return f"it would take {counted(len(other.shares), 'card')}, not {len(chosen.shares)}"
    if len(other.shares) > 1:
        return "another set of cards comes first"
    chosen_device = chosen.shares[0].device
    room = other.because.removeprefix(f"{other.shares[0].device} ")
    if rules.policy == "most-free":
        return f"{room.removeprefix('has the most free: ')} free, less than {chosen_device}"
    return f"{room}, more than {chosen_device}"


def _why_not_evict(other: Candidate, chosen: Candidate, rules: PlacementRules) -> str:
    """Why `chosen` is better than the candidate `other`, which evicts leases."""
    names = ", ".join(id.partition("/")[2] for id in other.victims)
    head = f"{names} would be evicted"
    if not chosen.victims:
        return head
    fewest = rules.policy == "fewest-evictions" and len(other.victims) > len(chosen.victims)
    if other.worth > chosen.worth and not fewest:
        return f"{head}, and should stay longer"
    other_seconds, chosen_seconds = other.cost_seconds, chosen.cost_seconds
    shown, shown_chosen = show_seconds(other_seconds), show_seconds(chosen_seconds)
    if other_seconds > chosen_seconds + 0.1 and shown != shown_chosen:
        return f"{head}, and would take {shown} to load again, not {shown_chosen}"
    if len(other.victims) > len(chosen.victims):
        return f"{len(other.victims)} would be evicted, not {len(chosen.victims)}: {names}"
    if len(other.shares) > len(chosen.shares):
        return f"{head}, and it would take {counted(len(other.shares), 'card')}, not {len(chosen.shares)}"
    return f"{head}, and should stay longer"
