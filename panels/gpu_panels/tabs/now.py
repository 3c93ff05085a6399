"""The tab Now: each device with its bar, and below it the history of one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import panel as pn
import panel_material_ui as pmui

from gpu_runtime.facts import DeviceView, History, Snapshot
from gpu_runtime.rendering.elements import esc
from gpu_runtime.rendering.words import GOVERNOR_OFF

from ..actions import Actions
from ..charts.bar_chart import BarChart
from ..charts.history_chart import HistoryChart
from ..data import device_words, history
from ..data.bar_columns import BarColumns, bar_columns, labels
from ..data.bars import DeviceBar, bars
from ..data.history import HistoryColumns
from ..palette import SHARED, LeaseStyle
from ..poller import Poller
from ..widgets.prose import Prose
from .base import Tab
from .controls import BUTTONS

TWO_COLUMNS_FROM = 5  # devices; from this number on, the cards are in two columns
_TEXTURE_CLASSES = {".": " dots", "-": " stripes"}
_HISTORY_TITLE = (
    '<div class="head"><span class="name">History</span><span class="soft">Memory by lease. The '
    "background shows the pressure. ▼ offloaded, ⊠ unloaded. To zoom in, drag or use Ctrl and the "
    "wheel; ↺ shows all again.</span></div>"
)


def heading(snapshot: Snapshot, view: DeviceView, bar: DeviceBar) -> str:
    """The line of HTML above the `bar` of the device `view`, with a description of the bar.

    Screen readers read this description. `snapshot` gives the leases.
    """
    name = "" if view.device.simulated else view.device.name
    card = f'<span class="soft">{esc(name)}</span>' if name else ""
    free, *rest = device_words.facts(snapshot, view)
    notices = ""
    for n, notice in enumerate(device_words.notices(snapshot, view)):
        is_drained = view.drained is not None and n == 0
        kind = "badge drained" if is_drained else "badge"
        notices += f'<span class="{kind}">{esc(notice)}</span>'
    return (
        f'<div class="head"><span class="name">{esc(view.device.id)}</span>{card}'
        f'<span class="free">{esc(free)}</span><span class="soft">{esc(" · ".join(rest))}</span>'
        f'{notices}<span class="unread" role="img">{esc(bar.description)}</span></div>'
    )


def cards(snapshot: Snapshot, dark: bool) -> dict[str, tuple[str, BarColumns]]:
    """The heading and the bar of each device in `snapshot`, by device id; `dark` is for a dark page."""
    drawn = bars(snapshot)
    styles = SHARED.styles(labels(drawn))
    return {
        view.device.id: (heading(snapshot, view, bar), bar_columns(bar, styles, dark))
        for view, bar in zip(snapshot.devices, drawn, strict=True)
    }


def notices_html(snapshot: Snapshot) -> str:
    """A note that the governor of `snapshot` is off, and a hint if there is no GPU or no model, as HTML."""
    parts = [] if snapshot.governed else [f'<div class="alarm">{esc(GOVERNOR_OFF)}</div>']
    has_card = any(not view.device.is_host for view in snapshot.devices)
    if not has_card:
        parts.append(
            '<div class="hint">No GPU was found on this machine. To try the console with simulated '
            "devices: <code>GPU_DEVICES=sim:2x24GiB</code></div>"
        )
    has_lease = any(True for _ in snapshot.leases())
    if not has_lease:
        parts.append(
            '<div class="hint">No model holds memory yet. In a notebook: '
            "<code>%load_ext gpu</code>, then <code>%gpu load NAME PATH</code>, and to use it: "
            '<code>with rt.use("NAME") as model:</code></div>'
        )
    return "".join(parts)


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


class DeviceCard:
    """The heading and the bar of one device."""

    def __init__(self) -> None:
        self.chart = BarChart()
        self.head = Prose(margin=(6, 10, 0, 10))
        self.panel = pn.Column(
            self.head,
            pn.pane.Bokeh(self.chart.figure, sizing_mode="stretch_width", margin=(0, 6)),
            sizing_mode="stretch_width",
            styles={"min-width": "320px"},
        )

    def show(self, head: str, columns: BarColumns) -> None:
        """Updates the heading with the HTML `head`, and the bar with `columns`."""
        self.head.show(head)
        self.chart.show(columns)


class NowTab(Tab):
    """The tab that shows how full each device is, which process holds what, and the recent history."""

    title = "Now"

    def __init__(self, poller: Poller, actions: Actions) -> None:
        super().__init__(poller, actions)
        self._dark = False
        self._home = True  # whether the next update resets the zoom
        self._drawn: HistoryColumns | None = None
        self._cards: dict[str, DeviceCard] = {}
        self._notices = Prose(margin=(4, 10))
        self._grid = pn.layout.FlexBox(sizing_mode="stretch_width", gap="0")
        self._device = pmui.RadioButtonGroup(options=[], **BUTTONS)
        windows = list(history.WINDOWS)
        self._window = pmui.RadioButtonGroup(options=windows, value=windows[0], **BUTTONS)
        self._device.param.watch(self._choice_changed, "value")
        self._window.param.watch(self._choice_changed, "value")
        self.in_address(device=self._device, range=self._window)
        self._chart = HistoryChart()
        self._note, self._legend = Prose(margin=(4, 10)), Prose(margin=(0, 10, 8, 10))
        self.panel = pn.Column(
            self._notices,
            self._grid,
            Prose(_HISTORY_TITLE, margin=(10, 10, 0, 10)),
            pn.FlexBox(self._device, self._window, sizing_mode="stretch_width"),
            self._note,
            pn.pane.Bokeh(self._chart.figure, sizing_mode="stretch_width"),
            self._legend,
            sizing_mode="stretch_width",
        )

    def dark(self, on: bool) -> None:
        """Switches to the colours of the dark theme, or of the light theme if `on` is False."""
        self._dark = on

    def update(self, snapshot: Snapshot) -> None:
        """Shows the notices of `snapshot`, a card for each device, and the history."""
        drawn = self.poller.once(
            f"now {self._dark}", snapshot, lambda seen: cards(seen, self._dark)
        )
        self._notices.show(self.poller.once("notices", snapshot, notices_html))
        self._lay_out(list(drawn))
        for id, (head, columns) in drawn.items():
            self._cards[id].show(head, columns)
        self._show_past(snapshot)

    def _lay_out(self, ids: list[str]) -> None:
        """Makes a card for each device, but only if the set of devices has changed."""
        if list(self._cards) == ids:
            return
        self._cards = {id: self._cards.get(id) or DeviceCard() for id in ids}
        width = "48%" if len(ids) >= TWO_COLUMNS_FROM else "100%"
        for card in self._cards.values():
            card.panel.styles = {"flex": f"1 1 {width}", "min-width": "320px"}
        self._grid[:] = [card.panel for card in self._cards.values()]
        first = ids[0] if ids else None
        chosen = self._device.value if self._device.value in ids else first
        self._device.param.update(options=ids, value=chosen)

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
