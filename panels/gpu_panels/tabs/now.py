"""The tab Now: each device's bar with what there is to know of it, and below how it came to be so."""

from __future__ import annotations

from typing import Any

import panel as pn
import panel_material_ui as pmui

from gpu_runtime.facts import DeviceView, History, Snapshot
from gpu_runtime.rendering.html import esc
from gpu_runtime.rendering.words import alarms

from ..charts.bar_chart import BarChart
from ..charts.history_chart import HistoryChart
from ..data import bar_columns, bars, history
from ..data.bar_columns import Drawing
from ..data.bars import Bar
from ..palette import LEVELS, SHARED, level_word
from ..widgets.prose import Prose
from .base import Tab

TWO_COLUMNS_FROM = 5  # devices
_PLAIN = {"textTransform": "none", "whiteSpace": "nowrap"}
NO_CAPITALS: dict[str, Any] = {"sx": {**_PLAIN, "& button": _PLAIN}}  # sim:0 is not SIM:0
BUTTONS: dict[str, Any] = {"size": "small", "margin": (5, 10), **NO_CAPITALS}
SELECT: dict[str, Any] = {
    "size": "small",
    "sx": {"& .MuiSelect-select": {"py": "8.5px"}},
}  # as high as a field of text


def heading(snapshot: Snapshot, view: DeviceView, bar: Bar) -> str:
    """A line of HTML above a device's bar; with the bar in words for who cannot see it."""
    look = LEVELS[view.level]
    pill = f'<span class="pill" style="background:{look.colour};color:{look.ink}">{esc(level_word(view.level))}</span>'
    free, *rest = bars.facts(snapshot, view)
    notices = "".join(
        f'<span class="badge{" drained" if view.drained and n == 0 else ""}">{esc(notice)}</span>'
        for n, notice in enumerate(bars.notices(snapshot, view))
    )
    name = "" if view.device.simulated else view.device.name
    card = f'<span class="soft">{esc(name)}</span>' if name else ""
    return (
        f'<div class="head"><span class="name">{esc(view.device.id)}</span>{card}{pill}'
        f'<span class="free">{esc(free)}</span><span class="soft">{esc(" · ".join(rest))}</span>{notices}'
        f'<span class="unread" role="img">{esc(bar.told)}</span></div>'
    )


def cards(snapshot: Snapshot, dark: bool) -> dict[str, tuple[str, Drawing]]:
    """Each device's heading and bar, by its id."""
    drawn = bars.bars(snapshot)
    looks = SHARED.looks(bar_columns.labels(drawn))
    return {
        view.device.id: (heading(snapshot, view, bar), bar_columns.drawing(bar, looks, dark))
        for view, bar in zip(snapshot.devices, drawn, strict=True)
    }


def notice(snapshot: Snapshot) -> str:
    """What must be said before anything else, as HTML: alarms, and what to do where nothing is held."""
    said = "".join(f'<div class="alarm">{esc(alarm)}</div>' for alarm in alarms(snapshot))
    if not any(not view.device.is_host for view in snapshot.devices):
        said += (
            '<div class="hint">No GPU was found on this machine. To try things out:  '
            "<code>GPU_DEVICES=sim:2x24GiB</code></div>"
        )
    if not any(True for _ in snapshot.leases()):
        said += (
            '<div class="hint">No model holds memory yet. In a notebook: <code>%load_ext gpu</code>, then '
            '<code>%gpu load NAME PATH</code>, and use it: <code>with rt.use("NAME") as model:</code></div>'
        )
    return said


def chips(drawn: history.Chart, looks: Any, named: dict[str, str]) -> str:
    """Which colour is whose, as HTML, the topmost of the stack last."""

    def chip(label: str) -> str:
        look = looks[label]
        texture = {".": " dots", "-": " stripes"}.get(look.texture, "")
        return (
            f'<span class="chip" title="{esc(named[label])}"><span class="swatch{texture}" '
            f'style="background-color:{look.colour}"></span>{esc(named[label])}</span>'
        )

    return f'<div class="chips">{"".join(map(chip, drawn.labels))}</div>' if drawn.labels else ""


_TITLE = """<div class="head"><span class="name">History</span><span class="soft">memory by lease; behind it the
pressure; ▼ offloaded, ⊠ unloaded. Drag, or Ctrl and wheel, to zoom in; ↺ shows all again.</span></div>"""


class _Card:
    """One device: a heading and its bar."""

    def __init__(self) -> None:
        self.chart = BarChart()
        self.head = Prose(margin=(6, 10, 0, 10))
        self.panel = pn.Column(
            self.head,
            pn.pane.Bokeh(self.chart.figure, sizing_mode="stretch_width", margin=(0, 6)),
            sizing_mode="stretch_width",
            styles={"min-width": "320px"},
        )

    def show(self, head: str, drawn: Drawing) -> None:
        self.head.show(head)
        self.chart.show(drawn)


class Now(Tab):
    """How full every GPU is, who holds what, and what happened lately."""

    title = "Now"

    def __init__(self, watch: Any, actions: Any) -> None:
        super().__init__(watch, actions)
        self._dark, self._home = False, True
        self._drawn: history.Drawing | None = None
        self._cards: dict[str, _Card] = {}
        self._notice = Prose(margin=(4, 10))
        self._grid = pn.layout.FlexBox(sizing_mode="stretch_width", gap="0")
        self._device = pmui.RadioButtonGroup(options=[], **BUTTONS)
        self._window = pmui.RadioButtonGroup(
            options=list(history.WINDOWS), value="15 min", **BUTTONS
        )
        self._chart = HistoryChart()
        self._silence, self._chips = Prose(margin=(4, 10)), Prose(margin=(0, 10, 8, 10))
        self._device.param.watch(self._turned, "value")
        self._window.param.watch(self._turned, "value")
        title = Prose(_TITLE, margin=(10, 10, 0, 10))
        self.panel = pn.Column(
            self._notice,
            self._grid,
            title,
            pn.FlexBox(self._device, self._window, sizing_mode="stretch_width"),
            self._silence,
            pn.pane.Bokeh(self._chart.figure, sizing_mode="stretch_width"),
            self._chips,
            sizing_mode="stretch_width",
        )

    def dark(self, on: bool) -> None:
        self._dark = on

    def update(self, snapshot: Snapshot) -> None:
        drawn = self.watch.once(f"now {self._dark}", snapshot, lambda seen: cards(seen, self._dark))
        self._notice.show(self.watch.once("notice", snapshot, notice))
        self._lay_out(list(drawn))
        for id, (head, drawing) in drawn.items():
            self._cards[id].show(head, drawing)
        self._past(snapshot)

    def _lay_out(self, ids: list[str]) -> None:
        """A card for each device; made anew only when devices come or go."""
        if list(self._cards) == ids:
            return
        self._cards = {id: self._cards.get(id) or _Card() for id in ids}
        wide = "48%" if len(ids) >= TWO_COLUMNS_FROM else "100%"
        for card in self._cards.values():
            card.panel.styles = {"flex": f"1 1 {wide}", "min-width": "320px"}
        self._grid[:] = [card.panel for card in self._cards.values()]
        chosen = self._device.value if self._device.value in ids else next(iter(ids), None)
        self._device.param.update(options=ids, value=chosen)

    # -- the past

    def _turned(self, _: object) -> None:
        """Another device or window: the whole of it, whatever was zoomed before."""
        self._home = True
        if self.watch.look.snapshot is not None:
            self._past(self.watch.look.snapshot)

    def _past(self, snapshot: Snapshot) -> None:
        window, device = self._window.value, self._device.value
        seconds = history.WINDOWS[window]
        told = self.watch.latest(
            f"history {window}",
            lambda rt: rt.history(seconds, points=history.POINTS),
            every=min(30.0, max(5.0, seconds / 300)),
        )
        if device is None:
            return
        drawn, legend, silence = (
            past_of(None, device, seconds, snapshot)
            if told is None
            else self.watch.once(
                f"chart {window} {device}",
                told,
                lambda past: past_of(past, device, seconds, snapshot),
            )
        )
        if not self._home and drawn is self._drawn:
            return
        self._chart.show(drawn, home=self._home)
        self._home, self._drawn = False, drawn
        self._silence.show(esc(silence))
        self._chips.show(legend)


def past_of(
    past: History | None, device: str, seconds: float, snapshot: Snapshot
) -> tuple[history.Drawing, str, str]:
    """A device's chart, its legend as HTML, and what to say where nothing is drawn. None: the record is being read."""
    moments, events = (past.moments, past.events) if past else ((), ())
    end = max((moment.wall for moment in moments), default=snapshot.wall)
    total = next(
        (view.device.total_bytes for view in snapshot.devices if view.device.id == device), 0
    )
    chart = history.chart(moments, events, device, end - seconds, end)
    silence = history.silence(chart) if past else "Reading the record …"
    chart = (
        chart if chart.total_bytes else chart._replace(total_bytes=total)
    )  # an empty chart has its axes too
    looks = SHARED.looks(chart.labels)
    named = history.titles((*chart.labels, history.OTHERS, history.UNLEASED), snapshot)
    return history.drawing(chart, looks, named), chips(chart, looks, named), silence
