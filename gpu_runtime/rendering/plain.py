"""Answers as plain values for JSON: every field present, bytes as numbers, times as epoch seconds. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gpu_runtime.facts import Lease, Snapshot, Ticket, Value

from . import views


def as_json(value: Any) -> str:
    return json.dumps(plain(value), indent=2, ensure_ascii=False)


def plain(value: Any) -> Any:
    """The answer built of dicts, lists, strings and numbers."""
    if isinstance(value, Snapshot):
        return status(value)
    if isinstance(value, Value):
        own = {name: plain(getattr(value, name)) for name in value.__struct_fields__}
        return {"step": type(value).__name__.lower(), **own} if value.__struct_config__.tag else own
    if hasattr(value, "to_dict") and hasattr(
        value, "columns"
    ):  # a DataFrame, without importing pandas to ask
        return [
            {name: plain(cell) for name, cell in row.items()} for row in value.to_dict("records")
        ]
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): plain(cell) for key, cell in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(cell) for cell in value]
    return _scalar(value)


def _scalar(value: Any) -> Any:
    if (
        value is None or value != value
    ):  # NaN and NaT differ from themselves, and JSON knows neither
        return None
    if hasattr(value, "timestamp"):
        return value.timestamp()
    if hasattr(value, "item"):  # a number of NumPy's
        return value.item()
    return value if isinstance(value, (str, int, float, bool)) else str(value)


def status(snapshot: Snapshot) -> dict[str, Any]:
    """A Snapshot for programs. Percents are 0 to 100."""
    return {
        "time": snapshot.wall,
        "simulated": snapshot.simulated,
        "governed": snapshot.governed,
        "degraded": snapshot.degraded or None,
        "ledger": snapshot.ledger,
        "pressure_level": str(views.worst_level(snapshot)),
        "devices": [
            {
                "id": seen.device.id,
                "name": seen.device.name,
                "uuid": seen.device.uuid,
                "total_bytes": seen.device.total_bytes,
                "limit_bytes": seen.limit_bytes,
                "claimed_bytes": seen.claimed_bytes,
                "measured_bytes": seen.measured_bytes,
                "residue_bytes": seen.residue_bytes,
                "pressure_percent": round(seen.pressure * 100, 1),
                "level": str(seen.level),
                "drained_by": seen.drained.by if seen.drained else None,
                "utilisation_percent": seen.sample.utilisation_percent if seen.sample else None,
                "temperature_celsius": seen.sample.temperature_celsius if seen.sample else None,
                "power_watts": seen.sample.power_watts if seen.sample else None,
                "simulated": seen.device.simulated,
            }
            for seen in snapshot.devices
        ],
        "leases": [_lease(snapshot, lease) for lease in snapshot.leases()],
        "waiting": [_ticket(snapshot, ticket) for ticket in snapshot.tickets],
        "registered": [spec.name for spec in snapshot.specs],
        "totals": dict(snapshot.totals),
        "last_event": plain(snapshot.events[-1]) if snapshot.events else None,
    }


def _lease(snapshot: Snapshot, lease: Lease) -> dict[str, Any]:
    owner = snapshot.sections[lease.owner].owner
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
