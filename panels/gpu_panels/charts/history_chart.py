"""The history of one device: a Bokeh figure that is made once, and whose sources are updated.

`data/history.py` computes its data. The browser shows times in the viewer's time zone.
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

from ..data.columns import interval, unit_of
from ..data.history import (
    BAND_COLUMNS,
    INTERVAL_COLUMNS,
    LIMIT_COLUMNS,
    MARK_COLUMNS,
    TOP,
    HistoryColumns,
)
from ..palette import EDGE
from .data_sources import HATCHED, bring

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

INTERVAL_TOOLTIP = """<div style="max-width:340px;font-size:12px;line-height:1.45"><b>@title</b>
<div>@size, from @left{custom} to @right{custom}</div></div>"""
BAND_TOOLTIP = """<div style="font-size:12px">@tooltip from @left{custom} to @right{custom}</div>"""
MARK_TOOLTIP = """<div style="max-width:380px;font-size:12px;line-height:1.45"><b>@title</b> at @x{custom}
<div style="white-space:pre-line">@tooltip</div></div>"""


class HistoryChart:
    """One device's history. The method `show` updates the chart, and `figure` is the Bokeh model.

    While the viewer has not zoomed, the window moves with the time. `follow` is True then.
    """

    def __init__(self) -> None:
        self.intervals = ColumnDataSource({name: [] for name in INTERVAL_COLUMNS})
        self.bands = ColumnDataSource({name: [] for name in BAND_COLUMNS})
        self.marks = ColumnDataSource({name: [] for name in MARK_COLUMNS})
        self.limits = ColumnDataSource({name: [] for name in LIMIT_COLUMNS})
        self.time, self.height = Range1d(0, 1), Range1d(0, 1)
        self._interval = SingleIntervalTicker(interval=1, num_minor_ticks=0)
        self._format = PrintfTickFormatter(format="%d GiB")
        self._window = (0.0, 1.0)
        self.figure = self._figure()

    @property
    def follow(self) -> bool:
        """Whether the whole window is shown, because the viewer has not zoomed in."""
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
        time_axis = DatetimeAxis(formatter=CustomJSTickFormatter(code=CLOCK), major_tick_out=4)
        plot.add_layout(time_axis, "below")
        plot.xgrid.visible = False
        plot.yaxis.ticker, plot.yaxis.formatter = self._interval, self._format
        bands = self._draw_bands(plot)
        intervals = self._draw_intervals(plot)
        plot.step(x="x", y="y", source=self.limits, mode="after", line_color=EDGE, line_width=2)
        marks = self._draw_marks(plot)
        self._add_tools(plot, bands, intervals, marks)
        return plot

    def _draw_bands(self, plot: Any) -> Any:
        return plot.quad(
            **{**HATCHED, "bottom": 0, "top": 1e6},
            source=self.bands,
            fill_alpha="alpha",
            hatch_color="colour",
            hatch_alpha=0.35,
            hatch_scale=14,
        )

    def _draw_intervals(self, plot: Any) -> Any:
        return plot.quad(
            **HATCHED,
            source=self.intervals,
            fill_alpha="alpha",
            hatch_color=EDGE,
            hatch_alpha=0.5,
            hatch_scale=9,
        )

    def _draw_marks(self, plot: Any) -> Any:
        return plot.scatter(
            x="x",
            y="y",
            marker="marker",
            source=self.marks,
            size=10,
            fill_color="#d55e00",
            line_color="#000000",
            line_width=0.8,
        )

    def _add_tools(self, plot: Any, bands: Any, intervals: Any, marks: Any) -> None:
        """Adds zooming and the tooltips of the three renderers."""
        clock = CustomJSHover(code=TIME)
        of_period = {
            "formatters": {"@left": clock, "@right": clock},
            "point_policy": "follow_mouse",
            "visible": False,
        }
        self.zoom = BoxZoomTool(dimensions="width")
        wheel = WheelZoomTool(dimensions="width", modifiers={"ctrl": True})
        plot.add_tools(
            self.zoom,
            wheel,
            PanTool(dimensions="width"),
            ResetTool(),
            HoverTool(renderers=[intervals], tooltips=INTERVAL_TOOLTIP, **of_period),
            HoverTool(
                renderers=[marks], tooltips=MARK_TOOLTIP, formatters={"@x": clock}, visible=False
            ),
            HoverTool(renderers=[bands], tooltips=BAND_TOOLTIP, **of_period),
        )
        plot.toolbar.active_drag, plot.toolbar.active_scroll = self.zoom, wheel

    def show(self, columns: HistoryColumns, *, home: bool = False) -> bool:
        """Updates the chart with `columns`, and returns whether anything differed.

        With `home` the whole window is shown, even if the viewer had zoomed in.
        """
        history = columns.history
        unit_bytes, unit = unit_of(history.total_bytes)
        start, end = history.start * 1e3, history.end * 1e3
        show_all = home or self.follow
        self._window = (start, end)
        self.time.update(reset_start=start, reset_end=end)
        if show_all:
            self.time.update(start=start, end=end)
        top = max(history.total_bytes, 1) * TOP / unit_bytes
        if self.height.end != top:
            self.height.update(end=top, reset_start=0, reset_end=top)
        self._interval.update(interval=interval(top))
        self._format.update(format=f"%d {unit}")
        changed = [
            bring(self.bands, columns.bands),
            bring(self.intervals, columns.intervals),
            bring(self.limits, columns.limits),
            bring(self.marks, columns.marks),
        ]
        return any(changed)
