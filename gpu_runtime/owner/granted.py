"""Performs a grant: loads or restores the model, installs it, and settles its lease.

If the load or the restore fails or is interrupted before the model is installed, its grant is
removed from the book. A shadow is a copy in host memory of a model that is on a card.
"""

from __future__ import annotations

import logging
import time
import traceback
from functools import partial
from typing import Any

from msgspec.structs import replace

from ..backends.base import Progress
from ..errors import LoadFailed
from ..facts import HOST, Book, Grant, Lease, Load, Move, Share, World
from ..scheduler import admission, explain
from ..scheduler import transitions as books
from ..scheduler.victims import shadow_kept
from ..threads import Stoppable, Stopped
from . import arrivals, earlier_uses, loads, parts, shadows
from .pins import AnchorRef
from .resident import Resident
from .session import Key, Session

log = logging.getLogger("gpu_runtime")


def perform(
    session: Session,
    resident: Resident,
    verdict: Grant,
    anchor: AnchorRef | None,
    key: Key,
    progress: Progress | None = None,
    earlier: parts.Returned = parts.NOTHING,
    deadline: float | None = None,
) -> parts.Returned | None:
    """Loads or restores the model as granted in `verdict`, and settles its lease.

    If `anchor` is given, `anchor` pins the model. `key` is the key of the decision. `earlier` are
    the parts that this request has restored already. A load ends at the `deadline`, in seconds of the
    session's clock. Returns None if the model is on its device,
    else the parts that have returned so far, while the rest is in host memory. If the load or the
    restore raises, the grant is abandoned and the error is raised.
    """
    step = verdict.steps[0]
    assert isinstance(step, (Load, Move))  # the step of a grant is always a load or a move
    if admission.is_part(verdict.lease):
        return _restore_part(session, resident, verdict.lease, step, key, earlier)
    with arrivals.shown(session, resident, step, progress, earlier) as progress:
        if isinstance(step, Load):
            _load(session, resident, verdict.lease, step, anchor, key, progress, deadline)
        else:
            lease = verdict.lease
            restore = partial(_restore, session, resident, lease, step, anchor, key, earlier)
            session.uninterrupted(key, restore)
    return None


def _load(
    session: Session,
    resident: Resident,
    lease: Lease,
    step: Load,
    anchor: AnchorRef | None,
    key: Key,
    progress: Progress | None,
    deadline: float | None,
) -> None:
    """Loads the model in a thread of its own, and waits for its end.

    The caller may leave before: at the `deadline`, by an interrupt, or because the load was stopped
    and does not end. The load keeps its key, and with it the reserved bytes, until it has ended.
    """
    name, load = resident.spec.name, Stoppable()
    left = loads.seconds_left(session, deadline)
    work = partial(_load_here, session, resident, lease, step, anchor, key, progress, load)
    try:
        load.start(session.keys.kept(key, work))
        if key.ended_by:  # its caller left while the room was granted
            loads.leave(session, name, load, f"{key.ended_by} ended it")
        if not load.wait(left):
            loads.leave(session, name, load, loads.out_of_time(left))
        goes_on = load.left and not load.why  # for another request
        ended = not goes_on and load.ended()
    except BaseException:  # the stop button, or an error that a signal handler of the user raises
        _unpin(resident, anchor)
        loads.leave(session, name, load, "its caller was interrupted")
        if load.why:  # else it goes on for another request
            load.ended()
        raise
    if not ended:
        _unpin(resident, anchor)
        raise loads.not_ended(session, resident, step, load)
    load.result()


def _unpin(resident: Resident, anchor: AnchorRef | None) -> None:
    """Removes the pin of a caller that does not wait for its load any more."""
    if anchor is not None:
        resident.pins.discard(anchor)


def _load_here(
    session: Session,
    resident: Resident,
    lease: Lease,
    step: Load,
    anchor: AnchorRef | None,
    key: Key,
    progress: Progress | None,
    load: Stoppable,
) -> None:
    handle = None
    name = resident.spec.name
    session.loads[name] = load
    try:
        session.probe.watch_peaks()
        more = shadows.reserve(session, resident, step.shares)
        with load:
            handle, shares, seconds = resident.load(step.shares, progress, more)
        settled = replace(
            lease.holding(shares),
            pins=0,
            droppable=resident.backend.droppable(handle),
            reload_seconds=seconds,
            settled_at=session.clock(),
        )
        resident.install(handle, settled, anchor)
        if load.left:
            _unpin(resident, anchor)
    except BaseException as error:
        if not isinstance(error, Exception):
            # A notebook keeps the traceback of an interrupt, and the traceback's frames would keep
            # the bytes.
            traceback.clear_frames(error.__traceback__)
        installed = handle is not None and resident.handle is handle
        if not installed:
            if handle is not None:
                resident.backend.drop(handle)
            _abandon(session, resident.spec.name, key, error)
        if isinstance(error, Stopped):
            raise LoadFailed(
                f"{name} was not loaded: {load.why}. Nothing of it is held.",
                name=name,
                source=resident.spec.source,
            ) from None
        raise
    finally:
        if session.loads.get(name) is load:
            del session.loads[name]
    is_first = not resident.content
    session.sizing.learn(resident, shares)
    if is_first:
        earlier_uses.read_journal(session, resident)
    _settle(session, resident, step.because, reload_seconds=seconds)
    _report_misplaced(session, resident, handle)


def _report_misplaced(session: Session, resident: Resident, handle: Any) -> None:
    """Writes to the log and the journal if the model's bytes are not on the granted devices."""
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
    earlier: parts.Returned,
) -> None:
    shares, moving = _move_back(session, resident, step, key)
    returned = earlier.and_then(resident.lease.bytes_on(HOST), moving)
    seconds = parts.restore_seconds(resident.lease, returned)
    arriving = replace(
        resident.lease,
        target=lease.target,
        filled=lease.filled,
        working_bytes=lease.working_bytes,
    )
    here = arriving.holding(shares)
    piece = here.piece_bytes or parts.piece_bytes(
        resident.backend, resident.spec, resident.handle, here
    )
    settled = replace(
        here,
        piece_bytes=piece,
        restore_seconds=seconds,
        settled_at=session.clock(),
        away_since=0.0,
        importance=lease.importance,
        keep_alive=lease.keep_alive,
    )
    resident.settle_at(settled, anchor)
    session.probe.watch_peaks()
    _settle(session, resident, step.because, earlier.bytes, restore_seconds=seconds)


def _restore_part(
    session: Session,
    resident: Resident,
    lease: Lease,
    step: Load | Move,
    key: Key,
    earlier: parts.Returned,
) -> parts.Returned:
    """Moves a part of the model back, while other leases still leave to make room for the rest.

    No block pins the model yet, because the model cannot be used. Returns the parts that have returned so far.
    """
    assert isinstance(step, Move)  # a part returns only from host memory
    before = resident.lease
    took = []

    def restore() -> None:
        """Moves the part, and settles the lease in parts."""
        shares, seconds = _move_back(session, resident, step, key)
        took.append(seconds)
        settled = replace(
            before.holding(shares),
            settled_at=session.clock(),
            away_since=before.away_since,
            importance=lease.importance,
        )
        resident.settle_at(settled)
        _settle(session, resident, step.because)

    session.uninterrupted(key, restore)
    moved = before.bytes_on(HOST) - resident.lease.bytes_on(HOST)
    return earlier.and_then(moved, sum(took))


def _move_back(
    session: Session, resident: Resident, step: Move, key: Key
) -> tuple[tuple[Share, ...], float]:
    """Moves bytes from host memory to the card. Returns the measured shares, and the seconds.

    If the move raises, the grant is abandoned.
    """
    name, began = resident.spec.name, time.perf_counter()
    try:
        if not resident.begin_moving():
            because = f"{name} is being moved by another thread."
            raise LoadFailed(because, name=name, source=resident.spec.source)
        try:
            shares = resident.carry(step, shadows.wanted(session, resident))
        except BaseException:
            resident.stay()
            raise
    except BaseException as error:
        _abandon(session, name, key, error)
        raise
    return shares, time.perf_counter() - began


def _settle(
    session: Session,
    resident: Resident,
    because: str,
    earlier_bytes: int = 0,
    **seconds: float,
) -> None:
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
            earlier_bytes=earlier_bytes,
            **seconds,
        )
        book = books.publish(book, session.truth(), world)
        return shadow_kept(book, session.me, lease.name, world)

    if not session.decide(settle, fresh=True):
        shadows.free(resident)


def _abandon(session: Session, name: str, key: Key, error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt):
        because = "interrupted"
    else:
        because = f"{type(error).__name__}: {explain.first_line(error)}"
    abandon = partial(books.abandon, because=because)
    session.decide(lambda book, world: (abandon(book, session.me, name, key.text, world), None))
