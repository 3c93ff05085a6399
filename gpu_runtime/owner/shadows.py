"""Shadows of this process: copies in host memory of models that are on a card (`GPU_SHADOWS`).

A user's processes that load the same files can share one copy, in shared pages of host memory.
"""

from __future__ import annotations

from typing import Any

from ..facts import Book, Owner, Phase, Section, Shares, Shed, World
from ..ledgers.liveness import Sight
from ..scheduler import victims
from .resident import Place, Resident
from .session import Session

Copies = dict[str, tuple[int, ...]]  # the id of shared pages -> the pids of their holders

COPY_DIGITS = 16  # the id of shared pages begins with so many digits of the id of their files
MOST_SECONDS = 600.0  # the longest wait for the load of the same files in another process
POLL_SECONDS = 0.2  # the pause between two checks of that other load


def wanted(session: Session, resident: Resident) -> bool:
    """Whether a copy of the model may stay in host memory while the model is on a card."""
    if session.settings.gpu_shadows == "never" or not session.rules.offload:
        return False
    return resident.backend.keeps_shadow(resident.spec)


def reserve(session: Session, resident: Resident, shares: Shares) -> dict[str, Any]:
    """Reserves host memory for the shadow of a model that is loaded onto `shares`.

    Returns the options with which the backend keeps the shadow; no options if the host has no room
    or if no shadow is wanted. If another process loads the same files now, first waits until
    that load has ended, so that the files are read only once.
    """
    if not wanted(session, resident):
        return {}
    size = sum(share.bytes for share in shares)
    name = resident.spec.name

    files = ""
    if session.settings.gpu_shadows != "private" and resident.backend.shares:
        files = resident.backend.files_of(resident.spec)  # type: ignore[attr-defined]

    def decide(book: Book, world: World) -> tuple[Book, tuple[bool, Copies, Owner | None]]:
        copies = _copies(session, book, files) if files else {}
        loader = _loader(session, book, files) if files and not copies and patient else None
        if loader is not None:
            return book, (False, copies, loader)
        copy = next(iter(copies), _new_copy(files))
        shared = size if copies else 0
        after, done = victims.reserve_shadow(book, session.me, name, size, world, copy, shared)
        return after, (done, copies, None)

    # Once `patient` is false, `decide` ignores the other load.
    patient, until = True, session.clock() + MOST_SECONDS
    done, copies, loader = session.decide(decide)
    while loader is not None:
        patient = _waits(session, loader) and session.clock() < until
        done, copies, loader = session.decide(decide)
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
    me, found = session.ledger.owner, []
    for section in book.sections.values():
        owner = section.owner
        near = (owner.host, owner.boot, owner.user, owner.namespaces)
        if near != (me.host, me.boot, me.user, me.namespaces):
            continue
        found.append(section)
    return found


def _new_copy(files: str) -> str:
    """The id of new shared pages for the content id `files`; empty if `files` is empty."""
    return f"{files[:COPY_DIGITS]}." if files else ""


def _loader(session: Session, book: Book, files: str) -> Owner | None:
    """Another process that now loads files with the content id `files` into new shared pages."""
    for section in _near(session, book):
        for lease in section.leases:
            arriving = lease.phase is Phase.ARRIVING and lease.owner != session.me
            if arriving and lease.copy == _new_copy(files):
                return section.owner
    return None


def _waits(session: Session, loader: Owner) -> bool:
    """Waits a moment for the load of the process `loader`. Returns False if `loader` is stopped."""
    sights = session.ledger.sights(session.ledger.read(), {loader.id})
    if sights.get(loader.id) in (Sight.STOPPED, Sight.DUMPING):
        return False
    session.ledger.wait(POLL_SECONDS, [loader])
    session.reap()
    return True


def free(resident: Resident) -> bool:
    """Frees the copy of the model in host memory.

    Returns False if there is no copy, or if the model is being moved.
    """
    with resident.work:
        if resident.place is Place.MOVING or not resident.shadow_bytes:
            return False
        resident.backend.free_shadow(resident.handle)
        resident.shadow_bytes = 0
    return True


def obey(session: Session, step: Shed) -> None:
    """Frees the shadow that `step` names, and publishes the change. The model may be in use."""
    resident = session.residents.get(step.lease.partition("/")[2])
    if resident is not None and free(resident):
        session.publish()
