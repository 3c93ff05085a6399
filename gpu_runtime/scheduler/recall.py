"""Asking an owner to act, and what an owner does when asked or when memory is short.

Pure. From outside one asks, on a ticket of one's own; the owner obeys, within the same rules whoever asks: a model in
use is never moved, a kept one never evicted.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from ..attribution import attributed
from ..facts import (
    HOST,
    MOST_ENTRIES,
    Asker,
    Book,
    Drop,
    Grant,
    Lease,
    Move,
    Owner,
    Phase,
    Policy,
    Refuse,
    Step,
    Ticket,
    Value,
    Verdict,
    Wait,
    World,
)
from ..units import show_bytes, show_seconds
from .capacity import room
from .eligibility import eviction_step, mark_leaving, reason_to_stay, warm_pool_victims
from .eviction_policy import lru
from .queue import awake
from .transitions import note

ASKS = ("evict", "restore", "preload", "move", "pin", "unpin", "defrag")
PERSON = -1  # the importance of what a person asks: above every model's


class Ask(Value):
    """Something that one owner wants another to do."""

    key: str
    owner: str  # who asks
    verb: str
    target: str  # a lease id; for preload, `owner id/model name`
    arrived: float
    by: str = ""  # whose process asks
    places: tuple[str, ...] = ()  # where to, for a move
    said_by: str = ""  # the person that it names, if any


class Order(Value):
    """What the owner's monitor is to do besides steps: preload, restore or move a model, pin it, defragment."""

    key: str
    verb: str
    name: str
    by: str = ""  # the user who asked, where the ledger vouches for one
    refused: str = ""  # why it is not done
    places: tuple[str, ...] = ()  # where to, for a move
    who: str = ""  # the person that was named, if any, and whose process asked


def ask(book: Book, asked: Ask, world: World) -> tuple[Book, Verdict]:
    """The book with the ask on a ticket, and whether it is done (Grant), under way (Wait) or refused.

    Asked again with the same key it tells how things stand, so an asker polls with it.
    """
    owner, _, name = asked.target.partition("/")
    section = book.sections.get(owner)
    lease = book.lease(owner, name)
    if section is None:
        return _done(book, asked), Refuse(
            f"the process that held {name} is gone" if name else "that process is gone", kind="gone"
        )
    for event in book.events:
        if event.answers == asked.key and event.owner == owner:  # the owner's answer
            answer = (
                Refuse(event.because, kind="failed")
                if event.action == "failed"
                else Grant(lease or Lease(owner, name), (), event.because, bytes=event.bytes)
            )
            return _done(book, asked), answer
    if verdict := _how_it_stands(book, asked, lease, name, section.names, world, section.owner):
        return _done(book, asked), verdict
    ticket = book.ticket(asked.key)
    if ticket is None:
        if book.entries >= MOST_ENTRIES:
            return book, Refuse(
                f"the book is full: {MOST_ENTRIES} leases and requests", kind="full"
            )
        ticket = Ticket(
            asked.key,
            asked.owner,
            asked.verb,
            asked.target,
            asked.arrived,
            world.now,
            places=asked.places,
            recalls=(asked.target,) if asked.verb == "evict" else (),
            because=asked.by,
            said_by=asked.said_by,
        )
        book = _noted(
            book,
            asked,
            world,
            "asked",
            f"{section.owner.label} was asked to {asked.verb} {name}".rstrip(),
        )
    book = book.with_ticket(replace(ticket, refreshed=world.now))
    return book, Wait(
        f"{section.owner.label} was asked to {asked.verb} {name}".rstrip(), asked=(asked.target,)
    )


def declined(book: Book, asked: Ask, world: World, because: str) -> Book:
    """The book with word of an ask that came to nothing: what a person wanted is told, whatever became of it."""
    return _noted(book, asked, world, "declined", because)


def _noted(book: Book, asked: Ask, world: World, action: str, because: str) -> Book:
    owner, _, name = asked.target.partition("/")
    asker = book.owner(asked.owner)
    return note(
        book,
        world,
        book.lease(owner, name) or Lease(owner, name),
        action,
        asked.verb,
        because,
        by=attributed(asked.said_by, _process(asked.by, asker)),
    )


def _process(user: str, owner: Owner | None) -> str:
    """`ann, train.ipynb (pid 4121)`."""
    label = owner.label if owner else "another process"
    return f"{user}, {label}" if user else label


def _done(book: Book, asked: Ask) -> Book:
    return book.without_ticket(asked.key) if book.ticket(asked.key) else book


def _how_it_stands(
    book: Book,
    asked: Ask,
    lease: Lease | None,
    name: str,
    names: tuple[str, ...],
    world: World,
    owner: Owner,
) -> Verdict | None:
    """The answer, where there is one already."""
    if asked.verb in ("preload", "restore"):
        if lease and lease.on_device and lease.phase is Phase.SETTLED:
            return Grant(lease, (), f"{name} is on {lease.where}")
        if lease is None and name not in names:
            return Refuse(
                f"{owner.label} has not registered {name}, so it cannot load it", kind="unknown"
            )
        return None
    if asked.verb == "defrag":
        return None
    if lease is None or (asked.verb == "evict" and lease.on_host and lease.phase is Phase.SETTLED):
        if asked.verb == "evict":
            where = "in host memory" if lease else "on no device"
            return Grant(lease or Lease(owner.id, name), (), f"{name} is {where}")
        return Refuse(f"{owner.label} does not hold {name}", kind="unknown")
    if asked.verb in ("pin", "unpin"):
        if lease.keep == (asked.verb == "pin"):
            return Grant(lease, (), f"{name} is {'kept' if lease.keep else 'free to leave'}")
        return None
    if asked.verb == "move" and {share.device for share in lease.shares} == set(asked.places):
        return Grant(lease, (), f"{name} is on {lease.where}")
    why = reason_to_stay(lease, world, asker=owner.id, importance=PERSON)
    size = f"{name} ({show_bytes(lease.bytes)} on {lease.where})"
    if why == "in use":
        since = f" for {show_seconds(world.now - lease.pinned_since)}" if lease.pinned_since else ""
        return Refuse(
            f"{size} is in use by {owner.label}{since}", kind="in use", holders=(lease.id,)
        )
    if why == "kept":
        return Refuse(
            f"{name} is kept on its device; unpin it first", kind="kept", holders=(lease.id,)
        )
    if why == "a block of code":
        return Refuse(
            f"{size} is memory of running code of {owner.label}; it goes when that code ends",
            kind="in use",
            holders=(lease.id,),
        )
    if not why and not _way_out_for_a_person(book, lease, world):
        return Refuse(
            f"{size} exists nowhere else, and the host has no room for it",
            kind="stays",
            holders=(lease.id,),
        )
    return None


def _way_out_for_a_person(book: Book, lease: Lease, world: World) -> bool:
    host_room = room(book, world).get(HOST, 0)
    return (
        eviction_step(lease, host_room, world) is not None
        or _crowd(book, lease, host_room, world) != ()
    )


def _crowd(book: Book, lease: Lease, host_room: int, world: World) -> tuple[Lease, ...]:
    """Whom the same owner's warm pool gives up, so that a lease which exists nowhere else finds room there."""
    if not (lease.movable and world.rules.offload):
        return ()
    return (
        warm_pool_victims(
            book,
            lease.own_bytes - host_room,
            world,
            lru,
            asker=lease.owner,
            importance=PERSON,
            owner=lease.owner,
        )
        or ()
    )


def obey(
    book: Book,
    owner: str,
    world: World,
    rank: Policy,
    key: str,
    askers: Mapping[str, Asker] | None = None,
) -> tuple[Book, tuple[Step, ...], tuple[Order, ...]]:
    """What this owner is to do for those who wait and ask: steps for leases that leave, and orders.

    A recall is honoured where the rules let the lease go for a request of that importance; grace is honoured too.
    What may not leave simply stays, and its published pins tell the asker why. `askers` says by ticket key who asks
    (None: everybody is trusted); a ticket that is missing there was not left by its owner, and nothing comes of it.
    Another user is given room by idle leases, and nothing else.
    """
    steps: list[Step] = []
    orders: list[Order] = []
    host_room = room(book, world).get(HOST, 0)
    answered = {
        event.answers for event in book.events if event.owner == owner
    }  # who asked has yet to hear it
    for ticket in book.tickets:
        target_owner, _, name = ticket.name.partition("/")
        asker = _ANYBODY if askers is None or ticket.owner == owner else askers.get(ticket.key)
        if asker is None:
            continue
        if (
            ticket.verb in ASKS
            and target_owner == owner
            and ticket.verb != "evict"
            and ticket.key not in answered
        ):
            refused = (
                ""
                if asker.commands
                else foreign(asker.user, ticket.verb, name, book.sections[owner].owner)
            )
            who = attributed(ticket.said_by, _process(asker.user, book.owner(ticket.owner)))
            orders.append(
                Order(ticket.key, ticket.verb, name, asker.user, refused, ticket.places, who)
            )
        if ticket.verb == "use" and not awake(ticket, world):
            continue  # a stopped process: nobody would take the room
        recalled = [
            lease for id in ticket.recalls if (lease := book.find(id)) and lease.owner == owner
        ]
        for lease in sorted(
            recalled, key=lambda lease: lease.droppable
        ):  # what needs host memory goes first
            for step in _obeyed(book, lease, ticket, host_room, world, asker):
                if isinstance(step, Move):
                    host_room -= lease.own_bytes
                book = mark_leaving(book, step, key)
                steps.append(step)
    return book, tuple(steps), tuple(orders)


_ANYBODY = Asker("", at_home=True)


def foreign(user: str, verb: str, name: str, owner: Owner) -> str:
    """Why a user may not ask this of another user's process, in a sentence."""
    what = f"{verb} {name}" if name else verb
    return (
        f"{user} may not {what} in {owner.label}: it is {owner.user}'s to say, or an operator's; others may ask "
        "idle models to step aside (evict)"
    )


def _obeyed(
    book: Book, lease: Lease, ticket: Ticket, host_room: int, world: World, asker: Asker
) -> tuple[Move | Drop, ...]:
    """The steps by which this lease, or who must go before it, gives way to the ticket; none where it stays."""
    person = ticket.verb == "evict"
    owner = book.owner(ticket.owner)
    who = attributed(ticket.said_by, owner.label if owner else "another process")
    by = attributed(ticket.said_by, _process(asker.user, owner))
    # A person who says "evict" is obeyed within the grace period; another program's request is not.
    if reason_to_stay(
        lease,
        world,
        asker=lease.owner if person else ticket.owner,
        importance=PERSON if person else max(ticket.importance, asker.importance),
    ):
        return ()
    if lease.on_host:  # asked out of the warm pool; unless it was asked off its device, and has obeyed by coming here
        if person or not lease.droppable or lease.away_since >= ticket.refreshed:
            return ()
        return (
            Drop(
                lease.id,
                lease.shares,
                f"{who} needs host memory to make room for {ticket.name}.",
                "recall",
                by,
            ),
        )
    because = f"{who} asked to evict it." if person else f"{who} needs room for {ticket.name}."
    step = eviction_step(
        lease, host_room, world, because=because, reason="evict" if person else "recall"
    )
    if step:
        return (replace(step, by=by),)
    crowd = (
        _crowd(book, lease, host_room, world) if person else ()
    )  # it follows when these have left
    return tuple(
        Drop(warm.id, warm.shares, f"The warm pool is full; {because}", "evict", by)
        for warm in crowd
    )


def answer(
    book: Book, world: World, owner: str, order: Order, action: str, because: str, size: int = 0
) -> Book:
    """The book with an owner's answer to an order: the event says who asked, and carries the key of the ask."""
    lease = book.lease(owner, order.name) or Lease(owner, order.name)
    return note(
        book, world, lease, action, order.verb, because, size=size, by=order.who, answers=order.key
    )
