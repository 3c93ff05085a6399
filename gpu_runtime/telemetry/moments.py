"""One look at the devices, as a line of their history.

Pure: what is told here is what a snapshot shows, of each device its use, its budget, and who claims what of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..facts import DeviceView, Moment, Section


def moments_of(
    views: Iterable[DeviceView], sections: Iterable[Section], wall: float
) -> tuple[Moment, ...]:
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
    told = (
        (None, None, None)
        if sample is None
        else (sample.utilisation_percent, sample.temperature_celsius, sample.power_watts)
    )
    return Moment(
        wall,
        device.id,
        device.total_bytes,
        view.limit_bytes,
        view.measured_bytes,
        view.level,
        *told,
        claims,
    )


def alike(one: Moment, other: Moment) -> bool:
    """Whether a chart would show no difference: the same leases, and figures of the driver that merely tremble."""
    if (one.total_bytes, one.limit_bytes, one.level, one.claims) != (
        other.total_bytes,
        other.limit_bytes,
        other.level,
        other.claims,
    ):
        return False
    return all(
        _near(a, b, by)
        for a, b, by in (
            (one.measured_bytes, other.measured_bytes, one.total_bytes / 400),
            (one.utilisation_percent, other.utilisation_percent, 5.0),
            (one.temperature_celsius, other.temperature_celsius, 2.0),
            (one.power_watts, other.power_watts, 10.0),
        )
    )


def _near(one: float | None, other: float | None, by: float) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) <= by


class Telling:
    """Which moments of a device are worth keeping: those that differ from the last one kept, and one in a while.

    Before one that differs the last of those that did not is kept as well, so that a change is no slope.
    """

    def __init__(self, rest_seconds: float) -> None:
        self._rest_seconds = rest_seconds
        self._kept: dict[str, Moment] = {}
        self._passed: dict[str, Moment] = {}  # the last that was not kept

    def worth(self, moments: Iterable[Moment]) -> list[Moment]:
        """Of these moments of now, and the ones before them, those to keep; in order for each device."""
        rows: list[Moment] = []
        for moment in moments:
            kept, passed = self._kept.get(moment.device), self._passed.pop(moment.device, None)
            if (
                kept is not None
                and alike(kept, moment)
                and moment.wall - kept.wall < self._rest_seconds
            ):
                self._passed[moment.device] = moment
                continue
            if passed is not None and not alike(passed, moment):
                rows.append(passed)
            rows.append(moment)
            self._kept[moment.device] = moment
        return rows
