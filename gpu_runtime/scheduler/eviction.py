"""How room is made on a card: which leases step aside, where to, and what the asker is told meanwhile.

Pure. Nothing is free before it has left: whoever makes room waits, on a ticket that holds the place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from ..facts import (
    HOST,
    Book,
    Candidate,
    Drop,
    Lease,
    Move,
    Policy,
    Request,
    Step,
    Wait,
    World,
    where,
)
from ..units import show_bytes, show_seconds
from .capacity import limit_of
from .context import Context
from .drain import drained
from .eligibility import (
    can_move,
    eviction_step,
    largest_fitting_set,
    mark_leaving,
    reason_to_stay,
    warm,
    warm_pool_victims,
)
from .eviction_multi import ways as ways_over_several
from .eviction_policy import fewest_enough, first_enough, in_order
from .splitting import could_split

LOOK_AGAIN_SECONDS = 0.1  # how soon, where a driver is about to free what a dead process held

Enough = Callable[[Mapping[str, int], Iterable[Lease]], tuple[Lease, ...] | None]


MOST_OTHERS = 8  # ways that are told beside the one taken


class Way(NamedTuple):
    """Room to be made: who leaves, and who leaves the warm pool first so that the host has room."""

    candidate: Candidate
    leaving: tuple[Lease, ...]
    warm: tuple[Lease, ...] = ()
    seconds: float = 0.0  # of loading those again who leave
    others: tuple[Way, ...] = ()  # that were not taken, the cheapest first


def cheapest_way(
    book: Book,
    request: Request,
    world: World,
    rank: Policy,
    ground: Context,
    candidates: tuple[Candidate, ...],
) -> Way | None:
    """Where room can be made at the least cost; None where it cannot. `candidates` are cards that may do alone.

    Owners that do not answer are asked only where nobody else can make the room.
    """
    if ground.silent and (
        way := _cheapest(book, request, world, rank, ground, candidates, ground.silent)
    ):
        return way
    return _cheapest(book, request, world, rank, ground, candidates, frozenset())


def _cheapest(
    book: Book,
    request: Request,
    world: World,
    rank: Policy,
    ground: Context,
    candidates: tuple[Candidate, ...],
    spared: frozenset[str],
) -> Way | None:
    """The cheapest way that spares these leases.

    The least important are displaced first, whatever card they are on; then what costs the fewest seconds of
    reloading, and the fewest cards; then the fewest leases (first of all, where `fewest-evictions` is asked for); then
    those that the policy ranks lowest.
    """
    wanted, host_room = request.lease, ground.now.get(HOST, 0)
    idle = [
        lease
        for lease in ground.leases
        if not reason_to_stay(lease, world, asker=wanted.owner, importance=wanted.importance)
        and lease.on_device
        and (lease.droppable or can_move(lease, world))
        and not (ground.promised and lease.id in ground.promised)
        and not (spared and lease.id in spared)
    ]
    idle = in_order(idle, world, rank)
    on: dict[str, list[Lease]] = {}
    for lease in idle:
        for share in lease.shares:
            on.setdefault(share.device, []).append(lease)
    host_later = host_room
    if not all([lease.droppable for lease in idle]):
        host_later += sum(
            lease.bytes
            for lease in warm(book, world, asker=wanted.owner, importance=wanted.importance)
        )
    fewest = request.placement.policy == "fewest-evictions"
    enough = fewest_enough if fewest else first_enough
    found: list[tuple[tuple[float, ...], Candidate, tuple[Lease, ...], float]] = []
    ways = _ways(book, request, world, ground, candidates, idle, on, host_later, enough)
    for order, (candidate, chosen) in enumerate(ways):
        cards = len(candidate.shares)
        # Victims come in order, so the last is the most precious of them.
        precious = (-chosen[-1].importance, rank(chosen[-1], world)) if chosen else (-(10**9), 0.0)
        spent = sum([lease.restore_seconds or lease.reload_seconds for lease in chosen])
        seconds = round(
            spent, 1
        )  # what is measured anew each time differs by less from one time to the next
        cost = (len(chosen), seconds, cards) if fewest else (seconds, cards, len(chosen))
        found.append(((precious[0], *cost, precious[1], order), candidate, chosen, spent))
    if not found:
        return None
    found.sort()
    _, candidate, chosen, spent = found[0]
    crowd = warm_pool_victims(
        book,
        _precious_bytes(chosen) - host_room,
        world,
        rank,
        asker=wanted.owner,
        importance=wanted.importance,
    )
    told = found[1 : MOST_OTHERS + 1] if request.wait else found[1:]  # a plan shows them all
    others = tuple([Way(*one[1:3], (), one[3]) for one in told])
    return Way(candidate, chosen, crowd or (), spent, others)


def _ways(
    book: Book,
    request: Request,
    world: World,
    ground: Context,
    candidates: tuple[Candidate, ...],
    idle: list[Lease],
    on: Mapping[str, list[Lease]],
    host_bytes: int,
    enough: Enough,
) -> Iterator[tuple[Candidate, tuple[Lease, ...]]]:
    """Every card on which room can be made, and every division over several where one is allowed; and who leaves."""
    for candidate in candidates:
        [share] = candidate.shares
        need = {share.device: share.bytes - ground.later[share.device]}
        pool = on.get(share.device, [])
        if ground.mine_later is not None:
            need[f"owner:{request.lease.owner}"] = share.bytes - ground.mine_later
            pool = idle
        if ground.allowed_later:
            chosen = _whom_under_cap(need, pool, host_bytes, ground, candidate, enough)
        else:
            chosen = _whom(need, pool, host_bytes, enough)
        if chosen is not None:
            yield candidate, chosen
    if could_split(request.placement):
        out = drained(book, world)
        limits = {
            device.id: limit_of(book, world, device.id)
            for device in world.devices
            if not device.is_host and device.id not in out
        }
        yield from ways_over_several(request, ground, idle, host_bytes, limits)


def _whom(
    need: Mapping[str, int], idle: list[Lease], host_bytes: int, enough: Enough
) -> tuple[Lease, ...] | None:
    """The victims; where the host cannot take in all that exist nowhere else, such as it can."""
    chosen = enough(need, idle)
    if chosen is None or _precious_bytes(chosen) <= host_bytes:
        return chosen
    useful = [
        lease
        for lease in idle
        if not lease.droppable
        and (f"owner:{lease.owner}" in need or any(share.device in need for share in lease.shares))
    ]
    fitting = largest_fitting_set(useful, host_bytes)
    return enough(need, [lease for lease in idle if lease.droppable or lease in fitting])


def _whom_under_cap(
    need: Mapping[str, int],
    idle: list[Lease],
    host_bytes: int,
    ground: Context,
    candidate: Candidate,
    enough: Enough,
) -> tuple[Lease, ...] | None:
    """The victims, where the operator's cap may ask for the user's own to leave first, in whichever process they
    lie."""
    ours = ground.ours
    over = {
        share.device: share.bytes - ground.allowed_later.get(share.device, share.bytes)
        for share in candidate.shares
    }
    first = _whom(over, [lease for lease in idle if lease.owner in ours], host_bytes, enough)
    if not first:
        return None if first is None else _whom(need, idle, host_bytes, enough)
    rest = dict(need)
    for lease in first:
        for share in lease.shares:
            if share.device in rest:
                rest[share.device] -= share.bytes
        if f"owner:{lease.owner}" in rest:
            rest[f"owner:{lease.owner}"] -= lease.bytes
    others = _whom(
        rest,
        [lease for lease in idle if lease not in first],
        host_bytes - _precious_bytes(first),
        enough,
    )
    return (
        None
        if others is None
        else tuple(lease for lease in idle if lease in first or lease in others)
    )


def _precious_bytes(leases: Iterable[Lease]) -> int:
    """Bytes that exist nowhere else, and so need room in host memory."""
    return sum([lease.own_bytes for lease in leases if not lease.droppable])


def make_room(
    book: Book, request: Request, world: World, ground: Context, way: Way
) -> tuple[Book, Wait]:
    """Wait, while our own victims leave (as steps, now) and others' owners are asked on the ticket."""
    name, size = request.lease.name, request.footprint.bytes
    cards = [share.device for share in way.candidate.shares]
    at = where(way.candidate.shares)
    free = sum(max(0, ground.now[card]) for card in cards)
    head = f"{name} needs {show_bytes(size)}; {at} {'has' if len(cards) == 1 else 'have'} {show_bytes(free)} free."
    if not way.leaving:
        if going := next((ground.leaving[card] for card in cards if card in ground.leaving), None):
            return book, Wait(f"{head} {going} is stepping aside.")
        if ended := next((ghost for ghost in book.ghosts if ghost.device in cards), None):
            return book, Wait(
                f"{head} Its driver has yet to free what pid {ended.pid} held, which has ended.",
                retry_at=world.now + LOOK_AGAIN_SECONDS,
            )
        return book, Wait(
            f"{head} The next measurement will show what has just left.", retry_at=world.now + 1.0
        )
    steps: list[Step] = []
    asked: list[str] = []
    told: list[str] = []
    host_room = ground.now.get(HOST, 0)

    def go(lease: Lease, exit: Move | Drop) -> None:
        nonlocal book
        book = mark_leaving(book, exit, request.key)
        steps.append(exit)

    for lease in way.warm:
        if lease.owner == request.lease.owner:
            go(
                lease,
                Drop(lease.id, lease.shares, f"The warm pool is full; {name} is to come to {at}."),
            )
            told.append(f"{lease.name} leaves the warm pool for good.")
        else:
            asked.append(lease.id)
            told.append(f"{lease.name} of {_owner(book, lease)} is asked to leave the warm pool.")
    for lease in sorted(
        way.leaving, key=lambda lease: lease.droppable
    ):  # first those that need host memory
        idle = show_seconds(lease.idle_seconds(world.now))
        exit = eviction_step(
            lease,
            host_room,
            world,
            because=f"{name} needs {show_bytes(size)} on {at}; {lease.name} was idle for {idle}.",
        )
        if isinstance(exit, Move):
            host_room -= lease.own_bytes
        if lease.owner != request.lease.owner:
            asked.append(lease.id)
            who = f"{lease.name} ({show_bytes(lease.bytes)}, idle {idle}) of {_owner(book, lease)}"
            told.append(
                f"{who} was asked to step aside, and its process does not answer."
                if lease.id in ground.silent
                else f"{who} is asked to step aside."
            )
        elif exit is None:
            told.append(f"{lease.name} follows once the host has room.")
        else:
            go(lease, exit)
            to = "host" if isinstance(exit, Move) else "disk"
            told.append(
                f"{lease.name} ({show_bytes(lease.bytes)}, idle {idle}) steps aside to {to}."
            )
    return book, Wait(
        " ".join([head, *told]),
        tuple(steps),
        tuple(asked),
        considered=tuple([_with_cost(one) for one in (way, *way.others)]),
        silent=tuple(id for id in asked if id in ground.silent),
    )


def _with_cost(way: Way) -> Candidate:
    c = way.candidate
    return Candidate(
        c.shares,
        c.fits,
        c.because,
        tuple([lease.id for lease in way.leaving]),
        way.seconds,
        c.filled,
    )


def _owner(book: Book, lease: Lease) -> str:
    owner = book.owner(lease.owner)
    return owner.label if owner else lease.owner
