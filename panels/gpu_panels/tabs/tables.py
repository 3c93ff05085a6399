"""The tabs Models and Leases, each a table, and the variables of one notebook below the leases."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any, ClassVar

import panel as pn
import panel_material_ui as pmui

from gpu_runtime import threads
from gpu_runtime.errors import GpuError
from gpu_runtime.facts import ModelSpec, Snapshot

from ..actions import Actions
from ..data.cells import Column, Row, encoded, lease_styles
from ..data.lease_rows import (
    HOLDERS,
    LEASES,
    MODELS,
    Variables,
    heading,
    holders,
    leases,
    models,
    sums,
)
from ..poller import Poller
from ..widgets import Prose, Table
from .base import BUTTONS, Tab

CATALOGUE_SECONDS = 10.0  # between two reads of the catalogue


class TableTab(Tab):
    """A tab with one table. A subclass gives the columns and the rows."""

    columns: ClassVar[tuple[Column, ...]]
    empty: ClassVar[str]  # the text that is shown if there are no rows

    def __init__(self, poller: Poller, actions: Actions) -> None:
        super().__init__(poller, actions)
        self.table = Table(self.columns, actions.propose, empty=self.empty, key=self.title.lower())
        self.panel = pn.Column(self.table, sizing_mode="stretch_width")

    def rows(self, snapshot: Snapshot) -> tuple[Row, ...]:
        """The rows for `snapshot`."""
        raise NotImplementedError

    def update(self, snapshot: Snapshot) -> None:
        may_act = self.actions.may_act
        rows = self.poller.once(
            f"{self.title} {may_act}", snapshot, lambda seen: encoded(self.rows(seen), may_act)
        )
        self.table.show(rows)


class ModelsTab(TableTab):
    """The tab with every model that has a lease, is registered or is in the catalogue."""

    title = "Models"
    columns = MODELS
    empty = (
        "No model is known yet. In a notebook: `%gpu load NAME PATH`; in a terminal: "
        "`gpu apply -f FILE`"
    )

    def rows(self, snapshot: Snapshot) -> tuple[Row, ...]:
        return models(snapshot, self._catalogue(), lease_styles(snapshot))

    def update(self, snapshot: Snapshot) -> None:
        self._catalogue()  # while a session requests the catalogue, the poller reads it again
        super().update(snapshot)

    def _catalogue(self) -> tuple[ModelSpec, ...]:
        return self.poller.latest("catalogue", read_catalogue, CATALOGUE_SECONDS) or ()


def read_catalogue(rt: Any) -> tuple[ModelSpec, ...]:
    """The models in the catalogue of the runtime `rt`, with the fields that the table shows."""
    entries = rt.catalog().astype({"bytes": "object"}).itertuples(index=False)
    return tuple(
        ModelSpec(
            entry.name,
            entry.backend,
            entry.source,
            entry.bytes if isinstance(entry.bytes, int) else None,
            importance=entry.importance,
            keep=entry.keep,
            enabled=entry.state != "disabled",
        )
        for entry in entries
    )


EMPTY = "No variable or output holds memory on a device."


class LeasesTab(TableTab):
    """The tab with the table of leases. Below the table are the variables of the last selected notebook."""

    title = "Leases"
    columns = LEASES
    empty = (
        "No process holds memory on a device. To load a model in a notebook: `%gpu load NAME PATH`"
    )

    def __init__(self, poller: Poller, actions: Actions) -> None:
        super().__init__(poller, actions)
        self.table = Table(self.columns, self._pressed, empty=self.empty, key="leases")
        self._asked = ""  # the id of the process whose variables are shown; empty: none
        self._answers: SimpleQueue[Variables] = SimpleQueue()  # from the threads that ask
        self._head, self._sums = Prose(margin=(18, 10, 0, 10)), Prose(margin=(4, 10, 10, 10))
        self._variables = Table(HOLDERS, empty=EMPTY, filters=False)
        hide = pmui.Button(label="Hide", variant="text", **BUTTONS)
        hide.on_click(lambda _: self._hide())
        self._parts = [
            pn.Row(self._head, hide, sizing_mode="stretch_width"),
            self._variables,
            self._sums,
        ]
        self._below = pn.Column(sizing_mode="stretch_width")
        self.panel = pn.Column(self.table, self._below, sizing_mode="stretch_width")

    def rows(self, snapshot: Snapshot) -> tuple[Row, ...]:
        return leases(snapshot, lease_styles(snapshot))

    def update(self, snapshot: Snapshot) -> None:
        super().update(snapshot)
        while not self._answers.empty():
            answer = self._answers.get()
            if answer.owner == self._asked:
                self._show(answer)

    def _pressed(self, verb: str, id: str) -> None:
        """Handles a press in the row `id`, which the browser sends and which is checked here."""
        snapshot = self.poller.result.snapshot
        owner = id.partition("/")[0]
        if snapshot is None or owner not in snapshot.sections or not self.actions.may_act:
            return
        if verb != "who":
            self.actions.propose(verb, "/".join(id.split("/")[:2]))
            return
        self._asked = owner
        self._show(Variables(owner, snapshot.sections[owner].owner.label))
        name, rt = self.actions.visitor.name, self.poller.rt
        threads.start(lambda: self._ask(rt, owner, name))

    def _ask(self, rt: Any, owner: str, name: str) -> None:
        """Requests the variables of the process `owner`, and waits for the answer. Runs in a thread."""
        snapshot = self.poller.result.snapshot
        section = snapshot.sections.get(owner) if snapshot else None
        label = section.owner.label if section else ""
        try:
            with rt.on_behalf_of(f"{name}, console"):
                frame = rt.who(owner)
            answer = Variables(owner, label, frame=frame)
        except GpuError as error:
            answer = Variables(owner, label, trouble=f"{error}")
        self._answers.put(answer)
        self.poller.nudge()

    def _show(self, answer: Variables) -> None:
        self._head.show(heading(answer))
        self._variables.show(encoded(holders(answer)))
        self._variables.visible = answer.frame is not None
        self._sums.show(sums(answer))
        if list(self._below) != self._parts:
            self._below[:] = self._parts

    def _hide(self) -> None:
        self._asked = ""
        self._below[:] = []
