"""What there is to see in a Snapshot, as bars and rows: the same for text and HTML.

Pure. What stands where is decided here; sentences are in `words.py`, looks in `text.py` and `html.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from gpu_runtime.facts import (
    NORMAL,
    THIS_PROCESS,
    Device,
    DeviceView,
    Lease,
    Level,
    Owner,
    Phase,
    Snapshot,
    Step,
    ended_label,
    holder_label,
    importance_name,
    lease_state,
)
from gpu_runtime.units import show_bytes

MOST_ROWS = 20  # in one table; the rest is counted and `%gpu leases` has them all
STRANGERS = "other programs"
RESIDUE = "context and cache"
_LEVELS = (Level.UNKNOWN, Level.LOW, Level.MODERATE, Level.HIGH, Level.CRITICAL)


class Segment(NamedTuple):
    """A stretch of a bar."""

    label: str
    bytes: int
    kind: str = "settled"  # settled, arriving, leaving, residue, strangers
    lease: str = ""

    @property
    def is_lease(self) -> bool:
        return bool(self.lease)

    @property
    def title(self) -> str:
        moving = f", {self.kind}" if self.kind in ("arriving", "leaving") else ""
        return f"{self.label} {show_bytes(self.bytes)}{moving}"


class Bar(NamedTuple):
    """One device, from empty to full."""

    device: Device
    segments: tuple[Segment, ...]
    limit_bytes: int

    @property
    def used_bytes(self) -> int:
        return sum(segment.bytes for segment in self.segments)

    @property
    def scale_bytes(self) -> int:
        """What the bar's full length stands for: the device, or more in an overdraft."""
        return max(self.device.total_bytes, self.used_bytes, self.limit_bytes, 1)


class Holding(NamedTuple):
    """A row of "who holds what"."""

    name: str
    bytes: int | None
    where: str
    holder: str
    state: str
    kind: str = "model"  # model, block, residue, strangers
    marks: tuple[str, ...] = ()


def clean(text: object) -> str:
    """The text with whatever could steer a terminal made visible."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text))


def clock(wall: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(wall))


# -- devices ------------------------------------------------------------------------------------------------------


def bars(snapshot: Snapshot) -> tuple[Bar, ...]:
    return tuple(
        Bar(view.device, tuple(_segments(snapshot, view)), view.limit_bytes)
        for view in snapshot.devices
    )


def _segments(snapshot: Snapshot, view: DeviceView) -> Iterator[Segment]:
    here = view.device.id
    for lease in snapshot.leases():
        lies = sum(share.bytes for share in lease.shares if share.device == here)
        comes = sum(share.bytes for share in lease.target if share.device == here)
        if lies:
            yield Segment(
                lease.name, lies, "leaving" if lease.phase is Phase.LEAVING else "settled", lease.id
            )
        if comes:
            yield Segment(lease.name, comes, "arriving", lease.id)
    if view.residue_bytes:
        yield Segment(RESIDUE, view.residue_bytes, "residue")
    if (others := strangers_bytes(view)) > 0:
        yield Segment(STRANGERS, others, "strangers")


def strangers_bytes(view: DeviceView) -> int:
    """Bytes in use that nobody claimed, as measured; 0 where the driver does not say."""
    if view.stranger_bytes is not None:
        return view.stranger_bytes
    return max(0, (view.measured_bytes or 0) - view.claimed_bytes)


def bars_after(snapshot: Snapshot, steps: Iterable[Step]) -> tuple[Bar, ...]:
    """The bars of those devices that the steps change, as they would be then."""
    now = bars(snapshot)
    changed: dict[str, list[Segment]] = {bar.device.id: list(bar.segments) for bar in now}
    touched: set[str] = set()
    for step in steps:
        for share in getattr(step, "source", ()):
            touched.add(share.device)
            changed[share.device] = [
                s for s in changed.get(share.device, ()) if s.lease != step.lease
            ]
        for share in getattr(step, "shares", ()):
            touched.add(share.device)
            changed.setdefault(share.device, []).append(
                Segment(lease_name(step.lease), share.bytes, lease=step.lease)
            )
    return tuple(
        bar._replace(segments=tuple(changed[bar.device.id]))
        for bar in now
        if bar.device.id in touched
    )


def lease_name(lease_id: str) -> str:
    return lease_id.partition("/")[2] or lease_id


def cards(snapshot: Snapshot) -> list[DeviceView]:
    return [view for view in snapshot.devices if not view.device.is_host]


def worst_level(snapshot: Snapshot) -> Level:
    return max((view.level for view in cards(snapshot)), key=_LEVELS.index, default=Level.UNKNOWN)


def device_title(snapshot: Snapshot) -> str:
    """`1 simulated GPU`, `8 × NVIDIA H100`, `no GPU`."""
    count = len(cards(snapshot))
    names = {view.device.name for view in cards(snapshot)}
    if not snapshot.simulated and len(names) == 1 and "" not in names:
        return f"{count} × {clean(*names)}"
    simulated = "simulated " if snapshot.simulated else ""
    return f"{count} {simulated}GPU{'s' if count != 1 else ''}" if count else "no GPU"


def fill(view: DeviceView) -> str:
    """`14.0 of 21.6 GiB`, claimed of usable."""
    claimed, limit = show_bytes(view.claimed_bytes), show_bytes(view.limit_bytes)
    if claimed.split()[1] == limit.split()[1]:
        claimed = claimed.split()[0]
    return f"{claimed} of {limit}"


def remarks(snapshot: Snapshot, view: DeviceView) -> list[str]:
    """What a person should know of this device besides its bar."""
    words = []
    if view.drained is not None:
        words.append(f"drained by {view.drained.by} since {clock(view.drained.wall)}")
    if view.claimed_bytes > view.limit_bytes:
        words.append(f"over its budget by {show_bytes(view.claimed_bytes - view.limit_bytes)}")
    if view.measured_bytes is None and not view.device.is_host:
        words.append("not measured")
    elif (
        view.measured_bytes is not None
        and not view.device.simulated
        and view.measured_bytes != view.claimed_bytes
    ):
        words.append(f"measured {show_bytes(view.measured_bytes)}")
    if view.sample is not None and view.sample.utilisation_percent is not None:
        words.append(f"{view.sample.utilisation_percent:.0f} % busy")
    if view.device.is_host:
        warm = sum(1 for lease in snapshot.leases() if lease.on_host)
        words.append(f"warm pool: {warm} model{'s' if warm != 1 else ''}")
    return words


# -- who holds what -----------------------------------------------------------------------------------------------


def holdings(snapshot: Snapshot) -> list[Holding]:
    """Every lease, the largest first on each device; then what processes hold beside them; then strangers."""
    order = {view.device.id: place for place, view in enumerate(snapshot.devices)}
    leases = sorted(
        snapshot.leases(),
        key=lambda lease: (
            min((order.get(share.device, 99) for share in lease.claims()), default=99),
            -lease.bytes,
            lease.name,
        ),
    )
    rows = [
        Holding(
            lease.name,
            lease.bytes,
            _where(lease),
            holder(snapshot, lease.owner),
            lease_state(lease, snapshot.now).text(),
            lease.kind,
            tuple(_marks(lease)),
        )
        for lease in leases
    ]
    for section in snapshot.sections.values():
        rows += [
            Holding(RESIDUE, size, device, holder(snapshot, section.owner.id), "", "residue")
            for device, size in section.residue.items()
            if size
        ]
    return rows + list(_strangers(snapshot))


def _strangers(snapshot: Snapshot) -> Iterator[Holding]:
    for view in cards(snapshot):
        others = [one for one in snapshot.strangers if one.device == view.device.id]
        for one in others:
            who = ", ".join(
                clean(part) for part in (one.command, one.user, f"pid {one.pid}") if part
            )
            yield Holding(STRANGERS, one.bytes, one.device, who, "not governed", "strangers")
        if not others and strangers_bytes(view):
            yield Holding(
                STRANGERS,
                strangers_bytes(view),
                view.device.id,
                "unknown",
                "not governed",
                "strangers",
            )


def _where(lease: Lease) -> str:
    if lease.target and not lease.shares:
        return " + ".join(dict.fromkeys(share.device for share in lease.target))
    return lease.where


def _marks(lease: Lease) -> Iterator[str]:
    if lease.keep:
        yield "pinned"
    if lease.importance != NORMAL:
        yield importance_name(lease.importance)


def holder(snapshot: Snapshot, owner_id: str) -> str:
    """The process with `owner_id`, for the process that made the `snapshot`: `this process`, or its label."""
    if owner_id == snapshot.owner.id:
        return THIS_PROCESS
    section = snapshot.sections.get(owner_id)
    return holder_label(section.owner, snapshot.owner) if section else ended_label(owner_id)


def owners(snapshot: Snapshot) -> list[Owner]:
    """Processes that hold something."""
    return [section.owner for section in snapshot.sections.values() if section.leases]
