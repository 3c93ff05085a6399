"""The tab Evictions: evictions and their reasons as counters, a chart, a table and a CSV file."""

from __future__ import annotations

import io

import panel as pn
import panel_material_ui as pmui

from gpu_runtime.facts import Event, Snapshot
from gpu_runtime.rendering.elements import esc

from ..actions import Actions
from ..charts.eviction_chart import EvictionChart
from ..data import evictions
from ..data.cells import encoded
from ..data.evictions import ACTIONS, ANY, STYLES, WINDOWS, Filter
from ..poller import Poller
from ..widgets.prose import Prose
from ..widgets.table import Table
from .base import Tab
from .controls import BUTTONS, NO_CAPITALS, SELECT

FETCH_SECONDS = 10.0  # between two reads of the journal; the newest events are in the snapshot
EMPTY = "No evictions in this period. Each eviction appears here with its reason."
NO_MATCH = "No event matches this filter. Choose another reason, action or period."


def counters_html(snapshot: Snapshot) -> str:
    """The totals of `snapshot` as HTML: evictions first, as the sum of offloads and unloads."""
    first, offloads, unloads, *rest = evictions.counters(snapshot)
    return (
        '<div class="counts">'
        + _counter(first, "first")
        + '<span class="of">=</span>'
        + _counter(offloads)
        + '<span class="of">+</span>'
        + _counter(unloads)
        + "".join(_counter(counter) for counter in rest)
        + '<span class="of">since this machine started</span></div>'
    )


def _counter(counter: tuple[str, int, str], kind: str = "") -> str:
    name, number, explanation = counter
    is_singular = number == 1 and name.endswith("s")
    title = name[:-1] if is_singular else name
    return (
        f'<span class="count {kind}" title="{esc(explanation)}"><b>{number}</b>{esc(title)}</span>'
    )


_KEY = "".join(
    f'<span><i style="background:{colour}"></i>{action}</span>'
    for action, (colour, _) in STYLES.items()
)
_SECONDS_KEY = "<span>●─● seconds spent on loading and restoring, on the right axis</span>"


class EvictionsTab(Tab):
    """The tab with the history of evictions and their reasons, which can be filtered and exported."""

    title = "Evictions"

    def __init__(self, poller: Poller, actions: Actions) -> None:
        super().__init__(poller, actions)
        self._shown: object = None  # the data that the table shows now
        self._counters, self._key = Prose(margin=(8, 10)), Prose(margin=(0, 10, 8, 10))
        self.chart = EvictionChart()
        self._make_filters()
        self.table = Table(evictions.COLUMNS, empty=EMPTY, filters=False, margin=(4, 10))
        filters = (self.window, self.action, self.reason, self.model, self.save)
        self.panel = pn.Column(
            self._counters,
            self._key,
            pn.pane.Bokeh(self.chart.figure, sizing_mode="stretch_width", margin=(0, 6)),
            pn.FlexBox(*filters, align_items="center", sizing_mode="stretch_width"),
            self.table,
            sizing_mode="stretch_width",
        )

    def _make_filters(self) -> None:
        self.window = pmui.RadioButtonGroup(options=list(WINDOWS), value="24 h", **BUTTONS)
        self.model = pmui.TextInput(label="Model contains", size="small", width=200, margin=(5, 10))
        self.action = pmui.Select(
            label="What",
            options=list(ACTIONS),
            value="evictions",
            width=150,
            margin=(5, 10),
            **SELECT,
        )
        self.reason = pmui.Select(
            label="Reason", options=[ANY], value=ANY, width=190, margin=(5, 10), **SELECT
        )
        self.save = pmui.FileDownload(
            callback=self._file,
            filename="evictions.csv",
            label="Save as CSV",
            size="small",
            margin=(10, 10),
            **NO_CAPITALS,
        )
        self.save.variant = "outlined"  # as an argument it warns of one that nobody gave
        for widget, parameter in (
            (self.window, "value"),
            (self.model, "value_input"),
            (self.action, "value"),
            (self.reason, "value"),
        ):
            widget.param.watch(lambda _: self.update_again(), parameter)
        self.in_address(range=self.window, what=self.action, model=self.model)

    def update(self, snapshot: Snapshot) -> None:
        """Shows counters, chart and table, up to the time of `snapshot`."""
        self._counters.show(self.poller.once("eviction counters", snapshot, counters_html))
        events = self._events(snapshot)
        self._offer_reasons(events)
        self._show_chart(events, snapshot)
        self._show_table(events, snapshot)

    def _offer_reasons(self, events: tuple[Event, ...]) -> None:
        options = evictions.reasons(events)
        if options != self.reason.options:
            value = self.reason.value if self.reason.value in options else ANY
            self.reason.param.update(options=options, value=value)

    def _show_chart(self, events: tuple[Event, ...], snapshot: Snapshot) -> None:
        seconds = WINDOWS[self.window.value]

        def compute(seen: Snapshot) -> evictions.EvictionBins:
            start, end = evictions.window(seconds, seen.wall)
            return evictions.binned(events, start, end)

        bins = self.poller.once(f"timeline {self.window.value}", snapshot, compute)
        self.chart.show(bins)
        seconds_key = _SECONDS_KEY if bins.timed else ""
        self._key.show(f'<div class="key">{_KEY}{seconds_key}</div>')

    def _show_table(self, events: tuple[Event, ...], snapshot: Snapshot) -> None:
        wanted = self._filter(snapshot)
        matching = evictions.matching(events, wanted)
        source = (matching, set(snapshot.sections))  # the rows name processes of these sections
        if source == self._shown:
            return
        self._shown = source
        default = Filter()
        is_default = (wanted.model, wanted.action, wanted.reason) == (
            default.model,
            default.action,
            default.reason,
        )
        self.table.empty = EMPTY if is_default else NO_MATCH
        self.table.show(encoded(evictions.rows(matching, snapshot)))

    def _filter(self, snapshot: Snapshot) -> Filter:
        return Filter(
            self.model.value_input or "",
            self.action.value,
            self.reason.value,
            snapshot.wall - WINDOWS[self.window.value],
        )

    def _events(self, snapshot: Snapshot) -> tuple[Event, ...]:
        """All events of the chosen window, the newest first."""
        window = self.window.value
        key, seconds = f"events {window}", WINDOWS[window]
        past = self.poller.latest(
            key, lambda rt: rt.history(seconds, points=2).events, FETCH_SECONDS
        )
        return self.poller.once(
            key, snapshot, lambda seen: evictions.merged(past or (), seen.events)
        )

    def _file(self) -> io.BytesIO:
        """Every event that matches the filter, as a CSV file."""
        snapshot = self.poller.result.snapshot
        if snapshot is None:
            return io.BytesIO()
        matching = evictions.matching(self._events(snapshot), self._filter(snapshot))
        return io.BytesIO(evictions.csv_of(matching, snapshot).encode())
