"""The tab Timeline: the history of one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import panel as pn
import panel_material_ui as pmui

from gpu_runtime.facts import History, Snapshot
from gpu_runtime.rendering.elements import esc

from ..actions import Actions
from ..charts.history_chart import HistoryChart
from ..data import history
from ..data.history import HistoryColumns
from ..palette import SHARED, LeaseStyle
from ..poller import Poller
from ..widgets.prose import Prose
from .base import Tab
from .controls import BUTTONS

_TEXTURE_CLASSES = {".": " dots", "-": " stripes"}
_HISTORY_TITLE = (
    '<div class="head"><span class="name">History</span><span class="soft">Memory by lease. The '
    "background shows the pressure. ▼ offloaded, ⊠ unloaded. To zoom in, drag or use Ctrl and the "
    "wheel; ↺ shows all again.</span></div>"
)


def legend(
    labels: tuple[str, ...], styles: Mapping[str, LeaseStyle], titles: Mapping[str, str]
) -> str:
    """The style and title of each of `labels` as HTML, in the order from the bottom of the stack.

    `styles` and `titles` are by label.
    """
    if not labels:
        return ""
    chips = "".join(_chip(styles[label], esc(titles[label])) for label in labels)
    return f'<div class="chips">{chips}</div>'


def _chip(style: LeaseStyle, title: str) -> str:
    texture = _TEXTURE_CLASSES.get(style.texture, "")
    return (
        f'<span class="chip" title="{title}"><span class="swatch{texture}" '
        f'style="background-color:{style.colour}"></span>{title}</span>'
    )


class PastView(NamedTuple):
    """The history of one device: its chart, its legend as HTML, and a note if it is empty."""

    columns: HistoryColumns
    legend: str
    note: str


def past_view(past: History | None, device: str, seconds: float, snapshot: Snapshot) -> PastView:
    """The last `seconds` of `device`. `past` is None while the record is being read."""
    moments, events = (past.moments, past.events) if past else ((), ())
    end = max((moment.wall for moment in moments), default=snapshot.wall)
    found = history.device_history(moments, events, device, end - seconds, end)
    note = history.empty_note(found) if past else "Reading the history …"
    if not found.total_bytes:  # the axes of an empty chart need a size too
        found = found._replace(total_bytes=_total_bytes(device, snapshot))
    styles = SHARED.styles(found.labels)
    drawn = (*found.labels, history.OTHERS, history.UNLEASED)
    titles = history.lease_titles(drawn, snapshot)
    columns = history.history_columns(found, styles, titles)
    return PastView(columns, legend(found.labels, styles, titles), note)


def _total_bytes(device: str, snapshot: Snapshot) -> int:
    totals = {view.device.id: view.device.total_bytes for view in snapshot.devices}
    return totals.get(device, 0)


class TimelineTab(Tab):
    """The tab that shows the history of one device."""

    title = "Timeline"

    def __init__(self, poller: Poller, actions: Actions) -> None:
        super().__init__(poller, actions)
        self._home = True  # whether the next update resets the zoom
        self._drawn: HistoryColumns | None = None
        self._device = pmui.RadioButtonGroup(options=[], **BUTTONS)
        windows = list(history.WINDOWS)
        self._window = pmui.RadioButtonGroup(options=windows, value=windows[0], **BUTTONS)
        self._device.param.watch(self._choice_changed, "value")
        self._window.param.watch(self._choice_changed, "value")
        self.in_address(device=self._device, range=self._window)
        self._chart = HistoryChart()
        self._note, self._legend = Prose(margin=(4, 10)), Prose(margin=(0, 10, 8, 10))
        self.panel = pn.Column(
            Prose(_HISTORY_TITLE, margin=(10, 10, 0, 10)),
            pn.FlexBox(self._device, self._window, sizing_mode="stretch_width"),
            self._note,
            pn.pane.Bokeh(self._chart.figure, sizing_mode="stretch_width"),
            self._legend,
            sizing_mode="stretch_width",
        )

    def update(self, snapshot: Snapshot) -> None:
        """Shows the history of the chosen device of `snapshot`."""
        ids = [view.device.id for view in snapshot.devices]
        if self._device.options != ids:
            first = ids[0] if ids else None
            chosen = self._device.value if self._device.value in ids else first
            self._device.param.update(options=ids, value=chosen)
        self._show_past(snapshot)

    # -- the past

    def _choice_changed(self, _: object) -> None:
        """Shows the history of another device or period, and resets the zoom."""
        self._home = True
        if self.poller.result.snapshot is not None:
            self._show_past(self.poller.result.snapshot)

    def _show_past(self, snapshot: Snapshot) -> None:
        view = self._past_view(snapshot)
        if view is None:
            return
        is_shown = view.columns is self._drawn
        if is_shown and not self._home:
            return
        self._chart.show(view.columns, home=self._home)
        self._home, self._drawn = False, view.columns
        self._note.show(esc(view.note))
        self._legend.show(view.legend)

    def _past_view(self, snapshot: Snapshot) -> PastView | None:
        """The chosen history, computed once for all sessions, or None if there is no device."""
        window, device = self._window.value, self._device.value
        seconds = history.WINDOWS[window]

        def fetch(rt: Any) -> History:
            return rt.history(seconds, points=history.POINTS)

        every = min(30.0, max(5.0, seconds / 300))
        past = self.poller.latest(f"history {window}", fetch, every)
        if device is None:
            return None
        if past is None:
            return past_view(None, device, seconds, snapshot)
        return self.poller.once(
            f"chart {window} {device}",
            past,
            lambda seen: past_view(seen, device, seconds, snapshot),
        )
