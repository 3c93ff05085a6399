"""Shadows of this process: copies in host memory of models that are on a card (`GPU_SHADOWS`)."""

from __future__ import annotations

from ..facts import Shares, Shed
from ..scheduler import shadows
from .resident import Place, Resident
from .session import Session


def wanted(session: Session, resident: Resident) -> bool:
    """Whether a copy of the model may stay in host memory while the model is on a card."""
    if session.settings.gpu_shadows == "never" or not session.rules.offload:
        return False
    keeps = getattr(resident.backend, "keeps_shadow", None)
    return keeps is not None and keeps(resident.spec)


def reserve(session: Session, resident: Resident, shares: Shares) -> bool:
    """Reserves host memory for the shadow of a model that is loaded onto `shares`.

    Returns False if the host has no room for it now.
    """
    if not wanted(session, resident):
        return False
    size = sum(share.bytes for share in shares)
    name = resident.spec.name
    return session.decide(lambda book, world: shadows.reserve(book, session.me, name, size, world))


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
