"""Computes how full a device is, in four levels, and which idle models each level evicts.

Pure. The levels and the table of idle times come from Semantik (see `gpu_runtime.presets`). `relief.py`
decides when the table is applied (`GPU_RELIEF`).
"""

from __future__ import annotations

from collections.abc import Mapping

from ..facts import Book, Device, DeviceView, Level, Rules, Sample, Value, World


class Relief(Value):
    """The rule of a level: evict models that were idle for more than `idle_seconds`."""

    idle_seconds: float
    may_drop: bool  # drop models that cannot be offloaded
    drop: bool  # drop without trying to offload


def level(pressure: float, rules: Rules) -> Level:
    """The level of a `pressure` (1.0 is full), with the thresholds of `rules`.

    By default: LOW < 60 % ≤ MODERATE < 80 % ≤ HIGH < 90 % ≤ CRITICAL.
    """
    if pressure >= rules.critical:
        return Level.CRITICAL
    if pressure >= rules.high:
        return Level.HIGH
    if pressure >= rules.moderate:
        return Level.MODERATE
    return Level.LOW


def relief(at: Level, rules: Rules) -> Relief | None:
    """The rule of the level `at`, with the idle times of `rules`; None at LOW and UNKNOWN."""
    if at is Level.CRITICAL:
        return Relief(0.0, may_drop=True, drop=True)
    if at is Level.HIGH:
        return Relief(rules.idle_high_seconds, may_drop=True, drop=False)
    if at is Level.MODERATE:
        return Relief(rules.idle_moderate_seconds, may_drop=False, drop=False)
    return None


def pressure(claimed: int, limit: int, used: int | None, total: int) -> float:
    """The larger of `claimed` / `limit` and `used` / `total`; above 1 in an overdraft.

    All four numbers are bytes. `used` is None if the driver gives no number.

    >>> pressure(claimed=9_000, limit=14_400, used=None, total=16_000)
    0.625
    """
    claimed_part = claimed / limit if limit else float(claimed > 0)
    if used is None or not total:
        return claimed_part
    return max(claimed_part, used / total)


def sample_of(device: Device, book: Book, world: World) -> Sample | None:
    """The newest known measurement of `device`.

    This owner's own measurements are in `world`, and shared measurements are in `book`. The result
    is None if neither has this device. A simulated device is never measured.
    """
    mine = world.samples.get(device.id)
    theirs = book.samples.get(device.id)
    if mine is None or theirs is None:
        return mine or theirs
    return mine if mine.taken_at >= theirs.taken_at else theirs


def used_bytes(device: Device, sample: Sample | None, claimed: Mapping[str, int]) -> int | None:
    """Bytes in use on `device` as measured by `sample`; None if the driver gives no number.

    `claimed` maps device ids to bytes. For a simulated device, the result is the claimed bytes.
    """
    if device.simulated:
        return claimed.get(device.id, 0)
    if sample is None or sample.free_bytes is None:
        return None
    return max(0, device.total_bytes - sample.free_bytes)


def views(book: Book, world: World) -> tuple[DeviceView, ...]:
    """Every device of `world` with its budget, its claims in `book`, used bytes and level."""
    claims = book.claims()
    return tuple(_view(device, claims.get(device.id, 0), book, world) for device in world.devices)


def _view(device: Device, claimed: int, book: Book, world: World) -> DeviceView:
    own_limit = world.limits[device.id]
    limit = min(own_limit, book.limits.get(device.id, own_limit))
    sample = sample_of(device, book, world)
    used = used_bytes(device, sample, {device.id: claimed})
    full = pressure(claimed, limit, used, device.total_bytes)
    residue = sum(section.residue.get(device.id, 0) for section in book.sections.values())
    return DeviceView(
        device=device,
        limit_bytes=limit,
        claimed_bytes=claimed,
        measured_bytes=used,
        level=level(full, world.rules),
        pressure=full,
        sample=sample,
        residue_bytes=residue,
        drained=book.drained.get(device.key),
    )
