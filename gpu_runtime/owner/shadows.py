"""Shadows of this process: copies in host memory of models that are on a card (`GPU_SHADOWS`)."""

from __future__ import annotations

from typing import Any

from ..facts import Book, Shares, Shed, World
from ..scheduler import shadows
from .resident import Place, Resident
from .session import Session


def wanted(session: Session, resident: Resident) -> bool:
    """Whether a copy of the model may stay in host memory while the model is on a card."""
    if session.settings.gpu_shadows == "never" or not session.rules.offload:
        return False
    keeps = getattr(resident.backend, "keeps_shadow", None)
    return keeps is not None and keeps(resident.spec)


def reserve(session: Session, resident: Resident, shares: Shares) -> dict[str, Any]:
    """Reserves host memory for the shadow of a model that is loaded onto `shares`.

    Returns the options with which the backend keeps the shadow, or none if the host has no room.
    """
    if not wanted(session, resident):
        return {}
    size = sum(share.bytes for share in shares)
    name = resident.spec.name

    def decide(book: Book, world: World) -> tuple[Book, tuple[Book, bool]]:
        after, done = shadows.reserve(book, session.me, name, size, world)
        return after, (after, done)

    book, done = session.decide(decide)
    if not done:
        return {}
    if session.settings.gpu_shadows == "private" or not getattr(resident.backend, "shares", False):
        return {"shadow": True}
    return {"shadow": True, "copies": _holders(session, book)}


def _holders(session: Session, book: Book) -> tuple[int, ...]:
    """The pids of this process and of the others that may hold a copy of a model from disk.

    They are processes of this user, on this host, whose pids mean the same processes here.
    """
    me = session.ledger.owner
    found = [me.pid]
    for section in book.sections.values():
        owner = section.owner
        near = (owner.host, owner.boot, owner.user, owner.namespaces)
        if near != (me.host, me.boot, me.user, me.namespaces):
            continue
        if any(lease.source for lease in section.leases):
            found.append(owner.pid)
    return tuple(dict.fromkeys(found))


def free(resident: Resident) -> bool:
    """Frees the copy of the model in host memory. Returns False if there is none, or if it moves."""
    with resident.work:
        if resident.place is Place.MOVING or not resident.shadow_bytes:
            return False
        resident.backend.free_shadow(resident.handle)  # type: ignore[attr-defined]
        resident.shadow_bytes = 0
    return True


def obey(session: Session, step: Shed) -> None:
    """Frees the shadow that `step` names, and publishes that. The model may be in use."""
    resident = session.residents.get(step.lease.partition("/")[2])
    if resident is not None and free(resident):
        session.publish()
