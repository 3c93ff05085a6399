"""Whether a request can be served at all.

Pure. A request that can never fit is refused at once, and nothing is evicted for it. `never` holds the cards that can
never take it alone, each with the reason. If it may be divided, the room of several cards together counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from msgspec.structs import replace

from ..facts import (
    HOST,
    Book,
    Candidate,
    Device,
    Footprint,
    Lease,
    PlacementRules,
    Refuse,
    Request,
    Share,
    World,
    where,
)
from ..units import show_bytes
from . import quotas
from .capacity import limit_of
from .drain import drained
from .eligibility import largest_fitting_set, permanent_reason_to_stay
from .placement import claim, claims_footprint_only, place
from .splitting import may_split, may_use_one_card, split

GB = 2**30
MOST_TRIED = 8  # precious leases of which every combination is tried on several cards
TOO_MANY = "exists nowhere else, and the host has no room for them all"

Bytes = Mapping[str, int]  # by device id


class Stuck(NamedTuple):
    """Leases that cannot leave their card, and those that may have to stay."""

    leases: dict[str, list[tuple[Lease, str]]]  # card -> leases that cannot leave it, and why
    precious: dict[str, list[Lease]]  # card -> leases that can only go to the host, if it has room
    host_bytes: int  # host memory that the precious ones may use

    def bytes_on(self, card: str, remaining: Iterable[Lease]) -> int:
        """Bytes on this `card` that cannot leave, and those of the `remaining` precious leases."""
        stuck = sum(_on(lease, card) for lease, _ in self.leases.get(card, ()))
        return stuck + sum(_on(lease, card) for lease in remaining)


def hopeless(book: Book, request: Request, world: World, never: dict[str, Refuse]) -> Refuse | None:
    """Why the `request` can never fit, even if all that can leave had left; None if it can.

    `book` and `world` hold leases and devices. `never` is from `hopeless_cards`: each card that can never take it
    alone, with the refusal.
    """
    rules = request.placement
    cards = _cards(request, world)
    if not cards:
        return _no_such_device(request)
    alone_allowed = may_use_one_card(rules)
    alone = [card for card in cards if card not in never] if alone_allowed else []
    if alone:
        if world.rules.limit_bytes is None:
            return None
        size = min(claim(request.footprint, rules, limit_of(book, world, card)) for card in alone)
        return _past_own_limit(book, request, world, size)
    several = len(cards) > 1 or not alone_allowed
    if may_split(rules) and several and not _all_drained(book, world, cards):
        found = best_division(book, request, world)
        if isinstance(found, Refuse):
            return found
        size = sum(share.bytes for share in found.shares)
        return _past_own_limit(book, request, world, size)
    return max((never[card] for card in cards), key=lambda refusal: refusal.budget_bytes)


def _no_such_device(request: Request) -> Refuse:
    name, devices = request.lease.name, request.placement.devices
    if devices:
        because = f"{name} may only go to {', '.join(devices)}, and this machine has no such device"
    else:
        because = f"{name} needs a card, and this machine has none"
    return Refuse(because, need_bytes=request.footprint.bytes)


def _all_drained(book: Book, world: World, cards: Iterable[str]) -> bool:
    out = drained(book, world)
    return all(card in out for card in cards)


# -- one card alone -----------------------------------------------------------------------------------------------


def hopeless_cards(book: Book, request: Request, world: World) -> dict[str, Refuse]:
    """Cards of the `world` that can never take the `request` alone, each with the refusal.

    These leases of the `book` cannot leave: what is kept, what the requesting thread itself pins, and what neither
    its source can reproduce nor the host can take in. Of several such leases, the host may have room for some only.
    """
    stuck = _stuck(book, request, world)
    rules = request.placement
    footprint_bytes = request.footprint.bytes
    plain = claims_footprint_only(rules)
    refusals: dict[str, Refuse] = {}
    for card in world.devices:
        if card.is_host:
            continue
        limit = limit_of(book, world, card.id)
        size = footprint_bytes if plain else claim(request.footprint, rules, limit)
        if rules.card_bytes and size > rules.card_bytes.get(card.id, 0):
            refusals[card.id] = _above_card_bytes(request, card, size)
        elif size > limit:
            refusals[card.id] = _above_limit(request, card, size, limit)
        elif card.id in stuck.leases or card.id in stuck.precious:
            refusal = _beside_stuck(request, card, size, limit, stuck)
            if refusal:
                refusals[card.id] = refusal
    return refusals


def _above_card_bytes(request: Request, card: Device, size: int) -> Refuse:
    """The refusal because the rules allow less of this card."""
    most = request.placement.card_bytes.get(card.id, 0)
    name = request.lease.name
    return Refuse(
        f"{name} needs {show_bytes(size)}, and may take {show_bytes(most)} of {card.id}",
        need_bytes=size,
        budget_bytes=most,
        device=card.id,
    )


def _above_limit(request: Request, card: Device, size: int, limit: int) -> Refuse:
    """The refusal because the budget of this card is too small."""
    return Refuse(
        f"{request.lease.name} needs {show_bytes(size)} on one device; the largest budget is "
        f"{show_bytes(limit)} ({card.id})",
        need_bytes=size,
        budget_bytes=limit,
        device=card.id,
    )


def _beside_stuck(
    request: Request, card: Device, size: int, limit: int, all_stuck: Stuck
) -> Refuse | None:
    """The refusal because leases that cannot leave this card take too much of it; None if they do not."""
    stuck = all_stuck.leases.get(card.id, [])
    precious = all_stuck.precious.get(card.id, [])
    left = limit - sum(_on(lease, card.id) for lease, _ in stuck)
    if size <= left and precious:
        saved = largest_fitting_set(precious, all_stuck.host_bytes)
        remain = [lease for lease in precious if lease not in saved]
        remain_bytes = sum(_on(lease, card.id) for lease in remain)
        if size > left - remain_bytes:
            stuck = [*stuck, *((lease, TOO_MANY) for lease in precious)]
            left -= remain_bytes
    if size <= left:
        return None
    leases = [lease for lease, _ in stuck]
    return Refuse(
        f"{request.lease.name} needs {show_bytes(size)}; {card.id} has {show_bytes(limit)}, and "
        f"{_holders_in_words(stuck)}",
        _kind(leases, request),
        need_bytes=size,
        budget_bytes=limit,
        device=card.id,
        holders=tuple(lease.id for lease in leases),
    )


# -- several cards ------------------------------------------------------------------------------------------------


def best_division(book: Book, request: Request, world: World) -> Candidate | Refuse:
    """How the `request` would be divided if all that can leave had left, or why even then it could not.

    `book` and `world` hold leases and devices; drained cards are left out.
    """
    footprint, rules = request.footprint, request.placement
    stuck = _stuck(book, request, world)
    out = drained(book, world)
    limits = {}
    for card in _cards(request, world):
        if card not in out:
            limits[card] = limit_of(book, world, card)
    allowed = quotas.at_most(book, world)
    for remaining in _what_may_remain(stuck):
        room = {}
        for card, limit in limits.items():
            left = limit - stuck.bytes_on(card, remaining)
            room[card] = min(left, allowed.get(card, limit))
        found = split(footprint, room, rules, limits)
        if found:
            return found[0]
    if split(footprint, _capped(limits, allowed), rules, limits):
        return _held_up(request, limits, room, stuck)
    return _too_small(request, world, limits, room, capped=bool(allowed))


def _capped(limits: Bytes, allowed: Bytes) -> dict[str, int]:
    return {card: min(limit, allowed.get(card, limit)) for card, limit in limits.items()}


def _cards_in_words(limits: Bytes) -> str:
    return where(tuple(Share(card, 0) for card in limits))


def _held_up(request: Request, limits: Bytes, room: Bytes, stuck: Stuck) -> Refuse:
    """The refusal because leases that cannot leave take too much of the cards together."""
    name, size = request.lease.name, request.footprint.bytes
    holders: dict[str, tuple[Lease, str]] = {}
    for card in limits:
        for lease, why in stuck.leases.get(card, ()):
            holders[lease.id] = (lease, why)
    for card in limits:
        for lease in stuck.precious.get(card, ()):
            holders.setdefault(lease.id, (lease, TOO_MANY))
    return Refuse(
        f"{name} needs {show_bytes(size)}, over several cards; {_cards_in_words(limits)} could give {_sizes(room)}, "
        f"and {_holders_in_words(holders.values())}",
        _kind([lease for lease, _ in holders.values()], request),
        need_bytes=size,
        budget_bytes=max(0, sum(room.values())),
        holders=tuple(holders),
    )


def _too_small(
    request: Request, world: World, limits: Bytes, room: Bytes, *, capped: bool
) -> Refuse:
    """The refusal because the cards' budgets together, or the operator's cap, are too small."""
    footprint, rules, cap = request.footprint, request.placement, world.rules.cap
    name, size = request.lease.name, footprint.bytes
    by_cap = capped and bool(split(footprint, limits, rules, limits))
    most = f", on at most {rules.most_cards} cards" if rules.most_cards else ""
    because = f" ({cap.named('bytes_per_device')})" if by_cap and cap else ""
    heads, margin = _heads_rule(footprint, rules), _margin_rule(footprint, rules, room, limits)
    return Refuse(
        f"{name} needs {show_bytes(size)}, over several cards{most}; the budgets of {_cards_in_words(limits)} are "
        f"{_sizes(room)}{because}{heads}{margin}",
        "cap" if by_cap else "hopeless",
        need_bytes=size,
        budget_bytes=max(0, sum(room.values())),
    )


def _heads_rule(footprint: Footprint, rules: PlacementRules) -> str:
    """The rule on attention heads, if it applies."""
    if rules.layout != "balanced" or not footprint.heads:
        return ""
    return f", and the number of cards must divide its {footprint.heads} attention heads"


def _margin_rule(footprint: Footprint, rules: PlacementRules, room: Bytes, limits: Bytes) -> str:
    """The rule on the driver's margin, if the model would fit without it."""
    if not split(footprint, room, replace(rules, margin_bytes=0), limits):
        return ""
    margin = show_bytes(rules.margin_bytes)
    return f", and {margin} of each stay free for its driver (GPU_SPLIT_MARGIN_MB)"


# -- leases that cannot leave -------------------------------------------------------------------------------------


def _cards(request: Request, world: World) -> list[str]:
    allowed = request.placement.devices
    cards = [device.id for device in world.devices if not device.is_host]
    return [card for card in cards if card in allowed] if allowed else cards


def _stuck(book: Book, request: Request, world: World) -> Stuck:
    leases: dict[str, list[tuple[Lease, str]]] = {}
    precious: dict[str, list[Lease]] = {}
    for lease in book.leases():
        if lease.droppable and not lease.keep and not request.held:
            continue
        why = permanent_reason_to_stay(lease, world, held=request.held)
        for device in {share.device for share in lease.shares}:
            if why:
                leases.setdefault(device, []).append((lease, why))
            elif not lease.droppable and lease.kind == "model":
                precious.setdefault(device, []).append(lease)
    return Stuck(leases, precious, _host_bytes_to_be_had(book, world) if precious else 0)


def _what_may_remain(stuck: Stuck) -> list[tuple[Lease, ...]]:
    """Sets of precious leases that stay, because the host has no room for all of them; the emptiest cards first.

    If there are too many to try every set, no lease is taken to stay: then the request waits, and evicts nothing.
    """
    by_id = {}
    for leases in stuck.precious.values():
        for lease in leases:
            by_id[lease.id] = lease
    precious = list(by_id.values())
    total = sum(lease.own_bytes for lease in precious)
    if len(precious) > MOST_TRIED or total <= stuck.host_bytes:
        return [()]
    sets = []
    for count in range(len(precious), -1, -1):
        for saved in combinations(precious, count):
            if sum(lease.own_bytes for lease in saved) <= stuck.host_bytes:
                sets.append(tuple(lease for lease in precious if lease not in saved))
    return sets


def _holders_in_words(stuck: Iterable[tuple[Lease, str]]) -> str:
    return "; ".join(f"{lease.name} ({show_bytes(lease.bytes)}) {why}" for lease, why in stuck)


def _kind(stuck: Sequence[Lease], request: Request) -> str:
    """The kind of the refusal. The advice depends on it: leave a block, unpin, or find more host memory."""
    if any(lease.id in request.held for lease in stuck):
        return "nested"
    return "kept" if any(lease.keep for lease in stuck) else "precious"


def _sizes(room: Bytes) -> str:
    return " + ".join(show_bytes(max(0, size)) for size in room.values())


def _on(lease: Lease, card: str) -> int:
    return sum(share.bytes for share in lease.shares if share.device == card)


def _card_bytes(lease: Lease) -> int:
    return sum(share.bytes for share in lease.shares if share.device != HOST)


def _host_bytes_to_be_had(book: Book, world: World) -> int:
    """Host memory that weights may move to, once all that may be dropped has left it."""
    taken = 0
    for lease in book.leases():
        if lease.keep or not lease.droppable:
            taken += _on(lease, HOST)
    return max(0, limit_of(book, world, HOST) - taken)


# -- this owner's own limit ---------------------------------------------------------------------------------------


def _past_own_limit(book: Book, request: Request, world: World, size: int) -> Refuse | None:
    """The refusal by INFERENCE_MEMORY_LIMIT_GB: what cannot leave now and the new model exceed it together."""
    limit = world.rules.limit_bytes
    if limit is None or request.lease.kind != "model":
        return None
    section = book.sections.get(request.lease.owner)
    leases = section.leases if section else ()
    mine = [lease for lease in leases if lease.kind == "model"]
    stays = 0
    for lease in mine:
        if lease.pins or lease.keep or permanent_reason_to_stay(lease, world):
            stays += sum(share.bytes for share in lease.claims() if share.device != HOST)
    if stays + size <= limit and _beside_what_remains(book, request, world, limit - stays, mine):
        return None
    return Refuse(
        f"Loading '{request.lease.name}' ({size / GB:.1f}GB) would exceed memory limit "
        f"({stays / GB:.1f}GB + {size / GB:.1f}GB > {limit / GB:.1f}GB)",
        kind="limit",
        need_bytes=size,
        budget_bytes=limit - stays,
    )


def _beside_what_remains(
    book: Book, request: Request, world: World, left: int, mine: list[Lease]
) -> bool:
    """Whether it fits on the cards and into the rest of the own limit, whichever leases the host has no room for."""
    stuck = _stuck(book, request, world)
    choices = _what_may_remain(stuck)
    if choices == [()]:
        return True
    limits = {card: limit_of(book, world, card) for card in _cards(request, world)}
    for remaining in choices:
        room = {}
        for card, limit in limits.items():
            room[card] = limit - stuck.bytes_on(card, remaining)
        own_left = left - sum(_card_bytes(lease) for lease in remaining if lease in mine)
        for found in place(request.footprint, room, request.placement, limits):
            if found.fits and sum(share.bytes for share in found.shares) <= own_left:
                return True
    return False
