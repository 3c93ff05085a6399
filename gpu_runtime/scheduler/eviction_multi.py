"""Makes room on one card, or on several cards at once: chooses the cards, and the leases to evict.

Pure. A lease may have bytes on several of the cards, and free bytes on one card may replace missing
bytes on another card. The search for the leases is that of `victims`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, islice

from ..facts import Candidate, Lease, PlacementRules, Share
from .context import Context
from .evictable import largest_fitting_set
from .splitting import claimed, divide, fitting, least_room, sets_that_fit
from .victims import PartsRoom, Room, first_enough, parts_within, precious_bytes

FEW_CARDS = 4  # up to this many, every set of cards is tried
FEW_PRECIOUS = 8  # up to so many leases that exist nowhere else, every set of them is tried
MOST_POOLS = 100  # such sets, and sets of parts, that are tried

Bytes = Mapping[str, int]  # by device id


def multi_card_ways(
    context: Context,
    idle: Sequence[Lease],
    host_bytes: int,
    limits: Bytes,
    host: PartsRoom | None = None,
) -> Iterator[tuple[Candidate, tuple[Lease, ...]]]:
    """Yields the ways to place the request on several cards: a candidate, and the leases to evict.

    Each way is for another set of cards on which evictions can make enough room. The candidate has
    the bytes for each card. `idle` are the leases that may leave, in the order of
    `victims.eviction_order`. `context` holds the free bytes, and `limits` the budgets of the cards
    that may be used. `host_bytes` is the host memory available for weights that exist nowhere else.
    If `host` is given, leases may leave in part, and `host` is the host memory for these parts.
    """
    footprint, rules = context.request.footprint, context.request.placement
    for cards in _sets(context, idle, limits):
        room = _room(cards, context)
        room.own_need = claimed(footprint, cards, rules, limits)
        room.missing += least_room(footprint, len(cards), rules)
        room.holds = fitting(footprint, cards, rules, limits)
        chosen = _victims(idle, room, host_bytes, rules, host)
        if chosen is None:
            continue
        candidate = divide(footprint, room.usable(), rules, limits)
        if candidate is not None:
            yield candidate, chosen


def one_card_victims(
    share: Share,
    context: Context,
    idle: Sequence[Lease],
    host_bytes: int,
    host: PartsRoom | None,
) -> tuple[Lease, ...] | None:
    """The leases to evict for the `share` on one card; None if no set of leases is enough.

    All other parameters are as in `multi_card_ways`.
    """
    room = _room([share.device], context)
    room.own_need = share.bytes
    room.missing += share.bytes
    room.holds = lambda usable: usable[share.device] >= share.bytes
    return _victims(idle, room, host_bytes, context.request.placement, host)


def _room(cards: Iterable[str], context: Context) -> Room:
    """The bytes that the request may use on the `cards`, once all decided steps are done."""
    free = {card: context.room_later[card] for card in cards}
    cap_left = context.cap_left_later
    own_left = context.own_left_later
    return Room(
        free,
        cap_left={card: cap_left[card] for card in free} if cap_left else None,
        cap_owners=context.cap_owners,
        owner=None if own_left is None else context.request.lease.owner,
        own_left=own_left or 0,
    )


def _victims(
    idle: Sequence[Lease],
    room: Room,
    host_bytes: int,
    rules: PlacementRules,
    host: PartsRoom | None,
) -> tuple[Lease, ...] | None:
    """The leases in `idle` to evict; None if all of `idle` together cannot make the room.

    Weights that exist nowhere else leave only if they fit into `host_bytes` of host memory. If
    `host` is given, a lease that does not fit may leave in part. After the call, the returned
    leases have left the `room`.
    """
    search = _fewest if rules.policy == "fewest-evictions" else first_enough
    chosen = search(idle, room, host)
    if chosen is None or precious_bytes(chosen) <= host_bytes:
        return chosen
    room.all_go(chosen, -1)
    useful = list(filter(room.gains, idle))
    pools = _that_the_host_can_take(useful, host_bytes, host is not None)
    for pool in islice(pools, MOST_POOLS):
        chosen = search(pool, room, host)
        if chosen is not None:
            return chosen
        room.all_go(pool, -1)
    return None


def _fewest(pool: Sequence[Lease], room: Room, host: PartsRoom | None) -> tuple[Lease, ...] | None:
    """As `first_enough`, but the leases of the `pool` that free most are taken first.

    Then each lease is exchanged for the smallest one that is enough in its place. No important lease
    leaves if less important leases are enough.
    """
    largest_first = sorted(pool, key=lambda lease: (-lease.importance, -room.gain(lease)))
    found = first_enough(largest_first, room)
    if not found:
        return found
    chosen = {lease.id: lease for lease in found}
    for lease in reversed(found):
        room.let_go(chosen.pop(lease.id), times=-1)
        for other in sorted(pool, key=room.gain):
            if other.id in chosen or other.importance < lease.importance:
                continue
            room.let_go(other)
            if room.enough():
                chosen[other.id] = other
                break
            room.let_go(other, times=-1)
    room.all_go(chosen.values(), -1)
    return first_enough([lease for lease in pool if lease.id in chosen], room, host)


def _that_the_host_can_take(
    pool: Sequence[Lease], host_bytes: int, may_cut: bool
) -> Iterator[list[Lease]]:
    """Yields the `pool` without leases that can neither be dropped nor fit into `host_bytes`.

    Each result has other leases that fit. If `may_cut` is true, further results have parts of the
    leases that do not fit.
    """
    precious = [lease for lease in pool if not lease.droppable]
    for saved in _fitting_sets(precious, host_bytes):
        staying = [lease for lease in precious if lease not in saved]
        yield [lease for lease in pool if lease not in staying]
        left = host_bytes - precious_bytes(saved)
        for parts in parts_within(staying, left) if may_cut else ():
            cut = {part.id: part for part in parts}
            fitting = [lease for lease in pool if lease not in staying or lease.id in cut]
            yield [cut.get(lease.id, lease) for lease in fitting]


def _fitting_sets(precious: Sequence[Lease], host_bytes: int) -> Iterator[tuple[Lease, ...]]:
    """Yields sets of the `precious` leases that fit into `host_bytes`.

    The largest set is first. The empty set follows, which leaves most room for parts of the leases.
    With more than FEW_PRECIOUS leases, no further set is tried.
    """
    yield largest_fitting_set(precious, host_bytes)
    yield ()
    for count in range(len(precious), 0, -1) if len(precious) <= FEW_PRECIOUS else ():
        for saved in combinations(precious, count):
            if precious_bytes(saved) <= host_bytes:
                yield saved


def _sets(context: Context, idle: Sequence[Lease], limits: Bytes) -> list[tuple[str, ...]]:
    """Sets of cards on which room may be made.

    With up to FEW_CARDS cards, all sets are returned whose number of cards might hold the model.
    With more cards, two sets are returned for each such number. One is the first set that could
    hold the model if all idle leases left. The other has the cards with the most free bytes now.
    """
    footprint, rules = context.request.footprint, context.request.placement
    cards = []
    for card in limits:
        if card not in context.blind and (not rules.devices or card in rules.devices):
            cards.append(card)
    whole = _room(cards, context)
    now = dict(whole.usable())
    whole.all_go(idle)
    possible = list(sets_that_fit(footprint, whole.usable(), rules, limits))
    sets: list[tuple[str, ...]] = []
    if len(cards) <= FEW_CARDS:
        for count in sorted(set(map(len, possible))):
            sets += combinations(cards, count)
        return sets
    most_first = sorted(cards, key=lambda card: -now[card])
    for parts in possible:
        first = tuple(parts)
        largest = most_first[: len(first)]
        with_most = tuple(card for card in cards if card in largest)
        sets += dict.fromkeys([first, with_most])
    return sets
