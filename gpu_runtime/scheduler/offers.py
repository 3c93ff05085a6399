"""Compares what several hosts offer for one model.

Pure. `plan` computes the offer of one host. The order of the hosts depends only on the offers, so
the same offers always give the same order.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..facts import Book, HostRoom, Offer, Plan, PlanLevel, World
from .capacity import limits_of, room
from .caps import drained
from .victims import reason_to_stay

_TOO_SMALL = 5  # the promise of a host that is too small or drained
# Two load times count as equal if they differ by less than the larger of these two values, because
# two measurements of the same load differ by as much.
CLOSE_SECONDS, CLOSE_FRACTION = 0.5, 0.1


def offer_of(plan: Plan, host: str, users: int = 0) -> Offer:
    """The offer of the `host` that made this `plan`.

    `users` is the number of blocks of code that use the model on `host`.

    A plan with an obstacle, such as a missing engine, is an offer of the level `never`.
    """
    level, because = plan.level, plan.because
    if plan.obstacle:
        level, because = PlanLevel.NEVER, plan.obstacle
    return Offer(
        host=host,
        name=plan.name,
        level=level,
        because=because,
        seconds=plan.seconds,
        measured=plan.measured,
        victims=tuple(id.partition("/")[2] for id in plan.victims),
        victims_importance=plan.victims_importance,
        victims_wished=plan.victims_wished,
        left_bytes=plan.left_bytes,
        need_bytes=plan.footprint.bytes if plan.footprint else 0,
        users=users,
    )


def ranked(offers: Iterable[Offer]) -> tuple[Offer, ...]:
    """The `offers`, the best first.

    Offers are compared by these criteria, in this order:
    - the level, in the order of PlanLevel
    - the fewest users of the model on the host
    - the least important victims, and of these the least wished
    - the fewest seconds
    - the best fit: the fewest bytes left
    - the name of the host

    Seconds count as equal if they are close to the seconds of the fastest offer with the same
    level, users and victims. So small differences between two measurements do not change the order.
    """
    listed = sorted(offers, key=lambda offer: (_effort(offer), offer.seconds))
    found: list[Offer] = []
    while listed:
        fastest = listed[0]
        most = fastest.seconds + max(CLOSE_SECONDS, CLOSE_FRACTION * fastest.seconds)
        equal = [one for one in listed if _effort(one) == _effort(fastest) and one.seconds <= most]
        found += sorted(equal, key=lambda offer: (offer.left_bytes, offer.host))
        listed = listed[len(equal) :]
    return tuple(found)


def _effort(offer: Offer) -> tuple[int, int, int, int]:
    # The lowest result is the best. Less important victims have higher numbers, so the sign is
    # changed. An offer without victims is better than all others.
    victims = -offer.victims_importance if offer.victims else -(10**9)
    return offer.level.order, offer.users, victims, offer.victims_wished


def room_of(
    host: str, book: Book, world: World, *, need_bytes: int, may_split: bool, name: str, owner: str
) -> HostRoom:
    """The room of `host` for a model of `need_bytes`, from its `book` and its `world`.

    `name` is the model, and `owner` the id of the owner that would hold the model.
    """
    cards = [device.id for device in world.cards]
    free, limits = room(book, world), limits_of(book, world)
    idle: dict[tuple[int, int], dict[str, int]] = {}
    own = None
    for lease in book.leases():
        if lease.name == name and lease.owner == owner:
            own = lease
        elif not reason_to_stay(lease, world, asker=owner, importance=lease.importance):
            by_card = idle.setdefault((lease.importance, lease.wished), {})
            for share in lease.shares:
                by_card[share.device] = by_card.get(share.device, 0) + share.bytes
    return HostRoom(
        host,
        here=own is not None and own.all_on_device,
        warm=own is not None and (own.on_host or own.in_parts),
        drained=set(drained(book, world)) >= set(cards),
        need_bytes=need_bytes,
        may_split=may_split,
        free_bytes=tuple(max(0, free[card]) for card in cards),
        budget_bytes=tuple(limits[card] for card in cards),
        idle_bytes={rank: tuple(by.get(card, 0) for card in cards) for rank, by in idle.items()},
    )


def likeliest_first(rooms: Iterable[HostRoom]) -> tuple[str, ...]:
    """The names of the hosts in the order in which they should make a plan.

    The order is:
    - hosts with the model on a device
    - hosts with the model in host memory
    - hosts with free room, the best fit first
    - hosts that would have to evict, the least important and least wished idle models first
    - hosts whose idle models are too few
    - hosts that are too small or drained, so that a refusal can name them
    """
    return tuple(room.host for room in sorted(rooms, key=_promise))


def may_serve(room: HostRoom) -> bool:
    """Whether the host with this `room` may serve the model, perhaps after a wait. Otherwise it is too small or
    drained.
    """
    return _promise(room)[0] < _TOO_SMALL


def _promise(room: HostRoom) -> tuple[int, tuple[int, int], int, str]:
    most_free = _most(room, room.free_bytes)
    nobody = 0, 0  # the worth of the models that leave
    if room.here:
        return 0, nobody, -most_free, room.host
    if room.drained or _most(room, room.budget_bytes) < room.need_bytes:
        return _TOO_SMALL, nobody, -most_free, room.host
    if room.warm:
        return 1, nobody, -most_free, room.host
    fitting = [size for size in room.free_bytes if size >= room.need_bytes]
    if fitting or most_free >= room.need_bytes:
        return 2, nobody, min(fitting, default=most_free), room.host
    together = list(room.free_bytes)
    for importance, wished in sorted(room.idle_bytes, key=lambda worth: (-worth[0], worth[1])):
        more = room.idle_bytes[importance, wished]
        together = [a + b for a, b in zip(together, more, strict=True)]
        if _most(room, together) >= room.need_bytes:
            return 3, (-importance, wished), -most_free, room.host
    return 4, nobody, -most_free, room.host


def _most(room: HostRoom, sizes: Iterable[int]) -> int:
    """Bytes that the model could use: the sum of `sizes` if it may be split, else the largest."""
    return sum(sizes) if room.may_split else max(sizes, default=0)


def largest_first(sizes: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """The names of models in the order of their placement: the largest first, then by name.

    `sizes` has the bytes of each model. Large models are placed first, because small models that
    were placed first could leave too little room for them.

    >>> largest_first([("a", 1), ("b", 2), ("c", 2)])
    ('b', 'c', 'a')
    """
    return tuple(name for name, _ in sorted(sizes, key=lambda model: (-model[1], model[0])))
