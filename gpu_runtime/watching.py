"""Chooses the ledger that a program opens if it only watches, such as a console or `gpu status`.

The person who starts the program may not have the environment variables of the notebooks. An
example is a JupyterLab that was started from a desktop. The program opens the first of these:

1. `GPU_LEDGER`, if it is set;
2. the default ledger, if a process uses it, or if no ledger is in use;
3. the ledger in use whose memory was used last.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import NamedTuple

import gpu_runtime

from . import threads
from .ledgers import reader
from .ledgers.reader import OpenLedger
from .runtime import Runtime

_lock = threads.freed(threading.RLock())
_guests: dict[Path, Runtime] = {}  # directory of the ledger -> its runtime here


class ActiveLedger(NamedTuple):
    """A ledger in which a process of this user holds memory or waits for memory."""

    ledger: OpenLedger
    last_used: float  # seconds since boot; when its memory was used last
    processes: frozenset[int]


def active_ledgers() -> list[ActiveLedger]:
    """The ledgers that this user's processes use now, the ledger with the latest use first.

    A ledger in which these processes hold no memory and wait for none is left out.
    """
    found = []
    for ledger, processes in reader.of_processes(reader.processes_of_this_user()).items():
        last_used = _last_use(ledger, processes)
        if last_used is not None:
            found.append(ActiveLedger(ledger, last_used, processes))
    return sorted(found, key=lambda active: -active.last_used)


def _last_use(ledger: OpenLedger, processes: frozenset[int]) -> float | None:
    """The time when any of the `processes` last used a lease of the `ledger`, or began to wait.

    The result is None if no process has memory or a request in the ledger. It is 0.0 if the
    processes hold only memory without a lease.
    """
    book = reader.book_of(ledger)
    if book is None:
        return None
    sections = [section for section in book.sections.values() if section.owner.pid in processes]
    owners = {section.owner.id for section in sections}
    uses = [lease.last_used for section in sections for lease in section.leases]
    uses += [ticket.arrived for ticket in book.tickets if ticket.owner in owners]
    uses += [size * 0.0 for section in sections for size in section.residue.values() if size]
    return max(uses, default=None)


def default() -> Runtime:
    """This process's runtime, which holds no models. Raises GpuError if it cannot be opened."""
    rt = gpu_runtime.runtime()
    rt.guest = True
    return rt


def followed() -> Runtime:
    """A runtime that holds no models, for the ledger in use. Raises GpuError.

    Call this function for each new page of a console, because another ledger may be in use by then.
    """
    rt = default()
    if rt.settings.gpu_ledger:
        return rt
    active = active_ledgers()
    directory = directory_of(rt)
    if not active or any(used.ledger.directory == directory for used in active):
        return rt
    return guest(active[0].ledger)


def guest(ledger: OpenLedger) -> Runtime:
    """The runtime of this process for `ledger`, which holds no models. Raises GpuError."""
    rt = default()
    if directory_of(rt) == ledger.directory:
        return rt
    with _lock:
        known = _guests.get(ledger.directory)
        if known is None or known._closed:
            known = _guests[ledger.directory] = Runtime(ledger=ledger.url)
            known.guest = True
        return known


def elsewhere(rt: Runtime) -> str:
    """A sentence that names the ledger of `rt`; empty if it is the default ledger."""
    own = default()
    if rt is own:
        return ""
    ledger, unused = rt._opened.ledger.url, own._opened.ledger.url
    return f"this is the ledger in use, {ledger}. No process uses the default one, {unused}."


def close(rt: Runtime) -> None:
    """Closes `rt`, a runtime that `guest` returned. The default runtime stays open."""
    with _lock:
        directories = [directory for directory, known in _guests.items() if known is rt]
        for directory in directories:
            del _guests[directory]
    if directories:
        rt.close()


def directory_of(rt: Runtime) -> Path | None:
    """The ledger directory of `rt` for this boot of the machine; None for a ledger in memory."""
    directory = getattr(rt._opened.ledger, "directory", None)
    return Path(directory).resolve() if directory else None
