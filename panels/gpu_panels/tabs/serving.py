"""The tab Serving: the calls, clients, usage, jobs, breakers and engine logs of the server of this page."""

from __future__ import annotations

from typing import Any

import panel as pn
import panel_material_ui as pmui

from gpu_runtime.engine_logs import newest_log, part_of
from gpu_runtime.facts import Snapshot
from gpu_runtime.rendering.elements import esc
from gpu_runtime.rendering.views import clean

from ..actions import Actions
from ..data import serving_rows
from ..data.cells import encoded
from ..poller import Poller
from ..widgets import Prose, Table
from .base import SELECT, Tab

NO_LOG = "none"
LOG_BYTES = 1 << 14  # the most bytes of a log that are shown
LOG_LINES = 40


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
        self.usage = Table(serving_rows.USAGE, empty="No call was counted yet.", filters=False)
        self.jobs = Table(serving_rows.JOBS, empty="No job is kept.", filters=False)
        self.engine = pmui.Select(
            label="Engine log", options=[NO_LOG], value=NO_LOG, width=260, **SELECT
        )
        self.log = Prose(margin=(0, 10))
        self.engine.param.watch(lambda _: self._show_log(), "value")
        self.logs = pn.Column(self.engine, self.log, visible=False, sizing_mode="stretch_width")
        self.panel = pn.Column(
            self._summary,
            _heading("Models"),
            self.models,
            _heading("Clients"),
            self.clients,
            _heading("Usage in 30 days"),
            self.usage,
            _heading("Jobs"),
            self.jobs,
            self.logs,
            sizing_mode="stretch_width",
        )

    def update(self, snapshot: Snapshot) -> None:
        figures = self.poller.serving
        if figures is None:
            return
        served = self.poller.once("serving", snapshot, lambda _: figures())
        self._summary.show(f'<div class="soft">{esc(serving_rows.summary(served))}</div>')
        self.models.show(encoded(serving_rows.model_rows(served)))
        self.clients.show(encoded(serving_rows.client_rows(served)))
        self.usage.show(encoded(serving_rows.usage_rows(served)))
        self.jobs.show(encoded(serving_rows.job_rows(served)))
        if self.actions.may_act:
            logged = self.poller.once("logged", served, _logged)
            self.engine.options = [NO_LOG, *logged]
            self.logs.visible = bool(logged)
            self._show_log()

    def _show_log(self) -> None:
        """Shows the end of the chosen engine's log. A viewer gets no log, because it may have texts of calls."""
        if self.actions.may_act:
            self.log.show(_end_of_log(self.engine.value))


def _logged(served: Any) -> list[str]:
    """The called models that have the log of an engine, in order."""
    return [name for name in sorted(served.models) if newest_log(name) is not None]


def _end_of_log(model: str) -> str:
    """The last lines of the log of the model's engine, as HTML; empty without a log."""
    log = newest_log(model) if model != NO_LOG else None
    if log is None:
        return ""
    try:
        text, _ = part_of(log, 0, LOG_BYTES)
    except OSError:  # it was deleted, as the oldest logs are
        return ""
    lines = [esc(clean(line)) for line in text.splitlines()[-LOG_LINES:]]
    shown = "\n".join(lines)
    return f"<pre><span>{shown}</span></pre>" if lines else '<div class="soft">It is empty.</div>'
