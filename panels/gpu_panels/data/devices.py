"""The rows of the devices on the tabs Now and What if: bars of the bytes that each process holds, texts and buttons.

This module is pure. The first stretches of a bar are the claims in the book (all leases and requests of the host),
exact to the byte. The last stretches are the measured memory outside all leases. The totals of a device are those of
`owner.status.snapshot`. Positions are in percent of the axis, which all cards share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from gpu_runtime.facts import (
    KERNEL,
    OVER_CAP,
    USER,
    Device,
    DeviceView,
    History,
    Lease,
    Level,
    Owner,
    Phase,
    Section,
    Snapshot,
    Ticket,
    bytes_on,
    importance_name,
    lease_state,
    lease_title,
    place_label,
)
from gpu_runtime.rendering.views import (
    ENDED,
    RESIDUE,
    STAYS,
    STRANGERS,
    Bar,
    LeasePart,
    beyond_leases,
    device_name,
    fill,
    from_cards,
    lease_parts,
)
from gpu_runtime.safe_text import clean
from gpu_runtime.units import GIB, MIB, counted, show_bytes

from ..palette import SHARED, LeaseStyle, label_of
from .cells import Button, if_awake, lasting, notebook_name, process_name, short, why_no_answer
from .confirmations import at, is_idle, is_idle_notebook, ticket_title
from .rows import buttons as usual_buttons
from .timeline import MARKED, devices_of, spans_of


def room_words(view: DeviceView, kept_bytes: int = 0) -> str:
    """The bytes that can still be leased on the device of `view`, without the `kept_bytes` of requests that wait."""
    if view.room_bytes is None:
        return f"free memory unknown: {view.blind}" if view.blind else "free memory unknown"
    if view.room_bytes < 0:
        return f"over its budget by {show_bytes(-view.room_bytes)}"
    free = max(0, view.room_bytes - kept_bytes)
    return f"{show_bytes(free)} free" if free else "no memory free"


def facts(snapshot: Snapshot, view: DeviceView) -> list[str]:
    """Facts about the device of `view` for an operator. The most important fact is first."""
    found = [room_words(view), f"{fill(view)} held"]
    if view.device.is_host:
        found += [] if snapshot.member else [from_cards(snapshot)]
    elif not snapshot.member and (idle := _idle_bytes(snapshot, view.device.id)):
        found.append(f"{show_bytes(idle)} idle")
    if view.measured_bytes is None:
        found += [] if view.device.is_host else ["not measured"]
    elif abs(view.measured_bytes - view.claimed_bytes) > view.device.total_bytes // 100:
        found.append(f"{show_bytes(view.measured_bytes)} measured")
    return found


def level(view: DeviceView) -> tuple[str, str]:
    """The level of pressure on the card of `view`, such as `HIGH`, and what it means; empty if it is unknown."""
    if view.device.is_host or view.level is Level.UNKNOWN:
        return "", ""
    percent = f"{100 * view.pressure:.0f} %"
    return (
        view.level.value,
        f"{percent} of what may be used: held of the budget, or measured of the card",
    )


def figures(view: DeviceView) -> tuple[str, str, str]:
    """The utilisation, the temperature and the power of the card of `view`. An unknown figure is an empty text.

    The utilisation of RAM's sample is that of the CPUs, and is not shown.
    """
    if view.sample is None or view.device.is_host:
        return "", "", ""
    busy, celsius, watts = (
        "" if value is None else f"{value:.0f} {unit}"
        for value, unit in (
            (view.sample.utilisation_percent, "%"),
            (view.sample.temperature_celsius, "°C"),
            (view.sample.power_watts, "W"),
        )
    )
    return busy, celsius, watts


def _idle_bytes(snapshot: Snapshot, device: str) -> int:
    """The bytes on the `device` that could leave it now: idle models, and the own code of idle notebooks."""
    return sum(
        lease.bytes_on(device)
        for lease in snapshot.leases()
        if (is_idle(lease) or is_idle_notebook(lease)) and not why_no_answer(snapshot, lease.owner)
    )


MOST_STRETCHES = 14  # leases in one bar; smaller leases share one stretch
LEAST_PART = 0.012  # fraction of a bar; all leases thinner than this share one stretch
ALMOST_ALL = 0.9  # a driver needs a part of its own beside the bytes of a program
MOST_NAMED = 6  # names in one tooltip; the others are counted


class Stretch(NamedTuple):
    """A part of a bar."""

    title: str  # such as `qwen`
    bytes: int
    # Settled, arriving, leaving, others; residue, ended, strangers are outside all leases
    kind: str
    tooltip: str = ""  # lines that describe the stretch
    notebook: str = ""  # such as `train.ipynb`; empty if the title is the notebook
    label: str = ""  # the key of the lease's style; empty for memory without a lease
    lease: Lease | None = None  # None for a copy, and for memory without a lease


def bars(snapshot: Snapshot) -> tuple[Bar, ...]:
    """A bar of Stretches for every device of `snapshot`."""
    return tuple(
        Bar(view.device, tuple(_stretches(snapshot, view)), view.limit_bytes)
        for view in snapshot.devices
    )


def description(bar: Bar) -> str:
    """A description of the `bar` for screen readers."""
    parts = []
    for stretch in bar.segments:
        holder = f" of {stretch.notebook}" if stretch.notebook else ""
        parts.append(f"{stretch.title}{holder} {show_bytes(stretch.bytes)}")
    budget = f"budget {show_bytes(bar.limit_bytes)}"
    return f"{device_name(bar.device.id)}: {', '.join(parts) or 'empty'}; {budget}"


# -- stretches -------------------------------------------------------------------------------------


def _stretches(snapshot: Snapshot, view: DeviceView) -> Iterator[Stretch]:
    leases = [_lease_stretch(snapshot, part) for part in lease_parts(snapshot, view)]
    leases.sort(key=lambda stretch: (-stretch.bytes, stretch.label, stretch.kind))
    yield from gathered(leases, max(view.device.total_bytes, view.claimed_bytes, 1))
    for label, size, kind, _ in beyond_leases(snapshot, view):
        tooltip = "\n".join([f"{show_bytes(size)} {_MEANS[label]}", *_named(snapshot, view, label)])
        title = _strangers_label(snapshot, view, size) if label == STRANGERS else label
        yield Stretch(title, size, kind, tooltip)


_MEANS = {
    STAYS: "that stays when notebooks are parked",
    RESIDUE: "that stays when notebooks are parked: CUDA context, reserved cache, own tensors",
    ENDED: "held by processes that have ended; the driver does not report it free yet",
    STRANGERS: "of programs that do not use gpu-console",
}


def _named(snapshot: Snapshot, view: DeviceView, label: str) -> list[str]:
    """A line for each holder of the bytes beyond all leases that have the `label`."""
    device, sections = view.device.id, snapshot.sections.values()
    if label == STRANGERS:
        held = [
            (other.bytes, clean(other.label))
            for other in snapshot.strangers
            if other.device == device
        ]
    elif label == STAYS:
        held = [
            (staying.bytes, f"{process_name(section)}: {clean(staying.why)}")
            for section in sections
            for staying in section.staying_on(device)
        ]
    else:  # of the ended processes nothing is known
        caches = ((section.cache_on(device), process_name(section)) for section in sections)
        held = [cache for cache in caches if cache[0] and label == RESIDUE]
    held.sort(key=lambda holder: (-(holder[0] or 0), holder[1]))
    sizes = ("size unknown" if size is None else show_bytes(size) for size, _ in held)
    return _first([f"{size} {name}" for size, (_, name) in zip(sizes, held, strict=True)])


def _lease_stretch(snapshot: Snapshot, part: LeasePart) -> Stretch:
    section, lease = part.section, part.lease
    label = label_of(lease.owner, lease.name)
    return Stretch(
        short(lease_title(lease, section.owner)),
        part.bytes,
        part.kind,
        lease_tooltip(snapshot, section, lease, part.bytes, part.kind),
        "" if lease.kind in (KERNEL, USER) else notebook_name(section),
        f"copy of {label}" if part.is_copy else label,
        None if part.is_copy else lease,
    )


def lease_tooltip(
    snapshot: Snapshot, section: Section, lease: Lease, size: int, kind: str = "settled"
) -> str:
    """Lines about the `lease`: its bytes, of which `size` are in this stretch, its process, use and importance."""
    moving = f", {kind}" if kind in ("arriving", "leaving") else ""
    is_part = size != lease.bytes and not moving
    whole = f" of {show_bytes(lease.bytes)} {at(lease.where)}" if is_part else ""
    if lease.in_parts and not moving:
        whole = f": {place_label(lease)}"
    lines = [
        f"{show_bytes(size)}{moving}{whole}",
        f"held by {process_name(section)}",
        _use(lease, snapshot.now, notebook_name(section)),
    ]
    if section.busy_since:
        lines.append(f"its kernel has been busy for {lasting(snapshot.now - section.busy_since)}")
    elif section.idle_since:
        lines.append(f"its kernel has been idle for {lasting(snapshot.now - section.idle_since)}")
    keep = ", pinned: it is never evicted" if lease.keep else ""
    lines.append(f"{_purpose(lease)}{keep}")
    return "\n".join(lines)


def _purpose(lease: Lease) -> str:
    if lease.kind == "block":
        return "memory for a block of code"
    if lease.kind == USER:
        return "all memory of this user"
    if lease.importance == OVER_CAP:
        return "above the cap of its user: it leaves first when anybody waits"
    name = importance_name(lease.importance)  # `importance 7` for a number without a name
    return name if name.startswith("importance") else f"importance {name}"


def _use(lease: Lease, now: float, notebook: str) -> str:
    """How the `lease` is used. Its durations change in steps, so that a bar of idle models is not sent every second."""
    state = lease_state(lease, now)
    text = state.text(lasting, least_seconds=5.0)
    if state.activity != "in use":
        return text
    calls = f", {lease.pins} calls" if lease.pins > 1 else ""
    return f"{text} by {notebook}{calls}"


def gathered(leases: Sequence[Stretch], scale: int) -> list[Stretch]:
    """The `leases`, the largest first. Those too thin in a bar of `scale` bytes become one, such as `12 others`."""
    thin = {
        n
        for n, lease in enumerate(leases)
        if n >= MOST_STRETCHES or lease.bytes < LEAST_PART * scale
    }
    if len(thin) < 2:
        return list(leases)
    few = [lease for n, lease in enumerate(leases) if n in thin]
    size = sum(lease.bytes for lease in few)
    named = [
        ", ".join(filter(None, (f"{lease.title} {show_bytes(lease.bytes)}", lease.notebook)))
        for lease in few
    ]
    tooltip = "\n".join([f"{show_bytes(size)} in all", *_first(named)])
    shown = [lease for n, lease in enumerate(leases) if n not in thin]
    return [*shown, Stretch(f"{len(few)} others", size, "others", tooltip)]


def _strangers_label(snapshot: Snapshot, view: DeviceView, size: int) -> str:
    """The name of the one program that holds most of the `size` bytes, or `other programs`."""
    found = [stranger for stranger in snapshot.strangers if stranger.device == view.device.id]
    is_one = len(found) == 1 and (found[0].bytes or 0) >= ALMOST_ALL * size
    return short(found[0].command) if is_one and found[0].command else STRANGERS


def _first(lines: Sequence[str]) -> list[str]:
    """The first MOST_NAMED of `lines`, and one more line with the number of the remaining lines."""
    more = len(lines) - MOST_NAMED
    counted = [f"and {more} more"] if more > 0 else []
    return [*lines[:MOST_NAMED], *counted]


MOST_TARGETS = 3  # cards that the menu of a lease offers for a move: those with the most room
PAST_STEPS = 300  # the resolution of the small history, over its whole width


class BarPart(msgspec.Struct, frozen=True):
    """One stretch of a bar (a piece with one colour), with its position on the axis."""

    key: str  # the same as long as the stretch is shown
    left: float
    width: float
    kind: str  # as of a Stretch; or `kept`: free, but reserved for a waiting request
    title: str
    notebook: str = ""
    lines: str = ""  # the tooltip, one fact a line
    colour: str = ""
    texture: str = ""
    id: str = ""  # of the lease, for the buttons
    buttons: tuple[Button, ...] = ()


class DeviceRow(msgspec.Struct, frozen=True):
    """One device."""

    id: str
    title: str  # the id, or RAM
    name: str  # the size, and the product name of a real card
    notice: str  # an unusual state: `simulated` beside real cards; else empty
    is_drained: bool
    is_over: bool  # over its budget, or not measured: a problem
    free: str  # after reservations; or by whom it was drained
    facts: str
    level: str  # LOW to CRITICAL; empty for the host, and if it is unknown
    level_hint: str
    busy: str
    celsius: str
    watts: str
    length: float  # the whole device
    limit: float  # its budget
    limit_hint: str
    parts: tuple[BarPart, ...]
    description: str  # the bar in words
    buttons: tuple[Button, ...]


class Rows(msgspec.Struct, frozen=True):
    """The rows of all devices, and the ticks of the axis of the cards."""

    ticks: tuple[tuple[float, str], ...]
    rows: tuple[DeviceRow, ...]


def device_rows(snapshot: Snapshot, may_act: bool = True) -> Rows:
    """A row for each device. The host has its own axis, since host memory is much larger."""
    drawn = bars(snapshot)
    # The palette gets the labels in a stable order.
    labels = sorted({segment.label for bar in drawn for segment in bar.segments if segment.label})
    cards = [bar.scale_bytes for bar in drawn if not bar.device.is_host]
    longest = max(cards, default=1)
    kept = {view.device.id: reserved(snapshot, view) for view in snapshot.devices}
    styles, room = SHARED.styles(labels), room_after(snapshot, kept)
    rows = []
    for view, bar in zip(snapshot.devices, drawn, strict=True):
        scale = bar.scale_bytes if bar.device.is_host else longest
        drawing = _Drawing(snapshot, scale, styles, may_act, room)
        rows.append(_row(view, bar, kept[view.device.id], drawing))
    return Rows(_ticks(longest) if cards else (), tuple(rows))


Kept = Sequence[tuple[Ticket, int]]  # see `reserved`


class _Drawing(NamedTuple):
    """The values that all parts of one row need."""

    snapshot: Snapshot
    scale_bytes: int  # the bytes of the whole axis
    styles: Mapping[str, LeaseStyle]  # by the label of a lease
    may_act: bool
    room: Mapping[str, int]  # see `room_after`

    @property
    def may_act_on_cards(self) -> bool:
        """Whether the rows of cards have buttons. A member acts on own processes only."""
        return self.may_act and not self.snapshot.member

    def percent(self, size: int) -> float:
        """The `size` in bytes as a percentage of the axis."""
        return round(100 * size / self.scale_bytes, 2)


def _ticks(scale_bytes: int) -> tuple[tuple[float, str], ...]:
    """Four to eight ticks. Their step is a power of two, because memory sizes often are."""
    unit_bytes, unit = (GIB, "GiB") if scale_bytes >= 2 * GIB else (MIB, "MiB")
    length, step = scale_bytes / unit_bytes, 1.0
    while length / step > 8:
        step *= 2
    values = [n * step for n in range(int(length / step + 1e-9) + 1)]
    return tuple((round(100 * x / length, 2), f"{x:g} {unit}" if x else "0") for x in values)


def _row(view: DeviceView, bar: Bar, kept: Kept, drawing: _Drawing) -> DeviceRow:
    snapshot = drawing.snapshot
    _, *rest = facts(snapshot, view)
    kept_bytes = sum(size for _, size in kept)
    if kept_bytes:
        rest.insert(0, f"{show_bytes(kept_bytes)} kept")
    free = room_words(view, kept_bytes)
    if view.drained is not None:
        since = lasting(max(0.0, snapshot.wall - view.drained.wall))
        free = f"drained by {clean(view.drained.by)}"
        rest.insert(0, f"{since} ago, takes nothing new")
    # If every device is simulated, the status bar shows that once for all of them.
    is_odd = view.device.simulated and not snapshot.simulated
    limit, total = show_bytes(view.limit_bytes), show_bytes(view.device.total_bytes)
    drain = Button("undrain", "End the drain") if view.drained else Button("drain", "Drain")
    on_card = drain, Button("compact", "Compact"), Button("evict_idle", "Evict all idle")
    return DeviceRow(
        view.device.id,
        device_name(view.device.id),
        _name(view.device),
        "simulated" if is_odd else "",
        view.drained is not None,
        bool(view.blind) or view.claimed_bytes > view.limit_bytes,
        free,
        " · ".join(rest),
        *level(view),
        *figures(view),
        drawing.percent(view.device.total_bytes),
        drawing.percent(view.limit_bytes),
        f"budget: {limit} of {total} may be held",
        (*_parts(bar, drawing), *_kept_parts(bar, kept, drawing)),
        description(bar),
        on_card if drawing.may_act_on_cards and not view.device.is_host else (),
    )


def _name(device: Device) -> str:
    size = show_bytes(device.total_bytes)
    return size if device.simulated or not device.name else f"{size} · {clean(device.name)}"


# -- what a bar holds ------------------------------------------------------------------------------


def _parts(bar: Bar, drawing: _Drawing) -> Iterator[BarPart]:
    position = 0
    for stretch in bar.segments:
        style = drawing.styles.get(stretch.label)
        yield BarPart(
            f"{stretch.kind} {stretch.label or stretch.title}",
            drawing.percent(position),
            drawing.percent(stretch.bytes),
            stretch.kind,
            stretch.title,
            stretch.notebook,
            stretch.tooltip,
            style.colour if style else "",
            style.texture if style else "",
            stretch.lease.id if stretch.lease else "",
            _buttons(stretch, drawing) if drawing.may_act else (),
        )
        position += stretch.bytes


def _kept_parts(bar: Bar, kept: Kept, drawing: _Drawing) -> Iterator[BarPart]:
    position = bar.used_bytes
    for ticket, size in kept:
        needed = bytes_on(ticket.need, bar.device.id)
        section = drawing.snapshot.sections.get(ticket.owner)
        whose = f"\nfor {clean(section.owner.label)}" if section else ""
        yield BarPart(
            f"kept {ticket.key}",
            drawing.percent(position),
            drawing.percent(size),
            "kept",
            f"kept for {ticket_title(ticket, drawing.snapshot)}",
            lines=f"{show_bytes(size)} of the {show_bytes(needed)} that it waits for{whose}",
        )
        position += size


def reserved(snapshot: Snapshot, view: DeviceView) -> list[tuple[Ticket, int]]:
    """For each waiting request, the free bytes of the device in `view` that are reserved for the request.

    The requests are in the order of the queue. As in the scheduler, a request first gets the bytes that leaving or
    recalled leases will free. Free bytes are reserved only for what the request needs beyond these bytes.
    """
    id, left = view.device.id, max(0, view.room_bytes or 0)
    waiting = [ticket for ticket in snapshot.waiting if not snapshot.is_asleep(ticket)]
    recalled = {lease: size for ticket in waiting for lease, size in ticket.recalls.items()}
    freed = sum(bytes_on(lease.freed_soon(recalled), id) for lease in snapshot.leases())
    found = []
    for ticket in waiting:
        need = bytes_on(ticket.need, id)
        from_victims = min(need, freed)
        freed -= from_victims
        size = min(need - from_victims, left)
        left -= size
        if size:
            found.append((ticket, size))
    return found


# -- buttons ---------------------------------------------------------------------------------------


def _buttons(stretch: Stretch, drawing: _Drawing) -> tuple[Button, ...]:
    lease, snapshot = stretch.lease, drawing.snapshot
    if lease is None or stretch.kind == "arriving" or lease.kind not in ("model", KERNEL):
        return ()
    owner = snapshot.sections[lease.owner].owner
    return if_awake(lease_buttons(lease, owner, drawing.room), owner.id, snapshot, lease.id)


def lease_buttons(lease: Lease, owner: Owner, room: Mapping[str, int]) -> Iterator[Button]:
    """All buttons of a `lease`, of a model also Drop and Move. `room` is the result of `room_after`."""
    common = {button.verb: button for button in usual_buttons(lease, owner) if button.verb != "who"}
    if lease.kind == KERNEL:
        yield from common.values()
        return
    evict = common.get("evict")
    if lease.keep and lease.on_device and not lease.pins and lease.phase is Phase.SETTLED:
        del common["evict"]  # a pinned model cannot be evicted
        yield Button("unpin_evict", "Unpin and evict")
    yield from common.values()
    why_not = evict.why_not if evict else ""
    if lease.droppable:
        yield Button("drop", "Drop", why_not)
    if not why_not:
        yield from (Button(f"move {id}", f"Move to {id}") for id in _targets(lease, room))


def room_after(snapshot: Snapshot, kept: Mapping[str, Kept]) -> dict[str, int]:
    """The free bytes of each card that takes new leases, without the bytes that are `kept` for requests.

    Computed once for all leases: for each of 200 leases on 8 cards it took 100 ms at each change.
    """
    return {
        view.device.id: view.room_bytes - sum(size for _, size in kept[view.device.id])
        for view in snapshot.cards
        if view.room_bytes is not None and view.drained is None
    }


def _targets(lease: Lease, room: Mapping[str, int]) -> list[str]:
    """The cards with room for the model of `lease`. The card with the most room is first."""
    if len(lease.shares) != 1 or not lease.on_device or not lease.movable:
        return []
    (share,) = lease.shares
    fitting = [id for id, left in room.items() if left >= share.bytes and id != share.device]
    return sorted(fitting, key=lambda id: -room[id])[:MOST_TARGETS]


# -- the last minutes ------------------------------------------------------------------------------


class Past(msgspec.Struct, frozen=True):
    """The use of one device in the last minutes, for a drawing that is 100 wide and high. A gap has no span."""

    spans: tuple[tuple[float, float, float], ...]  # start, end, height
    limit: float  # the height of the budget
    marks: tuple[float, ...]  # the positions of the evictions
    words: str


def past_rows(history: History, end: float) -> dict[str, Past]:
    """For each device, the last minutes up to `end` (epoch seconds), for the small drawing in the device's row."""
    devices = dict.fromkeys(moment.device for moment in history.moments)
    return {device: _past(history, device, end) for device in devices}


def _past(history: History, device: str, end: float) -> Past:
    start = end - history.seconds
    moments = [moment for moment in history.of(device) if moment.wall <= end]
    total = max((moment.total_bytes for moment in moments), default=0) or 1

    def x(wall: float) -> float:
        """The horizontal position of `wall` (epoch seconds). It is rounded to steps, so that little is sent."""
        part = min(1.0, max(0.0, (wall - start) / history.seconds))
        return round(100 * round(part * PAST_STEPS) / PAST_STEPS, 2)

    spans: list[tuple[float, float, float]] = []
    for moment, until in spans_of(moments, end):
        new = (x(moment.wall), x(until), round(100 * moment.peak_bytes / total, 1))
        if spans and (spans[-1][1], spans[-1][2]) == (new[0], new[2]):
            new = (spans.pop()[0], *new[1:])
        if new[0] < new[1]:
            spans.append(new)
    evicted = [
        x(event.wall)
        for event in history.events
        if event.action in MARKED and device in devices_of(event) and start <= event.wall <= end
    ]
    highest = max((height for *_, height in spans), default=0.0)
    words = f"at most {highest:.0f} % in use, {counted(len(evicted), 'eviction')}"
    limit = moments[-1].limit_bytes if moments else 0
    return Past(tuple(spans), round(100 * limit / total, 1), tuple(dict.fromkeys(evicted)), words)
