"""The candidates for a request: cards, and sets of cards. Each shows whether it has the room now.

Pure. The first candidate is the best; the order is that of `placement`. `admission` decides which
candidate gets the request, and `eviction` whether room is made on a card. If the request waits,
this module explains why, and sets the time of the next decision.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from ..facts import (
    Book,
    Candidate,
    Lease,
    Phase,
    Refuse,
    Request,
    Share,
    Shares,
    Ticket,
    Wait,
    World,
    bytes_label,
    lease_title,
    where,
)
from ..units import show_bytes, show_seconds
from . import caps
from .capacity import limit_of
from .caps import drained_cards
from .feasibility import best_division, hopeless_cards, host_bytes_to_be_had, without_card_bytes
from .placement import may_split, may_use_one_card, place, split
from .queue import Context, held_bytes, load_seconds
from .victims import (
    EXEMPT,
    FIXED,
    MOVE_FAILED,
    WISHED,
    can_move,
    leaves_in_words,
    needs_host_room,
    precious_bytes,
    reason_to_stay,
    why_not_moved,
)


def laid_out(
    book: Book, request: Request, world: World, lease: Lease | None, out: Mapping[str, str]
) -> tuple[Book, dict[str, Refuse], Request]:
    """The book, the cards that can never hold the request alone, and the request with its layout.

    If the `lease` is in parts and may return to its card, its bytes there are no obstacle. In this
    case they are not in the returned book.
    """
    if lease and lease.in_parts:
        others = without_card_bytes(book, lease)
        never = _never_alone(others, request, world, out)
        decided = _with_layout(request, world, never)
        if held_bytes(book, decided, never):
            return others, never, decided
    never = _never_alone(book, request, world, out)
    return book, never, _with_layout(request, world, never)


def _never_alone(
    book: Book, request: Request, world: World, out: Mapping[str, str]
) -> dict[str, Refuse]:
    """The cards that can never hold the whole request alone, each with the refusal."""
    never = drained_cards(request, world, out)
    never |= caps.capped_cards(book, request, world)
    never |= hopeless_cards(book, request, world)
    return never


def _with_layout(request: Request, world: World, never: Container[str]) -> Request:
    """The request with its layout `auto` or `whole` decided. Any other layout stays as it is.

    `never` has the cards that can never hold the request alone. The model gets one card if the
    rules allow that, and if at least one allowed card is not in `never`.
    """
    rules = request.placement
    if rules.layout not in ("auto", "whole"):
        return request
    alone = may_use_one_card(rules) and _some_card(rules.devices, world, never)
    if rules.layout == "whole":
        return replace(request, placement=replace(rules, most_cards=1)) if alone else request
    layout = "single" if alone else "proportional"
    return replace(request, placement=replace(rules, layout=layout))


def _some_card(allowed: Container[str], world: World, never: Container[str]) -> bool:
    """Whether any allowed card could ever take the request alone."""
    for card in world.devices:
        if card.is_host or card.id in never:
            continue
        if not allowed or card.id in allowed:
            return True
    return False


def candidates_for(context: Context, out: Mapping[str, str]) -> tuple[Candidate, ...]:
    """The cards, or sets of cards, for the request. Each candidate shows whether it has the room
    now.

    The best candidate is first, and drained cards are last. `out` maps each drained card to a
    sentence on who drained it.
    """
    request, free = context.request, context.free()
    rules = request.placement
    if out:
        free = {device: size for device, size in free.items() if device not in out}
    if rules.layout == "single" and not rules.factor:  # one card; the claim is the footprint
        found = place(request.footprint, free, rules)
    else:
        limits = {device: limit_of(context.book, context.world, device) for device in free}
        found = place(request.footprint, free, rules, limits)
        # `place` adds up the free bytes of several cards. It knows neither which cards are
        # unmeasured nor the owner's own limit. So the divisions over several cards are made again.
        if context.blind or context.own_left is not None:
            found = _splits_within(context, free, limits, found)
    return _with_reserved(found, context) + _drained_candidates(request, out)


def _splits_within(
    context: Context,
    free: Mapping[str, int],
    limits: Mapping[str, int],
    found: tuple[Candidate, ...],
) -> tuple[Candidate, ...]:
    """Returns the single cards among the candidates `found`, and the possible divisions over cards.

    A division uses only measured cards, and stays within the owner's own memory limit. If the best
    single card has room, or the model may not be divided, only single cards are returned.
    """
    rules = context.request.placement
    alone = tuple([candidate for candidate in found if len(candidate.shares) == 1])
    if (alone and alone[0].fits) or not may_split(rules):
        return alone
    measured = {device: size for device, size in free.items() if device not in context.blind}
    several = []
    for candidate in split(context.request.footprint, measured, rules, limits):
        size = sum(share.bytes for share in candidate.shares)
        if context.own_left is None or size <= context.own_left:
            several.append(candidate)
    return tuple(several) + alone


def _drained_candidates(request: Request, out: Mapping[str, str]) -> tuple[Candidate, ...]:
    """The drained cards of `out` that `request` allows, as candidates that do not fit."""
    allowed, size = request.placement.devices, request.footprint.bytes
    found = []
    for device, because in out.items():
        if not allowed or device in allowed:
            found.append(Candidate((Share(device, size),), False, because))
    return tuple(found)


def _with_reserved(candidates: tuple[Candidate, ...], context: Context) -> tuple[Candidate, ...]:
    """The `candidates`. The reasons also name the bytes that are reserved for elders.

    Only the reasons of candidates without room change. An elder is a request ahead in the queue.
    """
    if not context.blocking_elders:
        return candidates
    found = []
    for candidate in candidates:
        reserved = "" if candidate.fits else reserved_for_elders(context, candidate.shares)
        if reserved:
            candidate = replace(candidate, because=f"{candidate.because}; {reserved}")
        found.append(candidate)
    return tuple(found)


def without_hopeless(
    candidates: tuple[Candidate, ...], never: Container[str]
) -> tuple[Candidate, ...]:
    """The candidates, less the single cards that can never hold the request."""
    found = []
    for candidate in candidates:
        if len(candidate.shares) > 1 or candidate.shares[0].device not in never:
            found.append(candidate)
    return tuple(found)


def not_on(cards: Container[str], candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """The candidates that use none of the given `cards`."""
    if not cards:
        return candidates
    found = []
    for candidate in candidates:
        if not any(share.device in cards for share in candidate.shares):
            found.append(candidate)
    return tuple(found)


def waiting_candidates(book: Book, request: Request, world: World) -> tuple[Candidate, ...]:
    """The division over several cards that the request waits for; empty if none can ever fit."""
    found = best_division(book, request, world)
    if isinstance(found, Refuse):
        return ()
    return (replace(found, fits=False, because=f"{where(found.shares)} have too little free"),)


# -- why a request waits ---------------------------------------------------------------------------


MOST_TOLD = 4  # leases in the way that are named in the sentence
LOOK_SECONDS = 1.0  # how soon to decide again if only a new measurement can change the verdict


def wait_for_obstacles(context: Context, candidates: tuple[Candidate, ...]) -> Wait:
    """A Wait that names the leases in the way on the first, and best, of the `candidates`.

    The Wait's field `retry_at` is the earliest time at which the verdict may change without an
    event: a lease on any of the `candidates` becomes evictable, or a new measurement exists.
    """
    world, ahead = context.world, len(context.elders)
    if context.twin:
        wanted = context.request.lease
        words = "the notebook's memory" if wanted.kind == "kernel" else wanted.name
        because = f"Another thread of this process is waiting for {words} already"
        return Wait(because, ahead=ahead)
    nearest = candidates[0].shares
    found = _leases_in_the_way(context, candidates)
    sentences, retry = found.sentences, found.retry
    reserved = reserved_for_elders(context, nearest)
    if reserved:
        sentences.insert(0, reserved)
    if ahead and not sentences:
        sentences.append(f"{ahead} requests are ahead" if ahead > 1 else "1 request is ahead")
    unmeasured = [context.blind[share.device] for share in nearest if share.device in context.blind]
    if unmeasured:
        sentences = unmeasured
        retry.append(world.now + LOOK_SECONDS)
    elif not found.leased and not ahead:
        sentences.append(_outside_memory(nearest, context))
        retry.append(world.now + LOOK_SECONDS)
    return Wait(
        _shortened(sentences),
        blockers=tuple(found.blockers),
        ahead=ahead,
        retry_at=min(retry, default=None),
    )


class _InTheWay(NamedTuple):
    """The leases in the way of one request."""

    blockers: list[str]  # ids of the leases that are in use or arriving
    sentences: list[str]
    retry: list[float]  # times at which a lease may be evicted, if nothing uses it until then
    leased: bool  # True: a lease is the reason to wait; False: memory outside the leases is


def _leases_in_the_way(context: Context, candidates: tuple[Candidate, ...]) -> _InTheWay:
    book, request, world = context.book, context.request, context.world
    wanted = request.lease
    nearest = {share.device for share in candidates[0].shares}
    all_cards = {share.device for candidate in candidates for share in candidate.shares}
    first_card = candidates[0].shares[0].device
    over_own_limit = context.own_left is not None and context.own_left < request.footprint.bytes
    blockers: list[str] = []
    sentences: list[str] = []
    retry: list[float] = []
    leased = False
    for lease in context.leases:
        if lease.id == wanted.id:
            continue  # the requested model itself, which is in parts and waits for its other bytes
        devices = {share.device for share in lease.claims()}
        why = reason_to_stay(lease, world, asker=wanted.owner, importance=wanted.importance)
        if why == "just used" and not devices.isdisjoint(all_cards):
            longest = request.arrived + world.rules.most_wait(load_seconds(book, request))
            retry.append(min(longest, lease.last_used + world.rules.grace_seconds))
        if why == MOVE_FAILED and not devices.isdisjoint(all_cards):
            retry.append(lease.moves_again_at)
        counts_against_limit = over_own_limit and lease.owner == wanted.owner and lease.on_device
        if devices.isdisjoint(nearest) and not counts_against_limit:
            continue
        if why in ("in use", "a block of code") or lease.phase is Phase.ARRIVING:
            blockers.append(lease.id)
        if why or not lease.droppable:
            leased = True
        if len(sentences) > MOST_TOLD:  # this lease is counted, but not named
            sentences.append("")
            continue
        held = f"{show_bytes(lease.bytes)} on {first_card}"
        if lease.shares:
            held = bytes_label(lease)
        words = _in_words(lease, why, context)
        title = lease_title(lease, book.owner(lease.owner))
        sentences.append(f"{title} ({held}) {words}")
    return _InTheWay(blockers, sentences, retry, leased)


def reserved_for_elders(context: Context, shares: Shares) -> str:
    """A sentence about free bytes that are reserved for elders; empty if no bytes are reserved.

    `shares` name the cards. `context` holds the elders (requests ahead in the queue) and the room.
    """
    if not context.blocking_elders:
        return ""
    cards = {share.device for share in shares}
    reserved = 0
    for card in cards:
        now = max(0, context.room_now.get(card, 0))
        later = max(0, context.room_later.get(card, 0))
        reserved += now - later
    if reserved <= 0:
        return ""
    first = _that_need(context.blocking_elders, cards)
    if not first:
        return ""
    more = len(first) - 1
    name = "a notebook" if first[0].name == "kernel" else first[0].name
    waiting = f"{name} and {more} more, which are" if more else f"{name}, which is"
    return f"{show_bytes(reserved)} is reserved for {waiting} ahead in the queue"


def _that_need(tickets: tuple[Ticket, ...], cards: set[str]) -> list[Ticket]:
    """The `tickets` that wait for room on one of these `cards`."""
    found = []
    for ticket in tickets:
        for share in ticket.need:
            if share.device in cards:
                found.append(ticket)
                break
    return found


def _shortened(sentences: list[str]) -> str:
    """The `sentences` as one text, at most MOST_TOLD + 1 of them.

    There is a sentence for each lease in the way, which may be sixty on a crowded card. If two or
    more sentences are left out, the text ends with their number: `and 56 more`.
    """
    more = len(sentences) - MOST_TOLD
    if more >= 2:
        sentences = [*sentences[:MOST_TOLD], f"and {more} more"]
    return "; ".join(sentences)


def _in_words(lease: Lease, why: str, context: Context) -> str:
    """Why this lease is in the way. The text is the end of a sentence.

    `why` is the result of `reason_to_stay`.
    """
    book, wanted, world = context.book, context.request.lease, context.world
    in_use = _in_use_words(lease, why)
    if in_use:
        return in_use + _by(book, lease, wanted.owner, world)
    if why == "just used":
        idle = lease.idle_seconds(world.now)
        left = max(0.0, world.rules.grace_seconds - idle)
        used = f"was used {show_seconds(idle)} ago{_by(book, lease, wanted.owner, world)}"
        return f"{used}, and becomes evictable in {show_seconds(left)}"
    if why == MOVE_FAILED:
        return f"could not be moved{why_not_moved(book, lease)}; its process tries again"
    if why == "more important":
        return f"is more important (importance {lease.importance}, ours {wanted.importance})"
    if why in ("kept", WISHED):
        return f"is {why}"
    if why == Phase.LEAVING or lease.id in context.recalled:
        return leaves_in_words(book, lease)
    all_fit_in_host = precious_bytes(context.leases) <= host_bytes_to_be_had(book, world)
    if lease.droppable or (can_move(lease, world) and all_fit_in_host):
        return "would not free enough"
    why = needs_host_room(lease)
    return why if why in (EXEMPT, FIXED) else f"{why} now"


def _in_use_words(lease: Lease, why: str) -> str:
    """The end of a sentence: how the lease is used now. Empty if the lease is idle."""
    if lease.phase is Phase.ARRIVING and lease.kind == "model":
        return "is being loaded"
    return {"in use": "is in use", "a block of code": "is held by running code"}.get(why, "")


def _by(book: Book, lease: Lease, asker: str, world: World) -> str:
    """Which other process uses the lease, and for how long; empty if `asker` owns the lease."""
    owner = book.owner(lease.owner)
    if owner is None or lease.owner == asker:
        return ""
    by = f" by {owner.label}" if lease.kind != "kernel" else ""
    if lease.pinned_since:
        by += f" for {show_seconds(world.now - lease.pinned_since)}"
    return by


def _outside_memory(shares: Shares, context: Context) -> str:
    """The sentence for a request that waits because of memory outside the leases."""
    has = "has" if len(shares) == 1 else "have"
    free = sum(max(0, context.room_now.get(share.device, 0)) for share in shares)
    need = sum(share.bytes for share in shares)
    return (
        f"{where(shares)} {has} {show_bytes(free)} free as measured, {show_bytes(need)} are needed; "
        "memory outside our leases is in the way"
    )
