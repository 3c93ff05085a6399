"""The tab What if: a dry run of using a model or leasing a number of bytes. It changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import msgspec
import panel as pn
import panel_material_ui as pmui

from gpu_runtime import threads
from gpu_runtime.errors import BadSize, GpuError
from gpu_runtime.facts import HOST, IMPORTANCE, PlanLevel, Snapshot, Step
from gpu_runtime.rendering.elements import esc
from gpu_runtime.units import parse_room

from ..actions import Actions
from ..data import whatif
from ..data.cells import as_json
from ..data.devices import Rows, device_rows
from ..data.whatif import PlanAnswer
from ..poller import Poller
from ..widgets import Devices, Prose
from .base import BUTTONS, SELECT, Tab

FETCH_SECONDS = 2.0  # between two computations of the shown plan
NO_MODEL = "choose …"
ANY, USUAL = "any card", "as registered"
LAYOUTS = (USUAL, "single", "balanced", "proportional", "whole")
DAYS = 7.0  # of the history that is replayed
HINT = (
    "Choose a model, or type a size such as <code>14 GiB</code>, to see what would happen: now, "
    "after others have left, after a wait, or never. This is a dry run: it changes nothing."
)


class PlanWish(NamedTuple):
    """A visitor's wish for a plan, in texts from a browser that `request_plan` checks."""

    subject: str
    cards: str = ANY
    layout: str = USUAL
    importance: str = USUAL

    @property
    def options(self) -> dict[str, str]:
        """The options of `rt.plan` that differ from the registration."""
        wished = {"devices": self.cards, "layout": self.layout, "importance": self.importance}
        return {name: value for name, value in wished.items() if value not in (ANY, USUAL)}


def request_plan(rt: Any, wish: PlanWish, models: Collection[str]) -> PlanAnswer:
    """The plan for the `wish`, which names one of `models` or a size such as `14 GiB`; else an error.

    The text is never used as the path of a file, since a visitor must not make the server read files.
    """
    try:
        wanted = wish.subject if wish.subject in models else parse_room(wish.subject)
        return PlanAnswer(rt.plan(wanted, **wish.options))
    except BadSize as error:
        return PlanAnswer(error=f"{error} Or choose one of the models.")
    except GpuError as error:
        return PlanAnswer(error=str(error))


def replayed(rt: Any, snapshot: Snapshot) -> str:
    """A sentence about the effect of more host memory, from a replay of the last days. A replay may take seconds."""
    card, now, more = whatif.host_choices(snapshot)
    try:
        frame = rt.backtest(days=DAYS, policy="lru", device=f"{card}B", host=f"{now}B,{more}B")
        return whatif.ram_sentence(frame.to_dict("records"), DAYS)
    except GpuError as error:  # the lines after the first one name commands of a terminal
        [text, *_] = str(error).splitlines()
        return text[:1].upper() + text[1:]


def rows_after(snapshot: Snapshot, steps: Sequence[Step]) -> str:
    """Rows, as JSON, of the devices that `steps` change. Each device has a row for now and a row for the time after."""
    touched = whatif.touched(steps)
    then = whatif.after(snapshot, steps)
    now, after = device_rows(snapshot, may_act=False), device_rows(then, may_act=False)
    rows = [
        msgspec.structs.replace(row, id=f"{row.id} {when}", busy="", celsius="", watts="")
        for pair in zip(now.rows, after.rows, strict=True)
        for when, row in zip(("now", "after"), pair, strict=True)
        if row.id in touched
    ]
    has_card = any(device != HOST for device in touched)
    ticks = now.ticks if has_card else ()  # the ticks belong to the axis of the cards
    return as_json(Rows(ticks, tuple(rows)))


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
        look: dict[str, Any] = {"width": 160, "margin": (10, 10), **SELECT}
        self.cards = pmui.Select(label="Cards", options=[ANY], value=ANY, **look)
        self.layout = pmui.Select(label="Layout", options=list(LAYOUTS), value=USUAL, **look)
        ranks = [USUAL, *IMPORTANCE]
        self.importance = pmui.Select(label="Importance", options=ranks, value=USUAL, **look)
        for choice in (self.cards, self.layout, self.importance):
            choice.param.watch(lambda _: self.update_again(), "value")
        self.preload = pmui.Button(label="Preload", visible=False, **BUTTONS)
        self.preload.on_click(lambda _: self._preload())
        self.more_ram = pmui.Button(
            label="Would more RAM have helped?", variant="outlined", **BUTTONS
        )
        self.more_ram.on_click(lambda _: self._ask_replay())
        self._replies: SimpleQueue[str] = SimpleQueue()  # from the threads that replay
        self.replay = Prose(margin=(4, 10))
        self.in_address(
            model=self.model,
            size=self.size,
            cards=self.cards,
            layout=self.layout,
            importance=self.importance,
        )
        self.model.param.watch(self._model_chosen, "value")
        self.size.param.watch(self._size_typed, "value")
        self.answer = Prose(f'<div class="hint">{HINT}</div>', margin=(4, 10))
        self.details = Prose(margin=(4, 10))
        self.devices = Devices(visible=False, margin=(4, 10))
        self.panel = pn.Column(
            pn.FlexBox(self.model, self.size, self.cards, self.layout, self.importance),
            self.answer,
            self.preload,
            self.devices,
            self.details,
            self.more_ram,
            self.replay,
            sizing_mode="stretch_width",
        )

    def update(self, snapshot: Snapshot) -> None:
        models = self._offer_models(snapshot)
        subject = self._subject()
        wish = PlanWish(subject, self.cards.value, self.layout.value, self.importance.value)
        found = self._plan(wish, models) if subject else None
        if not subject:
            text = f'<div class="hint">{HINT}</div>'
        elif found is None:
            text = '<div class="hint">Computing …</div>'
        else:
            text = whatif.answer(found, snapshot)
        self.answer.show(text)
        self.details.show(whatif.details(found, snapshot) if found else "")
        plan = found.plan if found else None
        self._draw(snapshot, plan.steps if plan else ())
        is_useful = plan is not None and plan.level not in (PlanLevel.HERE, PlanLevel.NEVER)
        is_possible = is_useful and subject in models and not wish.options
        self.preload.visible = is_possible and self.actions.may_act
        while not self._replies.empty():
            self.replay.show(f"<p>{esc(self._replies.get())}</p>")
            self.more_ram.disabled = False

    def _offer_models(self, snapshot: Snapshot) -> list[str]:
        models = self.poller.once("what if: models", snapshot, whatif.model_choices)
        options = [NO_MODEL, *models]
        if self.model.options != options:
            value = self.model.value if self.model.value in options else NO_MODEL
            self.model.param.update(options=options, value=value)
        cards = [view.device.id for view in snapshot.devices if not view.device.is_host]
        choices = [ANY, *cards]
        if self.cards.options != choices:
            value = self.cards.value if self.cards.value in choices else ANY
            self.cards.param.update(options=choices, value=value)
        return models

    def _preload(self) -> None:
        snapshot, subject = self.poller.result.snapshot, self._subject()
        if snapshot is not None and subject in whatif.model_choices(snapshot):
            self.actions.propose("preload", whatif.preload_target(subject, snapshot))

    def _ask_replay(self) -> None:
        """Replays the last days in a thread, since a replay may take seconds."""
        snapshot, rt = self.poller.result.snapshot, self.poller.rt
        if snapshot is None or self.more_ram.disabled:
            return
        self.more_ram.disabled = True
        self.replay.show('<p class="soft">Replaying the last days …</p>')

        def work() -> None:
            """Replays the last days, and puts the answer on the page."""
            self._replies.put(replayed(rt, snapshot))
            self.poller.nudge()

        threads.start(work)

    def _subject(self) -> str:
        """The typed size or the chosen model. The result is "" if the visitor has done neither."""
        size = (self.size.value or "").strip()
        if size:
            return size
        return "" if self.model.value == NO_MODEL else self.model.value

    def _plan(self, wish: PlanWish, models: list[str]) -> PlanAnswer | None:
        return self.poller.latest(
            f"what if: {wish}", lambda rt: request_plan(rt, wish, models), FETCH_SECONDS
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
