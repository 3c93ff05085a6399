"""Turns a Snapshot into bars and rows, from which both the text and the HTML are made.

This module is pure. It decides which facts a bar or a row contains. Sentences are in `words.py`,
and the layout is in `text.py` and `html.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from gpu_runtime.facts import (
    NORMAL,
    THIS_PROCESS,
    UNUSUAL,
    Device,
    DeviceView,
    Event,
    Lease,
    Level,
    Owner,
    Phase,
    Section,
    Share,
    Snapshot,
    Step,
    Stranger,
    ended_label,
    holder_label,
    importance_name,
    lease_state,
    lease_title,
    notebooks_in,
    place_label,
)
from gpu_runtime.units import show_bytes

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
        """Whether the bytes of this segment are leased."""
        return bool(self.lease)

    @property
    def title(self) -> str:
        """The text of the segment, such as `qwen 14.0 GiB, arriving`."""
        moving = f", {self.kind}" if self.kind in ("arriving", "leaving") else ""
        return f"{self.label} {show_bytes(self.bytes)}{moving}"


class Bar(NamedTuple):
    """The bar of one device: its segments, its limit and its scale."""

    device: Device
    segments: tuple[BarSegment, ...]
    limit_bytes: int

    @property
    def used_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.bytes for segment in self.segments)

    @property
    def scale_bytes(self) -> int:
        """The bytes that the full length of the bar stands for.

        The result is the largest of the device's size, the bytes of all segments, and the limit.
        """
        return max(self.device.total_bytes, self.used_bytes, self.limit_bytes, 1)


class Holding(NamedTuple):
    """A row of the table of holders."""

    name: str
    bytes: int | None
    where: str
    holder: str
    state: str
    kind: str = "model"  # model, kernel, block, stays, residue, strangers
    marks: tuple[str, ...] = ()


def clean(text: object) -> str:
    """The `text` with unprintable characters replaced, since they could control a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text))


def clock(wall: float) -> str:
    """The local time of day at `wall`, such as `12:03:04`. `wall` is in epoch seconds."""
    return time.strftime("%H:%M:%S", time.localtime(wall))


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
                leaving = _bytes_on(lease.freed_by(lease.target), device)
            sizes = {
                "settled": _bytes_on(lease.shares, device) - leaving,
                "leaving": leaving,
                "arriving": _bytes_on(lease.target, device),
            }
            for kind, size in sizes.items():
                if size > 0:
                    yield LeasePart(section, lease, size, kind)
            if view.device.is_host and lease.shadow_beyond_target:
                yield LeasePart(section, lease, lease.shadow_beyond_target, "settled", True)


def ended_bytes(snapshot: Snapshot, view: DeviceView) -> int:
    """The claimed bytes on the device in `view` that belong to processes which have ended."""
    leased = sum(part.bytes for part in lease_parts(snapshot, view))
    residue = sum(section.residue.get(view.device.id, 0) for section in snapshot.sections.values())
    return max(0, view.claimed_bytes - leased - residue)


def _segments(snapshot: Snapshot, view: DeviceView) -> Iterator[BarSegment]:
    for part in lease_parts(snapshot, view):
        title = lease_title(part.lease, part.section.owner)
        label = f"copy of {title}" if part.is_copy else title
        yield BarSegment(label, part.bytes, part.kind, part.lease.id)
    cache = sum(section.cache_on(view.device.id) for section in snapshot.sections.values())
    if view.residue_bytes > cache:
        yield BarSegment(STAYS, view.residue_bytes - cache, "residue")
    if cache:
        yield BarSegment(RESIDUE, cache, "residue")
    ended = ended_bytes(snapshot, view)
    if ended:
        yield BarSegment(ENDED, ended, "ended")
    unleased = strangers_bytes(view)
    if unleased > 0:
        yield BarSegment(STRANGERS, unleased, "strangers")


def _title(snapshot: Snapshot, lease: Lease) -> str:
    section = snapshot.sections.get(lease.owner)
    return lease_title(lease, section.owner if section else None)


def _bytes_on(shares: Iterable[Share], device: str) -> int:
    return sum(share.bytes for share in shares if share.device == device)


def strangers_bytes(view: DeviceView) -> int:
    """The bytes that are in use without a lease on the device in `view`.

    The result is 0 if the driver does not report the bytes in use.
    """
    if view.stranger_bytes is not None:
        return view.stranger_bytes
    return max(0, (view.measured_bytes or 0) - view.claimed_bytes)


def bars_after(snapshot: Snapshot, steps: Iterable[Step]) -> tuple[Bar, ...]:
    """The bars as they would be after the `steps`, only for devices that the steps change."""
    before = bars(snapshot)
    after: dict[str, list[BarSegment]] = {bar.device.id: list(bar.segments) for bar in before}
    changed: set[str] = set()
    for step in steps:
        for share in getattr(step, "source", ()):
            changed.add(share.device)
            left, kept = share.bytes, []
            for one in after.get(share.device, ()):
                taken = min(left, one.bytes) if one.lease == step.lease else 0
                left -= taken
                kept.append(one._replace(bytes=one.bytes - taken))
            after[share.device] = [one for one in kept if one.bytes > 0]
        for share in getattr(step, "shares", ()):
            changed.add(share.device)
            segment = BarSegment(_step_title(snapshot, step), share.bytes, lease=step.lease)
            after.setdefault(share.device, []).append(segment)
    return tuple(
        bar._replace(segments=tuple(after[bar.device.id]))
        for bar in before
        if bar.device.id in changed
    )


def _step_title(snapshot: Snapshot, step: Step) -> str:
    """The name of the lease that `step` moves. The lease of a new model is not in the snapshot."""
    owner_id, _, name = step.lease.partition("/")
    section = snapshot.sections.get(owner_id)
    lease = section.lease(name) if section else None
    return _title(snapshot, lease) if lease else name


def cards(snapshot: Snapshot) -> list[DeviceView]:
    """The devices of the `snapshot` without the host."""
    return [view for view in snapshot.devices if not view.device.is_host]


def worst_level(snapshot: Snapshot) -> Level:
    """The highest pressure level of any card in the `snapshot`, or UNKNOWN without cards."""
    return max((view.level for view in cards(snapshot)), key=_LEVELS.index, default=Level.UNKNOWN)


def device_title(snapshot: Snapshot) -> str:
    """A text about the cards of the `snapshot`, such as `1 simulated GPU`, `8 × NVIDIA H100` or `no
    GPU`.
    """
    count = len(cards(snapshot))
    if not count:
        return "no GPU"
    names = {view.device.name for view in cards(snapshot)}
    if not snapshot.simulated and len(names) == 1 and "" not in names:
        return f"{count} × {clean(*names)}"
    simulated = "simulated " if snapshot.simulated else ""
    return f"{count} {simulated}GPU{'s' if count != 1 else ''}"


def fill(view: DeviceView) -> str:
    """A text with the claimed and the usable bytes of the device in `view`: `14.0 of 21.6 GiB`."""
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
    found += _measured_remark(view)
    if view.sample is not None and view.sample.utilisation_percent is not None:
        found.append(f"{view.sample.utilisation_percent:.0f} % busy")
    if view.device.is_host:
        found.append(warm_pool(snapshot))
    return found


def warm_pool(snapshot: Snapshot) -> str:
    """What is in host memory: `warm pool: 1 model`, or `warm pool: 1 model, 1 notebook` if one is parked."""
    kinds = [lease.kind for lease in snapshot.leases() if lease.on_host]
    models, notebooks = kinds.count("model"), kinds.count("kernel")
    parts = [f"{models} model{'s' if models != 1 else ''}"]
    if notebooks:
        parts.append(f"{notebooks} notebook{'s' if notebooks != 1 else ''}")
    return f"warm pool: {', '.join(parts)}"


def _measured_remark(view: DeviceView) -> list[str]:
    """The remark `measured 14.0 GiB`, if a real device's measured and claimed bytes differ.

    For a card whose use is unknown, the remark is `not measured`. Else the list is empty.
    """
    if view.measured_bytes is None:
        return [] if view.device.is_host else ["not measured"]
    if view.device.simulated or view.measured_bytes == view.claimed_bytes:
        return []
    return [f"measured {show_bytes(view.measured_bytes)}"]


# -- the table of holders ------------------------------------------------------------------------


def holdings(snapshot: Snapshot) -> list[Holding]:
    """The rows of the table of holders for the `snapshot`.

    The first rows are the leases, sorted by device and size. Then follow the bytes that owners hold
    beyond their leases, and other programs.
    """
    order = {view.device.id: place for place, view in enumerate(snapshot.devices)}

    def by_device_and_size(lease: Lease) -> tuple[int, int, str]:
        places = [order.get(share.device, NOT_LISTED) for share in lease.claims()]
        return min(places, default=NOT_LISTED), -lease.bytes, lease.name

    leases = sorted(snapshot.leases(), key=by_device_and_size)
    return [
        *(_holding(snapshot, lease) for lease in leases),
        *_residues(snapshot),
        *_strangers(snapshot),
    ]


def _holding(snapshot: Snapshot, lease: Lease) -> Holding:
    return Holding(
        _title(snapshot, lease),
        lease.bytes,
        _where(lease),
        holder(snapshot, lease.owner),
        lease_state(lease, snapshot.now).text(),
        lease.kind,
        tuple(_marks(lease)),
    )


def _residues(snapshot: Snapshot) -> Iterator[Holding]:
    """Yields a row for each owner that holds bytes beyond its leases."""
    for section in snapshot.sections.values():
        for device, size in section.residue.items():
            if size:
                owner = holder(snapshot, section.owner.id)
                for one in section.staying_on(device):
                    title = section.owner.file or f"pid {section.owner.pid}"
                    why = f"stays: {clean(one.why)}"
                    yield Holding(title, one.bytes, device, owner, why, "stays")
                if cache := section.cache_on(device):
                    yield Holding(RESIDUE, cache, device, owner, "", "residue")


def _strangers(snapshot: Snapshot) -> Iterator[Holding]:
    for view in cards(snapshot):
        known = [one for one in snapshot.strangers if one.device == view.device.id]
        for one in known:
            yield _stranger(one.bytes, one.device, _program(one))
        if not known and strangers_bytes(view):
            yield _stranger(strangers_bytes(view), view.device.id, "unknown")


def _stranger(size: int | None, device: str, program: str) -> Holding:
    return Holding(STRANGERS, size, device, program, "not governed", "strangers")


def _program(stranger: Stranger) -> str:
    """The known facts about a program without a lease, such as `python, bob, pid 4121`."""
    parts = (stranger.command, stranger.user, f"pid {stranger.pid}")
    return ", ".join(clean(part) for part in parts if part)


def _where(lease: Lease) -> str:
    if lease.target and not lease.shares:
        return " + ".join(dict.fromkeys(share.device for share in lease.target))
    return place_label(lease)


def _marks(lease: Lease) -> Iterator[str]:
    if lease.keep:
        yield "pinned"
    if lease.importance != NORMAL:
        yield importance_name(lease.importance)


def holder(snapshot: Snapshot, owner_id: str, events: Iterable[Event] = ()) -> str:
    """The label of the process with the id `owner_id`, for readers of the `snapshot`.

    For the process that made the snapshot, the label is `this process`. `events` that are not in the snapshot may name
    the notebook of an ended process.
    """
    if owner_id == snapshot.owner.id:
        return THIS_PROCESS
    section = snapshot.sections.get(owner_id)
    if section is None:
        notebooks = notebooks_in((*snapshot.events, *events))
        return ended_label(owner_id, notebooks.get(owner_id, ""))
    label = holder_label(section.owner, snapshot.owner)
    presence = snapshot.presences.get(owner_id)
    if presence is None or presence.state not in UNUSUAL:
        return label
    return f"{label}, {presence.text(snapshot.now)}"


def owners(snapshot: Snapshot) -> list[Owner]:
    """The processes of the `snapshot` that hold a lease."""
    return [section.owner for section in snapshot.sections.values() if section.leases]
