"""The bytes on each device as a stacked bar, which shows how many bytes each process holds.

This module is pure. It computes sizes and tooltips; `device_rows.py` computes positions. The first stretches of a bar
are the claims in the book (all leases and requests of the host), exact to the byte. The last stretches are the measured
memory outside all leases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpu_runtime.facts import (
    KERNEL,
    OVER_CAP,
    Device,
    DeviceView,
    Lease,
    Section,
    Snapshot,
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
    LeasePart,
    clean,
    ended_bytes,
    lease_parts,
    strangers_bytes,
)
from gpu_runtime.units import show_bytes

from ..palette import label_of
from .row_parts import lasting, notebook_name, process_name

MOST_STRETCHES = 14  # leases in one bar; smaller leases share one stretch
LEAST_PART = 0.012  # fraction of a bar; all leases thinner than this share one stretch
MOST_NAMED = 6  # names in one tooltip; the others are counted


class Stretch(NamedTuple):
    """A part of a bar."""

    title: str  # such as `qwen`
    bytes: int
    kind: (
        str  # settled, arriving, leaving, others; residue, ended, strangers are outside all leases
    )
    tooltip: str = ""  # lines that describe the stretch
    notebook: str = ""  # such as `train.ipynb`; empty if the title is the notebook
    label: str = ""  # the key of the lease's style; empty for memory without a lease


class DeviceBar(NamedTuple):
    """The bar of one device: its stretches, and its budget."""

    device: Device
    stretches: tuple[Stretch, ...]
    limit_bytes: int

    @property
    def used_bytes(self) -> int:
        """The bytes of all stretches."""
        return sum(stretch.bytes for stretch in self.stretches)

    @property
    def scale_bytes(self) -> int:
        """The bytes that the full length of the bar stands for.

        The result is the largest of three: the size of the device, its bytes in use, and its budget.
        """
        return max(self.device.total_bytes, self.used_bytes, self.limit_bytes, 1)

    @property
    def description(self) -> str:
        """A description of the bar for screen readers."""
        parts = []
        for stretch in self.stretches:
            holder = f" of {stretch.notebook}" if stretch.notebook else ""
            parts.append(f"{stretch.title}{holder} {show_bytes(stretch.bytes)}")
        budget = f"budget {show_bytes(self.limit_bytes)}"
        return f"{self.device.id}: {', '.join(parts) or 'empty'}; {budget}"


def bars(snapshot: Snapshot) -> tuple[DeviceBar, ...]:
    """A bar for every device of `snapshot`."""
    return tuple(_bar(snapshot, view) for view in snapshot.devices)


def _bar(snapshot: Snapshot, view: DeviceView) -> DeviceBar:
    return DeviceBar(view.device, tuple(_stretches(snapshot, view)), view.limit_bytes)


# -- stretches -------------------------------------------------------------------------------------


def _stretches(snapshot: Snapshot, view: DeviceView) -> Iterator[Stretch]:
    leases = [_lease_stretch(snapshot, part) for part in lease_parts(snapshot, view)]
    leases.sort(key=lambda stretch: (-stretch.bytes, stretch.label, stretch.kind))
    yield from gathered(leases, max(view.device.total_bytes, view.claimed_bytes, 1))
    residue = _residue_stretch(snapshot, view)
    if residue:
        yield residue
    ended = ended_bytes(snapshot, view)
    if ended:
        tooltip = (
            f"{show_bytes(ended)}: held by processes that have ended; the driver does not report "
            "it free yet"
        )
        yield Stretch(ENDED, ended, "ended", tooltip)
    beyond = strangers_bytes(view)
    if beyond > 0:
        yield Stretch(STRANGERS, beyond, "strangers", _strangers_tooltip(snapshot, view, beyond))


def _lease_stretch(snapshot: Snapshot, part: LeasePart) -> Stretch:
    section, lease = part.section, part.lease
    label = label_of(lease.owner, lease.name)
    return Stretch(
        clean(lease_title(lease, section.owner)),
        part.bytes,
        part.kind,
        lease_tooltip(snapshot, section, lease, part.bytes, part.kind),
        "" if lease.kind == KERNEL else notebook_name(section),
        f"copy of {label}" if part.is_copy else label,
    )


def lease_tooltip(
    snapshot: Snapshot, section: Section, lease: Lease, size: int, kind: str = "settled"
) -> str:
    """Lines about the `lease` of a `section`: its bytes, its process, its use and its importance.

    `size` is the bytes of this stretch, and `kind` is `settled`, `arriving` or `leaving`.
    """
    moving = f", {kind}" if kind in ("arriving", "leaving") else ""
    is_part = size != lease.bytes and not moving
    whole = f" of {show_bytes(lease.bytes)} on {lease.where}" if is_part else ""
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
    if lease.importance == OVER_CAP:
        return "above the cap of its user: it leaves first when anybody waits"
    name = importance_name(lease.importance)  # `importance 7` for a number without a name
    return name if name.startswith("importance") else f"importance {name}"


def _use(lease: Lease, now: float, notebook: str) -> str:
    """A text on how the `lease` is used, for a tooltip.

    The durations in the text change in steps of five seconds, so that a bar of idle models is not sent
    every second.
    """
    state = lease_state(lease, now)
    text = state.text(lasting, least_seconds=5.0)
    if state.activity != "in use":
        return text
    calls = f", {lease.pins} calls" if lease.pins > 1 else ""
    return f"{text} by {notebook}{calls}"


def gathered(leases: Sequence[Stretch], scale: int) -> list[Stretch]:
    """The stretches `leases`, but those that are too thin are combined into one stretch, such as `12 others`.

    The largest of `leases` is first. `scale` is the bytes of the whole bar. A single thin lease keeps its own stretch.
    """
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


def _residue_stretch(snapshot: Snapshot, view: DeviceView) -> Stretch | None:
    """The stretch of the bytes that processes hold beyond their leases. None if there are no such bytes."""
    held = sorted(
        (
            (size, process_name(section), section)
            for section in snapshot.sections.values()
            if (size := section.residue.get(view.device.id, 0))
        ),
        key=lambda one: (-one[0], one[1]),
    )
    size = sum(size for size, _, _ in held)
    if not size:
        return None
    is_cache = any(section.cache_on(view.device.id) for _, _, section in held)
    beyond = "CUDA context, reserved cache, own tensors" if is_cache else "it cannot be parked"
    title = f"{show_bytes(size)} that processes hold beyond their leases: {beyond}"
    named = []
    for size_there, process, section in held:
        whys = [f" ({clean(one.words())})" for one in section.staying_on(view.device.id)]
        named.append(f"{show_bytes(size_there)} {process}{''.join(whys)}")
    label = RESIDUE if is_cache else STAYS
    return Stretch(label, size, "residue", "\n".join([title, *_first(named)]))


def _strangers_tooltip(snapshot: Snapshot, view: DeviceView, size: int) -> str:
    named = []
    for stranger in snapshot.strangers:
        if stranger.device == view.device.id:
            held = "size unknown" if stranger.bytes is None else show_bytes(stranger.bytes)
            parts = (stranger.command, stranger.user, f"pid {stranger.pid}")
            named.append(f"{held} {', '.join(clean(part) for part in parts if part)}")
    return "\n".join([f"{show_bytes(size)} in use without a lease", *_first(named)])


def _first(lines: Sequence[str]) -> list[str]:
    """The first MOST_NAMED of `lines`, and one more line with the number of the remaining lines."""
    more = len(lines) - MOST_NAMED
    counted = [f"and {more} more"] if more > 0 else []
    return [*lines[:MOST_NAMED], *counted]
