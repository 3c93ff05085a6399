"""The rows of the tab Decisions, and the cells of an event that the tab Evictions shares."""

from __future__ import annotations

from collections.abc import Iterable

from gpu_runtime.facts import Event, Snapshot, ended_label
from gpu_runtime.rendering.views import clean
from gpu_runtime.units import show_bytes

from .cells import Cell, Column, Row
from .names import process_name

ALL = "all"
VERDICTS = {"granted": "✓ granted", "waiting": "◷ waits", "refused": "✗ refused"}
_KINDS = {"refused": "alarm", "granted": "strong"}
COLUMNS = (
    Column("When", hint="In your local time"),
    Column("Verdict"),
    Column("Model"),
    Column("For", hint="The process that made the request"),
    Column("Needs", True),
    Column("Because"),
    Column("Also considered", hint="Other places, and why they were not chosen"),
)


def rows(events: Iterable[Event], snapshot: Snapshot, verdict: str = ALL) -> tuple[Row, ...]:
    """A row for each decision among `events`, in their order.

    `verdict` is one of VERDICTS, to select only these decisions, or ALL.
    """
    return tuple(
        _row(event, snapshot)
        for event in events
        if event.action in VERDICTS and verdict in (ALL, event.action)
    )


def _row(event: Event, snapshot: Snapshot) -> Row:
    runners_up = "\n".join(clean(runner_up) for runner_up in event.runners_up)
    cells = (
        time_cell(event.wall),
        Cell(VERDICTS[event.action], kind=_KINDS.get(event.action, "")),
        model_cell(event),
        process_cell(event, snapshot),
        Cell(show_bytes(event.bytes), event.bytes) if event.bytes else Cell("–", kind="soft"),
        Cell(clean(event.because), kind="prose"),
        Cell(runners_up or "–", kind="prose soft"),
    )
    return Row(row_id(event), cells)


def row_id(event: Event) -> str:
    """An id for `event` that is unique among the events of this boot."""
    return f"{event.wall:.6f}.{event.seq}"


def time_cell(wall: float) -> Cell:
    """The time `wall` in epoch seconds, which the browser shows in its own time zone."""
    return Cell("", wall, kind="time")


def model_cell(event: Event) -> Cell:
    """The name of the model of `event`. A long name is wrapped."""
    return Cell(clean(event.model), hint=clean(event.model), kind="short")


def process_cell(event: Event, snapshot: Snapshot) -> Cell:
    """The process of `event` by its name in `snapshot`, and the person who requested it, if any."""
    section = snapshot.sections.get(event.owner)
    pid = event.owner.partition(".")[0]
    if section:
        process = process_name(section)
    else:
        process = ended_label(event.owner) if pid else "–"
    by_person = event.by and ":" not in event.by
    text = f"{process}, requested by {clean(event.by)}" if by_person else process
    return Cell(text, hint=text, kind="short" if section else "short soft")
