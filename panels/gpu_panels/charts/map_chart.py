"""An allocator's map as a Bokeh figure. The figure is made once, and then its sources are updated.

`gpu_runtime.rendering.allocator_map` computes the positions for this figure, for notebooks and for terminals.
"""

from __future__ import annotations

from typing import Any

from bokeh.models import (
    BoxZoomTool,
    ColumnDataSource,
    FixedTicker,
    HoverTool,
    Range1d,
    ResetTool,
    WheelZoomTool,
)
from bokeh.plotting import figure

from gpu_runtime.rendering.allocator_map import COLOURS, RELEASED, STUCK, WORDS, Picture
from gpu_runtime.units import show_bytes

from ..data.chart_columns import Columns, as_columns
from ..palette import EDGE, PLAIN
from .data_sources import HATCHED, SIDES, bring

PIECE_COLUMNS = ("left", "right", "bottom", "top", "colour", "alpha", "hatch", "what", "tooltip")
EDGE_COLUMNS = ("left", "right", "bottom", "top")
HATCHES = {STUCK: "/", RELEASED: "."}
ROW_PIXELS, REST_PIXELS = 24, 48  # height of a row with its gap; height of the axis
_GAP = 0.12  # between two rows, as a fraction of a row
_ACROSS = [0, 0.25, 0.5, 0.75, 1]  # the ticks of a row

# Shown when the mouse points at a piece. Bokeh escapes the values that it inserts.
TOOLTIP = """<div style="max-width:340px;font-size:12px;line-height:1.45;white-space:pre-line">@tooltip</div>"""


def piece_columns(picture: Picture) -> Columns:
    """A rectangle for each piece of `picture`. x is a fraction of a row, and y is in rows."""
    rows = []
    for piece in picture.pieces:
        colour = COLOURS[piece.kind]
        row = (
            piece.left / picture.row_bytes,
            piece.right / picture.row_bytes,
            *_height(piece.row, piece.low, piece.high),
            colour or EDGE,
            1.0 if colour else 0.0,
            HATCHES.get(piece.kind, PLAIN),  # for an empty name the browser logs an error
            WORDS[piece.kind],
            piece.title,
        )
        rows.append(row)
    return as_columns(PIECE_COLUMNS, rows)


def edge_columns(picture: Picture) -> Columns:
    """A rectangle for the outline of each segment in `picture`."""
    rows = [
        (
            edge.left / picture.row_bytes,
            edge.right / picture.row_bytes,
            *_height(edge.row, 0.0, 1.0),
        )
        for edge in picture.edges
    ]
    return as_columns(EDGE_COLUMNS, rows)


def _height(row: int, low: float, high: float) -> tuple[float, float]:
    """The bottom and the top, in the chart, of the part from `low` to `high` (0 to 1) of the row number `row`.

    The first row's top is 0, and lower rows are negative.
    """
    floor, height = -(row + 1) + _GAP / 2, 1 - _GAP
    return floor + low * height, floor + high * height


class MapChart:
    """One map. The method `show` updates the chart, and `figure` is the Bokeh model."""

    def __init__(self) -> None:
        self.source = ColumnDataSource({name: [] for name in PIECE_COLUMNS})
        self.edges = ColumnDataSource({name: [] for name in EDGE_COLUMNS})
        self._across, self._down = FixedTicker(ticks=_ACROSS), FixedTicker(ticks=[])
        self.figure = self._figure()

    def _figure(self) -> Any:
        plot = figure(
            height=REST_PIXELS + ROW_PIXELS,
            sizing_mode="stretch_width",
            x_range=Range1d(0, 1),
            y_range=Range1d(-1, 0),
            tools="",
            toolbar_location="above",
            min_border=0,
            min_border_right=36,
        )
        plot.outline_line_color = None
        plot.background_fill_alpha = plot.border_fill_alpha = 0
        plot.grid.visible = False
        plot.toolbar.logo = None
        plot.xaxis[0].ticker, plot.yaxis[0].ticker = self._across, self._down
        for axis in (plot.xaxis[0], plot.yaxis[0]):
            axis.axis_line_color, axis.major_tick_line_color = None, None
        pieces = plot.quad(
            **HATCHED,
            source=self.source,
            fill_alpha="alpha",
            hatch_color="#ffffff",
            hatch_alpha=0.7,
            hatch_scale=8,
            hatch_weight=1,
        )
        plot.quad(**SIDES, source=self.edges, fill_color=None, line_color=EDGE, line_width=1)
        plot.add_tools(
            HoverTool(renderers=[pieces], tooltips=TOOLTIP, point_policy="follow_mouse"),
            BoxZoomTool(),
            WheelZoomTool(modifiers={"ctrl": True}),  # without Ctrl the wheel scrolls the page
            ResetTool(),
        )
        return plot

    def show(self, picture: Picture) -> bool:
        """Updates the map with `picture`. Returns whether the map has changed."""
        rows = max(1, picture.rows)
        row_ticks = [-(row + 0.5) for row in range(rows)]
        if self._down.ticks != row_ticks:
            self._down.ticks = row_ticks
            self.figure.height = REST_PIXELS + ROW_PIXELS * rows
            self.figure.y_range.update(start=-rows, end=0, reset_start=-rows, reset_end=0)
        self.figure.yaxis[0].major_label_overrides = {
            tick: show_bytes(row * picture.row_bytes) for row, tick in enumerate(row_ticks)
        }
        self.figure.xaxis[0].major_label_overrides = {
            part: ("+" if part else "") + show_bytes(int(part * picture.row_bytes))
            for part in _ACROSS
        }
        changed = [
            bring(self.edges, edge_columns(picture)),
            bring(self.source, piece_columns(picture)),
        ]
        return any(changed)
