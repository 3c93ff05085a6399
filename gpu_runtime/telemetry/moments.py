"""Moments: the entries of the devices' history.

This module is pure. A moment has the figures of one device at one time: its used bytes, its budget,
and the leases' claims on the device.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..facts import DeviceView, Moment, Section


def moments_of(
    views: Iterable[DeviceView], sections: Iterable[Section], wall: float
) -> tuple[Moment, ...]:
    """A moment of each device in `views` at the time `wall`, with the leases' claims."""
    claims: dict[str, dict[str, int]] = {}
    for section in sections:
        for lease in section.leases:
            label = f"{lease.name}@{section.owner.pid}"
            for share in lease.claims():
                on_device = claims.setdefault(share.device, {})
                on_device[label] = on_device.get(label, 0) + share.bytes
    return tuple(_moment(view, claims.get(view.device.id, {}), wall) for view in views)


def _moment(view: DeviceView, claims: dict[str, int], wall: float) -> Moment:
    device, sample = view.device, view.sample
    return Moment(
        wall,
        device.id,
        device.total_bytes,
        view.limit_bytes,
        view.measured_bytes,
        view.level,
        utilisation_percent=sample.utilisation_percent if sample else None,
        temperature_celsius=sample.temperature_celsius if sample else None,
        power_watts=sample.power_watts if sample else None,
        claims=claims,
    )


def alike(one: Moment, other: Moment) -> bool:
    """Whether `one` and `other` look the same in a chart.

    Two moments look the same if their total, limit, level and claims are equal, and the measured
    figures differ only by noise.
    """
    if _exact(one) != _exact(other):
        return False
    return (
        _near(one.measured_bytes, other.measured_bytes, one.total_bytes / 400)
        and _near(one.utilisation_percent, other.utilisation_percent, 5.0)
        and _near(one.temperature_celsius, other.temperature_celsius, 2.0)
        and _near(one.power_watts, other.power_watts, 10.0)
    )


def _exact(moment: Moment) -> tuple[object, ...]:
    """The figures of the `moment` that are compared exactly: even a small change is recorded."""
    return moment.total_bytes, moment.limit_bytes, moment.level, moment.claims


def _near(one: float | None, other: float | None, tolerance: float) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) <= tolerance


class ChangeFilter:
    """Selects the moments to record: every changed moment, and now and then an unchanged moment.

    A moment is changed if it differs from the last recorded moment of its device. The last
    unchanged moment before a change is recorded too. Without this unchanged moment, the chart would
    draw a slope where there was a step.
    """

    def __init__(self, rest_seconds: float) -> None:
        """While nothing changes, one moment of each device is recorded every `rest_seconds`."""
        self._rest_seconds = rest_seconds
        self._kept: dict[str, Moment] = {}  # by device
        self._skipped: dict[str, Moment] = {}  # the last moment that was not kept, by device

    def select(self, moments: Iterable[Moment]) -> list[Moment]:
        """The moments to record, in order.

        Besides some of `moments`, the result may have moments that an earlier call skipped.
        """
        rows: list[Moment] = []
        for moment in moments:
            kept = self._kept.get(moment.device)
            skipped = self._skipped.pop(moment.device, None)
            if kept is not None and self._may_skip(kept, moment):
                self._skipped[moment.device] = moment
                continue
            if skipped is not None and not alike(skipped, moment):
                rows.append(skipped)
            rows.append(moment)
            self._kept[moment.device] = moment
        return rows

    def _may_skip(self, kept: Moment, moment: Moment) -> bool:
        return alike(kept, moment) and moment.wall - kept.wall < self._rest_seconds
