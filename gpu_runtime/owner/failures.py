"""What is done when a model is gone without having been asked to leave: its engine ended, or its driver let it down.

Its lease is returned and the book says why, before any caller sees the error; the next use loads it anew. Where the
driver no longer serves this very process, no model can be loaded into it again, and that is what every use then says.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import TYPE_CHECKING

from ..backends.fault_texts import Fault, Kind, recognise
from ..backends.registry import runs_here
from ..errors import EngineFault, GpuError, ProcessLost
from ..facts import Share
from ..scheduler import transitions as books
from ..scheduler.eligibility import reason_to_stay
from .resident import Place

if TYPE_CHECKING:
    from .resident import Resident
    from .session import Keeper

log = logging.getLogger("gpu_runtime")
LEAVE_SECONDS = 5.0  # for another process to let an idle model go, after an out-of-memory error


def tell(keeper: Keeper, resident: Resident, kind: str, because: str) -> None:
    """Writes into the book that this model is lost, and returns its lease. Never fails: the monitor makes it good."""
    lease = resident.lease
    log.warning("%s", because)
    if kind in (Kind.STICKY, Kind.ASSERT) and runs_here(resident.spec):
        keeper.lost_to = keeper.lost_to or f"{lease.name}: {because}"
    if not keeper.settings.enable_memory_governor:
        return
    try:
        keeper.decide(
            lambda book, world: (
                books.note(book, world, lease, "lost", kind, because, size=lease.bytes),
                None,
            ),
            fresh=True,
        )
    except GpuError as error:
        log.debug("%s is told to be lost later: %s", lease.name, error)


def struck(keeper: Keeper, resident: Resident, error: BaseException | None) -> GpuError | None:
    """The error to raise in the place of one by which a driver let down a model that runs in this process, once that
    is put away; None where it was no such error."""
    if (
        not isinstance(error, RuntimeError)
        or isinstance(error, GpuError)
        or not runs_here(resident.spec)
    ):
        return None
    fault = recognise(str(error))
    if fault is None or not fault.clears_model:
        return None
    if fault.loses_context:
        keeper.lost_to = f"{resident.spec.name}: {fault.line}"
        for other in list(keeper.residents.values()):
            if other.place is Place.HERE and runs_here(other.spec):
                _put_away(keeper, other, fault)
        return _process_lost(resident.spec.name, fault.kind.value, fault.line)
    _put_away(keeper, resident, fault)
    name = resident.spec.name
    return EngineFault(
        f"{name} failed ({fault.kind}): {fault.line}.\n"
        f"  It was put away, and its lease returned; the next use of {name} loads it anew. Where that "
        f"fails too, restart the kernel.",
        name=name,
        kind=fault.kind.value,
        why=fault.line,
        log="",
        reloads=True,
    )


def _put_away(keeper: Keeper, resident: Resident, fault: Fault) -> None:
    with contextlib.suppress(
        Exception
    ):  # the driver may refuse whatever is asked of it now; nothing is held any more
        resident.lose()
    tell(keeper, resident, fault.kind.value, f"{resident.spec.name} was put away: {fault.line}")


def require_served(keeper: Keeper, resident: Resident) -> None:
    """Raises ProcessLost where this model would have to run in this process, and the driver serves it no more."""
    if keeper.lost_to and runs_here(resident.spec):
        name, _, why = keeper.lost_to.partition(": ")
        raise _process_lost(name, "", why)


def _process_lost(name: str, kind: str, why: str) -> ProcessLost:
    return ProcessLost(
        f"this process (pid {os.getpid()}) can use the GPU no more, since {name} failed:\n  {why.rstrip('.')}.\n"
        f"  Its leases are returned; the memory itself comes free when the process ends.\n"
        f"  Restart the kernel, then run the cells again. To find the place:  CUDA_LAUNCH_BLOCKING=1\n"
        f"  Models in processes of their own (llama.cpp isolated, servers) go on.",
        name=name,
        kind=kind,
        why=why,
    )


# -- out of memory while loading --------------------------------------------------------------------------------------


def make_room(keeper: Keeper, resident: Resident, shares: tuple[Share, ...]) -> None:
    """After an out-of-memory error: whatever is idle on these cards leaves, ours and others', as far as it may.

    The book had room and the card had not, so its figures are not believed; what goes is what a request of this
    importance may ask to go.
    """
    cards = {share.device for share in shares}
    because = f"{resident.spec.name} found the device out of memory while it was loaded."
    book, world = keeper.ledger.read(), keeper.world()
    for lease in book.leases():
        mine = keeper.residents.get(lease.name) if lease.owner == keeper.me else None
        if mine is resident or not cards & {share.device for share in lease.shares}:
            continue
        if reason_to_stay(lease, world, asker=keeper.me, importance=resident.spec.importance):
            continue
        try:
            if mine is not None:
                keeper.evict(mine, because)
            elif lease.owner != keeper.me:
                keeper.ask("evict", lease.id, timeout=LEAVE_SECONDS)
        except GpuError as stays:
            log.debug("%s stays: %s", lease.name, stays)
    keeper.probe.empty_cache()
