"""Requests of one owner to another: written on a ticket, carried out, and answered in the book.

The book is all holders and requests of a host. A ticket is the entry of one request in the book.

Pure. Every owner follows the same rules: a model in use is never moved, and a kept model is never
evicted. The requester writes the request and reads the answer. The owner that receives it decides
which recalled models leave, and collects other work.

An owner responds within a second from a thread of its own, even while a cell runs. If it does not
respond, its process is stopped or swapping, or its interpreter is blocked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from msgspec.structs import replace

from ..attribution import attributed
from ..facts import (
    DISK,
    HOST,
    KERNEL,
    MOST_ENTRIES,
    PASSING,
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
    Shed,
    Snapshot,
    Ticket,
    Unanswered,
    Value,
    Verdict,
    Wait,
    World,
    away_word,
    bytes_label,
    lease_title,
    waits_to_return,
    why_not_moved,
)
from ..units import show_seconds
from .capacity import filled_to_size, room
from .feasibility import why_no_return
from .policies import lru
from .queue import without_grace
from .transitions import note, with_refreshed
from .victims import (
    MOVE_FAILED,
    PERSON,
    Renewed,
    copied_bytes,
    eviction_step,
    host_room_for,
    mark_leaving,
    needs_host_room,
    reason_to_stay,
    shed_step,
    victims,
    warm,
    worth_less,
)

ASKS = ("evict", "shed", "preload", "move", "pin", "unpin", "defrag", "who", "cancel", "hibernate")
# The words of a request for the memory of a notebook's own code, after "the notebook was asked".
OWN_MEMORY = {
    "evict": "to move its own memory to RAM",
    "hibernate": "to move its own memory to its disk",
    "preload": "to bring its own memory back",
}


def new_order(key: str, owner: str, verb: str, target: str, now: float, **more: Any) -> Ticket:
    """The ticket with which `owner` (an id) requests `verb` of the owner of `target`.

    `target` is the id of a lease, `OWNER/NAME`. A model to be preloaded may have no lease yet. NAME is
    empty if the request concerns the whole process (who, defrag). `more` are further fields of the
    ticket, such as `places`; `because` is the user of the requesting process.
    """
    recalls = {target: 0} if verb == "evict" else {}
    shadows = (target,) if verb == "shed" else ()
    return Ticket(key, owner, verb, target, now, now, recalls=recalls, shadows=shadows, **more)


def ask(
    book: Book, asked: Ticket, world: World, believes_book: bool = True
) -> tuple[Book, Verdict]:
    """Returns the book with the request `asked` on a ticket, and the state of the request.

    A pin in the book may have ended already, because an owner publishes the end within a second or
    more. If `believes_book` is false, an eviction of a lease that the book shows in use is a Wait,
    and its owner answers whether the lease is in use now.

    The state is Grant (done), Wait (under way) or Refuse. The requester repeats the call with the
    same key until the state is Grant or Refuse. The returned book then has no ticket for the
    request.
    """
    owner_id, _, name = asked.name.partition("/")
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
            full = f"the book is full: {MOST_ENTRIES} holders and requests"
            return book, Refuse(full, kind="full")
        ticket = asked
        book = _log(book, asked, world, "asked", request)
    book = with_refreshed(book, replace(ticket, refreshed=world.now))
    begun = _begun(book, asked, section, name)
    if begun:
        return book, Wait(f"{request}, {begun}", recalls={asked.name: 0})
    return book, Wait(request, recalls={asked.name: 0}, silent=(asked.name,))


def _begun(book: Book, asked: Ticket, section: Section | None, name: str) -> str:
    """The words that say what the owner does for the request; empty if it does not show that yet."""
    if section is None:
        return ""
    if asked.verb == "preload":
        for ticket in book.tickets:
            if (ticket.verb, ticket.owner, ticket.name) == ("use", section.owner.id, name):
                return f"and waits for room: {ticket.because}".rstrip(": .")
    lease = section.lease(name)
    if lease is None or lease.phase is Phase.SETTLED:
        return ""
    return "and is moving it"


def declined(book: Book, asked: Ticket, world: World, because: str) -> Book:
    """The `book` with a new event: the request `asked` was declined, for the reason `because`."""
    return _log(book, asked, world, "declined", because)


def _log(book: Book, asked: Ticket, world: World, action: str, because: str) -> Book:
    owner_id, _, name = asked.name.partition("/")
    process = process_of(asked.because, book.owner(asked.owner))
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


def _answer_in_events(book: Book, asked: Ticket, section: Section, name: str) -> Verdict | None:
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
    book: Book, asked: Ticket, section: Section, name: str, world: World
) -> Verdict | None:
    """The verdict that follows from the book alone; None if the owner has to act first."""
    lease = section.lease(name)
    if asked.verb == "preload":
        return _result_of_load(lease, section.owner)
    if asked.verb in ("defrag", "who", "hibernate"):
        return None
    if asked.verb == "cancel":
        return _result_of_cancel(book, asked, section, name)
    if asked.verb == "shed":
        if lease is not None and lease.shed_bytes:
            return None
        free = lease or Lease(section.owner.id, name)
        return Grant(free, (), f"{name} has no copy in RAM")
    if asked.verb == "evict":
        if lease is None:
            return Grant(Lease(section.owner.id, name), (), f"{name} is not loaded")
        stays = lease.on_host and lease.phase is Phase.SETTLED
        if stays and not (DISK in asked.places and lease.droppable):
            place = away_word(lease).replace("parked", "in RAM")
            return Grant(lease, (), f"{lease_title(lease, section.owner)} is {place}")
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
    state = "pinned" if keep else "not pinned"
    return Grant(lease, (), f"{title} is {state}")


def _result_of_cancel(book: Book, asked: Ticket, section: Section, name: str) -> Verdict | None:
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
        by = "" if lease.kind == KERNEL else f" by {owner.label}"
        because = f"{holding} is in use{by}"
        if lease.pinned_since:
            because += f" for {show_seconds(world.now - lease.pinned_since)}"
        return Refuse(because, kind="in use", holders=holders)
    if why == "kept":
        because = f"{lease.name} is pinned to its device; unpin it first"
        return Refuse(because, kind="kept", holders=holders)
    if why == "a block of code":
        because = (
            f"{holding} is memory of running code of {owner.label}; it is freed when that code ends"
        )
        return Refuse(because, kind="in use", holders=holders)
    if why == MOVE_FAILED:
        reason = why_not_moved(book.events, lease)
        because = f"{holding} could not be moved{reason}"
        if lease.kind != KERNEL or not reason or reason[2:].startswith(PASSING):
            wait = show_seconds(max(1.0, lease.moves_again_at - world.now))
            because += f". Request it again in {wait}"
        return Refuse(because, kind="failed", holders=holders)
    if not why and not _can_leave_for_a_person(book, lease, world):
        because = f"{holding} {needs_host_room(lease)}"
        return Refuse(because, kind="stays", holders=holders)
    return None


def _can_leave_for_a_person(book: Book, lease: Lease, world: World) -> bool:
    host_room = room(book, world).get(HOST, 0)
    copies = sum([other.shed_bytes for other in book.leases() if other.id != lease.id])
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
        return f"to free its copy of {name} in RAM"
    if verb == "cancel":
        return f"to end its wait for {name}"
    if name == KERNEL and verb in OWN_MEMORY:
        return OWN_MEMORY[verb]
    return f"to {verb} {name}".rstrip()


# -- the receiving owner's side --------------------------------------------------------------------


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


_TRUSTED = Asker("", at_home=True)
LEAST_PAUSE_SECONDS = 0.1  # of new uses, if `Rules.most_wait` is shorter


def obey(
    book: Book,
    owner: str,
    world: World,
    key: str,
    askers: Mapping[str, Asker] | None = None,
    rank: Policy = lru,
) -> tuple[Book, tuple[Move | Drop | Shed, ...], tuple[Order, ...]]:
    """The book in which recalled leases of `owner` leave, the steps for that, and the orders.

    A ticket of another owner recalls a lease. The lease leaves if its grace period is over, and if
    the rules allow its eviction for a request with the ticket's importance. A lease that may not
    leave stays, and its pins in the book show the requester the reason. `key` is stored in the
    leaving leases. `rank` decides which leases in host memory are worth less than a recalled lease.

    `askers` maps the key of a ticket to the user who wrote the ticket. If `askers` is None, all
    tickets are trusted; the tickets of `owner` itself always are. A ticket of another owner whose
    key is missing in `askers` was forged, and is ignored. A user without the right to command this
    owner can only have idle models evicted; other orders of this user are returned as refused.
    """
    steps: list[Move | Drop | Shed] = []
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
        if ticket.verb == "use" and not world.rules.awake(ticket, world.now):
            continue  # the requesting process is stopped, so it could not take the room
        for lease in book.find_all(ticket.shadows):
            if lease.owner == owner and lease.phase is Phase.SETTLED:
                steps += _shed_for(book, lease, ticket, asker)
        for lease in _recalled(book, owner, ticket):
            found = _steps_for(book, lease, ticket, host_room, world, asker, rank)
            if ticket.verb == "evict" and not found and ticket.key not in answered:
                book = _decline(book, lease, ticket, world, asker)
            for step in found:
                host_room -= copied_bytes(lease, step)
                book = mark_leaving(book, step, key)
                steps.append(step)
    return book, tuple(steps), tuple(orders)


def must_pause(book: Book, lease: Lease, world: World) -> bool:
    """Whether new uses of the `lease` wait, so that it gets idle and leaves for a request of another owner.

    This holds once the request has waited for `Rules.most_wait`. Otherwise a process whose uses overlap would keep its
    model for ever. A use may wait for another one, which then cannot begin. So new uses begin again in the last eighth
    of the time until the wait has doubled.
    """
    devices = {share.device for share in lease.shares}
    for ticket in book.tickets:
        needs = {share.device for share in ticket.need}
        if ticket.verb != "use" or ticket.owner == lease.owner or devices.isdisjoint(needs):
            continue
        least = max(LEAST_PAUSE_SECONDS, world.rules.most_wait(ticket.seconds))
        part, doublings = math.frexp((world.now - ticket.arrived) / least)  # from 0.5 to 1
        if doublings < 1 or part >= 15 / 16 or not world.rules.awake(ticket, world.now):
            continue
        late = without_grace(world, ticket.arrived, ticket.seconds)
        unused = replace(lease, pins=0)
        if not reason_to_stay(unused, late, asker=ticket.owner, importance=ticket.importance):
            return True
    return False


def _is_order_to(owner: str, ticket: Ticket) -> bool:
    """Whether the `ticket` requests from the process `owner` anything other than an eviction."""
    if ticket.verb not in ASKS or ticket.verb in ("evict", "shed"):
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
        who=attributed(ticket.said_by, process_of(asker.user, book.owner(ticket.owner))),
        asker=ticket.owner,
    )


def foreign(user: str, verb: str, name: str, owner: Owner) -> str:
    """The sentence that refuses a request of `user` for `verb` to `owner`, another user's process.

    `name` is the name of the model. It is empty if the request concerns the whole process.
    """
    what = f"{verb} {name}".rstrip()
    if verb in ("who", "cancel"):
        what = "ask " + wish(verb, name)
    return (
        f"{user} may not {what} in {owner.label}: only {owner.user} or an operator may. "
        "Others may only evict its idle models (evict)"
    )


def _recalled(book: Book, owner: str, ticket: Ticket) -> list[Lease]:
    """The owner's leases that the ticket recalls. Leases that need host memory are first."""
    leases = [lease for lease in book.find_all(ticket.recalls) if lease.owner == owner]
    return sorted(leases, key=lambda lease: lease.droppable)


def _steps_for(
    book: Book,
    lease: Lease,
    ticket: Ticket,
    host_room: int,
    world: World,
    asker: Asker,
    rank: Policy,
) -> tuple[Move | Drop | Shed, ...]:
    """The steps that evict this lease for the ticket; empty if the lease stays.

    If host memory has no room for this lease, the steps may make room there instead: they free
    shadows and unload other leases. A later call then moves this lease.
    """
    person = ticket.verb == "evict"
    world = without_grace(world, ticket.arrived, ticket.seconds)
    # A person's "evict" also applies within the grace period. A program's request does not.
    stays = reason_to_stay(
        lease,
        world,
        asker=lease.owner if person else ticket.owner,
        importance=PERSON if person else max(ticket.importance, asker.importance),
    )
    if stays:
        return ()
    if not lease.all_on_device and not person and lease.away_since >= ticket.refreshed:
        return ()  # the bytes that the ticket recalled have left their device already
    who, by = _names_of_asker(book, ticket, asker)
    if lease.on_host or _only_host_memory_is_needed(lease, ticket):
        return _unload_from_host(lease, ticket, who, by)
    going = lease if person else lease.leaving(ticket.recalls[lease.id])
    drop = person and DISK in ticket.places
    own = "its own memory" if ticket.name == KERNEL else ticket.name
    needs = own if own.startswith("room for") else f"room for {own}"
    because = f"{who} asked to evict it." if person else f"{who} needs {needs}."
    reason = "evict" if person else "recall"
    step = eviction_step(going, host_room, world, drop=drop, because=because, reason=reason)
    if isinstance(step, Move) and why_no_return(book, lease, world):
        return ()
    if isinstance(step, Move) or (step and drop):
        return (replace(step, by=by),)
    # Host memory has no room for the lease.
    renewed = _unloaded_for(book, going, step, person, world, rank)
    made = host_room_for(book, going, host_room, world, rank, owner=lease.owner, renewed=renewed)
    if made is not None:
        because = f"RAM is full; {because}"
        freed = [shed_step(other, because, reason, by) for other in made[0]]
        return (*freed, *[Drop(other.id, other.shares, because, reason, by) for other in made[1]])
    if step is None and waits_to_return(book, ticket):
        # The returning bytes leave host memory next, so its budget may be exceeded meanwhile.
        wide = room(*filled_to_size(book, world, {HOST})).get(HOST, 0)
        step = eviction_step(going, wide, world, because=because, reason=reason)
    return (replace(step, by=by),) if step else ()


def _only_host_memory_is_needed(lease: Lease, ticket: Ticket) -> bool:
    """Whether the ticket recalls a lease in parts for its bytes in host memory.

    An offload of the lease's bytes on a card would then use even more host memory.
    """
    if ticket.verb != "use" or not lease.in_parts or not lease.droppable:
        return False
    cards = {share.device for share in ticket.need}
    return bool(cards) and not any(lease.bytes_on(card) for card in cards)


def _decline(book: Book, lease: Lease, ticket: Ticket, world: World, asker: Asker) -> Book:
    """The book with the owner's answer that this lease is in use; the same book if it is not."""
    refusal = refusal_to_leave(book, lease, book.sections[lease.owner].owner, world)
    if refusal is None or not lease.pins or lease.kind == "block":
        return book
    _, by = _names_of_asker(book, ticket, asker)
    return note(book, world, lease, "declined", "evict", refusal.because, by=by, answers=ticket.key)


def _names_of_asker(book: Book, ticket: Ticket, asker: Asker) -> tuple[str, str]:
    """The requester's name in two forms: for sentences, and for the field `by` of a step."""
    owner = book.owner(ticket.owner)
    shown = attributed(ticket.said_by, owner.label if owner else "another process")
    return shown, attributed(ticket.said_by, process_of(asker.user, owner))


def _unload_from_host(lease: Lease, ticket: Ticket, who: str, by: str) -> tuple[Drop, ...]:
    """The step that unloads an evicted lease from host memory; empty if the lease stays.

    A person's request unloads the lease only with `--drop`. Any other request unloads every lease
    that has a source.
    """
    if not lease.droppable:
        return ()
    if ticket.verb != "evict":
        because = f"{who} needs RAM to make room for {ticket.name}."
        return (Drop(lease.id, lease.shares, because, "recall", by),)
    if DISK in ticket.places:
        return (Drop(lease.id, lease.shares, f"{who} asked to unload it.", "evict", by),)
    return ()


def _unloaded_for(
    book: Book, lease: Lease, step: Move | Drop | None, person: bool, world: World, rank: Policy
) -> Renewed:
    """Returns a function that chooses the leases to unload from host memory so that `lease` fits.

    The returned function has one parameter, the number of free bytes in host memory.

    `step` is None if the lease can be neither moved nor dropped now. Then other leases are unloaded
    for it only if a `person` made the request. If there is a `step`, only leases that are worth
    less than this lease are unloaded for it.
    """
    if step is None and not person:
        return lambda host_room: ()
    if step is None:
        return partial(host_victims, book, lease, world=world)
    importance = PERSON if person else lease.importance
    pool = warm(book, world, asker=lease.owner, importance=importance, owner=lease.owner)
    return partial(worth_less, pool, lease, world=world, rank=rank)


def _shed_for(book: Book, lease: Lease, ticket: Ticket, asker: Asker) -> list[Shed]:
    """The step with which this lease gives back host memory for the ticket; empty if it has none."""
    if not lease.shed_bytes or lease.stowing:
        return []
    who, by = _names_of_asker(book, ticket, asker)
    return [shed_step(lease, f"{who} needs RAM.", "recall", by)]


def answer(
    book: Book, world: World, owner: str, order: Order, action: str, because: str, size: int = 0
) -> Book:
    """The book with the answer of `owner` to `order`: an event with the key of the request.

    `action` is the event's action ("failed" for a refusal), and `because` is the event's sentence.
    `size` is the number of bytes that were freed or taken. The event also names the requester.
    """
    lease = book.lease(owner, order.name) or Lease(owner, order.name)
    return note(
        book, world, lease, action, order.verb, because, size=size, by=order.who, answers=order.key
    )


# -- requests that are not answered ----------------------------------------------------------------


def unanswered(seen: Snapshot) -> tuple[Unanswered, ...]:
    """Each owner in `seen` with a request that it does not answer. The longest silence is first.

    An owner has responded if it has published that the model is in use, has begun the work, or
    waits for room to restore the model. `Rules.answer_seconds` is the time that an owner has to
    respond. A waiting request (`use`) is skipped if its requester has not refreshed it for
    `Rules.refresh_seconds`.
    """
    found = []
    for ticket in seen.tickets:
        since = _since(ticket)
        if seen.now - since <= seen.rules.answer_seconds:
            continue  # too early to judge
        if ticket.verb == "use" and seen.is_asleep(ticket):
            continue  # the requester itself is stopped, so no owner makes room for it
        owners = _unresponsive_owners(seen, ticket)
        found += [Unanswered(owner, ticket, since) for owner in owners]
    return tuple(sorted(found, key=lambda silence: silence.since))


def _since(ticket: Ticket) -> float:
    """The time of the request; for a waiting request (`use`), the time of its present recalls."""
    if ticket.verb == "use":
        return ticket.recalled_since or ticket.arrived
    return ticket.arrived


def _unresponsive_owners(seen: Snapshot, ticket: Ticket) -> list[Owner]:
    """The owners that should answer the ticket and have not responded, without repetitions."""
    owners: dict[Owner, None] = {}
    for lease_id in _addressed(ticket):
        owner_id, _, name = lease_id.partition("/")
        section = seen.sections.get(owner_id)
        if section is None or owner_id == ticket.owner:
            continue
        if not _responds(seen, section, name, ticket):
            owners[section.owner] = None
    return list(owners)


def _addressed(ticket: Ticket) -> tuple[str, ...]:
    """The ids (`owner/name`) of the leases that the ticket is about."""
    return tuple(ticket.recalls) if ticket.verb == "use" else (ticket.name,)


def _responds(seen: Snapshot, section: Section, name: str, ticket: Ticket) -> bool:
    lease = section.lease(name)
    if lease is not None and lease.phase is not Phase.SETTLED:
        return True
    if ticket.verb == "preload":
        waits_for_room = any(
            other.owner == section.owner.id and other.name == name for other in seen.tickets
        )
        return waits_for_room or (lease is not None and lease.all_on_device)
    if ticket.verb in ("pin", "unpin"):
        return lease is None or lease.keep == (ticket.verb == "pin")
    if ticket.verb in ("defrag", "who", "cancel"):
        return False
    if ticket.verb == "hibernate":
        return lease is not None and lease.stowing
    if ticket.verb == "shed":
        return lease is None or lease.stowing or not lease.shed_bytes
    if lease is None or lease.pins or not lease.on_device:
        return True
    # A part of the lease has left.
    return ticket.verb == "use" and lease.away_since > _since(ticket)
