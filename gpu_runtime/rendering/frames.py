"""The tables of `%gpu models` and other verbs: DataFrames that are displayed in GiB and local
times.

The columns keep the raw numbers for code. This module is pure.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..threads import import_whole
from . import elements, text

Show = Callable[[Any], str]  # a DataFrame -> what is shown
MOST_SHOWN = 60  # rows; of a longer table the first and the last rows are shown
# Columns of the table of allocators that repeat other columns, or that few people need. They are
# not shown, because about eight columns fit into a notebook. The DataFrame has them.
_NOT_SHOWN = {
    "user",
    "pid",
    "notebook",
    "fragmentation_bytes",
    "fragmentation_percent",
    "alloc_retries",
    "ooms",
}


def for_people(frame: Any) -> Any:
    """The DataFrame `frame`, displayed in units for people."""
    return showing(frame, as_text, as_html)


def showing(frame: Any, text_of: Show, html_of: Show) -> Any:
    """The DataFrame `frame`, displayed by `text_of` in a terminal and by `html_of` in Jupyter.

    Selections and sorted copies of the result are plain DataFrames, without this display.
    """
    shown = _class_that_shows(text_of, html_of)(frame)
    shown.attrs = dict(frame.attrs)
    return shown


@functools.cache
def _class_that_shows(text_of: Show, html_of: Show) -> type:
    import_whole("pandas")
    import pandas

    class Table(pandas.DataFrame):
        """A DataFrame with its own text and HTML."""

        def __repr__(self) -> str:
            return text_of(self)

        def _repr_html_(self) -> str:
            return html_of(self)

    return Table


def as_text(frame: Any) -> str:
    """The table as aligned text, under the names of its columns."""
    columns, rows, more = _rows(frame)
    if not rows:
        return "(no rows)"
    numbers = [place for place, name in enumerate(columns) if text.is_number(name)]
    lines = text.table(rows, columns, numbers)
    if more:
        middle = 1 + MOST_SHOWN // 2
        lines[middle:middle] = [f"… {more} more rows …"]
    return "\n".join(lines)


def as_html(frame: Any) -> str:
    """The table as HTML in the notebook's own style of tables."""
    columns, rows, more = _rows(frame)
    align = ["" if text.is_number(name) else ' style="text-align:left"' for name in columns]
    head = "".join(f"<th>{elements.esc(name)}</th>" for name in columns)
    lines = [
        "<tr>"
        + "".join(
            f"<td{one}>{elements.esc(cell)}</td>" for one, cell in zip(align, row, strict=True)
        )
        for row in rows
    ]
    if more:
        note = f'<tr><td colspan="{len(columns)}">… {more} more rows …</td>'
        lines.insert(MOST_SHOWN // 2, note)
    return f'<table class="dataframe"><thead><tr>{head}</thead>{"".join(lines)}</table>'


def _rows(frame: Any) -> tuple[list[str], list[list[str]], int]:
    """The names of the columns, the cells of the shown rows, and the number of rows that are not
    shown.
    """
    is_of_allocators = "reserved_bytes" in frame.columns
    hidden = _NOT_SHOWN if is_of_allocators else ()
    columns = [name for name in frame.columns if name not in hidden]
    more = max(0, len(frame) - MOST_SHOWN)
    records = frame.to_dict("records")
    if more:
        half = MOST_SHOWN // 2
        records = [*records[:half], *records[-half:]]
    owners = frame.attrs.get("owners")
    rows = [[text.cell(name, record[name], owners) for name in columns] for record in records]
    return columns, rows, more
