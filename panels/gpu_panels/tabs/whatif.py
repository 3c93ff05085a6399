"""The tab What if: a dry run of using a model or leasing a size. It changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import panel as pn
import panel_material_ui as pmui

from gpu_runtime.errors import BadSize, GpuError
from gpu_runtime.facts import Snapshot, Step
from gpu_runtime.units import parse_room

from ..actions import Actions
from ..data import whatif
from ..data.bars import bars
from ..data.device_rows import device_rows, encoded, labels
from ..data.whatif import PlanAnswer
from ..palette import SHARED
from ..poller import Poller
from ..widgets.devices import Devices
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


def rows_after(snapshot: Snapshot, steps: Sequence[Step]) -> str:
    """The devices that `steps` change as rows in JSON: each as it is now, and after the steps."""
    touched = whatif.touched(steps)
    then = whatif.after(snapshot, steps)
    drawn = {"now": bars(snapshot), "after": bars(then)}
    styles = SHARED.styles(labels(bar for found in drawn.values() for bar in found))
    both = {
        when: device_rows(seen, drawn[when], styles, may_act=False)
        for when, seen in (("now", snapshot), ("after", then))
    }
    rows = [
        msgspec.structs.replace(row, id=f"{row.id} {when}", busy="", celsius="", watts="")
        for pair in zip(both["now"].rows, both["after"].rows, strict=True)
        for when, row in zip(both, pair, strict=True)
        if row.id in touched
    ]
    return encoded(msgspec.structs.replace(both["now"], rows=tuple(rows)))


class WhatIfTab(Tab):
    """A form for a model or a size, the text of the plan, and the devices after the plan."""

    title = "What if"

    def __init__(self, poller: Poller, actions: Actions) -> None:
        super().__init__(poller, actions)
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
        self.devices = Devices(visible=False, margin=(4, 10))
        self.panel = pn.Column(
            pn.FlexBox(self.model, self.size, sizing_mode="stretch_width"),
            self.answer,
            self.devices,
            self.details,
            sizing_mode="stretch_width",
        )

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
        self.devices.visible = bool(steps)
        if steps:
            self.devices.show(rows_after(snapshot, steps))

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
