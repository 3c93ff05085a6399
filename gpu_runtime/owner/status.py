"""The data that magics, command and console show: snapshots, health, history and tables.

The functions here only read, except `delete`, which changes the catalogue.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from datetime import datetime, timezone
from importlib.metadata import distributions, entry_points
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ..catalog.fields import state
from ..errors import BadSetting, GpuError
from ..facts import (
    KERNEL,
    AllocatorMap,
    Book,
    Declared,
    DeviceView,
    Event,
    Health,
    History,
    Holdings,
    Lease,
    Level,
    ModelSpec,
    Outcome,
    Owner,
    Phase,
    Section,
    Snapshot,
    World,
    ended_label,
    lease_title,
    notebooks_in,
    problems,
)
from ..scheduler import recall
from ..scheduler import transitions as books
from ..scheduler.capacity import room_and_blind, stranger_bytes, strangers, views
from ..scheduler.queue import queue
from ..tables import table
from ..telemetry.recorder import moments_of
from ..threads import import_whole
from ..units import in_calendar, parse_seconds
from . import requests
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


LEAST_FREE_BYTES = 1 << 16  # a disk with less is full: a notebook that begins writes about as much

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
        stays=_staying(book, world, devices),
        full_disks=_full_disks(session),
    )
    unanswered = recall.unanswered(found)
    return replace(
        found, unanswered=unanswered, presences=requests.presences(session, book, unanswered)
    )


def _staying(book: Book, world: World, devices: Iterable[DeviceView]) -> dict[str, str]:
    """Maps the leases that a person cannot move off their cards now, because RAM has no room, to the reason."""
    free = sum(view.room_bytes or 0 for view in devices if view.device.is_host)
    found = {}
    for section in book.sections.values():
        for lease in section.leases:
            is_larger = not lease.droppable and lease.on_device and lease.offload_bytes > free
            if is_larger and lease.phase is Phase.SETTLED:
                refusal = recall.refusal_to_leave(book, lease, section.owner, world)
                if refusal is not None and refusal.kind == "stays":
                    found[lease.id] = refusal.because
    return found


def _full_disks(session: Session) -> tuple[str, ...]:
    """The directories of the ledger and the history on whose disk nothing can be written, one for each disk."""
    record = session.record.path.parent if session.record else None
    full: dict[int, str] = {}
    for path in filter(None, (getattr(session.ledger, "directory", None), record)):
        with contextlib.suppress(OSError):  # it was deleted: writing to it says so
            disk = os.statvfs(path)
            if disk.f_bavail * disk.f_frsize < LEAST_FREE_BYTES:
                full.setdefault(os.stat(path).st_dev, str(path))
    return tuple(full.values())


def _declared(session: Session) -> dict[str, dict[str, Declared]]:
    """Maps each owner id to the models that the owner can load.

    For this process, the result has the current models; for other owners, the published models.
    """
    own = {name: resident.declared() for name, resident in list(session.residents.items())}
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
    cards = found.cards
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
    text = f"{fullest.device.id} {100 * fullest.pressure:.0f} %"  # as in the status
    return Health(not wrong, level, percent, found.degraded or message, text)


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
OF_THE_BOX = (  # the rest of the extra comes with these
    "Install it in this environment:  pip install 'panel>=1.6' 'panel-material-ui>=0.8' jupyter-bokeh\n"
    "  Or in a terminal:  gpu console"
)


def console(rt: Any) -> Any:
    """The console of the runtime `rt`. Raises GpuError if no console is installed."""
    # In a kernel of `gpu box install` the package is not on `sys.path`.
    beside = distributions(name="gpu-console", path=[str(Path(__file__).parents[2])])
    in_box = [
        found
        for distribution in beside
        for found in distribution.entry_points.select(group="gpu_runtime", name="console")
    ]
    advice = OF_THE_BOX if "gpu_box_kernel" in sys.modules else INSTALL
    for found in entry_points(group="gpu_runtime", name="console") or in_box:
        try:
            import_whole(found.module)
            make = found.load()
        except ImportError as error:
            missing = f"needs {error.name}, which is not installed"
            why = missing if isinstance(error, ModuleNotFoundError) else f"cannot load: {error}"
            raise GpuError(f"the console {why}.\n  {advice}") from None
        return make(rt)
    raise GpuError(f"no console is installed in this environment.\n  {advice}")


# -- the tables that notebooks use: leases, models, events and so on -------------------------------
#
# Each table has fixed columns. To add a column to `rt.leases()`, add its name to LEASES and its value
# to `_shares`, which builds the rows. `tables.table` makes a DataFrame of them if pandas is there.


MODELS = "name backend where bytes idle_seconds uses importance keep owner".split()
CATALOG = "name type backend bytes context_length importance keep state source".split()
LEASES = (
    "model device bytes measured_bytes owner user pid notebook importance pins idle_seconds"
).split()
EVENTS = "time model action reason bytes device owner".split()
HOLDERS = "name kind device bytes alone_bytes cell what stays stays_bytes".split()
FRAGMENTATION = (
    "device allocated_bytes reserved_bytes fragmentation_bytes fragmentation_percent "
    "alloc_retries ooms inactive_bytes releasable_bytes largest_free_bytes "
    "largest_request_bytes owner user pid notebook"
).split()


def models(session: Session) -> DataFrame:
    """Every model that is registered here, held by any owner, or in the catalogue. Columns: MODELS.

    If an owner holds a model of the catalogue, the table has only that owner's row for the model.
    """
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
    held = {
        (section.owner.id, lease.name): (section.owner, lease)
        for section in book.sections.values()
        for lease in section.leases
        if lease.kind == "model"
    }
    rows = []
    for spec in registered:
        owner_and_lease = held.pop((session.me, spec.name), None)
        if owner_and_lease:
            rows.append(_held(*owner_and_lease, world.now))
        else:
            rows.append(_on_disk(spec, sizes.get(spec.name), "me"))
    for owner, lease in held.values():
        is_mine = owner.id == session.me
        rows.append(_held(owner, lease, world.now, mine=is_mine))
    names = {row[0] for row in rows}
    for spec in session.catalogue.specs():
        if spec.name not in names:
            rows.append(_on_disk(spec, sizes.get(spec.name, spec.size), "catalogue"))
    return table(rows, MODELS, {"bytes": "Int64"})


def _held(owner: Owner, lease: Lease, now: float, mine: bool = True) -> list[Any]:
    """A row of `models` for a model in memory."""
    return [
        lease.name,
        lease.backend,
        lease.where,
        lease.bytes,
        round(lease.idle_seconds(now), 3),
        lease.uses,
        lease.importance,
        lease.keep,
        "me" if mine else owner.label,
    ]


def _on_disk(spec: ModelSpec, size: int | None, owner: str) -> list[Any]:
    """A row of `models` for a model that is not loaded. `size` is in bytes, or None if unknown."""
    return [spec.name, spec.backend, "disk", size, None, 0, spec.importance, spec.keep, owner]


def catalog(specs: Iterable[ModelSpec]) -> DataFrame:
    """A table of the catalogue's models (`specs`). Columns: CATALOG.

    The column `state` is `ready`, `disabled`, or what is missing.
    """
    rows = [
        [
            spec.name,
            spec.model_type,
            spec.backend,
            spec.size,
            spec.options.get("context_length"),
            spec.importance,
            spec.keep,
            state(spec),
            spec.source,
        ]
        for spec in specs
    ]
    return table(rows, CATALOG, {"bytes": "Int64", "context_length": "Int64"})


def leases(session: Session) -> DataFrame:
    """All leases as a table with one row for each share. Columns: LEASES."""
    book, world = session.look()
    rows = [
        row
        for section in requests.proven_sections(session, book).values()
        for lease in section.leases
        for row in _shares(section.owner, lease, world.now)
    ]
    types = {"bytes": "int64", "measured_bytes": "Int64", "pid": "int64", "pins": "int64"}
    return table(rows, LEASES, types)


def _shares(owner: Owner, lease: Lease, now: float) -> list[list[Any]]:
    """The rows of `leases` for one lease: its places, then its target and the copy in RAM.

    What a block uses of its bytes is unknown, and so is how much of a target is there already.
    """
    filled = {share.device: share.bytes for share in lease.filled}
    placed = [
        (share, None if lease.kind == "block" else filled.get(share.device, share.bytes))
        for share in lease.placed
    ]
    target = [(share, None) for share in lease.target]
    copy = islice(lease.claims(), len(lease.shares) + len(target), None)
    rows = []
    for share, measured in (*placed, *target, *[(share, share.bytes) for share in copy]):
        row = [
            lease_title(lease, owner),
            share.device,
            share.bytes,
            measured,
            owner.label if lease.kind == KERNEL else f"{lease.name}@{owner.pid}",
            owner.user,
            owner.pid,
            owner.notebook,
            lease.importance,
            lease.pins,
            round(lease.idle_seconds(now), 3),
        ]
        rows.append(row)
    return rows


def events(rows: Iterable[Event]) -> DataFrame:
    """A table of the events in `rows`. Its column `time` is time-zone aware, in UTC.

    Columns: EVENTS. The attribute `owners` has the labels of ended processes whose notebooks the
    events name, by owner id. The attribute `kinds` has the type and quantization of each model that
    left a device or host memory, by name.
    """
    rows = list(rows)
    cells = [
        [datetime.fromtimestamp(in_calendar(e.wall), timezone.utc), e.title, e.action, e.reason]
        + [e.bytes, e.place, e.owner]
        for e in rows
    ]
    frame = table(cells, EVENTS, {"time": "datetime64[ns, UTC]", "bytes": "int64"})
    frame.attrs["owners"] = {id: ended_label(id, name) for id, name in notebooks_in(rows).items()}
    frame.attrs["kinds"] = {e.title: (e.model_type, e.quantization) for e in rows if e.model_type}
    return frame


def fragmentation(session: Session) -> DataFrame:
    """The memory that each process's allocator holds on each card. Columns: FRAGMENTATION.

    A process that publishes no map has a row in which the columns about its allocator are empty.

    The column `fragmentation_bytes` has the bytes that an allocator reserved and did not allocate.
    Three columns describe these bytes. The process itself can use `inactive_bytes` again. Other
    processes can use `releasable_bytes` after `defrag`. `largest_free_bytes` is the largest single
    piece.
    """
    book, _ = session.look()
    sections = {session.me: Section(session.owner)} | requests.proven_sections(session, book)
    cards = {view.device.id: view for view in snapshot(session).cards}
    known: dict[tuple[str, str], AllocatorMap | None] = {
        (id, share.device): None
        for id, section in sections.items()
        for lease in section.leases
        for share in lease.shares
    }
    known |= {(map.owner, map.device): map for map in session.maps.all(book)}
    rows = []
    for (id, device), map in known.items():
        if id not in sections or device not in cards:
            continue
        owner = sections[id].owner
        figures = _figures(map, cards[device])
        rows.append([device, *figures, owner.label, owner.user, owner.pid, owner.notebook])
    pid = FRAGMENTATION.index("pid")
    rows.sort(key=lambda row: (row[0], row[pid]))
    types = {name: "Int64" for name in FRAGMENTATION if name.endswith("_bytes")}
    types |= {"alloc_retries": "Int64", "ooms": "Int64"}
    types |= {"fragmentation_percent": "Float64", "pid": "int64"}
    return table(rows, FRAGMENTATION, types)


def _figures(map: AllocatorMap | None, view: DeviceView) -> list[Any]:
    """The values of one row, from the column allocated_bytes to largest_request_bytes.

    All values are None if `map` is None.
    """
    columns = FRAGMENTATION[1 : FRAGMENTATION.index("owner")]
    if map is None:
        return [None] * len(columns)
    unused = map.reserved_bytes - map.allocated_bytes
    computed = {
        "fragmentation_bytes": unused,
        "fragmentation_percent": round(100 * unused / (map.reserved_bytes or 1), 1),
        "largest_request_bytes": map.largest_request_bytes(view),
    }
    return [computed[name] if name in computed else getattr(map, name) for name in columns]


def holders(found: Holdings) -> DataFrame:
    """A table of the names that hold device memory. Columns: HOLDERS.

    The fields of `found` other than `holders` are sums; they are in the table's `attrs`.
    """
    rows = [[getattr(row, column) for column in HOLDERS] for row in found.holders]
    frame = table(rows, HOLDERS, {"bytes": "int64", "alone_bytes": "int64", "stays_bytes": "int64"})
    sums = (name for name in found.__struct_fields__ if name != "holders")
    frame.attrs = {name: getattr(found, name) for name in sums}
    return frame
