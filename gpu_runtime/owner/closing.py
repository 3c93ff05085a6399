"""The end of this process as an owner: frees its models, and removes its section of the book.

The book has all leases and requests of a host; a section is the part of one owner.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from functools import partial
from typing import Any

from .. import threads
from ..errors import GpuError, LedgerUnavailable
from ..facts import Book, Lease, Owner, World
from ..scheduler import transitions as books
from . import earlier_uses, loads
from .governed_calls import release_calls
from .session import Session, log


def close(session: Session) -> None:
    """Frees all models of a closed session, and removes the owner's section of the book.

    A load in C code may go on. Its bytes stay in the book until it ends, or until the process ends.
    See Runtime.close.
    """
    session.activity.watchers.discard(session.cell_began)
    if session.monitor and session.monitor_started:
        session.monitor.stop(lambda: session.ledger.ring([session.me]))
    loads.stop_all(session, "its runtime was closed")
    residents = [one for name, one in session.residents.items() if name not in session.loads]
    # With their times of use, which the models lose once they are freed.
    leases = [lease for resident in residents if (lease := resident.truth()) is not None]
    engines = [resident for resident in residents if resident.engines]
    for resident in residents:
        release_calls(resident.value)
        if resident not in engines:
            resident.forget()
    # Each engine may take seconds to end normally.
    threads.side_by_side([resident.forget for resident in engines])
    for resident in residents:
        session.residents.pop(resident.spec.name, None)
    session.blocks.clear()
    if hanging := list(session.loads.values()):

        def leave_later() -> None:
            for load in hanging:
                load.ended(threading.TIMEOUT_MAX)
            _leave(session, leases)

        with contextlib.suppress(GpuError):  # what stays in the book now leaves it later
            session.publish()
        session.journal.flush()  # the process may end before the load
        threads.start(leave_later)
    else:
        _leave(session, leases)


def _leave(session: Session, leases: list[Lease]) -> None:
    """Removes the owner's section of the book, with the `leases` that it had, and closes the ledger."""
    try:
        if session.me in session.ledger.read().sections:
            *earlier, last = earlier_uses.pages(leases)
            for page in earlier:
                session.decide(partial(_release, session.owner, page))
            session.decide(partial(_resign, session.owner, last))
    except GpuError as error:  # the next owner that checks finds this one dead
        log.debug("the book could not be left in order: %s", error)
    session.journal.flush()
    session.ledger.close()


def _release(owner: Owner, leases: list[Lease], book: Book, world: World) -> tuple[Book, None]:
    because = f"{owner.label} released it when it closed."
    return earlier_uses.released(book, leases, world, because), None


def _resign(owner: Owner, leases: list[Lease], book: Book, world: World) -> tuple[Book, None]:
    book, _ = _release(owner, leases, book, world)
    return books.resign(book, owner.id), None


def closed_error(session: Session) -> LedgerUnavailable:
    """The error of a call on a runtime whose `session` is closed."""
    url = session.ledger.url
    return LedgerUnavailable(
        f"this runtime was closed, and its ledger {url} with it.\n"
        "  Open another:  rt = gpu_runtime.runtime()",
        path=url,
    )


def remembered_until_exit() -> weakref.WeakSet[Any]:
    """An empty set for the runtimes of this process.

    When the process ends, the runtimes in the set are closed. A forked child does not close the
    runtimes of its parent.
    """
    runtimes: weakref.WeakSet[Any] = weakref.WeakSet()

    def in_child() -> None:
        for runtime in list(runtimes):
            runtime._forked()

    def at_exit() -> None:
        """Runs at the end of the process: closes the runtimes.

        Work that an interrupted caller has started may still run, and is waited for first.
        """
        threads.finish()
        for runtime in list(runtimes):
            runtime.close()

    os.register_at_fork(after_in_child=in_child)
    atexit.register(at_exit)
    return runtimes
