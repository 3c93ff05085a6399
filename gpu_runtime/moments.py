"""One look at the devices, as a line of their history.

Pure: what is told here is what a snapshot shows, of each device its use, its budget, and who claims what of it.
"""
from __future__ import annotations

from collections.abc import Iterable

from .facts import DeviceView, Moment, Section


def moments_of(views: Iterable[DeviceView], sections: Iterable[Section], wall: float) -> tuple[Moment, ...]:
    """A moment for each device."""
    claims: dict[str, dict[str, int]] = {}
    for section in sections:
        for lease in section.leases:
            label = f"{lease.name}@{section.owner.pid}"
            for share in lease.claims():
                here = claims.setdefault(share.device, {})
                here[label] = here.get(label, 0) + share.bytes
    return tuple(_moment(view, claims.get(view.device.id, {}), wall) for view in views)


def _moment(view: DeviceView, claims: dict[str, int], wall: float) -> Moment:
    device, sample = view.device, view.sample
    told = (None, None, None) if sample is None else (
        sample.utilisation_percent, sample.temperature_celsius, sample.power_watts)
    return Moment(wall, device.id, device.total_bytes, view.limit_bytes, view.measured_bytes, view.level, *told, claims)
