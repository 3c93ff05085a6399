"""Snapshots as pandas DataFrames, with the fixed columns that notebooks build on.

pandas is imported when the first frame is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..catalog.entries import state
from ..facts import AllocatorMap, DeviceView, Event, Lease, ModelSpec, Owner, Section

if TYPE_CHECKING:
    from pandas import DataFrame

MODELS = [
    "name",
    "backend",
    "where",
    "bytes",
    "idle_seconds",
    "uses",
    "importance",
    "keep",
    "owner",
]
CATALOG = [
    "name",
    "type",
    "backend",
    "bytes",
    "context_length",
    "importance",
    "keep",
    "state",
    "source",
]
LEASES = [
    "model",
    "device",
    "bytes",
    "measured_bytes",
    "owner",
    "user",
    "pid",
    "notebook",
    "importance",
    "pins",
    "idle_seconds",
]
EVENTS = ["time", "model", "action", "reason", "bytes", "device", "owner"]
FRAGMENTATION = [
    "device",
    "allocated_bytes",
    "reserved_bytes",
    "fragmentation_bytes",
    "fragmentation_percent",
    "alloc_retries",
    "ooms",
    "inactive_bytes",
    "releasable_bytes",
    "largest_free_bytes",
    "largest_request_bytes",
    "owner",
    "user",
    "pid",
    "notebook",
]


def models(
    specs: Iterable[ModelSpec],
    sections: Mapping[str, Section],
    me: str,
    sizes: Mapping[str, int],
    now: float,
    catalogued: Iterable[ModelSpec] = (),
) -> DataFrame:
    """Every model registered here, held by anybody or in the catalogue: columns `name backend where bytes …`.

    A model of the catalogue that somebody holds is theirs, and has no row of its own.
    """
    rows = []
    held = {
        (section.owner.id, lease.name): (section.owner, lease)
        for section in sections.values()
        for lease in section.leases
        if lease.kind == "model"
    }
    for spec in specs:
        owner_lease = held.pop((me, spec.name), None)
        if owner_lease:
            rows.append(_held(*owner_lease, now))
        else:
            rows.append(
                [
                    spec.name,
                    spec.backend,
                    "disk",
                    sizes.get(spec.name),
                    None,
                    0,
                    spec.importance,
                    spec.keep,
                    "me",
                ]
            )
    rows += [_held(owner, lease, now, mine=owner.id == me) for owner, lease in held.values()]
    names = {row[0] for row in rows}
    rows += [
        [
            spec.name,
            spec.backend,
            "disk",
            sizes.get(spec.name, spec.size),
            None,
            0,
            spec.importance,
            spec.keep,
            "catalogue",
        ]
        for spec in catalogued
        if spec.name not in names
    ]
    return _frame(rows, MODELS, {"bytes": "Int64"})


def catalog(specs: Iterable[ModelSpec]) -> DataFrame:
    """The models of the catalogue, by name; `state` is `ready`, `disabled`, or what is missing."""
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
    return _frame(rows, CATALOG, {"bytes": "Int64", "context_length": "Int64"})


def _held(owner: Owner, lease: Lease, now: float, mine: bool = True) -> list[Any]:
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


def leases(sections: Mapping[str, Section], now: float) -> DataFrame:
    """Who holds what on which device, one row a share."""
    rows = []
    for section in sections.values():
        owner = section.owner
        for lease in section.leases:
            own = {share.device: share.bytes for share in lease.filled}
            for share in lease.claims():
                measured = lease.measured_bytes or own.get(share.device, share.bytes)
                rows.append(
                    [
                        lease.name,
                        share.device,
                        share.bytes,
                        measured,
                        f"{lease.name}@{owner.pid}",
                        owner.user,
                        owner.pid,
                        owner.notebook,
                        lease.importance,
                        lease.pins,
                        round(lease.idle_seconds(now), 3),
                    ]
                )
    return _frame(rows, LEASES, {"bytes": "int64", "pid": "int64", "pins": "int64"})


def events(rows: Iterable[Event]) -> DataFrame:
    """What happened, the newest last; `time` is aware, in UTC."""
    import pandas

    frame = _frame(
        [[e.wall, e.model, e.action, e.reason, e.bytes, e.device, e.owner] for e in rows],
        EVENTS,
        {"bytes": "int64"},
    )
    frame["time"] = pandas.to_datetime(frame["time"].astype("float64"), unit="s", utc=True)
    return frame


def fragmentation(
    maps: Iterable[AllocatorMap], sections: Mapping[str, Section], views: Iterable[DeviceView]
) -> DataFrame:
    """What each process's allocator holds on each card, and cannot use; one that does not tell has a row of unknowns.

    `fragmentation_bytes` are reserved and not allocated. Of these `inactive_bytes` are free for this process to use
    again, `releasable_bytes` also for others once they are given back (`defrag`), `largest_free_bytes` in one piece.
    """
    by_card = {view.device.id: view for view in views if not view.device.is_host}
    told = {(one.owner, one.device): one for one in maps}
    silent = {
        (id, share.device): None
        for id, section in sections.items()
        for lease in section.leases
        for share in lease.shares
        if share.device in by_card
    }
    listed = []
    for (id, device), one in (silent | told).items():
        section = sections.get(id)
        if section is None or device not in by_card:
            continue
        owner = section.owner
        listed.append(
            [
                device,
                *_cut(one, by_card[device]),
                owner.label,
                owner.user,
                owner.pid,
                owner.notebook,
            ]
        )
    listed.sort(key=lambda row: (row[0], row[FRAGMENTATION.index("pid")]))
    counts = {
        name: "Int64"
        for name in FRAGMENTATION
        if name.endswith("_bytes") or name in ("alloc_retries", "ooms")
    }
    return _frame(
        listed, FRAGMENTATION, counts | {"fragmentation_percent": "Float64", "pid": "int64"}
    )


def _cut(one: AllocatorMap | None, view: DeviceView) -> list[Any]:
    """A row's figures, from allocated_bytes to largest_request_bytes."""
    if one is None:
        return [None] * 10
    idle = one.reserved_bytes - one.allocated_bytes
    percent = round(100 * idle / one.reserved_bytes, 1) if one.reserved_bytes else 0.0
    return [
        one.allocated_bytes,
        one.reserved_bytes,
        idle,
        percent,
        one.alloc_retries,
        one.ooms,
        one.inactive_bytes,
        one.releasable_bytes,
        one.largest_free_bytes,
        one.largest_request_bytes(view),
    ]


def _frame(rows: list[list[Any]], columns: list[str], types: Mapping[str, str]) -> DataFrame:
    import pandas

    return pandas.DataFrame(rows, columns=columns).astype(dict(types))
