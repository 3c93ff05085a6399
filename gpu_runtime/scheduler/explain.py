"""Refusals and failures, told to whoever has to do something about them: what stands in the way, and what to type.

Pure: facts in, an error with its sentence out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

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
)
from ..facts import (
    THIS_PROCESS,
    AllocatorMap,
    Book,
    Candidate,
    Event,
    Grant,
    Lease,
    PlacementRules,
    Refuse,
    Verdict,
    Wait,
    World,
    lease_state,
    where,
)
from ..units import MIB, show_bytes, show_seconds
from .placement import runners_up
from .pressure import views

MOST_HOLDERS = 8  # lines of a report
MOST_RUNNERS_UP = 8  # sentences beside a decision


def first_line(error: BaseException) -> str:
    """The error's own words, shortened to one line."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def with_runners_up(
    events: Iterable[Event],
    verdict: Verdict,
    rules: PlacementRules,
    room_made: Sequence[Candidate] = (),
) -> list[Event]:
    """These events; beside the one that tells this verdict, what else was considered.

    `room_made`: the ways to make room that were compared before this grant, where it needed that.
    """
    told = _TOLD[type(verdict)]
    return [
        replace(event, runners_up=alternatives(verdict, rules, room_made))
        if event.action == told
        else event
        for event in events
    ]


_TOLD = {Grant: "granted", Wait: "waiting", Refuse: "refused"}


def alternatives(
    verdict: Verdict, rules: PlacementRules, room_made: Sequence[Candidate] = ()
) -> tuple[str, ...]:
    """The other places, each in a sentence with why it lost; the nearest first."""
    considered: Sequence[Candidate] = verdict.considered
    if isinstance(verdict, Grant):
        considered = runners_up(
            room_made or considered, verdict.lease.target or verdict.lease.shares, rules
        )[1:]
    elif isinstance(verdict, Wait):
        considered = runners_up(considered, considered[0].shares if considered else (), rules)[1:]
    sentences = []
    for option in considered[:MOST_RUNNERS_UP]:
        place = where(option.shares)
        sentences.append(f"{place}: {option.because.removeprefix(f'{place} ').rstrip('.')}.")
    return tuple(sentences)


def refusal(name: str, verdict: Refuse) -> GpuError:
    """The error that a refusal is raised as, with what to type."""
    facts: dict[str, Any] = dict(
        name=name,
        need_bytes=verdict.need_bytes,
        budget_bytes=verdict.budget_bytes,
        device=verdict.device,
        holders=verdict.holders,
        considered=verdict.considered,
    )
    if verdict.kind == "deadlock":
        return Deadlock(
            f"{verdict.because}.\n  End one of the blocks first, or nest them in the same order everywhere.",
            **facts,
        )
    asked = show_bytes(verdict.need_bytes).replace(" ", "") if "#" in name else name
    if verdict.kind == "limit":
        return MemoryLimitExceeded(
            f"{verdict.because}\n  Use a smaller model or a shorter context_length (its parts:  %gpu plan {asked}), end "
            f"what is in use, or raise INFERENCE_MEMORY_LIMIT_GB.",
            current_bytes=0,
            **facts,
        )
    if verdict.kind == "cap":
        return NotAllowed(
            f"{verdict.because}.\n  Nothing was evicted. The operator can change it; what you hold:  %gpu leases",
            because=verdict.because,
            **facts,
        )
    if verdict.kind == "full":
        return LedgerUnavailable(f"{verdict.because}.", **facts)
    first = next(iter(verdict.holders), "").partition("/")[2]
    hint = {
        "nested": f"Leave the block of {first} first: what does not fit together cannot be nested.",
        "kept": f"Let it go:  %gpu unpin {first}",
        "drained": f"Let it take leases again:  gpu drain {verdict.device} --undo",
        "precious": f"Raise CPU_MEMORY_MAX_PERCENT so that RAM can take it, or give it up:  rt.forget({first!r})",
    }.get(
        verdict.kind,
        f"Use a smaller or quantised model, or raise the budget:  GPU_MEMORY_MAX_PERCENT\n"
        f"  Nothing was evicted. See:  %gpu plan {asked}",
    )
    return DoesNotFit(f"{verdict.because}.\n  {hint}", **facts)


def busy(book: Book, name: str, wait: Wait, waited_seconds: float) -> Busy:
    """The error for a wait that ended with its time-out."""
    silent = [owner for id in wait.silent if (owner := book.owner(id.partition("/")[0]))]
    hint = "Watch:  %gpu status      or give it longer, with a larger timeout"
    if silent:
        pids = " ".join(str(pid) for pid in dict.fromkeys(owner.pid for owner in silent))
        hint = (
            f"Let it go on, if it was stopped:  kill -CONT {pids}      or end it:  kill {pids}\n"
            "  What it holds comes free when it answers, or ends."
        )
    return Busy(
        f"{name} found no room in {show_seconds(waited_seconds)}: {wait.because.rstrip('.')}.\n  {hint}",
        name=name,
        waited_seconds=waited_seconds,
        because=wait.because,
    )


def still_here(book: Book, me: str, lease: Lease, why: str, world: World) -> GpuError:
    """The error for a lease that somebody wants gone, and that may not go now."""
    owner = book.owner(lease.owner)
    label = THIS_PROCESS if lease.owner == me else owner.label if owner else lease.owner
    if why == "in use":
        since = world.now - lease.pinned_since if lease.pinned_since else 0.0
        return StillInUse(
            f"{lease.name} ({show_bytes(lease.bytes)}, {lease.where}) is in use by {label} for {show_seconds(since)}.\n"
            f"  It leaves when that cell ends. Watch:  %gpu status",
            name=lease.name,
            lease=lease.id,
            owner=label,
            since_seconds=since,
        )
    if why == "kept":
        return StillInUse(
            f"{lease.name} is pinned to its device.\n  Unpin it first:  %gpu unpin {lease.name}",
            name=lease.name,
            lease=lease.id,
            owner=label,
        )
    return StillInUse(
        f"{lease.name} is {why} just now; try again.", name=lease.name, lease=lease.id, owner=label
    )


def elsewhere(name: str, where: str, tensors: Sequence[str]) -> str:
    """What is said of a model parts of which do not lie where it was loaded to."""
    more = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
    return f"{name} was loaded to {where}, but these lie elsewhere: {', '.join(tensors[:3])}{more}."


def load_failed(name: str, source: str, error: BaseException, *, driver_failed: bool) -> LoadFailed:
    """The error for a load that failed, named after its model."""
    hint = (
        "\n  The driver failed in this process: restart its kernel. What it holds comes free; others go on."
        if driver_failed
        else ""
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
    device: str = "",
    declared_bytes: int | None = None,
) -> OutOfMemory:
    """The readable report of an out-of-memory error: what was asked, who holds what, fragmentation, what to type.

    `declared_bytes` is the size that somebody said a model has which was being loaded.
    """
    lines = [
        f"{device or 'the device'} ran out of memory while loading {loading}."
        if loading
        else "the device ran out of memory while a model was in use.",
        f"  {first_line(error)}",
    ]
    holders = sorted(
        (lease for lease in book.leases() if lease.on_device), key=lambda lease: -lease.bytes
    )
    for lease in holders[:MOST_HOLDERS]:
        owner = book.owner(lease.owner)
        state = lease_state(lease, world.now).text()
        use = f"{state}, pinned" if lease.keep else state
        who = "" if lease.owner == me or not owner else f"  {owner.label}"
        lines.append(f"  {show_bytes(lease.bytes):>9}  {lease.where:<8} {lease.name}, {use}{who}")
    for view in views(book, world):
        strangers = (view.measured_bytes or 0) - view.claimed_bytes
        if not view.device.is_host and strangers > 64 * MIB:
            lines.append(f"  {show_bytes(strangers):>9}  {view.device.id:<8} not leased by anybody")
    for part in maps:
        cached = part.reserved_bytes - part.allocated_bytes
        if cached > 0:
            lines.append(
                f"  {show_bytes(cached):>9}  {part.device:<8} reserved by torch but unused (%gpu defrag)"
            )
    if declared_bytes is not None:
        lines.append(
            f"  It was declared as {show_bytes(declared_bytes)}. Does it need more? Say so:  "
            f"rt.register({loading!r}, …, size='…')"
        )
    if loading:
        lines.append(
            "  Make room, and load it again:  %gpu evict NAME      Time and again? Lower "
            "GPU_MEMORY_MAX_PERCENT"
        )
    else:
        lines.append(
            "  Then:  run the cell again (idle models have stepped aside), use a smaller batch, or  "
            "%gpu status"
        )
    report = "\n".join(lines)
    return OutOfMemory(
        report, device=device, holders=tuple(lease.id for lease in holders), report=report
    )
