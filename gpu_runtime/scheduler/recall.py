"""An owner's side of requests: decides which recalled models leave, and collects other work.

Pure. The module `asks` has the requester's side: it writes the request on a ticket (an entry in the
book) and reads the answer. Every owner follows the same rules: a model in use is never moved, and a
kept model is never evicted. A shadow is an unchanged copy in host memory of a model that is on a
card.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from msgspec.structs import replace

from ..attribution import attributed
from ..facts import (
    HOST,
    Asker,
    Book,
    Drop,
    Lease,
    Move,
    Owner,
    Phase,
    Policy,
    Share,
    Shed,
    Ticket,
    Value,
    World,
)
from . import shadows
from .asks import (
    ASKS,
    DISK,
    PERSON,
    host_victims,
    process_of,
    refusal_to_leave,
    wish,
)
from .capacity import filled_to_size, room
from .evictable import (
    copied_bytes,
    eviction_step,
    mark_leaving,
    reason_to_stay,
    warm,
    worth_less,
)
from .eviction_policy import lru
from .feasibility import why_no_return
from .queue import awake, without_grace
from .transitions import note


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
        if ticket.verb == "use" and not awake(ticket, world):
            continue  # the requesting process is stopped, so it could not take the room
        for lease_id in ticket.shadows:
            lease = book.find(lease_id)
            if lease is not None and lease.owner == owner and lease.phase is Phase.SETTLED:
                steps += _shed_for(book, lease, ticket, asker)
        for lease in _recalled(book, owner, ticket):
            found = _steps_for(
                book,
                lease,
                ticket,
                host_room,
                world,
                asker,
                rank,
            )
            if ticket.verb == "evict" and not found and ticket.key not in answered:
                book = _decline(book, lease, ticket, world, asker)
            for step in found:
                host_room -= copied_bytes(lease, step)
                if not isinstance(step, Shed):
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
        if doublings < 1 or part >= 15 / 16 or not awake(ticket, world):
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
    part = 0 if person else ticket.bytes_recalled(lease.id)
    drop = person and DISK in ticket.places
    own = "its own memory" if ticket.name == "kernel" else ticket.name
    needs = own if own.startswith("room for") else f"room for {own}"
    because = f"{who} asked to evict it." if person else f"{who} needs {needs}."
    reason = "evict" if person else "recall"
    step = eviction_step(
        lease, host_room, world, part=part, drop=drop, because=because, reason=reason
    )
    alone = (replace(step, by=by),) if step is not None else ()
    if isinstance(step, Move) and why_no_return(book, lease, world):
        return ()
    if isinstance(step, Move) or (step is not None and drop):
        return alone
    # Host memory has no room for the lease.
    going = replace(lease, target=(Share(HOST, part),) if part else ())
    renewed = _unloaded_for(book, going, step, person, world, rank)
    found = shadows.room_for(
        book, going, host_room, world, rank, owner=lease.owner, renewed=renewed
    )
    if found is None and step is None and _makes_way_for_a_return(book, ticket):
        # The returning bytes leave host memory next, so its budget may be exceeded meanwhile.
        wide = room(*filled_to_size(book, world, {HOST})).get(HOST, 0)
        step = eviction_step(lease, wide, world, part=part, because=because, reason=reason)
        return (replace(step, by=by),) if step is not None else ()
    if found is None:
        return alone
    because = f"The warm pool is full; {because}"
    freed = [shadows.shed(other, because, reason, by) for other in found[0]]
    return (*freed, *[Drop(one.id, one.shares, because, reason, by) for one in found[1]])


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


def _makes_way_for_a_return(book: Book, ticket: Ticket) -> bool:
    """Whether the `ticket` waits for the return of bytes that exist nowhere else."""
    lease = book.lease(ticket.owner, ticket.name) if ticket.verb == "use" else None
    return lease is not None and lease.must_return


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
        because = f"{who} needs host memory to make room for {ticket.name}."
        return (Drop(lease.id, lease.shares, because, "recall", by),)
    if DISK in ticket.places:
        return (Drop(lease.id, lease.shares, f"{who} asked to unload it.", "evict", by),)
    return ()


def _unloaded_for(
    book: Book,
    lease: Lease,
    step: Move | Drop | None,
    person: bool,
    world: World,
    rank: Policy,
) -> shadows.Renewed:
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
    """The step that frees the shadow of this lease for the ticket; empty without a shadow."""
    if not lease.shadow_bytes:
        return []
    who, by = _names_of_asker(book, ticket, asker)
    return [shadows.shed(lease, f"{who} needs host memory.", "recall", by)]


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

    `action` is the event's action ("failed" for a refusal), and `because` is the event's sentence.
    `size` is the number of bytes that were freed or taken. The event also names the requester.
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
