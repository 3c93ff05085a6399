"""The parts of a table as plain values: columns, rows, cells and buttons.

`row_parts.py` has the cells that several tables share; `widgets/table.py` shows a table in the
browser.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec


class Cell(NamedTuple):
    """One cell. Its text is data: the browser shows it and never parses it as HTML."""

    text: str
    value: float | None = None  # sort key; None: the cell is sorted by its text
    hint: str = ""  # shown on hover
    # One of: strong, soft, alarm, prose (wrapped), short (wrapped early), time (epoch seconds).
    kind: str = ""
    colour: str = ""  # colour of a square before the text; empty: no square
    texture: str = ""  # texture of that square, one of palette.TEXTURES


class Button(NamedTuple):
    """A button in a row."""

    verb: str
    label: str
    why_not: str = ""  # why the button cannot be pressed now; empty if it can


class Row(NamedTuple):
    """One row, with the id of the thing it shows."""

    id: str
    cells: tuple[Cell, ...]
    buttons: tuple[Button, ...] = ()


class Column(NamedTuple):
    """One column: its title, whether it holds numbers, and the hint of its header."""

    title: str
    numeric: bool = False
    hint: str = ""


def encoded(rows: Iterable[Row], buttons: bool = True) -> str:
    """The `rows` as JSON for the browser; without `buttons` for a viewer, who may not act."""
    sent = [row if buttons else row._replace(buttons=()) for row in rows]
    return msgspec.json.encode(sent).decode()
