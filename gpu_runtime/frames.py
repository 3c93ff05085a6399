"""Snapshots as pandas DataFrames, with the fixed columns that notebooks build on.

pandas is imported when the first frame is made.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .entries import state
from .facts import Event, Fragmentation, Lease, ModelSpec, Owner, Section

if TYPE_CHECKING:
    from pandas import DataFrame

MODELS = ["name", "backend", "where", "bytes", "idle_seconds", "uses", "importance", "keep", "owner"]
CATALOG = ["name", "type", "backend", "bytes", "context_length", "importance", "keep", "state", "source"]
LEASES = ["model", "device", "bytes", "measured_bytes", "owner", "user", "pid", "notebook", "importance", "pins",
          "idle_seconds"]
EVENTS = ["time", "model", "action", "reason", "bytes", "device", "owner"]
FRAGMENTATION = ["device", "allocated_bytes", "reserved_bytes", "fragmentation_bytes", "fragmentation_percent",
                 "alloc_retries", "ooms"]


def models(specs: Iterable[ModelSpec], sections: Mapping[str, Section], me: str, sizes: Mapping[str, int],
           now: float, catalogued: Iterable[ModelSpec] = ()) -> DataFrame:
    """Every model registered here, held by anybody or in the catalogue: columns `name backend where bytes …`.

    A model of the catalogue that somebody holds is theirs, and has no row of its own.
    """
    rows = []
    held = {(section.owner.id, lease.name): (section.owner, lease) for section in sections.values()
            for lease in section.leases if lease.kind == "model"}
    for spec in specs:
        owner_lease = held.pop((me, spec.name), None)
        if owner_lease:
            rows.append(_held(*owner_lease, now))
        else:
            rows.append([spec.name, spec.backend, "disk", sizes.get(spec.name), None, 0, spec.importance, spec.keep,
                         "me"])
    rows += [_held(owner, lease, now, mine=owner.id == me) for owner, lease in held.values()]
    names = {row[0] for row in rows}
    rows += [[spec.name, spec.backend, "disk", sizes.get(spec.name, spec.size), None, 0, spec.importance, spec.keep,
              "catalogue"] for spec in catalogued if spec.name not in names]
    return _frame(rows, MODELS, {"bytes": "Int64"})


def catalog(specs: Iterable[ModelSpec]) -> DataFrame:
    """The models of the catalogue, by name; `state` is `ready`, `disabled`, or what is missing."""
    rows = [[spec.name, spec.model_type, spec.backend, spec.size, spec.options.get("context_length"), spec.importance,
             spec.keep, state(spec), spec.source] for spec in specs]
    return _frame(rows, CATALOG, {"bytes": "Int64", "context_length": "Int64"})


def _held(owner: Owner, lease: Lease, now: float, mine: bool = True) -> list[Any]:
    return [lease.name, lease.backend, lease.where, lease.bytes, round(lease.idle_seconds(now), 3), lease.uses,
            lease.importance, lease.keep, "me" if mine else owner.label]


def leases(sections: Mapping[str, Section], now: float) -> DataFrame:
    """Who holds what on which device, one row a share."""
    rows = []
    for section in sections.values():
        owner = section.owner
        for lease in section.leases:
            own = {share.device: share.bytes for share in lease.filled}
            for share in lease.claims():
                measured = lease.measured_bytes or own.get(share.device, share.bytes)
                rows.append([lease.name, share.device, share.bytes, measured,
                             f"{lease.name}@{owner.pid}", owner.user, owner.pid, owner.notebook, lease.importance,
                             lease.pins, round(lease.idle_seconds(now), 3)])
    return _frame(rows, LEASES, {"bytes": "int64", "pid": "int64", "pins": "int64"})


def events(rows: Iterable[Event]) -> DataFrame:
    """What happened, the newest last; `time` is aware, in UTC."""
    import pandas

    frame = _frame([[e.wall, e.model, e.action, e.reason, e.bytes, e.device, e.owner] for e in rows], EVENTS,
                   {"bytes": "int64"})
    frame["time"] = pandas.to_datetime(frame["time"].astype("float64"), unit="s", utc=True)
    return frame


def fragmentation(rows: Iterable[Fragmentation]) -> DataFrame:
    """What each device's allocator holds in this process; a device that does not tell has no row."""
    listed = []
    for part in rows:
        idle = part.reserved_bytes - part.allocated_bytes
        percent = 100 * idle / part.reserved_bytes if part.reserved_bytes else 0.0
        listed.append([part.device, part.allocated_bytes, part.reserved_bytes, idle, round(percent, 1),
                       part.alloc_retries, part.ooms])
    return _frame(listed, FRAGMENTATION, {})


def _frame(rows: list[list[Any]], columns: list[str], types: Mapping[str, str]) -> DataFrame:
    import pandas

    return pandas.DataFrame(rows, columns=columns).astype(dict(types))
