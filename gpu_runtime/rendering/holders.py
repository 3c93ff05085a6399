"""The table that the verb `who` shows: which Python names hold which device memory.

This module is pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_runtime.facts import HOST
from gpu_runtime.units import show_bytes

from . import elements, frames, text
from .views import clean

HEADERS = ("NAME", "KIND", "DEVICE", "HOLDS", "FREES", "CELL", "WHAT")
_PARTS = (  # key of the sums -> words
    ("graph_bytes", "in autograd graphs"),
    ("cached_bytes", "cached"),
    ("unknown_bytes", "without a name"),
    ("unseen_bytes", "that no tensor explains"),
)


def table(frame: Any) -> Any:
    """The DataFrame `frame` of `rt.who()` as a table whose sizes are written for people."""
    return frames.showing(frame, as_text, as_html)


def as_text(frame: Any) -> str:
    """The table and its sums as aligned text."""
    rows = _rows(frame)
    if not rows:
        return "\n".join([_nothing(frame.attrs), *sentences(frame.attrs)])
    columns = _used(rows)
    lines = text.table(
        [[row[n] for n in columns] for row in rows],
        [HEADERS[n] for n in columns],
        [place for place, n in enumerate(columns) if n in (3, 4)],
    )
    return "\n".join([*lines, "", *sentences(frame.attrs)])


def as_html(frame: Any) -> str:
    """The table and its sums as HTML."""
    rows = _rows(frame)
    sums = "".join(elements.line(elements.esc(one), soft=True) for one in sentences(frame.attrs))
    if not rows:
        return elements.page(elements.line(_nothing(frame.attrs)), sums)
    cells = [
        [elements.td(cell, "g-num" if n in (3, 4) else "g-wrap") for n, cell in enumerate(row)]
        for row in rows
    ]
    columns = [elements.table([name.lower() for name in HEADERS], cells), sums]
    return elements.page(*columns)


def _rows(frame: Any) -> list[list[str]]:
    """The cells of the table. If all rows have the same device, the cells leave out the device."""
    records = frame.to_dict("records")
    several = len({record["device"] for record in records}) > 1
    return [
        [
            clean(record["name"]),
            record["kind"],
            record["device"] if several else "",
            show_bytes(int(record["bytes"])),
            _frees(record),
            clean(record["cell"]),
            what(record),
        ]
        for record in records
    ]


def _frees(record: Mapping[str, Any]) -> str:
    """What becomes free if only this name is deleted. Parked memory is in RAM."""
    size = int(record["alone_bytes"])
    return show_bytes(size) + (" of RAM" if size and record["device"] == HOST else "")


def what(record: Mapping[str, Any]) -> str:
    """The last cell of a row: what holds the memory, and how much of it cannot be parked."""
    stays = f"{show_bytes(int(record['stays_bytes']))} stays" if record["stays"] else ""
    return "; ".join(filter(None, [clean(record["what"]), stays]))


def _nothing(sums: Mapping[str, Any]) -> str:
    if sums.get("note"):
        return "Nothing is listed."
    if not sums.get("whole", True):
        return "Nothing was found in the time allowed."
    return "No variable or output holds memory on a device."


def _used(rows: list[list[str]]) -> list[int]:
    return [n for n in range(len(HEADERS)) if any(row[n] for row in rows)]


def sentences(sums: Mapping[str, Any]) -> list[str]:
    """Sentences under the table, made from `sums`, the attributes of the DataFrame of `rt.who()`.

    If the search was incomplete, one of the sentences states this.
    """
    if not sums:
        return []
    parts = [f"{show_bytes(sums[key])} {words}" for key, words in _PARTS if sums[key]]
    held = show_bytes(sums["held_bytes"])
    explained = f"explained {show_bytes(sums['explained_bytes'])} of {held}"
    lines = ["; ".join(filter(None, [explained, ", ".join(parts)])) + "."]
    if sums["parked_bytes"] and not sums["held_bytes"]:
        lines = []
    if sums["process"]:
        lines.insert(0, f"{clean(sums['process'])} holds this.")
    for one in sums["staying"]:
        lines.append(f"{clean(one.words())}.")
    if sums["stays"]:
        lines.append(f"It cannot be parked now: {clean(sums['stays'])}.")
    if sums["parked_bytes"]:
        parked = show_bytes(sums["parked_bytes"])
        lines.append(f"{parked} is parked in RAM, until a cell needs it.")
    if sums["left_out"]:
        size = show_bytes(sums["left_out_bytes"])
        lines.append(f"{sums['left_out']} more rows are not listed; they reach {size}.")
    if sums["note"]:
        lines.append(clean(sums["note"]))
    if not sums["whole"]:
        seconds = f"{sums['seconds']:.0f}"
        lines.append(f"The search stopped after {seconds} s: the figures are partial.")
    return lines
