"""An allocator's map, drawn: a Bokeh figure made once, whose sources are brought up to date.

What is drawn where is decided in `gpu_runtime.rendering.allocator_map`, for notebooks and terminals too.
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

from ..palette import EDGE
from .data_sources import bring

COLUMNS = ("left", "right", "bottom", "top", "colour", "alpha", "hatch", "what", "told")
EDGES = ("left", "right", "bottom", "top")
HATCHES, PLAIN = {STUCK: "/", RELEASED: "."}, " "  # of an empty name the browser complains
ROW_PIXELS, REST_PIXELS = 24, 48  # a row, with the space to the next; and what the axis takes
_GAP = 0.12  # of a row, between two

# Whoever points at a piece is told what it is. Bokeh escapes what it puts in.
TOOLTIP = """<div style="max-width:340px;font-size:12px;line-height:1.45;white-space:pre-line">@told</div>"""


def columns(drawn: Picture) -> dict[str, list[Any]]:
    """A source's columns: a row a piece, across in parts of the map's row, down in rows from the top."""
    rows = [
        (
            piece.left / drawn.row_bytes,
            piece.right / drawn.row_bytes,
            *_height(piece.row, piece.low, piece.high),
            COLOURS[piece.kind] or EDGE,
            1.0 if COLOURS[piece.kind] else 0.0,
            HATCHES.get(piece.kind, PLAIN),
            WORDS[piece.kind],
            piece.told,
        )
        for piece in drawn.pieces
    ]
    return {name: [row[n] for row in rows] for n, name in enumerate(COLUMNS)}


def edges(drawn: Picture) -> dict[str, list[Any]]:
    """A source's columns for the outlines of segments."""
    rows = [
        (edge.left / drawn.row_bytes, edge.right / drawn.row_bytes, *_height(edge.row, 0.0, 1.0))
        for edge in drawn.edges
    ]
    return {name: [row[n] for row in rows] for n, name in enumerate(EDGES)}


def _height(row: int, low: float, high: float) -> tuple[float, float]:
    """Where a part of a row lies: the first row's top is 0, and down is less."""
    floor, height = -(row + 1) + _GAP / 2, 1 - _GAP
    return floor + low * height, floor + high * height


class MapChart:
    """One map: `show` brings it up to date, `figure` is what is looked at."""

    def __init__(self) -> None:
        self.source = ColumnDataSource({name: [] for name in COLUMNS})
        self.edges = ColumnDataSource({name: [] for name in EDGES})
        self._across, self._down = FixedTicker(ticks=[]), FixedTicker(ticks=[])
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
        plot.xaxis[0].ticker, plot.yaxis[0].ticker = self._across, self._down
        for axis in (plot.xaxis[0], plot.yaxis[0]):
            axis.axis_line_color, axis.major_tick_line_color = None, None
        pieces = plot.quad(
            left="left",
            right="right",
            bottom="bottom",
            top="top",
            source=self.source,
            fill_color="colour",
            fill_alpha="alpha",
            line_color=None,
            hatch_pattern="hatch",
            hatch_color="#ffffff",
            hatch_alpha=0.7,
            hatch_scale=8,
            hatch_weight=1,
        )
        plot.quad(
            left="left",
            right="right",
            bottom="bottom",
            top="top",
            source=self.edges,
            fill_color=None,
            line_color=EDGE,
            line_width=1,
        )
        wheel = WheelZoomTool(
            modifiers={"ctrl": True}
        )  # a page that is scrolled over it stays a page
        plot.add_tools(
            HoverTool(renderers=[pieces], tooltips=TOOLTIP, point_policy="follow_mouse"),
            BoxZoomTool(),
            wheel,
            ResetTool(),
        )
        plot.toolbar.logo = None
        return plot

    def show(self, drawn: Picture) -> bool:
        """Brings the map up to date; whether anything differed."""
        rows = max(1, drawn.rows)
        if self._down.ticks != (ticks := [-(row + 0.5) for row in range(rows)]):
            self._down.ticks = ticks
            self.figure.height = REST_PIXELS + ROW_PIXELS * rows
            self.figure.y_range.update(start=-rows, end=0, reset_start=-rows, reset_end=0)
        self.figure.yaxis[0].major_label_overrides = {
            -(row + 0.5): show_bytes(row * drawn.row_bytes) for row in range(rows)
        }
        self._across.ticks = [0, 0.25, 0.5, 0.75, 1]
        self.figure.xaxis[0].major_label_overrides = {
            part: ("+" if part else "") + show_bytes(int(part * drawn.row_bytes))
            for part in self._across.ticks
        }
        return bring(self.edges, edges(drawn)) | bring(self.source, columns(drawn))
