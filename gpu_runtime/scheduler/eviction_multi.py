"""How room is made on several cards at once: on which of them, and who leaves.

Pure. One lease may lie on several of the cards, and free bytes on one may do for those on another; so leases leave one
by one, in order, until what has come free holds the model, and then whoever can be spared stays after all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from math import comb
from typing import TYPE_CHECKING

from ..facts import Candidate, Lease, Request
from .eligibility import largest_fitting_set
from .splitting import claimed, divide, fitting, split

if TYPE_CHECKING:
    from .context import Context

FEW_CARDS = 4  # of so many, every set of cards is tried
MOST_SETS = 2_000  # of leases, when the fewest are looked for

Way = tuple[Candidate, tuple[Lease, ...]]


def ways(
    request: Request,
    ground: Context,
    idle: Sequence[Lease],
    host_bytes: int,
    limits: Mapping[str, int],
) -> Iterator[Way]:
    """Divisions for which room can be made, each with those who would leave. `idle` is who may, in order."""
    footprint, rules, owner = request.footprint, request.placement, request.lease.owner
    for cards in _sets(request, ground, idle, limits):
        room = _Room(cards, ground, owner)
        holds = fitting(footprint, cards, rules, limits)
        total = claimed(footprint, cards, rules, limits)
        pool = [lease for lease in idle if room.gains(lease, total)]

        def enough(
            room: _Room = room, holds: Callable[..., bool] = holds, total: int = total
        ) -> bool:
            return (room.mine is None or room.mine >= total) and holds(room.usable())

        chosen = _who_leaves(pool, room, enough, fewest=rules.policy == "fewest-evictions")
        if chosen is not None and sum(m.own_bytes for m in chosen if not m.droppable) > host_bytes:
            fitting_ = largest_fitting_set(
                [lease for lease in pool if not lease.droppable], host_bytes
            )
            chosen = _who_leaves(
                [lease for lease in pool if lease.droppable or lease in fitting_],
                room,
                enough,
                fewest=rules.policy == "fewest-evictions",
            )
        if chosen is None:
            continue
        with room.without(chosen):
            candidate = divide(footprint, room.usable(), rules, limits)
        if candidate is not None:
            yield candidate, chosen


def _sets(
    request: Request, ground: Context, idle: Sequence[Lease], limits: Mapping[str, int]
) -> list[tuple[str, ...]]:
    """Sets of cards on which room may be made: all of them, where the cards are few; else for each number of cards the
    first in order that could be emptied enough, and those with the most room by then and by now."""
    rules, footprint = request.placement, request.footprint
    cards = [
        card
        for card in limits
        if card not in ground.blind and (not rules.devices or card in rules.devices)
    ]
    whole = _Room(cards, ground, request.lease.owner)
    now = whole.usable()
    with whole.without(idle):
        possible = split(footprint, whole.usable(), rules, limits)
    if len(cards) <= FEW_CARDS:
        counts = {len(candidate.shares) for candidate in possible}
        return [chosen for count in sorted(counts) for chosen in combinations(cards, count)]
    sets = []
    for candidate in possible:
        first = tuple(share.device for share in candidate.shares)
        with_most = sorted(cards, key=lambda card: -now[card])[: len(first)]
        sets += dict.fromkeys([first, tuple(card for card in cards if card in with_most)])
    return sets


class _Room:
    """The bytes that a split may use on each of its cards, as leases leave and come back."""

    def __init__(self, cards: Iterable[str], ground: Context, owner: str) -> None:
        self.free = {card: ground.later[card] for card in cards}
        self.allowed = (
            {card: ground.allowed_later[card] for card in self.free} if ground.allowed_later else {}
        )
        self.ours = ground.ours
        self.mine, self.owner = ground.mine_later, owner

    def usable(self) -> dict[str, int]:
        if not self.allowed:
            return dict(self.free)
        return {card: min(size, self.allowed[card]) for card, size in self.free.items()}

    def gains(self, lease: Lease, total: int) -> bool:
        """Whether anything is gained if this lease leaves."""
        if self.mine is not None and self.mine < total and lease.owner == self.owner:
            return True
        for share in lease.shares:  # a plain loop, as each set of cards asks this of every lease
            if share.device in self.free:
                return True
        return False

    def let_go(self, lease: Lease, times: int = 1) -> None:
        """Counts the lease as gone; with -1, as back."""
        for share in lease.shares:
            if share.device in self.free:
                self.free[share.device] += times * share.bytes
                if self.allowed and lease.owner in self.ours:
                    self.allowed[share.device] += times * share.bytes
        if self.mine is not None and lease.owner == self.owner:
            self.mine += times * lease.bytes

    def take_back(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            self.let_go(lease, -1)

    @contextmanager
    def without(self, leases: Sequence[Lease]) -> Iterator[None]:
        """The room as it would be without them, for as long as the block runs."""
        for lease in leases:
            self.let_go(lease)
        yield
        self.take_back(leases)


def _who_leaves(
    pool: Sequence[Lease], room: _Room, enough: Callable[[], bool], *, fewest: bool
) -> tuple[Lease, ...] | None:
    """Those of the pool who leave so that there is enough; none of them can be spared. None where all are too few."""
    order = (
        sorted(pool, key=lambda lease: (-lease.importance, -_on(lease, room))) if fewest else pool
    )
    gone = 0
    while not enough():
        if gone == len(order):
            room.take_back(order)
            return None
        room.let_go(order[gone])
        gone += 1
    chosen: tuple[Lease, ...] = ()
    for lease in order[gone - 1 :: -1] if gone else ():
        room.let_go(lease, -1)
        if not enough():
            room.let_go(lease)
            chosen = (lease, *chosen)
    room.take_back(chosen)
    if not fewest or not chosen:
        return chosen
    least = chosen[-1].importance
    few = (
        _fewer([lease for lease in order if lease.importance >= least], room, enough, len(chosen))
        or chosen
    )
    return tuple([lease for lease in pool if lease in few])


def _fewer(
    pool: Sequence[Lease], room: _Room, enough: Callable[[], bool], than: int
) -> tuple[Lease, ...] | None:
    """A smaller set that is enough, the smallest first, where so many sets can be tried; None where there is none."""
    tried = 0
    for count in range(1, than):
        tried += comb(len(pool), count)
        if tried > MOST_SETS:
            return None
        found = []
        for those in combinations(pool, count):
            with room.without(those):
                if enough():
                    found.append(those)
        if found:
            return min(found, key=lambda those: sum(lease.bytes for lease in those))
    return None


def _on(lease: Lease, room: _Room) -> int:
    return sum([share.bytes for share in lease.shares if share.device in room.free])
