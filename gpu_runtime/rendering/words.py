"""Sentences about the queue, past events and plans, for text, HTML and the console.

This module is pure. The labels inside the sentences (state, holder, cards) are in
`facts/labels.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpu_runtime.facts import (
    KERNEL,
    NORMAL,
    Event,
    Load,
    Part,
    Plan,
    PlanLevel,
    Snapshot,
    Step,
    Ticket,
    importance_name,
    problems,
)
from gpu_runtime.units import show_bytes, show_seconds

from .views import clean, clock, holder

QUIET_SECONDS = 10.0  # a host is shown as quiet after so long without an update by any owner
GOVERNOR_OFF = "The governor is off (ENABLE_MEMORY_GOVERNOR=false): models load without a grant."
MOST_CONSIDERED = 8  # alternatives that a plan lists

# -- the queue and the past ----------------------------------------------------------------------


def waiting(snapshot: Snapshot) -> list[str]:
    """A sentence for each ticket of the `snapshot`: a request that waits for room, or a request to
    an owner.
    """
    return [_ticket_sentence(snapshot, ticket) for ticket in snapshot.tickets]


def _ticket_sentence(snapshot: Snapshot, ticket: Ticket) -> str:
    waited = show_seconds(max(0.0, snapshot.now - ticket.arrived))
    requester = holder(snapshot, ticket.owner)
    if ticket.verb != "use":
        owner_id, _, name = ticket.name.partition("/")
        owner = holder(snapshot, owner_id)
        return f"{requester} requested: {ticket.verb} {name} of {owner}, {waited} ago"
    need = " + ".join(f"{show_bytes(share.bytes)} on {share.device}" for share in ticket.need)
    level = "" if ticket.importance == NORMAL else f" ({importance_name(ticket.importance)})"
    because = f": {ticket.because}" if ticket.because else ""
    size = f", {need}" if need else ""
    who = f"{ticket.name}{level}{size}, for {requester}"
    if ticket.name == KERNEL:  # a notebook's own memory, whose name says nothing
        who = f"{requester}{level}{size}"
    return f"{who}, waiting {waited}{because}"


_EVENT_PHRASES = {
    "granted": "was granted {bytes} on {device}",
    "adopted": "got a lease of {bytes} on {device}",
    "grown": "was granted {bytes} more on {device}",
    "loaded": "was loaded, {bytes} on {device}",
    "offloaded": "was offloaded from {device}, freeing {bytes}",
    "restored": "was restored, {bytes} on {device}",
    "unloaded": "was unloaded from {device}, freeing {bytes}",
    "moved": "was moved from {device} to another card, {bytes}",
    "refused": "was refused {bytes}",
    "waiting": "had to wait",
    "failed": "failed",
    "reaped": "was removed because its process ended, freeing {bytes}",
    "released": "was released by its process, freeing {bytes}",
    "lost": "was lost, freeing {bytes}",
    "misplaced": "is not on the devices that were granted",
    "stays": "stays where it is",
    "unfinished": "is in a load that was stopped and has not ended",
    "pin": "was pinned",
    "unpin": "was unpinned",
    "preload": "was loaded for another process",
    "drained": "was drained",
    "undrained": "accepts leases again",
    "restore": "was restored for another process",
    "defrag": "released its allocator's cache",
    "resume": "continued a stopped process",
    "who": "listed what its variables hold",
    "cancel": "no longer waits for memory",
    "asked": "received a request",
    "declined": "declined a request",
}


def event_phrase(event: Event) -> str:
    """The `event` as a phrase without the model's name and the reason: `was loaded, 14.0 GiB on
    sim:0`.

    The caller puts the name of the model before the phrase.
    """
    phrase = _EVENT_PHRASES.get(event.action, event.action)
    if not event.bytes:
        phrase = phrase.split(",")[0].replace(" {bytes}", "")
    if not event.device:
        for preposition in ("on", "from", "to"):
            phrase = phrase.replace(f" {preposition} {{device}}", "")
    return phrase.format(bytes=show_bytes(event.bytes), device=event.device)


def event_sentence(event: Event) -> str:
    """A sentence about the `event`, with the person who requested it, and the event's reason."""
    because = event.because.strip().rstrip(".")
    requested = f"{_requester_prefix(event)} {event.by}" if event.by else ""
    reason = f": {because}" if because else ""
    return f"{event_phrase(event)}{requested}{reason}."


def event_subject(event: Event, snapshot: Snapshot) -> str:
    """The name that goes before the sentence about `event`: the event's title, or the process.

    The name is the process if the event is about no model, or about the own memory of a kernel
    whose notebook is unknown.
    """
    if event.title and event.title != KERNEL:
        return event.title
    return holder(snapshot, event.owner)


def titled(events: Sequence[Event], snapshot: Snapshot | None) -> list[tuple[str, Event]]:
    """The `events` that are shown, each with its title.

    If they are of several processes, a title names the process too: `qwen of train.ipynb (pid 4121)`.
    Without a `snapshot`, the processes have no names.
    """
    is_of_several = snapshot is not None and len({event.owner for event in events}) > 1
    found = []
    for event in events_to_show(events):
        title = event.title
        if snapshot is not None and is_of_several and event.title == event.model:
            title = f"{title} of {holder(snapshot, event.owner, events)}"
        found.append((title, event))
    return found


def _requester_prefix(event: Event) -> str:
    return " by" if event.action in ("asked", "declined") else ", requested by"


def counters(snapshot: Snapshot) -> str:
    """The totals of the `snapshot` in one line. Evictions are the sum of offloads and unloads."""
    totals = snapshot.totals
    evictions = totals.get("evictions", 0)
    parts = [
        f"{evictions} eviction{'s' if evictions != 1 else ''} "
        f"({totals.get('offloads', 0)} offloaded, {totals.get('unloads', 0)} unloaded)",
        f"{totals.get('restorations', 0)} restored",
    ]
    if "loads" in totals:
        parts.append(f"{totals['loads']} loaded")
    if totals.get("refusals", 0):
        parts.append(f"{totals['refusals']} refused")
    return " · ".join(parts)


def alarms(snapshot: Snapshot) -> list[str]:
    """Sentences that are shown first: the problems of the `snapshot`, and whether
    ENABLE_MEMORY_GOVERNOR is off.
    If the beginning of a problem is known, its sentence includes the time of the beginning.
    """
    found = [] if snapshot.governed else [GOVERNOR_OFF]
    for problem in problems(snapshot):
        since = f" Since {clock(problem.wall)}." if problem.wall else ""
        text = clean(problem)
        found.append(f"{text.rstrip('.')}.{since}" if since else text)
    return found


def events_to_show(events: Sequence[Event]) -> list[Event]:
    """The `events`, without each grant whose load or restore is in `events` too."""
    arrived = {
        (event.model, event.owner, event.because)
        for event in events
        if event.action in ("loaded", "restored")
    }
    return [
        event
        for event in events
        if event.action != "granted" or (event.model, event.owner, event.because) not in arrived
    ]


def host_title(snapshot: Snapshot) -> str:
    """The name of the machine on which the `snapshot` was made.

    If no process of that machine has updated its book for a while, the text also says for how long.
    """
    if not snapshot.host:
        return f"{clean(snapshot.owner.host) or 'this host'} (this host)"
    if snapshot.seen_seconds <= QUIET_SECONDS:
        return clean(snapshot.host)
    return f"{clean(snapshot.host)}, quiet for {show_seconds(snapshot.seen_seconds)}"


# -- plans ---------------------------------------------------------------------------------------


def verdict(plan: Plan) -> str:
    """The verdict of the `plan` in a few words."""
    name = _plan_subject(plan)
    if plan.level is PlanLevel.NEVER:
        return f"{name} does not fit, even after a wait"
    if not plan.granted:
        return f"{name} does not fit now"
    if not plan.steps:
        return f"{name} is loaded already"
    if not plan.victims:
        return f"{name} fits in the free memory"
    others = "1 other is" if len(plan.victims) == 1 else f"{len(plan.victims)} others are"
    return f"{name} fits once {others} evicted"


def _plan_subject(plan: Plan) -> str:
    if _is_size(plan.name):
        return plan.name[:1].upper() + plan.name[1:]
    return plan.name or "It"


def _is_size(name: str) -> bool:
    """Whether a plan's `name` stands for a number of bytes, such as `a lease of 2.0 GiB`."""
    return name.startswith("a lease of ")


def how_to_do_it(plan: Plan, prompt: str) -> str:
    """A sentence with the command that does exactly what was planned, or with the reason why it
    would fail.

    The command begins with `prompt`. The result is empty if no command can carry out the plan.
    """
    if plan.obstacle:
        return f"It would not be loaded: {clean(plan.obstacle)}."
    command = clean(plan.command)
    if not command:
        return ""
    if command.startswith("rt."):
        return f"Do it in Python:  {command}"
    if _is_size(plan.name):
        return f"Do it for a cell:  %%gpu {command}" if prompt == "%gpu" else ""
    if command.startswith("load ") and prompt != "%gpu":  # a command cannot hold a model
        return f"Do it, in a notebook:  %gpu {command}"
    return f"Do it:  {prompt} {command}"


def step_sentence(snapshot: Snapshot, step: Step) -> str:
    """One `step` in words: `move llama (8.0 GiB) from sim:0 to host`.

    If the lease belongs to another process, the sentence names this process, with its label from
    the `snapshot`.
    """
    owner_id, _, name = step.lease.partition("/")
    of_holder = "" if owner_id == snapshot.owner.id else f" of {holder(snapshot, owner_id)}"
    if name == KERNEL:
        name, of_holder = f"the own memory of {holder(snapshot, owner_id)}", ""
    before = getattr(step, "source", ())
    after = getattr(step, "shares", ())
    size = show_bytes(sum(share.bytes for share in after or before))
    source = " + ".join(share.device for share in before)
    target = " + ".join(share.device for share in after)
    if isinstance(step, Load):
        return (
            f"load {name} ({size}) on {target}"
            if not _is_size(name)
            else f"lease {size} on {target}"
        )
    if after:
        return f"move {name} ({size}){of_holder} from {source} to {target}"
    return f"drop {name} ({size}){of_holder} from {source}"


def others_considered(plan: Plan) -> list[tuple[str, str]]:
    """The best placements that the `plan` did not choose, each with the reason against it."""
    chosen = [share.device for share in plan.shares]
    found = []
    for option in plan.considered[: MOST_CONSIDERED + 1]:
        devices = [share.device for share in option.shares]
        if devices and devices != chosen:
            place = " + ".join(devices)
            found.append((place, option.because.removeprefix(f"{place} ")))
    return found


def on_cards(plan: Plan) -> str:
    """The cards of the `plan`, such as ` · GPUs: 0,1`. The result is empty if the plan uses a single card."""
    return f" · {plan.cards}" if len(plan.shares) > 1 else ""


_PARTS = {
    "all": "total",
    "kv_cache": "KV cache",
    "room": "working memory",
    "context": "CUDA context",
}


def needs(plan: Plan) -> str:
    """The total bytes that the `plan` needs. If the footprint has only one part, also its source."""
    if plan.footprint is None:
        return ""
    total = show_bytes(plan.footprint.bytes)
    if len(plan.footprint.parts) != 1:
        return total
    return f"{total} ({_provenance(plan.footprint.parts[0])})"


def parts(plan: Plan) -> list[tuple[str, str, str]]:
    """The footprint of the `plan` by part: the name, the size and the source of the number.

    The result is empty if there is only one part, since the text of `needs` has that part.
    """
    if plan.footprint is None or len(plan.footprint.parts) < 2:
        return []
    return [
        (
            _PARTS.get(part.name, part.name.replace("_", " ")),
            show_bytes(part.bytes),
            _provenance(part),
        )
        for part in plan.footprint.parts
    ]


def _provenance(part: Part) -> str:
    return f"{part.source}: {part.detail}" if part.detail else part.source


def notes(plan: Plan) -> tuple[str, ...]:
    """Further sentences about the size in the `plan`."""
    return plan.footprint.notes if plan.footprint else ()
