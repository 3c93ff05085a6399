"""Decisions that no waiting request makes: dry runs, loads ahead of a cell, and recorded decisions.

Pure. A dry run shows what a request would get now. It calls `admit` repeatedly, as if every step
succeeded at once. The caller's book is unchanged.

A load before the cell that uses the model has begun is a guess: the cell may never use the model.
The load spends free memory, or the memory of an idle model of the same process that is used later
or never. The load never waits, frees no copy in host memory, and never makes another process evict
anything. While any request waits, no model is loaded ahead.

A recorded decision can be made again: the record has everything that the scheduler reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import median

from msgspec.structs import replace

from ..facts import (
    HOST,
    HOST_BYTES_PER_SECOND,
    MOST_ENTRIES,
    Book,
    Candidate,
    CellModels,
    Decided,
    Drop,
    Event,
    Grant,
    Lease,
    Leaver,
    Move,
    Plan,
    PlanLevel,
    Policy,
    Refuse,
    Replayed,
    Request,
    Section,
    Shed,
    Step,
    Verdict,
    Wait,
    World,
    cards_label,
    one_memory,
    where,
)
from ..facts.decisions import verdict_kind
from ..units import show_bytes, show_seconds
from .admission import admit, leavers
from .capacity import room, sample_of
from .placement import runners_up
from .policies import policy
from .transitions import MOST_BESIDE, after_step
from .victims import copied_bytes, eviction_step, mark_leaving, shed_step


def plan(book: Book, request: Request, world: World, rank: Policy) -> Plan:
    """What would happen to this `request` if every step of the decisions of `admit` succeeded.

    `book`, `world` and `rank` (the eviction policy) are as in `admit`. The caller's book is
    unchanged.
    """
    steps: tuple[Step, ...] = ()
    asked: tuple[str, ...] = ()
    reasons: list[str] = []
    considered: tuple[Candidate, ...] = ()
    before, now = book, world
    level = PlanLevel.WAIT
    for _ in range(MOST_ENTRIES):
        book, verdict = admit(book, request, world, rank)
        considered = considered or verdict.considered
        reasons.append(verdict.because)
        if isinstance(verdict, Grant):
            granted = _granted(request, verdict, steps + verdict.steps, asked, reasons, considered)
            found = _with_effort(granted, verdict, steps, before, book, world)
            return replace(
                found, leavers=_leavers(before, request, now, rank, steps) if steps else ()
            )
        if isinstance(verdict, Refuse):
            level = PlanLevel.NEVER
            break
        round_steps = [*verdict.steps, *_steps_of_others(book, verdict, world)]
        if not round_steps:
            break
        for step in round_steps:
            after = after_step(book, step, world)
            world = _as_if_measured(book, step, world)
            book = after
        steps += tuple(round_steps)
        asked += tuple(id for id in verdict.asked if id not in asked)
    return Plan(
        granted=False,
        steps=(),
        shares=(),
        because=reasons[-1],
        considered=considered,
        asked=asked,
        footprint=request.footprint,
        name=request.lease.name,
        level=level,
        leavers=_leavers(before, request, now, rank, steps) if level is PlanLevel.WAIT else (),
    )


def _leavers(
    book: Book, request: Request, world: World, rank: Policy, steps: tuple[Step, ...]
) -> tuple[Leaver, ...]:
    """The candidates of the first decision. Those that leave in the `steps` are marked."""
    leaving = {(step.lease, isinstance(step, Shed)) for step in steps}
    return tuple(
        replace(leaver, leaves=(leaver.lease, leaver.what in ("copy", "to disk")) in leaving)
        for leaver in leavers(book, request, world, rank)
    )


def _granted(
    request: Request,
    grant: Grant,
    steps: tuple[Step, ...],
    asked: tuple[str, ...],
    reasons: list[str],
    considered: tuple[Candidate, ...],
) -> Plan:
    shares = grant.lease.target or grant.lease.shares
    rules = request.placement
    return Plan(
        granted=True,
        steps=steps,
        shares=shares,
        because=" ".join(_sentences(reasons)),
        considered=runners_up(considered, shares, rules),
        asked=asked,
        footprint=request.footprint,
        name=request.lease.name,
        cards=cards_label(shares, request.lease.backend),
    )


def _with_effort(
    granted: Plan,
    grant: Grant,
    evictions: tuple[Step, ...],
    before: Book,
    after: Book,
    world: World,
) -> Plan:
    """The plan with its level, its seconds, its victims, and the bytes that stay free.

    `evictions` are the steps that evict other leases before the grant. `before` is the caller's
    book, and `after` the book with all steps and the grant.
    """
    leaving = [step for step in evictions if not isinstance(step, Shed)]
    victims = tuple(dict.fromkeys(step.lease for step in leaving))
    evicted = before.find_all(victims)
    own_seconds, measured = _own_seconds(grant)
    moves = [step for step in leaving if isinstance(step, Move)]
    offloaded = sum(one.offload_bytes for one in before.find_all(move.lease for move in moves))
    sheds = before.find_all(step.lease for step in evictions if isinstance(step, Shed))
    # What moves to a disk is written, and then read and compared.
    stowing = 2 * sum(lease.seconds_from_disk for lease in sheds if not lease.shadow_bytes)
    free = room(after, world)
    return replace(
        granted,
        level=_level(grant, bool(victims)),
        seconds=own_seconds + offloaded / HOST_BYTES_PER_SECOND + stowing,
        measured=measured and not offloaded and not stowing,
        victims=victims,
        victims_importance=min([lease.importance for lease in evicted], default=0),
        victims_wished=max([lease.wished for lease in evicted], default=0),
        left_bytes=min((free.get(share.device, 0) for share in granted.shares), default=0),
    )


def _level(grant: Grant, evicts: bool) -> PlanLevel:
    if not grant.steps:
        return PlanLevel.HERE
    if isinstance(grant.steps[0], Move):
        return PlanLevel.RESTORE_EVICTING if evicts else PlanLevel.RESTORE
    return PlanLevel.EVICT if evicts else PlanLevel.ROOM


def _own_seconds(grant: Grant) -> tuple[float, bool]:
    """Seconds that the model's load or restore takes, and whether these seconds were measured."""
    if not grant.steps:
        return 0.0, True
    lease, step = grant.lease, grant.steps[0]
    size = _bytes(step)
    if isinstance(step, Move):
        seconds = lease.seconds_to_restore(max(size, lease.bytes))
        return seconds * min(1.0, size / (lease.bytes or 1)), bool(lease.restore_seconds)
    return lease.seconds_to_load(size), bool(lease.reload_seconds)


def _bytes(step: Step) -> int:
    shares = step.source if isinstance(step, (Drop, Shed)) else step.shares
    return sum(share.bytes for share in shares)


def _steps_of_others(book: Book, verdict: Wait, world: World) -> list[Step]:
    """The steps by which other owners do what `verdict` requests: evict leases, free shadows."""
    host_room = room(book, world).get(HOST, 0)
    leases = book.find_all(verdict.recalls)
    leases.sort(key=lambda lease: lease.droppable)  # leases that need host memory are first
    steps: list[Step] = [
        shed_step(lease, "Another model needs its place in RAM.")
        for lease in book.find_all(verdict.shadows)
    ]
    for lease in leases:
        step = eviction_step(lease.leaving(verdict.recalls[lease.id]), host_room, world)
        if step is None:
            continue
        host_room -= copied_bytes(lease, step)
        steps.append(step)
    return steps


def _as_if_measured(book: Book, step: Step, world: World) -> World:
    """The `world` as a measurement after the finished `step` would show it.

    A sample is one measurement of a device. In the samples, the bytes that the step freed are free.
    """
    source = getattr(step, "source", ())
    samples = dict(world.samples)
    shared = one_memory(world.devices)
    for device in world.devices:
        if device.simulated:
            continue
        same_memory = shared if device.id in shared else (device.id,)
        freed = sum(share.bytes for share in source if share.device in same_memory)
        if not freed:
            continue
        sample = sample_of(device, book, world)
        if sample and sample.free_bytes is not None:
            samples[device.id] = replace(sample, free_bytes=sample.free_bytes + freed)
    return replace(world, samples=samples)


def _sentences(reasons: list[str]) -> list[str]:
    """The `reasons` as sentences, without repetitions.

    Several reasons may begin with what the model needs. Only the first one keeps this part.
    """
    first, *others = dict.fromkeys(reasons)
    head = first.partition("; ")[0] + "; "
    found = [first]
    for reason in others:
        rest = reason.removeprefix(head)
        found.append(reason if rest == reason else f"Then {rest}")
    return [reason if reason.endswith(".") else reason + "." for reason in found]


# -- loads beside other models ---------------------------------------------------------------------


MOST_LOADS = 50  # at most this many loads of a model are compared, the newest


def interference(loads: Sequence[Event]) -> str:
    """A sentence that compares the median seconds of `loads` alone and beside other models.

    `loads` are the load events of one model, the newest last. A load counts only if its source is
    the source of the newest load. If only one of the two kinds of loads was measured, or none, the
    result is empty.
    """
    measured = [load for load in loads if load.seconds and load.source == loads[-1].source]
    alone = [load.seconds for load in measured if not load.beside]
    beside = [load for load in measured if load.beside]
    if not alone or not beside:
        return ""
    names = sorted({name for load in beside for name in load.beside})[:MOST_BESIDE]
    slower = median(load.seconds for load in beside)
    return (
        f"Loads took {show_seconds(median(alone))} alone, and {show_seconds(slower)} beside "
        f"{', '.join(names)}."
    )


# -- loads before the cell that uses the model -----------------------------------------------------


# The rank of a model that a running or waiting cell uses is this number, less the model's place in
# the order of use. The number is far above the ranks of every policy.
_SCHEDULED = 1e15


def next_uses(cells: Sequence[CellModels]) -> dict[str, int]:
    """Maps the name of each model to the number of models that are used before it.

    `cells` are the running cell and the waiting cells, in order.
    """
    order: dict[str, int] = {}
    for cell in cells:
        for name in cell.uses:
            order.setdefault(name, len(order))
    return order


def with_next_uses(rank: Policy, owner: str, uses: Mapping[str, int]) -> Policy:
    """The policy `rank`, changed so that models of `owner` that are used soon leave last.

    `uses` is the result of `next_uses`. The model that is used soonest leaves after all others.
    """
    if not uses:
        return rank

    def hinted(lease: Lease, world: World) -> float:
        if lease.owner == owner and lease.name in uses:
            return _SCHEDULED - uses[lease.name]
        return rank(lease, world)

    return hinted


def load_ahead(
    book: Book,
    request: Request,
    world: World,
    rank: Policy,
    uses: Mapping[str, int],
    spared: Collection[str],
    cell: str,
) -> tuple[Book, Grant | Wait]:
    """A Grant if the model may be loaded ahead now, else a Wait; and the new `book`.

    The steps of a Wait evict idle models of the same process. After these steps, the caller calls
    this function again. A Wait without steps means that the model is not loaded ahead now. No
    ticket is written in any case.

    `uses` is the result of `next_uses`. `spared` are the models that stay because the running cell
    names them. `cell`, such as "cell 7", is the first cell that uses the model. `world` and `rank`
    are as in `admit`.
    """
    if book.tickets:
        return book, Wait("a request waits, and comes first")
    request = replace(request, wait=False)
    guarded = _guarded(book, request, uses, spared)
    _, verdict = admit(guarded, request, world, rank)
    if isinstance(verdict, Refuse):
        return book, Wait(verdict.because)
    if isinstance(verdict, Grant):
        return _granted_ahead(book, request, world, rank, f"loaded ahead: {cell} uses it")
    if verdict.shadows or any(isinstance(step, Shed) for step in verdict.steps):
        return book, Wait("RAM has too little free room for the models that would leave")
    if verdict.asked or not verdict.steps:
        return book, Wait(verdict.because)
    room_for = f"room for {request.lease.name}: {cell} uses it, and no cell before uses"
    steps = []
    for step in verdict.steps:
        step = replace(step, because=f"{room_for} {step.lease.partition('/')[2]}.")
        book = mark_leaving(book, step, request.key)
        steps.append(step)
    return book, Wait(verdict.because, tuple(steps))


def _granted_ahead(
    book: Book, request: Request, world: World, rank: Policy, because: str
) -> tuple[Book, Grant | Wait]:
    """The book with the grant, and the Grant. Both give `because` as the reason of the load."""
    after, verdict = admit(book, request, world, rank)
    if not isinstance(verdict, Grant):
        return book, Wait(verdict.because)
    if after.seq > book.seq:
        *others, granted = after.events
        after = replace(after, events=(*others, replace(granted, because=f"{because}.")))
    steps = tuple(replace(step, because=f"{because}.") for step in verdict.steps)
    return after, replace(verdict, steps=steps, because=because)


def _guarded(
    book: Book, request: Request, uses: Mapping[str, int], spared: Collection[str]
) -> Book:
    """The book for the decision on a load ahead: each lease that must stay is marked as in use."""
    owner, own_use = request.lease.owner, uses.get(request.lease.name, len(uses))

    def may_leave(lease: Lease) -> bool:
        if lease.owner != owner or lease.kind != "model" or lease.name in spared:
            return False
        return lease.name not in uses or uses[lease.name] > own_use

    sections = {id: _with_pins(section, may_leave) for id, section in book.sections.items()}
    return replace(book, sections=sections)


def _with_pins(section: Section, may_leave: Callable[[Lease], bool]) -> Section:
    leases = [
        lease if lease.pins or may_leave(lease) else replace(lease, pins=1)
        for lease in section.leases
    ]
    return replace(section, leases=tuple(leases))


# -- recorded decisions, made again ----------------------------------------------------------------


def replayed(decided: Decided, version: str) -> Replayed:
    """Makes the decision `decided` again. `version` is the version of the running scheduler."""
    book, request, world = decided.book, decided.request, decided.world
    _, verdict = admit(book, request, world, policy(decided.policy))
    verdict = replace(verdict, considered=())
    then, now = _parts(decided.verdict), _parts(verdict)
    return Replayed(
        decided.id,
        decided.wall,
        decided.model,
        _sentence(decided.verdict),
        _sentence(verdict),
        verdict == decided.verdict,
        tuple(_differences(then, now)) if verdict != decided.verdict else (),
        decided.version if decided.version != version else "",
    )


def _sentence(verdict: Verdict) -> str:
    because = verdict.because.rstrip(".")
    return f"{verdict_kind(verdict)}: {because}."


def _parts(verdict: Verdict) -> dict[str, str]:
    """The parts of `verdict` that determine what happens, as texts by name."""
    parts = {"verdict": verdict_kind(verdict)}
    parts["steps"] = ", ".join(_step(step) for step in getattr(verdict, "steps", ()))
    if isinstance(verdict, Wait):
        parts["what was asked to leave"] = ", ".join((*verdict.asked, *verdict.shadows))
    return parts


def _step(step: Step) -> str:
    shares = getattr(step, "shares", None) or step.source  # type: ignore[union-attr]
    size = show_bytes(sum(share.bytes for share in shares))
    verb = type(step).__name__.lower()
    return f"{verb} {step.lease.partition('/')[2]} ({size}, {where(shares)})"


def _differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    found = []
    for part in dict.fromkeys((*then, *now)):
        old, new = then.get(part, ""), now.get(part, "")
        if old != new:
            found.append(f"The {part}: {old or 'none'} then, {new or 'none'} now.")
    return found or ["Only the wording or the figures differ."]
