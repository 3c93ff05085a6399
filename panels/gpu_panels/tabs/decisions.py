"""The tab Decisions: which requests were granted, had to wait or were refused, and why."""

from __future__ import annotations

import panel as pn
import panel_material_ui as pmui

from gpu_runtime.facts import Snapshot

from ..actions import Actions
from ..data.cells import encoded
from ..data.decisions import ALL, COLUMNS, VERDICTS, rows
from ..poller import Poller
from ..widgets.table import Table
from .base import Tab
from .controls import BUTTONS

MOST = 300  # the number of newest decisions that are shown
FETCH_SECONDS = 2.0
EMPTY = (
    "No decision has been made yet. Each grant, wait and refusal appears here with its reason, "
    "from the first use of a model on."
)


class DecisionsTab(Tab):
    """The tab with the table of grants, waits and refusals."""

    title = "Decisions"

    def __init__(self, poller: Poller, actions: Actions) -> None:
        super().__init__(poller, actions)
        self._verdict = pmui.RadioButtonGroup(options=[ALL, *VERDICTS], value=ALL, **BUTTONS)
        self._verdict.param.watch(lambda _: self.update_again(), "value")
        self.in_address(verdict=self._verdict)
        self.table = Table(COLUMNS, empty=EMPTY, key="decisions", margin=(4, 10))
        self.panel = pn.Column(self._verdict, self.table, sizing_mode="stretch_width")

    def update(self, snapshot: Snapshot) -> None:
        """Shows the newest decisions with the chosen verdict; `snapshot` names the processes."""
        fetched = self.poller.latest("decisions", lambda rt: rt.decisions(MOST), FETCH_SECONDS)
        events = fetched or ()
        verdict = self._verdict.value
        shown = self.poller.once(
            f"decisions {verdict}", snapshot, lambda seen: encoded(rows(events, seen, verdict))
        )
        self.table.show(shown)
