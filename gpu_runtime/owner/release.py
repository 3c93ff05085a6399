"""Moves or drops a model of this process, for an eviction or for a step that the book has decided.

A shadow is a copy in host memory of a model that is on a card. The last part keeps the times of a
model's uses when this process releases the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import Any

from msgspec.structs import replace

from ..devices.cgroups import ram_left
from ..errors import DoesNotFit, GpuError, StillInUse, first_line
from ..facts import (
    HOST,
    MOST_EVENTS,
    MOST_USES,
    Book,
    Drop,
    Grant,
    Lease,
    LeaseId,
    Move,
    Owner,
    Phase,
    Section,
    Share,
    Shares,
    Shed,
    Step,
    World,
    lease_title,
    merged_uses,
)
from ..ledgers.liveness import Sight
from ..scheduler import admission, feasibility, refusals, victims
from ..scheduler import transitions as books
from ..scheduler.capacity import room
from ..units import MIB, show_bytes
from . import disk, requests
from .resident import Place, Resident, Stays
from .session import Key, Session

log = logging.getLogger("gpu_runtime")

FIRST_PAUSE_SECONDS = 1.0  # after a failed move, before the model is chosen again
LONGEST_PAUSE_SECONDS = 60.0
# The least bytes that one stage of a move copies. The copy takes 10 ms at 25 GB/s, and the rest of
# the stage 3 ms.
STAGE_BYTES = 256 * MIB
SHED_SECONDS = 5.0  # the longest wait until another process has freed a model's copy in host memory
MOST_DECISIONS = 100  # of one eviction: each may find the model in use, or shadows to free first
LEAST_DISK_BYTES_PER_SECOND = 50 * MIB  # such a wait is longer by what so slow a disk takes


# What a decision returns: the step to perform, None if there is nothing to do, steps that must first
# free shadows in host memory, or the error of a refusal.
NextStep = tuple[Book, Move | Drop | tuple[Shed, ...] | GpuError | None]


def perform_step(
    session: Session,
    resident: Resident,
    verb: str,
    decision: Callable[[str, frozenset[str], Book, World], NextStep],
    *,
    by: str = "",
    fresh: bool = False,
) -> Move | Drop | None:
    """Performs the step that `decision(key, kept, book, world)` returns for a model of this process.

    If the model is used meanwhile, or its bytes change, the decision is made again. `kept` are the
    ids of the leases whose shadows could not be freed. `by` is the person who requested the step.
    If `fresh` is true, the devices are measured before each decision. Raises the error that the
    decision returns, StillInUse, and the errors of the move.
    """
    name, kept = resident.spec.name, frozenset[str]()
    key = session.new_key(f"{verb} {name}")
    try:
        for _ in range(MOST_DECISIONS):
            resident.moves_again_at = 0.0  # do not wait for the pause after a failed move
            step = session.transact(partial(decision, key.text, kept), fresh=fresh)
            if isinstance(step, GpuError):
                try:
                    raise step
                finally:
                    del step  # see pins.py
            if isinstance(step, tuple):
                kept |= _free_shadows(session, step)
            elif step is None or carry_out(session, step, key, by):
                return step
    finally:
        session.done_with(key.note)
        session.withdraw(key)
    raise StillInUse(f"{name} was used or changed at each of {MOST_DECISIONS} attempts.", name=name)


def evict(
    session: Session, resident: Resident, because: str, *, drop: bool = False, by: str = ""
) -> Move | Drop | None:
    """Evicts a model of this process now.

    Returns the step that was performed, or None if there is nothing to evict. If `drop` is true,
    the model is unloaded even if host memory has room. `by` is the person who requested the
    eviction. Raises StillInUse, DoesNotFit, and the errors of the move.
    """
    name = resident.spec.name

    def leave(key: str, kept: frozenset[str], book: Book, world: World) -> NextStep:
        """Returns the book with the model marked as leaving, and the step to perform."""
        away = resident.place is Place.AWAY and not resident.lease.in_parts
        if resident.handle is None or (away and not drop):
            return book, None
        lease = book.lease(session.me, name)
        if lease is None:
            return book, StillInUse(f"{name} is being loaded or moved; try again.", name=name)
        if why := victims.reason_to_stay(lease, world, asker=session.me, importance=victims.PERSON):
            return book, refusals.still_here(book, session.me, lease, why, world)
        host_room = room(book, world).get(HOST, 0)
        step = victims.eviction_step(
            lease, host_room, world, drop=drop, because=because, reason="evict"
        )
        if not isinstance(step, Move) and not drop:
            found = victims.host_room_for(book, lease, host_room, world, session.rank, spared=kept)
            if found:
                sheds = [victims.shed_step(other, because, "evict") for other in found[0]]
                return book, tuple(sheds)
        if not isinstance(step, Drop) and (why := feasibility.why_no_return(book, lease, world)):
            return book, _cannot_return(session, lease, why)
        if step is None and (refusal := resident.backend.refusal(name)):
            return book, refusal
        if step is None:
            return book, _only_copy(session, lease, resident.needed_elsewhere())
        return victims.mark_leaving(book, step, key), step

    return perform_step(session, resident, "evict", leave, by=by)


def _free_shadows(session: Session, steps: tuple[Shed, ...]) -> set[str]:
    """Frees the shadows that `steps` name. Shadows of other processes are recalled.

    Returns the ids of the leases whose shadows were not freed in time.
    """
    kept = set()
    for step in steps:
        target = LeaseId(*step.lease.split("/", 1))
        resident = session.residents.get(target.name) if target.owner == session.me else None
        if resident is not None and resident.lease.shed_bytes and not resident.shadow_bytes:
            disk.stow(session, resident, step.because)
            continue
        if target.owner == session.me:
            shed(session, step)
            continue
        size = step.source[0].bytes
        seconds = SHED_SECONDS + size / LEAST_DISK_BYTES_PER_SECOND
        verdict = requests.request(session, "shed", target, timeout=seconds)
        if not isinstance(verdict, Grant):
            kept.add(step.lease)
    return kept


def _cannot_return(session: Session, lease: Lease, why: str) -> DoesNotFit:
    title, size = lease_title(lease, session.owner), show_bytes(lease.own_bytes)
    return DoesNotFit(
        f"{title} ({size}) stays on {lease.where}: {why}.\n  What holds its memory:  %gpu who",
        name=lease.name,
        need_bytes=lease.own_bytes,
        device=lease.shares[0].device,
    )


def _only_copy(session: Session, lease: Lease, is_needed: bool) -> DoesNotFit:
    why, advice = victims.needs_host_room(lease), f"give it up for good:  rt.forget({lease.name!r})"
    if is_needed:
        why = "is needed by an autograd graph or a view, and RAM has no room for it"
        advice = "delete what holds it, for example the loss of an unfinished step"
    fixed = refusals.advice_on_fixed(why, lease.name)
    return DoesNotFit(
        f"{lease_title(lease, session.owner)} ({show_bytes(lease.bytes)}) {why}.\n"
        f"  {fixed or f'Raise CPU_MEMORY_MAX_PERCENT, or {advice}'}",
        name=lease.name,
        need_bytes=lease.bytes,
        device=HOST,
    )


def carry_out(session: Session, step: Move | Drop, key: Key, by: str = "") -> bool:
    """Performs a step for a model of this process, in a thread that an interrupt cannot stop.

    Returns False, without a move, if the model is in use or its bytes have changed. Raises the
    errors of the move.
    """
    failure = session.uninterrupted(key, lambda: _leave_now(session, step, key, by))
    try:
        if failure is not None and not isinstance(failure, Stays):
            raise failure
        return failure is None
    finally:
        del failure  # see pins.py


def perform_steps(
    session: Session,
    verb: str,
    decide: Callable[[Book, World, str], tuple[Book, Iterable[Step]]],
    begins: Callable[[], None] = lambda: None,
) -> None:
    """Performs the steps of `decide(book, world, key)`, by which leases of this process leave, after `begins()`."""
    key = session.new_key(verb)
    try:
        steps = session.transact(lambda book, world: decide(book, world, key.text))
        if steps:
            begins()
        for step in steps:
            step_aside(session, step, key)
    finally:
        session.done_with(key.note)


def step_aside(session: Session, step: Step, key: Key, by: str = "") -> bool:
    """Moves or drops a model of this process for another request. Returns False if the model stays.

    A failed move is logged here and not raised, because the error does not concern the requester.
    If a move fails and the rules allow a drop, the model is dropped instead.
    """
    if isinstance(step, Shed):
        return shed(session, step)
    assert isinstance(step, (Move, Drop))
    relieves = step.reason == "memory_pressure"  # the level of pressure decides whether to drop
    return _leave_now(session, step, key, by, may_drop=not relieves) is None


def _leave_now(
    session: Session, step: Move | Drop, key: Key, by: str, *, may_drop: bool = False
) -> Exception | None:
    """Performs a step for a model of this process. Returns the error of a failed step, or None."""
    name = step.lease.partition("/")[2]
    resident = session.residents.get(name)
    if resident is None or not resident.begin_moving():
        abandon(session, name, key)
        return Stays("it is in use")
    try:
        # The reserved room may be too small for the new size: decide again.
        if resident.remeasure():
            raise Stays("its bytes have changed since they were counted")
        step, shares = _leave_in_stages(session, resident, step, may_drop)
    except BaseException as error:
        try:
            because = _stays(session, resident, error)
        finally:
            resident.stay()
        abandon(session, name, key, because)
        if isinstance(error, Exception):
            return error
        raise
    resident.failed_moves = resident.returned_bytes = 0
    resident.moves_again_at = 0.0
    if isinstance(step, Move):
        moved = replace(resident.lease, target=step.shares).holding(shares)
        if moved.all_on_device:
            moved = resident.in_pieces(moved, resident.handle)
        now = session.clock()
        away_since = 0.0 if moved.all_on_device else now
        resident.settle_at(replace(moved, settled_at=now, away_since=away_since))
    session.probe.empty_cache()
    session.probe.watch_peaks()  # bytes that have left must not count in later peaks
    session.transact(
        lambda book, world: (books.left(book, step, shares, world, by), None), fresh=True
    )
    return None


def stage_bytes(resident: Resident, step: Step) -> int:
    """The bytes of a stage, if the step is an offload so large that its bytes leave in stages; else 0."""
    lease = resident.truth()  # `resident.lease` does not have the copy in host memory
    if lease is None or not isinstance(step, Move):
        return 0
    return admission.departure_stages(lease, step.shares, STAGE_BYTES)


def _leave_in_stages(
    session: Session, resident: Resident, step: Move | Drop, may_drop: bool
) -> tuple[Move | Drop, Shares]:
    """Performs the `step`. A large offload is divided into stages.

    Waiting requests can use the bytes of each stage at once.

    Returns the performed step, and the shares measured afterwards.
    """
    rest, stage = step, stage_bytes(resident, step)
    if stage and _lacks_ram(session, step):
        stage = 0  # all or nothing
    while stage and isinstance(rest, Move) and (left := rest.shares[0].bytes) >= 2 * stage:
        before = resident.lease.bytes_on(HOST)
        _leave_part(session, resident, rest, stage)
        moved = resident.lease.bytes_on(HOST) - before
        rest = replace(rest, shares=(Share(HOST, left - moved),))
    performed, shares = _move_or_drop(session, resident, rest, may_drop)
    return step if performed is rest else performed, shares


def _leave_part(session: Session, resident: Resident, step: Move, size: int) -> None:
    """Copies pieces, at most `size` bytes in all, to host memory. Frees their room in the book."""
    shares = resident.move_or_drop(replace(step, shares=(Share(HOST, size),)))
    now = session.clock()
    resident.lease = replace(resident.lease.holding(shares), settled_at=now, away_since=now)
    session.probe.empty_cache()
    session.transact(
        lambda book, world: (admission.part_left(book, step, shares, world), None), fresh=True
    )


def _lacks_ram(session: Session, step: Move | Drop) -> DoesNotFit | None:
    """The error of a step that takes more RAM than this process may: Linux would end the process.

    The bytes of simulated cards are in RAM already.
    """
    if session.probe.simulated or not isinstance(step, Move):
        return None
    size, left = sum([share.bytes for share in step.shares if share.device == HOST]), ram_left()
    if size <= left:
        return None
    return DoesNotFit(
        f"{show_bytes(size)} would leave for RAM, and the memory limit of its container or cgroup "
        f"leaves {show_bytes(left)}",
        need_bytes=size,
        budget_bytes=left,
        device=HOST,
    )


def _move_or_drop(
    session: Session, resident: Resident, step: Move | Drop, may_drop: bool
) -> tuple[Move | Drop, Shares]:
    """Performs the step. Returns the performed step, and the shares measured afterwards."""
    try:
        if error := _lacks_ram(session, step):
            raise error
        before = resident.lease.filled or resident.lease.shares
        shares = resident.move_or_drop(step)
        if isinstance(step, Move) and shares == before:
            # As a success, it would be asked for again at once, for ever.
            raise GpuError("none of its bytes left its card")
        return step, shares
    except Exception as error:
        gone = resident.handle is None  # such as an engine that was ended, as it did not sleep
        if isinstance(step, Drop) and gone:
            log.warning("%s was dropped, with an error: %s", step.lease, _in_words(error))
            return step, ()
        droppable = gone or (may_drop and resident.lease.droppable)
        if isinstance(step, Drop) or isinstance(error, Stays) or not droppable:
            raise
        failed = f"{step.because} It could not be moved: {_in_words(error)}."
        log.warning("%s is dropped, since it could not be moved: %s", step.lease, _in_words(error))
        drop = Drop(step.lease, step.source, failed.lstrip(), step.reason, step.by)
        return drop, () if gone else resident.move_or_drop(drop)


def _stays(session: Session, resident: Resident, error: BaseException) -> str:
    """Records that a step failed. Returns the sentence for the book.

    Each failure in a row doubles the pause before the model is chosen again. From the second
    failure in a row on, the sentence is empty. An error `Stays` is not counted as a failure.
    """
    name = lease_title(resident.lease, session.owner)
    resident.lease = replace(resident.lease, droppable=resident.droppable())
    if isinstance(error, Stays):
        return f"{name} stays where it is: {error}."
    because = f"{name} stays where it is: {_in_words(error)}."
    resident.failed_moves += 1
    pause = min(FIRST_PAUSE_SECONDS * 2 ** (resident.failed_moves - 1), LONGEST_PAUSE_SECONDS)
    resident.moves_again_at = session.clock() + pause
    if resident.failed_moves > 1:
        log.debug("%s", because)
        return ""
    # That a cell runs is no error, so the user of this process gets no warning. The requester reads
    # the reason in the book.
    level = logging.DEBUG if isinstance(error, StillInUse) else logging.WARNING
    log.log(level, "%s", because)
    return because


def _in_words(error: BaseException) -> str:
    line = first_line(error)
    line = line.rstrip(".")  # the caller ends the sentence
    return line if isinstance(error, GpuError) else f"{type(error).__name__}: {line}"


def abandon(session: Session, name: str, key: Key, because: str = "") -> None:
    """Settles the lease `name` as it was before the load or move of `key` failed, or did not begin."""

    def stay(book: Book, world: World) -> tuple[Book, None]:
        book = books.abandon(book, session.me, name, key.text, world, because)
        return books.publish(book, session.truth(), world), None  # with the time of the next try

    session.transact(stay)


# -- shadows (`GPU_SHADOWS`)
#
# A user's processes that load the same files can share one copy, in shared pages of host memory.

Copies = dict[str, tuple[int, ...]]  # the id of shared pages -> the pids of their holders

COPY_DIGITS = 16  # the id of shared pages begins with so many digits of the id of their files
MOST_SHADOW_SECONDS = 600.0  # the longest wait for the load of the same files in another process
LOADER_SECONDS = 0.2  # the pause between two checks of that other load


def wants_shadow(session: Session, resident: Resident) -> bool:
    """Whether a copy of the model may stay in host memory while the model is on a card."""
    if session.settings.gpu_shadows == "never" or not session.rules.offload:
        return False
    return resident.backend.keeps_shadow(resident.spec)


def reserve_shadow(session: Session, resident: Resident, shares: Shares) -> dict[str, Any]:
    """Reserves host memory for the shadow of a model that is loaded onto `shares`.

    Returns the options with which the backend keeps the shadow; no options if the host or this
    process's cgroup has no room, or if no shadow is wanted. If another process loads the same files
    now, first waits until that load has ended, so that the files are read only once.
    """
    if not wants_shadow(session, resident):
        return {}
    size = sum(share.bytes for share in shares)
    name = resident.spec.name
    if not session.probe.simulated and size > ram_left():
        return {}

    files = ""
    if session.settings.gpu_shadows != "private" and resident.backend.shares:
        files = resident.backend.files_of(resident.spec)  # type: ignore[attr-defined]

    def decide(book: Book, world: World) -> tuple[Book, tuple[bool, Copies, Owner | None]]:
        copies = _copies(session, book, files) if files else {}
        loader = _other_loader(session, book, files) if files and not copies and patient else None
        if loader is not None:
            return book, (False, copies, loader)
        copy = next(iter(copies), _new_copy(files))
        shared = size if copies else 0
        after, done = victims.reserve_shadow(book, session.me, name, size, world, copy, shared)
        return after, (done, copies, None)

    # Once `patient` is false, `decide` ignores the other load.
    patient, until = True, session.clock() + MOST_SHADOW_SECONDS
    done, copies, loader = session.transact(decide)
    while loader is not None:
        patient = _waits_for_loader(session, loader) and session.clock() < until
        done, copies, loader = session.transact(decide)
    if not done:
        return {}
    if not files:
        return {"shadow": True}
    pids = next(iter(copies.values()), ())
    return {"shadow": True, "copies": pids, "found_only": bool(pids)}


def _copies(session: Session, book: Book, files: str) -> Copies:
    """The ids of shared pages with the content id `files`, each with the pids of their holders."""
    found: Copies = {}
    for section in _near(session, book):
        for lease in section.leases:
            if lease.copy.partition(".")[0] == files[:COPY_DIGITS] and lease.copied_bytes:
                found[lease.copy] = (*found.get(lease.copy, ()), section.owner.pid)
    return found


def _near(session: Session, book: Book) -> list[Section]:
    """The sections of this user's processes that run on this host and in the same namespaces.

    So a pid in these sections names the same process as it does here.
    """
    place = attrgetter("host", "boot", "user", "namespaces")
    here = place(session.ledger.owner)
    return [section for section in book.sections.values() if place(section.owner) == here]


def _new_copy(files: str) -> str:
    """The id of new shared pages for the content id `files`; empty if `files` is empty."""
    return f"{files[:COPY_DIGITS]}." if files else ""


def _other_loader(session: Session, book: Book, files: str) -> Owner | None:
    """Another process that now loads files with the content id `files` into new shared pages."""
    for section in _near(session, book):
        for lease in section.leases:
            arriving = lease.phase is Phase.ARRIVING and lease.owner != session.me
            if arriving and lease.copy == _new_copy(files):
                return section.owner
    return None


def _waits_for_loader(session: Session, loader: Owner) -> bool:
    """Waits a moment for the load of the process `loader`. Returns False if `loader` is stopped."""
    sights = session.ledger.sights(session.ledger.read(), {loader.id})
    if sights.get(loader.id) in (Sight.STOPPED, Sight.DUMPING):
        return False
    session.ledger.wait(LOADER_SECONDS, [loader])
    session.reap()
    return True


def free_shadow(resident: Resident) -> bool:
    """Frees the copy of the model in host memory.

    Returns False if there is no copy, or if the model is being moved.
    """
    with resident.work:
        if resident.place is Place.MOVING or not resident.shadow_bytes:
            return False
        resident.backend.free_shadow(resident.handle)
        resident.shadow_bytes = 0
    return True


def shed(session: Session, step: Shed) -> bool:
    """Frees the shadow that `step` names, and publishes the change. The model may be in use.

    If `step` names parked bytes of this notebook, their move to the disk begins. Returns False if
    nothing can be done now, since the bytes are moving already.
    """
    resident = session.residents.get(step.lease.partition("/")[2])
    if resident is None:
        return False
    if free_shadow(resident):
        session.publish()
        return True
    return bool(resident.lease.shed_bytes) and disk.start(session, resident, step.because, step.by)


# -- the times of a model's uses
#
# The times belong to the content of the model's source, not to a process or a name. The event of each
# lease that ends has them (`scheduler/transitions.ENDED_A_STAY`). The first load of a model reads the
# events of equal models from the journal. While a model is registered, its process reads the newest
# events in the book.


def released_in_pages(leases: Iterable[Lease]) -> list[list[Lease]]:
    """Those of the `leases` that get an event when they end, in lists of at most MOST_EVENTS.

    The book keeps MOST_EVENTS events, and the journal gets the events that the book has after a
    transaction. More events in one transaction would be lost. There is at least one list.
    """
    used = [lease for lease in leases if lease.source and lease.recent_uses]
    return [used[first : first + MOST_EVENTS] for first in range(0, len(used) or 1, MOST_EVENTS)]


def note_released(book: Book, leases: Iterable[Lease], world: World, because: str) -> Book:
    """The book with an event for each of the `leases`, which this process releases now.

    A lease that was never used, or whose source is unknown, gets no event. `because` is the event's
    sentence.
    """
    for lease in leases:
        if lease.source and lease.recent_uses:
            book = books.note(book, world, lease, "released", "owner", because, size=lease.bytes)
    return book


def publish_released(session: Session, lease: Lease | None) -> None:
    """Publishes that the user of this process has forgotten the model with this `lease`, if any."""
    leases = (lease,) if lease is not None else ()
    because = f"{session.owner.label} forgot it."
    session.transact(lambda book, world: (note_released(book, leases, world, because), None))


def read_earlier_uses(session: Session, resident: Resident) -> None:
    """Adds the uses of models with the content of `resident` that ended before its first load."""
    source = resident.content
    if source:
        events = session.journal.tail(MOST_USES, None, books.ENDED_A_STAY, source=source)
        for event in events:
            resident.note_uses(event.uses)


def read_uses_in_book(session: Session, book: Book) -> None:
    """Adds the uses of leases of other processes that have ended, if this process has equal models.

    Without this, a model's uses in another notebook would no longer count after the notebook's end.
    """
    for event in book.events:
        if not event.uses or not event.source or event.owner == session.me:
            continue
        for resident in list(session.residents.values()):
            if resident.content == event.source:
                every_use = merged_uses((resident.recent_uses, event.uses), session.wall())
                # Written only if it changes, because another thread may note a use at the same time.
                if every_use != resident.recent_uses:
                    resident.note_uses(event.uses)
