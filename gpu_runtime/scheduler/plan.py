"""A dry run of admission shows what a request would get now. The caller's book is unchanged.

Pure. The dry run calls `admit` repeatedly, as if every step succeeded at once.
"""

from __future__ import annotations

from msgspec.structs import replace

from ..facts import (
    HOST,
    MOST_ENTRIES,
    Book,
    Candidate,
    Drop,
    Grant,
    Move,
    Plan,
    PlanLevel,
    Policy,
    Refuse,
    Request,
    Shed,
    Step,
    Wait,
    World,
    cards_label,
    one_memory,
)
from . import shadows
from .admission import admit
from .capacity import room
from .evictable import copied_bytes, eviction_step
from .eviction_policy import HOST_BYTES_PER_SECOND, seconds_to_load, seconds_to_restore
from .placement import runners_up
from .pressure import sample_of
from .transitions import perform


def plan(
    book: Book,
    request: Request,
    world: World,
    rank: Policy,
) -> Plan:
    """What would happen to this `request` if every step of the decisions of `admit` succeeded.

    `book`, `world` and `rank` (the eviction policy) are as in `admit`. The caller's book is
    unchanged.
    """
    steps: tuple[Step, ...] = ()
    asked: tuple[str, ...] = ()
    reasons: list[str] = []
    considered: tuple[Candidate, ...] = ()
    before = book
    level = PlanLevel.WAIT
    for _ in range(MOST_ENTRIES):
        book, verdict = admit(book, request, world, rank)
        considered = considered or verdict.considered
        reasons.append(verdict.because)
        if isinstance(verdict, Grant):
            granted = _granted(
                request,
                verdict,
                steps + verdict.steps,
                asked,
                reasons,
                considered,
            )
            return _with_effort(granted, verdict, steps, before, book, world)
        if isinstance(verdict, Refuse):
            level = PlanLevel.NEVER
            break
        round_steps = [*verdict.steps, *_steps_of_others(book, verdict, world)]
        if not round_steps:
            break
        for step in round_steps:
            after = perform(book, step, world)
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
    evicted = [lease for id in victims if (lease := before.find(id))]
    own_seconds, measured = _own_seconds(grant)
    moves = [step for step in leaving if isinstance(step, Move)]
    offloaded = sum(lease.offload_bytes for one in moves if (lease := before.find(one.lease)))
    free = room(after, world)
    return replace(
        granted,
        level=_level(grant, bool(victims)),
        seconds=own_seconds + offloaded / HOST_BYTES_PER_SECOND,
        measured=measured and not offloaded,
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
        seconds = seconds_to_restore(lease, max(size, lease.bytes))
        return seconds * min(1.0, size / (lease.bytes or 1)), bool(lease.restore_seconds)
    return seconds_to_load(lease, size), bool(lease.reload_seconds)


def _bytes(step: Step) -> int:
    shares = step.source if isinstance(step, (Drop, Shed)) else step.shares
    return sum(share.bytes for share in shares)


def _steps_of_others(
    book: Book,
    verdict: Wait,
    world: World,
) -> list[Step]:
    """The steps by which other owners do what `verdict` requests: evict leases, free shadows."""
    host_room = room(book, world).get(HOST, 0)
    parts = dict(zip(verdict.asked, verdict.asked_bytes, strict=False))
    leases = [lease for id in verdict.asked if (lease := book.find(id))]
    leases.sort(key=lambda lease: lease.droppable)  # leases that need host memory are first
    steps: list[Step] = [
        shadows.shed(lease, "Another model needs its place in host memory.")
        for id in verdict.shadows
        if (lease := book.find(id))
    ]
    for lease in leases:
        step = eviction_step(lease, host_room, world, part=parts.get(lease.id, 0))
        if step is None:
            continue
        host_room -= copied_bytes(lease, step)
        steps.append(step)
    return steps


def _as_if_measured(
    book: Book,
    step: Step,
    world: World,
) -> World:
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
