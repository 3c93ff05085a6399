"""The texts beside a device's bar: free memory, use, measurements, notices.

This module computes no totals. The totals of a device are computed in `scheduler.pressure.views`
and `scheduler.transitions.totals`. They reach the console through `owner.status.snapshot`.
"""

from __future__ import annotations

from gpu_runtime.facts import DeviceView, Lease, Phase, Snapshot
from gpu_runtime.rendering.views import clean, fill
from gpu_runtime.units import show_bytes, show_seconds


def room_words(view: DeviceView) -> str:
    """A short text on the bytes that can still be leased on the device of `view`."""
    if view.room_bytes is None:
        return f"free memory unknown: {view.blind}" if view.blind else "free memory unknown"
    if view.room_bytes < 0:
        return f"over its budget by {show_bytes(-view.room_bytes)}"
    return f"{show_bytes(view.room_bytes)} free" if view.room_bytes else "no memory free"


def facts(snapshot: Snapshot, view: DeviceView) -> list[str]:
    """Facts about the device of `view` for an operator, the most important first.

    `snapshot` gives the leases on it.
    """
    found = [room_words(view), f"{fill(view)} leased"]
    if view.device.is_host:
        warm = sum(lease.on_host and lease.kind == "model" for lease in snapshot.leases())
        found.append(f"{warm} warm model{'' if warm == 1 else 's'}")
        return found
    if idle := _idle_bytes(snapshot, view.device.id):
        found.append(f"{show_bytes(idle)} idle")
    if view.measured_bytes is None:
        found.append("not measured")
    elif not view.device.simulated:
        found.append(f"{show_bytes(view.measured_bytes)} in use")
    if view.sample is not None:
        measured = (
            (view.sample.utilisation_percent, "% busy"),
            (view.sample.temperature_celsius, "°C"),
            (view.sample.power_watts, "W"),
        )
        found += [f"{value:.0f} {unit}" for value, unit in measured if value is not None]
    return found


def _idle_bytes(snapshot: Snapshot, device: str) -> int:
    """The bytes on a device that could be evicted now."""
    evictable = [lease for lease in snapshot.leases() if _is_evictable(lease)]
    return sum(
        share.bytes for lease in evictable for share in lease.shares if share.device == device
    )


def _is_evictable(lease: Lease) -> bool:
    is_settled_model = lease.kind == "model" and lease.phase is Phase.SETTLED
    return is_settled_model and not lease.pins and not lease.keep


def notices(snapshot: Snapshot, view: DeviceView) -> list[str]:
    """Short texts on everything that is unusual about the device of `view` in `snapshot`."""
    found = []
    if view.drained is not None:
        since = show_seconds(max(0.0, snapshot.wall - view.drained.wall))
        found.append(f"drained by {clean(view.drained.by)} {since} ago: it takes no new leases")
    # If every device is simulated, the status bar shows that once for all of them.
    if view.device.simulated and not snapshot.simulated:
        found.append("simulated")
    return found
