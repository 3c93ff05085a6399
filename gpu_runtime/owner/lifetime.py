"""The beginning and the end of this process as an owner: its ledger, devices, journal and records.

At the end, its models are freed and its section (its part of the book) is removed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from .. import threads
from ..catalog.files import Catalogued
from ..devices.probe import Probe, check_index
from ..devices.sampler_client import Sampling
from ..errors import GpuError, LedgerUnavailable
from ..facts import Book, Lease, World
from ..ledgers import host_config, open_ledger
from ..ledgers.access import default_url, journals_in, shared_url, slug_of
from ..notebook import notebook_path
from ..scheduler import transitions
from ..settings import Settings
from ..telemetry.journal import Journal
from ..telemetry.measurements import Measurements, measurements_in
from ..telemetry.recorder import record_in
from . import arrivals, release
from .look_ahead import LookAhead
from .pins import release_calls
from .session import Session, log


def open_session(
    settings: Settings,
    probe: Probe,
    catalogue: Catalogued,
    *,
    clock: Callable[[], float],
    wall: Callable[[], float],
) -> Session:
    """A new owner in the ledger that `settings` name, with the devices of `probe`.

    `clock` returns seconds of CLOCK_BOOTTIME, `wall` epoch seconds. Raises BadSetting and
    LedgerUnavailable.
    """
    known = host_config.read(settings.gpu_config_file)
    slug = slug_of(probe.devices if probe.simulated else ())
    url = settings.gpu_ledger or shared_url(known.ledger, slug) or default_url(slug)
    ledger = open_ledger(url, notebook=notebook_path())
    try:
        probe.rename(transitions.device_names(probe.devices, ledger.read()))
        check_index(settings.inference_gpu_index, probe.devices)
    except BaseException:
        ledger.close()
        raise
    # The ledger's directory is for this boot. State that survives a reboot is in its parent.
    directory = getattr(ledger, "directory", None)
    state = directory.parent if directory else None
    probe.follow(directory, url)
    recording = None
    if directory and probe.simulated:  # these cards are not measured, but their use is recorded too
        recording = Sampling(directory, url, simulated=True)
    session = Session(
        ledger,
        probe,
        settings,
        Journal(*journals_in(state)) if state else Journal(),
        clock=clock,
        wall=wall,
        catalogue=catalogue,
        machine=known,
        measurements=Measurements(measurements_in(state) if state else None),
        record=record_in(directory) if directory else None,
        recording=recording,
    )
    session.look_ahead = LookAhead(session)
    return session


# -- the end


def close(session: Session) -> None:
    """Frees all models of a closed session, and removes the owner's section of the book.

    A load in C code may go on. Its bytes stay in the book until it ends, or until the process ends.
    See Runtime.close.
    """
    session.activity.watchers.discard(session.cell_began)
    if session.monitor and session.monitor_started:
        session.monitor.stop(lambda: session.ledger.ring([session.me]))
    arrivals.stop_all_loads(session, "its runtime was closed")
    residents = [model for name, model in session.residents.items() if name not in session.loads]
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
    because = f"{session.owner.label} released it when it closed."

    def leave(page: list[Lease], is_last: bool, book: Book, world: World) -> tuple[Book, None]:
        """The book with events of the leases in `page`; after the last page without this owner."""
        book = release.note_released(book, page, world, because)
        return (transitions.resign(book, session.me) if is_last else book), None

    def left() -> None:
        try:
            if session.me in session.ledger.read().sections:
                *earlier, last = release.released_in_pages(leases)
                for page in earlier:
                    session.transact(partial(leave, page, False))
                session.transact(partial(leave, last, True))
        except GpuError as error:  # the next owner that checks finds this one dead
            log.debug("the book could not be left in order: %s", error)
        session.journal.flush()
        session.ledger.close()

    session.in_turn(left)  # else another thread could write the section again


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
