"""A dry run of admission: what a request would get now, changing nothing."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from ..facts import (
    HOST,
    MOST_ENTRIES,
    Book,
    Candidate,
    Grant,
    Move,
    Plan,
    Policy,
    Refuse,
    Request,
    Step,
    World,
    cards_label,
    one_memory,
)
from .admission import admit
from .capacity import room
from .eligibility import eviction_step
from .placement import runners_up
from .pressure import sample_of
from .transitions import perform


def plan(book: Book, request: Request, world: World, rank: Policy) -> Plan:
    """What would happen, doing nothing: the same decisions, with every step taken to succeed."""
    steps: tuple[Step, ...] = ()
    asked: tuple[str, ...] = ()
    reasons: list[str] = []
    considered: tuple[Candidate, ...] = ()
    for _ in range(MOST_ENTRIES):
        book, verdict = admit(book, request, world, rank)
        considered = considered or verdict.considered
        reasons.append(verdict.because)
        if isinstance(verdict, Grant):
            shares, rules = verdict.lease.target or verdict.lease.shares, request.placement
            return Plan(
                True,
                steps + verdict.steps,
                shares,
                " ".join(_sentences(reasons)),
                runners_up(considered, shares, rules),
                asked,
                request.footprint,
                request.lease.name,
                cards_label(shares, request.lease.backend),
            )
        if isinstance(verdict, Refuse):
            break
        round_steps = [*verdict.steps, *_obedience(book, verdict.asked, world)]
        if not round_steps:
            break
        for step in round_steps:
            book, world = perform(book, step, world), _as_if_measured(book, step, world)
        steps += tuple(round_steps)
        asked += tuple(id for id in verdict.asked if id not in asked)
    return Plan(
        False, (), (), reasons[-1], considered, asked, request.footprint, request.lease.name
    )


def _obedience(book: Book, asked: Iterable[str], world: World) -> list[Step]:
    """What those who are asked to step aside would do, taken to comply."""
    host_room = room(book, world).get(HOST, 0)
    steps: list[Step] = []
    for lease in sorted(filter(None, map(book.find, asked)), key=lambda lease: lease.droppable):
        step = eviction_step(lease, host_room, world)
        if isinstance(step, Move):
            host_room -= lease.own_bytes
        if step:
            steps.append(step)
    return steps


def _as_if_measured(book: Book, step: Step, world: World) -> World:
    """The world with samples that show what the step freed."""
    samples = dict(world.samples)
    shared = one_memory(world.devices)
    for device in world.devices:
        same = shared if device.id in shared else (device.id,)
        freed = sum(s.bytes for s in getattr(step, "source", ()) if s.device in same)
        sample = None if device.simulated else sample_of(device, book, world)
        if freed and sample and sample.free_bytes is not None:
            samples[device.id] = replace(sample, free_bytes=sample.free_bytes + freed)
    return replace(world, samples=samples)


def _sentences(reasons: list[str]) -> list[str]:
    return [reason if reason.endswith(".") else reason + "." for reason in dict.fromkeys(reasons)]
