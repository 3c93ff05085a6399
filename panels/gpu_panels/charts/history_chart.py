"""The history of one device, drawn: a Bokeh figure made once, whose sources are brought up to date.

What there is to see is decided in `history.py`. Times are shown in the clock of whoever looks, by the browser.
"""

from __future__ import annotations

from typing import Any

from bokeh.models import (
    BoxZoomTool,
    ColumnDataSource,
    CustomJSHover,
    CustomJSTickFormatter,
    DatetimeAxis,
    HoverTool,
    PanTool,
    PrintfTickFormatter,
    Range1d,
    ResetTool,
    SingleIntervalTicker,
    WheelZoomTool,
)
from bokeh.plotting import figure

from ..data.bar_columns import unit_of
from ..data.history import BANDS, MARKS, RUNS, TOP, Drawing
from ..palette import EDGE
from .bar_chart import interval
from .data_sources import bring

HEIGHT = 300

CLOCK = """
const date = new Date(tick), step = ticks.length > 1 ? ticks[1] - ticks[0] : 60000;
const two = (n) => String(n).padStart(2, "0");
const time = two(date.getHours()) + ":" + two(date.getMinutes());
if (step < 60000) return time + ":" + two(date.getSeconds());
if (step >= 86400000 || time === "00:00")
  return date.toLocaleDateString(undefined, {month: "short", day: "numeric"});
return time;
"""
TIME = (
    "return new Date(value).toLocaleTimeString([], "
    '{hourCycle: "h23", hour: "2-digit", minute: "2-digit", second: "2-digit"});'
)

RUN_TOOLTIP = """<div style="max-width:340px;font-size:12px;line-height:1.45"><b>@title</b>
<div>@size, from @left{custom} to @right{custom}</div></div>"""
BAND_TOOLTIP = """<div style="font-size:12px">@told from @left{custom} to @right{custom}</div>"""
MARK_TOOLTIP = """<div style="max-width:380px;font-size:12px;line-height:1.45"><b>@title</b> at @x{custom}
<div style="white-space:pre-line">@told</div></div>"""


class HistoryChart:
    """One device's past: `show` brings it up to date, `figure` is what is looked at.

    As long as nobody has zoomed, the window moves on with the time; `follow` says whether it does.
    """

    def __init__(self) -> None:
        self.runs = ColumnDataSource({name: [] for name in RUNS})
        self.bands = ColumnDataSource({name: [] for name in BANDS})
        self.marks = ColumnDataSource({name: [] for name in MARKS})
        self.limits = ColumnDataSource({"x": [], "y": []})
        self.time, self.height = Range1d(0, 1), Range1d(0, 1)
        self._interval = SingleIntervalTicker(interval=1, num_minor_ticks=0)
        self._format = PrintfTickFormatter(format="%d GiB")
        self._window = (0.0, 1.0)
        self.figure = self._figure()

    @property
    def follow(self) -> bool:
        """Whether the whole window is shown: nobody has zoomed in."""
        return (self.time.start, self.time.end) == self._window

    def _figure(self) -> Any:
        plot = figure(
            name="history",
            height=HEIGHT,
            sizing_mode="stretch_width",
            x_range=self.time,
            y_range=self.height,
            x_axis_type=None,
            tools="",
            toolbar_location="right",
            min_border_right=10,
            min_border_left=60,
        )
        plot.toolbar.logo = None
        plot.outline_line_color = None
        plot.background_fill_alpha = plot.border_fill_alpha = 0
        plot.add_layout(
            DatetimeAxis(formatter=CustomJSTickFormatter(code=CLOCK), major_tick_out=4), "below"
        )
        plot.xgrid.visible = False
        plot.yaxis.ticker, plot.yaxis.formatter = self._interval, self._format
        banded = plot.quad(
            left="left",
            right="right",
            bottom=0,
            top=1e6,
            source=self.bands,
            fill_color="colour",
            fill_alpha="alpha",
            line_color=None,
            hatch_pattern="hatch",
            hatch_color="colour",
            hatch_alpha=0.35,
            hatch_scale=14,
        )
        held = plot.quad(
            left="left",
            right="right",
            bottom="bottom",
            top="top",
            source=self.runs,
            fill_color="colour",
            fill_alpha="alpha",
            line_color=None,
            hatch_pattern="hatch",
            hatch_color=EDGE,
            hatch_alpha=0.5,
            hatch_scale=9,
        )
        plot.step(x="x", y="y", source=self.limits, mode="after", line_color=EDGE, line_width=2)
        marked = plot.scatter(
            x="x",
            y="y",
            marker="marker",
            source=self.marks,
            size=10,
            fill_color="#d55e00",
            line_color="#000000",
            line_width=0.8,
        )
        clock = CustomJSHover(code=TIME)
        self.zoom = BoxZoomTool(dimensions="width")
        wheel = WheelZoomTool(dimensions="width", modifiers={"ctrl": True})
        plot.add_tools(
            self.zoom,
            wheel,
            PanTool(dimensions="width"),
            ResetTool(),
            HoverTool(
                renderers=[held],
                tooltips=RUN_TOOLTIP,
                formatters={"@left": clock, "@right": clock},
                point_policy="follow_mouse",
                visible=False,
            ),
            HoverTool(
                renderers=[marked], tooltips=MARK_TOOLTIP, formatters={"@x": clock}, visible=False
            ),
            HoverTool(
                renderers=[banded],
                tooltips=BAND_TOOLTIP,
                formatters={"@left": clock, "@right": clock},
                point_policy="follow_mouse",
                visible=False,
            ),
        )
        plot.toolbar.active_drag, plot.toolbar.active_scroll = self.zoom, wheel
        return plot

    def show(self, drawn: Drawing, *, home: bool = False) -> bool:
        """Brings the chart up to date; whether anything differed. `home`: the whole window, whatever was zoomed."""
        chart = drawn.chart
        unit, name = unit_of(chart.total_bytes)
        window, following = (chart.start * 1e3, chart.end * 1e3), home or self.follow
        self._window = window
        self.time.update(reset_start=window[0], reset_end=window[1])
        if following:
            self.time.update(start=window[0], end=window[1])
        top = max(chart.total_bytes, 1) * TOP / unit
        if self.height.end != top:
            self.height.update(end=top, reset_start=0, reset_end=top)
        self._interval.update(interval=interval(top))
        self._format.update(format=f"%d {name}")
        parts = (
            (self.bands, drawn.bands),
            (self.runs, drawn.runs),
            (self.limits, drawn.limits),
            (self.marks, drawn.marks),
        )
        return any([bring(source, columns) for source, columns in parts])
