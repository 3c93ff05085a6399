"""Performs a grant: loads or restores the model, installs it, and settles its lease.

If the load or the restore fails or is interrupted before the model is installed, its grant is
removed from the book. A shadow is a copy in host memory of a model that is on a card.

The second part has the loads that run now. A load that is stopped may be in a call of C code that
does not end, such as the read of a file on a network that is gone. Its bytes stay reserved until
that call ends, because they may still be in use.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from msgspec.structs import replace

from ..backends.base import Progress
from ..errors import Busy, GpuError, LoadFailed, StillInUse, first_line
from ..facts import HOST, Book, Grant, Lease, Load, Move, Share, Wait, World, beside
from ..scheduler import admission, refusals
from ..scheduler import transitions as books
from ..scheduler.victims import has_room_for_shadow
from ..threads import Stoppable, Stopped
from ..units import show_bytes, show_seconds
from . import release
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
    deadline: float | None = None,
) -> bool:
    """Loads or restores the model as granted in `verdict`, and settles its lease.

    If `anchor` is given, `anchor` pins the model. `key` is the key of the decision. A load ends at
    the `deadline`, in seconds of the session's clock. Returns whether the model is on its device;
    else only a part has returned, and the rest is in host memory. If the load or the restore
    raises, the grant is abandoned and the error is raised.
    """
    step = verdict.steps[0]
    assert isinstance(step, (Load, Move))  # the step of a grant is always a load or a move
    if admission.is_part(verdict.lease):
        restore = partial(_restore_part, session, resident, verdict.lease, step, key)
        session.uninterrupted(key, restore)
        return False
    with _shown(session, resident, step, progress) as progress:
        if isinstance(step, Load):
            _load(session, resident, verdict.lease, step, anchor, key, progress, deadline)
        else:
            restore = partial(_restore, session, resident, verdict.lease, step, anchor, key)
            session.uninterrupted(key, restore)
    return True


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
    left = seconds_left(session, deadline)
    work = partial(_load_here, session, resident, lease, step, anchor, key, progress, load)
    try:
        load.start(session.keys.kept(key, work))
        if key.ended_by:  # its caller left while the room was granted
            leave_load(session, name, load, f"{key.ended_by} ended it")
        if not load.wait(left):
            leave_load(session, name, load, out_of_time(left))
        goes_on = load.left and not load.why  # for another request
        ended = not goes_on and load.ended()
    except BaseException:  # the stop button, or an error that a signal handler of the user raises
        _unpin(resident, anchor)
        leave_load(session, name, load, "its caller was interrupted")
        if load.why:  # else it goes on for another request
            load.ended()
        raise
    if not ended:
        _unpin(resident, anchor)
        raise not_ended(session, resident, step, load)
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
        more = release.reserve_shadow(session, resident, step.shares)
        with load:
            handle, shares, seconds = resident.load(step.shares, progress, more)
        working_bytes = resident.backend.working_bytes(handle)
        if working_bytes is not None:
            lease = replace(lease, working_bytes=working_bytes)
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
            release.abandon(session, resident.spec.name, key, _why_failed(error))
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
    session.sizing.learn(resident, beside(shares, working_bytes or 0))
    if is_first:
        release.read_earlier_uses(session, resident)
    _settle(session, resident, step.because, reload_seconds=seconds)
    _report_misplaced(session, resident, handle)


def _report_misplaced(session: Session, resident: Resident, handle: Any) -> None:
    """Writes to the log and the journal if the model's bytes are not on the granted devices."""
    if elsewhere := resident.backend.elsewhere(handle):
        lease = resident.lease
        because = refusals.elsewhere(resident.spec.name, lease.where, elsewhere)
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
    earlier_bytes = resident.returned_bytes
    shares = _move_back(session, resident, step, key)
    before = resident.lease
    seconds = _seconds_of_all(resident, before)
    from_ram = resident.ram_seconds if before.disk_bytes else seconds  # of the next return
    arriving = replace(
        before, target=lease.target, filled=lease.filled, working_bytes=lease.working_bytes
    )
    here = arriving.holding(shares)
    if not here.piece_bytes:
        here = resident.in_pieces(here, resident.handle)
    settled = replace(
        here,
        restore_seconds=from_ram,
        settled_at=session.clock(),
        away_since=0.0,
        importance=lease.importance,
        keep_alive=lease.keep_alive,
    )
    resident.settle_at(settled, anchor)
    resident.returned_bytes = 0
    session.probe.watch_peaks()
    _settle(session, resident, step.because, earlier_bytes, restore_seconds=seconds)
    resident.require_known()


def _seconds_of_all(resident: Resident, before: Lease) -> float:
    """Seconds that a restore of the whole lease takes, which was as `before` until the last move.

    A part takes less time than the whole. So if only a part was restored, the result is the time
    that `before` already has. If it has none, it is computed from the bytes of the part and of the
    whole.
    """
    if resident.returned_bytes >= before.own_bytes:
        return resident.moved_seconds
    part = max(1, resident.returned_bytes)
    return before.restore_seconds or resident.moved_seconds * before.own_bytes / part


def _restore_part(
    session: Session, resident: Resident, lease: Lease, step: Load | Move, key: Key
) -> None:
    """Moves a part of the model back, while other leases still leave to make room for the rest.

    No block pins the model yet, because the model cannot be used.
    """
    assert isinstance(step, Move)  # a part returns only from host memory
    before = resident.lease
    settled = replace(
        before.holding(_move_back(session, resident, step, key)),
        settled_at=session.clock(),
        away_since=before.away_since,
        importance=lease.importance,
    )
    resident.settle_at(settled)
    _settle(session, resident, step.because)


def _move_back(session: Session, resident: Resident, step: Move, key: Key) -> tuple[Share, ...]:
    """Moves bytes from host memory to the card. Returns the measured shares.

    Notes bytes and seconds in `resident`. If the move raises, the grant is abandoned.
    """
    name, began = resident.spec.name, time.perf_counter()
    try:
        if not resident.begin_moving():
            because = f"{name} is being moved by another thread."
            raise LoadFailed(because, name=name, source=resident.spec.source)
        try:
            shares = resident.move_or_drop(step, release.wants_shadow(session, resident))
        except BaseException:
            resident.stay()
            raise
    except BaseException as error:
        release.abandon(session, name, key, _why_failed(error))
        raise
    if not resident.returned_bytes:
        resident.moved_seconds = 0.0
    resident.moved_seconds += time.perf_counter() - began
    left = sum([share.bytes for share in shares if share.device == HOST])
    resident.returned_bytes += resident.lease.bytes_on(HOST) - left
    return shares


def _settle(
    session: Session, resident: Resident, because: str, earlier_bytes: int = 0, **seconds: float
) -> None:
    """Writes the measured bytes of the arrived model, and its number of pins, into the book."""
    lease = resident.lease

    def settle(book: Book, world: World) -> tuple[Book, bool]:
        """The book with the measured lease, and whether it keeps its shadow."""
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
        return book, has_room_for_shadow(book, session.me, lease.name, world)

    # The book has the shadow until it is freed: another thread may have begun to move the model with it.
    if not session.transact(settle, fresh=True) and release.free_shadow(resident):
        session.publish()


def _why_failed(error: BaseException) -> str:
    is_interrupt = isinstance(error, KeyboardInterrupt)
    return "interrupted" if is_interrupt else f"{type(error).__name__}: {first_line(error)}"


# -- the loads that run now: whose they are, and how they are stopped

T = TypeVar("T")
LEAST_TIME_SECONDS = 1.0  # a load has so long, even after a wait that took all the time
LOAD_SECONDS = 5.0  # the longest wait until the loads of a closing runtime have stopped


def seconds_left(session: Session, deadline: float | None) -> float | None:
    """The seconds until `deadline` (by the session's clock) that a load has; None means no limit."""
    return None if deadline is None else max(LEAST_TIME_SECONDS, deadline - session.clock())


def out_of_time(seconds: float | None) -> str:
    """Why a load that had so many `seconds` is stopped."""
    return f"its time is over ({show_seconds(seconds or 0)})"


def read_source(session: Session, name: str, work: Callable[[], T], deadline: float | None) -> T:
    """The result of `work`, which reads the source of the model `name` before its load.

    Raises the errors of `work`, and LoadFailed at the `deadline`.
    """
    reading = Stoppable()
    found: list[T] = []
    left = seconds_left(session, deadline)

    def read_here() -> None:
        with reading:
            found.append(work())

    try:
        reading.start(read_here)
        if not reading.wait(left):
            reading.stop(out_of_time(left))
        ended = reading.ended()
    except BaseException:
        reading.stop("its caller was interrupted")
        raise
    if found:
        return found[0]
    if not reading.why:
        reading.result()
    text = f"{name} was not loaded: {reading.why}, while its source was read."
    text += "" if ended else f" {_where_it_is(reading)} Nothing is reserved for it."
    raise LoadFailed(text, name=name, source="")


def leave_load(session: Session, name: str, load: Stoppable, why: str) -> None:
    """The caller of the `load` of the model `name` leaves, because of `why`. See `stop_unwanted_load`."""
    load.left = why
    stop_unwanted_load(session, name)


def leave_request(session: Session, thread: int, why: str) -> None:
    """Ends the request of the thread with the identifier `thread`: its wait, or its load; see `leave_load`."""
    session.keys.end_of(thread, "its caller, who has left,")
    for name, load in list(session.loads.items()):
        if load.caller == thread and not load.left:
            leave_load(session, name, load, why)


def stop_unwanted_load(session: Session, name: str) -> None:
    """Stops the load of the model `name` if its caller has left, and no other request waits for it."""
    load = session.loads.get(name)
    if load is None or not load.left:
        return
    uses = {text for text in session.keys.texts() if text.endswith(f":use {name}")}
    if len(uses) <= 1:  # the load keeps the key of its caller
        load.stop(load.left)


def stop_all_loads(session: Session, why: str) -> None:
    """Stops the loads that run now, because of `why`.

    Waits for their ends, at most until LOAD_SECONDS after each one was stopped.
    """
    running, now = list(session.loads.values()), time.monotonic()
    for load in running:
        load.stop(why)
    for load in running:
        until = (load.stopped_at or now) + LOAD_SECONDS
        load.ended(max(0.0, until - time.monotonic()))


def not_ended(session: Session, resident: Resident, step: Load, load: Stoppable) -> GpuError:
    """The error for the caller of a `load` that goes on. Notes it in the journal if it was stopped."""
    name = resident.spec.name
    if not load.why:
        because = f"{name} is still being loaded, for another request"
        text = f"{name} was not loaded for this request: {load.left}. {because}."
        return Busy(text, name=name, waited_seconds=None, because=because)
    size = show_bytes(sum(share.bytes for share in step.shares))
    text = (
        f"{name} was not loaded: {load.why}. {_where_it_is(load)}\n"
        f"  Its {size} stay reserved until that call ends. {_way_out()}"
    )
    log.warning("%s", text)
    session.note(resident.lease, "unfinished", "load", " ".join(text.split()))
    return LoadFailed(text, name=name, source=resident.spec.source)


def end_load(session: Session, name: str, why: str) -> None:
    """Stops the load of the model `name`, because of `why`. Raises StillInUse if it has not ended soon."""
    load = session.loads.get(name)
    if load is None:
        return
    load.stop(why)
    if not load.ended():
        text = f"{name} cannot be freed: {load_state(session, load)}"
        raise StillInUse(text, name=name, lease=f"{session.me}/{name}", owner=session.me)


def load_state(session: Session, load: Stoppable) -> str:
    """What holds the bytes of a `load` that goes on, as the end of a sentence."""
    if not load.why:
        return "the load goes on for another request"
    return f"the load has not ended: it is in {load.place() or 'its last step'}. {_way_out()}"


def with_stopped_load(session: Session, name: str, wait: Wait) -> Wait:
    """Returns `wait` with a sentence about the stopped load of the model `name` that has not ended."""
    load = session.loads.get(name)
    if load is None or not load.why:
        return wait
    since = show_seconds(time.monotonic() - load.stopped_at)
    because = f"{wait.because.rstrip('.')}, stopped {since} ago ({load.why}). {_where_it_is(load)}"
    return replace(wait, because=f"{because} {_way_out()}")


def _where_it_is(load: Stoppable) -> str:
    place = load.place()
    return f"The load has not ended{f': it is in {place}' if place else ''}."


def _way_out() -> str:
    return f"If it does not end, restart this process (pid {os.getpid()})."


# -- progress, for the front end that `Runtime.tell_waits` registers

LOADING = "loading"
RESTORING = "restoring"


@dataclass(eq=False)
class Arrival:
    """A load, or a restore from host memory. Its fields change until it has ended."""

    name: str  # of the model
    verb: str
    all_bytes: int
    expected_seconds: float  # as its last load or restore took; 0 if unknown
    # If the model returns in parts, this is the last part: what the copies of the others took.
    earlier_seconds: float = 0.0
    done_bytes: int = 0
    seconds: float = 0.0  # how long the arrival took; 0 until it has ended
    ended: bool = False
    failed: bool = False

    def __call__(self, done_bytes: int, all_bytes: int) -> None:
        """Notes that `done_bytes` of `all_bytes` are loaded. A backend calls this often."""
        self.done_bytes = done_bytes
        self.all_bytes = all_bytes


@contextlib.contextmanager
def _shown(
    session: Session,
    resident: Resident,
    step: Load | Move,
    progress: Progress | None,
) -> Iterator[Progress | None]:
    """A `with` block around the load or restore. It yields the function to which a load reports its
    progress.

    Calls the session's front end twice: when the load or restore begins, and when it has ended. If
    the caller passes `progress`, or there is no front end, the block only yields `progress`.
    Parts that have returned before count in the bytes and the seconds.
    """
    told = session.on_arrival
    if told is None or progress is not None:
        yield progress
        return
    verb, expected = LOADING, resident.lease.reload_seconds
    if isinstance(step, Move):
        verb, expected = RESTORING, resident.lease.restore_seconds
    size = resident.returned_bytes + sum(share.bytes for share in step.shares)
    earlier = resident.moved_seconds if resident.returned_bytes else 0.0
    arrival = Arrival(resident.spec.name, verb, size, expected or 0.0, earlier)
    began = session.clock()
    told(arrival)
    try:
        yield arrival
    except BaseException:
        arrival.failed = True
        raise
    finally:
        arrival.seconds = earlier + session.clock() - began
        arrival.ended = True
        told(arrival)
