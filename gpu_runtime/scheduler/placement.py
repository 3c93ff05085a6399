"""Finds the device for a model from the devices' free bytes. One card is preferred to several.

Pure. A candidate that does not fit is returned with the reason. `plan` shows such a candidate, and
`eviction` tries to make room on its card. `splitting` decides how a model is divided over several
cards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil

from msgspec.structs import replace

from ..errors import BadSetting
from ..facts import Candidate, Footprint, PlacementRules, Share, Shares
from ..units import show_bytes, show_seconds
from .splitting import may_split, may_use_one_card, split

PLACEMENTS = ("best-fit", "most-free", "fewest-evictions")
LAYOUTS = ("auto", "single", "balanced", "proportional", "whole")

Bytes = Mapping[str, int]  # by device id


def check_policy(name: str) -> str:
    """Returns `name` if it is the name of a placement policy. Raises BadSetting for other names."""
    if name not in PLACEMENTS:
        raise BadSetting("GPU_PLACEMENT", name, f"one of {', '.join(PLACEMENTS)}")
    return name


def check_layout(name: str) -> str:
    """Returns `name` if it is the name of a layout. Raises BadSetting for other names."""
    if name not in LAYOUTS:
        raise BadSetting("layout", name, f"one of {', '.join(LAYOUTS)}")
    return name


def place(
    footprint: Footprint,
    room: Bytes,
    rules: PlacementRules,
    limits: Bytes | None = None,
) -> tuple[Candidate, ...]:
    """The candidates for the `footprint`: first candidates that fit, then candidates that do not.

    Each group starts with its best candidate. Several cards are tried only if no single card has
    the room, or if `rules` require several cards.

    `room` is the bytes that may be granted, by device id. The order of `room` decides between equal
    devices. `limits` are the devices' budgets in bytes; a claim on a whole card has this size. If
    `limits` is None, `room` is used. The `rules` name the policy, layout and allowed devices.
    """
    limits = room if limits is None else limits
    alone = on_one_card(footprint, room, rules, limits) if may_use_one_card(rules) else ()
    if alone and alone[0].fits:
        return alone
    if not may_split(rules):
        return alone
    return split(footprint, room, rules, limits) + alone


def on_one_card(
    footprint: Footprint,
    room: Bytes,
    rules: PlacementRules,
    limits: Bytes,
) -> tuple[Candidate, ...]:
    """One candidate for each device. The order and the parameters are as in `place`."""
    size = footprint.bytes
    allowed = [device for device in room if not rules.devices or device in rules.devices]
    if rules.card_bytes or not claims_footprint_only(rules):
        return _claiming_more(footprint, allowed, room, rules, limits)
    sign = -1 if rules.policy == "most-free" else 1

    def key(device: str) -> tuple[bool, int]:
        free = room[device]
        return (True, -free) if free < size else (False, sign * free)

    found = []
    for device in sorted(allowed, key=key):
        because = _because(device, size, room[device], rules)
        found.append(Candidate((Share(device, size),), room[device] >= size, because))
    return tuple(found)


def _claiming_more(
    footprint: Footprint,
    allowed: Iterable[str],
    room: Bytes,
    rules: PlacementRules,
    limits: Bytes,
) -> tuple[Candidate, ...]:
    """The candidates of `on_one_card` for rules that limit a card's bytes, or claim extra bytes."""
    found = []
    for device in allowed:
        limit = limits.get(device, 0)
        found.append(_claimed_candidate(footprint, device, room[device], rules, limit))
    sign = -1 if rules.policy == "most-free" else 1

    def key(candidate: Candidate) -> tuple[bool, int]:
        free = room[candidate.shares[0].device]
        return (False, sign * free) if candidate.fits else (True, -free)

    return tuple(sorted(found, key=key))


def _claimed_candidate(
    footprint: Footprint,
    device: str,
    free: int,
    rules: PlacementRules,
    limit: int,
) -> Candidate:
    size = claim(footprint, rules, limit)
    filled = (Share(device, footprint.bytes),) if size != footprint.bytes else ()
    if rules.card_bytes:
        free = min(free, rules.card_bytes.get(device, 0))
    fits = free >= size
    if fits and filled and size == limit:
        because = f"{device} is free and would be taken whole"
    else:
        because = _because(device, size, free, rules)
    return Candidate((Share(device, size),), fits, because, filled=filled)


def claims_footprint_only(rules: PlacementRules) -> bool:
    """Whether these `rules` never claim more of a single card than the footprint itself."""
    return rules.layout != "whole" and not rules.factor


def claim(
    footprint: Footprint,
    rules: PlacementRules,
    limit: int,
) -> int:
    """Bytes that the `footprint` claims of one card with the budget `limit`, in bytes.

    A result above `limit` means that the model cannot fit. With the layout `whole`, the claim is
    the whole card. Without a factor in the `rules`, the claim is the estimate in `footprint`. With
    a factor, NDIF's rule applies: the claim is the weights times `rules.factor`. If this product is
    at least `rules.largest_fraction` of the card, the claim is the whole card. The claim is never
    below the estimate.

    >>> rules = PlacementRules(factor=3.0, largest_fraction=0.8)
    >>> [claim(Footprint.of(size), rules, 80) for size in (10, 21, 22, 90)]
    [30, 63, 80, 90]
    """
    size = footprint.bytes
    if claims_footprint_only(rules):
        return size
    if rules.layout == "whole":
        return max(size, limit)
    weights = sum(part.bytes for part in footprint.parts if part.name == "weights") or size
    wanted = max(size, ceil(weights * rules.factor))
    if wanted < rules.largest_fraction * limit:
        return wanted
    return max(size, limit)


def _because(
    device: str,
    size: int,
    free: int,
    rules: PlacementRules,
) -> str:
    if free < size:
        free = max(free, 0)
        missing = show_bytes(size - free)
        return f"{device} has {show_bytes(free)} free, {missing} too little"
    if rules.policy == "most-free":
        return f"{device} has the most free: {show_bytes(free)}"
    rest = show_bytes(free - size)
    return f"{device} has {show_bytes(free)} free and would keep {rest}"


# -- why the other candidates were not chosen ------------------------------------------------------


def runners_up(
    considered: Iterable[Candidate],
    taken: Shares,
    rules: PlacementRules,
) -> tuple[Candidate, ...]:
    """The `considered` candidates: the chosen candidate first, then all others with a reason.

    The reason states why the candidate was not chosen. `taken` are the chosen shares. If no
    candidate is on the cards of `taken`, the candidates are returned as they are. `rules` are the
    rules of the choice.
    """
    listed = list(considered)
    cards = _cards(taken)
    chosen = next((c for c in listed if _cards(c.shares) == cards), None)
    if chosen is None:
        return tuple(listed)
    others = []
    for candidate in listed:
        if candidate is not chosen:
            because = _why_not(candidate, chosen, rules)
            others.append(replace(candidate, because=because))
    return chosen, *others


def _cards(shares: Shares) -> tuple[str, ...]:
    return tuple(share.device for share in shares)


def _why_not(
    other: Candidate,
    chosen: Candidate,
    rules: PlacementRules,
) -> str:
    if other.victims:
        return _why_not_evict(other, chosen, rules)
    if not other.fits:
        return other.because
    if len(other.shares) > len(chosen.shares):
        return f"it would take {_count(other)}, not {len(chosen.shares)}"
    if len(other.shares) > 1:
        return "another set of cards comes first"
    chosen_device = chosen.shares[0].device
    room = other.because.removeprefix(f"{other.shares[0].device} ")
    if rules.policy == "most-free":
        return f"{room.removeprefix('has the most free: ')} free, less than {chosen_device}"
    return f"{room}, more than {chosen_device}"


def _why_not_evict(other: Candidate, chosen: Candidate, rules: PlacementRules) -> str:
    """Why `chosen` is better than the candidate `other`, which evicts leases."""
    names = ", ".join(id.partition("/")[2] for id in other.victims)
    head = f"{names} would be evicted"
    if not chosen.victims:
        return head
    fewest = rules.policy == "fewest-evictions" and len(other.victims) > len(chosen.victims)
    if other.worth > chosen.worth and not fewest:
        return f"{head}, and should stay longer"
    other_seconds, chosen_seconds = other.cost_seconds, chosen.cost_seconds
    shown, shown_chosen = show_seconds(other_seconds), show_seconds(chosen_seconds)
    if other_seconds > chosen_seconds + 0.1 and shown != shown_chosen:
        return f"{head}, and would take {shown} to load again, not {shown_chosen}"
    if len(other.victims) > len(chosen.victims):
        return f"{len(other.victims)} would be evicted, not {len(chosen.victims)}: {names}"
    if len(other.shares) > len(chosen.shares):
        return f"{head}, and it would take {_count(other)}, not {len(chosen.shares)}"
    return f"{head}, and should stay longer"


def _count(candidate: Candidate) -> str:
    count = len(candidate.shares)
    return f"{count} card{'s' if count > 1 else ''}"
