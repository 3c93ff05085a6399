"""Where a footprint may go, given the room on each device.

Pure. A candidate that does not fit is kept, with the reason: `plan` shows it, and the planner tries to make room on it.
"""
from __future__ import annotations

from collections.abc import Mapping

from .errors import BadSetting
from .facts import Candidate, Footprint, PlacementRules, Share
from .units import show_bytes

PLACEMENTS = ("best-fit", "most-free")


def check_policy(name: str) -> str:
    """The placement policy's name. Raises BadSetting."""
    if name not in PLACEMENTS:
        raise BadSetting("GPU_PLACEMENT", name, f"one of {', '.join(PLACEMENTS)}")
    return name


def place(footprint: Footprint, room: Mapping[str, int], rules: PlacementRules) -> tuple[Candidate, ...]:
    """One candidate a device, the best first: those that fit, by policy; then those that do not, the nearest first.

    `room` is bytes free to grant, by device id; devices are taken in its order where nothing else decides.
    """
    size = footprint.bytes
    allowed = [device for device in room if not rules.devices or device in rules.devices]
    sign = 1 if rules.policy == "best-fit" else -1
    order = sorted(allowed, key=lambda d: (room[d] < size, sign * room[d] if room[d] >= size else -room[d]))
    return tuple([Candidate((Share(d, size),), room[d] >= size, _because(d, size, room[d], rules)) for d in order])


def _because(device: str, size: int, free: int, rules: PlacementRules) -> str:
    if free < size:
        free = max(free, 0)
        return f"{device} has {show_bytes(free)} free, {show_bytes(size - free)} too little"
    if rules.policy == "best-fit":
        return f"{device} has {show_bytes(free)} free and would keep {show_bytes(free - size)}"
    return f"{device} has the most free: {show_bytes(free)}"
