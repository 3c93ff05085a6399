"""The tab What if: a dry run of using a model or leasing a size. It changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import panel as pn
import panel_material_ui as pmui

from gpu_runtime.errors import BadSize, GpuError
from gpu_runtime.facts import Snapshot, Step
from gpu_runtime.rendering.elements import esc
from gpu_runtime.units import parse_room, show_bytes

from ..actions import Actions
from ..charts.bar_chart import BarChart
from ..data import whatif
from ..data.bar_columns import bar_columns, labels
from ..data.bars import DeviceBar, bars
from ..data.whatif import PlanAnswer
from ..palette import SHARED
from ..poller import Poller
from ..widgets.prose import Prose
from .base import Tab
from .controls import SELECT

FETCH_SECONDS = 2.0
NO_MODEL = "choose …"
HINT = (
    "Choose a model, or type a size such as <code>14 GiB</code>, to see what would happen: where "
    "it would be placed, which models would be evicted, and the devices after that. This is a dry "
    "run: it changes nothing."
)


def request_plan(rt: Any, subject: str, models: Collection[str]) -> PlanAnswer:
    """The plan of the runtime `rt` for `subject`: one of `models`, or a size such as `14 GiB`.

    Any other text is an error. The text is never used as the path of a file, since a visitor must not
    make the server read files.
    """
    try:
        wanted = subject if subject in models else parse_room(subject)
        return PlanAnswer(rt.plan(wanted))
    except BadSize as error:
        return PlanAnswer(error=f"{error} Or choose one of the models.")
    except GpuError as error:
        return PlanAnswer(error=str(error))


class BarPair:
    """The bar of a device now, and its bar after the plan."""

    def __init__(self) -> None:
        self.head = Prose(margin=(6, 10, 0, 10))
        self.now, self.then = BarChart(), BarChart()
        self.panel = pn.Column(
            self.head,
            pn.pane.Bokeh(self.now.figure, sizing_mode="stretch_width", margin=(0, 6)),
            pn.pane.Bokeh(self.then.figure, sizing_mode="stretch_width", margin=(0, 6)),
            sizing_mode="stretch_width",
        )


class WhatIfTab(Tab):
    """A form for a model or a size, the text of the plan, and the devices after the plan."""

    title = "What if"

    def __init__(self, poller: Poller, actions: Actions) -> None:
        super().__init__(poller, actions)
        self._dark = False
        self._pairs: dict[str, BarPair] = {}
        self.model = pmui.Select(
            label="A model",
            options=[NO_MODEL],
            value=NO_MODEL,
            width=300,
            margin=(10, 10),
            **SELECT,
        )
        self.size = pmui.TextInput(
            label="or a size, such as 14 GiB", size="small", width=300, margin=(10, 10)
        )
        self.model.param.watch(self._model_chosen, "value")
        self.size.param.watch(self._size_typed, "value")
        self.answer = Prose(f'<div class="hint">{HINT}</div>', margin=(4, 10))
        self.details = Prose(margin=(4, 10))
        self.bars = pn.Column(sizing_mode="stretch_width")
        self.panel = pn.Column(
            pn.FlexBox(self.model, self.size, sizing_mode="stretch_width"),
            self.answer,
            self.bars,
            self.details,
            sizing_mode="stretch_width",
        )

    def dark(self, on: bool) -> None:
        """Switches to the colours of the dark theme, or of the light theme if `on` is False."""
        self._dark = on

    def update(self, snapshot: Snapshot) -> None:
        """Shows the plan for the chosen model or typed size, and its effect on `snapshot`."""
        models = self._offer_models(snapshot)
        subject = self._subject()
        found = self._plan(subject, models) if subject else None
        if not subject:
            text = f'<div class="hint">{HINT}</div>'
        elif found is None:
            text = '<div class="hint">Computing …</div>'
        else:
            text = whatif.answer(found, snapshot)
        self.answer.show(text)
        self.details.show(whatif.details(found, snapshot) if found else "")
        self._draw(snapshot, found.plan.steps if found and found.plan else ())

    def _offer_models(self, snapshot: Snapshot) -> list[str]:
        models = self.poller.once("what if: models", snapshot, whatif.model_choices)
        options = [NO_MODEL, *models]
        if self.model.options != options:
            value = self.model.value if self.model.value in options else NO_MODEL
            self.model.param.update(options=options, value=value)
        return models

    def _subject(self) -> str:
        """The typed size or the chosen model, or "" if there is neither."""
        size = (self.size.value or "").strip()
        if size:
            return size
        return "" if self.model.value == NO_MODEL else self.model.value

    def _plan(self, subject: str, models: list[str]) -> PlanAnswer | None:
        """The plan for `subject`, or None while it is being computed."""
        return self.poller.latest(
            f"what if: {subject}", lambda rt: request_plan(rt, subject, models), FETCH_SECONDS
        )

    def _draw(self, snapshot: Snapshot, steps: Sequence[Step]) -> None:
        """Draws every device that `steps` change, as it is now and as it would be after the steps."""
        known = {view.device.id for view in snapshot.devices}
        changed = [device for device in whatif.touched(steps) if device in known]
        if list(self._pairs) != changed:
            self._pairs = {device: self._pairs.get(device) or BarPair() for device in changed}
            self.bars[:] = [pair.panel for pair in self._pairs.values()]
        if not changed:
            return
        now, then = bars(snapshot), bars(whatif.after(snapshot, steps))
        styles = SHARED.styles(labels((*now, *then)))
        for bar_now, bar_then in zip(now, then, strict=True):
            pair = self._pairs.get(bar_now.device.id)
            if pair is not None:
                pair.head.show(_heading(bar_now, bar_then))
                pair.now.show(bar_columns(bar_now, styles, self._dark))
                pair.then.show(bar_columns(bar_then, styles, self._dark))

    def _model_chosen(self, event: Any) -> None:
        """Plans for the chosen model, and clears the size field."""
        if event.new != NO_MODEL and self.size.value:
            self.size.value = ""  # this change calls `update_again`
        else:
            self.update_again()

    def _size_typed(self, event: Any) -> None:
        """Plans for the typed size, and unselects the model."""
        if event.new and self.model.value != NO_MODEL:
            self.model.value = NO_MODEL  # this change calls `update_again`
        else:
            self.update_again()


def _heading(now: DeviceBar, then: DeviceBar) -> str:
    """The line of HTML above a pair of bars. It describes the second bar for screen readers."""
    used_now, used_then = esc(show_bytes(now.used_bytes)), esc(show_bytes(then.used_bytes))
    return (
        f'<div class="head"><span class="name">{esc(now.device.id)}</span>'
        f'<span class="soft">above: now, {used_now}; below: after the plan, {used_then}</span>'
        f'<span class="unread">{esc(then.description)}</span></div>'
    )
