"""Shadows of this process: copies in host memory of models that are on a card (`GPU_SHADOWS`)."""

from __future__ import annotations

from typing import Any

from ..facts import Book, Shares, Shed, World
from ..scheduler import shadows
from .resident import Place, Resident
from .session import Session

COPY_DIGITS = 16  # of the id of files in the id of shared pages with them


def wanted(session: Session, resident: Resident) -> bool:
    """Whether a copy of the model may stay in host memory while the model is on a card."""
    if session.settings.gpu_shadows == "never" or not session.rules.offload:
        return False
    return resident.backend.keeps_shadow(resident.spec)


def reserve(session: Session, resident: Resident, shares: Shares) -> dict[str, Any]:
    """Reserves host memory for the shadow of a model that is loaded onto `shares`.

    Returns the options with which the backend keeps the shadow, or none if the host has no room.
    """
    if not wanted(session, resident):
        return {}
    size = sum(share.bytes for share in shares)
    name = resident.spec.name

    files = ""
    if session.settings.gpu_shadows != "private" and resident.backend.shares:
        files = resident.backend.files_of(resident.spec)  # type: ignore[attr-defined]

    def decide(book: Book, world: World) -> tuple[Book, tuple[bool, dict[str, tuple[int, ...]]]]:
        copies = _copies(session, book, files) if files else {}
        copy = next(iter(copies), "")
        after, done = shadows.reserve(book, session.me, name, size, world, copy)
        return after, (done, copies)

    done, copies = session.decide(decide)
    if not done:
        return {}
    if not files:
        return {"shadow": True}
    pids = next(iter(copies.values()), ())
    return {"shadow": True, "copies": pids, "found_only": bool(pids)}


def _copies(session: Session, book: Book, files: str) -> dict[str, tuple[int, ...]]:
    """The shared pages with these `files`: the id of each, and the pids of its holders.

    The holders are processes of this user, on this host, whose pids mean the same processes here.
    """
    me = session.ledger.owner
    found: dict[str, tuple[int, ...]] = {}
    for section in book.sections.values():
        owner = section.owner
        near = (owner.host, owner.boot, owner.user, owner.namespaces)
        if near != (me.host, me.boot, me.user, me.namespaces):
            continue
        for lease in section.leases:
            if lease.copy.partition(".")[0] == files[:COPY_DIGITS] and lease.copied_bytes:
                found[lease.copy] = (*found.get(lease.copy, ()), owner.pid)
    return found


def free(resident: Resident) -> bool:
    """Frees the copy of the model in host memory. False if there is none, or the model moves."""
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
