"""What is done when a model is gone without having been asked to leave: its engine ended, or its driver let it down.

Its lease is returned and the book says why, before any caller sees the error; the next use loads it anew.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from . import bookkeeping as books
from .errors import GpuError
from .keeper import log

if TYPE_CHECKING:
    from .keeper import Keeper
    from .pool import Resident


def tell(keeper: Keeper, resident: Resident, kind: str, because: str) -> None:
    """Writes into the book that this model is lost, and returns its lease. Never fails: the monitor makes it good."""
    lease = resident.lease
    log.warning("%s", because)
    if not keeper.settings.enable_memory_governor:
        return
    try:
        keeper.decide(lambda book, world: (books.note(
            book, world, lease, "lost", kind, because, size=lease.bytes), None), fresh=True)
    except GpuError as error:
        log.debug("%s is told to be lost later: %s", lease.name, error)
