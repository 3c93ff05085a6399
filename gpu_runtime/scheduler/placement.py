"""Where a footprint may go, given the room on each device: one card first; how it is divided is `splitting.py`'s.

Pure. A candidate that does not fit is kept, with the reason: `plan` shows it, and the planner tries to make room on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil

from ..errors import BadSetting
from ..facts import Candidate, Footprint, PlacementRules, Share, Shares
from ..units import show_bytes, show_seconds
from .splitting import could_split, one_card_may_do, split

PLACEMENTS = ("best-fit", "most-free", "fewest-evictions")
LAYOUTS = ("auto", "single", "balanced", "proportional", "whole")


def check_policy(name: str) -> str:
    """The placement policy's name. Raises BadSetting."""
    if name not in PLACEMENTS:
        raise BadSetting("GPU_PLACEMENT", name, f"one of {', '.join(PLACEMENTS)}")
    return name


def check_layout(name: str) -> str:
    """The name of a layout. Raises BadSetting."""
    if name not in LAYOUTS:
        raise BadSetting("layout", name, f"one of {', '.join(LAYOUTS)}")
    return name


def place(
    footprint: Footprint,
    room: Mapping[str, int],
    rules: PlacementRules,
    limits: Mapping[str, int] | None = None,
) -> tuple[Candidate, ...]:
    """The ways to place it, the best first: those that fit, by policy; then those that do not, the nearest first.

    `room` is bytes free to grant, by device id; devices are taken in its order where nothing else decides. `limits` are
    their budgets: what a whole card is. Several cards are looked at only where no card alone has the room.
    """
    limits = room if limits is None else limits
    alone = on_one_card(footprint, room, rules, limits) if one_card_may_do(rules) else ()
    if (alone and alone[0].fits) or not could_split(rules):
        return alone
    return split(footprint, room, rules, limits) + alone


def on_one_card(
    footprint: Footprint, room: Mapping[str, int], rules: PlacementRules, limits: Mapping[str, int]
) -> tuple[Candidate, ...]:
    """One candidate a device; in order as those of `place`."""
    size = footprint.bytes
    allowed = [device for device in room if not rules.devices or device in rules.devices]
    if rules.card_bytes or not claims_no_more(rules):
        return _claiming_more(footprint, allowed, room, rules, limits)
    sign = -1 if rules.policy == "most-free" else 1
    order = sorted(
        allowed, key=lambda d: (room[d] < size, sign * room[d] if room[d] >= size else -room[d])
    )
    return tuple(
        [
            Candidate((Share(d, size),), room[d] >= size, _because(d, size, room[d], rules))
            for d in order
        ]
    )


def _claiming_more(
    footprint: Footprint,
    allowed: Iterable[str],
    room: Mapping[str, int],
    rules: PlacementRules,
    limits: Mapping[str, int],
) -> tuple[Candidate, ...]:
    """The same where a card may be asked for more than the model fills, or may give less than it has."""
    found = []
    for device in allowed:
        size = claim(footprint, rules, limits.get(device, 0))
        own = (Share(device, footprint.bytes),) if size != footprint.bytes else ()
        most = (
            min(room[device], rules.card_bytes.get(device, 0)) if rules.card_bytes else room[device]
        )
        because = (
            f"{device} is free and would be taken whole"
            if most >= size == limits.get(device) and own
            else _because(device, size, most, rules)
        )
        found.append(Candidate((Share(device, size),), most >= size, because, filled=own))
    sign = -1 if rules.policy == "most-free" else 1
    return tuple(
        sorted(
            found, key=lambda c: (not c.fits, (sign if c.fits else -1) * room[c.shares[0].device])
        )
    )


def claims_no_more(rules: PlacementRules) -> bool:
    """Whether a single card is never asked for more than the footprint itself."""
    return rules.layout != "whole" and not rules.factor


def claim(footprint: Footprint, rules: PlacementRules, limit: int) -> int:
    """The bytes that the footprint claims of a single card with this budget; more than the budget: it does not fit.

    With a factor, NDIF's rule: a share of the weights times the factor where that is less than the given fraction of
    the card, else the whole card. Without one the estimate itself, which knows the KV cache and the rest by name.

    >>> rules = PlacementRules(factor=3.0, largest_fraction=0.8)
    >>> [claim(Footprint.of(size), rules, 80) for size in (10, 21, 22, 90)]
    [30, 63, 80, 90]
    """
    size = footprint.bytes
    if claims_no_more(rules):
        return size
    if rules.layout == "whole":
        return max(size, limit)
    weights = sum(part.bytes for part in footprint.parts if part.name == "weights") or size
    wanted = max(size, ceil(weights * rules.factor))
    return wanted if wanted < rules.largest_fraction * limit else max(size, limit)


def _because(device: str, size: int, free: int, rules: PlacementRules) -> str:
    if free < size:
        free = max(free, 0)
        return f"{device} has {show_bytes(free)} free, {show_bytes(size - free)} too little"
    if rules.policy == "most-free":
        return f"{device} has the most free: {show_bytes(free)}"
    return f"{device} has {show_bytes(free)} free and would keep {show_bytes(free - size)}"


# -- why the others lost ------------------------------------------------------------------------------------------


def runners_up(
    considered: Iterable[Candidate], taken: Shares, rules: PlacementRules
) -> tuple[Candidate, ...]:
    """What was considered, the chosen way first, each of the others with the reason it lost."""
    listed = list(considered)
    chosen = next((c for c in listed if _cards(c.shares) == _cards(taken)), None)
    if chosen is None:
        return tuple(listed)
    others = [
        Candidate(c.shares, c.fits, _why_not(c, chosen, rules), c.victims, c.cost_seconds, c.filled)
        for c in listed
        if c is not chosen
    ]
    return chosen, *others


def _cards(shares: Shares) -> tuple[str, ...]:
    return tuple(share.device for share in shares)


def _why_not(other: Candidate, chosen: Candidate, rules: PlacementRules) -> str:
    if other.victims:
        who = ", ".join(id.partition("/")[2] for id in other.victims)
        if not chosen.victims:
            return f"{who} would have to step aside"
        theirs, ours = show_seconds(other.cost_seconds), show_seconds(chosen.cost_seconds)
        if other.cost_seconds > chosen.cost_seconds + 0.1 and theirs != ours:
            return f"{who} would have to step aside, and take {theirs} to load again, not {ours}"
        if len(other.victims) > len(chosen.victims):
            return (
                f"{len(other.victims)} would have to step aside, not {len(chosen.victims)}: {who}"
            )
        if len(other.shares) > len(chosen.shares):
            return f"{who} would have to step aside, and it would take {_count(other)}, not {len(chosen.shares)}"
        return f"{who} would have to step aside, and should stay longer"
    if not other.fits:
        return other.because
    if len(other.shares) > len(chosen.shares):
        return f"it would take {_count(other)}, not {len(chosen.shares)}"
    if len(other.shares) > 1:
        return "another set of cards comes first"
    told = other.because.removeprefix(f"{other.shares[0].device} ")
    if rules.policy == "most-free":
        return (
            f"{told.removeprefix('has the most free: ')} free, less than {chosen.shares[0].device}"
        )
    return f"{told}, more than {chosen.shares[0].device}"


def _count(candidate: Candidate) -> str:
    return f"{len(candidate.shares)} card{'s' if len(candidate.shares) > 1 else ''}"
