"""Makes room on several cards at once: chooses the cards, and the leases to evict.

Pure. A lease may have bytes on several of the cards, and free bytes on one card may replace missing
bytes on another card. So leases are marked as victims one by one, in order, until the model fits.
Finally, every victim that is not needed is taken off the list again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, islice
from math import comb

from ..facts import Candidate, Lease, PlacementRules, Request, Share
from .context import Context
from .evictable import largest_fitting_set
from .splitting import claimed, divide, fitting, least_room, sets_that_fit
from .victims import PartsRoom, freed_bytes, part_of, parts_within, precious_bytes

FEW_CARDS = 4  # up to this many, every set of cards is tried
FEW_PRECIOUS = 8  # up to so many leases that exist nowhere else, every set of them is tried
MOST_POOLS = 100  # such sets, and sets of parts, that are tried
MOST_SETS = 2_000  # sets of leases that the search for the smallest set tries

Bytes = Mapping[str, int]  # by device id


def multi_card_ways(
    request: Request,
    context: Context,
    idle: Sequence[Lease],
    host_bytes: int,
    limits: Bytes,
    host: PartsRoom | None = None,
) -> Iterator[tuple[Candidate, tuple[Lease, ...]]]:
    """Yields the ways to place the `request` on several cards: a candidate, and the leases to evict.

    Each way is for another set of cards on which evictions can make enough room. The candidate has
    the bytes for each card. `idle` are the leases that may leave, in the order of
    `victims.eviction_order`. `context` holds the free bytes, and `limits` the budgets of the cards
    that may be used. `host_bytes` is the host memory available for weights that exist nowhere else.
    If `host` is given, leases may leave in part, and `host` is the host memory for these parts.
    """
    footprint, rules = request.footprint, request.placement
    for cards in _sets(request, context, idle, limits):
        room = _Room(cards, context, request.lease.owner)
        room.own_need = claimed(footprint, cards, rules, limits)
        room.missing += least_room(footprint, len(cards), rules)
        room.holds = fitting(footprint, cards, rules, limits)
        chosen = _victims_within_host(idle, room, host_bytes, rules, host is not None)
        if chosen is None:
            continue
        if host is not None:
            chosen = _without_needless_pieces(chosen, room, host)
        candidate = divide(footprint, room.usable(), rules, limits)
        if candidate is not None:
            yield candidate, chosen


def within_host(
    share: Share,
    request: Request,
    context: Context,
    idle: Sequence[Lease],
    host_bytes: int,
    host: PartsRoom | None,
) -> tuple[Lease, ...] | None:
    """The leases to evict for the `share` on one card, if host memory cannot take each of them.

    The search tries more sets of leases than the usual one for a single card, and parts of leases.
    The result is None if no set is enough. All other parameters are as in `multi_card_ways`.
    """
    room = _Room([share.device], context, request.lease.owner)
    room.own_need = share.bytes
    room.missing += share.bytes
    room.holds = lambda usable: usable[share.device] >= share.bytes
    may_cut = host is not None
    chosen = _victims_within_host(idle, room, host_bytes, request.placement, may_cut)
    if chosen is None or host is None:
        return chosen
    return _without_needless_pieces(chosen, room, host)


def _victims_within_host(
    idle: Sequence[Lease],
    room: _Room,
    host_bytes: int,
    rules: PlacementRules,
    may_cut: bool,
) -> tuple[Lease, ...] | None:
    """The leases in `idle` to evict; None if all of `idle` together cannot make the room.

    Weights that exist nowhere else leave only if they fit into `host_bytes` of host memory. If
    `may_cut` is true, a lease that does not fit may leave in part. After the call, the returned
    leases have left the `room`.
    """
    fewest = rules.policy == "fewest-evictions"
    chosen = _victims(idle, room, fewest=fewest)
    if chosen is None or precious_bytes(chosen) <= host_bytes:
        return chosen
    room.all_go(chosen, -1)
    useful = list(filter(room.gains, idle))
    for pool in islice(_that_the_host_can_take(useful, host_bytes, may_cut), MOST_POOLS):
        chosen = _victims(pool, room, fewest=fewest)
        if chosen is not None:
            return chosen
        room.all_go(pool, -1)
    return None


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


def _sets(
    request: Request,
    context: Context,
    idle: Sequence[Lease],
    limits: Bytes,
) -> list[tuple[str, ...]]:
    """Sets of cards on which room may be made.

    With up to FEW_CARDS cards, all sets are returned whose number of cards might hold the model.
    With more cards, two sets are returned for each such number. One is the first set that could
    hold the model if all idle leases left. The other has the cards with the most free bytes now.
    """
    rules = request.placement
    cards = []
    for card in limits:
        if card not in context.blind and (not rules.devices or card in rules.devices):
            cards.append(card)
    whole = _Room(cards, context, request.lease.owner)
    now = dict(whole.usable())
    whole.all_go(idle)
    possible = list(sets_that_fit(request.footprint, whole.usable(), rules, limits))
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


class _Room:
    """The bytes that a divided model may use on each card, while leases are tentatively evicted."""

    def __init__(
        self,
        cards: Iterable[str],
        context: Context,
        owner: str,
    ) -> None:
        self.free = {card: context.room_later[card] for card in cards}
        self.cap_left = {}
        if context.cap_left_later:
            self.cap_left = {card: context.cap_left_later[card] for card in self.free}
        self.cap_owners = context.cap_owners
        self.own_left = context.own_left_later
        self.owner = None if self.own_left is None else owner  # the owner that has a limit
        self.limited = bool(self.cap_left) or self.owner is not None
        self.own_need = 0  # bytes that the new model claims of `own_left`
        self.missing = -sum(self.free.values())  # above 0: the cards together have too few bytes
        self.holds: Callable[[Bytes], bool]  # whether the model fits into these bytes

    def usable(self) -> Bytes:
        """The usable bytes of each card, within the operator's cap. Do not change the result."""
        if not self.cap_left:
            return self.free
        return {card: min(size, self.cap_left[card]) for card, size in self.free.items()}

    def enough(self) -> bool:
        """Whether the model fits now. One plan calls this function some hundred times."""
        if self.missing > 0:
            return False
        if not self.limited:
            return self.holds(self.free)
        return not self.above_own_limit and self.holds(self.usable())

    @property
    def above_own_limit(self) -> bool:
        """Whether the new model would exceed the memory limit of its owner."""
        return self.own_left is not None and self.own_left < self.own_need

    def gains(self, lease: Lease) -> bool:
        """Whether evicting this `lease` helps."""
        if self.above_own_limit and lease.owner == self.owner:
            return True
        for share in lease.shares:  # a plain loop: it runs for every set of cards and every lease
            if share.device in self.free:
                return True
        return False

    def let_go(self, lease: Lease, times: int = 1) -> int:
        """Counts the `lease` as evicted, and returns the bytes that the cards gain.

        If `times` is -1, the lease is counted as back on its cards. If the lease has a target, only
        the bytes in the target are evicted.
        """
        free, gained = self.free, 0
        for share in lease.freed_by(lease.target) if lease.target else lease.shares:
            device = share.device
            if device in free:
                size = times * share.bytes
                free[device] += size
                gained += size
        self.missing -= gained
        if self.limited:
            self._raise_limits(lease, times)
        return gained

    def _raise_limits(self, lease: Lease, times: int) -> None:
        """Adds the bytes of the evicted `lease` to the limits under which the lease counts.

        `cap_left` grows if the operator's cap counts the lease's owner; `own_left` grows if the
        requester owns the lease.
        """
        if self.cap_left and lease.owner in self.cap_owners:
            for share in lease.freed_by(lease.target) if lease.target else lease.shares:
                if share.device in self.free:
                    self.cap_left[share.device] += times * share.bytes
        if self.own_left is not None and lease.owner == self.owner:
            self.own_left += times * freed_bytes(lease)

    def all_go(self, leases: Iterable[Lease], times: int = 1) -> None:
        """Counts all these `leases` as evicted. If `times` is -1, they are back on their cards."""
        for lease in leases:
            self.let_go(lease, times)


def _victims(
    pool: Sequence[Lease],
    room: _Room,
    *,
    fewest: bool,
) -> tuple[Lease, ...] | None:
    """The leases of `pool` to evict; None if the whole pool is too small.

    After the call, the returned leases have left the `room`; without a result, the whole pool has.
    """
    order = sorted(pool, key=_least_important_largest_first(room)) if fewest else pool
    chosen = _first_enough(order, room)
    if chosen and fewest:
        room.all_go(chosen, -1)
        least = chosen[-1].importance
        allowed = [one for one in order if one.importance >= least and room.gains(one)]
        few = _fewer(allowed, room, len(chosen)) or chosen
        chosen = tuple([lease for lease in pool if lease in few])
        room.all_go(chosen)
    return chosen


def _first_enough(order: Iterable[Lease], room: _Room) -> tuple[Lease, ...] | None:
    """The first leases of `order` that make the `room` enough, and no needless lease among them.

    After the call, the returned leases have left the room. The result is None if all leases
    together are too few; then all of them have left the room.
    """
    gone: list[tuple[Lease, int]] = []
    for lease in order:
        if room.missing <= 0 and room.enough():
            break
        freed = room.let_go(lease)
        if freed or lease.owner == room.owner:
            gone.append((lease, freed))
    else:  # all have left
        if not room.enough():
            return None
    needed = []
    for lease, freed in reversed(gone):
        if room.missing + freed <= 0:  # else the cards together would have too few bytes
            room.let_go(lease, times=-1)
            if room.enough():
                continue
            room.let_go(lease)
        needed.append(lease)
    needed.reverse()
    return tuple(needed)


def _without_needless_pieces(
    chosen: tuple[Lease, ...], room: _Room, host: PartsRoom
) -> tuple[Lease, ...]:
    """The `chosen` leases, each with as few leaving pieces as possible.

    If only some pieces of a lease must leave, the lease's target has the bytes of these pieces. In
    the `room`, the chosen leases have left. After the call, only the returned pieces have left.
    """
    host_bytes = host.free - precious_bytes(chosen)
    leaving = list(chosen)
    for index in range(len(leaving) - 1, -1, -1):  # the last leases are the most precious
        lease = leaving[index]
        room.let_go(lease, times=-1)
        part = _smallest_part(lease, room)
        reserved = 0 if lease.droppable else lease.offload_bytes
        if part.target and part.offload_bytes <= host_bytes + reserved:
            host_bytes += reserved - part.offload_bytes
            leaving[index] = part
        room.let_go(leaving[index])
    return tuple(leaving)


def _smallest_part(lease: Lease, room: _Room) -> Lease:
    """The `lease` with a target: the fewest pieces that make the room enough."""
    low, high = 1, freed_bytes(lease)  # numbers of bytes; `high` is always enough
    while low < high and lease.piece_bytes:
        middle = (low + high) // 2
        part = part_of(lease, middle)
        room.let_go(part)
        found = room.enough()
        room.let_go(part, times=-1)
        if found:
            high = middle
        else:
            low = middle + 1
    return part_of(lease, high)


def _fewer(
    pool: Sequence[Lease],
    room: _Room,
    than: int,
) -> tuple[Lease, ...] | None:
    """The smallest set of leases that makes the `room` enough, if it has fewer than `than` leases.

    Of several smallest sets, the set with the fewest bytes is returned. The result is None if no
    set is enough, or if more than MOST_SETS sets would have to be tried.
    """
    tried = 0
    for count in range(1, than):
        tried += comb(len(pool), count)
        if tried > MOST_SETS:
            return None
        found = []
        for leases in combinations(pool, count):
            room.all_go(leases)
            if room.enough():
                found.append(leases)
            room.all_go(leases, -1)
        if found:
            return min(found, key=lambda leases: sum(lease.bytes for lease in leases))
    return None


def _least_important_largest_first(room: _Room) -> Callable[[Lease], tuple[int, int]]:
    def key(lease: Lease) -> tuple[int, int]:
        freed = sum([share.bytes for share in lease.shares if share.device in room.free])
        return -lease.importance, -freed

    return key
