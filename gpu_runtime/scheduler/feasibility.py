"""Decides whether a request can ever be served.

Pure. A request that can never fit is refused at once, and nothing is evicted for it. If the model
may be divided, the room of several cards is added up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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
from .capacity import filled_to_size, limit_of
from .drain import drained
from .evictable import beyond_its_card, largest_fitting_set, permanent_reason_to_stay
from .placement import claim, place
from .splitting import divisions, may_split, may_use_one_card
from .stuck import Stuck, less_pieces, sets_that_stay, stuck_leases

GB = 2**30
TOO_MANY = "exists nowhere else, and the host has no room for them all"

Bytes = Mapping[str, int]  # by device id


def hopeless(book: Book, request: Request, world: World, never: dict[str, Refuse]) -> Refuse | None:
    """Why the `request` can never fit, even after all possible evictions; None if it may fit.

    `book` and `world` hold the leases and devices. `never` maps each card that cannot hold the
    request alone to the refusal. These are the cards of `hopeless_cards`, drained cards and capped
    cards. If the model may not be divided, the result is the refusal of the card with the largest
    budget.
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


def _all_drained(
    book: Book,
    world: World,
    cards: Iterable[str],
) -> bool:
    out = drained(book, world)
    return all(card in out for card in cards)


# -- one card alone --------------------------------------------------------------------------------


def hopeless_cards(book: Book, request: Request, world: World) -> dict[str, Refuse]:
    """Cards of the `world` that can never hold the `request` alone, each with the refusal.

    A card is too small for the request, or too small beside the leases that cannot leave the card.
    Three kinds of leases of the `book` cannot leave: kept leases, leases that the requesting thread
    itself pins, and leases whose weights exist nowhere else and do not fit into host memory. If
    host memory has room for some leases of the third kind, only the others cannot leave.
    """
    stuck = stuck_leases(book, request, world)
    rules = request.placement
    refusals: dict[str, Refuse] = {}
    for card in world.devices:
        if card.is_host:
            continue
        limit = limit_of(book, world, card.id)
        size = claim(request.footprint, rules, limit)
        if rules.card_bytes and size > rules.card_bytes.get(card.id, 0):
            refusals[card.id] = _above_card_bytes(request, card, size)
        elif size > limit:
            refusals[card.id] = _above_limit(request, card, size, limit)
        elif card.id in stuck.leases or card.id in stuck.precious:
            refusal = _beside_stuck(request, card, size, limit, stuck)
            if refusal:
                refusals[card.id] = refusal
    return refusals


def _above_card_bytes(
    request: Request,
    card: Device,
    size: int,
) -> Refuse:
    most = request.placement.card_bytes.get(card.id, 0)
    name = request.lease.name
    return Refuse(
        f"{name} needs {show_bytes(size)}, and may take {show_bytes(most)} of {card.id}",
        need_bytes=size,
        budget_bytes=most,
        device=card.id,
    )


def _above_limit(
    request: Request,
    card: Device,
    size: int,
    limit: int,
) -> Refuse:
    return Refuse(
        f"{request.lease.name} needs {show_bytes(size)} on one device; the largest budget is "
        f"{show_bytes(limit)} ({card.id})",
        need_bytes=size,
        budget_bytes=limit,
        device=card.id,
    )


def _beside_stuck(
    request: Request,
    card: Device,
    size: int,
    limit: int,
    all_stuck: Stuck,
) -> Refuse | None:
    """The refusal if leases that cannot leave this card use too much of the card, else None."""
    stuck = all_stuck.leases.get(card.id, [])
    precious = all_stuck.precious.get(card.id, [])
    left = limit - sum(lease.bytes_on(card.id) for lease, _ in stuck)
    if size <= left and precious:
        remain_bytes = _least_that_remains(card.id, precious, all_stuck.host_bytes, left - size)
        if size > left - remain_bytes:
            stuck = [*stuck, *((lease, TOO_MANY) for lease in precious)]
            left -= remain_bytes
    if size <= left:
        return None
    return _stuck_refusal(request, card, size, limit, stuck, all_stuck.titles)


def _least_that_remains(card: str, precious: list[Lease], host_bytes: int, enough: int) -> int:
    """The fewest bytes on `card` of the leases `precious` if the host has `host_bytes` for them.

    The search ends at a number that is at most `enough`.
    """
    saved = largest_fitting_set(precious, host_bytes)
    remain = tuple([lease for lease in precious if lease not in saved])
    least = sum([lease.bytes_on(card) for lease in remain])
    if least <= enough:
        return least
    # A lease on several cards frees less of this card, and pieces may leave: other sets may be better.
    if_too_many = less_pieces(remain, host_bytes - sum([lease.card_bytes for lease in saved]))
    for staying in sets_that_stay(Stuck({}, {card: precious}, host_bytes, {}), if_too_many):
        least = min(least, sum([lease.bytes_on(card) for lease in staying]))
        if least <= enough:
            break
    return least


def _stuck_refusal(
    request: Request,
    card: Device,
    size: int,
    limit: int,
    stuck: Sequence[tuple[Lease, str]],
    titles: Mapping[str, str],
) -> Refuse:
    leases = [lease for lease, _ in stuck]
    return Refuse(
        f"{request.lease.name} needs {show_bytes(size)}; {card.id} has {show_bytes(limit)}, and "
        f"{_holders_in_words(stuck, titles)}",
        _kind(leases, request),
        need_bytes=size,
        budget_bytes=limit,
        device=card.id,
        holders=tuple(lease.id for lease in leases),
    )


# -- several cards ---------------------------------------------------------------------------------


def best_division(book: Book, request: Request, world: World) -> Candidate | Refuse:
    """The best division of the `request` after all possible evictions, or the refusal.

    `book` and `world` hold the leases and devices. Drained cards are left out.
    """
    footprint, rules = request.footprint, request.placement
    stuck = stuck_leases(book, request, world)
    out = drained(book, world)
    limits = {}
    for card in _cards(request, world):
        if card not in out:
            limits[card] = limit_of(book, world, card)
    allowed = quotas.at_most(book, world)
    for remaining in sets_that_stay(stuck):
        room = {}
        for card, limit in limits.items():
            left = limit - stuck.bytes_on(card, remaining)
            room[card] = min(left, allowed.get(card, limit))
        found = next(divisions(footprint, room, rules, limits), None)
        if found and footprint.bytes <= sum(room.values()) - stuck.least_excess(remaining, limits):
            return found
    if any(divisions(footprint, _capped(limits, allowed), rules, limits)):
        return _held_up(request, limits, room, stuck)
    return _too_small(request, world, limits, room, capped=bool(allowed))


def _capped(limits: Bytes, allowed: Bytes) -> dict[str, int]:
    return {card: min(limit, allowed.get(card, limit)) for card, limit in limits.items()}


def _cards_in_words(limits: Bytes) -> str:
    return where(tuple(Share(card, 0) for card in limits))


def _held_up(
    request: Request,
    limits: Bytes,
    room: Bytes,
    stuck: Stuck,
) -> Refuse:
    """The refusal because of leases that cannot leave and use too much of the cards."""
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
        f"and {_holders_in_words(holders.values(), stuck.titles)}",
        _kind([lease for lease, _ in holders.values()], request),
        need_bytes=size,
        budget_bytes=max(0, sum(room.values())),
        holders=tuple(holders),
    )


def _too_small(
    request: Request,
    world: World,
    limits: Bytes,
    room: Bytes,
    *,
    capped: bool,
) -> Refuse:
    """The refusal because the cards' budgets, or the operator's cap, are too small."""
    footprint, rules, cap = request.footprint, request.placement, world.rules.cap
    name, size = request.lease.name, footprint.bytes
    by_cap = capped and any(divisions(footprint, limits, rules, limits))
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
    """The end of a sentence: the rule about attention heads. Empty if the rule does not apply."""
    if rules.layout != "balanced":
        return ""
    if footprint.heads:
        return f", and the number of cards must divide its {footprint.heads} attention heads"
    if rules.least_cards > 1:
        return ""
    return ", and since its number of attention heads is unknown, 2, 4 or 8 cards can share it"


def _margin_rule(
    footprint: Footprint,
    rules: PlacementRules,
    room: Bytes,
    limits: Bytes,
) -> str:
    """The end of a sentence: the bytes that stay free for the driver.

    The text is empty if the model would not fit even without these bytes.
    """
    if not any(divisions(footprint, room, replace(rules, margin_bytes=0), limits)):
        return ""
    margin = show_bytes(rules.margin_bytes)
    return f", and {margin} of each stay free for its driver (GPU_SPLIT_MARGIN_MB)"


def without_card_bytes(book: Book, lease: Lease) -> Book:
    """The `book` with only the host memory of `lease`, as if the lease had left its card."""
    return book.with_lease(replace(lease, shares=(Share(HOST, lease.bytes_on(HOST)),)))


# -- leases that cannot leave ----------------------------------------------------------------------


def _cards(request: Request, world: World) -> list[str]:
    allowed = request.placement.devices
    cards = [device.id for device in world.devices if not device.is_host]
    return [card for card in cards if card in allowed] if allowed else cards


def _holders_in_words(stuck: Iterable[tuple[Lease, str]], titles: Mapping[str, str]) -> str:
    return "; ".join(
        f"{titles.get(lease.id, lease.name)} ({show_bytes(lease.bytes)}) {why}"
        for lease, why in stuck
    )


def _kind(stuck: Sequence[Lease], request: Request) -> str:
    """The kind of the refusal, which selects the advice to the user.

    The kind is "nested" if the requesting thread itself pins one of the leases in the way. It is
    "kept" if one of these leases is kept, because a user can unpin this lease. Otherwise it is
    "precious": the weights of these leases exist nowhere else, and the host cannot take them.
    """
    if any(lease.id in request.held for lease in stuck):
        return "nested"
    return "kept" if any(lease.keep for lease in stuck) else "precious"


def _sizes(room: Bytes) -> str:
    return " + ".join(show_bytes(max(0, size)) for size in room.values())


def _card_bytes(lease: Lease) -> int:
    return sum(share.bytes for share in lease.shares if share.device != HOST)


# -- leaving and returning --------------------------------------------------------------------------


def why_no_return(book: Book, lease: Lease, world: World) -> str:
    """Why `lease`, which exists nowhere else, could not return if it left its cards now.

    The text is a sentence without a full stop. It is empty if the lease may return: its cards have
    room for it beside the leases that never leave (law 16).
    """
    if lease.droppable:
        return ""
    if card := beyond_its_card(lease, world):
        return f"it holds more than the {show_bytes(_size(world, card))} of {card}, so it could not return"
    claims = book.claims()
    cards = [share for share in lease.filled or lease.shares if share.device != HOST]
    if all([claims.get(share.device, 0) <= _size(world, share.device) for share in cards]):
        return ""  # it fits beside all that is there
    unleased = _unleased(book)
    away = replace(lease, shares=(Share(HOST, lease.own_bytes),), filled=(), target=())
    emptier, roomy = filled_to_size(book.with_lease(away), world, {share.device for share in cards})
    for share in cards:
        left = _size(world, share.device) - unleased.get(share.device, 0)
        emptier.limits[share.device] = roomy.limits[share.device] = left
        request = Request(
            "",
            lease,
            Footprint.of(share.bytes, "measured"),
            world.now,
            PlacementRules(devices=(share.device,)),
        )
        never = hopeless_cards(emptier, request, roomy)
        if refusal := hopeless(emptier, request, roomy, never):
            return f"it could not return: {refusal.because}"
    return ""


def never_returns(book: Book, request: Request, world: World) -> Refuse | None:
    """Why bytes that exist nowhere else do not fit into the budget of their card, however long they wait.

    Memory outside the leases stays: contexts, caches, and what cannot be moved. The result is None
    if the `request` is no such return, or if it may fit.
    """
    lease = book.lease(request.lease.owner, request.lease.name)
    if lease is None or not lease.must_return:
        return None
    others = without_card_bytes(book, lease)
    limits = dict(book.limits)
    for card, size in _unleased(book).items():
        limits[card] = limit_of(book, world, card) - size
    others = replace(others, limits=limits)
    return hopeless(others, request, world, hopeless_cards(others, request, world))


def _unleased(book: Book) -> dict[str, int]:
    """The claimed bytes on each device that belong to no lease."""
    unleased = dict(book.claims())
    for lease in book.leases():
        for share in lease.claims():
            unleased[share.device] = unleased.get(share.device, 0) - share.bytes
    return {device: size for device, size in unleased.items() if size > 0}


def _size(world: World, device: str) -> int:
    found = world.device(device)
    return found.total_bytes if found else 0


# -- this owner's own limit ------------------------------------------------------------------------


def _past_own_limit(book: Book, request: Request, world: World, size: int) -> Refuse | None:
    """The refusal if the new model does not fit into INFERENCE_MEMORY_LIMIT_GB; else None.

    `size` is the bytes of the new model. The owner's models that are in use, or that never leave
    their cards, count against the limit.
    """
    limit = world.rules.limit_bytes
    if limit is None or request.lease.kind != "model":
        return None
    section = book.sections.get(request.lease.owner)
    stays = 0
    for lease in section.leases if section else ():
        if lease.kind != "model":
            continue
        if lease.pins or lease.keep or permanent_reason_to_stay(lease, world):
            stays += sum(share.bytes for share in lease.claims() if share.device != HOST)
    least = _least_own_bytes(book, request, world, size, limit - stays)
    if stays + least <= limit:
        return None
    stays += least - size
    return Refuse(
        f"Loading '{request.lease.name}' ({size / GB:.1f}GB) would exceed memory limit "
        f"({stays / GB:.1f}GB + {size / GB:.1f}GB > {limit / GB:.1f}GB)",
        kind="limit",
        need_bytes=size,
        budget_bytes=limit - stays,
    )


def _least_own_bytes(book: Book, request: Request, world: World, size: int, enough: int) -> int:
    """The fewest bytes on cards of the request and of the owner's models that remain there.

    If the host cannot take all leases whose weights exist nowhere else, several sets of them may
    stay. Only sets beside which the request fits on the cards are compared. `size` is the bytes of
    the request alone. The search ends at a number that is at most `enough`.
    """
    stuck = stuck_leases(book, request, world)
    limits = {card: limit_of(book, world, card) for card in _cards(request, world)}
    found = []
    for remaining in sets_that_stay(stuck):
        if not remaining:
            return size
        room = {}
        for card, limit in limits.items():
            room[card] = limit - stuck.bytes_on(card, remaining)
        own = [lease for lease in remaining if lease.owner == request.lease.owner]
        own_bytes = sum(_card_bytes(lease) for lease in own if lease.kind == "model")
        for candidate in place(request.footprint, room, request.placement, limits):
            if candidate.fits:
                found.append(own_bytes + sum(share.bytes for share in candidate.shares))
        if found and min(found) <= enough:
            break
    return min(found, default=size)
