"""Decides whether a request can ever be served.

Pure. A request that can never fit is refused at once, and nothing is evicted for it. If the model
may be divided, the room of several cards is added up. A lease is *precious* if its weights exist
nowhere else. A precious lease can only be offloaded, and only while the host has room.

Requests in a deadlock can never be served either. In the simplest deadlock, two threads each use a
model, and each thread waits for the memory of the model that the other thread uses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from ..facts import (
    HOST,
    KERNEL,
    Book,
    Candidate,
    Device,
    Footprint,
    Lease,
    PlacementRules,
    Refuse,
    Request,
    Share,
    Ticket,
    World,
    where,
)
from ..units import show_bytes
from . import caps
from .capacity import filled_to_size, limits_of
from .caps import drained
from .placement import claim, divisions, may_split, may_use_one_card, place
from .victims import (
    beyond_its_card,
    largest_fitting_set,
    parts_within,
    permanent_reason_to_stay,
    precious_bytes,
    sets_that_fit_in,
)


class Stuck(NamedTuple):
    """Leases that cannot leave their card, and leases that may have to stay."""

    leases: dict[str, list[tuple[Lease, str]]]  # card -> leases that cannot leave, with the reason
    precious: dict[str, list[Lease]]  # card -> leases that can only go to the host, if it has room
    host_bytes: int  # host memory that the precious leases may use
    book: Book

    def bytes_on(self, card: str, remaining: Iterable[Lease]) -> int:
        """Bytes on this `card` of the leases that cannot leave, and of the leases `remaining`."""
        stuck = [lease for lease, _ in self.leases.get(card, ())]
        return sum(lease.bytes_on(card) for lease in (*stuck, *remaining))

    def least_excess(self, remaining: Iterable[Lease], cards: Collection[str]) -> int:
        """Bytes that stay on the `cards`, however many precious leases there are to choose from.

        With too many precious leases to try every set, `remaining` is empty; see `sets_that_stay`.
        But the host cannot take more bytes than it has. The result is 0 if `remaining` is not empty.
        """
        if remaining:
            return 0
        precious = {lease.id: lease for card in cards for lease in self.precious.get(card, ())}
        claimed = sum([lease.bytes_on(card) for lease in precious.values() for card in cards])
        own = sum([lease.card_bytes for lease in precious.values()])
        return max(0, min(claimed, own) - self.host_bytes)


def stuck_leases(book: Book, request: Request, world: World) -> Stuck:
    """The leases that cannot leave their card, or may have to stay, while this `request` waits."""
    leases: dict[str, list[tuple[Lease, str]]] = {}
    precious: dict[str, list[Lease]] = {}
    for lease in book.leases():
        if lease.droppable and not lease.keep and not request.held:
            continue
        why = permanent_reason_to_stay(lease, world, held=request.held)
        for device in {share.device for share in lease.shares if share.device != HOST}:
            if why:
                leases.setdefault(device, []).append((lease, why))
            elif not lease.droppable and lease.kind != "block":
                # `host_bytes` counts the memory of all shadows as free. So the shadow of this lease
                # is ignored. Otherwise its bytes would count twice: as free, and as copied already.
                bare = replace(lease, shadow_bytes=0) if lease.shadow_bytes else lease
                precious.setdefault(device, []).append(bare)
    # Without a key, the request is an assumption: until it is made, its lease may move to the disk.
    wanted = request.lease.id if request.key else ""
    host_bytes = host_bytes_to_be_had(book, world, wanted) if precious else 0
    return Stuck(leases, precious, host_bytes, book)


def sets_that_stay(
    precious_on: Mapping[str, Iterable[Lease]],
    host_bytes: int,
    too_many: Iterable[tuple[Lease, ...]] = ((),),
) -> Iterator[tuple[Lease, ...]]:
    """Yields sets of precious leases that may have to stay on their cards, sets of few leases first.

    `precious_on` has the precious leases of each card, and the host has room for `host_bytes` of them.
    For each set, the host has room for the precious leases outside the set. If it also has room for
    pieces of the leases in the set, their `shares` are only the bytes that stay. If the host has
    room for all precious leases, the only result is an empty set: then these leases are
    no reason to refuse the request. If there are too many sets to try, the results are the sets in
    `too_many`.
    """
    by_id = {}
    for leases in precious_on.values():
        for lease in leases:
            by_id[lease.id] = lease
    precious = list(by_id.values())
    total = sum(lease.card_bytes for lease in precious)
    if total <= host_bytes:
        yield ()
        return
    sets = sets_that_fit_in(precious, host_bytes)
    if sets is None:
        yield from too_many
        return
    for leaving in sets:
        staying = tuple([lease for lease in precious if lease not in leaving])
        left = host_bytes - precious_bytes(leaving)
        if not _is_needless(staying, left):
            yield from less_pieces(staying, left)


def _is_needless(staying: tuple[Lease, ...], host_bytes: int) -> bool:
    """Whether one more lease fits into `host_bytes`, so that the set without this lease is better.

    If the leases have pieces, the host may rather take pieces of another lease.
    """
    fits = any([lease.card_bytes <= host_bytes for lease in staying])
    return fits and not any([lease.piece_bytes for lease in staying if lease.kind != KERNEL])


def less_pieces(staying: tuple[Lease, ...], host_bytes: int) -> Iterator[tuple[Lease, ...]]:
    """Yields the leases in `staying` without the pieces that fit into `host_bytes` of host memory.

    There is a result for each lease whose pieces leave first.
    """
    cut = False
    for parts in parts_within(staying, host_bytes):
        left = {lease.id: lease for lease in staying}
        for part in parts:
            kept = [share for share in part.after(part.target) if share.device != HOST]
            left[part.id] = replace(part, shares=tuple(kept), target=())
        cut = True
        yield tuple(left.values())
    if not cut:
        yield staying


def host_bytes_to_be_had(book: Book, world: World, wanted: str) -> int:
    """Bytes of host memory that leases whose weights exist nowhere else can take, one after the other.

    Every lease that can be loaded again is unloaded. A lease whose bytes can move to a disk makes
    room for the next one; only `wanted`, the id of the lease for which they leave, stays meanwhile.
    Other leases in host memory stay, and leases marked `keep`.
    """
    taken = staying = stowable = most = 0
    for lease in book.leases():
        if lease.keep or not lease.droppable:
            taken += lease.ram_bytes
            if lease.id == wanted or not lease.stow_bytes:
                staying += lease.ram_bytes
    limit = limits_of(book, world).get(HOST, 0)
    for lease in book.leases():
        if lease.disk_room and lease.id != wanted and (lease.keep or not lease.droppable):
            most = max(most, lease.disk_room)
            if lease.on_host or lease.own_bytes <= limit - staying:
                stowable += lease.stow_bytes
    return max(0, limit - taken + min(stowable, most))


# -- requests that can never fit -------------------------------------------------------------------


GB = 2**30
NO_ROOM = "exists nowhere else, and RAM has no room for"
TOO_MANY = f"{NO_ROOM} them all"

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
        limits = limits_of(book, world)
        size = min(claim(request.footprint, rules, limits[card]) for card in alone)
        return _past_own_limit(book, request, world, size)
    several = len(cards) > 1 or not alone_allowed
    if may_split(rules) and several and not drained(book, world).keys() >= set(cards):
        found = best_division(book, request, world)
        if isinstance(found, Refuse):
            return found
        size = sum(share.bytes for share in found.shares)
        return _past_own_limit(book, request, world, size)
    return max((never[card] for card in cards), key=lambda refusal: refusal.budget_bytes)


def _no_such_device(request: Request) -> Refuse:
    name, devices = request.called, request.placement.devices
    if devices:
        because = f"{name} may only go to {', '.join(devices)}, and this machine has no such device"
    else:
        because = f"{name} needs a card, and this machine has none"
    return Refuse(because, need_bytes=request.footprint.bytes)


# -- one card alone --------------------------------------------------------------------------------


def hopeless_cards(book: Book, request: Request, world: World) -> dict[str, Refuse]:
    """Cards of the `world` that can never hold the `request` alone, each with the refusal.

    A card is too small for the request, or too small beside the leases that cannot leave the card.
    Three kinds of leases of the `book` cannot leave: kept leases, leases that the requesting thread
    itself pins, and leases whose weights exist nowhere else and do not fit into host memory. If
    host memory has room for some leases of the third kind, only the others cannot leave.
    """
    stuck = stuck_leases(book, request, world)
    rules, limits = request.placement, limits_of(book, world)
    refusals: dict[str, Refuse] = {}
    for card in world.cards:
        limit = limits[card.id]
        size = claim(request.footprint, rules, limit)
        most = rules.card_bytes.get(card.id, 0) if rules.card_bytes else limit
        if size > min(most, limit):
            needs = f"{request.called} needs {show_bytes(size)}"
            if size > most and rules.card_bytes:
                because = f"{needs}, and may take {show_bytes(most)} of {card.id}"
            else:
                most = limit
                largest = f"the largest budget is {show_bytes(limit)} ({card.id})"
                because = f"{needs} on one device; {largest}"
            refusals[card.id] = Refuse(because, need_bytes=size, budget_bytes=most, device=card.id)
        elif card.id in stuck.leases or card.id in stuck.precious:
            refusal = _beside_stuck(request, card, size, limit, stuck)
            if refusal:
                refusals[card.id] = refusal
    return refusals


def _beside_stuck(
    request: Request, card: Device, size: int, limit: int, all_stuck: Stuck
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
    head = f"{request.called} needs {show_bytes(size)}; {card.id} has {show_bytes(limit)}"
    return _refusal_beside(request, head, stuck, all_stuck.book, size, limit, card.id)


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
    for staying in sets_that_stay({card: precious}, host_bytes, if_too_many):
        least = min(least, sum([lease.bytes_on(card) for lease in staying]))
        if least <= enough:
            break
    return least


# -- several cards ---------------------------------------------------------------------------------


def best_division(book: Book, request: Request, world: World) -> Candidate | Refuse:
    """The best division of the `request` after all possible evictions, or the refusal.

    `book` and `world` hold the leases and devices. Drained cards are left out.
    """
    footprint, rules = request.footprint, request.placement
    stuck = stuck_leases(book, request, world)
    out, all_limits = drained(book, world), limits_of(book, world)
    limits = {card: all_limits[card] for card in _cards(request, world) if card not in out}
    allowed = caps.at_most(book, world)
    for remaining in sets_that_stay(stuck.precious, stuck.host_bytes):
        room = {}
        for card, limit in limits.items():
            left = limit - stuck.bytes_on(card, remaining)
            room[card] = min(left, allowed.get(card, limit))
        found = next(divisions(footprint, room, rules, limits), None)
        if found and footprint.bytes <= sum(room.values()) - stuck.least_excess(remaining, limits):
            return found
    capped = {card: min(limit, allowed.get(card, limit)) for card, limit in limits.items()}
    if any(divisions(footprint, capped, rules, limits)):
        if not remaining and not stuck.least_excess(remaining, limits):
            stuck = stuck._replace(precious={})  # RAM has room for them all
        return _held_up(request, limits, room, stuck)
    return _too_small(request, world, limits, room, capped=bool(allowed))


def _cards_in_words(limits: Bytes) -> str:
    return where(tuple(Share(card, 0) for card in limits))


def _held_up(request: Request, limits: Bytes, room: Bytes, stuck: Stuck) -> Refuse:
    """The refusal because of leases that cannot leave and use too much of the cards."""
    name, size = request.called, request.footprint.bytes
    holders: dict[str, tuple[Lease, str]] = {}
    for card in limits:
        for lease, why in stuck.leases.get(card, ()):
            holders[lease.id] = (lease, why)
    for card in limits:
        for lease in stuck.precious.get(card, ()):
            holders.setdefault(lease.id, (lease, TOO_MANY))
    could_give = f"{_cards_in_words(limits)} could give {_sizes(room)}"
    head = f"{name} needs {show_bytes(size)}, over several cards; {could_give}"
    budget_bytes = max(0, sum(room.values()))
    return _refusal_beside(request, head, [*holders.values()], stuck.book, size, budget_bytes)


def _too_small(
    request: Request, world: World, limits: Bytes, room: Bytes, *, capped: bool
) -> Refuse:
    """The refusal because the cards' budgets, or the operator's cap, are too small."""
    footprint, rules, cap = request.footprint, request.placement, world.rules.cap
    name, size = request.called, footprint.bytes
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


def _margin_rule(footprint: Footprint, rules: PlacementRules, room: Bytes, limits: Bytes) -> str:
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
    cards = [device.id for device in world.cards]
    return [card for card in cards if card in allowed] if allowed else cards


def _refusal_beside(
    request: Request,
    head: str,
    stuck: Sequence[tuple[Lease, str]],
    book: Book,
    size: int,
    budget_bytes: int,
    device: str = "",
) -> Refuse:
    """The refusal because of the leases `stuck`, which cannot leave, each with the reason.

    Its kind selects the advice to the user. It is "nested" if the requesting thread itself pins one of
    the leases. It is "kept" if one of them is kept, because a user can unpin it. Otherwise it is
    "precious": the weights of these leases exist nowhere else, and the host cannot take them. The
    lease to which the advice applies is first.
    """
    stuck = sorted(stuck, key=lambda entry: (entry[0].id not in request.held, not entry[0].keep))
    ids = [lease.id for lease, _ in stuck]
    kind = "kept" if any([lease.keep for lease, _ in stuck]) else "precious"
    if any([id in request.held for id in ids]):
        kind = "nested"
    alone = sum([why == TOO_MANY for _, why in stuck]) == 1
    holders = []
    for lease, why in stuck:
        if alone and why == TOO_MANY:
            why = f"{NO_ROOM} it"
        holders.append(f"{book.title(lease)} ({show_bytes(lease.bytes)}) {why}")
    because = f"{head}, and {'; '.join(holders)}"
    return Refuse(
        because,
        kind,
        need_bytes=size,
        budget_bytes=budget_bytes,
        device=device,
        holders=tuple(ids),
    )


def _sizes(room: Bytes) -> str:
    return " + ".join(show_bytes(max(0, size)) for size in room.values())


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
    limits, now = dict(book.limits), limits_of(book, world)
    for card, size in _unleased(book).items():
        limits[card] = now.get(card, 0) - size
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
        f"Loading '{request.called}' ({size / GB:.1f}GB) would exceed memory limit "
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
    all_limits = limits_of(book, world)
    limits = {card: all_limits[card] for card in _cards(request, world)}
    found = []
    for remaining in sets_that_stay(stuck.precious, stuck.host_bytes):
        if not remaining:
            return size
        room = {}
        for card, limit in limits.items():
            room[card] = limit - stuck.bytes_on(card, remaining)
        own = [lease for lease in remaining if lease.owner == request.lease.owner]
        shares = [share for lease in own if lease.kind == "model" for share in lease.shares]
        own_bytes = sum(share.bytes for share in shares if share.device != HOST)
        for candidate in place(request.footprint, room, request.placement, limits):
            if candidate.fits:
                found.append(own_bytes + sum(share.bytes for share in candidate.shares))
        if found and min(found) <= enough:
            break
    return min(found, default=size)


# -- deadlocks -------------------------------------------------------------------------------------


def deadlocked(book: Book, world: World) -> tuple[Ticket, ...]:
    """The waiting requests that can never be served, because their threads block each other.

    `book` holds the tickets (the waiting requests) and the leases; `world` holds the devices and
    their limits. The result is empty if there is no deadlock. A request can often be served in
    several ways, so a cycle in the wait-for graph proves nothing. The test is a reduction instead:

    1. A thread that waits for nothing will finish and release its leases.
    2. Grant every request that fits into the released memory. The thread of each granted request
       will finish too. Repeat this step.
    3. The remaining requests are deadlocked. A request is left out if its thread holds nothing that
       another request could use.

    Source: Holt 1972, Some Deadlock Properties of Computer Systems, ACM Computing Surveys 4(3).
    """
    waiting = [ticket for ticket in book.tickets if ticket.verb == "use"]
    if not any(ticket.held for ticket in waiting):
        return ()
    limits = limits_of(book, world)
    limits.pop(HOST, None)
    while waiting:
        held = _bytes_that_stay(book, waiting)
        remaining = [ticket for ticket in waiting if not _fits(ticket, limits, held)]
        if len(remaining) == len(waiting):
            return _blocking_others(book, remaining, limits)
        waiting = remaining
    return ()


def _bytes_that_stay(book: Book, waiting: Iterable[Ticket]) -> dict[str, int]:
    """Bytes on each device of leases marked `keep`, and of leases that a waiting thread pins."""
    held: set[str] = set()
    for ticket in waiting:
        held.update(ticket.held)
    stays: dict[str, int] = {}
    for lease in book.leases():
        if lease.keep or lease.id in held:
            for share in lease.shares:
                stays[share.device] = stays.get(share.device, 0) + share.bytes
    return stays


def _fits(ticket: Ticket, limits: dict[str, int], stays: dict[str, int]) -> bool:
    """Whether the `ticket` fits on its allowed cards, beside the bytes that stay on the cards.

    A ticket records neither the safety margin nor the pieces of the model. So the answer may be too
    optimistic for a model on several cards. A too optimistic answer has one effect: the request
    waits although it could be refused.
    """
    size = sum(share.bytes for share in ticket.need)
    cards = _allowed_cards(ticket, limits)
    free = [max(0, limits[card] - stays.get(card, 0)) for card in cards]
    if len(ticket.need) < 2 or not free:
        return size <= max(free, default=0)
    if ticket.layout == "whole":
        empty = [card for card in cards if not stays.get(card, 0)]
        free = [limits[card] for card in empty]
    if ticket.layout == "balanced":
        return _fits_in_equal_shares(size, free)
    return size <= sum(free)


def _fits_in_equal_shares(size: int, free: list[int]) -> bool:
    """Whether `size` bytes, divided equally over some of the cards, fit into their free bytes."""
    largest_first = sorted(free, reverse=True)
    return any(size <= count * smallest for count, smallest in enumerate(largest_first, start=1))


def _allowed_cards(ticket: Ticket, limits: Iterable[str]) -> list[str]:
    return [card for card in limits if not ticket.places or card in ticket.places]


def _blocking_others(book: Book, stuck: list[Ticket], limits: dict[str, int]) -> tuple[Ticket, ...]:
    """The requests in `stuck` whose threads block another request in `stuck`.

    A thread blocks another request if it holds bytes on a card that the request could use.
    """
    while True:
        blocking = [ticket for ticket in stuck if _blocks_another(book, ticket, stuck, limits)]
        if len(blocking) == len(stuck):
            return tuple(stuck)
        stuck = blocking


def _blocks_another(
    book: Book, ticket: Ticket, stuck: list[Ticket], limits: dict[str, int]
) -> bool:
    wanted: set[str] = set()
    for other in stuck:
        if other is not ticket:
            wanted.update(_allowed_cards(other, limits))
    held = book.find_all(ticket.held)
    return any(share.device in wanted for lease in held for share in lease.shares)
