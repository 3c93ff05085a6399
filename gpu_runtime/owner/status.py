"""The data that magics, command and console show: snapshots, health and history.

The functions here only read, except `delete`, which changes the catalogue.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ..errors import BadSetting, GpuError
from ..facts import (
    Book,
    Declared,
    Health,
    History,
    Level,
    Outcome,
    Snapshot,
    World,
    problems,
)
from ..scheduler import recall
from ..scheduler import transitions as books
from ..scheduler.capacity import room_and_blind, stranger_bytes, strangers, views
from ..scheduler.queue import queue
from ..telemetry.recorder import moments_of
from ..threads import import_whole
from ..units import parse_seconds
from . import requests
from .history import recorded_events
from .session import Session

if TYPE_CHECKING:
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
        operates=requests.operates(session),
    )
    unanswered = recall.unanswered(found, world.rules)
    return replace(
        found, unanswered=unanswered, presences=requests.presences(session, book, unanswered)
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


# -- the catalogue


def delete(session: Session, name: str) -> Outcome:
    """Removes a model from the catalogue; see Runtime.delete."""
    sections = session.ledger.read().sections.values()
    entry = session.catalogue.catalog.delete(name)
    holders = [section.owner.label for section in sections if section.lease(entry.name)]
    because = f"{entry.name} is no longer in the catalogue"
    if holders:
        because += f"; {', '.join(holders)} has it loaded, and keeps it until it is evicted"
    return Outcome(verb="delete", name=entry.name, done=True, because=because)


# -- the console, found through an entry point, since this folder must not import `panels`
#
# A package with a console names a callable `console` in the entry-point group `gpu_runtime`. The
# callable `console` takes the runtime and returns the object to show.

INSTALL = "Install it:  pip install 'gpu-console[console]'"


def console(rt: Any) -> Any:
    """The console of the runtime `rt`. Raises GpuError if no console is installed."""
    for found in entry_points(group="gpu_runtime", name="console"):
        try:
            import_whole(found.module)
            make = found.load()
        except ImportError as error:
            raise GpuError(
                f"the console needs {error.name}, which is not installed.\n  {INSTALL}"
            ) from None
        return make(rt)
    raise GpuError(f"no console is installed.\n  {INSTALL}")
