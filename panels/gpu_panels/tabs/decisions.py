"""The tab Decisions: who was given memory, who had to wait and who was refused, and why.

Pure but for the tab itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import panel as pn
import panel_material_ui as pmui

from gpu_runtime.facts import Event, Snapshot, ended_label
from gpu_runtime.rendering.views import clean
from gpu_runtime.units import show_bytes

from ..data.bars import holder
from ..widgets.table import Cell, Column, Row, Sheet, encoded
from .base import Tab
from .now import BUTTONS

MOST = 300  # decisions that are shown, the newest
FETCH_SECONDS = 2.0
ALL = "all"
VERDICTS = {"granted": "✓ granted", "waiting": "◷ waits", "refused": "✗ refused"}
COLUMNS = (
    Column("When", hint="By your clock"),
    Column("Verdict"),
    Column("Model"),
    Column("For", hint="The process that asked"),
    Column("Needs", True),
    Column("Because"),
    Column("Also considered", hint="What lost, and why"),
)
EMPTY = (
    "Nothing has been decided yet. Every grant, wait and refusal will stand here with its reason, from the first "
    "model that is used."
)


def rows(events: Iterable[Event], snapshot: Snapshot, verdict: str = ALL) -> tuple[Row, ...]:
    """A row a decision, in the order given."""
    return tuple(
        _row(event, snapshot)
        for event in events
        if event.action in VERDICTS and verdict in (ALL, event.action)
    )


def _row(event: Event, snapshot: Snapshot) -> Row:
    kind = {"refused": "alarm", "granted": "strong"}.get(event.action, "")
    cells = (
        when(event.wall),
        Cell(VERDICTS[event.action], kind=kind),
        named(event),
        who(event, snapshot),
        Cell(show_bytes(event.bytes), event.bytes) if event.bytes else Cell("–", kind="soft"),
        Cell(clean(event.because), kind="prose"),
        Cell("\n".join(clean(one) for one in event.runners_up) or "–", kind="prose soft"),
    )
    return Row(row_id(event), cells)


def named(event: Event) -> Cell:
    """The model; a long name is wrapped."""
    return Cell(clean(event.model), hint=clean(event.model), kind="short")


def row_id(event: Event) -> str:
    return f"{event.wall:.6f}.{event.seq}"


def when(wall: float) -> Cell:
    """A time that the browser tells by its own clock."""
    return Cell("", wall, kind="time")


def who(event: Event, snapshot: Snapshot) -> Cell:
    """The process that it was done for or by, and the person who asked, where that is somebody else."""
    section = snapshot.sections.get(event.owner)
    pid = event.owner.partition(".")[0]
    said = holder(section) if section else ended_label(event.owner) if pid else "–"
    asked = f", asked by {clean(event.by)}" if event.by and ":" not in event.by else ""
    return Cell(said + asked, hint=said + asked, kind="short" if section else "short soft")


class Decisions(Tab):
    """Grants, waits and refusals."""

    title = "Decisions"

    def __init__(self, watch: Any, actions: Any) -> None:
        super().__init__(watch, actions)
        self._verdict = pmui.RadioButtonGroup(options=[ALL, *VERDICTS], value=ALL, **BUTTONS)
        self._verdict.param.watch(lambda _: self._again(), "value")
        self.sheet = Sheet(COLUMNS, empty=EMPTY, margin=(4, 10))
        self.panel = pn.Column(self._verdict, self.sheet, sizing_mode="stretch_width")

    def update(self, snapshot: Snapshot) -> None:
        told = (
            self.watch.latest("decisions", lambda rt: rt.decisions(MOST), every=FETCH_SECONDS) or ()
        )
        verdict = self._verdict.value
        self.sheet.show(
            self.watch.once(
                f"decisions {verdict}", snapshot, lambda seen: encoded(rows(told, seen, verdict))
            )
        )

    def _again(self) -> None:
        if self.watch.look.snapshot is not None:
            self.update(self.watch.look.snapshot)
