"""Errors made from refusals and failures: what happened, who is involved, and what to type.

Pure: facts in, an error with its sentence out.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..errors import (
    Busy,
    Deadlock,
    DoesNotFit,
    GpuError,
    LedgerUnavailable,
    LoadFailed,
    MemoryLimitExceeded,
    NotAllowed,
    OutOfMemory,
    StillInUse,
    WaitEnded,
    first_line,
)
from ..facts import (
    KERNEL,
    THIS_PROCESS,
    AllocatorMap,
    Book,
    Lease,
    Refuse,
    Wait,
    World,
    lease_state,
    lease_title,
)
from ..units import MIB, show_bytes, show_seconds
from .capacity import views
from .victims import EXEMPT, FIXED

MOST_HOLDERS = 8  # leases in a report, each on a line of its own
SMALLEST_STRANGER = 64 * MIB  # less unleased memory than this is not reported


# -- refusals --------------------------------------------------------------------------------------


def refusal(name: str, verdict: Refuse) -> GpuError:
    """The error for a refusal of the model `name`, with what to type.

    The class of the error depends on the kind of `verdict`: DoesNotFit, MemoryLimitExceeded,
    NotAllowed, Deadlock or LedgerUnavailable.
    """
    facts: dict[str, Any] = dict(
        name=name,
        need_bytes=verdict.need_bytes,
        budget_bytes=verdict.budget_bytes,
        device=verdict.device,
        holders=verdict.holders,
        considered=verdict.considered,
    )
    because = verdict.because
    plan = f"%gpu plan {_plan_argument(name, verdict)}"
    if verdict.kind == "deadlock":
        hint = "End one of the blocks first, or nest them in the same order everywhere."
        return Deadlock(f"{because}.\n  {hint}", **facts)
    if verdict.kind == "limit":
        hint = (
            f"Use a smaller model or a shorter context_length (its parts:  {plan}), "
            "end what is in use, or raise INFERENCE_MEMORY_LIMIT_GB."
        )
        return MemoryLimitExceeded(f"{because}\n  {hint}", current_bytes=0, **facts)
    if verdict.kind == "cap":
        hint = "Nothing was evicted. The operator can change the cap; what you hold:  %gpu leases"
        return NotAllowed(f"{because}.\n  {hint}", because=because, **facts)
    if verdict.kind == "full":
        return LedgerUnavailable(f"{because}.", **facts)
    return DoesNotFit(f"{because}.\n  {_hint(name, verdict, plan)}", **facts)


def _is_block(name: str) -> bool:
    """Whether `name` is the name of a block of code, which leases bytes and is no model."""
    return "#" in name


def _plan_argument(name: str, verdict: Refuse) -> str:
    """The argument of `%gpu plan`: the model's name, or the size of a block of code."""
    size = show_bytes(verdict.need_bytes).replace(" ", "")
    return size if _is_block(name) else shlex.quote(name)


def _hint(name: str, verdict: Refuse, plan: str) -> str:
    """The advice after a refusal of `name` for lack of room: what to type."""
    first_holder = next(iter(verdict.holders), "").partition("/")[2]
    if verdict.kind == "nested":
        if first_holder == KERNEL:
            return "Free what this notebook itself holds:  %gpu who      or end the cell, and wait"
        return f"Leave the block of {first_holder} first: the two do not fit at the same time."
    if verdict.kind == "kept":
        return f"Unpin it:  %gpu unpin {shlex.quote(first_holder)}"
    if verdict.kind == "drained":
        return f"End the drain:  gpu drain {verdict.device} --undo"
    if verdict.kind == "precious":
        if advice := advice_on_fixed(verdict.because, first_holder):
            return advice
        if first_holder == KERNEL:
            return "Raise CPU_MEMORY_MAX_PERCENT so that it fits in RAM, or free it in its notebook:  %gpu free"
        return (
            "Raise CPU_MEMORY_MAX_PERCENT so that it fits in RAM, "
            f"or give it up:  rt.forget({first_holder!r})"
        )
    less = "Ask for fewer bytes" if _is_block(name) else "Use a smaller or quantised model"
    return (
        f"{less}, or raise the budget:  GPU_MEMORY_MAX_PERCENT\n  Nothing was evicted. See:  {plan}"
    )


def advice_on_fixed(because: str, name: str) -> str:
    """What to type about the lease `name` that its process does not move, `because` of this; else empty."""
    if EXEMPT in because:
        return "End the exemption in that notebook:  %gpu park asked      or free its memory:  %gpu free"
    if FIXED not in because:
        return ""
    if name == KERNEL:
        return "Free its memory in its notebook:  %gpu free"
    return f"Give it up in its notebook:  rt.forget({name!r})"


def busy(book: Book, name: str, wait: Wait, waited_seconds: float) -> Busy:
    """The error for a request for `name` that timed out after `waited_seconds`.

    `wait` is the last verdict of the request. `book` gives the pids of owners that do not respond.
    """
    hint = "Watch:  %gpu status      or set a larger timeout"
    pids = _pids(book, wait.silent)
    if pids:
        resume = f"If it was stopped, let it continue:  kill -CONT {pids}      or end it"
        if "kill -CONT" in wait.because:
            resume = "Or end it"
        hint = f"{resume}:  kill -9 {pids}\n  Its memory is freed when it responds, or ends."
    waited = show_seconds(waited_seconds)
    return Busy(
        f"no room for {name} within {waited}: {wait.because.rstrip('.')}.\n  {hint}",
        name=name,
        waited_seconds=waited_seconds,
        because=wait.because,
    )


def wait_ended(name: str, by: str, because: str, waited_seconds: float) -> WaitEnded:
    """The error for a request for `name` after a person or a process has ended its wait.

    `by` names the person or process that ended the wait. `because` is what the request waited for,
    as a sentence; it may be empty.
    """
    what = "this notebook's own memory" if name == KERNEL else name.partition("#")[0]
    reason = f": {because.rstrip('.')}" if because else ""
    return WaitEnded(
        f"{by} ended the wait for {what} after {show_seconds(waited_seconds)}{reason}.\n"
        "  To wait again, run the cell again. The queue:  %gpu status",
        name=name,
        by=by,
        waited_seconds=waited_seconds,
        because=because,
    )


def _pids(book: Book, lease_ids: Iterable[str]) -> str:
    """The pids of the owners of these leases, separated by spaces."""
    pids: dict[int, None] = {}
    for lease_id in lease_ids:
        owner = book.owner(lease_id.partition("/")[0])
        if owner is not None:
            pids[owner.pid] = None
    return " ".join(str(pid) for pid in pids)


def still_here(book: Book, me: str, lease: Lease, why: str, world: World) -> GpuError:
    """The error for a request to move or evict `lease`, which may not leave now.

    `why` is the result of `reason_to_stay`. `me` is the id of the requesting owner. `book` gives
    the name of the lease's owner, and `world` the time.
    """
    holder = THIS_PROCESS if lease.owner == me else book.label(lease.owner)
    title = book.title(lease)
    facts: dict[str, Any] = dict(name=lease.name, lease=lease.id, owner=holder)
    if why == "in use":
        since = world.now - lease.pinned_since if lease.pinned_since else 0.0
        use = "runs a cell" if lease.kind == KERNEL else f"is in use by {holder}"
        return StillInUse(
            f"{title} ({show_bytes(lease.bytes)}, {lease.where}) {use} for {show_seconds(since)}.\n"
            f"  {_end_of_use(book, lease)}",
            since_seconds=since,
            **facts,
        )
    if why == "kept":
        hint = f"Unpin it first:  %gpu unpin {shlex.quote(lease.name)}"
        return StillInUse(f"{title} is pinned to its device.\n  {hint}", **facts)
    return StillInUse(f"{title} cannot leave now: it is {why}. Try again.", **facts)


def _end_of_use(book: Book, lease: Lease) -> str:
    """When the `lease`, which is in use, can leave: a cell ends it in a notebook, but not in a script."""
    section = book.sections.get(lease.owner)
    if section is None or section.owner.notebook or section.busy_since or section.idle_since:
        return "It can leave when that cell has ended: type it again then. Watch:  %gpu status"
    return (
        "It can leave when that block has ended. An output that keeps its graph is a use too: delete it, "
        "or call backward() and step()."
    )


# -- failures --------------------------------------------------------------------------------------


def elsewhere(name: str, where: str, tensors: Sequence[str]) -> str:
    """The warning that some `tensors` of the model `name` are not on `where`, its device."""
    more = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
    listed = ", ".join(tensors[:3])
    return f"{name} was loaded to {where}, but these are elsewhere: {listed}{more}."


def load_failed(name: str, source: str, error: BaseException, *, driver_failed: bool) -> LoadFailed:
    """The error for a failed load of the model `name` from `source`.

    `error` is the original error. `driver_failed` is True if the driver no longer serves this
    process.
    """
    hint = ""
    if driver_failed:
        hint = (
            "\n  The driver failed in this process: restart its kernel. "
            "Its memory is then freed; other processes are not affected."
        )
    return LoadFailed(
        f"{name} could not be loaded: {type(error).__name__}: {first_line(error)}{hint}",
        name=name,
        source=source,
    )


def out_of_memory(
    error: BaseException,
    book: Book,
    world: World,
    me: str,
    maps: Iterable[AllocatorMap],
    *,
    loading: str = "",
    using: str = "",
    device: str = "",
    declared_bytes: int | None = None,
) -> OutOfMemory:
    """The report of an out-of-memory error: what was requested, who holds what, and what to type.

    `error` is the original error, and `me` is the id of this owner. `maps` are the allocators of
    this owner's process. For a failed load, `loading` is the model's name and `device` its
    destination. `using` is the model that the block used. `declared_bytes` is the size that the
    user declared for the model, if any.
    """
    if loading:
        what = f"{device or 'the device'} ran out of memory while loading {loading}."
    else:
        when = f" while {using} was in use" if using else ""
        what = f"the device ran out of memory{when}."
    on_devices = [lease for lease in book.leases() if lease.on_device]
    holders = sorted(on_devices, key=lambda lease: -lease.bytes)
    lines = [what, f"  {first_line(error)}"]
    lines += [_holder_line(lease, book, world, me) for lease in holders[:MOST_HOLDERS]]
    lines += _unleased_lines(book, world)
    lines += _cache_lines(maps)
    if declared_bytes is not None:
        lines.append(
            f"  It was declared as {show_bytes(declared_bytes)}. Does it need more? "
            f"Declare that:  rt.register({loading!r}, …, size='…')"
        )
    if loading:
        lines.append(
            "  Make room, and load it again:  %gpu evict NAME      "
            "If it happens again, lower GPU_MEMORY_MAX_PERCENT"
        )
    else:
        lines.append(
            "  Idle models leave for the next try: run the cell again, use a smaller batch, or see:  "
            "%gpu status"
        )
    report = "\n".join(lines)
    return OutOfMemory(
        report,
        device=device,
        asked_bytes=getattr(error, "asked_bytes", 0),
        holders=tuple(lease.id for lease in holders),
        report=report,
    )


def _holder_line(lease: Lease, book: Book, world: World, me: str) -> str:
    state = lease_state(lease, world.now).text()
    if lease.keep:
        state += ", pinned"
    owner = book.owner(lease.owner)
    by = f"  {owner.label}" if owner and lease.owner != me else ""
    return _line(lease.bytes, lease.where, f"{lease_title(lease, owner)}, {state}{by}")


def _unleased_lines(book: Book, world: World) -> Iterator[str]:
    for view in views(book, world):
        unleased = (view.measured_bytes or 0) - view.claimed_bytes
        if not view.device.is_host and unleased > SMALLEST_STRANGER:
            yield _line(unleased, view.device.id, "held by programs that do not use gpu-console")


def _cache_lines(maps: Iterable[AllocatorMap]) -> Iterator[str]:
    for part in maps:
        cached = part.reserved_bytes - part.allocated_bytes
        if cached > 0:
            yield _line(cached, part.device, "reserved by torch but unused (%gpu defrag)")


def _line(size: int, place: str, what: str) -> str:
    return f"  {show_bytes(size):>9}  {place:<8} {what}"
