"""Requests of one owner to another owner, and what an owner does on request.

Pure. A process writes its request to another owner on a ticket of its own. Every owner follows the
same rules: a model in use is never moved, and a kept model is never evicted.
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
    Event,
    Grant,
    Lease,
    Move,
    Owner,
    Phase,
    Policy,
    Refuse,
    Section,
    Ticket,
    Value,
    Verdict,
    Wait,
    World,
)
from ..units import show_bytes, show_seconds
from .capacity import room
from .eligibility import (
    MOVE_FAILED,
    eviction_step,
    mark_leaving,
    reason_to_stay,
    warm_pool_victims,
    worth_less,
)
from .eviction_policy import lru
from .queue import awake
from .transitions import note

ASKS = ("evict", "restore", "preload", "move", "pin", "unpin", "defrag", "who")
PERSON = -1  # importance of a person's request; lower numbers are more important


class Ask(Value):
    """A request of one owner to another."""

    key: str
    owner: str  # the id of the requesting owner
    verb: str
    target: str  # a lease id; for preload, `owner id/model name`
    arrived: float
    by: str = ""  # the user of the requesting process
    places: tuple[str, ...] = ()  # the cards to move to, for a move
    said_by: str = ""  # the person for whom the process asks, as the process claims; may be empty


class Order(Value):
    """Work, apart from evictions, that an owner's monitor does on request, such as a preload."""

    key: str
    verb: str
    name: str
    by: str = ""  # the requesting user, if the ledger identifies one
    refused: str = ""  # why the order is refused; empty if it is not
    places: tuple[str, ...] = ()  # the cards to move to, for a move
    who: str = ""  # the person, if the process named one, and the requesting process
    asker: str = ""  # the id of the requesting owner


# -- the requesting side ---------------------------------------------------------------------------


def ask(book: Book, asked: Ask, world: World) -> tuple[Book, Verdict]:
    """The book with the request `asked` on a ticket, and the state of that request.

    The state is Grant (done), Wait (under way) or Refuse. A call with the same key returns the
    current state, so the requester repeats the call until the request is done.
    """
    owner_id, _, name = asked.target.partition("/")
    section, owner = book.sections.get(owner_id), book.owner(owner_id)
    if owner is None:
        gone = f"the process that held {name} is gone" if name else "that process is gone"
        return _without_ticket(book, asked), Refuse(gone, kind="gone")
    if section is not None:  # else nobody but its owner can read it, and answer
        verdict = _answer_in_events(book, asked, section, name)
        if verdict is None:
            verdict = _known_result(book, asked, section, name, world)
        if verdict is not None:
            return _without_ticket(book, asked), verdict

    request = f"{owner.label} was asked {_wish(asked.verb, name)}"
    ticket = book.ticket(asked.key)
    if ticket is None:
        if book.entries >= MOST_ENTRIES:
            full = f"the book is full: {MOST_ENTRIES} leases and requests"
            return book, Refuse(full, kind="full")
        ticket = _new_ticket(asked, world)
        book = _log(book, asked, world, "asked", request)
    book = book.with_ticket(replace(ticket, refreshed=world.now))
    return book, Wait(request, asked=(asked.target,))


def declined(book: Book, asked: Ask, world: World, because: str) -> Book:
    """The book with an event for the failed request `asked`; `because` is the reason."""
    return _log(book, asked, world, "declined", because)


def _new_ticket(asked: Ask, world: World) -> Ticket:
    return Ticket(
        key=asked.key,
        owner=asked.owner,
        verb=asked.verb,
        name=asked.target,
        arrived=asked.arrived,
        refreshed=world.now,
        places=asked.places,
        recalls=(asked.target,) if asked.verb == "evict" else (),
        because=asked.by,
        said_by=asked.said_by,
    )


def _without_ticket(book: Book, asked: Ask) -> Book:
    return book.without_ticket(asked.key) if book.ticket(asked.key) else book


def _log(
    book: Book,
    asked: Ask,
    world: World,
    action: str,
    because: str,
) -> Book:
    owner_id, _, name = asked.target.partition("/")
    process = _process(asked.by, book.owner(asked.owner))
    return note(
        book,
        world,
        book.lease(owner_id, name) or Lease(owner_id, name),
        action,
        asked.verb,
        because,
        by=attributed(asked.said_by, process),
    )


def _process(user: str, owner: Owner | None) -> str:
    """The requesting process as text, such as `ann, train.ipynb (pid 4121)`."""
    label = owner.label if owner else "another process"
    return f"{user}, {label}" if user else label


def _answer_in_events(book: Book, asked: Ask, section: Section, name: str) -> Verdict | None:
    """The owner's answer to the request, from the recent events; None if there is none yet."""
    for event in book.events:
        if event.answers == asked.key and event.owner == section.owner.id:
            return _verdict_of(event, section.lease(name) or Lease(section.owner.id, name))
    return None


def _verdict_of(event: Event, lease: Lease) -> Verdict:
    if event.action == "failed":
        return Refuse(event.because, kind="failed")
    return Grant(lease, (), event.because, bytes=event.bytes)


def _known_result(
    book: Book,
    asked: Ask,
    section: Section,
    name: str,
    world: World,
) -> Verdict | None:
    """The verdict that follows from the book alone; None if the owner has to act first."""
    lease = section.lease(name)
    if asked.verb in ("preload", "restore"):
        return _result_of_load(lease)
    if asked.verb in ("defrag", "who"):
        return None
    if asked.verb == "evict":
        if lease is None:
            return Grant(Lease(section.owner.id, name), (), f"{name} is on no device")
        if lease.on_host and lease.phase is Phase.SETTLED:
            return Grant(lease, (), f"{name} is in host memory")
    if lease is None:
        return Refuse(f"{section.owner.label} does not hold {name}", kind="unknown")
    if asked.verb in ("pin", "unpin"):
        return _result_of_pin(lease, keep=asked.verb == "pin")
    if asked.verb == "move" and {share.device for share in lease.shares} == set(asked.places):
        return Grant(lease, (), f"{name} is on {lease.where}")
    refusal = _refusal_to_leave(book, lease, section.owner, world)
    if refusal and refusal.kind == "failed" and asked.verb == "move":
        return None  # its owner tries at once, and answers
    return refusal


def _result_of_load(lease: Lease | None) -> Verdict | None:
    if lease and lease.on_device and lease.phase is Phase.SETTLED:
        return Grant(lease, (), f"{lease.name} is on {lease.where}")
    return None


def _result_of_pin(lease: Lease, *, keep: bool) -> Verdict | None:
    if lease.keep != keep:
        return None
    state = "kept" if keep else "not kept on its device"
    return Grant(lease, (), f"{lease.name} is {state}")


def _refusal_to_leave(book: Book, lease: Lease, owner: Owner, world: World) -> Refuse | None:
    """Why the lease cannot be moved or evicted, even for a person; None if it can."""
    why = reason_to_stay(lease, world, asker=owner.id, importance=PERSON)
    holding = f"{lease.name} ({show_bytes(lease.bytes)} on {lease.where})"
    holders = (lease.id,)
    if why == "in use":
        because = f"{holding} is in use by {owner.label}"
        if lease.pinned_since:
            because += f" for {show_seconds(world.now - lease.pinned_since)}"
        return Refuse(because, kind="in use", holders=holders)
    if why == "kept":
        because = f"{lease.name} is kept on its device; unpin it first"
        return Refuse(because, kind="kept", holders=holders)
    if why == "a block of code":
        because = (
            f"{holding} is memory of running code of {owner.label}; it is freed when that code ends"
        )
        return Refuse(because, kind="in use", holders=holders)
    if why == MOVE_FAILED:
        wait = show_seconds(max(1.0, lease.moves_again_at - world.now))
        because = (
            f"{holding} could not be moved{_why_not_moved(book, lease)}. Request it again in {wait}"
        )
        return Refuse(because, kind="failed", holders=holders)
    if not why and not _can_leave_for_a_person(book, lease, world):
        because = f"{holding} exists nowhere else, and the host has no room for it"
        return Refuse(because, kind="stays", holders=holders)
    return None


def _why_not_moved(book: Book, lease: Lease) -> str:
    """The owner's reason for the last failed move of `lease`, after a colon; else empty."""
    for event in reversed(book.events):
        if (event.owner, event.model, event.action) == (lease.owner, lease.name, "failed"):
            return ": " + event.because.partition(": ")[2].rstrip(".")
    return ""


def _can_leave_for_a_person(book: Book, lease: Lease, world: World) -> bool:
    host_room = room(book, world).get(HOST, 0)
    if eviction_step(lease, host_room, world) is not None:
        return True
    return bool(_host_victims(book, lease, host_room, world))


def _host_victims(book: Book, lease: Lease, host_room: int, world: World) -> tuple[Lease, ...]:
    """The owner's models to drop from host memory, so that a lease without a source fits there."""
    if not (lease.movable and world.rules.offload):
        return ()
    victims = warm_pool_victims(
        book,
        lease.own_bytes - host_room,
        world,
        lru,
        asker=lease.owner,
        importance=PERSON,
        owner=lease.owner,
    )
    return victims or ()


# -- the owner's side ------------------------------------------------------------------------------


_TRUSTED = Asker("", at_home=True)


def obey(
    book: Book,
    owner: str,
    world: World,
    key: str,
    askers: Mapping[str, Asker] | None = None,
    rank: Policy = lru,
) -> tuple[Book, tuple[Move | Drop, ...], tuple[Order, ...]]:
    """The book with the recalled leases of `owner` leaving, the steps for them, and the orders.

    A recalled lease leaves if its grace period is over and the rules allow its eviction for a
    request of that importance. Otherwise it stays, and its pins in the book show the requester the
    reason. `key` is stored in the leaving leases. `rank` decides which leases in host memory are
    worth less than the recalled ones.

    `askers` maps the key of a ticket to the user who wrote the ticket; with None, all tickets are
    trusted. A ticket whose key is missing in `askers` was forged, and is ignored. A user without
    the right to command this owner can only have idle models evicted.
    """
    steps: list[Move | Drop] = []
    orders: list[Order] = []
    host_room = room(book, world).get(HOST, 0)
    # The ticket of an answered request stays in the book until the requester has read the answer.
    answered = {event.answers for event in book.events if event.owner == owner}
    for ticket in book.tickets:
        asker = _TRUSTED
        if askers is not None and ticket.owner != owner:
            known = askers.get(ticket.key)
            if known is None:
                continue
            asker = known
        if _is_order_to(owner, ticket) and ticket.key not in answered:
            orders.append(_order(book, owner, ticket, asker))
        if ticket.verb == "use" and not awake(ticket, world):
            continue  # the requesting process is stopped, so it could not take the room
        for lease in _recalled(book, owner, ticket):
            for step in _steps_for(book, lease, ticket, host_room, world, asker, rank):
                if isinstance(step, Move):
                    host_room -= lease.own_bytes
                book = mark_leaving(book, step, key)
                steps.append(step)
    return book, tuple(steps), tuple(orders)


def _is_order_to(owner: str, ticket: Ticket) -> bool:
    """Whether the `ticket` requests something other than an eviction from the process `owner`."""
    if ticket.verb not in ASKS or ticket.verb == "evict":
        return False
    target, _, _ = ticket.name.partition("/")
    return target == owner


def _order(book: Book, owner: str, ticket: Ticket, asker: Asker) -> Order:
    _, _, name = ticket.name.partition("/")
    refused = ""
    if not asker.commands:
        refused = foreign(asker.user, ticket.verb, name, book.sections[owner].owner)
    return Order(
        ticket.key,
        ticket.verb,
        name,
        by=asker.user,
        refused=refused,
        places=ticket.places,
        who=attributed(ticket.said_by, _process(asker.user, book.owner(ticket.owner))),
        asker=ticket.owner,
    )


def _wish(verb: str, name: str) -> str:
    """The end of the sentence "the process was asked ...", such as `to evict qwen`."""
    return "which variables hold memory" if verb == "who" else f"to {verb} {name}".rstrip()


def foreign(user: str, verb: str, name: str, owner: Owner) -> str:
    """The sentence that `user` may not request `verb` from `owner`, another user's process.

    `name` is the model; it is empty for a request that concerns the whole process.
    """
    what = "ask " + _wish(verb, name) if verb == "who" else f"{verb} {name}".rstrip()
    return (
        f"{user} may not {what} in {owner.label}: only {owner.user} or an operator may. "
        "Others may only evict its idle models (evict)"
    )


def _recalled(book: Book, owner: str, ticket: Ticket) -> list[Lease]:
    """The owner's leases that the ticket recalls. Leases that need host memory are first."""
    leases = []
    for lease_id in ticket.recalls:
        lease = book.find(lease_id)
        if lease is not None and lease.owner == owner:
            leases.append(lease)
    return sorted(leases, key=lambda lease: lease.droppable)


def _steps_for(
    book: Book,
    lease: Lease,
    ticket: Ticket,
    host_room: int,
    world: World,
    asker: Asker,
    rank: Policy,
) -> tuple[Move | Drop, ...]:
    """The steps that evict this lease for the ticket; empty if the lease stays.

    If host memory is full, the steps unload other leases from there, and the lease follows later.
    """
    person = ticket.verb == "evict"
    # A person's "evict" also applies within the grace period. A program's request does not.
    stays = reason_to_stay(
        lease,
        world,
        asker=lease.owner if person else ticket.owner,
        importance=PERSON if person else max(ticket.importance, asker.importance),
    )
    if stays:
        return ()
    owner = book.owner(ticket.owner)
    who = attributed(ticket.said_by, owner.label if owner else "another process")
    by = attributed(ticket.said_by, _process(asker.user, owner))
    if lease.on_host:
        # Only a program recalls leases from host memory (the warm pool). If the lease arrived there
        # after the ticket was last refreshed, the ticket recalled it from its device, and it has
        # left the device.
        if person or not lease.droppable or lease.away_since >= ticket.refreshed:
            return ()
        because = f"{who} needs host memory to make room for {ticket.name}."
        return (Drop(lease.id, lease.shares, because, "recall", by),)
    because = f"{who} asked to evict it." if person else f"{who} needs room for {ticket.name}."
    reason = "evict" if person else "recall"
    step = eviction_step(lease, host_room, world, because=because, reason=reason)
    if isinstance(step, Move):
        return (replace(step, by=by),)
    victims = _host_victims(book, lease, host_room, world) if person and step is None else ()
    if step is not None:
        importance = PERSON if person else lease.importance
        victims = worth_less(
            book,
            lease,
            host_room,
            world,
            rank,
            asker=lease.owner,
            importance=importance,
            owner=lease.owner,
        )
    if not victims:
        return (replace(step, by=by),) if step is not None else ()
    # The lease itself is moved by a later call, once these leases have left host memory.
    because = f"The warm pool is full; {because}"
    return tuple(Drop(warm.id, warm.shares, because, reason, by) for warm in victims)


def answer(
    book: Book,
    world: World,
    owner: str,
    order: Order,
    action: str,
    because: str,
    size: int = 0,
) -> Book:
    """The book with the answer of `owner` to `order`: an event with the key of the request.

    `action` is the event's action ("failed" for a refusal), and `because` its sentence. `size` is
    the number of bytes that were freed or taken. The event also names the requester.
    """
    lease = book.lease(owner, order.name) or Lease(owner, order.name)
    return note(
        book,
        world,
        lease,
        action,
        order.verb,
        because,
        size=size,
        by=order.who,
        answers=order.key,
    )
