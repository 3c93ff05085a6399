"""Processes that are stopped by SIGSTOP: what to type, and how they run again.

A stopped process keeps its memory and answers no request. SIGTERM ends it only after SIGCONT.
"""

from __future__ import annotations

import signal

from ..errors import GpuError, NotAllowed
from ..facts import Book, Lease, Outcome, Owner
from ..ledgers.liveness import Sight, end_of
from . import kernel_names, requests
from .session import Session


def is_stopped(session: Session, book: Book, id: str) -> bool:
    """Whether the process with the owner's `id` in `book` is stopped."""
    return session.ledger.sights(book, [id]).get(id) is Sight.STOPPED


def hint(session: Session, id: str) -> str:
    """Lines with what to type, if the process with the owner's `id` is stopped; else empty."""
    book = session.ledger.read()
    if not is_stopped(session, book, id):
        return ""
    owner = book.sections[id].owner
    return (
        f"\n  {owner.label} is stopped.\n"
        f"  Let it continue:  kill -CONT {owner.pid}      or end it:  kill -9 {owner.pid}"
    )


def resume(session: Session, process: str) -> Outcome:
    """Sends SIGCONT to the stopped `process`, which then runs on from where it was stopped.

    `process` is an owner's id, a pid, or a notebook's file name. For a process that is not stopped,
    nothing is done.

    Raises GpuError if no process of the ledger or more than one has this name, or if a debugger
    keeps the process stopped. Raises NotAllowed if the operating system forbids the signal.
    """
    book = session.ledger.read()
    owner = owner_named(book, process)
    if not is_stopped(session, book, owner.id):
        return Outcome("resume", process, done=True, because=f"{owner.label} is not stopped")
    _send(owner)
    if is_stopped(session, book, owner.id):
        raise GpuError(
            f"{owner.label} is still stopped: a debugger keeps it so. Detach the debugger.",
            process=owner.label,
        )
    because = f"{owner.label} runs again"
    by = requests.person(session)
    session.note(Lease(session.me, ""), "resume", "resume", because, by=by)
    return Outcome("resume", process, done=True, because=because)


def _send(owner: Owner) -> None:
    """Sends SIGCONT to the process of `owner`, and to no later process with the same pid."""
    process = end_of(owner)
    if process is None:
        raise GpuError(f"{owner.label} has ended, or is in another container.", process=owner.label)
    with process:
        try:
            signal.pidfd_send_signal(process.fileno(), signal.SIGCONT)
        except ProcessLookupError:
            pass  # it has ended just now
        except PermissionError:
            because = f"only {owner.user} and root may continue {owner.label}"
            raise NotAllowed(
                f"{because}.\n  As that user or root:  kill -CONT {owner.pid}",
                name="",
                user=owner.user,
                because=because,
            ) from None


def owner_named(book: Book, process: str) -> Owner:
    """The owner in `book` with the id, the pid or the notebook `process`.

    Raises GpuError if no owner has this name, and AmbiguousName if several owners have it.
    """
    owners = [section.owner for section in book.sections.values()]
    found = [owner for owner in owners if process.removeprefix("@") in owner.names]
    if len(found) == 1:
        return found[0]
    if found:
        raise kernel_names.ambiguous(process, found)
    labels = ", ".join(sorted(owner.label for owner in owners))
    raise GpuError(
        f"no process {process!r} shares this ledger. Those that do: {labels or 'none'}.",
        process=process,
    )
