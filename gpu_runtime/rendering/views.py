"""What the faces show of a host: bars, rows and sentences, made from a Snapshot.

This module is pure. The labels inside the sentences (state, holder, cards) are in
`facts/book.py`; the layout is in `text.py`, `html.py` and the console. A line of `%gpu why` is
`event_sentence`: what happened, then the stored `Event.because`, which is worded where the decision
is made (`scheduler/`, `owner/`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from gpu_runtime.facts import (
    HOST,
    KERNEL,
    NORMAL,
    THIS_PROCESS,
    Device,
    DeviceView,
    Drop,
    Event,
    Lease,
    Leaver,
    Level,
    Load,
    Move,
    Owner,
    Part,
    Phase,
    Plan,
    PlanLevel,
    Section,
    Shares,
    Shed,
    Snapshot,
    Step,
    Stranger,
    Ticket,
    away_word,
    bytes_on,
    ended_label,
    holder_label,
    importance_name,
    lease_state,
    lease_title,
    notebooks_in,
    place_label,
    problems,
    where,
)
from gpu_runtime.safe_text import clean
from gpu_runtime.units import counted, in_calendar, show_bytes, show_seconds

MOST_ROWS = 20  # rows in one table; the others are counted, and `%gpu leases` shows all of them
STRANGERS = "other programs"
ENDED = "ended, not yet freed"
RESIDUE = "context and cache"
STAYS = "cannot be parked"
OWN_CODE = "its own code"  # the memory of a notebook's variables
NOT_LISTED = 99  # sort key of a device that the snapshot does not list: it is last
_LEVELS = (Level.UNKNOWN, Level.LOW, Level.MODERATE, Level.HIGH, Level.CRITICAL)


class BarSegment(NamedTuple):
    """A part of a bar."""

    label: str
    bytes: int
    kind: str = "settled"  # settled, arriving, leaving, residue, ended, strangers
    lease: str = ""  # the lease's id; empty for bytes without a lease

    @property
    def is_lease(self) -> bool:
        return bool(self.lease)

    @property
    def title(self) -> str:
        """The text of the segment, such as `qwen 14.0 GiB, arriving`."""
        moving = f", {self.kind}" if self.kind in ("arriving", "leaving") else ""
        return f"{self.label} {show_bytes(self.bytes)}{moving}"


class Bar(NamedTuple):
    """The bar of one device: its segments, its limit and its scale."""

    device: Device
    segments: tuple[Any, ...]  # BarSegments; on the console, Stretches
    limit_bytes: int

    @property
    def used_bytes(self) -> int:
        return sum(segment.bytes for segment in self.segments)

    @property
    def scale_bytes(self) -> int:
        """The bytes of the full length of the bar: the device's size, or more if more is used or allowed."""
        return max(self.device.total_bytes, self.used_bytes, self.limit_bytes, 1)


OURS = ("model", "kernel", "block", "stays")  # the kinds of memory that a notebook's code holds


class Holding(NamedTuple):
    """A row of the table of holders."""

    name: str
    bytes: int | None
    where: str
    holder: str
    state: str
    kind: str = "model"  # one of OURS; residue, strangers
    marks: tuple[str, ...] = ()


class Process(NamedTuple):
    """A notebook or another process that holds memory or waits for it, in a list of them."""

    id: str  # of the owner
    name: str
    user: str
    pid: int
    state: str
    idle_seconds: float  # since its last cell; 0: a cell runs, or it has run none
    card_bytes: int
    host_bytes: int
    section: Section
    ticket: Ticket | None  # its first request for room that waits


def clock(wall: float) -> str:
    """The local time of day at `wall`, such as `12:03:04`. `wall` is in epoch seconds."""
    return time.strftime("%H:%M:%S", time.localtime(in_calendar(wall)))


# -- devices -------------------------------------------------------------------------------------


def bars(snapshot: Snapshot) -> tuple[Bar, ...]:
    """One bar for each device of the `snapshot`, in the order of the devices."""
    return tuple(
        Bar(view.device, tuple(_segments(snapshot, view)), view.limit_bytes)
        for view in snapshot.devices
    )


class LeasePart(NamedTuple):
    """The bytes of a lease on one device that have one kind: settled, arriving or leaving."""

    section: Section
    lease: Lease
    bytes: int
    kind: str
    is_copy: bool = False  # a copy in host memory, of a lease that is elsewhere


def lease_parts(snapshot: Snapshot, view: DeviceView) -> Iterator[LeasePart]:
    """The parts of all leases on the device in `view`, in the order of the sections."""
    device = view.device.id
    for section in snapshot.sections.values():
        for lease in section.leases:
            leaving = 0
            if lease.phase is Phase.LEAVING:
                freed = bytes_on(lease.freed_by(lease.target), device)
                leaving = min(freed, lease.bytes_on(device))  # no residue
            on_disk = lease.disk_bytes if view.device.is_host else 0
            sizes = {
                "settled": lease.bytes_on(device) - leaving - on_disk,
                "leaving": leaving,
                "arriving": bytes_on(lease.target, device),
            }
            for kind, size in sizes.items():
                if size > 0:
                    yield LeasePart(section, lease, size, kind)
            if view.device.is_host and lease.shadow_beyond_target:
                yield LeasePart(section, lease, lease.shadow_beyond_target, "settled", True)


def _segments(snapshot: Snapshot, view: DeviceView) -> Iterator[BarSegment]:
    for part in lease_parts(snapshot, view):
        title = lease_title(part.lease, part.section.owner)
        label = f"copy of {title}" if part.is_copy else title
        yield BarSegment(label, part.bytes, part.kind, part.lease.id)
    yield from beyond_leases(snapshot, view)


def beyond_leases(snapshot: Snapshot, view: DeviceView) -> Iterator[BarSegment]:
    """The segments of the bytes on the device in `view` that belong to no lease."""
    device, sections = view.device.id, snapshot.sections.values()
    leased = sum(part.bytes for part in lease_parts(snapshot, view))
    residue = sum(section.residue.get(device, 0) for section in sections)
    cache = sum(section.cache_on(device) for section in sections)
    for label, size, kind in (
        (STAYS, residue - cache, "residue"),
        (RESIDUE, cache, "residue"),
        (ENDED, view.claimed_bytes - leased - residue, "ended"),
        (STRANGERS, strangers_bytes(view), "strangers"),
    ):
        if size > 0:
            yield BarSegment(label, size, kind)


def strangers_bytes(view: DeviceView) -> int:
    """The bytes in use without a lease on the device in `view`; 0 if the driver reports no bytes."""
    if view.stranger_bytes is not None:
        return view.stranger_bytes
    return max(0, (view.measured_bytes or 0) - view.claimed_bytes)


def bars_after(snapshot: Snapshot, steps: Sequence[Step]) -> tuple[Bar, ...]:
    """The bars as they would be after the `steps`, only for devices that the steps change. What moved is last."""
    changed, moved = touched(steps), {step.lease for step in steps}
    found = []
    for bar in bars(after(snapshot, steps)):
        if bar.device.id in changed:
            stayed = [part for part in bar.segments if part.lease not in moved]
            came = [part._replace(kind="settled") for part in bar.segments if part.lease in moved]
            found.append(bar._replace(segments=(*stayed, *came)))
    return tuple(found)


def after(snapshot: Snapshot, steps: Iterable[Step]) -> Snapshot:
    """The `snapshot` after the `steps`. What they load or move to a card is arriving; a move to host memory is done."""
    sections = dict(snapshot.sections)
    for step in steps:
        owner_id, _, name = step.lease.partition("/")
        section = sections.get(owner_id) or Section(snapshot.owner)
        lease = section.lease(name) or Lease(owner_id, name)
        others = tuple(other for other in section.leases if other.name != name)
        moved = _after_step(lease, step)
        sections[owner_id] = replace(section, leases=(*others, moved) if moved else others)
    change = Counter[str]()
    for section in sections.values():
        change.update(section.claims())
    for section in snapshot.sections.values():
        change.subtract(section.claims())
    devices = []
    for view in snapshot.devices:  # figures that are unknown stay unknown
        more = change[view.device.id]
        used = None if view.measured_bytes is None else max(0, view.measured_bytes + more)
        room = None if view.room_bytes is None else view.room_bytes - more
        claimed = view.claimed_bytes + more
        devices.append(replace(view, claimed_bytes=claimed, measured_bytes=used, room_bytes=room))
    return replace(snapshot, sections=sections, devices=tuple(devices))


def _after_step(lease: Lease, step: Step) -> Lease | None:
    if isinstance(step, Drop):
        return None
    if isinstance(step, Shed):
        return lease.shed()
    is_to_host = isinstance(step, Move) and all(share.device == HOST for share in step.shares)
    if is_to_host:  # a copy that is there is then the model itself
        return replace(lease, target=step.shares).holding(lease.after(step.shares))
    if lease.in_parts:
        return replace(lease, target=step.shares, phase=Phase.ARRIVING)
    return replace(lease, shares=(), target=step.shares, phase=Phase.ARRIVING)


def touched(steps: Iterable[Step]) -> list[str]:
    """The devices that `steps` change, in the order of the steps."""
    devices = []
    for step in steps:
        shares = (*getattr(step, "source", ()), *getattr(step, "shares", ()))
        devices += [share.device for share in shares]
    return list(dict.fromkeys(devices))


def worst_level(snapshot: Snapshot) -> Level:
    """The highest pressure level of any card in the `snapshot`, or UNKNOWN without cards."""
    return max((view.level for view in snapshot.cards), key=_LEVELS.index, default=Level.UNKNOWN)


def device_title(snapshot: Snapshot) -> str:
    """The cards of the `snapshot`, such as `1 simulated GPU`, `8 × NVIDIA H100` or `no GPU`."""
    count = len(snapshot.cards)
    if not count:
        return "no GPU"
    names = {view.device.name for view in snapshot.cards}
    if not snapshot.simulated and len(names) == 1 and "" not in names:
        return f"{count} × {clean(*names)}"
    return counted(count, "simulated GPU" if snapshot.simulated else "GPU")


def device_name(id: str) -> str:
    """The name of the device `id` for people: the id itself, or `RAM` for the host."""
    return "RAM" if id == HOST else id


def fill(view: DeviceView) -> str:
    """The claimed and the usable bytes of the device in `view`: `14.0 of 21.6 GiB`."""
    claimed, limit = show_bytes(view.claimed_bytes), show_bytes(view.limit_bytes)
    if claimed.split()[1] == limit.split()[1]:
        claimed = claimed.split()[0]
    return f"{claimed} of {limit}"


def remarks(snapshot: Snapshot, view: DeviceView) -> list[str]:
    """Facts of the `snapshot` about the device in `view` that the device's bar does not show."""
    found = []
    if view.drained is not None:
        found.append(f"drained by {view.drained.by} since {clock(view.drained.wall)}")
    if view.claimed_bytes > view.limit_bytes:
        found.append(f"over its budget by {show_bytes(view.claimed_bytes - view.limit_bytes)}")
    measured = view.measured_bytes
    if measured is None and not view.device.is_host:
        found.append("not measured")
    elif measured is not None and not view.device.simulated and measured != view.claimed_bytes:
        found.append(f"measured {show_bytes(measured)}")
    if view.sample is not None and view.sample.utilisation_percent is not None:
        found.append(f"{view.sample.utilisation_percent:.0f} % busy")
    if view.device.is_host:
        found.append(from_cards(snapshot))
    return found


class DeviceLine(NamedTuple):
    """What is said of one device: its name, its bar, and the texts after the bar."""

    title: str
    bar: Bar
    fill: str
    pressure: str
    remarks: str


def device_lines(snapshot: Snapshot) -> list[DeviceLine]:
    """The devices of the `snapshot`, in their order."""
    return [
        DeviceLine(
            device_name(view.device.id),
            bar,
            fill(view),
            f"{view.pressure:.0%}",
            ", ".join(remarks(snapshot, view)),
        )
        for view, bar in zip(snapshot.devices, bars(snapshot), strict=True)
    ]


def from_cards(snapshot: Snapshot) -> str:
    """What has left the cards for RAM: `1 model in RAM`, or `1 model, 1 notebook in RAM`."""
    kinds = [lease.kind for lease in snapshot.leases() if lease.on_host and not lease.on_disk]
    models, notebooks = kinds.count("model"), kinds.count("kernel")
    parts = [counted(models, "model")] if models or not notebooks else []
    if notebooks:
        parts.append(counted(notebooks, "notebook"))
    return f"{', '.join(parts)} in RAM"


# -- the table of holders ------------------------------------------------------------------------


def holdings(snapshot: Snapshot) -> list[Holding]:
    """The rows of the table of holders: leases by device and size, bytes beyond leases, other programs."""
    order = {view.device.id: place for place, view in enumerate(snapshot.devices)}

    def by_device_and_size(lease: Lease) -> tuple[int, int, str]:
        places = [order.get(share.device, NOT_LISTED) for share in lease.claims()]
        return min(places, default=NOT_LISTED), -lease.bytes, lease.name

    leases = sorted(snapshot.leases(), key=by_device_and_size)
    others = sorted(strangers(snapshot), key=lambda other: order.get(other.device, NOT_LISTED))
    return [
        *(_holding(snapshot, lease) for lease in leases),
        *_residues(snapshot),
        *(
            Holding(
                STRANGERS,
                other.bytes,
                other.device,
                clean(other.label) if other.pid else "unknown",
                "not governed",
                "strangers",
            )
            for other in others
        ),
    ]


def processes(snapshot: Snapshot) -> list[Process]:
    """Each notebook of the `snapshot`, and each other process that holds memory or waits for it."""
    waits = {ticket.owner: ticket for ticket in reversed(snapshot.waiting)}
    found = []
    for id, section in snapshot.sections.items():
        claims, owner, ticket = section.claims(), section.owner, waits.get(id)
        if claims or ticket or owner.notebook:
            found.append(
                Process(
                    id,
                    clean(owner.name),
                    clean(owner.user),
                    owner.pid,
                    _process_state(snapshot, section, ticket),
                    snapshot.now - section.idle_since if section.idle_since else 0.0,
                    sum(size for device, size in claims.items() if device != HOST),
                    claims.get(HOST, 0),
                    section,
                    ticket,
                )
            )
    return found


def _process_state(snapshot: Snapshot, section: Section, ticket: Ticket | None) -> str:
    """What a process does now, in words. A process that waits for its `ticket` is not idle, also without a cell."""
    if trouble := snapshot.trouble(section.owner.id):
        return trouble.text(snapshot.now)
    if ticket is not None:
        return f"waits {show_seconds(max(0.0, snapshot.now - ticket.arrived))}"
    if section.busy_since:
        return f"runs {show_seconds(max(0.0, snapshot.now - section.busy_since))}"
    if any(lease.pins for lease in section.leases):
        return "in use"
    if section.leases and all(lease.on_host for lease in section.leases):
        if all(lease.on_disk for lease in section.leases):
            return f"{show_bytes(sum(lease.bytes for lease in section.leases))} on disk"
        words = {away_word(lease) for lease in section.leases}
        return words.pop() if len(words) == 1 else "parked"
    ago = snapshot.now - section.idle_since
    return f"idle {show_seconds(max(0.0, ago))}" if section.idle_since else "idle"


def _holding(snapshot: Snapshot, lease: Lease) -> Holding:
    return Holding(
        snapshot.title(lease.owner, lease.name),
        lease.bytes,
        place(lease),
        holder(snapshot, lease.owner),
        lease_state(lease, snapshot.now).text(),
        lease.kind,
        tuple(_marks(lease)),
    )


def _residues(snapshot: Snapshot) -> Iterator[Holding]:
    for section in snapshot.sections.values():
        for device, size in section.residue.items():
            if size:
                owner = holder(snapshot, section.owner.id)
                for staying in section.staying_on(device):
                    why = f"stays: {clean(staying.why)}"
                    yield Holding(section.owner.name, staying.bytes, device, owner, why, "stays")
                if cache := section.cache_on(device):
                    yield Holding(RESIDUE, cache, device, owner, "", "residue")


def strangers(snapshot: Snapshot) -> list[Stranger]:
    """The programs that hold memory of cards without a lease. One without a pid stands for all unknown ones."""
    known = {stranger.device for stranger in snapshot.strangers}
    unknown = (
        Stranger(view.device.id, 0, size)
        for view in snapshot.cards
        if view.device.id not in known and (size := strangers_bytes(view))
    )
    return [*snapshot.strangers, *unknown]


def place(lease: Lease) -> str:
    """The place of the `lease` for people; while it arrives, the devices to which it goes."""
    if lease.target and not lease.shares:
        return device_name(where(lease.target))
    return place_label(lease)


def _marks(lease: Lease) -> Iterator[str]:
    if lease.keep:
        yield "pinned"
    if lease.importance != NORMAL:
        yield importance_name(lease.importance)


def holder(snapshot: Snapshot, owner_id: str, events: Iterable[Event] = ()) -> str:
    """The label of the process with the id `owner_id`, `this process` if it made the `snapshot`.

    `events` that are not in the snapshot may name the notebook of an ended process.
    """
    if owner_id == snapshot.owner.id:
        return THIS_PROCESS
    section = snapshot.sections.get(owner_id)
    if section is None:
        notebooks = notebooks_in((*snapshot.events, *events))
        return ended_label(owner_id, notebooks.get(owner_id, ""))
    label = holder_label(section.owner, snapshot.owner)
    trouble = snapshot.trouble(owner_id)
    return f"{label}, {trouble.text(snapshot.now)}" if trouble else label


def owners(snapshot: Snapshot) -> list[Owner]:
    """The processes of the `snapshot` that hold a lease."""
    return [section.owner for section in snapshot.sections.values() if section.leases]


QUIET_SECONDS = 10.0  # a host is shown as quiet after so long without an update by any owner
GOVERNOR_OFF = "The governor is off (ENABLE_MEMORY_GOVERNOR=false): models load without a grant."
MOST_CONSIDERED = 8  # alternatives that a plan lists
MOST_NAMED, LONGEST_VERSION = 3, 20  # processes of each version; characters

# -- the queue and the past ----------------------------------------------------------------------


def waiting(snapshot: Snapshot) -> list[str]:
    """A sentence for each ticket of the `snapshot`: a request for room, or a request to an owner."""
    return [_ticket_sentence(snapshot, ticket) for ticket in snapshot.tickets]


def _ticket_sentence(snapshot: Snapshot, ticket: Ticket) -> str:
    waited = show_seconds(max(0.0, snapshot.now - ticket.arrived))
    requester = holder(snapshot, ticket.owner)
    if ticket.verb != "use":
        owner_id, _, name = ticket.name.partition("/")
        owner = holder(snapshot, owner_id)
        return f"{requester} requested: {ticket.verb} {name} of {owner}, {waited} ago"
    level = "" if ticket.importance == NORMAL else f" ({importance_name(ticket.importance)})"
    because = f": {ticket.because}" if ticket.because else ""
    size = f", {ticket.need_text}" if ticket.need else ""
    who = f"{ticket.name}{level}{size}, for {requester}"
    if ticket.name == KERNEL:  # a notebook's own memory, whose name says nothing
        who = f"{requester}{level}{size}"
    return f"{who}, waiting {waited}{because}"


_EVENT_PHRASES = {
    "granted": "was granted {bytes} on {device}",
    "adopted": "got {bytes} on {device}",
    "grown": "was granted {bytes} more on {device}",
    "loaded": "was loaded, {bytes} on {device}",
    "offloaded": "was offloaded from {device}, freeing {bytes}",
    "stowed": "was moved from RAM to its disk, freeing {bytes}",
    "restored": "was restored, {bytes} on {device}",
    "unloaded": "was unloaded from {device}, freeing {bytes}",
    "moved": "was moved from {device} to another card, {bytes}",
    "refused": "was refused {bytes}",
    "waiting": "had to wait",
    "failed": "failed",
    "reaped": "was removed, freeing {bytes}",
    "released": "was released by its process, freeing {bytes}",
    "lost": "was lost, freeing {bytes}",
    "misplaced": "is not on the devices that were granted",
    "stays": "stays where it is",
    "asleep": "is asleep",
    "on disk": "is on a disk",
    "unfinished": "is in a load that was stopped and has not ended",
    "pin": "was pinned",
    "unpin": "was unpinned",
    "preload": "was loaded for another process",
    "move": "was moved for another process",
    "hibernate": "was moved to its disk for another process",
    "drained": "was drained",
    "undrained": "can be used again",
    "restore": "was restored for another process",
    "defrag": "released its allocator's cache",
    "resume": "continued a stopped process",
    "interrupt": "interrupted or ended a process",
    "who": "listed what its variables hold",
    "cancel": "no longer waits for memory",
    "asked": "received a request",
    "declined": "declined a request",
}


def event_phrase(event: Event) -> str:
    """The `event` after its model's name, without the reason: `was loaded, 14.0 GiB on sim:0`."""
    phrase = _EVENT_PHRASES.get(event.action)
    if phrase is None:  # of another version, or any text that a process has written
        return event.action
    if not event.bytes:
        phrase = phrase.split(",")[0].replace(" {bytes}", "")
    if not event.place:
        for preposition in ("on", "from", "to"):
            phrase = phrase.replace(f" {preposition} {{device}}", "")
    return phrase.format(bytes=show_bytes(event.bytes), device=event.place)


def event_sentence(event: Event) -> str:
    """A sentence about the `event`, with the person who requested it, and the event's reason."""
    because = event.because.strip().rstrip(".")
    prefix = " by" if event.action in ("asked", "declined") else ", requested by"
    requested = f"{prefix} {event.by}" if event.by else ""
    reason = f": {because}" if because else ""
    return f"{event_phrase(event)}{requested}{reason}."


def titled(events: Sequence[Event], snapshot: Snapshot | None) -> list[tuple[str, Event]]:
    """The `events` that are shown, each with its title, such as `qwen of train.ipynb (pid 4121)`.

    The process is named if they are of several, and known by the `snapshot`.
    """
    is_of_several = snapshot is not None and len({event.owner for event in events}) > 1
    found = []
    for event in events_to_show(events):
        title = event.title
        if snapshot is not None and is_of_several and event.title == event.model:
            title = f"{title} of {holder(snapshot, event.owner, events)}"
        found.append((title, event))
    return found


def counters(snapshot: Snapshot) -> str:
    """The totals of the `snapshot` in one line. Evictions are the sum of offloads and unloads."""
    totals = snapshot.totals
    parts = [
        f"{counted(totals.get('evictions', 0), 'eviction')} "
        f"({totals.get('offloads', 0)} offloaded, {totals.get('unloads', 0)} unloaded)",
        f"{totals.get('restorations', 0)} restored",
    ]
    if "loads" in totals:
        parts.append(f"{totals['loads']} loaded")
    if totals.get("refusals", 0):
        parts.append(f"{totals['refusals']} refused")
    return " · ".join(parts)


def alarms(snapshot: Snapshot) -> list[str]:
    """Sentences that are shown first: a governor that is off, and the problems with their beginnings."""
    found = [] if snapshot.governed else [GOVERNOR_OFF]
    for problem in problems(snapshot):
        since = f" Since {clock(problem.wall)}." if problem.wall else ""
        text = clean(problem)
        found.append(f"{text.rstrip('.')}.{since}" if since else text)
    return found


def versions(snapshot: Snapshot) -> str:
    """The versions of gpu-console in the processes of the `snapshot`, if there are several; else empty."""
    owners = {section.owner.id: section.owner for section in snapshot.sections.values()}
    if not snapshot.host:
        owners[snapshot.owner.id] = snapshot.owner
    found: dict[str, list[str]] = {}
    for owner in filter(lambda owner: owner.version, owners.values()):
        version = owner.version[:LONGEST_VERSION]  # as the process says it
        found.setdefault(version, []).append(holder_label(owner, snapshot.owner))
    if len(found) < 2:
        return ""
    parts = []
    for version, names in sorted(found.items()):
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        parts.append(f"{version} in {'; '.join(sorted(names)[:MOST_NAMED])}{more}")
    return clean(f"Versions: {' · '.join(parts)}")


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
    """The machine of the `snapshot`, and for how long no process of it has updated its book."""
    if not snapshot.host:
        return f"{clean(snapshot.owner.host) or 'this host'} (this host)"
    if snapshot.seen_seconds <= QUIET_SECONDS:
        return clean(snapshot.host)
    return f"{clean(snapshot.host)}, quiet for {show_seconds(snapshot.seen_seconds)}"


# -- plans ---------------------------------------------------------------------------------------


def verdict(plan: Plan) -> str:
    """The verdict of the `plan` in a few words."""
    name = plan.name or "It"
    if _is_size(plan.name):
        name = plan.name[:1].upper() + plan.name[1:]
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


def _is_size(name: str) -> bool:
    """Whether a plan's `name` stands for a number of bytes, such as `a lease of 2.0 GiB`."""
    return name.startswith("a block of ")


def how_to_do_it(plan: Plan, prompt: str) -> str:
    """The command that does what was planned, after `prompt`, or why it would fail; empty if there is none."""
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
    """One `step` in words: `move llama (8.0 GiB) from sim:0 to RAM`. Another process is named."""
    owner_id, _, name = step.lease.partition("/")
    of_holder = "" if owner_id == snapshot.owner.id else f" of {holder(snapshot, owner_id)}"
    if name == KERNEL:
        name, of_holder = f"the own memory of {holder(snapshot, owner_id)}", ""
    before = getattr(step, "source", ())
    after = getattr(step, "shares", ())
    size = show_bytes(sum(share.bytes for share in after or before))
    source, target = places(before), places(after)
    if isinstance(step, Load):
        return (
            f"load {name} ({size}) on {target}"
            if not _is_size(name)
            else f"reserve {size} on {target}"
        )
    if after:
        return f"move {name} ({size}){of_holder} from {source} to {target}"
    if isinstance(step, Shed):
        lease = snapshot.lease(owner_id, step.lease.partition("/")[2])
        if lease and lease.shadow_bytes:
            return f"free the copy of {name} ({size}){of_holder} in RAM"
        return f"move {name} ({size}){of_holder} from RAM to its disk"
    return f"drop {name} ({size}){of_holder} from {source}"


def places(shares: Shares) -> str:
    """The devices of `shares` for people, such as `sim:0 + RAM`."""
    return " + ".join(device_name(share.device) for share in shares)


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


MOST_LEAVERS = 6
LEAVERS_TITLE = "May leave, in this order (→ would). COSTS: at its next use; ~ estimated."
LEAVERS = ("", "", "what", "frees", "costs", "per GB", "idle", "class")


def leavers(found: Sequence[Leaver], snapshot: Snapshot) -> tuple[list[tuple[str, ...]], str]:
    """The first candidates in `found`, a row for each with the columns LEAVERS, and "and 3 more"."""
    rows = []
    for item in found[:MOST_LEAVERS]:
        owner_id, _, name = item.lease.partition("/")
        lease = snapshot.lease(owner_id, name)
        about = "" if item.measured else "~"
        rows.append(
            (
                "→" if item.leaves else "",
                snapshot.title(owner_id, name) if lease else name,
                item.what,
                f"{show_bytes(sum(s.bytes for s in item.frees))} {device_name(where(item.frees))}",
                f"{about}{show_seconds(item.seconds)}" if item.seconds else "nothing",
                show_seconds(item.per_gb) if item.seconds else "",
                show_seconds(lease.idle_seconds(snapshot.now)) if lease and not lease.pins else "",
                importance_name(lease.importance) if lease and lease.importance != NORMAL else "",
            )
        )
    more = len(found) - len(rows)
    return rows, f"and {more} more" if more else ""


def on_cards(plan: Plan) -> str:
    """The cards of a `plan` that uses several, such as ` · GPUs: 0,1`; else empty."""
    return f" · {plan.cards}" if len(plan.shares) > 1 else ""


_PARTS = {
    "all": "total",
    "kv_cache": "KV cache",
    "room": "working memory",
    "context": "CUDA context",
}


def needs(plan: Plan) -> str:
    """The total bytes that the `plan` needs, with their source if the footprint has one part."""
    if plan.footprint is None:
        return ""
    total = show_bytes(plan.footprint.bytes)
    if len(plan.footprint.parts) != 1:
        return total
    return f"{total} ({_provenance(plan.footprint.parts[0])})"


def parts(plan: Plan) -> list[tuple[str, str, str]]:
    """The footprint of the `plan` by part: the name, the size and the source; empty if `needs` has the only one."""
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
    """The notes on the memory that the model of `plan` needs."""
    return plan.footprint.notes if plan.footprint else ()
