"""Who gets room, who waits, who steps aside: the decisions of the house.

Pure: a book, a request and the world as it is go in; a new book and a verdict come out. Nothing here reads a clock, a
device, a setting or a ledger, so a decision can be made twice, or replayed in a test.

What others did is recorded by `settle`, `abandon` and their like in `bookkeeping.py`.
"""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from .bookkeeping import note
from .facts import (
    HOST, IMPORTANCE, MOST_ENTRIES, Book, Candidate, Drop, Footprint, Grant, Lease, Load, Move, Phase, Plan, Policy, Refuse,
    Request, Share, Shares, Step, Ticket, Verdict, Wait, World,
)
from .placement import place
from .policy import victims
from .pressure import sample_of
from .units import show_bytes, show_seconds

_CLASSES = sorted(IMPORTANCE.values())


def admit(book: Book, request: Request, world: World, rank: Policy) -> tuple[Book, Verdict]:
    """Whether the request gets its room now, must wait, or can never have it.

    1. settled here already → Grant, no steps
    2. on its way in or out → Wait
    3. hopeless → Refuse, evicting nothing
    4. fits in what is free, elders' needs set aside → Grant: Load, or Move back from host
    5. fits once idle leases have left → Wait, with our own Moves and Drops to do now, others' asked on the ticket
    6. deadlocked → Refuse the youngest, naming the cycle
    7. otherwise → Wait behind its elders

    A Grant is a reservation: the lease is in the book, pinned by its loader, and its bytes count from now on.
    """
    wanted = request.lease
    lease = book.lease(wanted.owner, wanted.name)

    # An answer that was written but never heard (an interrupt, a lost reply) is given again.
    if lease and lease.key == request.key and lease.phase is Phase.ARRIVING:
        return book, Grant(lease, (_arrival(lease),), "granted before")

    # 1. settled here already
    if lease and lease.phase is Phase.SETTLED and (lease.on_device or lease.kind == "block"):
        return _without_ticket(book, request), Grant(lease, (), f"{lease.name} is on {lease.where} already")

    # 2. on its way in or out
    if lease and lease.phase is not Phase.SETTLED:
        going = "arriving" if lease.phase is Phase.ARRIVING else "stepping aside"
        return _queue(book, request, world, Wait(f"{lease.name} is {going}"), ())

    if lease:  # it lies in host memory: what it needs was measured there
        request = replace(request, footprint=Footprint.of(lease.bytes, "measured"))
    ground = _Ground.of(book, request, world)

    # 3. hopeless
    if refusal := _hopeless(book, request, world, ground):
        return _refuse(book, request, world, refusal)

    # 4. fits in what is free
    candidates = place(request.footprint, ground.free_for(request), request.placement)
    blind = [c for c in candidates if c.fits and c.shares[0].device in ground.blind]
    for candidate in candidates:
        if candidate.fits and candidate not in blind:
            return _grant(book, request, world, candidate, candidates)
    if blind:
        return _queue(book, request, world, Wait(ground.blind[blind[0].shares[0].device], considered=candidates), ())

    # 5. fits once idle leases have left
    if way := _cheapest_way(book, request, world, rank, ground, candidates):
        return _make_room(book, request, world, ground, way)

    # 6. deadlocked
    wait = _waiting(book, request, world, ground, candidates)
    queued, verdict = _queue(book, request, world, wait, candidates[0].shares if candidates else ())
    if isinstance(verdict, Wait) and (cycle := deadlocked(queued, world)):
        youngest = max(cycle, key=lambda ticket: (ticket.arrived, ticket.key))
        if youngest.key == request.key:
            names = ", ".join(f"{t.name} waits while its thread holds {_names(book, t.held)}" for t in cycle)
            return _refuse(book, request, world, Refuse(
                f"waiting would never end: {names}", kind="deadlock", need_bytes=request.footprint.bytes))

    # 7. otherwise
    return queued, verdict


def plan(book: Book, request: Request, world: World, rank: Policy) -> Plan:
    """What would happen, doing nothing: the same decisions, with every step taken to succeed."""
    from .bookkeeping import perform

    steps: tuple[Step, ...] = ()
    asked: tuple[str, ...] = ()
    reasons: list[str] = []
    considered: tuple[Candidate, ...] = ()
    verdict: Verdict
    for _ in range(MOST_ENTRIES):
        book, verdict = admit(book, request, world, rank)
        considered = considered or verdict.considered
        reasons.append(verdict.because)
        if isinstance(verdict, Grant):
            shares = verdict.lease.target or verdict.lease.shares
            return Plan(True, steps + verdict.steps, shares, " ".join(_sentences(reasons)), considered, asked,
                        request.footprint, request.lease.name)
        if isinstance(verdict, Refuse) or not (verdict.steps or verdict.asked):
            break
        for step in verdict.steps:
            book = perform(book, step, world)
        for id in verdict.asked:  # taken to comply
            lease = _find(book, id)
            exit = lease and way_out(lease, room(book, world).get(HOST, 0), world)
            if lease and exit:
                book, steps = perform(book, exit, world), (*steps, exit)
        asked += verdict.asked
        steps += verdict.steps
    return Plan(False, (), (), reasons[-1], considered, asked, request.footprint, request.lease.name)


# -- room ---------------------------------------------------------------------------------------------------------

def room(book: Book, world: World) -> dict[str, int]:
    """Bytes that a grant may spend on each device; negative in an overdraft.

    min(limit − claims, measured free − reserve − what the sample cannot have seen). A simulated device has no
    sample: there the book is the measurement.
    """
    return _room(book, world)[0]


def _room(book: Book, world: World) -> tuple[dict[str, int], dict[str, str]]:
    """The room, and for each device that cannot be seen well enough to grant on it, why."""
    claims = book.claims()
    free: dict[str, int] = {}
    blind: dict[str, str] = {}
    for device in world.devices:
        id = device.id
        free[id] = min(world.limits[id], book.limits.get(id, world.limits[id])) - claims.get(id, 0)
        if device.simulated:
            continue
        sample = sample_of(device, book, world)
        if sample is None:
            blind[id] = f"{id} has not been measured yet"
        elif sample.free_bytes is None:
            blind[id] = f"the driver of {id} does not say how much memory is free"
        elif world.now - sample.taken_at > world.rules.stale_seconds:
            blind[id] = f"the last measurement of {id} is {show_seconds(world.now - sample.taken_at)} old"
        else:
            unseen = sum(share.bytes for lease in book.leases() for share in _unseen(lease, sample.taken_at)
                         if share.device == id)
            free[id] = min(free[id], sample.free_bytes - world.rules.reserve_bytes - unseen)
    return free, blind


def _unseen(lease: Lease, taken_at: float) -> Shares:
    """Bytes of this lease that a sample taken then cannot have counted."""
    if lease.phase is Phase.SETTLED:
        return lease.shares if lease.settled_at > taken_at else ()
    return lease.target


class _Ground(NamedTuple):
    """What one decision stands on, computed once."""

    now: Mapping[str, int]  # room as it is
    later: Mapping[str, int]  # room once elders have what they need, and what is leaving has left
    leaving: Mapping[str, str]  # device -> name of somebody on the way out of it
    blind: Mapping[str, str]
    elders: tuple[Ticket, ...]
    promised: frozenset[str]  # lease ids that elders have asked for
    mine: int | None  # bytes left under this owner's own limit

    @classmethod
    def of(cls, book: Book, request: Request, world: World) -> _Ground:
        now, blind = _room(book, world)
        elders = tuple(t for t in book.tickets if _before(t, request, world)) if book.tickets else ()
        stands = tuple(t for t in elders if not _may_pass(book, t, request, world))
        promised = frozenset(id for t in stands for id in t.recalls)
        later, leaving = dict(now), {}
        for ticket in stands:
            for share in ticket.need:
                later[share.device] = later.get(share.device, 0) - share.bytes
        for lease in book.leases():
            if lease.phase is Phase.LEAVING or lease.id in promised:
                for share in lease.shares:
                    later[share.device] = later.get(share.device, 0) + share.bytes
                    leaving[share.device] = lease.name
        mine = None
        if world.rules.limit_bytes is not None and request.lease.kind == "model":
            mine = world.rules.limit_bytes - _on_cards(book, request.lease.owner)
        return cls(now, later, leaving, blind, elders, promised, mine)

    def free_for(self, request: Request) -> dict[str, int]:
        """What this request may take now on each card without taking what an elder was promised."""
        free = {id: min(size, self.later[id]) for id, size in self.now.items() if id != HOST}
        if self.mine is not None:
            free = {id: min(size, self.mine) for id, size in free.items()}
        return free


def _on_cards(book: Book, owner: str) -> int:
    section = book.sections.get(owner)
    leases = section.leases if section else ()
    return sum(share.bytes for lease in leases for share in lease.claims() if share.device != HOST)


# -- the queue ----------------------------------------------------------------------------------------------------

def aged(importance: int, waited_seconds: float, world: World) -> int:
    """The importance that a request stands in the queue with: one class more for each 30 s waited.

    >>> from gpu_runtime.facts import Rules
    >>> aged(20, 65.0, World(0, 0, (), {}, rules=Rules()))
    5
    """
    steps = int(waited_seconds // world.rules.ageing_seconds)
    if steps <= 0:
        return importance
    place = bisect_left(_CLASSES, importance)
    return min(importance, _CLASSES[max(0, place - steps)])


def _rank_in_queue(importance: int, arrived: float, key: str, world: World) -> tuple[int, float, str]:
    return aged(importance, world.now - arrived, world), arrived, key


def queue(book: Book, world: World) -> tuple[Ticket, ...]:
    """Waiting requests, the first to be served first."""
    waiting = [t for t in book.tickets if t.verb == "use"]
    return tuple(sorted(waiting, key=lambda t: _rank_in_queue(t.importance, t.arrived, t.key, world)))


def _before(ticket: Ticket, request: Request, world: World) -> bool:
    """Whether this ticket stands before the request. One not refreshed lately (a stopped process) is skipped."""
    if ticket.verb != "use" or ticket.key == request.key:
        return False
    if world.now - ticket.refreshed > world.rules.refresh_seconds:
        return False
    theirs = _rank_in_queue(ticket.importance, ticket.arrived, ticket.key, world)
    return theirs < _rank_in_queue(request.lease.importance, request.arrived, request.key, world)


def _may_pass(book: Book, elder: Ticket, request: Request, world: World) -> bool:
    """Whether the request may take room before this elder.

    It may while the elder could not use the room anyway: a model in use stands in its way (for 30 s, then no longer),
    or what stands in its way is held by the very thread that asks.
    """
    if elder.blocked_since and world.now - elder.blocked_since < world.rules.passing_seconds:
        return True
    places = {share.device for share in elder.need}
    held = (_find(book, id) for id in request.held)
    return any(share.device in places for lease in held if lease for share in lease.shares)


def _queue(book: Book, request: Request, world: World, wait: Wait, need: Shares) -> tuple[Book, Verdict]:
    """The book with the request's ticket in it. `need` is the room it waits for."""
    if not request.wait:
        return book, wait
    old = book.ticket(request.key)
    if old is None and sum(len(s.leases) for s in book.sections.values()) + len(book.tickets) >= MOST_ENTRIES:
        return _refuse(book, request, world, Refuse(
            f"the book is full: {MOST_ENTRIES} leases and requests", kind="full", need_bytes=request.footprint.bytes))
    blocked = bool(wait.blockers) and not wait.asked and not wait.steps
    since = (old.blocked_since if old and old.blocked_since else world.now) if blocked else 0.0
    ticket = Ticket(
        key=request.key, owner=request.lease.owner, verb="use", name=request.lease.name, arrived=request.arrived,
        refreshed=world.now, importance=request.lease.importance, need=need, recalls=wait.asked, held=request.held,
        blocked_since=since, because=wait.because)
    if old is None:
        book = note(book, world, request.lease, "waiting", "request", wait.because, size=request.footprint.bytes)
    return book.with_ticket(ticket), wait


def _without_ticket(book: Book, request: Request) -> Book:
    return book.without_ticket(request.key) if book.ticket(request.key) else book


# -- the answers --------------------------------------------------------------------------------------------------

def _arrival(lease: Lease, because: str = "") -> Step:
    if lease.shares:
        return Move(lease.id, lease.shares, lease.target, because)
    return Load(lease.id, lease.target, because)


def _grant(book: Book, request: Request, world: World, chosen: Candidate,
           considered: tuple[Candidate, ...]) -> tuple[Book, Verdict]:
    wanted = request.lease
    if book.ticket(request.key) is None and _entries(book) >= MOST_ENTRIES \
            and book.lease(wanted.owner, wanted.name) is None:
        return _refuse(book, request, world, Refuse(
            f"the book is full: {MOST_ENTRIES} leases and requests", kind="full", need_bytes=request.footprint.bytes))
    old = book.lease(wanted.owner, wanted.name)
    lease = replace(old or wanted, key=request.key, target=chosen.shares, phase=Phase.ARRIVING, pins=1,
                    pinned_since=world.now, last_used=world.now, importance=wanted.importance,
                    keep_alive=wanted.keep_alive)
    because = f"{lease.name} needs {show_bytes(request.footprint.bytes)}; {chosen.because}."
    book = _without_ticket(book, request).with_lease(lease)
    book = note(book, world, lease, "granted", "request", because, size=request.footprint.bytes,
                device=chosen.shares[0].device)
    return book, Grant(lease, (_arrival(lease, because),), because, considered)


def _refuse(book: Book, request: Request, world: World, refusal: Refuse) -> tuple[Book, Verdict]:
    book = _without_ticket(book, request)
    return note(book, world, request.lease, "refused", refusal.kind, refusal.because,
                size=request.footprint.bytes, device=refusal.device), refusal


def _hopeless(book: Book, request: Request, world: World, ground: _Ground) -> Refuse | None:
    """Why it can never fit, were everything gone that can go; None where it can.

    What cannot go: what is kept, what this thread itself pins, and what neither its source can reproduce nor the host
    can take in.
    """
    size = request.footprint.bytes
    name = request.lease.name
    cards = [d for d in world.devices if not d.is_host
             and (not request.placement.devices or d.id in request.placement.devices)]
    if not cards:
        places = ", ".join(request.placement.devices)
        return Refuse(f"{name} may only go to {places}, and this machine has no such device", need_bytes=size)
    best: Refuse | None = None
    for card in cards:
        limit = min(world.limits[card.id], book.limits.get(card.id, world.limits[card.id]))
        stuck = [(lease, why) for lease in book.leases()
                 if any(share.device == card.id for share in lease.shares)
                 and (why := _never_leaves(lease, request, world))]
        held = sum(share.bytes for lease, _ in stuck for share in lease.shares if share.device == card.id)
        if size <= limit - held:
            best = None
            break
        because = f"{name} needs {show_bytes(size)} on one device; the largest budget is {show_bytes(limit)} ({card.id})"
        if size <= limit:
            who = "; ".join(f"{lease.name} ({show_bytes(lease.bytes)}) {why}" for lease, why in stuck)
            because = f"{name} needs {show_bytes(size)}; {card.id} has {show_bytes(limit)}, and {who}"
        if best is None or limit > best.budget_bytes:
            best = Refuse(because, need_bytes=size, budget_bytes=limit, device=card.id,
                          holders=tuple(lease.id for lease, _ in stuck))
    if best is None and world.rules.limit_bytes is not None and request.lease.kind == "model":
        return _past_own_limit(book, request, world.rules.limit_bytes)
    return best


def _never_leaves(lease: Lease, request: Request, world: World) -> str:
    """Why this lease will not make room, however long one waits; empty where it may."""
    if lease.id in request.held:
        return "is held by the block that asks"
    if lease.kind == "block":
        return ""  # it ends with its cell
    if lease.keep:
        return "is kept on the device (unpin it to let it go)"
    if not lease.droppable and not (
            lease.movable and world.rules.offload and lease.bytes <= world.limits.get(HOST, 0)):
        return "exists nowhere else, and the host has no room for it"
    return ""


def _past_own_limit(book: Book, request: Request, limit: int) -> Refuse | None:
    """INFERENCE_MEMORY_LIMIT_GB: refused at once where what cannot leave now and the new one pass it together."""
    section = book.sections.get(request.lease.owner)
    stays = sum(share.bytes for lease in (section.leases if section else ())
                if lease.pins or lease.keep or not (lease.droppable or lease.movable)
                for share in lease.claims() if share.device != HOST)
    size = request.footprint.bytes
    if stays + size <= limit:
        return None
    gb = 2**30
    return Refuse(
        f"Loading '{request.lease.name}' ({size / gb:.1f}GB) would exceed memory limit "
        f"({stays / gb:.1f}GB + {size / gb:.1f}GB > {limit / gb:.1f}GB)",
        kind="limit", need_bytes=size, budget_bytes=limit - stays)


# -- making room --------------------------------------------------------------------------------------------------

def may_leave(lease: Lease, world: World, *, asker: str, importance: int) -> str:
    """Why this lease may not be asked to leave now; empty where it may. The in-use rule knows no exception."""
    if lease.pins:
        return "in use"
    if lease.phase is not Phase.SETTLED or lease.kind == "block":
        return "a block of code" if lease.kind == "block" else lease.phase.value
    if lease.keep:
        return "kept"
    if lease.importance < importance:
        return "more important"
    idle = lease.idle_seconds(world.now)
    if idle < lease.keep_alive and importance >= lease.importance:
        return "kept alive"
    if lease.owner != asker and idle < world.rules.grace_seconds:
        return "just used"
    return ""


def way_out(lease: Lease, host_room: int, world: World, *, drop: bool = False, because: str = "",
            reason: str = "request") -> Move | Drop | None:
    """How this lease leaves its device: to the host where it has room, else for good where its source has it.

    None where neither is possible: weights that exist nowhere else are never dropped.
    """
    moves = lease.movable and world.rules.offload and lease.bytes <= host_room and not lease.on_host
    if lease.droppable and (drop or not moves):
        return Drop(lease.id, lease.shares, because, reason)
    if moves:
        return Move(lease.id, lease.shares, (Share(HOST, lease.bytes),), because, reason)
    return None


class _Way(NamedTuple):
    candidate: Candidate
    leaving: tuple[Lease, ...]


def _cheapest_way(book: Book, request: Request, world: World, rank: Policy, ground: _Ground,
                  candidates: tuple[Candidate, ...]) -> _Way | None:
    """The card on which room can be made at the least cost: seconds of reloading caused, then fewest leases."""
    host_room = ground.now.get(HOST, 0)
    wanted = request.lease
    idle = [lease for lease in book.leases()
            if lease.on_device and lease.id not in ground.promised
            and not may_leave(lease, world, asker=wanted.owner, importance=wanted.importance)
            and (way_out(lease, host_room, world) or _warm_to_drop(book, lease, host_room, world, rank))]
    best: tuple[tuple[float, int, int], _Way] | None = None
    for place_in_order, candidate in enumerate(candidates):
        need = {share.device: share.bytes - ground.later[share.device] for share in candidate.shares}
        if ground.mine is not None:
            need[f"owner:{wanted.owner}"] = request.footprint.bytes - ground.mine
        chosen = victims(need, idle, world, rank)
        if chosen is None:
            continue
        cost = sum(lease.restore_seconds or lease.reload_seconds for lease in chosen)
        score = (cost, len(chosen), place_in_order)
        if best is None or score < best[0]:
            best = score, _Way(replace(candidate, victims=tuple(v.id for v in chosen), cost_seconds=cost), chosen)
    return best[1] if best else None


def _warm_to_drop(book: Book, lease: Lease, host_room: int, world: World, rank: Policy) -> tuple[Lease, ...]:
    """Leases of the same owner in the warm pool that would have to go for good so that this one finds room there."""
    if not (lease.movable and world.rules.offload):
        return ()
    warm = [other for other in book.sections[lease.owner].leases
            if other.on_host and other.droppable and not other.keep and not other.pins
            and other.phase is Phase.SETTLED]
    return victims({HOST: lease.bytes - host_room}, warm, world, rank) or ()


def _make_room(book: Book, request: Request, world: World, ground: _Ground, way: _Way) -> tuple[Book, Verdict]:
    """Wait, while our own victims leave (as steps, now) and others' owners are asked on the ticket."""
    name, size, card = request.lease.name, request.footprint.bytes, way.candidate.shares[0].device
    free = max(0, ground.now[card])
    head = f"{name} needs {show_bytes(size)}; {card} has {show_bytes(free)} free."
    if not way.leaving:
        because = f"{head} {ground.leaving.get(card, 'Another model')} is stepping aside."
        return _queue(book, request, world, Wait(because), way.candidate.shares)
    steps: list[Step] = []
    asked: list[str] = []
    host_room = ground.now.get(HOST, 0)
    told: list[str] = []
    for lease in way.leaving:
        idle = f"{show_bytes(lease.bytes)}, idle {show_seconds(lease.idle_seconds(world.now))}"
        if lease.owner != request.lease.owner:
            owner = book.owner(lease.owner)
            asked.append(lease.id)
            told.append(f"{lease.name} ({idle}) of {owner.label if owner else lease.owner} is asked to step aside.")
            continue
        because = f"{name} needs {show_bytes(size)} on {card}; {lease.name} was idle for " \
                  f"{show_seconds(lease.idle_seconds(world.now))}."
        exit = way_out(lease, host_room, world, because=because)
        if exit is None:  # the warm pool is full: its oldest goes first, this one follows on the next round
            for warm in _warm_to_drop(book, lease, host_room, world, _lru):
                drop = Drop(warm.id, warm.shares, f"The warm pool is full; {because}", "request")
                book, steps = _leave(book, drop, request.key), [*steps, drop]
                told.append(f"{warm.name} leaves the warm pool for good.")
            continue
        if isinstance(exit, Move):
            host_room -= lease.bytes
        book, steps = _leave(book, exit, request.key), [*steps, exit]
        told.append(f"{lease.name} ({idle}) steps aside to {'host' if isinstance(exit, Move) else 'disk'}.")
    wait = Wait(" ".join([head, *told]), tuple(steps), tuple(asked), considered=(way.candidate,))
    return _queue(book, request, world, wait, way.candidate.shares)


def _lru(lease: Lease, world: World) -> float:
    return lease.last_used


def _leave(book: Book, step: Move | Drop, key: str) -> Book:
    """The book with the step's lease on its way out; its bytes count, on both devices, until that is done."""
    lease = _find(book, step.lease)
    assert lease is not None
    target = step.shares if isinstance(step, Move) else ()
    return book.with_lease(replace(lease, phase=Phase.LEAVING, target=target, key=key))


def _waiting(book: Book, request: Request, world: World, ground: _Ground,
             candidates: tuple[Candidate, ...]) -> Wait:
    """What stands in the way, in words, and when time alone may have changed it."""
    wanted = request.lease
    card = candidates[0].shares[0].device if candidates else ""
    blockers, told, retry = [], [], []
    for lease in book.leases():
        if not any(share.device == card for share in lease.claims()):
            continue
        why = may_leave(lease, world, asker=wanted.owner, importance=wanted.importance)
        where = f"{lease.name} ({show_bytes(lease.bytes)} on {card})"
        if lease.phase is Phase.ARRIVING:
            blockers.append(lease.id)
            told.append(f"{where} is being loaded{_by(book, lease, wanted.owner, world)}")
        elif why == "in use":
            blockers.append(lease.id)
            told.append(f"{where} is in use{_by(book, lease, wanted.owner, world)}")
        elif why == "a block of code":
            blockers.append(lease.id)
            told.append(f"{where} is held by running code{_by(book, lease, wanted.owner, world)}")
        elif why == "just used":
            retry.append(lease.last_used + world.rules.grace_seconds)
            told.append(f"{where} was used {show_seconds(lease.idle_seconds(world.now))} ago")
        elif why == "kept alive":
            retry.append(lease.last_used + lease.keep_alive)
            told.append(f"{where} is kept alive for {show_seconds(retry[-1] - world.now)} more")
        elif why == "more important":
            told.append(f"{where} is more important (importance {lease.importance}, ours {wanted.importance})")
        elif why == "leaving":
            told.append(f"{where} is stepping aside")
    ahead = len(ground.elders)
    if not told and ahead:
        told.append(f"{ahead} request{'s come' if ahead > 1 else ' comes'} first")
    if not told:
        told.append(_strangers(card, ground, request))
    return Wait("; ".join(told), blockers=tuple(blockers), ahead=ahead, retry_at=min(retry, default=None),
                considered=candidates)


def _strangers(card: str, ground: _Ground, request: Request) -> str:
    return (f"{card} has {show_bytes(max(0, ground.now.get(card, 0)))} free as measured, "
            f"{show_bytes(request.footprint.bytes)} are needed; memory outside our leases is in the way")


def _by(book: Book, lease: Lease, asker: str, world: World) -> str:
    owner = book.owner(lease.owner)
    who = f" by {owner.label}" if owner and lease.owner != asker else ""
    since = f" for {show_seconds(world.now - lease.pinned_since)}" if lease.pinned_since and who else ""
    return who + since


# -- deadlock -----------------------------------------------------------------------------------------------------

def deadlocked(book: Book, world: World) -> tuple[Ticket, ...]:
    """The waiting requests that can never be served, because their threads hold what each other needs.

    By reduction (cycles in a wait-for graph are not enough where a need may be met in several ways): threads that wait
    for nothing will finish and give back; grant whatever then fits; its thread finishes too; repeat. What remains is
    deadlocked.

    Source: Holt 1972, Some Deadlock Properties of Computer Systems, ACM Computing Surveys 4(3).
    """
    waiting = [t for t in book.tickets if t.verb == "use"]
    if not any(t.held for t in waiting):
        return ()
    while True:
        held = {id for ticket in waiting for id in ticket.held}
        stays: dict[str, int] = {}
        for lease in book.leases():
            if lease.id in held or lease.keep:
                for share in lease.shares:
                    stays[share.device] = stays.get(share.device, 0) + share.bytes
        served = [t for t in waiting if all(
            share.bytes <= world.limits.get(share.device, 0) - stays.get(share.device, 0) for share in t.need)]
        if not served:
            return tuple(t for t in waiting if t.held)
        waiting = [t for t in waiting if t not in served]
        if not waiting:
            return ()


# -- small ones ---------------------------------------------------------------------------------------------------

def _entries(book: Book) -> int:
    return sum(len(section.leases) for section in book.sections.values()) + len(book.tickets)


def _find(book: Book, lease_id: str) -> Lease | None:
    owner, _, name = lease_id.partition("/")
    return book.lease(owner, name)


def _names(book: Book, ids: Iterable[str]) -> str:
    return ", ".join(id.partition("/")[2] for id in ids)


def _sentences(reasons: list[str]) -> list[str]:
    return [reason if reason.endswith(".") else reason + "." for reason in dict.fromkeys(reasons)]
