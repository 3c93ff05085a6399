"""The loads that run now: who still wants one, and how it is stopped.

A load that is stopped may be in a call of C code that does not end, such as the read of a file on a
network that is gone. Its bytes stay reserved until that call ends, because they may still be in use.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TypeVar

from msgspec.structs import replace

from ..errors import Busy, GpuError, LoadFailed, StillInUse
from ..facts import Load, Wait
from ..threads import Stoppable
from ..units import show_bytes, show_seconds
from .resident import Resident
from .session import Session

log = logging.getLogger("gpu_runtime")
T = TypeVar("T")
LEAST_LOAD_SECONDS = 1.0  # a load has so long, even after a wait that took all the time
LOAD_SECONDS = 5.0  # the longest wait until the loads of a closing runtime have stopped


def seconds_left(session: Session, deadline: float | None) -> float | None:
    """The seconds until `deadline` (by the session's clock) that a load has; None means no limit."""
    return None if deadline is None else max(LEAST_LOAD_SECONDS, deadline - session.clock())


def out_of_time(seconds: float | None) -> str:
    """Why a load that had so many `seconds` is stopped."""
    return f"its time is over ({show_seconds(seconds or 0)})"


def read(session: Session, name: str, work: Callable[[], T], deadline: float | None) -> T:
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
    text += "" if ended else f" {_sentence(reading)} Nothing is reserved for it."
    raise LoadFailed(text, name=name, source="")


def leave(session: Session, name: str, load: Stoppable, why: str) -> None:
    """The caller of the `load` of the model `name` leaves, because of `why`. See `stop_unwanted`."""
    load.left = why
    stop_unwanted(session, name)


def leave_thread(session: Session, thread: int, why: str) -> None:
    """Ends the request of the thread with the identifier `thread`: its wait, or its load; see `leave`."""
    session.keys.end_of(thread, "its caller, who has left,")
    for name, load in list(session.loads.items()):
        if load.caller == thread and not load.left:
            leave(session, name, load, why)


def stop_unwanted(session: Session, name: str) -> None:
    """Stops the load of the model `name` if its caller has left, and no other request waits for it."""
    load = session.loads.get(name)
    if load is None or not load.left:
        return
    uses = {text for text in session.keys.texts() if text.endswith(f":use {name}")}
    if len(uses) <= 1:  # the load keeps the key of its caller
        load.stop(load.left)


def stop_all(session: Session, why: str) -> None:
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
        f"{name} was not loaded: {load.why}. {_sentence(load)}\n"
        f"  Its {size} stay reserved until that call ends. {_way_out()}"
    )
    log.warning("%s", text)
    session.note(resident.lease, "unfinished", "load", " ".join(text.split()))
    return LoadFailed(text, name=name, source=resident.spec.source)


def require_ended(session: Session, name: str) -> None:
    """Raises StillInUse if the load of the model `name` was stopped and has not ended."""
    load = session.loads.get(name)
    if load is not None and load.why:
        text = f"{name} cannot be freed: {state(session, load)}"
        raise StillInUse(text, name=name, lease=f"{session.me}/{name}", owner=session.me)


def state(session: Session, load: Stoppable) -> str:
    """What holds the bytes of a `load` that goes on, as the end of a sentence."""
    if not load.why:
        return "the load goes on for another request"
    return f"the load has not ended: it is in {load.place() or 'its last step'}. {_way_out()}"


def explained(session: Session, name: str, wait: Wait) -> Wait:
    """Returns `wait` with a sentence about the stopped load of the model `name` that has not ended."""
    load = session.loads.get(name)
    if load is None or not load.why:
        return wait
    since = show_seconds(time.monotonic() - load.stopped_at)
    because = f"{wait.because.rstrip('.')}, stopped {since} ago ({load.why}). {_sentence(load)}"
    return replace(wait, because=f"{because} {_way_out()}")


def _sentence(load: Stoppable) -> str:
    place = load.place()
    return f"The load has not ended{f': it is in {place}' if place else ''}."


def _way_out() -> str:
    return f"If it does not end, restart this process (pid {os.getpid()})."
