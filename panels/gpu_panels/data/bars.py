"""How full each device is and who holds it: a Snapshot as stacked bars, and as the words above them.

Pure. What stands where and what is said of it is decided here; how it is drawn, in `drawings.py` and `barchart.py`.
The stretches of a bar are the book's claims to the byte, and beyond them what was measured and nobody leased.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpu_runtime.facts import (
    Device,
    DeviceView,
    Lease,
    Phase,
    Section,
    Snapshot,
    holder_label,
    importance_name,
    lease_state,
)
from gpu_runtime.rendering.views import (
    RESIDUE,
    STRANGERS,
    clean,
    fill,
    strangers_bytes,
)
from gpu_runtime.units import show_bytes, show_seconds

from ..palette import label_of
from .rows import lasting

ENDED = "ended, not yet freed"
MOST_STRETCHES = 14  # leases in one bar; smaller ones gather
LEAST_PART = 0.012  # of a bar: a thinner lease gathers with the other thin ones
MOST_NAMED = 6  # of those gathered, or of other programs, that are told by name


class Stretch(NamedTuple):
    """A part of a bar."""

    title: str  # qwen
    bytes: int
    kind: str  # settled, arriving, leaving, others; residue, ended, strangers: those belong to no lease
    told: str = ""  # lines about it, for whoever points at it
    who: str = ""  # train.ipynb
    label: str = ""  # of a lease: what its look is kept under


class Mark(NamedTuple):
    """A place on a bar that means something."""

    bytes: int
    kind: str  # budget, moderate, high, critical
    told: str


class Region(NamedTuple):
    """A part of a device in which nothing lies."""

    start: int
    end: int
    kind: str  # budget, beyond, reserve
    told: str


class Bar(NamedTuple):
    """One device, from empty to full."""

    device: Device
    stretches: tuple[Stretch, ...]
    marks: tuple[Mark, ...]
    regions: tuple[Region, ...]
    limit_bytes: int

    @property
    def used_bytes(self) -> int:
        return sum(stretch.bytes for stretch in self.stretches)

    @property
    def scale_bytes(self) -> int:
        """What its full length stands for: the device, or more in an overdraft."""
        return max(self.device.total_bytes, self.used_bytes, self.limit_bytes, 1)

    @property
    def told(self) -> str:
        """The bar in words, for who cannot see it."""
        parts = [
            f"{one.title}{f' of {one.who}' if one.who else ''} {show_bytes(one.bytes)}"
            for one in self.stretches
        ]
        return f"{self.device.id}: {', '.join(parts) or 'empty'}; budget {show_bytes(self.limit_bytes)}"


def bars(snapshot: Snapshot) -> tuple[Bar, ...]:
    """A bar for every device, as it is now."""
    return tuple(_bar(snapshot, view) for view in snapshot.devices)


def _bar(snapshot: Snapshot, view: DeviceView) -> Bar:
    stretches = tuple(_stretches(snapshot, view))
    used = sum(one.bytes for one in stretches)
    return Bar(
        view.device,
        stretches,
        marks(snapshot, view),
        regions(snapshot, view, used),
        view.limit_bytes,
    )


def marks(snapshot: Snapshot, view: DeviceView) -> tuple[Mark, ...]:
    """Where claims fill the budget, and where they pass each pressure threshold."""
    rules, limit, total = snapshot.rules, view.limit_bytes, view.device.total_bytes
    found = []
    if snapshot.governed and limit:
        for kind, part in (
            ("moderate", rules.moderate),
            ("high", rules.high),
            ("critical", rules.critical),
        ):
            at = int(limit * part)
            found.append(
                Mark(
                    at,
                    kind,
                    f"{kind} pressure from {show_bytes(at)} leased, {part:.0%} of the budget, or "
                    f"{show_bytes(int(total * part))} in use",
                )
            )
    found.append(
        Mark(limit, "budget", f"budget: {show_bytes(limit)} of {show_bytes(total)} may be leased")
    )
    return tuple(found)


def regions(snapshot: Snapshot, view: DeviceView, used: int) -> tuple[Region, ...]:
    """What lies beside the `used` bytes of a bar: what may be leased, what is beyond the budget, and the reserve."""
    limit, total = min(view.limit_bytes, view.device.total_bytes), view.device.total_bytes
    found = [
        Region(
            used, limit, "budget", f"{room_words(view)}; {show_bytes(limit)} may be leased in all"
        ),
        Region(
            max(used, limit),
            total,
            "beyond",
            f"{show_bytes(total - limit)} beyond the budget: never leased",
        ),
    ]
    reserve = (
        0
        if view.device.simulated or view.device.is_host
        else min(snapshot.rules.reserve_bytes, total)
    )
    found.append(
        Region(
            max(used, total - reserve),
            total,
            "reserve",
            f"reserve: {show_bytes(reserve)} of measured free memory that no grant touches",
        )
    )
    return tuple(region for region in found if region.start < region.end)


# -- stretches ----------------------------------------------------------------------------------------------------


def _stretches(snapshot: Snapshot, view: DeviceView) -> Iterator[Stretch]:
    leases = list(_leases(snapshot, view.device.id))
    claimed = sum(one.bytes for one in leases)
    yield from gathered(leases, max(view.device.total_bytes, view.claimed_bytes, 1))
    residue = _residue(snapshot, view)
    if residue:
        yield residue
    ended = view.claimed_bytes - claimed - (residue.bytes if residue else 0)
    if ended > 0:
        yield Stretch(
            ENDED,
            ended,
            "ended",
            f"{show_bytes(ended)}: processes that ended held it, and the driver does "
            f"not show it free yet",
        )
    beyond = strangers_bytes(view)
    if beyond > 0:
        yield Stretch(STRANGERS, beyond, "strangers", _strangers_told(snapshot, view, beyond))


def _leases(snapshot: Snapshot, device: str) -> Iterator[Stretch]:
    """What each lease has on a device and what it awaits there, the largest first."""
    found = []
    for section in snapshot.sections.values():
        for lease in section.leases:
            lies = sum(share.bytes for share in lease.shares if share.device == device)
            comes = sum(share.bytes for share in lease.target if share.device == device)
            if lies:
                kind = "leaving" if lease.phase is Phase.LEAVING else "settled"
                found.append(_lease(snapshot, section, lease, lies, kind))
            if comes:
                found.append(_lease(snapshot, section, lease, comes, "arriving"))
    yield from sorted(found, key=lambda one: (-one.bytes, one.label, one.kind))


def _lease(snapshot: Snapshot, section: Section, lease: Lease, size: int, kind: str) -> Stretch:
    return Stretch(
        clean(lease.name),
        size,
        kind,
        told(snapshot, section, lease, size, kind),
        notebook(section),
        label_of(lease.owner, lease.name),
    )


def notebook(section: Section) -> str:
    """`train.ipynb`, or `pid 4121` for what is no notebook."""
    owner = section.owner
    return clean(owner.notebook.rsplit("/", 1)[-1]) if owner.notebook else f"pid {owner.pid}"


def holder(section: Section) -> str:
    """`train.ipynb (pid 4121), ann`: who that is, whoever looks."""
    return clean(holder_label(section.owner))


def told(
    snapshot: Snapshot, section: Section, lease: Lease, size: int, kind: str = "settled"
) -> str:
    """What there is to know of a lease, in lines."""
    going = f", {kind}" if kind in ("arriving", "leaving") else ""
    lines = [
        f"{show_bytes(size)}{going}"
        + (
            f" of {show_bytes(lease.bytes)} on {lease.where}"
            if size != lease.bytes and not going
            else ""
        ),
        f"held by {holder(section)}",
    ]
    lines.append(_doing(lease, snapshot.now, notebook(section)))
    if section.busy_since:
        lines.append(f"its kernel has been busy for {lasting(snapshot.now - section.busy_since)}")
    elif section.idle_since:
        lines.append(f"its kernel has been idle for {lasting(snapshot.now - section.idle_since)}")
    what = (
        "memory for a block of code"
        if lease.kind == "block"
        else f"importance {importance_name(lease.importance)}"
    )
    lines.append(
        what.replace("importance importance", "importance")
        + (", pinned: it is never evicted" if lease.keep else "")
    )
    return "\n".join(lines)


def _doing(lease: Lease, now: float, who: str) -> str:
    """What a lease is doing: in steps of five seconds, so that a bar of idle models need not be sent each second."""
    doing = lease_state(lease, now)
    text = doing.text(lasting, least_seconds=5.0)
    if doing.activity != "in use":
        return text
    return f"{text} by {who}{f', {lease.pins} calls' if lease.pins > 1 else ''}"


def gathered(leases: Sequence[Stretch], scale: int) -> list[Stretch]:
    """The leases, the largest first; those too thin to be told apart as one, `12 others`.

    One alone is left as it is: to gather it would gain nothing.
    """
    thin = [
        n for n, one in enumerate(leases) if n >= MOST_STRETCHES or one.bytes < LEAST_PART * scale
    ]
    if len(thin) < 2:
        return list(leases)
    few = [leases[n] for n in thin]
    named = "\n".join(f"{one.title} {show_bytes(one.bytes)}, {one.who}" for one in few[:MOST_NAMED])
    more = f"\nand {len(few) - MOST_NAMED} more" if len(few) > MOST_NAMED else ""
    size = sum(one.bytes for one in few)
    others = Stretch(
        f"{len(few)} others", size, "others", f"{show_bytes(size)} in all\n{named}{more}"
    )
    return [one for n, one in enumerate(leases) if n not in set(thin)] + [others]


def _residue(snapshot: Snapshot, view: DeviceView) -> Stretch | None:
    rows = sorted(
        (
            (section.residue.get(view.device.id, 0), holder(section))
            for section in snapshot.sections.values()
        ),
        reverse=True,
    )
    size = sum(size for size, _ in rows)
    if not size:
        return None
    named = [f"{show_bytes(size)} {who}" for size, who in rows if size]
    return Stretch(
        RESIDUE,
        size,
        "residue",
        "\n".join(
            (
                f"{show_bytes(size)} that processes hold beyond their leases: CUDA context, reserved cache, own tensors",
                *_few(named),
            )
        ),
    )


def _strangers_told(snapshot: Snapshot, view: DeviceView, size: int) -> str:
    named = [
        f"{'size unknown' if one.bytes is None else show_bytes(one.bytes)} "
        f"{', '.join(clean(part) for part in (one.command, one.user, f'pid {one.pid}') if part)}"
        for one in snapshot.strangers
        if one.device == view.device.id
    ]
    return "\n".join((f"{show_bytes(size)} in use that nobody leased", *_few(named)))


def _few(lines: Sequence[str]) -> list[str]:
    more = len(lines) - MOST_NAMED
    return [*lines[:MOST_NAMED], *([f"and {more} more"] if more > 0 else [])]


# -- words --------------------------------------------------------------------------------------------------------


def room_words(view: DeviceView) -> str:
    """What may still be leased, in a few words."""
    if view.room_bytes is None:
        return f"free room unknown{f': {view.blind}' if view.blind else ''}"
    if view.room_bytes < 0:
        return f"over its budget by {show_bytes(-view.room_bytes)}"
    return f"{show_bytes(view.room_bytes)} free" if view.room_bytes else "no room free"


def facts(snapshot: Snapshot, view: DeviceView) -> list[str]:
    """What an operator should know of a device besides its bar, the most telling first."""
    said = [room_words(view), f"{fill(view)} leased"]
    idle = sum(
        share.bytes
        for lease in snapshot.leases()
        if _may_leave(lease)
        for share in lease.shares
        if share.device == view.device.id
    )
    if view.device.is_host:
        warm = sum(1 for lease in snapshot.leases() if lease.on_host and lease.kind == "model")
        said.append(f"{warm} warm model{'s' if warm != 1 else ''}")
    elif idle:
        said.append(f"{show_bytes(idle)} idle")
    if view.measured_bytes is None:
        said.append("not measured" if not view.device.is_host else "")
    elif not view.device.simulated and not view.device.is_host:
        said.append(f"{show_bytes(view.measured_bytes)} in use")
    if view.sample is not None and not view.device.is_host:
        sample = view.sample
        said += [
            f"{value:.0f} {unit}"
            for value, unit in (
                (sample.utilisation_percent, "% busy"),
                (sample.temperature_celsius, "°C"),
                (sample.power_watts, "W"),
            )
            if value is not None
        ]
    return [word for word in said if word]


def _may_leave(lease: Lease) -> bool:
    return (
        lease.kind == "model" and lease.phase is Phase.SETTLED and not lease.pins and not lease.keep
    )


def notices(snapshot: Snapshot, view: DeviceView) -> list[str]:
    """What is unusual about a device, each in a few words."""
    said = []
    if view.drained is not None:
        since = show_seconds(max(0.0, snapshot.wall - view.drained.wall))
        said.append(f"drained by {clean(view.drained.by)} {since} ago: it takes no new leases")
    if view.device.simulated and not snapshot.simulated:  # where all are, the header says so
        said.append("simulated")
    return said
