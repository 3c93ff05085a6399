"""The tables of `%gpu models`, `%gpu who` and other verbs, in units for people, and of `%gpu next`.

A DataFrame keeps the raw numbers for code. This module is pure.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from gpu_runtime.facts import HOST, Schedule, ScheduledModel
from gpu_runtime.units import show_bytes

from ..threads import import_whole
from . import elements, text
from .views import clean

Show = Callable[[Any], str]  # a DataFrame -> what is shown
MOST_SHOWN = 60  # rows; of a longer table the first and the last rows are shown
# Columns of the table of allocators that repeat other columns, or that few people need. They are
# not shown, because about eight columns fit into a notebook. The DataFrame has them.
_NOT_SHOWN = (
    *("user", "pid", "notebook", "fragmentation_bytes", "fragmentation_percent"),
    *("alloc_retries", "ooms"),
)


def for_people(frame: Any) -> Any:
    """The DataFrame `frame`, displayed in units for people."""
    return showing(frame, as_text, as_html)


def showing(frame: Any, text_of: Show, html_of: Show) -> Any:
    """The DataFrame `frame`, displayed by these functions. Selections of it are plain DataFrames."""
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
    lines = []
    for row in rows:
        cells = zip(align, row, strict=True)
        lines.append("<tr>" + "".join(f"<td{to}>{elements.esc(cell)}</td>" for to, cell in cells))
    if more:
        note = f'<tr><td colspan="{len(columns)}">… {more} more rows …</td>'
        lines.insert(MOST_SHOWN // 2, note)
    return f'<table class="dataframe"><thead><tr>{head}</thead>{"".join(lines)}</table>'


def _rows(frame: Any) -> tuple[list[str], list[list[str]], int]:
    """The names of the columns, the cells of the shown rows, and the number of the other rows."""
    is_of_allocators = "reserved_bytes" in frame.columns
    columns = [name for name in frame.columns if not (is_of_allocators and name in _NOT_SHOWN)]
    more = max(0, len(frame) - MOST_SHOWN)
    records = frame.to_dict("records")
    if more:
        half = MOST_SHOWN // 2
        records = [*records[:half], *records[-half:]]
    owners = frame.attrs.get("owners")
    rows = [[text.cell(name, record[name], owners) for name in columns] for record in records]
    return columns, rows, more


WHO = ("NAME", "KIND", "DEVICE", "HOLDS", "FREES", "CELL", "WHAT")
_PARTS = (  # key of the sums -> words
    ("graph_bytes", "in autograd graphs"),
    ("cached_bytes", "cached"),
    ("unknown_bytes", "without a name"),
    ("unseen_bytes", "that no tensor explains"),
)


def who(frame: Any) -> Any:
    """The DataFrame `frame` of `rt.who()` as a table whose sizes are written for people."""
    return showing(frame, _who_text, _who_html)


def _who_text(frame: Any) -> str:
    rows = _who_rows(frame)
    lines = [*text.table(rows, WHO, right=(3, 4)), ""] if rows else [_nothing(frame.attrs)]
    return "\n".join([*lines, *sentences(frame.attrs)])


def _who_html(frame: Any) -> str:
    rows = _who_rows(frame)
    sums = "".join(elements.line(elements.esc(one), soft=True) for one in sentences(frame.attrs))
    if not rows:
        return elements.page(elements.line(_nothing(frame.attrs)), sums)
    cells = [
        [elements.td(cell, "g-num" if n in (3, 4) else "g-wrap") for n, cell in enumerate(row)]
        for row in rows
    ]
    return elements.page(elements.table([name.lower() for name in WHO], cells), sums)


def _who_rows(frame: Any) -> list[list[str]]:
    """The cells of the table. If all rows have the same device, the cells leave out the device."""
    records = frame.to_dict("records")
    several = len({record["device"] for record in records}) > 1
    return [
        [
            record["name"],
            record["kind"],
            record["device"] if several else "",
            show_bytes(int(record["bytes"])),
            _frees(record),
            record["cell"],
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


def sentences(sums: Mapping[str, Any]) -> list[str]:
    """Sentences under the table, made from `sums`, the attributes of the DataFrame of `rt.who()`."""
    if not sums:
        return []
    lines = [f"{clean(sums['process'])} holds this."] if sums["process"] else []
    if sums["held_bytes"] or not sums["parked_bytes"]:
        parts = [f"{show_bytes(sums[key])} {words}" for key, words in _PARTS if sums[key]]
        held = show_bytes(sums["held_bytes"])
        explained = f"explained {show_bytes(sums['explained_bytes'])} of {held}"
        lines.append("; ".join(filter(None, [explained, ", ".join(parts)])) + ".")
    lines += [f"{clean(staying.words())}." for staying in sums["staying"]]
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


SCHEDULE = ("MODEL", "FIRST USE", "WHERE", "STATE")
NO_CELL_WAITS = "No cell waits that uses a model. Run All, then look again:  %gpu next"


def schedule_text(schedule: Schedule) -> str:
    if not schedule.models:
        return "\n".join([NO_CELL_WAITS, *_notes(schedule)])
    lines = text.table(_scheduled(schedule), SCHEDULE, longest=100)
    return "\n".join([*lines, *_notes(schedule)])


def schedule_html(schedule: Schedule) -> str:
    notes = [elements.line(elements.esc(note), soft=True) for note in _notes(schedule)]
    if not schedule.models:
        return elements.page(elements.line(elements.with_code(NO_CELL_WAITS)), *notes)
    rows = [[elements.td(cell, "g-wrap") for cell in row] for row in _scheduled(schedule)]
    return elements.page(elements.table([name.lower() for name in SCHEDULE], rows), *notes)


def _scheduled(schedule: Schedule) -> list[tuple[str, ...]]:
    return [(model.name, model.cell, model.where, _state(model)) for model in schedule.models]


def _state(model: ScheduledModel) -> str:
    if model.running:
        return "used by the running cell"
    if model.ahead:
        return "loaded ahead"
    if model.where == "moving":
        return "being moved"
    if model.loading:
        return "being loaded ahead"
    if model.where not in ("disk", "host"):
        return "on its device"
    return f"not loaded ahead: {model.because}" if model.because else "not loaded yet"


def _notes(schedule: Schedule) -> list[str]:
    notes = []
    if schedule.mode == "never":
        notes.append("Look-ahead is off (GPU_PREFETCH=never).")
    if schedule.loaded_ahead:
        notes.append(
            f"Loaded ahead so far: {schedule.loaded_ahead}; "
            f"{schedule.used} used, {schedule.unused} not used."
        )
    return notes
