"""The sentences of the faces: who waits, what happened and why, what a plan would do. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_runtime.facts import (
    NORMAL,
    Event,
    Load,
    Part,
    Plan,
    Snapshot,
    Step,
    Ticket,
    importance_name,
)
from gpu_runtime.units import is_source, show_bytes, show_seconds

from .views import clean, holder, lease_name

QUIET_SECONDS = 10.0  # a host whose owners show nothing for longer is said to be quiet

# -- the queue, the past ------------------------------------------------------------------------------------------


def waiting(snapshot: Snapshot) -> list[str]:
    """A sentence for each request in the queue, and for each thing asked of somebody else."""
    return [_waits(snapshot, ticket) for ticket in snapshot.tickets]


def _waits(snapshot: Snapshot, ticket: Ticket) -> str:
    waited = show_seconds(max(0.0, snapshot.now - ticket.arrived))
    who = holder(snapshot, ticket.owner)
    if ticket.verb != "use":
        owner_id, _, name = ticket.name.partition("/")
        return f"{who} asked {holder(snapshot, owner_id)} to {ticket.verb} {name}, {waited} ago"
    need = " + ".join(f"{show_bytes(share.bytes)} on {share.device}" for share in ticket.need)
    level = "" if ticket.importance == NORMAL else f" ({importance_name(ticket.importance)})"
    because = f": {ticket.because}" if ticket.because else ""
    return (
        f"{ticket.name}{level}{', ' + need if need else ''}, for {who}, waiting {waited}{because}"
    )


_DEEDS = {
    "granted": "was promised {bytes} on {device}",
    "loaded": "was loaded, {bytes} on {device}",
    "offloaded": "stepped aside from {device}, freeing {bytes}",
    "restored": "came back, {bytes} on {device}",
    "unloaded": "was dropped from {device}, freeing {bytes}",
    "moved": "left {device} for another card, {bytes}",
    "released": "was given back, {bytes} on {device}",
    "refused": "was refused {bytes}",
    "waiting": "had to wait",
    "failed": "failed",
    "reaped": "ended with its process, freeing {bytes}",
    "stays": "stays where it is",
    "pin": "was pinned",
    "unpin": "was unpinned",
    "preload": "was loaded for another process",
    "drained": "was drained",
    "undrained": "takes leases again",
    "restore": "was brought back for another process",
    "defrag": "was asked to give its cache back",
    "asked": "was asked for",
    "declined": "was asked for in vain",
}


def deed(event: Event) -> str:
    """What happened, without the reason."""
    words = _DEEDS.get(event.action, event.action)
    if not event.bytes:
        words = words.split(",")[0].replace(" {bytes}", "")
    if not event.device:
        words = (
            words.replace(" on {device}", "")
            .replace(" from {device}", "")
            .replace(" to {device}", "")
        )
    return words.format(bytes=show_bytes(event.bytes), device=event.device)


def told(event: Event) -> str:
    """An event in a sentence: what, and why."""
    because = event.because.strip().rstrip(".")
    asked = f", asked by {event.by}" if event.by else ""
    return f"{deed(event)}{asked}{': ' + because if because else ''}."


def counters(snapshot: Snapshot) -> str:
    """The totals in one line: evictions are offloads and unloads."""
    n = snapshot.totals.get
    evictions = n("evictions", 0)
    parts = [
        f"{evictions} eviction{'s' if evictions != 1 else ''} "
        f"({n('offloads', 0)} offloaded, {n('unloads', 0)} unloaded)",
        f"{n('restorations', 0)} restored",
    ]
    if "loads" in snapshot.totals:
        parts.append(f"{n('loads', 0)} loaded")
    if n("refusals", 0):
        parts.append(f"{n('refusals', 0)} refused")
    return " · ".join(parts)


def alarms(snapshot: Snapshot) -> list[str]:
    """What must be said before anything else."""
    words = []
    if not snapshot.governed:
        words.append(
            "The governor is off (ENABLE_MEMORY_GOVERNOR=false): models load without asking."
        )
    if snapshot.degraded:
        words.append(f"The monitor cannot see: {snapshot.degraded}")
    return words


# -- plans --------------------------------------------------------------------------------------------------------


def verdict(plan: Plan) -> str:
    """The answer in a few words."""
    name = (
        plan.name[:1].upper() + plan.name[1:]
        if plan.name.startswith("a lease")
        else plan.name or "It"
    )
    if not plan.granted:
        return f"{name} would not get its room now"
    makes_room = [step for step in plan.steps if lease_name(step.lease) != plan.name]
    if not plan.steps:
        return f"{name} is there already"
    if makes_room:
        others = len({step.lease for step in makes_room})
        return f"{name} fits once {others} other{'s have' if others > 1 else ' has'} stepped aside"
    return f"{name} fits in what is free"


def how(plan: Plan, subject: str, prompt: str) -> str:
    """How to do what was planned, where that can be typed; why it would not be done, where something forbids it."""
    if plan.obstacle:
        return f"It would not be loaded: {clean(plan.obstacle)}."
    if plan.name.startswith("a lease"):
        return f"Do it for a cell:  %{prompt} {subject}" if subject and prompt == "%gpu" else ""
    if is_source(plan.name):  # which nobody has registered
        return (
            f"Do it{'' if prompt == '%gpu' else ', in a notebook'}:  %gpu load {clean(plan.name)}"
        )
    return f"Do it:  {prompt} preload {clean(plan.name)}" if plan.name else ""


def step_sentence(snapshot: Snapshot, step: Step) -> str:
    """One step in words: `move llama (8.0 GiB) from sim:0 to host`."""
    owner_id, _, name = step.lease.partition("/")
    whose = "" if owner_id == snapshot.owner.id else f" of {holder(snapshot, owner_id)}"
    here = getattr(step, "source", ())
    there = getattr(step, "shares", ())
    size = show_bytes(sum(share.bytes for share in there or here))
    to = " + ".join(share.device for share in there)
    at = " + ".join(share.device for share in here)
    if isinstance(step, Load):
        return f"load {name} ({size}) on {to}"
    return (
        f"move {name} ({size}){whose} from {at} to {to}"
        if there
        else f"drop {name} ({size}){whose} from {at}"
    )


MOST_CONSIDERED = 8  # places that a plan lists


def others_considered(plan: Plan) -> list[tuple[str, str]]:
    """The places that were not taken, each with what speaks against it; the best of them."""
    found = []
    for option in plan.considered[: MOST_CONSIDERED + 1]:
        if option.shares and [s.device for s in option.shares] != [s.device for s in plan.shares]:
            place = " + ".join(share.device for share in option.shares)
            found.append((place, option.because.removeprefix(f"{place} ")))
    return found


def on_cards(plan: Plan) -> str:
    """On which cards, where it is divided over several."""
    return f" · {plan.cards}" if len(plan.shares) > 1 else ""


_PARTS = {
    "all": "in all",
    "kv_cache": "KV cache",
    "room": "room for use",
    "context": "CUDA context",
}


def needs(plan: Plan) -> str:
    """What it needs in all; where that is one number, also where it came from."""
    if plan.footprint is None:
        return ""
    parts = plan.footprint.parts
    total = show_bytes(plan.footprint.bytes)
    return f"{total} ({_provenance(parts[0])})" if len(parts) == 1 else total


def parts(plan: Plan) -> list[tuple[str, str, str]]:
    """What it needs, part by part: the part, its size, and where that number came from; none where one says it all."""
    found = plan.footprint.parts if plan.footprint else ()
    return (
        [
            (
                _PARTS.get(part.name, part.name.replace("_", " ")),
                show_bytes(part.bytes),
                _provenance(part),
            )
            for part in found
        ]
        if len(found) > 1
        else []
    )


def _provenance(part: Part) -> str:
    return f"{part.source}: {part.detail}" if part.detail else part.source


def notes(plan: Plan) -> tuple[str, ...]:
    """What else there is to know of its size."""
    return plan.footprint.notes if plan.footprint else ()


def worth_a_line(events: Sequence[Event]) -> list[Event]:
    """The events worth a line: a promise that was kept says nothing that its arrival does not."""
    kept = {
        (event.model, event.owner, event.because)
        for event in events
        if event.action in ("loaded", "restored")
    }
    return [
        event
        for event in events
        if event.action != "granted" or (event.model, event.owner, event.because) not in kept
    ]


def host(snapshot: Snapshot) -> str:
    """Which machine a snapshot is of, and how long nobody there has shown itself."""
    if not snapshot.host:
        return f"{clean(snapshot.owner.host) or 'this host'} (this host)"
    quiet = (
        f", quiet for {show_seconds(snapshot.seen_seconds)}"
        if snapshot.seen_seconds > QUIET_SECONDS
        else ""
    )
    return f"{clean(snapshot.host)}{quiet}"
