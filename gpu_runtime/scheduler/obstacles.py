"""Explains why a request waits, and sets the time of the next decision.

Pure. `admission` decides whether a request waits.
"""

from __future__ import annotations

from typing import NamedTuple

from ..facts import (
    Book,
    Candidate,
    Lease,
    Phase,
    Shares,
    Ticket,
    Wait,
    World,
    bytes_label,
    lease_title,
    where,
)
from ..units import show_bytes, show_seconds
from .context import Context
from .evictable import (
    EXEMPT,
    MOVE_FAILED,
    WISHED,
    can_move,
    leaves_in_words,
    needs_host_room,
    reason_to_stay,
    why_not_moved,
)
from .queue import load_seconds
from .stuck import host_bytes_to_be_had
from .victims import precious_bytes

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
        sentences.append(_ahead_in_words(ahead))
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


def _ahead_in_words(ahead: int) -> str:
    return f"{ahead} requests are ahead" if ahead > 1 else "1 request is ahead"


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
    return why if why == EXEMPT else f"{why} now"


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
