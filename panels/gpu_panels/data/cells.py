"""The parts of a table as plain values: columns, rows, cells and buttons.

`row_parts.py` has the cells that several tables share; `widgets/table.py` shows a table in the
browser.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec


class Cell(NamedTuple):
    """One cell. Its text is data, which the browser shows and never parses as HTML."""

    text: str
    value: float | None = None  # sort key; None: the cell is sorted by its text
    hint: str = ""  # shown on hover
    # The kind is one of: strong, soft, alarm, prose (wrapped), short (wrapped early), time (epoch
    # seconds).
    kind: str = ""
    colour: str = ""  # colour of a square before the text; empty: no square
    texture: str = ""  # texture of that square, one of palette.TEXTURES


class Button(NamedTuple):
    """A button in a row."""

    verb: str
    label: str
    why_not: str = ""  # why the button cannot be pressed now; empty if it can


class Row(NamedTuple):
    """One row of a table, with the id of the object that the row shows."""

    id: str
    cells: tuple[Cell, ...]
    buttons: tuple[Button, ...] = ()


class Column(NamedTuple):
    """One column: its title, whether it has numbers, and the explanation that its header shows."""

    title: str
    numeric: bool = False
    hint: str = ""


def encoded(rows: Iterable[Row], buttons: bool = True) -> str:
    """The `rows` as JSON for the browser. `buttons` is False for a viewer, who may not act."""
    sent = [row if buttons else row._replace(buttons=()) for row in rows]
    return msgspec.json.encode(sent).decode()
