"""How room is made on a card: which leases leave, to where, and what the requesting caller is told meanwhile.

Pure. Nothing is free before it has left: a request that makes room waits, and its ticket holds the place.
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
from .eviction_multi import multi_card_ways
from .eviction_policy import OWNER, eviction_order, fewest_victims, victims_in_order
from .splitting import may_split

LOOK_AGAIN_SECONDS = 0.1  # how soon, if a driver is about to free what a dead process held
MEASURE_AGAIN_SECONDS = 1.0  # how soon, if only the next measurement shows what has left
MOST_OTHERS = 8  # ways that are reported beside the one taken

Bytes = Mapping[str, int]  # by device id
Enough = Callable[[Bytes, Iterable[Lease]], tuple[Lease, ...] | None]


class Way(NamedTuple):
    """A way to make room: which leases leave, and which leave the warm pool first so that the host has room."""

    candidate: Candidate
    leaving: tuple[Lease, ...]
    warm: tuple[Lease, ...] = ()
    seconds: float = 0.0  # that it takes to load again what leaves
    others: tuple[Way, ...] = ()  # that were not taken, the cheapest first


class _Priced(NamedTuple):
    """A way with its cost. Ways compare by cost; `order` makes every cost distinct."""

    cost: tuple[float, ...]
    candidate: Candidate
    leaving: tuple[Lease, ...]
    seconds: float


def cheapest_way(
    book: Book,
    request: Request,
    world: World,
    rank: Policy,
    context: Context,
    candidates: tuple[Candidate, ...],
) -> Way | None:
    """The way that makes room for the `request` at the least cost; None if there is none.

    `candidates` are cards that may hold it alone. Owners that do not answer are asked only if no other lease can make
    the room. `context` and `world` are the inputs of this decision, `rank` is the eviction policy.
    """
    if context.silent:
        way = _cheapest(book, request, world, rank, context, candidates, context.silent)
        if way:
            return way
    return _cheapest(book, request, world, rank, context, candidates, frozenset())


def _cheapest(
    book: Book,
    request: Request,
    world: World,
    rank: Policy,
    context: Context,
    candidates: tuple[Candidate, ...],
    spared: frozenset[str],
) -> Way | None:
    """The cheapest way that evicts none of the leases whose ids are `spared`."""
    asker, importance = request.lease.owner, request.lease.importance
    idle = eviction_order(_evictable(request, world, context, spared), world, rank)
    host_room = context.room_now.get(HOST, 0)
    host_later = host_room
    if not all([lease.droppable for lease in idle]):
        pool = warm(book, world, asker=asker, importance=importance)
        host_later += sum(lease.bytes for lease in pool)
    found: list[_Priced] = []
    for candidate, leaving in _ways(book, request, world, context, candidates, idle, host_later):
        found.append(_priced(candidate, leaving, len(found), request, world, rank))
    if not found:
        return None
    found.sort()
    best = found[0]
    shortage = _precious_bytes(best.leaving) - host_room
    from_warm_pool = warm_pool_victims(
        book, shortage, world, rank, asker=asker, importance=importance
    )
    others = found[1 : MOST_OTHERS + 1] if request.wait else found[1:]  # a plan shows them all
    return Way(
        best.candidate,
        best.leaving,
        from_warm_pool or (),
        best.seconds,
        tuple([Way(one.candidate, one.leaving, (), one.seconds) for one in others]),
    )


def _evictable(
    request: Request, world: World, context: Context, spared: frozenset[str]
) -> list[Lease]:
    """Leases on devices that may leave now for this request, and that no elder has recalled. Hot: a plain loop."""
    asker, importance = request.lease.owner, request.lease.importance
    recalled = context.recalled
    found = []
    for lease in context.leases:
        if reason_to_stay(lease, world, asker=asker, importance=importance):
            continue
        if not lease.on_device:
            continue
        if not lease.droppable and not can_move(lease, world):
            continue
        if (recalled and lease.id in recalled) or (spared and lease.id in spared):
            continue
        found.append(lease)
    return found


def _priced(
    candidate: Candidate,
    leaving: tuple[Lease, ...],
    order: int,
    request: Request,
    world: World,
    rank: Policy,
) -> _Priced:
    """The way with its cost.

    The least important are evicted first, whatever card they are on. Then counts the way that costs the fewest
    seconds of reloading, and the fewest cards; then the fewest leases (first of all, if `fewest-evictions` is set);
    then those that the policy ranks lowest.
    """
    if leaving:
        last = leaving[-1]  # victims are in order, so the last is the most precious of them
        most_important, highest_rank = (-last.importance, rank(last, world))
    else:
        most_important, highest_rank = -(10**9), 0.0
    seconds = sum([lease.restore_seconds or lease.reload_seconds for lease in leaving])
    # Times that are measured anew each time differ by less than 0.1 s from one time to the next.
    rounded_seconds = round(seconds, 1)
    cards, leases = len(candidate.shares), len(leaving)
    if request.placement.policy == "fewest-evictions":
        size = (leases, rounded_seconds, cards)
    else:
        size = (rounded_seconds, cards, leases)
    cost = (most_important, *size, highest_rank, order)
    return _Priced(cost, candidate, leaving, seconds)


# -- which leases leave -------------------------------------------------------------------------------------------


def _ways(
    book: Book,
    request: Request,
    world: World,
    context: Context,
    candidates: tuple[Candidate, ...],
    idle: list[Lease],
    host_bytes: int,
) -> Iterator[tuple[Candidate, tuple[Lease, ...]]]:
    """Every card on which room can be made, every division over several if allowed, and the leases that leave."""
    fewest = request.placement.policy == "fewest-evictions"
    enough = fewest_victims if fewest else victims_in_order
    idle_on = _by_device(idle)
    for candidate in candidates:
        [share] = candidate.shares
        need = {share.device: share.bytes - context.room_later[share.device]}
        pool = idle_on.get(share.device, [])
        if context.own_left_later is not None:
            need[OWNER + request.lease.owner] = share.bytes - context.own_left_later
            pool = idle
        if context.cap_left_later:
            leaving = _victims_under_cap(need, pool, host_bytes, context, candidate, enough)
        else:
            leaving = _victims(need, pool, host_bytes, enough)
        if leaving is not None:
            yield candidate, leaving
    if may_split(request.placement):
        limits = _limits_of_open_cards(book, world)
        yield from multi_card_ways(request, context, idle, host_bytes, limits)


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


def _victims(
    need: Bytes, idle: list[Lease], host_bytes: int, enough: Enough
) -> tuple[Lease, ...] | None:
    """The leases that leave; if the host cannot take all that exist nowhere else, only those that it can take."""
    chosen = enough(need, idle)
    if chosen is None or _precious_bytes(chosen) <= host_bytes:
        return chosen
    useful = [lease for lease in idle if not lease.droppable and _helps(lease, need)]
    fitting = largest_fitting_set(useful, host_bytes)
    return enough(need, [lease for lease in idle if lease.droppable or lease in fitting])


def _helps(lease: Lease, need: Bytes) -> bool:
    """Whether any of the need is met if this lease leaves."""
    if OWNER + lease.owner in need:
        return True
    return any(share.device in need for share in lease.shares)


def _victims_under_cap(
    need: Bytes,
    idle: list[Lease],
    host_bytes: int,
    context: Context,
    candidate: Candidate,
    enough: Enough,
) -> tuple[Lease, ...] | None:
    """The leases that leave, if the operator's cap may require that the user's own leave first, in any process."""
    over_cap = {}
    for share in candidate.shares:
        allowed = context.cap_left_later.get(share.device, share.bytes)
        over_cap[share.device] = share.bytes - allowed
    own = [lease for lease in idle if lease.owner in context.cap_owners]
    first = _victims(over_cap, own, host_bytes, enough)
    if first is None:
        return None
    if not first:
        return _victims(need, idle, host_bytes, enough)
    left = _less_freed(need, first)
    rest = [lease for lease in idle if lease not in first]
    others = _victims(left, rest, host_bytes - _precious_bytes(first), enough)
    if others is None:
        return None
    return tuple(lease for lease in idle if lease in first or lease in others)


def _less_freed(need: Bytes, leaving: Iterable[Lease]) -> dict[str, int]:
    """The need without the bytes that these leases free."""
    left = dict(need)
    for lease in leaving:
        for share in lease.shares:
            if share.device in left:
                left[share.device] -= share.bytes
        owner = OWNER + lease.owner
        if owner in left:
            left[owner] -= lease.bytes
    return left


def _precious_bytes(leases: Iterable[Lease]) -> int:
    """Bytes that exist nowhere else, and so need room in host memory."""
    return sum([lease.own_bytes for lease in leases if not lease.droppable])


# -- the verdict --------------------------------------------------------------------------------------------------


def make_room(
    book: Book, request: Request, world: World, context: Context, way: Way
) -> tuple[Book, Wait]:
    """The `book` with our own victims marked as leaving, and a Wait: their steps, and the leases of others recalled.

    `way` is from `cheapest_way`, `request`, `world` and `context` are those of this decision. Other owners see the
    recall on the ticket of the request.
    """
    shares = way.candidate.shares
    cards = [share.device for share in shares]
    free = sum(max(0, context.room_now[card]) for card in cards)
    has = "has" if len(cards) == 1 else "have"
    size = show_bytes(request.footprint.bytes)
    head = f"{request.lease.name} needs {size}; {where(shares)} {has} {show_bytes(free)} free."
    if not way.leaving:
        return book, _wait_for_what_left(book, world, context, cards, head)
    eviction = _Eviction(book, request, world, context, where(shares))
    for lease in way.warm:
        eviction.unload_from_warm_pool(lease)
    # First those that need host memory.
    for lease in sorted(way.leaving, key=lambda lease: lease.droppable):
        eviction.evict(lease)
    return eviction.book, Wait(
        " ".join([head, *eviction.sentences]),
        tuple(eviction.steps),
        tuple(eviction.recalled),
        considered=tuple([_with_cost(one) for one in (way, *way.others)]),
        silent=tuple(id for id in eviction.recalled if id in context.silent),
    )


def _wait_for_what_left(
    book: Book, world: World, context: Context, cards: list[str], head: str
) -> Wait:
    """The Wait if no lease needs to leave: all that is missing is leaving, or has left and was not measured yet."""
    for card in cards:
        if card in context.leaving:
            return Wait(f"{head} {context.leaving[card]} is being evicted.")
    for ghost in book.ghosts:
        if ghost.device in cards:
            return Wait(
                f"{head} The driver has not yet freed the memory of pid {ghost.pid}, which has ended.",
                retry_at=world.now + LOOK_AGAIN_SECONDS,
            )
    return Wait(
        f"{head} The next measurement will show what was just freed.",
        retry_at=world.now + MEASURE_AGAIN_SECONDS,
    )


class _Eviction:
    """The evictions of one decision as they are added up: book, steps, recalled leases, sentences."""

    def __init__(
        self, book: Book, request: Request, world: World, context: Context, at: str
    ) -> None:
        self.book, self.request = book, request
        self.world, self.context = world, context
        self.at = at  # the cards on which room is made, in words
        self.host_room = context.room_now.get(HOST, 0)
        self.steps: list[Step] = []
        self.recalled: list[str] = []  # lease ids of other owners
        self.sentences: list[str] = []

    def unload_from_warm_pool(self, lease: Lease) -> None:
        """Drops a `lease` in host memory, or recalls it from its owner."""
        if lease.owner != self.request.lease.owner:
            self.recalled.append(lease.id)
            self.sentences.append(
                f"{self._owner(lease)} is asked to unload {lease.name} from the warm pool."
            )
            return
        because = f"The warm pool is full; {self.request.lease.name} needs room on {self.at}."
        self._leave(Drop(lease.id, lease.shares, because))
        self.sentences.append(f"{lease.name} is unloaded from the warm pool.")

    def evict(self, lease: Lease) -> None:
        """Moves or drops a `lease` on a device, or recalls it from its owner."""
        name, size = self.request.lease.name, show_bytes(self.request.footprint.bytes)
        idle = show_seconds(lease.idle_seconds(self.world.now))
        because = f"{name} needs {size} on {self.at}; {lease.name} was idle for {idle}."
        step = eviction_step(lease, self.host_room, self.world, because=because)
        if isinstance(step, Move):
            self.host_room -= lease.own_bytes
        described = f"{lease.name} ({show_bytes(lease.bytes)}, idle {idle})"
        if lease.owner != self.request.lease.owner:
            self._recall(lease, described)
        elif step is None:
            self.sentences.append(f"{lease.name} is evicted once the host has room.")
        else:
            self._leave(step)
            done = "offloaded to host" if isinstance(step, Move) else "unloaded"
            self.sentences.append(f"{described} is {done}.")

    def _recall(self, lease: Lease, described: str) -> None:
        self.recalled.append(lease.id)
        owner = self._owner(lease)
        if lease.id in self.context.silent:
            self.sentences.append(f"{owner} was asked to evict {described}, and does not answer.")
        else:
            self.sentences.append(f"{owner} is asked to evict {described}.")

    def _leave(self, step: Move | Drop) -> None:
        self.book = mark_leaving(self.book, step, self.request.key)
        self.steps.append(step)

    def _owner(self, lease: Lease) -> str:
        owner = self.book.owner(lease.owner)
        return owner.label if owner else lease.owner


def _with_cost(way: Way) -> Candidate:
    candidate = way.candidate
    return Candidate(
        candidate.shares,
        candidate.fits,
        candidate.because,
        tuple([lease.id for lease in way.leaving]),
        way.seconds,
        candidate.filled,
    )
