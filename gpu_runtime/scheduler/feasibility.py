"""Whether a request can be served at all.

Pure. A request that can never fit is refused at once, and nothing is evicted for it. `never` holds the cards that can
never take it alone, each with the reason; where it may be divided, what several cards could give together is looked at.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

from msgspec.structs import replace

from ..facts import HOST, Book, Candidate, Device, Lease, Refuse, Request, Share, World, where
from ..units import show_bytes
from . import quotas
from .capacity import limit_of
from .drain import drained
from .eligibility import largest_fitting_set, permanent_reason_to_stay
from .placement import claim, claims_no_more, place
from .splitting import could_split, one_card_may_do, split

GB = 2**30
MOST_TRIED = (
    8  # leases that exist nowhere else, of which every combination is tried on several cards
)


class Stuck(NamedTuple):
    """What cannot go, and what may have to stay."""

    leases: dict[str, list[tuple[Lease, str]]]  # card -> what cannot go, and why
    precious: dict[str, list[Lease]]  # card -> what can go to the host only, if it has room
    host_bytes: int  # that it can have for them


def hopeless(book: Book, request: Request, world: World, never: dict[str, Refuse]) -> Refuse | None:
    """Why it can never fit, were everything gone that can go; None where it can. `never` is from `hopeless_cards`."""
    footprint, name, rules = request.footprint, request.lease.name, request.placement
    cards = _cards(request, world)
    if not cards:
        where_ = (
            f"only go to {', '.join(rules.devices)}"
            if rules.devices
            else "not lie in host memory alone"
        )
        return Refuse(
            f"{name} may {where_}, and this machine has no such device", need_bytes=footprint.bytes
        )
    alone = [card for card in cards if card not in never] if one_card_may_do(rules) else []
    if alone and world.rules.limit_bytes is None:
        return None
    if alone:
        return _past_own_limit(
            book,
            request,
            world,
            min(claim(footprint, rules, limit_of(book, world, card)) for card in alone),
        )
    out = drained(book, world)
    if (
        could_split(rules)
        and any(card not in out for card in cards)
        and (len(cards) > 1 or not one_card_may_do(rules))
    ):
        found = at_best(book, request, world)
        if isinstance(found, Refuse):
            return found
        return _past_own_limit(book, request, world, sum(share.bytes for share in found.shares))
    return max((never[card] for card in cards), key=lambda refusal: refusal.budget_bytes)


def hopeless_cards(book: Book, request: Request, world: World) -> dict[str, Refuse]:
    """Cards that can never take the request alone, and why.

    What cannot go: what is kept, what this thread itself pins, and what neither its source can reproduce nor the host
    can take in. Of several such leases, the host may have room for some but not for all.
    """
    stuck, rules, own = _stuck(book, request, world), request.placement, request.footprint.bytes
    refusals: dict[str, Refuse] = {}
    plain, most = claims_no_more(rules), rules.card_bytes
    for card in world.devices:
        if card.is_host:
            continue
        limit = limit_of(book, world, card.id)
        size = own if plain else claim(request.footprint, rules, limit)
        if most and size > most.get(card.id, 0):
            refusals[card.id] = Refuse(
                f"{request.lease.name} needs {show_bytes(size)}, and may take {show_bytes(most.get(card.id, 0))} of "
                f"{card.id}",
                need_bytes=size,
                budget_bytes=most.get(card.id, 0),
                device=card.id,
            )
        elif size > limit or card.id in stuck.leases or card.id in stuck.precious:
            if refusal := _refusal(card, limit, size, request, stuck):
                refusals[card.id] = refusal
    return refusals


def at_best(book: Book, request: Request, world: World) -> Candidate | Refuse:
    """How it would be divided were everything gone that can go, or why it could not be even then."""
    footprint, rules, name = request.footprint, request.placement, request.lease.name
    stuck = _stuck(book, request, world)
    out = drained(book, world)
    limits = {
        card: limit_of(book, world, card) for card in _cards(request, world) if card not in out
    }
    allowed = quotas.at_most(book, world)
    for remain in _what_may_remain(stuck):
        room = {
            card: min(limit - _stuck_on(card, stuck, remain), allowed.get(card, limit))
            for card, limit in limits.items()
        }
        if found := split(footprint, room, rules, limits):
            return found[0]
    size, cards = footprint.bytes, where(tuple(Share(card, 0) for card in limits))
    told = f"{name} needs {show_bytes(size)}, over several cards"
    if split(
        footprint,
        {card: min(limit, allowed.get(card, limit)) for card, limit in limits.items()},
        rules,
        limits,
    ):
        holders = {
            lease.id: (lease, why) for card in limits for lease, why in stuck.leases.get(card, ())
        }
        for lease in {
            lease.id: lease for card in limits for lease in stuck.precious.get(card, ())
        }.values():
            holders.setdefault(
                lease.id, (lease, "exists nowhere else, and the host has no room for them all")
            )
        who = "; ".join(
            f"{lease.name} ({show_bytes(lease.bytes)}) {why}" for lease, why in holders.values()
        )
        return Refuse(
            f"{told}; {cards} could give {_sizes(room)}, and {who}",
            _kind([lease for lease, _ in holders.values()], request),
            need_bytes=size,
            budget_bytes=max(0, sum(room.values())),
            holders=tuple(holders),
        )
    most = f", on at most {rules.most_cards} cards" if rules.most_cards else ""
    heads = (
        f", and the number of cards must divide its {footprint.heads} attention heads"
        if rules.layout == "balanced" and footprint.heads
        else ""
    )
    cap = bool(allowed) and bool(split(footprint, limits, rules, limits))
    because = f" ({world.rules.cap.named('bytes_per_device')})" if cap and world.rules.cap else ""
    margin = (
        f", and {show_bytes(rules.margin_bytes)} of each stay free for its driver (GPU_SPLIT_MARGIN_MB)"
        if split(footprint, room, replace(rules, margin_bytes=0), limits)
        else ""
    )
    return Refuse(
        f"{told}{most}; the budgets of {cards} are {_sizes(room)}{because}{heads}{margin}",
        "cap" if cap else "hopeless",
        need_bytes=size,
        budget_bytes=max(0, sum(room.values())),
    )


def _cards(request: Request, world: World) -> list[str]:
    allowed = request.placement.devices
    return [d.id for d in world.devices if not d.is_host and (not allowed or d.id in allowed)]


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
    """Sets of leases of which the host has no room for all: those that would have to stay, the emptiest cards first.

    Where there are too many to try every set, none is said to stay: then the request waits, and evicts nobody.
    """
    all_ = list(
        {lease.id: lease for leases in stuck.precious.values() for lease in leases}.values()
    )
    if len(all_) > MOST_TRIED or sum(lease.own_bytes for lease in all_) <= stuck.host_bytes:
        return [()]
    return [
        tuple(lease for lease in all_ if lease not in saved)
        for count in range(len(all_), -1, -1)
        for saved in combinations(all_, count)
        if sum(lease.own_bytes for lease in saved) <= stuck.host_bytes
    ]


def _stuck_on(card: str, stuck: Stuck, remain: tuple[Lease, ...]) -> int:
    return sum(_on(lease, card) for lease, _ in stuck.leases.get(card, ())) + sum(
        _on(lease, card) for lease in remain
    )


def _refusal(
    card: Device, limit: int, size: int, request: Request, all_stuck: Stuck
) -> Refuse | None:
    name, stuck = request.lease.name, all_stuck.leases.get(card.id, [])
    precious = all_stuck.precious.get(card.id, [])
    if size > limit:
        return Refuse(
            f"{name} needs {show_bytes(size)} on one device; the largest budget is {show_bytes(limit)} "
            f"({card.id})",
            need_bytes=size,
            budget_bytes=limit,
            device=card.id,
        )
    left = limit - sum(_on(lease, card.id) for lease, _ in stuck)
    if size <= left and precious:
        saved = largest_fitting_set(precious, all_stuck.host_bytes)
        remain = [lease for lease in precious if lease not in saved]
        if size > left - sum(_on(lease, card.id) for lease in remain):
            too_many = "exists nowhere else, and the host has no room for them all"
            stuck = [*stuck, *((lease, too_many) for lease in precious)]
            left -= sum(_on(lease, card.id) for lease in remain)
    if size <= left:
        return None
    who = "; ".join(f"{lease.name} ({show_bytes(lease.bytes)}) {why}" for lease, why in stuck)
    return Refuse(
        f"{name} needs {show_bytes(size)}; {card.id} has {show_bytes(limit)}, and {who}",
        _kind([lease for lease, _ in stuck], request),
        need_bytes=size,
        budget_bytes=limit,
        device=card.id,
        holders=tuple(lease.id for lease, _ in stuck),
    )


def _beside_what_remains(
    book: Book, request: Request, world: World, left: int, mine: list[Lease]
) -> bool:
    """Whether it fits on the cards and into what is left of the own limit, whatever the host has no room for."""
    stuck = _stuck(book, request, world)
    choices = _what_may_remain(stuck)
    if choices == [()]:
        return True
    limits = {card: limit_of(book, world, card) for card in _cards(request, world)}
    for remain in choices:
        room = {card: limit - _stuck_on(card, stuck, remain) for card, limit in limits.items()}
        ours = sum(
            share.bytes
            for lease in remain
            if lease in mine
            for share in lease.shares
            if share.device != HOST
        )
        if any(
            found.fits and sum(share.bytes for share in found.shares) <= left - ours
            for found in place(request.footprint, room, request.placement, limits)
        ):
            return True
    return False


def _kind(stuck: list[Lease], request: Request) -> str:
    """What may be done about it goes by this: leave a block, unpin, or find the host more room."""
    if any(lease.id in request.held for lease in stuck):
        return "nested"
    return "kept" if any(lease.keep for lease in stuck) else "precious"


def _sizes(room: dict[str, int]) -> str:
    return " + ".join(show_bytes(max(0, size)) for size in room.values())


def _on(lease: Lease, card: str) -> int:
    return sum(share.bytes for share in lease.shares if share.device == card)


def _host_bytes_to_be_had(book: Book, world: World) -> int:
    """Host memory that weights may move to, were everything gone from it that may be dropped."""
    taken = sum(
        share.bytes
        for lease in book.leases()
        if lease.keep or not lease.droppable
        for share in lease.shares
        if share.device == HOST
    )
    return limit_of(book, world, HOST) - taken


def _past_own_limit(book: Book, request: Request, world: World, size: int) -> Refuse | None:
    """INFERENCE_MEMORY_LIMIT_GB: refused at once where what cannot leave now and the new one pass it together."""
    limit = world.rules.limit_bytes
    if limit is None or request.lease.kind != "model":
        return None
    section = book.sections.get(request.lease.owner)
    mine = [lease for lease in (section.leases if section else ()) if lease.kind == "model"]
    stays = sum(
        share.bytes
        for lease in mine
        if lease.pins or lease.keep or permanent_reason_to_stay(lease, world)
        for share in lease.claims()
        if share.device != HOST
    )
    if stays + size <= limit and _beside_what_remains(book, request, world, limit - stays, mine):
        return None
    return Refuse(
        f"Loading '{request.lease.name}' ({size / GB:.1f}GB) would exceed memory limit "
        f"({stays / GB:.1f}GB + {size / GB:.1f}GB > {limit / GB:.1f}GB)",
        kind="limit",
        need_bytes=size,
        budget_bytes=limit - stays,
    )
