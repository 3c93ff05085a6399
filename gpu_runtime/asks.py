"""Asking an owner to act, and what an owner does when asked or when memory is short.

Pure. From outside one asks, on a ticket of one's own; the owner obeys, within the same rules whoever asks: a model in
use is never moved, a kept one never evicted.
"""
from __future__ import annotations

from msgspec.structs import replace

from .bookkeeping import note
from .facts import (
    HOST, Book, Drop, Grant, Lease, Level, Move, Owner, Phase, Policy, Refuse, Step, Ticket, Value, Verdict, Wait, World,
)
from .planner import _find, _leave, may_leave, room, way_out
from .pressure import level, relief, views
from .units import show_bytes, show_seconds

ASKS = ("evict", "restore", "preload", "pin", "unpin", "defrag")
_ANYONE = 10**9  # less important than everything: whoever may be asked at all, may be asked by a person


class Ask(Value):
    """Something that one owner wants another to do."""

    key: str
    owner: str  # who asks
    verb: str
    target: str  # a lease id; for preload, `owner id/model name`
    arrived: float
    by: str = ""


class Order(Value):
    """What the owner's monitor is to do besides steps: preload or restore a model, pin it, defragment."""

    key: str
    verb: str
    name: str


def ask(book: Book, asked: Ask, world: World) -> tuple[Book, Verdict]:
    """The book with the ask on a ticket, and whether it is done (Grant), under way (Wait) or refused.

    Asked again with the same key it tells how things stand, so an asker polls with it.
    """
    owner, _, name = asked.target.partition("/")
    section = book.sections.get(owner)
    lease = book.lease(owner, name)
    if section is None:
        return _done(book, asked), Refuse(f"the process that held {name} is gone", kind="gone")
    for event in book.events:
        if event.by == asked.key and event.owner == owner:  # the owner's answer
            answer = Refuse(event.because, kind="failed") if event.action == "failed" else \
                Grant(lease or Lease(owner, name), (), event.because)
            return _done(book, asked), answer
    if verdict := _how_it_stands(asked, lease, name, section.names, world, section.owner):
        return _done(book, asked), verdict
    ticket = book.ticket(asked.key)
    if ticket is None:
        ticket = Ticket(asked.key, asked.owner, asked.verb, asked.target, asked.arrived, world.now,
                        recalls=(asked.target,) if asked.verb == "evict" else (), because=asked.by)
    book = book.with_ticket(replace(ticket, refreshed=world.now))
    return book, Wait(f"{section.owner.label} was asked to {asked.verb} {name}", asked=(asked.target,))


def _done(book: Book, asked: Ask) -> Book:
    return book.without_ticket(asked.key) if book.ticket(asked.key) else book


def _how_it_stands(asked: Ask, lease: Lease | None, name: str, names: tuple[str, ...], world: World,
                   owner: Owner) -> Verdict | None:
    """The answer, where there is one already."""
    if asked.verb in ("preload", "restore"):
        if lease and lease.on_device and lease.phase is Phase.SETTLED:
            return Grant(lease, (), f"{name} is on {lease.where}")
        if lease is None and name not in names:
            return Refuse(f"{owner.label} has not registered {name}, so it cannot load it", kind="unknown")
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
    why = may_leave(lease, world, asker=owner.id, importance=-1)
    if why == "in use":
        return Refuse(f"{name} ({show_bytes(lease.bytes)} on {lease.where}) is in use by {owner.label}"
                      f" for {show_seconds(world.now - lease.pinned_since)}", kind="in use", holders=(lease.id,))
    if why == "kept":
        return Refuse(f"{name} is kept on its device; unpin it first", kind="kept", holders=(lease.id,))
    return None


def obey(book: Book, owner: str, world: World, rank: Policy, key: str) -> tuple[Book, tuple[Step, ...], tuple[Order, ...]]:
    """What this owner is to do for those who wait and ask: steps for leases that leave, and orders.

    A recall is honoured where the rules let the lease go for a request of that importance; grace is honoured too.
    What may not leave simply stays, and its published pins tell the asker why.
    """
    steps: list[Step] = []
    orders: list[Order] = []
    host_room = room(book, world).get(HOST, 0)
    for ticket in book.tickets:
        target_owner, _, name = ticket.name.partition("/")
        if ticket.verb in ASKS and target_owner == owner and ticket.verb != "evict":
            orders.append(Order(ticket.key, ticket.verb, name))
            continue
        asked_by_person = ticket.verb == "evict"
        for id in ticket.recalls:
            lease = _find(book, id)
            if lease is None or lease.owner != owner or not lease.on_device:
                continue
            # A person who says "evict" is obeyed within the grace period; another program's request is not.
            asker = owner if asked_by_person else ticket.owner
            importance = -1 if asked_by_person else ticket.importance
            if may_leave(lease, world, asker=asker, importance=importance):
                continue
            asker_owner = book.owner(ticket.owner)
            who = asker_owner.label if asker_owner else "another process"
            because = f"{who} asked to evict it." if asked_by_person else f"{who} needs room for {ticket.name}."
            exit = way_out(lease, host_room, world, because=because, reason="evict" if asked_by_person else "recall")
            if exit is None:
                continue
            if isinstance(exit, Move):
                host_room -= lease.bytes
            book, steps = _leave(book, exit, key), [*steps, exit]
    return book, tuple(steps), tuple(orders)


def relieve(book: Book, owner: str, world: World, rank: Policy, key: str) -> tuple[Book, tuple[Step, ...]]:
    """What this owner moves out because its devices are too full.

    `always` is the table to the letter: everything idle for long enough leaves. `auto` acts only while it helps
    someone (requests wait, or memory that nobody leased grows on the card), takes no more than brings the level
    down, and prefers the host to the disk at every level. Bytes on their way out count as gone.
    """
    rules = world.rules
    if rules.relief == "never" or owner not in book.sections:
        return book, ()
    steps: list[Step] = []
    host_room = room(book, world).get(HOST, 0)
    for view in views(book, world):
        card = view.device
        if card.is_host or (rules.relief == "auto" and not _helps(book, view.device.id, view, world)):
            continue
        going = sum(share.bytes for lease in book.leases() if lease.phase is Phase.LEAVING
                    for share in lease.shares if share.device == card.id)
        freed = going
        idle = sorted((lease for lease in book.sections[owner].leases if _on(lease, card.id)),
                      key=lambda lease: (-lease.importance, rank(lease, world)))
        for lease in idle:
            at = view.level if rules.relief == "always" else level(_pressure_after(view, freed), rules)
            asks = relief(at, rules)
            if asks is None:
                break
            # Background evictions respect the grace period whoever owns the lease.
            if may_leave(lease, world, asker="", importance=-1) or lease.idle_seconds(world.now) <= asks.idle_seconds:
                continue
            because = f"{at} memory pressure on {card.id} ({_pressure_after(view, freed):.1%}); idle " \
                      f"{show_seconds(lease.idle_seconds(world.now))}."
            drop = asks.drop and rules.relief == "always"
            exit = way_out(lease, host_room, world, drop=drop, because=because, reason="memory_pressure")
            if exit is None or (isinstance(exit, Drop) and not asks.may_drop):
                continue
            if isinstance(exit, Move):
                host_room -= lease.bytes
            freed += sum(share.bytes for share in lease.shares if share.device == card.id)
            book, steps = _leave(book, exit, key), [*steps, exit]
    return book, tuple(steps)


def _on(lease: Lease, device: str) -> bool:
    return any(share.device == device for share in lease.shares)


def _helps(book: Book, device: str, view, world: World) -> bool:
    """Whether anybody gains if this card empties a little: somebody waits for it, or strangers grow on it."""
    waits = any(share.device == device for ticket in book.tickets if ticket.verb == "use" for share in ticket.need)
    strangers = (view.measured_bytes or 0) - view.claimed_bytes
    grows = not view.device.simulated and strangers > 0 and view.level in (Level.HIGH, Level.CRITICAL)
    return waits or grows


def _pressure_after(view, freed: int) -> float:
    from .pressure import pressure

    used = None if view.measured_bytes is None else view.measured_bytes - freed
    return pressure(view.claimed_bytes - freed, view.limit_bytes, used, view.device.total_bytes)


def answer(book: Book, world: World, owner: str, order: Order, action: str, because: str, size: int = 0) -> Book:
    """The book with an owner's answer to an order: the event carries the asker's key."""
    return note(book, world, Lease(owner, order.name), action, order.verb, because, size=size, by=order.key)
