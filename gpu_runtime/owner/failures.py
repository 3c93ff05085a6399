"""Handles the failures of a model: memory runs out, an engine ends, or a driver fails.

The lease of a lost model ends, and the book records why, before any caller gets the error. The next
use of the model loads it again. If the driver no longer serves this process, this process can load
no model, and every use raises ProcessLost.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import traceback
from typing import Any

from ..backends.base import is_out_of_memory
from ..errors import EngineFault, GpuError, OutOfMemory, ProcessLost, first_line
from ..facts import KERNEL, NORMAL, Grant, Lease, LeaseId, Load, Refuse, Step
from ..fault_texts import WRITE_REFUSED, Fault, Kind, recognise
from ..scheduler import refusals
from ..scheduler import transitions as books
from ..scheduler.victims import reason_to_stay
from ..user_frames import user_lines
from . import release, requests
from .resident import Place, Resident
from .session import Session

log = logging.getLogger("gpu_runtime")
LEAVE_SECONDS = 5.0  # time for another owner to evict an idle model after an out-of-memory error


def refused_write(session: Session, error: BaseException) -> str:
    """After a write into bytes in host memory of a simulated card: which bytes, and what to type.

    torch's own error does not name them. The result is empty for any other error.
    """
    if not (isinstance(error, RuntimeError) and str(error).startswith(WRITE_REFUSED)):
        return ""
    away = [resident for resident in session.residents.values() if resident.lease.on_host]
    names = [resident.spec.name for resident in away if resident.lease.kind == "model"]
    if any(resident.lease.kind == KERNEL for resident in away):
        return (
            "This notebook is parked: its memory is in RAM (gpu-console), where it can be "
            "read and not written. Bring it back:  %gpu unpark"
        )
    if not names:
        return ""
    named = " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
    return (
        f"The weights of {named} are in RAM (gpu-console), where they can be read and not "
        f"written. Bring them back:  with rt.use({names[0]!r}) as model:"
    )


# torch's errors where a program asks for CUDA and there is none: a CPU build, or no driver
NO_CUDA = ("not compiled with CUDA", "no NVIDIA driver", "No CUDA GPUs are available")


def no_cuda(session: Session, error: BaseException) -> str:
    """After an error of torch that CUDA is missing, on simulated cards: what to write instead. Empty for any other."""
    if not (session.probe.simulated and any(words in str(error) for words in NO_CUDA)):
        return ""
    return (
        'The GPU is simulated here (gpu-console), and torch has no CUDA. Write device="cpu": CPU tensors of 1 MiB and '
        'more count as the simulated GPU\'s memory. For both:  device = "cuda" if torch.cuda.is_available() else "cpu"'
    )


# -- a model that is lost


def record_loss(session: Session, resident: Resident, kind: str, because: str) -> None:
    """Writes into the book that the model is lost, and ends its lease.

    `kind` is the kind of failure. Never raises GpuError. If the book cannot be written, the monitor
    publishes the loss later.
    """
    lease = resident.lease
    log.warning("%s", because)
    if kind in (Kind.STICKY, Kind.ASSERT) and resident.backend.runs_here(resident.spec):
        session.process_lost = session.process_lost or f"{lease.name}: {because}"
    if not session.settings.enable_memory_governor:
        return
    try:
        session.note(lease, "lost", kind, because, fresh=True, size=lease.bytes)
    except GpuError as error:
        log.debug("the loss of %s is recorded later: %s", lease.name, error)


def driver_failure(
    session: Session, resident: Resident, error: BaseException | None
) -> GpuError | None:
    """Removes a model whose driver failed, and returns the error to raise instead of `error`.

    If the driver no longer serves this process, removes all models that run in it. Returns None if
    `error` is no failure of a driver, or if the model does not run in this process.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, GpuError):
        return None
    if not resident.backend.runs_here(resident.spec):
        return None
    fault = recognise(str(error))
    if fault is None or not fault.clears_model:
        return None
    name = resident.spec.name
    if fault.loses_context:
        session.process_lost = f"{name}: {fault.line}"
        for other in list(session.residents.values()):
            if other.place is Place.HERE and other.backend.runs_here(other.spec):
                _put_away(session, other, fault)
        return process_lost(name, fault.line, fault.kind.value)
    _put_away(session, resident, fault)
    return EngineFault(
        f"{name} failed ({fault.kind}): {fault.line}.\n"
        f"  It was unloaded and its memory was given back; the next use of {name} loads it again. If that "
        f"fails too, restart the kernel.",
        name=name,
        kind=fault.kind.value,
        why=fault.line,
        log="",
        reloads=True,
    )


def _put_away(session: Session, resident: Resident, fault: Fault) -> None:
    # Nothing can use the bytes any more, even if the driver refuses to free them.
    with contextlib.suppress(Exception):
        resident.lose()
    because = f"{resident.spec.name} was unloaded: {fault.line}"
    record_loss(session, resident, fault.kind.value, because)


def process_lost(name: str, why: str, kind: str = "") -> ProcessLost:
    """The error of every model that runs here once the driver no longer serves this process, since `name` failed."""
    return ProcessLost(
        f"this process (pid {os.getpid()}) can no longer use the GPU, since {name} failed:\n"
        f"  {why.rstrip('.')}.\n"
        f"  Its memory counts as free, and is freed when the process ends.\n"
        f"  Restart the kernel, then run the cells again. To find the place:  "
        f"CUDA_LAUNCH_BLOCKING=1\n"
        f"  Models in processes of their own (llama.cpp isolated, servers) go on.",
        name=name,
        kind=kind,
        why=why,
    )


# -- out of memory


def finish_block(
    session: Session, error: BaseException | None, resident: Resident | None = None
) -> None:
    """Ends a `with` block. Raises a readable report if `error` is an out-of-memory or driver error.

    The code of the block is not run again.
    """
    if error is None:
        return
    report = _report(session, error, resident)
    try:
        if report is not None:
            raise report from error
    finally:
        del report  # see pins.py


def _report(
    session: Session, error: BaseException, resident: Resident | None
) -> BaseException | None:
    """The readable report of an out-of-memory or driver error; None for any other error."""
    lost = driver_failure(session, resident, error) if resident is not None else None
    if lost is not None:
        return lost
    if not is_out_of_memory(error) or getattr(error, "report", None):
        return None
    using = resident.spec.name if resident is not None else ""
    report = _with_figures(session, error, using=using)
    report.left = free_memory_after(session, error)
    return report


def _with_figures(session: Session, error: BaseException, **about: Any) -> OutOfMemory:
    """The readable report of the out-of-memory `error`, with the current figures.

    `about` are the keywords of `refusals.out_of_memory`.
    """
    world = session.world()
    book = books.publish(session.ledger.read(), session.truth(), world)
    maps = session.probe.maps()
    return refusals.out_of_memory(error, book, world, session.me, maps, **about)


def full_cards(session: Session, error: BaseException) -> set[str]:
    """The card that the message of `error` or of its cause names; all cards if none is named."""
    probe = session.probe
    cards = [device.id for device in probe.cards]
    for cause in filter(None, (error, error.__cause__)):
        found = re.search(r"GPU (\d+) has|(simgpu:\d+) out of memory", str(cause))
        full = (found[2] or f"cuda:{found[1]}") if found else ""
        if named := {card for card in cards if probe.place(card).torch == full}:
            return named
    return set(cards)


def load_error(
    session: Session, resident: Resident, step: Step, error: BaseException
) -> BaseException:
    """The error to raise for a failed load.

    An error of this package or an interrupt is returned unchanged. An out-of-memory error becomes a
    readable report. Any other error becomes a LoadFailed with the model's name.
    """
    name = resident.spec.name
    if is_out_of_memory(error):
        declared = resident.spec.size if isinstance(step, Load) else None
        cards = [share.device for share in step.shares]  # type: ignore[union-attr]
        full = full_cards(session, error)
        return _with_figures(
            session,
            error,
            loading=name,
            device=next((card for card in cards if card in full), cards[0]),
            declared_bytes=declared,
        )
    if isinstance(error, GpuError) or not isinstance(error, Exception):
        return error
    fault = recognise(str(error))
    driver_failed = fault is not None and fault.clears_model
    failed = refusals.load_failed(name, resident.spec.source, error, driver_failed=driver_failed)
    # The lines of the traceback are stored as text, because a reference to the error would keep the
    # bytes of the load alive.
    failed.places = tuple(user_lines(error))
    return failed


def free_memory_after(session: Session, error: BaseException) -> tuple[Lease, ...]:
    """After running out of memory in a block: evicts idle models of this process, frees the cache.

    Returns the leases that left, as they were before the eviction.
    """
    left: list[Lease] = []
    traceback.clear_frames(error.__traceback__)  # ended frames would keep their tensors alive
    for resident in list(session.residents.values()):
        before = resident.lease
        stays = resident.place is not Place.HERE or resident.in_use() or resident.spec.keep
        if not stays and not evict_anywhere(session, before, "a cell ran out of memory."):
            left.append(before)
    session.probe.empty_cache()
    return tuple(left)


def evict_idle(
    session: Session,
    cards: set[str],
    because: str,
    *,
    importance: int = NORMAL,
    spared: str = "",
    enough: float = math.inf,
) -> tuple[list[Lease], dict[str, str]]:
    """After an out-of-memory error: evicts idle leases on `cards` until `enough` bytes are free there.

    The card was fuller than the book showed. Leases of other owners are recalled if a request with
    this `importance` may recall them. The lease with the id `spared` stays. Returns the leases that
    left, as they were, the least recently used first, and why others have not left, by id.
    """
    left: list[Lease] = []
    stay: dict[str, str] = {}
    book, world = session.ledger.read(), session.world(fresh=True)
    for lease in sorted(book.leases(), key=lambda lease: lease.last_used):
        here = sum(lease.bytes_on(card) for card in cards)
        why = reason_to_stay(lease, world, asker=session.me, importance=importance)
        if enough <= 0 or not here or why or lease.id == spared:
            continue
        if why := evict_anywhere(session, lease, because):
            stay[lease.id] = why
        else:
            left.append(lease)
            enough -= here
    session.probe.empty_cache()
    return left, stay


def evict_anywhere(session: Session, lease: Lease, because: str) -> str:
    """Evicts the model of `lease`, or requests the eviction if another owner has the model.

    Returns why the model has not left its device; empty if it has left.
    """
    try:
        if lease.owner != session.me:
            target = LeaseId(lease.owner, lease.name)
            verdict = requests.request(session, "evict", target, timeout=LEAVE_SECONDS)
            late = f"it has not left within {LEAVE_SECONDS:g} s"
            if isinstance(verdict, Refuse):
                return verdict.because
            return "" if isinstance(verdict, Grant) else late
        mine = session.residents.get(lease.name)
        left = mine is not None and release.evict(session, mine, because) is not None
        return "" if left else "it is used again"
    # A failed move must not hide the error of the block, nor fail this load.
    except Exception as stays:
        log.debug("%s stays: %s", lease.name, stays)
        return first_line(stays)
