"""A device's bar, drawn: a Bokeh figure made once, whose sources are brought up to date.

What stands in a bar is decided in `bars.py`. Names in it are cut to the room that they have by the browser, which alone
knows it.
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

from ..data.bar_columns import COLUMNS, GROUND, LINES, Drawing
from ..palette import EDGE, LEVELS
from .data_sources import bring

HEIGHT = 76

# Whoever points at a stretch is told what it is. Bokeh escapes what it puts in.
TOOLTIP = """<div style="max-width:340px;font-size:12px;line-height:1.45"><b>@title</b>
<div style="white-space:pre-line">@told</div></div>"""
LINE_TOOLTIP = """<div style="max-width:340px;font-size:12px;line-height:1.45">@told</div>"""

_FIT = """
const pen = document.createElement("canvas").getContext("2d");
pen.font = "12px sans-serif";
const {left, right, title, who, text} = source.data;
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
  const both = who[n] ? title[n] + " · " + who[n] : title[n];
  const fits = pen.measureText(title[n]).width <= room;
  const said = fits ? (pen.measureText(both).width <= room ? both : cut(both, room)) : cut(title[n], room);
  if (text[n] !== said) { text[n] = said; changed = true; }
}
if (changed) source.change.emit();
"""


class BarChart:
    """One device's bar: `show` brings it up to date, `figure` is what is looked at."""

    def __init__(self) -> None:
        self.source = ColumnDataSource({name: [] for name in COLUMNS})
        self.marks = ColumnDataSource({name: [] for name in LINES})
        self.ground = ColumnDataSource({name: [] for name in GROUND})
        self.range = Range1d(0, 1)
        self._thresholds = FixedTicker(ticks=[])
        self._above = LinearAxis(ticker=self._thresholds, major_label_standoff=2, major_tick_out=0)
        self._interval = SingleIntervalTicker(interval=1, num_minor_ticks=0)
        self._format = PrintfTickFormatter(format="%d GiB")
        self.figure = self._figure()

    def _figure(self) -> Any:
        # Built by hand: `figure` makes 22 models more, and how many there are tells how long it takes to open the page,
        # and to send each of its messages.
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
        plot.add_layout(
            LinearAxis(
                ticker=self._interval,
                formatter=self._format,
                major_label_overrides={0: "0"},
                major_label_standoff=3,
                major_tick_out=0,
                minor_tick_out=0,
            ),
            "below",
        )
        plot.add_layout(self._above, "above")
        lies = plot.add_glyph(
            self.ground,
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
        drawn = plot.add_glyph(
            self.source, Quad(**stretch, line_width=1), hover_glyph=Quad(**stretch, line_width=2)
        )
        plot.add_glyph(
            self.source,
            Text(
                x="left",
                y=0.5,
                text="text",
                text_color="ink",
                text_baseline="middle",
                x_offset=5,
                text_font_size="12px",
                text_font=value("sans-serif"),
            ),
        )
        ruled = plot.add_glyph(
            self.marks,
            Segment(
                x0="x", x1="x", y0=0, y1=1, line_color=EDGE, line_dash="dash", line_width="width"
            ),
        )
        plot.add_tools(
            HoverTool(
                renderers=[drawn], tooltips=TOOLTIP, point_policy="follow_mouse", attachment="below"
            ),
            HoverTool(
                renderers=[ruled], tooltips=LINE_TOOLTIP, line_policy="interp", attachment="above"
            ),
            HoverTool(renderers=[lies], tooltips=LINE_TOOLTIP, point_policy="follow_mouse"),
        )
        fit = CustomJS(args={"source": self.source, "figure": plot}, code=_FIT)
        for model, event in (
            (plot, "inner_width"),
            (self.source, "data"),
            (self.source, "patching"),
            (self.range, "end"),
        ):
            model.js_on_change(event, fit)
        return plot

    def show(self, drawn: Drawing) -> bool:
        """Brings the bar up to date; whether anything differed."""
        self.range.update(end=drawn.length)
        self._interval.update(interval=interval(drawn.length))
        self._format.update(format=f"%d {drawn.unit}")
        ticks = {
            x: _SIGNS[kind] for x, kind in zip(drawn.marks["x"], drawn.marks["kind"], strict=True)
        }
        if self._thresholds.ticks != list(ticks):
            self._above.major_label_overrides = ticks
            self._thresholds.ticks = list(ticks)
        changed = bring(self.ground, drawn.ground) | bring(self.marks, drawn.marks)
        return bring(self.source, drawn.stretches, keep=("text",)) or changed


_SIGNS = {level.lower(): look.mark for level, look in LEVELS.items()} | {"budget": "budget"}


def interval(length: float) -> float:
    """A step that gives four to eight marks on an axis of that length, in powers of two as memory comes."""
    step = 1.0
    while length / step > 8:
        step *= 2
    return step
