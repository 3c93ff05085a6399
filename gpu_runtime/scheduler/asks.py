"""Requests of one owner to another owner: written on a ticket, and answered in the book.

The book is all leases and requests of a host. A ticket is the entry of one request in the book.

Pure. Every owner follows the same rules: a model in use is never moved, and a kept model is never
evicted. This module has the requester's side. The module `recall` has the side of the owner that
receives a request.
"""

from __future__ import annotations

from msgspec.structs import replace

from ..attribution import attributed
from ..facts import (
    HOST,
    MOST_ENTRIES,
    PASSING,
    Book,
    Event,
    Grant,
    Lease,
    Owner,
    Phase,
    Refuse,
    Section,
    Ticket,
    Value,
    Verdict,
    Wait,
    World,
    bytes_label,
    lease_title,
)
from ..units import show_seconds
from .capacity import room
from .evictable import (
    MOVE_FAILED,
    eviction_step,
    needs_host_room,
    reason_to_stay,
    warm,
    why_not_moved,
)
from .eviction_policy import lru
from .transitions import note
from .victims import victims

ASKS = ("evict", "shed", "restore", "preload", "move", "pin", "unpin", "defrag", "who", "cancel")
DISK = "disk"  # the place of a request to evict a model that should not stay in host memory either
# The words of a request for the memory of a notebook's own code, after "the notebook was asked".
OWN_MEMORY = {
    "evict": "to move its own memory to RAM",
    "preload": "to bring its own memory back",
    "restore": "to bring its own memory back",
}
PERSON = -1  # importance of a person's request; lower numbers are more important


class Ask(Value):
    """A request of one owner to another."""

    key: str
    owner: str  # the id of the requesting owner
    verb: str
    # The id of a lease, `OWNER/NAME`. A model to be preloaded may have no lease yet. NAME is empty
    # if the request concerns the whole process (who, defrag).
    target: str
    arrived: float
    by: str = ""  # the user of the requesting process
    places: tuple[str, ...] = ()  # the cards to move to, for a move
    said_by: str = ""  # the person for whom the process asks, as the process claims; may be empty


def ask(book: Book, asked: Ask, world: World, believes_book: bool = True) -> tuple[Book, Verdict]:
    """Returns the book with the request `asked` on a ticket, and the state of the request.

    A pin in the book may have ended already, because an owner publishes the end within a second or
    more. If `believes_book` is false, an eviction of a lease that the book shows in use is a Wait,
    and its owner answers whether the lease is in use now.

    The state is Grant (done), Wait (under way) or Refuse. The requester repeats the call with the
    same key until the state is Grant or Refuse. The returned book then has no ticket for the
    request.
    """
    owner_id, _, name = asked.target.partition("/")
    section, owner = book.sections.get(owner_id), book.owner(owner_id)
    if owner is None:
        gone = f"the process that held {name} is gone" if name else "that process is gone"
        return book.without_ticket(asked.key), Refuse(gone, kind="gone")
    if section is not None:  # if the section cannot be read, only its owner can answer
        verdict = _answer_in_events(book, asked, section, name)
        if verdict is None:
            verdict = _known_result(book, asked, section, name, world)
            lease = section.lease(name)
            pinned = lease is not None and lease.pins > 0 and lease.kind != "block"
            if asked.verb in ("evict", "move") and pinned and not believes_book:
                verdict = None
        if verdict is not None:
            return book.without_ticket(asked.key), verdict

    request = f"{owner.label} was asked {wish(asked.verb, name)}"
    ticket = book.ticket(asked.key)
    if ticket is None:
        if book.entries >= MOST_ENTRIES:
            full = f"the book is full: {MOST_ENTRIES} leases and requests"
            return book, Refuse(full, kind="full")
        ticket = _new_ticket(asked, world)
        book = _log(book, asked, world, "asked", request)
    book = book.with_ticket(replace(ticket, refreshed=world.now))
    begun = _begun(book, asked, section, name)
    if begun:
        return book, Wait(f"{request}, {begun}", asked=(asked.target,))
    return book, Wait(request, asked=(asked.target,), silent=(asked.target,))


def _begun(book: Book, asked: Ask, section: Section | None, name: str) -> str:
    """The words that say what the owner does for the request; empty if it does not show that yet."""
    if section is None:
        return ""
    if asked.verb in ("preload", "restore"):
        for ticket in book.tickets:
            if (ticket.verb, ticket.owner, ticket.name) == ("use", section.owner.id, name):
                return f"and waits for room: {ticket.because}".rstrip(": .")
    lease = section.lease(name)
    if lease is None or lease.phase is Phase.SETTLED:
        return ""
    return "and is moving it"


def declined(book: Book, asked: Ask, world: World, because: str) -> Book:
    """The `book` with a new event: the request `asked` was declined, for the reason `because`."""
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
        shadows=(asked.target,) if asked.verb == "shed" else (),
        because=asked.by,
        said_by=asked.said_by,
    )


def _log(
    book: Book,
    asked: Ask,
    world: World,
    action: str,
    because: str,
) -> Book:
    owner_id, _, name = asked.target.partition("/")
    process = process_of(asked.by, book.owner(asked.owner))
    return note(
        book,
        world,
        book.lease(owner_id, name) or Lease(owner_id, name),
        action,
        asked.verb,
        because,
        by=attributed(asked.said_by, process),
    )


def process_of(user: str, owner: Owner | None) -> str:
    """The requesting process as text, such as `ann, train.ipynb (pid 4121)`."""
    label = owner.label if owner else "another process"
    return f"{user}, {label}" if user else label


def _answer_in_events(book: Book, asked: Ask, section: Section, name: str) -> Verdict | None:
    """The owner's answer to the request, from the recent events; None if there is no answer yet."""
    for event in book.events:
        if event.answers == asked.key and event.owner == section.owner.id:
            return _verdict_of(event, section.lease(name) or Lease(section.owner.id, name))
    return None


def _verdict_of(event: Event, lease: Lease) -> Verdict:
    if event.action == "declined":
        return Refuse(event.because, kind="in use", holders=(lease.id,))
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
        return _result_of_load(lease, section.owner)
    if asked.verb in ("defrag", "who"):
        return None
    if asked.verb == "cancel":
        return _result_of_cancel(book, asked, section, name)
    if asked.verb == "shed":
        if lease is not None and lease.shadow_bytes:
            return None
        free = lease or Lease(section.owner.id, name)
        return Grant(free, (), f"{name} has no copy in host memory")
    if asked.verb == "evict":
        if lease is None:
            return Grant(Lease(section.owner.id, name), (), f"{name} is on no device")
        stays = lease.on_host and lease.phase is Phase.SETTLED
        if stays and not (DISK in asked.places and lease.droppable):
            return Grant(lease, (), f"{lease_title(lease, section.owner)} is in host memory")
    if lease is None:
        return Refuse(f"{section.owner.label} does not hold {name}", kind="unknown")
    title = lease_title(lease, section.owner)
    if asked.verb in ("pin", "unpin"):
        return _result_of_pin(lease, title, keep=asked.verb == "pin")
    if asked.verb == "move" and {share.device for share in lease.shares} == set(asked.places):
        return Grant(lease, (), f"{title} is on {lease.where}")
    refusal = refusal_to_leave(book, lease, section.owner, world)
    if refusal and refusal.kind == "failed" and asked.verb == "move":
        return None  # the owner tries the move again at once, and answers
    return refusal


def _result_of_load(lease: Lease | None, owner: Owner) -> Verdict | None:
    if lease and lease.all_on_device and lease.phase is Phase.SETTLED:
        return Grant(lease, (), f"{lease_title(lease, owner)} is on {lease.where}")
    return None


def _result_of_pin(lease: Lease, title: str, *, keep: bool) -> Verdict | None:
    if lease.keep != keep:
        return None
    state = "kept" if keep else "not kept on its device"
    return Grant(lease, (), f"{title} is {state}")


def _result_of_cancel(book: Book, asked: Ask, section: Section, name: str) -> Verdict | None:
    for ticket in book.tickets:
        is_use = ticket.verb == "use" and ticket.owner == section.owner.id
        if is_use and ticket.name == name and ticket.arrived <= asked.arrived:
            return None
    waits = f"{section.owner.label} no longer waits for {name}"
    return Grant(Lease(section.owner.id, name), (), waits)


def refusal_to_leave(book: Book, lease: Lease, owner: Owner, world: World) -> Refuse | None:
    """Why the lease cannot be moved or evicted, even for a person; None if nothing prevents it."""
    why = reason_to_stay(lease, world, asker=owner.id, importance=PERSON)
    holding = f"{lease_title(lease, owner)} ({bytes_label(lease)})"
    holders = (lease.id,)
    if why == "in use":
        by = "" if lease.kind == "kernel" else f" by {owner.label}"
        because = f"{holding} is in use{by}"
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
        reason = why_not_moved(book, lease)
        because = f"{holding} could not be moved{reason}"
        if lease.kind != "kernel" or not reason or reason[2:].startswith(PASSING):
            wait = show_seconds(max(1.0, lease.moves_again_at - world.now))
            because += f". Request it again in {wait}"
        return Refuse(because, kind="failed", holders=holders)
    if not why and not _can_leave_for_a_person(book, lease, world):
        because = f"{holding} {needs_host_room(lease)}"
        return Refuse(because, kind="stays", holders=holders)
    return None


def _can_leave_for_a_person(book: Book, lease: Lease, world: World) -> bool:
    host_room = room(book, world).get(HOST, 0)
    copies = sum([other.shadow_bytes for other in book.leases() if other.id != lease.id])
    if eviction_step(lease, host_room + copies, world) is not None:
        return True
    return bool(host_victims(book, lease, host_room + copies, world))


def host_victims(book: Book, lease: Lease, host_room: int, world: World) -> tuple[Lease, ...]:
    """Models of the lease's owner to drop from host memory, so that the host has room for `lease`.

    `host_room` is the host's free bytes. The result is empty if these bytes are enough already, if
    `lease` cannot be offloaded, or if no set of such models makes the room.
    """
    if not (lease.movable and world.rules.offload):
        return ()
    pool = warm(book, world, asker=lease.owner, importance=PERSON, owner=lease.owner)
    return victims({HOST: lease.offload_bytes - host_room}, pool, world, lru) or ()


def wish(verb: str, name: str) -> str:
    """The words that follow "the process was asked", such as `to evict qwen`."""
    if verb == "who":
        return "which variables hold memory"
    if verb == "shed":
        return f"to free its copy of {name} in host memory"
    if verb == "cancel":
        return f"to end its wait for {name}"
    if name == "kernel" and verb in OWN_MEMORY:
        return OWN_MEMORY[verb]
    return f"to {verb} {name}".rstrip()
