"""The tab Models, and the base class of tabs with one table. A table is encoded once for all
sessions.
"""

from __future__ import annotations

from typing import Any, ClassVar

import panel as pn

from gpu_runtime.facts import ModelSpec, Snapshot

from ..actions import Actions
from ..data.cells import Column, Row, encoded
from ..data.model_rows import MODELS, models
from ..data.row_parts import lease_styles
from ..poller import Poller
from ..widgets.table import Table
from .base import Tab

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
        """Shows the rows for `snapshot`. The buttons are shown only to a visitor who may act."""
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
        """The rows for `snapshot` and the catalogue."""
        return models(snapshot, self._catalogue(), lease_styles(snapshot))

    def update(self, snapshot: Snapshot) -> None:
        """Shows the rows for `snapshot` and the catalogue."""
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
