"""A device's bar: a Bokeh figure that is made once, and whose sources are updated.

`data/bars.py` computes the contents of a bar. The browser cuts names to the available width, because
only the browser knows that width.
"""

from __future__ import annotations

from typing import Any

from bokeh.core.properties import value
from bokeh.models import (
    ColumnDataSource,
    CustomJS,
    FixedTicker,
    HoverTool,
    LinearAxis,
    Plot,
    PrintfTickFormatter,
    Quad,
    Range1d,
    Segment,
    SingleIntervalTicker,
    Text,
)

from ..data.bar_columns import MARK_COLUMNS, REGION_COLUMNS, STRETCH_COLUMNS, BarColumns
from ..palette import EDGE
from .data_sources import bring

HEIGHT = 76

# Shown when the mouse points at a stretch. Bokeh escapes the values that it inserts.
TOOLTIP = """<div style="max-width:340px;font-size:12px;line-height:1.45"><b>@title</b>
<div style="white-space:pre-line">@tooltip</div></div>"""
LINE_TOOLTIP = """<div style="max-width:340px;font-size:12px;line-height:1.45">@tooltip</div>"""

_FIT = """
const pen = document.createElement("canvas").getContext("2d");
pen.font = "12px sans-serif";
const {left, right, title, notebook, text} = source.data;
if (figure.properties.inner_width.is_unset) return;  // not laid out yet
const scale = figure.inner_width / (figure.x_range.end - figure.x_range.start);
let changed = false;
const cut = (words, room) => {
  if (pen.measureText(words).width <= room) return words;
  for (let n = words.length - 1; n > 2; n--) {
    const shorter = words.slice(0, n) + "…";
    if (pen.measureText(shorter).width <= room) return shorter;
  }
  return "";
};
for (let n = 0; n < left.length; n++) {
  const room = (right[n] - left[n]) * scale - 10;
  const both = notebook[n] ? title[n] + " · " + notebook[n] : title[n];
  const titleFits = pen.measureText(title[n]).width <= room;
  const shown = cut(titleFits ? both : title[n], room);
  if (text[n] !== shown) { text[n] = shown; changed = true; }
}
if (changed) source.change.emit();
"""


class BarChart:
    """One device's bar. The method `show` updates the bar, and `figure` is the Bokeh model."""

    def __init__(self) -> None:
        self.source = ColumnDataSource({name: [] for name in STRETCH_COLUMNS})
        self.marks = ColumnDataSource({name: [] for name in MARK_COLUMNS})
        self.regions = ColumnDataSource({name: [] for name in REGION_COLUMNS})
        self.range = Range1d(0, 1)
        self._thresholds = FixedTicker(ticks=[])
        self._above = LinearAxis(ticker=self._thresholds, major_label_standoff=2, major_tick_out=0)
        self._interval = SingleIntervalTicker(interval=1, num_minor_ticks=0)
        self._format = PrintfTickFormatter(format="%d GiB")
        self.figure = self._figure()

    def _figure(self) -> Any:
        # `bokeh.plotting.figure` would make 22 more models. The number of models determines how long
        # it takes to open the page and to send each message.
        plot = Plot(
            height=HEIGHT,
            sizing_mode="stretch_width",
            x_range=self.range,
            y_range=Range1d(0, 1),
            title=None,
            toolbar_location=None,
            min_border=0,
            min_border_right=26,
            min_border_left=6,
            outline_line_color=None,
            background_fill_alpha=0,
            border_fill_alpha=0,
        )
        below = LinearAxis(
            ticker=self._interval,
            formatter=self._format,
            major_label_overrides={0: "0"},
            major_label_standoff=3,
            major_tick_out=0,
            minor_tick_out=0,
        )
        plot.add_layout(below, "below")
        plot.add_layout(self._above, "above")
        self._add_glyphs(plot)
        self._fit_names(plot)
        return plot

    def _add_glyphs(self, plot: Any) -> None:
        """Adds regions, stretches, their names and the marks."""
        regions = plot.add_glyph(
            self.regions,
            Quad(
                left="left",
                right="right",
                bottom=0,
                top=1,
                fill_color=EDGE,
                fill_alpha="alpha",
                line_color=None,
                hatch_pattern="hatch",
                hatch_color=EDGE,
                hatch_scale=6,
            ),
        )
        stretch: dict[str, Any] = dict(
            left="left",
            right="right",
            bottom=0.04,
            top=0.96,
            fill_color="colour",
            fill_alpha="alpha",
            hatch_pattern="hatch",
            hatch_color=EDGE,
            hatch_alpha=0.5,
            hatch_weight=1,
            hatch_scale=9,
            line_color=EDGE,
        )
        stretches = plot.add_glyph(
            self.source, Quad(**stretch, line_width=1), hover_glyph=Quad(**stretch, line_width=2)
        )
        names = Text(
            x="left",
            y=0.5,
            text="text",
            text_color="ink",
            text_baseline="middle",
            x_offset=5,
            text_font_size="12px",
            text_font=value("sans-serif"),
        )
        plot.add_glyph(self.source, names)
        line = Segment(
            x0="x", x1="x", y0=0, y1=1, line_color=EDGE, line_dash="dash", line_width="width"
        )
        marks = plot.add_glyph(self.marks, line)
        self._add_tooltips(plot, stretches, marks, regions)

    def _add_tooltips(self, plot: Any, stretches: Any, marks: Any, regions: Any) -> None:
        plot.add_tools(
            HoverTool(
                renderers=[stretches],
                tooltips=TOOLTIP,
                point_policy="follow_mouse",
                attachment="below",
            ),
            HoverTool(
                renderers=[marks], tooltips=LINE_TOOLTIP, line_policy="interp", attachment="above"
            ),
            HoverTool(renderers=[regions], tooltips=LINE_TOOLTIP, point_policy="follow_mouse"),
        )

    def _fit_names(self, plot: Any) -> None:
        """Cuts the names to their stretches in the browser, whenever width or data change."""
        fit = CustomJS(args={"source": self.source, "figure": plot}, code=_FIT)
        plot.js_on_change("inner_width", fit)
        self.source.js_on_change("data", fit)
        self.source.js_on_change("patching", fit)
        self.range.js_on_change("end", fit)

    def show(self, columns: BarColumns) -> bool:
        """Updates the bar with `columns`, and returns whether anything differed."""
        self.range.update(end=columns.length)
        self._interval.update(interval=interval(columns.length))
        self._format.update(format=f"%d {columns.unit}")
        marks = zip(columns.marks["x"], columns.marks["kind"], strict=True)
        signs = {x: kind for x, kind in marks if kind == "budget"}
        if self._thresholds.ticks != list(signs):
            self._above.major_label_overrides = signs
            self._thresholds.ticks = list(signs)
        changed = [
            bring(self.regions, columns.regions),
            bring(self.marks, columns.marks),
            bring(self.source, columns.stretches, keep=("text",)),
        ]
        return any(changed)


def interval(length: float) -> float:
    """The step that gives four to eight ticks on an axis of that `length`.

    It is a power of two, as memory sizes are.
    """
    step = 1.0
    while length / step > 8:
        step *= 2
    return step
