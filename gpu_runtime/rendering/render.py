"""Wraps the result of a verb, so that Jupyter shows it as HTML and a terminal as text, or turns it into JSON. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..facts import (
    Applied,
    DeviceView,
    Health,
    Lease,
    Outcome,
    OutOfMemoryStory,
    Plan,
    Replayed,
    Schedule,
    Snapshot,
    Ticket,
    Value,
)
from ..owner.doctor import Report
from ..safe_text import lines
from . import allocator_map, answers, text, views
from .answers import Part

EMPTY = {
    "models": "No model is registered yet. Load one:  %gpu load NAME PATH",
    "catalog": "The catalogue is empty. Add models:  {prompt} apply -f FILE",
    "leases": "No process holds memory on a device. Load a model:  %gpu load NAME PATH",
    "evictions": "Nothing has been evicted yet. What else happened:  {prompt} evictions --all",
    "report": "Nothing was recorded in this time. It is written once a minute; GPU_LEDGER=memory: keeps none.",
    "fragmentation": "No process holds memory on a card yet. Load a model:  %gpu load NAME PATH",
}


class Shown:
    """A value with the function that paints it, and the attributes of the value."""

    def __init__(self, value: Any, paint: Callable[[Any], Part]) -> None:
        """Displays the `value` by `paint`, which is called only when it is displayed."""
        self.value = value
        self._paint = paint

    def __getattr__(self, name: str) -> Any:
        # A display hook looks for private methods. It must not find the private methods of the value.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.value, name)

    def __iter__(self) -> Any:
        return iter(self.value)

    def __repr__(self) -> str:
        return lines(self._paint(self.value).text)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        painted = self._paint(self.value)
        return {"text/plain": lines(painted.text), "text/html": painted.html}


class Json(str):
    """JSON text that a frontend can show as a tree."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/plain": str(self), "application/json": json.loads(self)}


def shown(
    verb: str,
    value: Any,
    *,
    subject: str = "",
    around: Snapshot | None = None,
    prompt: str = "%gpu",
) -> Any:
    """The `value` that a `verb` returned, wrapped with its text and its HTML. A DataFrame is unchanged.

    `subject` is the text that was typed after the verb. `around` is the snapshot of the host at the
    time of the verb. Commands in the text begin with `prompt`.
    """
    if isinstance(value, str):
        return note(value)
    if isinstance(value, allocator_map.Mapped) and not value.maps:
        return hint(nothing("fragmentation", prompt))
    if isinstance(value, Plan) and around is not None:
        return Shown(value, partial(answers.plan, snapshot=around, prompt=prompt))
    if isinstance(value, Snapshot):
        return Shown(value, partial(answers.status, prompt=prompt))
    for kind, paint in _BY_TYPE.items():
        if isinstance(value, kind):
            return Shown(value, paint)
    if verb == "status" and isinstance(value, tuple):  # one snapshot for each host
        return Shown(value, partial(answers.hosts, prompt=prompt))
    if verb == "fleet" and isinstance(value, tuple):
        return Shown(value, answers.fleet)
    if verb == "why" and value and isinstance(value[0], Replayed):
        return Shown(value, answers.replays)
    if verb == "why":
        return Shown(value, lambda events: answers.why(subject, events, prompt, around))
    if verb == "config":
        return Shown(value, answers.preset if isinstance(value, dict) else answers.config)
    return value


_BY_TYPE: dict[type, Callable[[Any], Part]] = {
    Health: answers.health,
    Outcome: answers.outcome,
    OutOfMemoryStory: answers.story,
    Schedule: answers.schedule,
    Applied: answers.applied,
    allocator_map.Mapped: lambda maps: Part(
        allocator_map.as_text(maps), allocator_map.as_html(maps)
    ),
    Report: lambda report: answers.note(report.text),
}


def with_titles(verb: str, value: Any, rt: Any) -> Any:
    """The `value` of a `verb` with the titles of maps from `rt`, and with tables in units for people."""
    if verb == "who":
        return answers.showing(value, answers.who)
    if is_frame(value):
        return answers.showing(value, answers.for_people)
    if verb == "fragmentation" and isinstance(value, tuple):
        return allocator_map.mapped(value, rt.status())
    return value


def story(found: OutOfMemoryStory) -> Shown:
    """The story of an out-of-memory error as it is shown below the error: at most ten lines."""
    return Shown(found, partial(answers.story, full=False))


def nothing(verb: str, prompt: str = "%gpu") -> str:
    """The sentence to show if the table of `verb` is empty. Its command begins with `prompt`."""
    return EMPTY.get(verb, "There is nothing to show.").format(prompt=prompt)


def note(words: str) -> Shown:
    """The `words`, unchanged, in a fixed-width font."""
    return Shown(words, answers.note)


def hint(sentence: str) -> Shown:
    """A `sentence` that ends with a command to type."""
    return Shown(sentence, answers.hint)


def is_frame(value: Any) -> bool:
    """Whether the `value` is a DataFrame or a Table. The check does not import pandas."""
    return hasattr(value, "to_dict") and hasattr(value, "columns")


def frame_text(frame: Any) -> str:
    """The DataFrame `frame` as an aligned table for people."""
    columns, rows, _ = answers.rows_of(frame, len(frame))
    numbers = [n for n, name in enumerate(columns) if text.is_number(name)]
    headers = [name.removesuffix("_seconds").replace("_", " ").upper() for name in columns]
    return "\n".join(text.table(rows, headers, numbers))


# -- plain values for JSON
#
# Every field is present; a missing value is null. Bytes are numbers, and times are epoch seconds.


def as_json(value: Any) -> str:
    """The result `value` as indented JSON."""
    text = json.dumps(plain(value), indent=2, ensure_ascii=False)
    if text.replace("\n", "").isprintable():
        return text
    # Characters that could control a terminal are written as escapes; JSON readers decode them.
    return "".join(
        sign if sign.isprintable() or sign == "\n" else json.dumps(sign)[1:-1] for sign in text
    )


def plain(value: Any) -> Any:
    """The result `value` as dicts, lists, strings and numbers."""
    if isinstance(value, Snapshot):
        return status(value)
    if isinstance(value, Value):
        return _fact(value)
    if is_frame(value):
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
        value = value.item()
    if value in (math.inf, -math.inf):  # not in JSON
        return None
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
    return {
        "name": lease.name,
        "kind": lease.kind,
        "where": lease.where,
        "bytes": lease.bytes,
        "shares": {share.device: share.bytes for share in lease.placed},
        "phase": str(lease.phase),
        "pins": lease.pins,
        "idle_seconds": round(lease.idle_seconds(snapshot.now), 3),
        "uses": lease.uses,
        "importance": lease.importance,
        "keep": lease.keep,
        "owner": owner.label,
        "owner_state": snapshot.state_of(lease.owner),
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
