"""What the book records once something has happened: settled, abandoned, released, published, reaped.

Pure, like the planner, but nothing is decided here: facts are always accepted, also those that show an overdraft.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from ..facts import (
    HOST,
    MOST_EVENTS,
    NEVER,
    Book,
    Device,
    Drop,
    Event,
    Ghost,
    Lease,
    Load,
    Move,
    Owner,
    Phase,
    Section,
    Shares,
    Step,
    Ticket,
    Value,
    World,
)

LEFT = (
    "offloaded",
    "unloaded",
    "lost",
)  # its device, or the warm pool: by eviction, or with its engine
DECISIONS = ("granted", "waiting", "refused")
COUNTED = ("loaded", "offloaded", "restored", "unloaded", "refused")


class Truth(Value):
    """What an owner knows of itself, from which its section of the book is written anew."""

    owner: Owner
    leases: tuple[
        Lease, ...
    ] = ()  # what lies in its memories, with pins and last use of this moment
    keys: tuple[str, ...] = ()  # decisions of its own that are under way
    residue: dict[str, int] = {}
    names: tuple[str, ...] = ()
    busy_since: float = NEVER
    idle_since: float = NEVER
    engines: tuple[int, ...] = ()  # processes that it runs models in


def note(
    book: Book,
    world: World,
    lease: Lease,
    action: str,
    reason: str,
    because: str,
    *,
    size: int = 0,
    device: str = "",
    by: str = "",
    answers: str = "",
    seconds: float = 0.0,
) -> Book:
    """The book with one more event, and the owner's counter of that action moved on."""
    event = Event(
        book.seq + 1,
        world.wall,
        lease.name,
        action,
        reason,
        because,
        size,
        device or (lease.shares or lease.target or (_NOWHERE,))[0].device,
        lease.owner,
        by,
        lease.shares if len(lease.shares) > 1 else (),
        answers,
        seconds=round(seconds, 3) or NEVER,
    )
    book = replace(book, events=(*book.events[-MOST_EVENTS + 1 :], event), seq=event.seq)
    section = book.sections.get(lease.owner)
    if section is None or action not in COUNTED:
        return book
    counts = {**section.counts, action: section.counts.get(action, 0) + 1}
    return book.with_section(replace(section, counts=counts))


class _Nowhere:
    device = ""


_NOWHERE = _Nowhere()


# -- what a step did ----------------------------------------------------------------------------------------------


def arrived(
    book: Book,
    owner: str,
    name: str,
    shares: Shares,
    world: World,
    *,
    because: str = "",
    reload_seconds: float = 0.0,
    restore_seconds: float = 0.0,
    droppable: bool = False,
    filled: Shares = (),
) -> Book:
    """The lease, settled on a device with the bytes that were measured there; `filled`, where it claims more."""
    lease = book.lease(owner, name)
    if lease is None:
        return book
    action = "restored" if lease.on_host else "moved" if lease.on_device else "loaded"
    settled = replace(
        lease,
        shares=shares,
        target=(),
        filled=filled,
        phase=Phase.SETTLED,
        settled_at=world.now,
        away_since=0.0,
        droppable=droppable,
        reload_seconds=reload_seconds or lease.reload_seconds,
        restore_seconds=restore_seconds or lease.restore_seconds,
    )
    book = book.with_lease(settled)
    if lease.kind == "block":
        return book
    return note(
        book,
        world,
        settled,
        action,
        "request",
        because or f"{name} is on {settled.where} now.",
        size=settled.bytes,
        seconds=restore_seconds or reload_seconds,
    )


def left(book: Book, step: Move | Drop, shares: Shares, world: World, by: str = "") -> Book:
    """The book after a lease has stepped aside: to `shares` in host memory, or, dropped, gone.

    Told twice (the first answer was lost), it is recorded once.
    """
    owner, _, name = step.lease.partition("/")
    lease = book.lease(owner, name)
    if lease is None or lease.phase is Phase.ARRIVING:
        return book
    if isinstance(step, Move) and lease.phase is Phase.SETTLED and lease.shares == shares:
        return book
    freed = sum(share.bytes for share in lease.shares)
    if isinstance(step, Drop):
        book = book.without_lease(owner, name)
        return note(book, world, lease, "unloaded", step.reason, step.because, size=freed, by=by)
    to_host = all(share.device == HOST for share in shares)
    settled = replace(
        lease.holding(shares), settled_at=world.now, away_since=world.now if to_host else 0.0
    )
    book = book.with_lease(settled)
    return note(
        book,
        world,
        lease,
        "offloaded" if to_host else "moved",
        step.reason,
        step.because,
        size=freed,
        by=by,
    )


def perform(book: Book, step: Step, world: World) -> Book:
    """The book as if the step had succeeded: for plans."""
    owner, _, name = step.lease.partition("/")
    if isinstance(step, Load) or (
        isinstance(step, Move) and any(s.device != HOST for s in step.shares)
    ):
        return arrived(book, owner, name, step.shares, world)
    return left(book, step, getattr(step, "shares", ()), world)


def abandon(
    book: Book, owner: str, name: str, key: str, world: World, because: str = "", pins: int = 0
) -> Book:
    """The book as it was before the decision `key`: an arrival is gone, or back on the host; a departure stays."""
    lease = book.lease(owner, name)
    if lease is None or lease.key != key or lease.phase is Phase.SETTLED:
        return book
    if not lease.shares:
        book = book.without_lease(owner, name)
    else:
        used = world.now if pins else lease.last_used
        filled = lease.filled if lease.on_device else ()
        book = book.with_lease(
            replace(
                lease,
                target=(),
                filled=filled,
                phase=Phase.SETTLED,
                key="",
                pins=pins,
                last_used=used,
            )
        )
    return note(book, world, lease, "failed", "abandoned", because) if because else book


def release(
    book: Book,
    owner: str,
    name: str,
    world: World,
    because: str = "",
    peak_bytes: int | None = None,
) -> Book:
    """The book without this lease: its owner gave it back."""
    lease = book.lease(owner, name)
    if lease is None:
        return book
    return note(
        book.without_lease(owner, name),
        world,
        lease,
        "released",
        "owner",
        because,
        size=lease.bytes,
    )


def withdraw(book: Book, key: str) -> Book:
    """The book without that ticket."""
    return book.without_ticket(key) if book.ticket(key) else book


# -- an owner's section -------------------------------------------------------------------------------------------


def publish(book: Book, truth: Truth, world: World) -> Book:
    """The book with this owner's section as its owner knows it; the same book where nothing is new.

    Whatever is under way keeps its place by its key; a key that the owner does not know was left behind by an
    interrupt and is withdrawn, whatever it had reserved.
    """
    me = truth.owner.id
    section = book.sections.get(me)
    if section is None:
        book = _first_word(book, truth, world)
        section = book.sections[me]
    keys = set(truth.keys)
    under_way = {
        lease.name: lease
        for lease in section.leases
        if lease.phase is not Phase.SETTLED and lease.key in keys
    }
    leases = []
    for known in truth.leases:
        moving = under_way.pop(known.name, None)
        if moving is not None:
            known = replace(
                moving,
                pins=max(known.pins, moving.pins if moving.phase is Phase.ARRIVING else 0),
                pinned_since=known.pinned_since,
                last_used=known.last_used,
                uses=known.uses,
            )
        leases.append(known)
    leases += under_way.values()
    order = {lease.name: place for place, lease in enumerate(section.leases)}
    leases.sort(key=lambda lease: order.get(lease.name, len(order)))
    fresh = Section(
        owner=truth.owner,
        leases=tuple(leases),
        residue=truth.residue,
        names=truth.names,
        counts=section.counts,
        engines=truth.engines,
        busy_since=truth.busy_since,
        idle_since=truth.idle_since,
    )
    if fresh != section:
        book = book.with_section(fresh)
    stale = [t.key for t in book.tickets if t.owner == me and t.key not in keys]
    for key in stale:
        book = book.without_ticket(key)
    return book


def _first_word(book: Book, truth: Truth, world: World) -> Book:
    """The book with an empty section for a new owner, and the devices and limits that it brings.

    Limits are the first owner's: whoever comes while others are there may take less, never more.
    """
    alone = not book.sections
    known: dict[str, Device] = {} if alone else {device.id: device for device in book.devices}
    limits = dict(world.limits) if alone else {**world.limits, **book.limits}
    for device in world.devices:
        known.setdefault(device.id, device)
    book = replace(book, devices=tuple(known.values()), limits=limits)
    return book.with_section(Section(owner=truth.owner))


def stirs(before: Book, after: Book) -> bool:
    """Whether whoever waits might be answered otherwise by the second book than by the first.

    A request that was looked at once more, a use that was counted and a sample that was taken are no news: those who
    wait would wake each other for ever.
    """
    if (
        (before.ghosts, before.drained, before.limits)
        != (after.ghosts, after.drained, after.limits)
        or before.sections.keys() != after.sections.keys()
        or len(before.tickets) != len(after.tickets)
    ):
        return True
    if any(
        old is not new and replace(old, refreshed=0.0) != replace(new, refreshed=0.0)
        for old, new in zip(before.tickets, after.tickets, strict=True)
    ):
        return True
    return any(
        old is not (new := after.sections[id])
        and old.leases != new.leases
        and [*map(_standing, old.leases)] != [*map(_standing, new.leases)]
        for id, old in before.sections.items()
    )


def _standing(lease: Lease) -> Lease:
    """The lease as far as it stands in anybody's way."""
    return replace(
        lease, pins=min(lease.pins, 1), pinned_since=0.0, last_used=0.0, uses=0, measured_bytes=None
    )


def measure(book: Book, world: World) -> Book:
    """The book with our samples in the place of those that are getting old, and without the ghosts that they end.

    Not on every occasion: what changes the page every second is written by every kernel every second.
    """
    fresh = {
        id: sample
        for id, sample in world.samples.items()
        if id not in book.samples
        or sample.taken_at > book.samples[id].taken_at + world.rules.stale_seconds / 2
    }
    if book.ghosts:
        ended = {
            ghost.device for ghost in book.ghosts if ghost.gone(world.samples.get(ghost.device))
        }
        fresh |= {
            id: world.samples[id]
            for id in ended  # the proof, so that nobody believes an older one
            if id not in book.samples or world.samples[id].taken_at > book.samples[id].taken_at
        }
    if fresh:
        book = replace(book, samples={**book.samples, **fresh})
    return _without_ended(book) if book.ghosts else book


def _without_ended(book: Book) -> Book:
    """The book without the ghosts that its samples no longer show.

    A number that came back to a living owner is proof too that the process which had it is gone altogether.
    """
    alive = {section.owner.pid for section in book.sections.values()}
    left = tuple(
        ghost
        for ghost in book.ghosts
        if ghost.pid not in alive and not ghost.gone(book.samples.get(ghost.device))
    )
    return book if len(left) == len(book.ghosts) else replace(book, ghosts=left)


def resign(book: Book, owner: str) -> Book:
    """The book without this owner: it is closing, and has given everything back."""
    section = book.sections.get(owner)
    if section is None and not any(ticket.owner == owner for ticket in book.tickets):
        return book
    counts = dict(book.counts)
    for action, times in (section.counts if section else {}).items():
        counts[action] = counts.get(action, 0) + times
    return replace(
        book,
        sections={id: s for id, s in book.sections.items() if id != owner},
        tickets=tuple(t for t in book.tickets if t.owner != owner),
        counts=counts,
    )


def reap(book: Book, dead: Iterable[str], world: World) -> Book:
    """The book without the owners that are proven dead, each lease's end told.

    What they held on real cards stays claimed by their ghosts until a sample shows that the driver has freed it.
    """
    for id in dead:
        section = book.sections.get(id)
        book = resign(book, id)
        if section is None:
            continue
        ghosts = _ghosts(book, section, world)
        book = replace(book, ghosts=(*book.ghosts, *ghosts)) if ghosts else book
        then = "is free once its driver says so" if ghosts else "is free again"
        for lease in section.leases:
            book = note(
                book,
                world,
                lease,
                "reaped",
                "death",
                f"{section.owner.label} ended; what it held {then}.",
                size=lease.bytes,
            )
    return book


def totals(book: Book) -> dict[str, int]:
    """Counters of this boot, owners that are gone included; evictions = offloads + unloads, always."""
    counted = {
        action: book.counts.get(action, 0)
        + sum(s.counts.get(action, 0) for s in book.sections.values())
        for action in COUNTED
    }
    return {
        "evictions": counted["offloaded"] + counted["unloaded"],
        "offloads": counted["offloaded"],
        "unloads": counted["unloaded"],
        "restorations": counted["restored"],
        "loads": counted["loaded"],
        "refusals": counted["refused"],
    }


def _ghosts(book: Book, section: Section, world: World) -> list[Ghost]:
    """One for each real card on which the owner of that section held anything, or was about to."""
    real = {
        device.id
        for device in (*book.devices, *world.devices)
        if not device.simulated and not device.is_host
    }
    held = {device: size for device, size in section.residue.items() if device in real and size}
    came: dict[str, float] = {}
    for lease in section.leases:
        for share in lease.claims():
            if share.device in real:
                at = world.now if lease.target else lease.settled_at
                held[share.device] = held.get(share.device, 0) + share.bytes
                came[share.device] = max(at, came.get(share.device, 0.0))
    return [
        Ghost(section.owner.id, section.owner.pid, device, size, came.get(device, 0.0), world.now)
        for device, size in held.items()
    ]


def tickets_of(book: Book, owner: str) -> tuple[Ticket, ...]:
    return tuple(ticket for ticket in book.tickets if ticket.owner == owner)
