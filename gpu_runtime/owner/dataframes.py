"""The tables that notebooks use: leases, models, events and so on.

Each table has fixed columns. To add a column to `rt.leases()`, add its name to LEASES and its value
to `_shares`, which builds the rows. `tables.table` makes a DataFrame of them if pandas is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from ..catalog.fields import state
from ..errors import GpuError
from ..facts import (
    AllocatorMap,
    DeviceView,
    Event,
    Holdings,
    Lease,
    ModelSpec,
    Owner,
    Section,
    ended_label,
    lease_title,
    notebooks_in,
)
from ..tables import table
from . import requests, status
from .session import Session

if TYPE_CHECKING:
    from pandas import DataFrame

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
    return table(rows, LEASES, {"bytes": "int64", "pid": "int64", "pins": "int64"})


def _shares(owner: Owner, lease: Lease, now: float) -> list[list[Any]]:
    """The rows of `leases` for one lease."""
    filled = {share.device: share.bytes for share in lease.filled}
    rows = []
    for share in lease.claims():
        measured = lease.measured_bytes or filled.get(share.device, share.bytes)
        row = [
            lease_title(lease, owner),
            share.device,
            share.bytes,
            measured,
            owner.label if lease.kind == "kernel" else f"{lease.name}@{owner.pid}",
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
        [datetime.fromtimestamp(e.wall, timezone.utc), e.title, e.action, e.reason, e.bytes]
        + [e.device, e.owner]
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
    views = status.snapshot(session).devices
    cards = {view.device.id: view for view in views if not view.device.is_host}
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
    if map is None:
        return [None] * 10
    unused = map.reserved_bytes - map.allocated_bytes
    percent = round(100 * unused / map.reserved_bytes, 1) if map.reserved_bytes else 0.0
    return [
        map.allocated_bytes,
        map.reserved_bytes,
        unused,
        percent,
        map.alloc_retries,
        map.ooms,
        map.inactive_bytes,
        map.releasable_bytes,
        map.largest_free_bytes,
        map.largest_request_bytes(view),
    ]


def holders(found: Holdings) -> DataFrame:
    """A table of the names that hold device memory. Columns: HOLDERS.

    The fields of `found` other than `holders` are sums; they are in the table's `attrs`.
    """
    rows = [[getattr(row, column) for column in HOLDERS] for row in found.holders]
    frame = table(rows, HOLDERS, {"bytes": "int64", "alone_bytes": "int64", "stays_bytes": "int64"})
    sums = (name for name in found.__struct_fields__ if name != "holders")
    frame.attrs = {name: getattr(found, name) for name in sums}
    return frame
