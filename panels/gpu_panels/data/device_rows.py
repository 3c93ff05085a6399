"""The rows of the devices on the tabs Now and What if. All cards share one axis.

This module is pure. It turns a snapshot into values that `widgets/devices.js` draws. `device_totals.py` computes the
bytes on each device, and `past_rows` the use of the last minutes. Positions are in percent of the axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from gpu_runtime.facts import (
    KERNEL,
    Device,
    DeviceView,
    History,
    Lease,
    Owner,
    Phase,
    Snapshot,
    Ticket,
)
from gpu_runtime.rendering.views import clean
from gpu_runtime.units import GIB, MIB, show_bytes

from ..palette import LeaseStyle, label_of
from . import device_words
from .cells import Button
from .confirmations import ticket_title
from .device_totals import DeviceBar, Stretch
from .history import MARKED, devices_of, spans_of
from .lease_rows import kernel_buttons
from .model_rows import buttons as model_buttons
from .queue_rows import ASLEEP_SECONDS
from .row_parts import if_awake

MOST_TARGETS = 3  # cards that the menu of a lease offers for a move: those with the most room
PAST_STEPS = 300  # the resolution of the small history, over its whole width


class BarPart(msgspec.Struct, frozen=True):
    """One stretch of a bar (a piece with one colour), with its position on the axis."""

    key: str  # the same as long as the stretch is shown
    left: float
    width: float
    kind: str  # as in `device_totals.Stretch`; or `kept`: free, but reserved for a waiting request
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
    name: str  # the size, and the product name of a real card
    notices: tuple[str, ...]
    is_drained: bool
    is_over: bool  # over its budget, or not measured: a problem
    free: str  # after reservations
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


def device_rows(
    snapshot: Snapshot,
    drawn: Sequence[DeviceBar],
    styles: Mapping[str, LeaseStyle],
    may_act: bool = True,
) -> Rows:
    """A row for each device of `snapshot`, whose bars are `drawn`.

    `styles` maps the label of each lease to its style. Without `may_act`, no row has a button. The cards share one
    axis. The host has its own axis, since host memory is much larger.
    """
    cards = [bar.scale_bytes for bar in drawn if not bar.device.is_host]
    longest = max(cards, default=1)
    leases = {label_of(lease.owner, lease.name): lease for lease in snapshot.leases()}
    kept = {view.device.id: reserved(snapshot, view) for view in snapshot.devices}
    drawing = _Drawing(longest, styles, may_act, leases, kept, room_after(snapshot, kept))
    rows = []
    for view, bar in zip(snapshot.devices, drawn, strict=True):
        scale = bar.scale_bytes if bar.device.is_host else longest
        rows.append(_row(snapshot, view, bar, drawing._replace(scale_bytes=scale)))
    return Rows(_ticks(longest) if cards else (), tuple(rows))


Kept = Mapping[str, Sequence[tuple[Ticket, int]]]  # device -> see `reserved`


class _Drawing(NamedTuple):
    """The values that all parts of one row need."""

    scale_bytes: int  # the bytes of the whole axis
    styles: Mapping[str, LeaseStyle]
    may_act: bool
    leases: Mapping[str, Lease]  # by label
    kept: Kept
    room: Mapping[str, int]  # see `room_after`

    def percent(self, size: int) -> float:
        """The `size` in bytes as a percentage of the axis."""
        return round(100 * size / self.scale_bytes, 2)


def _ticks(scale_bytes: int) -> tuple[tuple[float, str], ...]:
    unit_bytes, unit = unit_of(scale_bytes)
    length = scale_bytes / unit_bytes
    step = interval(length)
    values = [n * step for n in range(int(length / step + 1e-9) + 1)]
    return tuple((round(100 * x / length, 2), f"{x:g} {unit}" if x else "0") for x in values)


def _row(snapshot: Snapshot, view: DeviceView, bar: DeviceBar, drawing: _Drawing) -> DeviceRow:
    kept = drawing.kept[view.device.id]
    _, *rest = device_words.facts(snapshot, view)
    kept_bytes = sum(size for _, size in kept)
    if kept_bytes:
        rest.insert(0, f"{show_bytes(kept_bytes)} kept")
    limit, total = show_bytes(view.limit_bytes), show_bytes(view.device.total_bytes)
    return DeviceRow(
        view.device.id,
        _name(view.device),
        tuple(device_words.notices(snapshot, view)),
        view.drained is not None,
        bool(view.blind) or view.claimed_bytes > view.limit_bytes,
        device_words.room_words(view, kept_bytes),
        " · ".join(rest),
        *device_words.level(view),
        *device_words.figures(view),
        drawing.percent(view.device.total_bytes),
        drawing.percent(view.limit_bytes),
        f"budget: {limit} of {total} may be leased",
        (*_parts(snapshot, bar, drawing), *_kept_parts(snapshot, bar, kept, drawing)),
        bar.description,
        _card_buttons(view) if drawing.may_act and not view.device.is_host else (),
    )


def _name(device: Device) -> str:
    size = show_bytes(device.total_bytes)
    return size if device.simulated or not device.name else f"{size} · {clean(device.name)}"


# -- what a bar holds ------------------------------------------------------------------------------


def _parts(snapshot: Snapshot, bar: DeviceBar, drawing: _Drawing) -> Iterator[BarPart]:
    position = 0
    for stretch in bar.stretches:
        lease = drawing.leases.get(stretch.label) if stretch.label else None
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
            lease.id if lease else "",
            _buttons(snapshot, stretch, lease, drawing.room) if lease and drawing.may_act else (),
        )
        position += stretch.bytes


def _kept_parts(
    snapshot: Snapshot, bar: DeviceBar, kept: Sequence[tuple[Ticket, int]], drawing: _Drawing
) -> Iterator[BarPart]:
    position = bar.used_bytes
    for ticket, size in kept:
        title = ticket_title(ticket, snapshot)
        needed = sum(share.bytes for share in ticket.need if share.device == bar.device.id)
        section = snapshot.sections.get(ticket.owner)
        whose = f"\nfor {clean(section.owner.label)}" if section else ""
        yield BarPart(
            f"kept {ticket.key}",
            drawing.percent(position),
            drawing.percent(size),
            "kept",
            f"kept for {title}",
            lines=f"{show_bytes(size)} of the {show_bytes(needed)} that it waits for{whose}",
        )
        position += size


def reserved(snapshot: Snapshot, view: DeviceView) -> list[tuple[Ticket, int]]:
    """For each waiting request, the free bytes of the device in `view` that are reserved for the request.

    The requests are in the order of the queue. As in the scheduler, a request first gets the bytes that leaving or
    recalled leases will free. Free bytes are reserved only for what the request needs beyond these bytes.
    """
    id, left = view.device.id, max(0, view.room_bytes or 0)
    waiting = [ticket for ticket in snapshot.tickets if _is_awake_wait(ticket, snapshot)]
    recalled = {lease_id for ticket in waiting for lease_id in ticket.recalls}
    freed = sum(
        share.bytes
        for lease in snapshot.leases()
        for share in (
            lease.freed_by(lease.target) if lease.phase is Phase.LEAVING else lease.shares
        )
        if share.device == id and (lease.phase is Phase.LEAVING or lease.id in recalled)
    )
    found = []
    for ticket in waiting:
        need = sum(share.bytes for share in ticket.need if share.device == id)
        from_victims = min(need, freed)
        freed -= from_victims
        size = min(need - from_victims, left)
        left -= size
        if size:
            found.append((ticket, size))
    return found


def _is_awake_wait(ticket: Ticket, snapshot: Snapshot) -> bool:
    return ticket.verb == "use" and snapshot.now - ticket.refreshed <= ASLEEP_SECONDS


# -- buttons ---------------------------------------------------------------------------------------


def _card_buttons(view: DeviceView) -> tuple[Button, ...]:
    drain = Button("undrain", "End the drain") if view.drained else Button("drain", "Drain")
    return drain, Button("compact", "Compact"), Button("evict_idle", "Evict all idle")


def _buttons(
    snapshot: Snapshot, stretch: Stretch, lease: Lease, room: Mapping[str, int]
) -> tuple[Button, ...]:
    """The buttons of a `stretch` of a bar: the buttons of its `lease`, and the buttons of the lease's process."""
    owner = snapshot.sections[lease.owner].owner
    if stretch.kind == "arriving" or lease.kind not in ("model", KERNEL):
        return ()
    buttons = lease_buttons(lease, owner, room)
    if lease.kind == KERNEL:
        buttons = (one for one in kernel_buttons(lease, owner) if one.verb != "who")
    return if_awake(buttons, owner.id, snapshot)


def lease_buttons(lease: Lease, owner: Owner, room: Mapping[str, int]) -> Iterator[Button]:
    """All buttons of the `lease` of a model in the process `owner`, including Drop, Move and Compact.

    `room` is the result of `room_after`.
    """
    common = {button.verb: button for button in model_buttons(lease, owner)}
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


def room_after(snapshot: Snapshot, kept: Kept) -> dict[str, int]:
    """The free bytes of each card that takes new leases, without the bytes that are `kept` for requests.

    The result is computed once for all leases. To compute it for each of 200 leases on 8 cards took 100 ms at each
    change.
    """
    return {
        view.device.id: view.room_bytes - sum(size for _, size in kept[view.device.id])
        for view in snapshot.devices
        if view.room_bytes is not None and not view.device.is_host and view.drained is None
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
    """The use of one device in the last minutes, for a drawing that is 100 wide and 100 high.

    The height of a span is the part of the device that was in use. A gap in the record has no span.
    """

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
    words = f"at most {highest:.0f} % in use, {_counted(len(evicted), 'eviction')}"
    limit = moments[-1].limit_bytes if moments else 0
    return Past(tuple(spans), round(100 * limit / total, 1), tuple(dict.fromkeys(evicted)), words)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def encoded(value: Rows | Mapping[str, Past]) -> str:
    """The `value` as JSON for the browser."""
    return msgspec.json.encode(value).decode()


def labels(drawn: Iterable[DeviceBar]) -> list[str]:
    """The labels of all leases in the bars `drawn`, sorted. So the palette gets the labels in a stable order."""
    return sorted({one.label for bar in drawn for one in bar.stretches if one.label})


def unit_of(total_bytes: int) -> tuple[int, str]:
    """The unit of an axis for `total_bytes`, in bytes and as text: GiB, or MiB for a small device."""
    return (GIB, "GiB") if total_bytes >= 2 * GIB else (MIB, "MiB")


def interval(length: float) -> float:
    """The step between the ticks of an axis with this `length`. The axis then has four to eight ticks.

    The step is a power of two, because memory sizes often are.
    """
    step = 1.0
    while length / step > 8:
        step *= 2
    return step
