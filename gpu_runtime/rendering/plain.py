"""Turns the results of verbs into plain values for JSON. This module is pure.

Every field is present; a missing value is null. Bytes are numbers, and times are epoch seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gpu_runtime.facts import DeviceView, Lease, Snapshot, Ticket, Value

from . import views


def as_json(value: Any) -> str:
    """The result `value` as indented JSON."""
    text = json.dumps(plain(value), indent=2, ensure_ascii=False)
    if text.replace("\n", "").isprintable():
        return text
    # Characters that could control a terminal are written as escapes; JSON readers decode them.
    return "".join(
        one if one.isprintable() or one == "\n" else json.dumps(one)[1:-1] for one in text
    )


def plain(value: Any) -> Any:
    """The result `value` as dicts, lists, strings and numbers."""
    if isinstance(value, Snapshot):
        return status(value)
    if isinstance(value, Value):
        return _fact(value)
    if hasattr(value, "to_dict") and hasattr(value, "columns"):  # a DataFrame, without pandas
        rows = value.to_dict("records")
        plain_rows = [{name: plain(cell) for name, cell in row.items()} for row in rows]
        return {"rows": plain_rows, **plain(value.attrs)} if value.attrs else plain_rows
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): plain(cell) for key, cell in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(cell) for cell in value]
    return _scalar(value)


def _fact(value: Value) -> dict[str, Any]:
    """The fields of `value`. For a step of a plan, the field `step` names its kind."""
    fields = {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if not value.__struct_config__.tag:
        return fields
    return {"step": type(value).__name__.lower(), **fields}


def _scalar(value: Any) -> Any:
    if value is None or value != value:  # NaN or NaT (they differ from themselves), not in JSON
        return None
    if hasattr(value, "timestamp"):
        return value.timestamp()
    if hasattr(value, "item"):  # a NumPy number
        return value.item()
    return value if isinstance(value, (str, int, float, bool)) else str(value)


def status(snapshot: Snapshot) -> dict[str, Any]:
    """The `snapshot` for programs. Percents are numbers such as 12.5; a pressure can exceed 100."""
    return {
        "time": snapshot.wall,
        "simulated": snapshot.simulated,
        "governed": snapshot.governed,
        "degraded": snapshot.degraded or None,
        "ledger": snapshot.ledger,
        "pressure_level": str(views.worst_level(snapshot)),
        "devices": [_device(view) for view in snapshot.devices],
        "leases": [_lease(snapshot, lease) for lease in snapshot.leases()],
        "waiting": [_ticket(snapshot, ticket) for ticket in snapshot.tickets],
        "registered": [spec.name for spec in snapshot.specs],
        "totals": dict(snapshot.totals),
        "last_event": plain(snapshot.events[-1]) if snapshot.events else None,
    }


def _device(view: DeviceView) -> dict[str, Any]:
    return {
        "id": view.device.id,
        "name": view.device.name,
        "uuid": view.device.uuid,
        "total_bytes": view.device.total_bytes,
        "limit_bytes": view.limit_bytes,
        "claimed_bytes": view.claimed_bytes,
        "measured_bytes": view.measured_bytes,
        "residue_bytes": view.residue_bytes,
        "pressure_percent": round(view.pressure * 100, 1),
        "level": str(view.level),
        "drained_by": view.drained.by if view.drained else None,
        "utilisation_percent": view.sample.utilisation_percent if view.sample else None,
        "temperature_celsius": view.sample.temperature_celsius if view.sample else None,
        "power_watts": view.sample.power_watts if view.sample else None,
        "simulated": view.device.simulated,
    }


def _lease(snapshot: Snapshot, lease: Lease) -> dict[str, Any]:
    owner = snapshot.sections[lease.owner].owner
    presence = snapshot.presences.get(lease.owner)
    return {
        "name": lease.name,
        "kind": lease.kind,
        "where": lease.where,
        "bytes": lease.bytes,
        "shares": {share.device: share.bytes for share in lease.shares},
        "phase": str(lease.phase),
        "pins": lease.pins,
        "idle_seconds": round(lease.idle_seconds(snapshot.now), 3),
        "uses": lease.uses,
        "importance": lease.importance,
        "keep": lease.keep,
        "owner": owner.label,
        "owner_state": presence.state.value if presence else None,
        "pid": owner.pid,
        "user": owner.user,
        "notebook": owner.notebook,
    }


def _ticket(snapshot: Snapshot, ticket: Ticket) -> dict[str, Any]:
    section = snapshot.sections.get(ticket.owner)
    return {
        "verb": ticket.verb,
        "name": ticket.name,
        "importance": ticket.importance,
        "need": {share.device: share.bytes for share in ticket.need},
        "waited_seconds": round(max(0.0, snapshot.now - ticket.arrived), 3),
        "owner": section.owner.label if section else "",
        "because": ticket.because,
    }
