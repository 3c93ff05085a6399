"""Gets memory for a model or a block of code: requests it, waits, loads or restores, settles it.

If a request fails or is interrupted before its model is installed, its grant is removed from the
book. A shadow is a copy in host memory of a model that is on a card.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from msgspec.structs import replace

from ..backends.base import Progress, is_out_of_memory
from ..catalog.entries import require_loadable
from ..errors import LoadFailed, NotResident
from ..facts import (
    Book,
    Candidate,
    Footprint,
    Grant,
    Lease,
    Load,
    Move,
    PlacementRules,
    Refuse,
    Request,
    Share,
    Wait,
    World,
    parse_importance,
)
from ..scheduler import explain
from ..scheduler import transitions as books
from ..scheduler.shadows import kept
from ..units import parse_seconds
from . import (
    arrivals,
    demand,
    failures,
    interrupts,
    parts,
    presence,
    release,
    replays,
    requests,
    shadows,
    ungoverned,
)
from .pins import AnchorRef, Held
from .resident import Place, Resident, held_by
from .session import POLL_SECONDS, Key, Session

log = logging.getLogger("gpu_runtime")

LOAD_ATTEMPTS = 2  # after an out-of-memory error, room is made and the load is tried once more


# -- a model


class Use(Held):
    """A `with` block that yields the model, on its device and pinned while the block runs."""

    __slots__ = ("_session", "_resident", "_wishes")

    def __init__(self, session: Session, resident: Resident, *wishes: Any) -> None:
        """`wishes` are the arguments importance, timeout and keep_alive of `obtain`."""
        self._anchor = self._kept = None
        self._session, self._resident, self._wishes = session, resident, wishes

    def _typed(self) -> tuple[str, str]:
        return f"rt.use({self._resident.spec.name!r})", "model"

    def _start(self, anchor: AnchorRef) -> Any:
        resident, session = self._resident, self._session
        if not resident.enter(anchor):
            obtain(session, resident, anchor, *self._wishes)
        if resident.shares_storages:
            for base in resident.bases():
                if not base.enter(anchor):
                    obtain(session, base, anchor, *self._wishes)
        if session.dozing:
            session.wake_monitor()
        return resident.value

    def _start_if_here(self, anchor: AnchorRef) -> tuple[Any, ...]:
        if self._resident.shares_storages or not self._resident.enter(anchor):
            return ()
        if self._session.dozing:
            self._session.wake_monitor()
        return (self._resident.value,)

    def _release(self, anchor: AnchorRef) -> None:
        self._resident.pins.discard(anchor)
        for base in self._resident.bases() if self._resident.shares_storages else ():
            base.pins.discard(anchor)

    def _finish(self, error: BaseException | None) -> None:
        if error is not None:
            failures.finish_block(self._session, error, self._resident)


class Call(Use):
    """The `with` block of one direct call of the model, such as `model(x)`."""

    __slots__ = ()
    is_call = True


def call(session: Session, resident: Resident, restore: bool) -> Held:
    """Returns the `with` block for a call of the model through a reference that the user has kept.

    Raises NotResident if `restore` is false and the model is not on its device.
    """
    if not restore and resident.place is not Place.HERE:
        raise NotResident(
            f"{resident.spec.name} is {resident.place.value}, and was registered with "
            f"restore_on_call=False.\n"
            f"  Call it inside:  with rt.use({resident.spec.name!r}) as model:",
            name=resident.spec.name,
            where=resident.place.value,
        )
    return Call(session, resident)


def obtain(
    session: Session,
    resident: Resident,
    anchor: AnchorRef | None,
    importance: str | int | None = None,
    timeout: str | float | None = None,
    keep_alive: str | float | None = None,
    progress: Progress | None = None,
) -> None:
    """Brings the model onto its device, and pins it if `anchor` is given.

    `anchor` refers weakly to an object, and the pin lasts as long as the object. An argument that
    is None takes the value of the registration. Raises DoesNotFit, Busy, Deadlock, LoadFailed,
    ModelDisabled, BadSetting, ProcessLost, OutOfMemory.
    """
    spec = resident.spec
    require_loadable(spec)
    rank = spec.importance if importance is None else parse_importance(importance)
    alive = spec.keep_alive if keep_alive is None else parse_seconds(keep_alive)
    limit = None if timeout is None else parse_seconds(timeout)
    failures.require_served(session, resident)
    with interrupts.in_one_line(session, partial(interrupts.outcome_of, resident)):
        if session.settings.enable_memory_governor:
            _obtain_governed(session, resident, anchor, rank, alive, limit, progress)
        else:
            ungoverned.load(session, resident, anchor, progress)


def _obtain_governed(
    session: Session,
    resident: Resident,
    anchor: AnchorRef | None,
    importance: int,
    keep_alive: float,
    timeout: float | None,
    progress: Progress | None,
) -> None:
    attempts = 0
    wanted = demand.wanted_lease(session, resident, importance, keep_alive)
    footprint = resident.footprint()
    rules = demand.placement(session, resident)

    def is_here() -> bool:
        return resident.enter(anchor) if anchor else resident.place is Place.HERE

    # The key is made last. An interrupt before the `try` then leaves nothing to release.
    key = session.new_key(f"use {resident.spec.name}")
    try:
        for verdict in grants(session, key, wanted, footprint, rules, timeout, is_here):
            step = verdict.steps[0]
            attempts += 1
            try:
                return perform(session, resident, verdict, anchor, key, progress)
            except Exception as error:
                if not is_out_of_memory(error) or attempts >= LOAD_ATTEMPTS:
                    # Without a name for the report: see pins.py.
                    raise failures.load_error(session, resident, step, error) from error.__cause__
                failures.make_room(session, resident, step.shares)  # type: ignore[union-attr]
    finally:
        # The key is released first. Once the key is gone, the monitor withdraws the ticket, even if
        # this thread is interrupted again.
        session.done_with(key.note)
        session.withdraw(key)


# -- waiting for a grant


def grants(
    session: Session,
    key: Key,
    wanted: Lease,
    footprint: Footprint,
    rules: PlacementRules,
    timeout: float | None,
    is_here: Callable[[], bool],
) -> Iterator[Grant]:
    """Yields grants that have steps to perform. Ends as soon as `is_here()` returns true.

    The caller performs the steps of each grant. Taking a further item means that the steps failed:
    the request is decided again. Raises Busy, and the errors of `explain.refusal`.
    """
    reported = False
    try:
        for verdict in _verdicts(session, key, wanted, footprint, rules, timeout, is_here):
            wait = verdict if isinstance(verdict, Wait) else None
            if session.on_wait and (wait or reported):
                reported = wait is not None
                session.on_wait(wanted.name, wait)
            if isinstance(verdict, Grant):
                yield verdict
    finally:
        if reported and session.on_wait:
            session.on_wait(wanted.name, None)


def _verdicts(
    session: Session,
    key: Key,
    wanted: Lease,
    footprint: Footprint,
    rules: PlacementRules,
    timeout: float | None,
    is_here: Callable[[], bool],
) -> Iterator[Grant | Wait]:
    """Yields each Grant that has steps, and each Wait for which the thread is about to pause."""
    began = session.clock()
    deadline = None if timeout is None else began + timeout
    checked_for_dead, because = False, ""
    rung_at: dict[str, float] = {}  # owner -> when it was rung to publish its pins
    compared: tuple[Candidate, ...] = ()  # the last ways to make room that were compared
    while not is_here():
        if key.ended_by:
            raise explain.wait_ended(wanted.name, key.ended_by, because, session.clock() - began)
        held = held_by(list(session.residents.values()), threading.get_ident())
        request = Request(key.text, wanted, footprint, began, rules, held)
        verdict = replays.admitted(session, request, compared)
        if isinstance(verdict, Grant):
            if verdict.steps:
                yield verdict
            continue
        if isinstance(verdict, Wait) and (verdict.steps or verdict.asked):
            compared = verdict.considered
        if not checked_for_dead:  # first check that all owners in the way are alive
            checked_for_dead = True
            if session.reap():
                continue
        if isinstance(verdict, Refuse):
            raise explain.refusal(wanted.name, verdict)
        for step in verdict.steps:
            session.uninterrupted(key, partial(release.step_aside, session, step, key))
        if verdict.steps:
            continue
        verdict = presence.explained(session, verdict)
        because = verdict.because
        if deadline is not None and session.clock() >= deadline:
            waited = session.clock() - began
            raise explain.busy(session.ledger.read(), wanted.name, verdict, waited)
        yield verdict
        _ring_blockers(session, verdict, rung_at)
        requests.pause(session, verdict, deadline)
        checked_for_dead = False


def _ring_blockers(session: Session, verdict: Wait, rung_at: dict[str, float]) -> None:
    """Notifies the other owners of the blocking leases, so that they publish their pins now.

    Otherwise, an owner publishes its pins within a second. `rung_at` has the time of each owner's
    last notification; an owner is notified again only after POLL_SECONDS.
    """
    now = session.clock()
    owners = {id.partition("/")[0] for id in verdict.blockers}
    due = {owner for owner in owners if now - rung_at.get(owner, -math.inf) >= POLL_SECONDS}
    rung_at.update(dict.fromkeys(due, now))
    session.ledger.ring(due - {session.me})


# -- performing a grant


def perform(
    session: Session,
    resident: Resident,
    verdict: Grant,
    anchor: AnchorRef | None,
    key: Key,
    progress: Progress | None = None,
) -> None:
    """Loads or restores the model as granted in `verdict`, and settles its lease.

    If `anchor` is given, `anchor` pins the model. `key` is the key of the decision. If the load or
    the restore raises, the grant is abandoned and the error is raised.
    """
    step = verdict.steps[0]
    assert isinstance(step, (Load, Move))  # the step of a grant is always a load or a move
    with arrivals.shown(session, resident, step, progress) as progress:
        if isinstance(step, Load):
            _load(session, resident, verdict.lease, step, anchor, key, progress)
        else:
            restore = partial(_restore, session, resident, verdict.lease, step, anchor, key)
            session.uninterrupted(key, restore)


def _load(
    session: Session,
    resident: Resident,
    lease: Lease,
    step: Load,
    anchor: AnchorRef | None,
    key: Key,
    progress: Progress | None,
) -> None:
    """Loads the model, installs it, and settles its lease with the measured bytes."""
    handle = None
    try:
        session.probe.watch_peaks()
        more = shadows.reserve(session, resident, step.shares)
        handle, shares, seconds = resident.load(step.shares, progress, more)
        settled = replace(
            lease.holding(shares),
            pins=0,
            droppable=resident.backend.droppable(handle),
            reload_seconds=seconds,
            settled_at=session.clock(),
        )
        resident.install(handle, settled, anchor)
    except BaseException as error:
        if not isinstance(error, Exception):
            # A notebook keeps the traceback of an interrupt, whose frames would keep the bytes.
            traceback.clear_frames(error.__traceback__)
        installed = handle is not None and resident.handle is handle
        if not installed:
            if handle is not None:
                resident.backend.drop(handle)
            _abandon(session, resident.spec.name, key, error)
        raise
    session.sizing.learn(resident, shares)
    _remember_uses(session, resident)
    _settle(session, resident, step.because, reload_seconds=seconds)
    _report_misplaced(session, resident, handle)


def _remember_uses(session: Session, resident: Resident) -> None:
    """Takes over the uses of the model's last stay from the journal, if its content is the same."""
    if resident.content and not resident.recent_uses:
        for event in session.journal.tail(1, resident.spec.name, books.ENDED_A_STAY):
            if event.source == resident.content:
                resident.note_uses(event.uses)


def _report_misplaced(session: Session, resident: Resident, handle: Any) -> None:
    """Logs and journals if the model's bytes are on other devices than the granted devices."""
    if elsewhere := resident.backend.elsewhere(handle):
        lease = resident.lease
        because = explain.elsewhere(resident.spec.name, lease.where, elsewhere)
        log.warning("%s", because)
        session.note(lease, "misplaced", "load", because)


def _restore(
    session: Session,
    resident: Resident,
    lease: Lease,
    step: Move,
    anchor: AnchorRef | None,
    key: Key,
) -> None:
    """Moves the model back from host memory, and settles its lease with the measured bytes."""
    began = time.perf_counter()
    try:
        shares = _move_back(resident, step, shadows.wanted(session, resident))
    except BaseException as error:
        _abandon(session, resident.spec.name, key, error)
        raise
    seconds = parts.restore_seconds(resident.lease, time.perf_counter() - began)
    arriving = replace(
        resident.lease,
        target=lease.target,
        filled=lease.filled,
        working_bytes=lease.working_bytes,
    )
    settled = replace(
        arriving.holding(shares),
        restore_seconds=seconds,
        settled_at=session.clock(),
        away_since=0.0,
        importance=lease.importance,
        keep_alive=lease.keep_alive,
    )
    resident.settle_at(settled, anchor)
    session.probe.watch_peaks()
    _settle(session, resident, step.because, restore_seconds=seconds)


def _move_back(resident: Resident, step: Move, shadow: bool) -> tuple[Share, ...]:
    if not resident.begin_moving():
        name = resident.spec.name
        raise LoadFailed(
            f"{name} is being moved by another thread.", name=name, source=resident.spec.source
        )
    try:
        return resident.carry(step, shadow)
    except BaseException:
        resident.stay()
        raise


def _settle(session: Session, resident: Resident, because: str, **seconds: float) -> None:
    """Writes the measured bytes of the arrived model, and its number of pins, into the book."""
    lease = resident.lease

    def settle(book: Book, world: World) -> tuple[Book, bool]:
        """The book with the measured lease, and whether host memory has room for the shadow."""
        book = books.arrived(
            book,
            session.me,
            lease.name,
            lease.shares,
            world,
            because=because,
            droppable=lease.droppable,
            filled=lease.filled,
            **seconds,
        )
        book = books.publish(book, session.truth(), world)
        return kept(book, session.me, lease.name, world)

    if not session.decide(settle, fresh=True):
        shadows.free(resident)


def _abandon(session: Session, name: str, key: Key, error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt):
        because = "interrupted"
    else:
        because = f"{type(error).__name__}: {explain.first_line(error)}"
    abandon = partial(books.abandon, because=because)
    session.decide(lambda book, world: (abandon(book, session.me, name, key.text, world), None))
