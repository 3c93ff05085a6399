"""The tab Evictions: what left and why, as counters, a chart, a table that can be filtered, and a file.

What there is to see is decided in `evicted.py`.
"""

from __future__ import annotations

import io
from typing import Any

import panel as pn
import panel_material_ui as pmui
from bokeh.models import (
    ColumnDataSource,
    CustomJSHover,
    CustomJSTickFormatter,
    DatetimeAxis,
    HoverTool,
    LinearAxis,
    PrintfTickFormatter,
    Range1d,
    SingleIntervalTicker,
)
from bokeh.plotting import figure

from gpu_runtime.facts import Event, Snapshot
from gpu_runtime.rendering.html import esc

from ..charts.data_sources import bring
from ..charts.history_chart import CLOCK, TIME
from ..data import evictions
from ..data.evictions import ACTIONS, ANY, LOOKS, PIECES, WINDOWS, Filter
from ..palette import EDGE
from ..widgets.prose import Prose
from ..widgets.table import Sheet, encoded
from .base import Tab
from .now import BUTTONS, NO_CAPITALS, SELECT

FETCH_SECONDS = 10.0  # of the journal: what has just happened stands in the snapshot
EMPTY = (
    "Nothing was evicted in this time: every model found room. Whatever steps aside will stand here with its "
    "reason."
)
NO_MATCH = "No event passes this filter. Choose another reason, action or time."

_TOOLTIP = """<div style="font-size:12px"><b>@told</b> from @start{custom} to @end{custom}</div>"""
_SPENT_TOOLTIP = (
    """<div style="font-size:12px"><b>@y{0.0} s</b> spent on loading and coming back</div>"""
)


def counted(snapshot: Snapshot) -> str:
    """The totals of this boot as HTML: evictions, which are offloads and unloads, first."""
    first, offloads, unloads, *rest = evictions.counters(snapshot)

    def count(told: tuple[str, int, str], kind: str = "") -> str:
        name, number, means = told
        one = name[:-1] if number == 1 and name.endswith("s") else name
        return f'<span class="count {kind}" title="{esc(means)}"><b>{number}</b>{esc(one)}</span>'

    of = (
        '<span class="of">=</span>' + count(offloads) + '<span class="of">+</span>' + count(unloads)
    )
    since = '<span class="of">since this machine started</span>'
    return (
        f'<div class="counts">{count(first, "first")}{of}{"".join(map(count, rest))}{since}</div>'
    )


_KEY = "".join(
    f'<span><i style="background:{colour}"></i>{action}</span>'
    for action, (colour, _) in LOOKS.items()
)
_SPENT_KEY = "<span>●─● seconds spent on loading and coming back, on the right</span>"


class Timeline:
    """The chart: evictions and returns over time, and the seconds that coming back took."""

    def __init__(self) -> None:
        self.source = ColumnDataSource({name: [] for name in PIECES})
        self.spent = ColumnDataSource({"x": [], "y": []})
        self.time, self.height, self.seconds = Range1d(0, 1), Range1d(0, 4), Range1d(0, 1)
        self._interval = SingleIntervalTicker(interval=1, num_minor_ticks=0)
        self.figure = self._figure()

    def _figure(self) -> Any:
        plot = figure(
            height=210,
            sizing_mode="stretch_width",
            x_range=self.time,
            y_range=self.height,
            tools="",
            toolbar_location=None,
            min_border_left=40,
            x_axis_type=None,
        )
        plot.outline_line_color = None
        plot.background_fill_alpha = plot.border_fill_alpha = 0
        plot.xgrid.visible = False
        plot.yaxis.ticker, plot.yaxis.formatter = self._interval, PrintfTickFormatter(format="%d")
        plot.add_layout(
            DatetimeAxis(formatter=CustomJSTickFormatter(code=CLOCK), major_tick_out=4), "below"
        )
        plot.extra_y_ranges = {"seconds": self.seconds}
        plot.add_layout(
            LinearAxis(y_range_name="seconds", formatter=PrintfTickFormatter(format="%.3g s")),
            "right",
        )
        drawn = plot.quad(
            left="left",
            right="right",
            bottom="bottom",
            top="top",
            source=self.source,
            fill_color="colour",
            line_color=EDGE,
            line_width=0.5,
            hatch_pattern="hatch",
            hatch_color="#000000",
            hatch_alpha=0.35,
            hatch_scale=8,
        )
        line = {"x": "x", "y": "y", "source": self.spent, "y_range_name": "seconds"}
        points = plot.scatter(size=5, fill_color=EDGE, line_color=EDGE, **line)
        self._timed = [plot.line(line_color=EDGE, line_width=1.5, **line), points, plot.right[0]]
        clock = CustomJSHover(code=TIME)
        plot.add_tools(
            HoverTool(
                renderers=[drawn],
                tooltips=_TOOLTIP,
                formatters={"@start": clock, "@end": clock},
                point_policy="follow_mouse",
            ),
            HoverTool(renderers=[points], tooltips=_SPENT_TOOLTIP),
        )
        return plot

    def show(self, told: evictions.Timeline) -> None:
        """Brings the chart up to date."""
        self.time.update(start=told.start * 1e3, end=told.end * 1e3)
        top = evictions.top(told)
        self.height.update(end=top)
        self._interval.update(interval=top / 4)
        self.seconds.update(end=max(*told.seconds, 1e-3) * 1.15)
        for part in self._timed:
            part.visible = told.timed
        bring(self.source, evictions.pieces(told))
        bring(self.spent, evictions.spent(told))


class Evictions(Tab):
    """The history with its reasons, filtered, counted and exported."""

    title = "Evictions"

    def __init__(self, watch: Any, actions: Any) -> None:
        super().__init__(watch, actions)
        self._shown: object = None
        self._counts, self._key = Prose(margin=(8, 10)), Prose(margin=(0, 10, 8, 10))
        self.chart = Timeline()
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
            variant="outlined",
            margin=(10, 10),
            **NO_CAPITALS,
        )
        self.sheet = Sheet(evictions.COLUMNS, empty=EMPTY, filters=False, margin=(4, 10))
        for widget, name in (
            (self.window, "value"),
            (self.model, "value_input"),
            (self.action, "value"),
            (self.reason, "value"),
        ):
            widget.param.watch(lambda _: self._again(), name)
        self.panel = pn.Column(
            self._counts,
            self._key,
            pn.pane.Bokeh(self.chart.figure, sizing_mode="stretch_width", margin=(0, 6)),
            pn.FlexBox(
                self.window,
                self.action,
                self.reason,
                self.model,
                self.save,
                align_items="center",
                sizing_mode="stretch_width",
            ),
            self.sheet,
            sizing_mode="stretch_width",
        )

    def update(self, snapshot: Snapshot) -> None:
        self._counts.show(self.watch.once("eviction counters", snapshot, counted))
        everything = self._events(snapshot)
        options = evictions.reasons(everything)
        if options != self.reason.options:
            self.reason.param.update(
                options=options, value=self.reason.value if self.reason.value in options else ANY
            )
        told = self.watch.once(
            f"timeline {self.window.value}",
            snapshot,
            lambda seen: evictions.timeline(
                everything, *evictions.window(WINDOWS[self.window.value], seen.wall)
            ),
        )
        self.chart.show(told)
        self._key.show(f'<div class="key">{_KEY}{_SPENT_KEY if told.timed else ""}</div>')
        wanted = self._filter(snapshot)
        shown = evictions.matching(everything, wanted)
        if (shown, set(snapshot.sections)) == self._shown:
            return
        self._shown = (shown, set(snapshot.sections))  # whose names the rows tell
        self.sheet.empty = EMPTY if wanted[:3] == Filter()[:3] else NO_MATCH
        self.sheet.show(encoded(evictions.rows(shown, snapshot)))

    def _filter(self, snapshot: Snapshot) -> Filter:
        return Filter(
            self.model.value_input or "",
            self.action.value,
            self.reason.value,
            snapshot.wall - WINDOWS[self.window.value],
        )

    def _events(self, snapshot: Snapshot) -> tuple[Event, ...]:
        """All events of the window, the newest first."""
        window = self.window.value
        told = self.watch.latest(
            f"events {window}",
            lambda rt: rt.history(WINDOWS[window], points=2).events,
            every=FETCH_SECONDS,
        )
        return self.watch.once(
            f"events {window}", snapshot, lambda seen: evictions.merged(told or (), seen.events)
        )

    def _again(self) -> None:
        if self.watch.look.snapshot is not None:
            self.update(self.watch.look.snapshot)

    def _file(self) -> io.BytesIO:
        """What the filter lets through, all of it, as a file."""
        snapshot = self.watch.look.snapshot
        shown = (
            evictions.matching(self._events(snapshot), self._filter(snapshot)) if snapshot else ()
        )
        return io.BytesIO(evictions.csv_of(shown, snapshot).encode()) if snapshot else io.BytesIO()
