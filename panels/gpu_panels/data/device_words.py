"""The texts beside a device's bar: free memory, use, measurements, notices.

This module computes no totals. The totals of a device are computed in `scheduler.pressure.views` and
`scheduler.transitions.totals`. The console reads them from `owner.status.snapshot`.
"""

from __future__ import annotations

from gpu_runtime.facts import DeviceView, Level, Snapshot
from gpu_runtime.rendering.views import clean, fill, warm_pool
from gpu_runtime.units import show_bytes, show_seconds

from .confirmations import is_idle, is_idle_notebook
from .row_parts import why_no_answer


def room_words(view: DeviceView, kept_bytes: int = 0) -> str:
    """A short text on the bytes that can still be leased on the device of `view`.

    Of the bytes that can be leased, `kept_bytes` are reserved for requests that wait.
    """
    if view.room_bytes is None:
        return f"free memory unknown: {view.blind}" if view.blind else "free memory unknown"
    if view.room_bytes < 0:
        return f"over its budget by {show_bytes(-view.room_bytes)}"
    free = max(0, view.room_bytes - kept_bytes)
    return f"{show_bytes(free)} free" if free else "no memory free"


def facts(snapshot: Snapshot, view: DeviceView) -> list[str]:
    """Facts about the device of `view` for an operator. The most important fact is first.

    `snapshot` gives the leases on the device.
    """
    found = [room_words(view), f"{fill(view)} leased"]
    if view.device.is_host:
        found.append(warm_pool(snapshot))
    elif idle := _idle_bytes(snapshot, view.device.id):
        found.append(f"{show_bytes(idle)} idle")
    if view.measured_bytes is None:
        found += [] if view.device.is_host else ["not measured"]
    elif abs(view.measured_bytes - view.claimed_bytes) > view.device.total_bytes // 100:
        found.append(f"{show_bytes(view.measured_bytes)} in use")
    return found


def level(view: DeviceView) -> tuple[str, str]:
    """The level of pressure on the card of `view`, such as `HIGH`, and what it means. Empty texts if it is unknown."""
    if view.device.is_host or view.level is Level.UNKNOWN:
        return "", ""
    percent = f"{100 * view.pressure:.0f} %"
    return (
        view.level.value,
        f"{percent} of what may be used: leased of the budget, or measured of the card",
    )


def figures(view: DeviceView) -> tuple[str, str, str]:
    """The utilisation, the temperature and the power of the card of `view`. An unknown figure is an empty text."""
    if view.sample is None:
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


def notices(snapshot: Snapshot, view: DeviceView) -> list[str]:
    """Short texts on each unusual state of the device of `view` in `snapshot`."""
    found = []
    if view.drained is not None:
        since = show_seconds(max(0.0, snapshot.wall - view.drained.wall))
        found.append(f"drained by {clean(view.drained.by)} {since} ago: it takes no new leases")
    # If every device is simulated, the status bar shows that once for all of them.
    if view.device.simulated and not snapshot.simulated:
        found.append("simulated")
    return found
