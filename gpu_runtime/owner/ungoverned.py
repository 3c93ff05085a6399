"""Loads without a governor (ENABLE_MEMORY_GOVERNOR=0), which use no ledger and evict nothing."""

from __future__ import annotations

from msgspec.structs import replace

from ..backends.base import Progress
from ..facts import Load, Share
from . import demand, failures
from .pins import AnchorRef
from .resident import Resident
from .session import Session


def load(
    session: Session, resident: Resident, anchor: AnchorRef | None, progress: Progress | None
) -> None:
    """Loads the model onto the first allowed card. `anchor` and `progress` are as in `obtain`."""
    allowed = demand.allowed_devices(session, resident)
    cards = [device.id for device in session.probe.devices if not device.is_host]
    share = Share(
        next(id for id in cards if not allowed or id in allowed), resident.footprint().bytes
    )
    try:
        handle, shares, seconds = resident.load((share,), progress)
    except Exception as error:
        raise failures.load_error(session, resident, Load("", (share,)), error) from error
    known = demand.wanted_lease(session, resident)
    lease = replace(
        resident.lease,
        shares=shares,
        reload_seconds=seconds,
        movable=known.movable,
        droppable=resident.backend.droppable(handle),
        importance=known.importance,
        keep=known.keep,
        keep_alive=known.keep_alive,
        backend=known.backend,
        model_type=known.model_type,
        quantization=known.quantization,
    )
    resident.install(handle, lease, anchor)
