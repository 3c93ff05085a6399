"""The tabs Models, Leases and Queue: each a table of `rows.py`, reckoned once for all sessions."""

from __future__ import annotations

from typing import Any

import panel as pn

from gpu_runtime.facts import ModelSpec, Snapshot

from ..actions import Actions
from ..data import rows
from ..poller import Watch
from ..widgets.table import Column, Row, Sheet, encoded
from .base import Tab

CATALOGUE_SECONDS = 10.0  # how often the catalogue is read


class _Table(Tab):
    """A tab with one table."""

    columns: tuple[Column, ...]
    empty: str

    def __init__(self, watch: Watch, actions: Actions) -> None:
        super().__init__(watch, actions)
        self.sheet = Sheet(self.columns, actions.propose, empty=self.empty)
        self.panel = pn.Column(self.sheet, sizing_mode="stretch_width")

    def rows(self, snapshot: Snapshot) -> tuple[Row, ...]:
        raise NotImplementedError

    def update(self, snapshot: Snapshot) -> None:
        acts = self.actions.may_act
        self.sheet.show(
            self.watch.once(
                f"{self.title} {acts}", snapshot, lambda seen: encoded(self.rows(seen), acts)
            )
        )


class Models(_Table):
    title = "Models"
    columns = rows.MODELS
    empty = "No model is known yet. In a notebook: `%gpu load NAME PATH`; or in a terminal: `gpu apply -f FILE`"

    def rows(self, snapshot: Snapshot) -> tuple[Row, ...]:
        return rows.models(
            snapshot,
            self.watch.latest("catalogue", _catalogue, CATALOGUE_SECONDS) or (),
            rows.looks(snapshot),
        )

    def update(self, snapshot: Snapshot) -> None:
        self.watch.latest(
            "catalogue", _catalogue, CATALOGUE_SECONDS
        )  # so that it is fetched as long as this is seen
        super().update(snapshot)


class Leases(_Table):
    title = "Leases"
    columns = rows.LEASES
    empty = "Nobody holds memory on a device. Load a model in a notebook: `%gpu load NAME PATH`"

    def rows(self, snapshot: Snapshot) -> tuple[Row, ...]:
        return rows.leases(snapshot, rows.looks(snapshot))


class Queue(_Table):
    title = "Queue"
    columns = rows.QUEUE
    empty = "Nobody waits. Requests that find no room queue here, in order, each with what it waits for."

    def rows(self, snapshot: Snapshot) -> tuple[Row, ...]:
        return rows.queue(snapshot)


def _catalogue(rt: Any) -> tuple[ModelSpec, ...]:
    """The catalogue's models, as far as a table shows them."""
    rows = rt.catalog().astype({"bytes": "object"}).itertuples(index=False)
    return tuple(
        ModelSpec(
            row.name,
            row.backend,
            row.source,
            row.bytes if isinstance(row.bytes, int) else None,
            importance=row.importance,
            keep=row.keep,
            enabled=row.state != "disabled",
        )
        for row in rows
    )
