"""Evictions and restores over time: a Bokeh figure that is made once, and whose sources are updated.

`data/evictions.py` computes its data.
"""

from __future__ import annotations

from typing import Any

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

from ..data.evictions import BAR_COLUMNS, EvictionBins, eviction_columns, seconds_columns, top
from ..palette import EDGE
from .data_sources import HATCHED, bring
from .history_chart import CLOCK, TIME

_TOOLTIP = (
    """<div style="font-size:12px"><b>@tooltip</b> from @start{custom} to @end{custom}</div>"""
)
_SECONDS_TOOLTIP = (
    """<div style="font-size:12px"><b>@y{0.0} s</b> spent on loading and restoring</div>"""
)


class EvictionChart:
    """The chart. The method `show` updates the chart, and `figure` is the Bokeh model."""

    def __init__(self) -> None:
        self.source = ColumnDataSource({name: [] for name in BAR_COLUMNS})
        self.spent = ColumnDataSource({"x": [], "y": []})
        self.time, self.height, self.seconds = Range1d(0, 1), Range1d(0, 4), Range1d(0, 1)
        self._interval = SingleIntervalTicker(interval=1, num_minor_ticks=0)
        self._timed: list[Any] = []  # renderers that are visible only if seconds were measured
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
        time_axis = DatetimeAxis(formatter=CustomJSTickFormatter(code=CLOCK), major_tick_out=4)
        plot.add_layout(time_axis, "below")
        self._draw_bars(plot)
        self._draw_seconds(plot)
        return plot

    def _draw_bars(self, plot: Any) -> None:
        bars = plot.quad(
            **{**HATCHED, "line_color": EDGE},
            source=self.source,
            line_width=0.5,
            hatch_color="#000000",
            hatch_alpha=0.35,
            hatch_scale=8,
        )
        clock = CustomJSHover(code=TIME)
        plot.add_tools(
            HoverTool(
                renderers=[bars],
                tooltips=_TOOLTIP,
                formatters={"@start": clock, "@end": clock},
                point_policy="follow_mouse",
            )
        )

    def _draw_seconds(self, plot: Any) -> None:
        """Adds the line of seconds, with an axis of its own on the right."""
        plot.extra_y_ranges = {"seconds": self.seconds}
        axis = LinearAxis(y_range_name="seconds", formatter=PrintfTickFormatter(format="%.3g s"))
        plot.add_layout(axis, "right")
        where = {"x": "x", "y": "y", "source": self.spent, "y_range_name": "seconds"}
        points = plot.scatter(size=5, fill_color=EDGE, line_color=EDGE, **where)
        line = plot.line(line_color=EDGE, line_width=1.5, **where)
        self._timed = [line, points, axis]
        plot.add_tools(HoverTool(renderers=[points], tooltips=_SECONDS_TOOLTIP))

    def show(self, bins: EvictionBins) -> None:
        """Updates the chart with `bins`."""
        self.time.update(start=bins.start * 1e3, end=bins.end * 1e3)
        height = top(bins)
        self.height.update(end=height)
        self._interval.update(interval=height / 4)
        self.seconds.update(end=max(*bins.seconds, 1e-3) * 1.15)
        for part in self._timed:
            part.visible = bins.timed
        bring(self.source, eviction_columns(bins))
        bring(self.spent, seconds_columns(bins))
