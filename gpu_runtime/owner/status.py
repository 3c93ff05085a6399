"""The data that magics, command and console show: snapshots, tables, history and dry runs.

The functions here only read, except `delete`, which changes the catalogue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ..errors import BadSetting, GpuError, UnknownModel
from ..facts import (
    AllocatorMap,
    Book,
    Declared,
    Event,
    Health,
    History,
    Lease,
    Level,
    Outcome,
    Plan,
    PlanLevel,
    Request,
    Section,
    Snapshot,
    World,
    lease_title,
    problems,
)
from ..scheduler import recall
from ..scheduler import transitions as books
from ..scheduler.capacity import room_and_blind, stranger_bytes, strangers, views
from ..scheduler.plan import MOST_LOADS, interference
from ..scheduler.plan import plan as plan_request
from ..scheduler.queue import queue
from ..telemetry.recorder import moments_of
from ..units import parse_seconds
from . import dry_run, kernel_names, loading, permissions, presence, registry
from .history import recorded_events
from .session import Session

if TYPE_CHECKING:
    from pandas import DataFrame

    from ..ledgers.redis.connection import HostPage

HEALTH_MESSAGES = {
    Level.LOW: "Memory usage normal",
    Level.MODERATE: "Memory usage moderate",
    Level.HIGH: "Memory pressure high; idle models are evicted when others need the room",
    Level.CRITICAL: "The card is full; idle models are evicted when others need the room",
    Level.UNKNOWN: "The memory governor is off",
}


# -- snapshots


def snapshot(session: Session) -> Snapshot:
    """A snapshot of the book and the devices: all that magics, command and console show."""
    book, world = session.look()
    devices = _device_views(session, book, world)
    waiting = queue(book, world)
    skipped = tuple(ticket for ticket in book.tickets if ticket not in waiting)
    declared = _declared(session)
    trouble = session.breaker.trouble() or session.probe.trouble(world.rules.stale_seconds)
    found = Snapshot(
        world.now,
        world.wall,
        session.owner,
        devices,
        book.sections,
        (*waiting, *skipped),
        book.events,
        specs(session),
        all(view.device.simulated or view.device.is_host for view in devices),
        session.settings.enable_memory_governor,
        trouble,
        session.ledger.url,
        books.totals(book),
        strangers(book, world, session.probe.people()),
        rules=world.rules,
        names={id: tuple(names) for id, names in declared.items()},
        declared=declared,
    )
    unanswered = recall.unanswered(found, world.rules)
    return replace(
        found, unanswered=unanswered, presences=presence.presences(session, book, unanswered)
    )


def _declared(session: Session) -> dict[str, dict[str, Declared]]:
    """Maps each owner id to the models that the owner can load.

    For this process, the result has the current models; for other owners, the published models.
    """
    own = {name: one.declared() for name, one in list(session.residents.items())}
    names = session.ledger.names()
    return names | {session.me: own} if own else names


def _device_views(session: Session, book: Book, world: World) -> tuple[Any, ...]:
    """The devices with their use, pressure, unmanaged bytes and room for a grant."""
    unmanaged = stranger_bytes(book, world)
    room, blind = room_and_blind(book, world)
    found = []
    for view in views(book, world):
        id = view.device.id
        if not session.settings.enable_memory_governor:
            view = replace(view, level=Level.UNKNOWN)
        view = replace(
            view,
            stranger_bytes=unmanaged.get(id),
            blind=blind.get(id, ""),
            room_bytes=None if id in blind else room.get(id),
        )
        found.append(view)
    return tuple(found)


def other_hosts(session: Session) -> tuple[Snapshot, ...]:
    """A snapshot of every other host that shares the ledger in Redis, sorted by name."""
    read_all = getattr(session.ledger, "read_all", None)
    pages = read_all() if read_all else []
    others = [page for page in pages if page.host != session.owner.boot]
    ordered = sorted(others, key=lambda page: page.name)
    return tuple([_of_page(session, page) for page in ordered])


def _of_page(session: Session, page: HostPage) -> Snapshot:
    """A snapshot of another host, made from `page`, the host's book as stored in the ledger.

    The times in `page` are of the other host's clock, whose present time is unknown. So the newest
    time in `page` is used as now.
    """
    book = page.book or Book()
    stamps = [0.0]
    for lease in book.leases():
        stamps += [lease.last_used, lease.settled_at]
    stamps += [ticket.refreshed for ticket in book.tickets]
    stamps += [sample.taken_at for sample in book.samples.values()]
    now = max(stamps)
    wall = session.wall()
    world = World(now, wall, book.devices, dict(book.limits), book.samples, session.rules)
    unreadable = "a newer version wrote this page, or it cannot be read"
    return Snapshot(
        now,
        wall,
        session.owner,
        views(book, world) if book.limits else (),
        book.sections,
        queue(book, world),
        book.events,
        (),
        any(device.simulated for device in book.devices),
        degraded="" if page.book else unreadable,
        ledger=session.ledger.url,
        totals=books.totals(book),
        host=page.name,
        seen_seconds=page.seen_seconds,
    )


def health(found: Snapshot) -> Health:
    """The health of the snapshot `found`. Its message is the gravest problem, if there is one.

    Without a problem, the message describes the fullest card.
    """
    cards = [view for view in found.devices if not view.device.is_host]
    fullest = max(cards, key=lambda view: view.pressure)
    used = [view.measured_bytes for view in cards]
    total = sum(view.device.total_bytes for view in cards)
    unknown = None in used or not total
    percent = None if unknown else round(100 * sum(used) / total, 1)  # type: ignore[arg-type]
    level = fullest.level if found.governed else Level.UNKNOWN
    wrong = [str(problem) for problem in problems(found)]
    message = wrong[0] if wrong else HEALTH_MESSAGES[level]
    if len(wrong) > 1:
        message += f" ({len(wrong) - 1} more)"
    one = f"{fullest.device.id} {100 * fullest.pressure:.0f} %"  # as in the status
    return Health(not wrong, level, percent, found.degraded or message, one)


def specs(session: Session) -> tuple[Any, ...]:
    """The specifications of the models that are registered in this process."""
    residents = list(session.residents.values())
    return tuple(resident.spec for resident in residents if resident.lease.kind == "model")


# -- tables; the first table imports pandas


def models(session: Session) -> DataFrame:
    """A table of every model that is registered here, held by any owner, or in the catalogue."""
    from . import dataframes

    book, world = session.look()
    residents = list(session.residents.values())
    sizes = {}
    for resident in residents:
        try:
            sizes[resident.spec.name] = resident.footprint().bytes
        except GpuError:  # the source was deleted after the registration, so the size is unknown
            continue
    registered = [
        resident.spec
        for resident in residents
        if not resident.catalogued and resident.lease.kind == "model"
    ]
    return dataframes.models(
        registered, book.sections, session.me, sizes, world.now, session.catalogue.specs()
    )


def catalog(session: Session) -> DataFrame:
    """A table of the models of the catalogue. Raises CatalogUnavailable, BadDocument."""
    from . import dataframes

    return dataframes.catalog(session.catalogue.catalog.specs())


def who(session: Session, process: str = "") -> DataFrame:
    """A table of the names that hold device memory in `process`, or in this process if empty."""
    from . import dataframes, other_holdings

    if session.guest and not process:
        raise GpuError("a command holds no memory. Name a notebook or a process:  gpu who NOTEBOOK")
    found = other_holdings.who(session, process) if process else other_holdings.own(session)
    return dataframes.holders(found)


def leases(session: Session) -> DataFrame:
    """A table of all leases, with one row for each share."""
    from . import dataframes

    book, world = session.look()
    return dataframes.leases(permissions.proven_sections(session, book), world.now)


def events(found: tuple[Event, ...]) -> DataFrame:
    """The events as a table."""
    from . import dataframes

    return dataframes.events(found)


def fragmentation(session: Session) -> DataFrame:
    """A table of the memory that each process's allocator holds on each card.

    The figures of a process that publishes no map are empty.
    """
    from . import dataframes

    book, _ = session.look()
    sections = {session.me: Section(session.owner)} | permissions.proven_sections(session, book)
    return dataframes.fragmentation(session.maps.all(book), sections, snapshot(session).devices)


def allocator_maps(session: Session) -> tuple[AllocatorMap, ...]:
    """The allocator maps of all owners."""
    return session.maps.all(session.read_book())


# -- history


def history(session: Session, found: Snapshot, seconds: str | float, points: int) -> History:
    """The past use of the devices of the snapshot `found`; see Runtime.history."""
    if points < 1:
        raise BadSetting("points", points, "a number of moments, 1 or more")
    span = parse_seconds(seconds)
    since = found.wall - span
    now = moments_of(found.devices, found.sections.values(), found.wall)
    before = session.record.between(since, found.wall, points - 1) if session.record else ()
    return History((*before, *now), recorded_events(session, since=since), span)


# -- dry runs


def plan(
    session: Session,
    name_or_size: str | int,
    source: Any,
    given: dict[str, Any],
    timeout: float | None,
    for_wish: bool = False,
) -> Plan:
    """The result of a dry run, which changes nothing; see Runtime.plan and `demand.placement`."""
    subject = _subject(session, name_or_size, source, given)
    rules = subject.rules
    if for_wish:
        rules = replace(rules, spared=session.wished.get(str(name_or_size), 0))
    book = session.read_book()
    world = session.world()
    book = books.publish(book, session.truth(), world)
    request = Request("plan", subject.wanted, subject.footprint, world.now, rules, wait=False)
    found = plan_request(book, request, world, session.rank)
    typed = given if timeout is None else {**given, "timeout": timeout}
    if subject.wanted.kind == "block" and dry_run.is_placed(given):
        command = ""
    elif subject.wanted.kind == "block":
        size = name_or_size if isinstance(name_or_size, str) else f"{name_or_size}B"
        command = " ".join(["".join(size.split()), *loading.flags(typed)])
    else:
        command = loading.command(str(name_or_size), source, typed)
    if found.level in (PlanLevel.ROOM, PlanLevel.EVICT):
        loads = recorded_events(session, MOST_LOADS, found.name, ("loaded",))
        found = replace(found, because=f"{found.because} {interference(loads)}".rstrip())
    title = lease_title(subject.wanted, book.owner(subject.wanted.owner))
    return replace(found, name=title, obstacle=subject.obstacle, command=command)


def _subject(
    session: Session, words: str | int, source: Any, given: dict[str, Any]
) -> dry_run.Subject:
    """The subject that `words` name: a model of any owner, a size of bytes, or a source."""
    name = str(words)
    described = loading.described(session, name, source, given)
    if described is not None:
        return dry_run.of_described(described, session)
    size = dry_run.size_in(words)
    if size is not None:
        return dry_run.of_bytes(size, session, given)
    try:
        target = kernel_names.resolve(session, name, loadable=True)
        section = session.ledger.read().sections[target.owner]
        lease = section.lease(target.name) or Lease(*target)
        declared = session.ledger.names().get(target.owner, {}).get(target.name)
        return dry_run.of_lease(lease, section.owner, given, declared)
    except (UnknownModel, KeyError):  # the answer lists the known names
        known, all_names = registry.known_names(session), registry.addresses(session)
        found = dry_run.unregistered(name, known, all_names, session, given)
        return dry_run.of_nobody(found, session)


# -- the catalogue


def delete(session: Session, name: str) -> Outcome:
    """Removes a model from the catalogue; see Runtime.delete."""
    sections = session.ledger.read().sections.values()
    entry = session.catalogue.catalog.delete(name)
    holders = [section.owner.label for section in sections if section.lease(entry.name)]
    because = f"{entry.name} is no longer in the catalogue"
    if holders:
        because += f"; {', '.join(holders)} has it loaded, and keeps it until it is evicted"
    return Outcome(
        verb="delete",
        name=entry.name,
        done=True,
        because=because,
    )
