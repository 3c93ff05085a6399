"""Compares what several hosts offer for one model.

Pure. `plan` computes the offer of one host. The order of the hosts depends only on the offers, so
the same offers always give the same order.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..facts import HostRoom, Offer, Plan, PlanLevel

MOST_PLANNED = 8  # hosts that make a plan for one decision


def offer_of(plan: Plan, host: str, users: int = 0) -> Offer:
    """The offer of the `host` that made this `plan`. `users` are blocks that use the model there.

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
        left_bytes=plan.left_bytes,
        need_bytes=plan.footprint.bytes if plan.footprint else 0,
        users=users,
    )


def ranked(offers: Iterable[Offer]) -> tuple[Offer, ...]:
    """The `offers`, the best first.

    The effort is compared first: here, restore, free room, restore with evictions, evict, wait,
    never. Of equal efforts, the host with fewer users of the model is first. Then follow the
    importance of the victims, the seconds, the best fit (the fewest bytes left), and the name.
    """
    return tuple(sorted(offers, key=_cost))


def _cost(offer: Offer) -> tuple[int, int, int, float, int, str]:
    # A lower importance is more important, so its sign is changed. No victim is best of all.
    victims = -offer.victims_importance if offer.victims else -(10**9)
    # Two measurements of the same load differ by less than 0.1 s.
    seconds = round(offer.seconds, 1)
    return offer.level.order, offer.users, victims, seconds, offer.left_bytes, offer.host


def shortlist(rooms: Iterable[HostRoom], most: int = MOST_PLANNED) -> tuple[str, ...]:
    """The names of the `most` hosts that are worth a plan, the likeliest first.

    Hosts that have the model come first, then hosts that have it in memory. Then follow hosts with
    free room, the best fit first. Last are hosts that would have to evict, the most free first. If
    the model may be split, the sum over the cards counts. Hosts whose budget is too small, and
    drained hosts, are last, so that a refusal can name them.
    """
    ordered = sorted(rooms, key=_promise)
    return tuple(room.host for room in ordered[:most])


def _promise(room: HostRoom) -> tuple[int, int, str]:
    free = room.free_bytes_together if room.may_split else room.free_bytes
    budget = room.budget_bytes_together if room.may_split else room.budget_bytes
    if room.here:
        return 0, -free, room.host
    if room.drained or budget < room.need_bytes:
        return 4, -free, room.host
    if room.warm:
        return 1, -free, room.host
    if room.need_bytes and free >= room.need_bytes:
        return 2, free, room.host
    return 3, -free, room.host


def largest_first(sizes: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """The names of models in the order in which they are placed: the largest first, then by name.

    `sizes` has the bytes of each model. A large model fits only where small ones have not been
    placed yet.

    >>> largest_first([("a", 1), ("b", 2), ("c", 2)])
    ('b', 'c', 'a')
    """
    return tuple(name for name, _ in sorted(sizes, key=lambda one: (-one[1], one[0])))
