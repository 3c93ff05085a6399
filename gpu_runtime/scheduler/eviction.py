"""Finds the leases whose eviction makes room on a card, or on several cards, at the least cost.

Pure. `evictable` decides which leases may be evicted. `eviction_verdict` makes the steps and the
sentences from the result. A shadow is an unchanged copy in host memory of a model on a card.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from ..facts import HOST, Book, Candidate, Lease, Policy, World
from . import host_room, shadows
from .capacity import limit_of
from .context import Context
from .drain import drained
from .evictable import can_move, reason_to_stay
from .eviction_multi import multi_card_ways, one_card_victims
from .eviction_policy import with_uses_of_equal_models
from .feasibility import why_no_return
from .splitting import may_split
from .victims import PartsRoom, eviction_order, worth

MOST_OTHERS = 8  # ways that are reported besides the chosen way; a dry run reports all ways


class Way(NamedTuple):
    """A way to make room: leases that leave the card, and leases that first leave host memory.

    If only some pieces of a lease leave the card, the lease's `target` has the bytes of the pieces.
    The ways in `others` are only reported, so they have no `warm`, `shadows` and `others`.
    """

    candidate: Candidate
    leaving: tuple[Lease, ...]
    warm: tuple[Lease, ...] = ()  # leases that are unloaded from host memory for those that leave
    shadows: tuple[Lease, ...] = ()  # leases whose shadows are freed for those that leave
    seconds: float = 0.0  # time to load the evicted leases again
    others: tuple[Way, ...] = ()  # ways that were not chosen, the cheapest first
    worth: float = 0.0  # the eviction policy's number of the lease in `leaving` that is worth most


class _Priced(NamedTuple):
    """A way to make room, with its cost. Ways are compared by cost.

    The last number of each cost is the way's position in the search, so no two costs are equal.
    """

    cost: tuple[float, ...]
    candidate: Candidate
    leaving: tuple[Lease, ...]
    seconds: float
    worth: float


def cheapest_way(context: Context, rank: Policy, candidates: tuple[Candidate, ...]) -> Way | None:
    """The way that makes room for the request at the least cost; None if no way makes the room.

    `candidates` are cards that may hold the request alone; sets of cards are tried too if the model
    may be divided. `context` has the inputs of this decision, and `rank` is the eviction policy.
    Leases of owners that do not answer are recalled only if all other leases together cannot make
    the room.
    """
    rank = with_uses_of_equal_models(rank, context.leases)
    find = partial(_cheapest, context, rank, candidates)
    way = find(context.silent) if context.silent else None
    way = way or find()
    if way is None and any([one.shadow_bytes and not one.droppable for one in context.leases]):
        way = find(own_shadows="kept") or find(own_shadows="freed")
    if way is None and host_room.may_be_loaded_again(context):
        way = find(wanted="")
        if way and not host_room.lacks_room(context, way.leaving):
            return None  # the host gets room once other leases may be unloaded
    return way


def _cheapest(
    context: Context,
    rank: Policy,
    candidates: tuple[Candidate, ...],
    spared: frozenset[str] = frozenset(),
    wanted: str | None = None,
    own_shadows: str = "",
) -> Way | None:
    """The cheapest way that evicts none of the leases whose ids are `spared`.

    The lease with the id `wanted` stays in host memory; None is the requested lease. Weights that
    exist nowhere else may have a shadow of some of their bytes. With `own_shadows`, all these
    shadows are `kept` for their leases, or all are `freed`.
    """
    book, request, world = context.book, context.request, context.world
    if wanted is None:
        wanted = request.lease.id
    evictable = _evictable(context, spared)
    evictable = [one for one in evictable if not why_no_return(book, one, world)]
    idle = eviction_order(evictable, world, rank)
    host_now = context.room_now.get(HOST, 0)
    host_later = host_now
    shadowed: list[Lease] = []
    if not all([lease.droppable for lease in idle]):
        precious = {lease.id for lease in idle if not lease.droppable}
        kept = precious if own_shadows == "kept" else set()
        shadowed = shadows.held(book, spared=context.silent_shadows | kept)
        host_later += shadows.total(shadowed)
        host_later += host_room.warm_pool_bytes(context, wanted)
        if own_shadows == "freed":
            idle = [one if one.droppable else replace(one, shadow_bytes=0) for one in idle]
    host = PartsRoom(host_now, host_later) if _may_cut(idle, world) else None
    found: list[_Priced] = []
    for candidate, leaving in _ways(context, candidates, idle, host_later, host):
        found.append(_priced(candidate, leaving, len(found), context, rank))
    found.sort()
    for best in found:
        room = host_room.leaving_the_host(context, rank, best.leaving, shadowed, host_now, wanted)
        if room is not None:
            others = [_reported(one) for one in found if one is not best]
            most = MOST_OTHERS if request.wait else len(others)  # a dry run shows all ways
            freed, unloaded = room
            return _reported(best)._replace(
                warm=unloaded, shadows=freed, others=tuple(others[:most])
            )
    return None


def _reported(one: _Priced) -> Way:
    return Way(one.candidate, one.leaving, seconds=one.seconds, worth=one.worth)


def _may_cut(idle: Iterable[Lease], world: World) -> bool:
    """Whether some of the `idle` leases may leave in part."""
    for lease in idle:
        if lease.piece_bytes:  # a plain loop, because every decision runs it
            unified = any(device.unified for device in world.devices)
            return world.rules.offload and not unified
    return False


def _evictable(context: Context, spared: frozenset[str]) -> list[Lease]:
    """Leases that may leave now and that no elder (a request ahead in the queue) has recalled.

    A lease in parts (partly on a card, partly in host memory) stays if this request or an elder
    waits for the lease's return. The loop is plain because it runs often.
    """
    request, world, recalled = context.request, context.world, context.recalled
    asker, importance = request.lease.owner, request.lease.importance
    returning = {(ticket.owner, ticket.name) for ticket in context.blocking_elders}
    if context.held:
        returning.add((asker, request.lease.name))
    own_code = request.lease.kind == "block"
    found = []
    for lease in context.leases:
        if own_code and lease.kind == "kernel" and lease.owner == asker:
            continue  # the block runs in this kernel, and needs what the kernel holds
        if reason_to_stay(lease, world, asker=asker, importance=importance):
            continue
        if not lease.on_device:
            continue
        if not lease.droppable and not can_move(lease, world):
            continue
        if (recalled and lease.id in recalled) or (spared and lease.id in spared):
            continue
        if returning and (lease.owner, lease.name) in returning:
            continue
        found.append(lease)
    return found


def _priced(
    candidate: Candidate,
    leaving: tuple[Lease, ...],
    order: int,
    context: Context,
    rank: Policy,
) -> _Priced:
    """The way to make room for `candidate` by evicting the leases `leaving`, with its cost.

    Costs are compared in this order:
    1. the highest importance of an evicted lease
    2. how much a fleet wishes the evicted lease that is worth most
    3. the rank of that lease, by the eviction policy
    4. the seconds of loading the leases again
    5. the number of cards
    6. the number of leases; with the placement policy `fewest-evictions`, this is compared before 3
    7. `order`, the position of the way in the search

    (When the seconds were compared before the rank, small models in use all day left again and
    again: on a simulated week over 8 cards without host memory, the loads took 2.2 to 3.1 times as
    long. See tests/bench/bench_week.py.)
    """
    most_important, most_wished, highest_rank = _most_precious(leaving, context.world, rank)
    seconds = sum([_seconds_to_return(lease) for lease in leaving])
    # Measurements of the same load may differ by almost 0.1 s, so smaller differences do not count.
    rounded_seconds = round(seconds, 1)
    cards, leases = len(candidate.shares), len(leaving)
    if context.request.placement.policy == "fewest-evictions":
        cost: tuple[float, ...] = (
            most_important,
            most_wished,
            leases,
            highest_rank,
            rounded_seconds,
            cards,
            order,
        )
    else:
        cost = (
            most_important,
            most_wished,
            highest_rank,
            rounded_seconds,
            cards,
            leases,
            order,
        )
    return _Priced(cost, candidate, leaving, seconds, highest_rank)


def _seconds_to_return(lease: Lease) -> float:
    """Seconds that the return of this lease to its card takes after an eviction.

    If the lease has a target, only the bytes in the target leave and return.
    """
    seconds = lease.restore_seconds or lease.reload_seconds
    return seconds * lease.leaving_bytes / lease.bytes if lease.target else seconds


def _most_precious(
    leaving: tuple[Lease, ...],
    world: World,
    rank: Policy,
) -> tuple[float, int, float]:
    """The worth of the last lease in `leaving`.

    The leases are in the order of their worth, so the last lease is worth most.
    """
    return worth(leaving[-1], world, rank) if leaving else (-(10**9), 0, 0.0)


# -- which leases leave ----------------------------------------------------------------------------


def _ways(
    context: Context,
    candidates: tuple[Candidate, ...],
    idle: list[Lease],
    host_bytes: int,
    host: PartsRoom | None,
) -> Iterator[tuple[Candidate, tuple[Lease, ...]]]:
    """Every card or set of cards on which room can be made, each with the leases to evict."""
    idle_on = _by_device(idle) if candidates else {}
    for candidate in candidates:
        [share] = context.missing(candidate.shares)
        pool = idle_on.get(share.device, [])
        if context.own_left_later is not None:
            pool = idle  # what leaves other cards counts too
        leaving = one_card_victims(share, context, pool, host_bytes, host)
        if leaving is not None:
            yield candidate, leaving
    if may_split(context.request.placement):
        limits = _limits_of_open_cards(context.book, context.world)
        yield from multi_card_ways(context, idle, host_bytes, limits, host)


def _by_device(leases: Iterable[Lease]) -> dict[str, list[Lease]]:
    found: dict[str, list[Lease]] = {}
    for lease in leases:
        for share in lease.shares:
            found.setdefault(share.device, []).append(lease)
    return found


def _limits_of_open_cards(book: Book, world: World) -> dict[str, int]:
    """The budgets of the cards that are not drained."""
    out = drained(book, world)
    limits = {}
    for device in world.devices:
        if not device.is_host and device.id not in out:
            limits[device.id] = limit_of(book, world, device.id)
    return limits
