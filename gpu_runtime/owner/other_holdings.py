"""`who` of another process: the other process lists its variables, and this one reads the list.

The request is a ticket, like every request to another process. The list is not in the book, which
everybody reads, but in a file beside the book. The answering process searches in a separate thread
while no cell runs. The search moves no memory: memory that was moved to RAM stays in RAM.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from msgspec.structs import replace

from ..errors import Busy, GpuError
from ..facts import HOST, Book, Holdings, LeaseId, Outcome, Owner
from ..names import MODEL
from ..scheduler.recall import Order
from ..units import show_bytes
from . import holdings, operations, stopped
from .resident import Place, Resident
from .session import Session

ANSWER_SECONDS = 10.0  # the longest wait for an answer; the search itself takes 3 s at most
MOST_ROWS = 30
MOST_LETTERS = 80  # in a name, and in its description
BUSY = "A cell runs there: variables are listed between two cells."
SCRIPT = "It is no notebook, so its variables are not listed."
HIDDEN = "Names are shown to {user} only (GPU_WHO_NAMES)."


# -- the asking side -------------------------------------------------------------------------------


def who(session: Session, process: str, seconds: float = ANSWER_SECONDS) -> Holdings:
    """The device memory that `process` holds, listed by the names of its variables.

    `process` is a notebook's file name, a process id or an owner's id; empty: this process. Waits
    `seconds` at most. Raises GpuError, NotAllowed, Busy.
    """
    if session.guest and not process:
        raise GpuError("a command holds no memory. Name a notebook or a process:  gpu who NOTEBOOK")
    if not process:
        return own(session)
    book = session.ledger.read()
    owner = stopped.owner_named(book, process)
    if owner.id == session.me:
        in_cell = threading.current_thread() is threading.main_thread()
        return own(session) if in_cell else _listed(session)
    _require_running(session, book, owner)
    try:
        operations.ask_owner(session, "who", LeaseId(owner.id, ""), seconds)
    except Busy as error:
        _require_running(session, book, owner)  # it may have been stopped meanwhile
        raise Busy(
            f"{owner.label} has not answered for {seconds:.0f} s. Its interpreter is blocked, or its "
            "version of gpu-console is too old to answer.",
            name="",
            waited_seconds=seconds,
            because=str(error),
        ) from None
    answer = session.ledger.answer(owner.id)
    if answer is None:
        raise GpuError(f"{owner.label} answered, but its answer cannot be read from here.")
    return replace(answer, process=owner.label)


def _require_running(session: Session, book: Book, owner: Owner) -> None:
    """Raises GpuError if the process of `owner` is stopped."""
    if stopped.is_stopped(session, book, owner.id):
        raise GpuError(
            f"{owner.label} is stopped, so it cannot answer.\n"
            f"  Let it continue:  kill -CONT {owner.pid}",
            process=owner.label,
        )


# -- the answering side ----------------------------------------------------------------------------


def answer(session: Session, order: Order) -> Outcome:
    """Lists what this process holds, for the owner that wrote `order`. Raises OSError."""
    mine = session.ledger.owner.user
    own_user = order.by in ("", mine)
    found = _listed(session)
    if not own_user and session.settings.gpu_who_names != "all":
        found = _without_names(found, mine)
    found = _shortened(found)
    session.ledger.publish_answer(order.asker, found, private=own_user)
    because = f"{show_bytes(found.held_bytes)} on devices, {show_bytes(found.parked_bytes)} parked"
    return Outcome(
        verb="who",
        name="",
        done=True,
        because=because,
        bytes=0,
    )


def _listed(session: Session) -> Holdings:
    """The memory of this process: by variable in a kernel that runs no cell, else by lease."""
    activity = session.activity
    if not activity.state.idle_since:
        return replace(holdings.of_leases(session), note=BUSY if activity.running else SCRIPT)
    found = own(session, stop=lambda: activity.running)
    kernel = session.residents.get("kernel")
    if kernel is None or kernel.place is not Place.HERE:
        return found
    return replace(found, stays=_why_not_parked(kernel))


def own(session: Session, stop: Callable[[], bool] | None = None) -> Holdings:
    """What this process holds, by name, also while its kernel is parked.

    The search ends early once `stop` returns True.
    """
    found = holdings.who(session, stop=stop)
    kernel = session.residents.get("kernel")
    if kernel is None or kernel.place is Place.HERE:
        return found
    rows = []
    for row in found.holders:
        is_parked = row.kind != MODEL and not row.stays
        rows.append(replace(row, device=HOST) if is_parked else row)
    size = kernel.lease.bytes
    return replace(
        found,
        holders=tuple(rows),
        held_bytes=max(0, found.held_bytes - size),
        explained_bytes=max(0, found.explained_bytes - size),
        parked_bytes=size,
    )


def _why_not_parked(kernel: Resident) -> str:
    """The reason why an idle kernel cannot be parked now; empty if the kernel can be parked."""
    if not kernel.lease.movable:
        return "parking is turned off for it (GPU_PARK=never)"
    return kernel.handle.stillness.why_not()


def _without_names(found: Holdings, user: str) -> Holdings:
    """The table `found` without the names of variables, for another user who reads it.

    The names of models stay, because the book shows them to every user.
    """
    rows = []
    for row in found.holders:
        if row.kind != MODEL:
            row = replace(row, name="–", cell="", what="")
        rows.append(row)
    note = " ".join(filter(None, [found.note, HIDDEN.format(user=user)]))
    return replace(found, holders=tuple(rows), note=note)


def _shortened(found: Holdings) -> Holdings:
    """The first rows of the table `found`, and the number and bytes of the omitted rows."""
    rows = [
        replace(row, name=row.name[:MOST_LETTERS], what=row.what[:MOST_LETTERS])
        for row in found.holders[:MOST_ROWS]
    ]
    others = found.holders[MOST_ROWS:]
    size = sum(row.bytes for row in others)
    return replace(found, holders=tuple(rows), left_out=len(others), left_out_bytes=size)
