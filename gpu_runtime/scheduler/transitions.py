"""Changes the book after something has happened, such as an arrival, an eviction or a death.

Pure. This module decides nothing: facts are always accepted, even if they show an overdraft. The
book is all leases and requests of a host, and an owner's section is the owner's part of it. A lease
is settled while it is neither arriving on its device nor leaving it. A ticket is the entry of a
waiting request. A sample is one measurement of a device. A ghost is the memory that a dead process
held and that the driver may not have freed yet.

In the book, one name means one physical card for all processes. But each process can see a
different selection of the cards, which torch numbers from 0. In a container, the driver also
numbers the visible cards from 0. So the first owner uses its driver's numbers as names, and later
owners find the cards by UUID.
"""

from __future__ import annotations

import math
import re
from collections import Counter
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
    Shed,
    Staying,
    Step,
    Ticket,
    Value,
    World,
)
from .caps import as_capped
from .victims import shadow_freed

# Actions of a lease that left its device or host memory: it was evicted, or lost with its engine.
LEFT = ("offloaded", "unloaded", "lost")
# The event of each of these actions records when the lease was used.
ENDED_A_STAY = (*LEFT, "reaped", "released")
MOST_BESIDE = 8  # names of other models that are recorded with a load, and named in a plan
DECISIONS = ("granted", "waiting", "refused")
MOST_COUNT = 1 << 62  # a larger number of counts or bytes could not be written
COUNTED = ("loaded", "offloaded", "restored", "unloaded", "refused")


class Truth(Value):
    """The facts of an owner about itself, from which its section of the book is rewritten."""

    owner: Owner
    leases: tuple[Lease, ...] = ()  # its leases with their current pins and last use
    keys: tuple[str, ...] = ()  # keys of its own decisions that are under way
    residue: dict[str, int] = {}
    busy_since: float = NEVER
    idle_since: float = NEVER
    engines: tuple[int, ...] = ()  # pids of the processes in which it runs models
    staying: tuple[Staying, ...] = ()


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
    beside: tuple[str, ...] = (),
) -> Book:
    """The book with one more event about `lease`. Also counts `action` for the lease's owner.

    `reason`, `because`, `by`, `answers`, `seconds` and `beside` are fields of the event
    (`facts.Event`), and `size` is its bytes. `device` defaults to the lease's first device.
    """
    owner = book.owner(lease.owner)
    event = Event(
        seq=book.seq + 1,
        wall=world.wall,
        model=lease.name,
        action=action,
        reason=reason,
        because=because,
        bytes=min(size, MOST_COUNT),
        device=device or _first_device(lease),
        owner=lease.owner,
        by=by,
        shares=lease.shares if len(lease.shares) > 1 else (),
        answers=answers,
        seconds=round(seconds, 3) or NEVER,
        beside=beside,
        notebook=owner.notebook if owner else "",
        uses=lease.recent_uses if action in ENDED_A_STAY else "",
        source=lease.source,
        model_type=lease.model_type if action in ENDED_A_STAY else "",
        quantization=lease.quantization if action in ENDED_A_STAY else "",
    )
    book = replace(book, events=(*book.events[-MOST_EVENTS + 1 :], event), seq=event.seq)
    section = book.sections.get(lease.owner)
    if section is None or action not in COUNTED:
        return book
    counts = {**section.counts, action: section.counts.get(action, 0) + 1}
    return book.with_section(replace(section, counts=counts))


def _first_device(lease: Lease) -> str:
    shares = lease.shares or lease.target
    return shares[0].device if shares else ""


# -- the effect of a step --------------------------------------------------------------------------


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
    earlier_bytes: int = 0,
) -> Book:
    """The book with the lease `name` of `owner` settled on a device.

    `shares` are the claimed bytes. `filled` are the measured bytes, if more bytes are claimed than
    measured. `because` is the event's sentence. `reload_seconds` or `restore_seconds` is how long
    the arrival took; 0 keeps the old value. `droppable` is True if the model's source is proven to
    have the same bytes. `earlier_bytes` are bytes that this request has restored before. No event
    is noted for a block of code, or while a part of the lease is still in host memory.
    """
    lease = book.lease(owner, name)
    if lease is None:
        return book
    in_host = sum([share.bytes for share in shares if share.device == HOST])
    whole = all([share.device != HOST for share in shares])
    settled = replace(
        lease,
        shares=shares,
        target=(),
        filled=filled,
        phase=Phase.SETTLED,
        settled_at=world.now,
        away_since=0.0 if whole else lease.away_since,
        disk_bytes=min(lease.disk_bytes, in_host),
        droppable=droppable,
        reload_seconds=reload_seconds or lease.reload_seconds,
        restore_seconds=restore_seconds or lease.restore_seconds,
    )
    book = book.with_lease(settled)
    if lease.kind == "block" or not whole:
        return book
    came = earlier_bytes + sum([share.bytes for share in lease.target])
    in_part = lease.in_parts and earlier_bytes + lease.bytes_on(HOST) < settled.own_bytes
    how = _how_it_arrived(lease)
    return note(
        book,
        world,
        settled,
        how,
        "request",
        because or f"{name} is on {settled.where} now.",
        size=min(came, settled.bytes) if lease.in_parts else settled.bytes,
        seconds=0.0 if in_part else restore_seconds or reload_seconds,
        beside=_busy_beside(book, settled) if how == "loaded" else (),
    )


def _busy_beside(book: Book, lease: Lease) -> tuple[str, ...]:
    """The names of the other models that are in use or arriving on the cards of `lease`."""
    cards = {share.device for share in lease.shares}
    busy = {
        other.name
        for other in book.leases()
        if other.id != lease.id
        and (other.pins or other.phase is Phase.ARRIVING)
        and any(share.device in cards for share in (*other.shares, *other.target))
    }
    return tuple(sorted(busy)[:MOST_BESIDE])


def _how_it_arrived(before: Lease) -> str:
    """The action word for the event of an arrival. `before` is the lease before the arrival."""
    if before.on_host or before.in_parts:
        return "restored"
    return "moved" if before.on_device else "loaded"


def left(book: Book, step: Move | Drop | Shed, shares: Shares, world: World, by: str = "") -> Book:
    """The book after `step`: the lease is on `shares`, or was removed, or has lost its shadow.

    `by` names the requester. A second call changes nothing, so a step may be reported again if the
    first reply was lost.
    """
    owner, _, name = step.lease.partition("/")
    lease = book.lease(owner, name)
    if isinstance(step, Shed):
        return shadow_freed(book, step.lease)
    if lease is None or lease.phase is Phase.ARRIVING:
        return book
    if isinstance(step, Drop):
        book = book.without_lease(owner, name)
        action = "unloaded"
    elif lease.phase is Phase.SETTLED and lease.shares == shares:
        return book
    else:
        to_host = any(share.device == HOST for share in shares)
        settled = replace(
            lease.holding(shares), settled_at=world.now, away_since=world.now if to_host else 0.0
        )
        book = book.with_lease(settled)
        action = "offloaded" if to_host else "moved"
    in_stages = isinstance(step, Move) and lease.in_parts and lease.phase is Phase.LEAVING
    freed = step.source if in_stages else lease.freed_by(getattr(step, "shares", ()))
    return note(
        book,
        world,
        replace(lease, shares=freed),
        action,
        step.reason,
        step.because,
        size=sum(share.bytes for share in freed),
        by=by,
    )


def after_step(book: Book, step: Step, world: World) -> Book:
    """The book as if `step` had succeeded. Dry runs use this function."""
    owner, _, name = step.lease.partition("/")
    lease = book.lease(owner, name)
    if isinstance(step, (Drop, Shed)):
        if isinstance(step, Drop) and lease and lease.residue:  # the end of a sleeping engine
            section = book.sections[owner]
            rest = Counter(section.residue)
            rest.subtract({share.device: share.bytes for share in lease.residue})
            book = book.with_section(replace(section, residue=dict(+rest)))
        return left(book, step, (), world)
    shares = lease.after(step.shares) if lease else step.shares
    to_device = any(share.device != HOST for share in step.shares)
    if isinstance(step, Load) or to_device:
        return arrived(book, owner, name, shares, world)
    return left(book, step, shares, world)


def abandon(book: Book, owner: str, name: str, key: str, world: World, because: str = "") -> Book:
    """The book without the decision `key` about the lease `name` of `owner`.

    A lease that was loading is removed. A lease that was being restored is back where it was. A
    lease that was leaving stays where it is. If the lease has no such decision, the same book is
    returned. `because` is the sentence of the event; if `because` is empty, no event is noted.
    """
    lease = book.lease(owner, name)
    if lease is None or lease.key != key or lease.phase is Phase.SETTLED:
        return book
    if not lease.shares:
        book = book.without_lease(owner, name)
    else:
        settled = replace(
            lease,
            target=(),
            filled=lease.filled if lease.all_on_device else (),
            phase=Phase.SETTLED,
            key="",
            pins=0,
        )
        book = book.with_lease(settled)
    if not because:
        return book
    reason = "load" if lease.phase is Phase.ARRIVING else "abandoned"
    return note(book, world, lease, "failed", reason, because)


# -- an owner's section ----------------------------------------------------------------------------


def publish(book: Book, truth: Truth, world: World) -> Book:
    """The book with this owner's section rewritten from `truth`; the same book if nothing changed.

    A lease that is arriving or leaving has the key of its decision. If `truth.keys` has this key,
    the lease keeps its shares and phase. If not, the decision was interrupted: it is withdrawn, and
    its reserved bytes are released. Tickets whose keys are not in `truth.keys` are removed too.
    """
    me = truth.owner.id
    if me not in book.sections:
        book = _with_new_section(book, truth, world)
    section = book.sections[me]
    fresh = Section(
        owner=truth.owner,
        leases=_published_leases(section, truth),
        residue=_residue_beside_moves(section, truth),
        staying=truth.staying,
        counts=section.counts,
        engines=truth.engines,
        busy_since=truth.busy_since,
        idle_since=truth.idle_since,
    )
    if world.rules.cap is not None:
        fresh = as_capped(book, fresh, world.rules.cap, world)
    if fresh != section:
        book = book.with_section(fresh)
    for ticket in book.tickets:
        if ticket.owner == me and ticket.key not in truth.keys:
            book = book.without_ticket(ticket.key)
    return book


def _residue_beside_moves(section: Section, truth: Truth) -> dict[str, int]:
    """The residue of `truth`, less what has grown for the targets of `section`, which claim it already."""
    coming = Counter[str]()
    for lease in section.leases:
        if lease.key in truth.keys:
            coming.update({share.device: share.bytes for share in lease.target})
    if not coming:
        return truth.residue
    found = {}
    for device, size in truth.residue.items():
        left = max(size - coming[device], min(size, section.residue.get(device, 0)))
        if left > 0:
            found[device] = left
    return found


def _published_leases(section: Section, truth: Truth) -> tuple[Lease, ...]:
    """The leases of the owner of `section`, in the order of the section.

    Leases that are arriving or leaving keep the shares and the phase that the book has.
    """
    under_way = {}
    for lease in section.leases:
        if lease.phase is not Phase.SETTLED and lease.key in truth.keys:
            under_way[lease.name] = lease
    leases = []
    for known in truth.leases:
        moving = under_way.pop(known.name, None)
        leases.append(known if moving is None else _under_way(moving, known))
    leases += under_way.values()
    places = {lease.name: place for place, lease in enumerate(section.leases)}
    leases.sort(key=lambda lease: places.get(lease.name, len(places)))
    return tuple(leases)


def _under_way(moving: Lease, known: Lease) -> Lease:
    """The book's lease `moving`, with the pins, uses and wishes of the owner's own copy, `known`."""
    born_with = moving.pins if moving.phase is Phase.ARRIVING else 0
    return replace(
        moving,
        pins=max(known.pins, born_with),
        pinned_since=known.pinned_since,
        last_used=known.last_used,
        uses=known.uses,
        wished=known.wished,
    )


def _with_new_section(book: Book, truth: Truth, world: World) -> Book:
    """The book with an empty section for a new owner, and with the owner's devices and limits.

    The first owner sets the limit of each device in the book. A later owner adds only the limits of
    devices that the book does not have. If an owner's own limit is smaller, it applies only to the
    owner's own requests.
    """
    alone = not book.sections
    known: dict[str, Device] = {} if alone else {device.id: device for device in book.devices}
    limits = dict(world.limits) if alone else {**world.limits, **book.limits}
    for device in world.devices:
        known.setdefault(device.id, device)
    book = replace(book, devices=tuple(known.values()), limits=limits)
    return book.with_section(Section(owner=truth.owner))


# -- the end of an owner ---------------------------------------------------------------------------


def resign(book: Book, owner: str) -> Book:
    """The book without `owner`. The owner is closing and has released everything."""
    section = book.sections.get(owner)
    if owner not in book.owner_ids():
        return book
    counts = dict(book.counts)
    for action, times in (section.counts if section else {}).items():
        counts[action] = min(MOST_COUNT, counts.get(action, 0) + times)
    sections = {id: other for id, other in book.sections.items() if id != owner}
    tickets = tuple(ticket for ticket in book.tickets if ticket.owner != owner)
    return replace(book, sections=sections, tickets=tickets, counts=counts)


def reap(book: Book, dead: Iterable[str], world: World, said_by: str = "") -> Book:
    """The book without the owners `dead`, whose death is proven, with an event for each lease.

    `said_by` is the person who declared that the dead owners' processes have ended, if nothing else
    proves their end.

    The dead owners' memory on real cards stays claimed by ghosts until a sample shows that the
    driver has freed it. A ghost stands for the memory that a dead process held; a sample is one
    measurement of a device.
    """
    for id in dead:
        section = book.sections.get(id)
        if section is None:
            book = resign(book, id)
            continue
        ghosts = ghosts_of(book, section, world)
        if ghosts:
            book = replace(book, ghosts=(*book.ghosts, *ghosts))
        when = "once its driver reports it" if ghosts else "again"
        for lease in section.leases:
            book = note(
                book,
                world,
                lease,
                "reaped",
                "death",
                f"{section.owner.label} ended; its memory is free {when}.",
                size=lease.bytes,
                by=said_by,
            )
        book = resign(book, id)  # after its events, which name its notebook
    return book


def totals(book: Book) -> dict[str, int]:
    """Counters of this boot, including ended owners. Evictions are always offloads plus unloads."""
    counted = {}
    for action in COUNTED:
        living = sum(section.counts.get(action, 0) for section in book.sections.values())
        counted[action] = book.counts.get(action, 0) + living
    return {
        "evictions": counted["offloaded"] + counted["unloaded"],
        "offloads": counted["offloaded"],
        "unloads": counted["unloaded"],
        "restorations": counted["restored"],
        "loads": counted["loaded"],
        "refusals": counted["refused"],
    }


# -- samples and ghosts ----------------------------------------------------------------------------


def measure(book: Book, world: World) -> Book:
    """The book with the newer samples of `world`, and without ghosts whose memory has been freed.

    A new sample replaces the sample in the book only if it is newer by more than half of
    `stale_seconds`, or if it shows the end of a ghost's process. If every new sample were written,
    every kernel would write the book every second.
    """
    fresh = {}
    for id, sample in world.samples.items():
        known = book.samples.get(id)
        newer = sample.taken_at - known.taken_at if known else math.inf
        proves = any([ghost.device == id and ghost.gone(sample) for ghost in book.ghosts])
        if newer > world.rules.stale_seconds / 2 or (newer > 0 and proves):
            fresh[id] = sample
    if fresh:
        book = replace(book, samples={**book.samples, **fresh})
    if not book.ghosts:
        return book
    # A living owner with the pid of a ghost proves that the ghost's process has ended.
    alive = {section.owner.pid for section in book.sections.values()}
    left = tuple(
        ghost
        for ghost in book.ghosts
        if ghost.pid not in alive and not ghost.gone(book.samples.get(ghost.device))
    )
    return book if left == book.ghosts else replace(book, ghosts=left)


def ghosts_of(book: Book, section: Section, world: World) -> list[Ghost]:
    """A ghost for each real card on which the dead owner of `section` held or reserved memory."""
    known = (*book.devices, *world.devices)
    real = {device.id for device in known if not device.simulated and not device.is_host}
    held = {device: size for device, size in section.residue.items() if device in real and size}
    settled: dict[str, float] = {}
    for lease in section.leases:
        settled_at = world.now if lease.target else lease.settled_at
        for share in lease.claims():
            if share.device in real:
                held[share.device] = held.get(share.device, 0) + share.bytes
                settled[share.device] = max(settled_at, settled.get(share.device, 0.0))
    return [
        Ghost(
            owner=section.owner.id,
            pid=section.owner.pid,
            device=id,
            bytes=size,
            settled_at=settled.get(id, 0.0),
            died_at=world.now,
        )
        for id, size in held.items()
    ]


# -- the book's names for the cards ----------------------------------------------------------------


def device_names(mine: Iterable[Device], book: Book) -> dict[str, str]:
    """Maps this process's name of a card to the book's name, for each card where the two differ.

    `mine` are the devices of this process. A card that the `book` does not contain keeps its name,
    unless a card of the book has the same name. In this case the new card gets the number after the
    highest number in use. Simulated cards are left out.
    """
    known = {device.uuid: device.id for device in book.devices if _is_card(device)}
    cards = [device for device in mine if _is_card(device) and not device.simulated]
    taken = set(known.values())
    taken.update(device.id for device in cards if device.uuid not in known)

    renamed: dict[str, str] = {}
    for device in cards:
        id = known.get(device.uuid)
        if id is None and device.id in known.values():
            id = _next(device.id, taken)
            taken.add(id)
        if id is not None and id != device.id:
            renamed[device.id] = id
    return renamed


def _is_card(device: Device) -> bool:
    return bool(device.uuid) and not device.is_host


def _next(id: str, taken: set[str]) -> str:
    """The name `id` with the number after the highest number in `taken`.

    The result is `cuda:3` for `cuda:0` if cuda:0 and cuda:2 are taken. The name of an instance of a
    partitioned card has two numbers, as in `cuda:0.1`. In this case only the last number is raised.
    """
    stem_before_number = re.match(r".*?(?=\d+$)", id)
    stem = stem_before_number[0] if stem_before_number else f"{id}."
    highest = -1
    for other in taken:
        number = other[len(stem) :]
        if other.startswith(stem) and number.isdigit():
            highest = max(highest, int(number))
    return f"{stem}{highest + 1}"


# -- changes that concern waiting requests ---------------------------------------------------------


def affects_waiters(before: Book, after: Book) -> bool:
    """Whether a waiting request might get another verdict from `after` than from `before`.

    A refreshed ticket, a counted use and a new sample do not count as changes. If they did, the
    waiting processes would wake each other forever.
    """
    if before.ghosts != after.ghosts or before.drained != after.drained:
        return True
    if before.limits != after.limits or before.sections.keys() != after.sections.keys():
        return True
    if any(event.answers for event in after.events if event.seq > before.seq):
        return True  # the answer to `defrag`, for example, changes nothing else in the book
    return _tickets_differ(before, after) or _leases_differ(before, after)


def _tickets_differ(before: Book, after: Book) -> bool:
    if len(before.tickets) != len(after.tickets):
        return True
    for old, new in zip(before.tickets, after.tickets, strict=True):
        if old is new:
            continue
        # A ticket's reason may contain a time, such as "was used 774 ms ago", which differs at each
        # comparison.
        if old.wish != new.wish:
            return True
    return False


def _leases_differ(before: Book, after: Book) -> bool:
    for id, old in before.sections.items():
        new = after.sections[id]
        if old is new or old.leases == new.leases:
            continue
        if [*map(_relevant_part, old.leases)] != [*map(_relevant_part, new.leases)]:
            return True
    return False


def _relevant_part(lease: Lease) -> Lease:
    """The lease without the fields that cannot change another request's verdict."""
    return replace(
        lease, pins=min(lease.pins, 1), pinned_since=0.0, last_used=0.0, uses=0, measured_bytes=None
    )


REPEAT_SECONDS = 1.0  # after so long, a ticket wakes the owners that it names once more


def newly_addressed(before: Book, after: Book, owner: str) -> set[str]:
    """The ids of the owners that can do something new for the tickets of `owner`.

    A ticket that only repeats its words concerns nobody, within REPEAT_SECONDS. If it did, two owners
    that wait for each other's models would wake each other for ever (1,300 writes a second, and a
    core each).
    """
    found = set()
    for ticket in after.tickets:
        if ticket.owner != owner:
            continue
        old = before.ticket(ticket.key)
        repeats = old is not None and ticket.refreshed < old.refreshed + REPEAT_SECONDS
        known = _addressed(old) if old and repeats else set()
        if not known <= _addressed(ticket):
            known = set()  # what is still named may have waited for the room of what left
        for id, size in _addressed(ticket):
            lease = after.find(id)
            # A part that left since is recalled anew, if the words are the same.
            left = old and lease and lease.away_since >= old.refreshed
            if (id, size) not in known or left:
                found.add(id.partition("/")[0])
    return found


def able_to_offload(before: Book, after: Book) -> set[str]:
    """The ids of the owners of recalled leases, if host memory has more room in `after`: they may leave for it now."""
    recalled = {id.partition("/")[0] for ticket in after.tickets for id in ticket.recalls}
    if recalled and after.claims().get(HOST, 0) < before.claims().get(HOST, 0):
        return recalled
    return set()


REFRESH_SECONDS = 0.25  # so often a ticket that only repeats its words is written


def with_refreshed(book: Book, ticket: Ticket) -> Book:
    """The `book` with the `ticket`; the same book if the last write of the ticket is new and has the same wish.

    Who waits decides again at each ring. If each decision were a write, most writes of a busy box
    would only repeat a ticket (38 % of them came within 5 ms of the last).
    """
    old = book.ticket(ticket.key)
    if old is None or ticket.refreshed >= old.refreshed + REFRESH_SECONDS:
        return book.with_ticket(ticket)
    for id, _ in _addressed(old):  # what left since was seen only if the ticket is written
        lease = book.find(id)
        if lease is not None and lease.away_since >= old.refreshed:
            return book.with_ticket(ticket)
    return book if old.wish == ticket.wish else book.with_ticket(ticket)


def _addressed(ticket: Ticket) -> set[tuple[str, int]]:
    """What the ticket wants of which lease `OWNER/NAME`, or of the process `OWNER/`; -1 is its copy in RAM."""
    copies = [(id, -1) for id in ticket.shadows]
    named = [(ticket.name, 0)] if "/" in ticket.name else []
    return {*ticket.recalls.items(), *copies, *named}
