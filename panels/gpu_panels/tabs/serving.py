"""The tab Serving: the calls, clients, jobs and circuit breakers of the server of this page."""

from __future__ import annotations

import panel as pn

from gpu_runtime.facts import Snapshot
from gpu_runtime.rendering.elements import esc

from ..actions import Actions
from ..data import serving_rows
from ..data.cells import encoded
from ..poller import Poller
from ..widgets.prose import Prose
from ..widgets.table import Table
from .base import Tab


def _heading(title: str) -> Prose:
    return Prose(
        f'<div class="head"><span class="name">{title}</span></div>', margin=(10, 10, 0, 10)
    )


class ServingTab(Tab):
    """The tab with the figures of `gpu serve` since the server began."""

    title = "Serving"

    def __init__(self, poller: Poller, actions: Actions) -> None:
        super().__init__(poller, actions)
        self._summary = Prose(margin=(6, 10, 0, 10))
        self.models = Table(serving_rows.MODELS, empty="No model was called yet.", filters=False)
        self.clients = Table(serving_rows.CLIENTS, empty="No client has called yet.", filters=False)
        self.jobs = Table(serving_rows.JOBS, empty="No job is kept.", filters=False)
        self.panel = pn.Column(
            self._summary,
            _heading("Models"),
            self.models,
            _heading("Clients"),
            self.clients,
            _heading("Jobs"),
            self.jobs,
            sizing_mode="stretch_width",
        )

    def update(self, snapshot: Snapshot) -> None:
        """Shows the figures of the server. For each `snapshot`, the figures are read once for all sessions."""
        figures = self.poller.serving
        if figures is None:
            return
        served = self.poller.once("serving", snapshot, lambda _: figures())
        self._summary.show(f'<div class="soft">{esc(serving_rows.summary(served))}</div>')
        self.models.show(encoded(serving_rows.model_rows(served)))
        self.clients.show(encoded(serving_rows.client_rows(served)))
        self.jobs.show(encoded(serving_rows.job_rows(served)))
