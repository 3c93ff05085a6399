"""Updates the data of a chart, and sends as few values as possible to the browser."""

from __future__ import annotations

from typing import Any

from ..data.chart_columns import Columns

# The columns of a source of boxes, as arguments of Bokeh's `quad`.
SIDES = {"left": "left", "right": "right", "bottom": "bottom", "top": "top"}
HATCHED = {**SIDES, "fill_color": "colour", "line_color": None, "hatch_pattern": "hatch"}


def bring(source: Any, columns: Columns) -> bool:
    """Puts `columns` into the Bokeh `source`. Returns whether `source` had other values before.

    If the number of rows is unchanged and at most half of the cells differ, only the differing cells are sent.
    """
    old = source.data
    rows = len(next(iter(columns.values()), ()))
    if old.keys() != columns.keys() or any(len(column) != rows for column in old.values()):
        source.data = _copied(columns)
        return True
    patches = {}
    for name, column in columns.items():
        differing = [(n, new) for n, new in enumerate(column) if new != old[name][n]]
        if differing:
            patches[name] = differing
    changed_cells = sum(map(len, patches.values()))
    if changed_cells > rows * len(columns) / 2:
        source.data = _copied(columns)
    elif patches:
        source.patch(patches)
    return bool(patches)


def _copied(columns: Columns) -> Columns:
    """Copies of the `columns` for one Bokeh source.

    A patch changes lists in place, and other sessions may use the same lists.
    """
    return {name: list(column) for name, column in columns.items()}
