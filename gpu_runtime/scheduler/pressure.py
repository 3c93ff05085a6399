"""How full a device is, in four levels, and what each level asks for.

Pure. The levels and their table are those of the Semantik governor; when the table is applied is the planner's
to decide (`GPU_RELIEF`).
"""

from __future__ import annotations

from collections.abc import Mapping

from ..facts import Book, Device, DeviceView, Level, Rules, Sample, Value, World


class Relief(Value):
    """What a level asks for: models idle for longer than `idle_seconds` leave, to the host or for good."""

    idle_seconds: float
    may_drop: bool  # where offloading is impossible
    drop: bool  # do not even try to offload


def level(pressure: float, rules: Rules) -> Level:
    """LOW < 60 % ≤ MODERATE < 80 % ≤ HIGH < 90 % ≤ CRITICAL, with the default rules."""
    if pressure >= rules.critical:
        return Level.CRITICAL
    if pressure >= rules.high:
        return Level.HIGH
    return Level.MODERATE if pressure >= rules.moderate else Level.LOW


def relief(at: Level, rules: Rules) -> Relief | None:
    """What the level asks for, to the letter of the table; None at LOW."""
    return {
        Level.MODERATE: Relief(rules.idle_moderate_seconds, may_drop=False, drop=False),
        Level.HIGH: Relief(rules.idle_high_seconds, may_drop=True, drop=False),
        Level.CRITICAL: Relief(0.0, may_drop=True, drop=True),
    }.get(at)


def pressure(claimed: int, limit: int, used: int | None, total: int) -> float:
    """The larger of claimed / usable and measured / total; 0 to 1, beyond it in an overdraft.

    >>> pressure(claimed=9_000, limit=14_400, used=None, total=16_000)
    0.625
    """
    shares = [claimed / limit if limit else float(claimed > 0)]
    if used is not None and total:
        shares.append(used / total)
    return max(shares)


def sample_of(device: Device, book: Book, world: World) -> Sample | None:
    """The newest measurement of a device, ours or another owner's; None for simulated ones, where the book is it."""
    mine, theirs = world.samples.get(device.id), book.samples.get(device.id)
    if mine is None or theirs is None:
        return mine or theirs
    return mine if mine.taken_at >= theirs.taken_at else theirs


def used_bytes(device: Device, sample: Sample | None, claimed: Mapping[str, int]) -> int | None:
    """Bytes in use as measured; None where the driver would not say."""
    if device.simulated:
        return claimed.get(device.id, 0)
    if sample is None or sample.free_bytes is None:
        return None
    return max(0, device.total_bytes - sample.free_bytes)


def views(book: Book, world: World) -> tuple[DeviceView, ...]:
    """Every device with its budget, its claims, what is measured, and its level."""
    claims = book.claims()
    rows = []
    for device in world.devices:
        limit = min(world.limits[device.id], book.limits.get(device.id, world.limits[device.id]))
        sample = sample_of(device, book, world)
        used = used_bytes(device, sample, claims)
        full = pressure(claims.get(device.id, 0), limit, used, device.total_bytes)
        residue = sum(section.residue.get(device.id, 0) for section in book.sections.values())
        rows.append(
            DeviceView(
                device,
                limit,
                claims.get(device.id, 0),
                used,
                level(full, world.rules),
                full,
                sample,
                residue,
                drained=book.drained.get(device.key),
            )
        )
    return tuple(rows)
