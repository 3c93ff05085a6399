"""Paints bars and tables as aligned text, for a terminal and for the text output in a notebook's file.

This module is pure. `cli.py` redraws the screen of `gpu status --watch`.
"""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import accumulate
from typing import Any

from gpu_runtime.facts import THIS_PROCESS, Snapshot, importance_name
from gpu_runtime.units import show_bytes, show_seconds

from ..safe_text import clean
from . import views
from .views import Bar

BAR_CELLS = 32
_LEASES = "█▓"  # neighbours alternate, so that their border is visible
_MARKS = {"arriving": "▒", "leaving": "▒", "residue": "░", "ended": "░", "strangers": "░"}
_FREE, _LIMIT = "·", "│"
_OWNER_ID = re.compile(r"\d+(\.\d+)+")
LONGEST = 44  # characters of a cell; a longer text is shortened in the middle
LONGEST_LEGEND = 28  # characters of a model's name in a bar's legend
MOST_LEGEND = 8  # entries of a bar's legend


def bars(rows: Iterable[tuple[str, Bar, str]], before: str = "") -> list[str]:
    """The `rows` of a title, a bar and figures as lines, with `before` before each title, and the legends below."""
    rows, lines = list(rows), []
    width = max((len(title) for title, *_ in rows), default=0)
    for title, bar, figures in rows:
        drawn, legend = draw(bar)
        lines.append(f"{before}{title:{width}}  {drawn}  {clean(figures)}".rstrip())
        if legend:
            lines.append(f"{'':{len(before) + width}}  {legend}")
    return lines


def size(count: int | None) -> str:
    """The text for a `count` of bytes, such as `14.0 GiB`, or `unknown` for None."""
    return "unknown" if count is None else show_bytes(count)


# -- bars ----------------------------------------------------------------------------------------


def draw(bar: Bar, cells: int = BAR_CELLS) -> tuple[str, str]:
    """The `bar` in characters, `cells` wide, and its legend.

    Every segment gets at least one cell, so that small segments are visible. If the cells do not
    suffice, the last segments are cut off.
    >>> from gpu_runtime.facts import Device
    >>> from gpu_runtime.rendering.views import BarSegment
    >>> two = (BarSegment("a", 8, lease="1/a"), BarSegment("b", 4, lease="1/b"))
    >>> draw(Bar(Device("sim:0", 16), two, 14), cells=16)
    ('████████▓▓▓▓··│·', '█ a 8 B  ▓ b 4 B')
    """
    scale = bar.scale_bytes
    drawn, legend, end, leases = "", [], 0, 0
    for segment in bar.segments:
        end += segment.bytes
        mark = _MARKS.get(segment.kind) or _LEASES[leases % 2]
        leases += segment.is_lease
        drawn += mark * max(1, round(end / scale * cells) - len(drawn))
        short = segment._replace(label=shorten(segment.label, LONGEST_LEGEND))
        legend.append(f"{mark} {clean(short.title)}")
    drawn = drawn[:cells].ljust(cells, _FREE)
    if bar.limit_bytes < scale:
        at = min(cells - 1, round(bar.limit_bytes / scale * cells))
        drawn = drawn[:at] + _LIMIT + drawn[at + 1 :]
    return drawn, "  ".join(_short(legend))


def _short(legend: list[str]) -> list[str]:
    if len(legend) <= MOST_LEGEND:
        return legend
    return [*legend[:MOST_LEGEND], f"and {len(legend) - MOST_LEGEND} more"]


# -- tables --------------------------------------------------------------------------------------


def width(text: str) -> int:
    """The number of terminal columns that `text` occupies."""
    return sum(map(_character_width, text))


def _character_width(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def shorten(text: str, longest: int = LONGEST) -> str:
    """The `text` with at most `longest` characters. The middle of a longer text is removed.

    Both ends are kept, because either end can distinguish a name from other names.

    >>> shorten("Qwen/Qwen3-Embedding-0.6B", 15)
    'Qwen/Qw…ng-0.6B'
    """
    if len(text) <= longest:
        return text
    return f"{text[: longest // 2]}…{text[-(longest - longest // 2 - 1) :]}"


def table(
    rows: Sequence[Sequence[str]],
    headers: Sequence[str],
    right: Sequence[int] = (),
    longest: int = LONGEST,
) -> list[str]:
    """The `rows` as aligned lines under `headers`, without empty columns; those of `right` are right-aligned.

    A text above `longest` characters is shortened, unless another one of its column would then look the same.
    """
    columns = []
    for n, texts in enumerate(zip(*rows, strict=True)):
        whole = list(map(clean, texts))
        short = [shorten(text, longest) for text in whole]
        cells = [headers[n], *(short if len(set(short)) == len(set(whole)) else whole)]
        if any(whole):
            widest = max(map(width, cells))
            paddings = [" " * (widest - width(cell)) for cell in cells]
            pairs = zip(paddings, cells, strict=True)
            columns.append([pad + cell if n in right else cell + pad for pad, cell in pairs])
    lines = [headers] if not columns else zip(*columns, strict=True)
    return ["  ".join(line).rstrip() for line in lines]


def as_csv(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """The `rows` as CSV with a line of names. No cell is a formula, even if a model's name looks like one.

    >>> as_csv([{"user": "ann", "card_h": 1.5}, {"user": "=1+1", "card_h": 0.0}], ["user", "card_h"])
    "user,card_h\\nann,1.5\\n'=1+1,0.0\\n"
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_safe(row[name]) for name in columns])
    return out.getvalue()


def _safe(value: Any) -> Any:
    """The `value`. A text that a spreadsheet would run gets an apostrophe in front (OWASP, CSV injection)."""
    if not isinstance(value, str):
        return value
    cell = clean(value)
    return f"'{cell}" if cell.lstrip()[:1] in tuple("=+-@|%") else cell


def is_number(column: str) -> bool:
    """Whether the values of the DataFrame's `column` are aligned to the right."""
    return column.endswith(("bytes", "_seconds", "uses", "pins", "pid", "percent", "_s"))


def cell(column: str, value: Any, owners: Mapping[str, str] | None = None) -> str:
    """A `value` of a DataFrame in the unit that its `column` names. `owners` labels processes by id."""
    is_missing = value is None or type(value).__name__ in ("NAType", "NaTType")
    if is_missing or value != value:  # NaN differs from itself
        return "unknown" if column.endswith("bytes") else ""
    if column.endswith("bytes"):
        return show_bytes(int(value))
    if column.endswith("_seconds"):
        return show_seconds(value)
    if hasattr(value, "timestamp"):
        return datetime.fromtimestamp(value.timestamp()).strftime("%Y-%m-%d %H:%M:%S")
    if column == "importance" and isinstance(value, int):
        return importance_name(value).removeprefix("importance ")
    if column == "owner" and value == "me":
        return THIS_PROCESS
    if column == "owner" and _OWNER_ID.fullmatch(str(value)):
        known = (owners or {}).get(str(value))
        return clean(known) if known else f"pid {str(value).partition('.')[0]}"
    if isinstance(value, bool) or type(value).__name__ == "bool":  # also NumPy's bool
        return "yes" if value else ""
    if column in ("device", "where"):
        return " + ".join(map(views.device_name, str(value).split(" + ")))
    return str(value)


# -- `gpu top` ------------------------------------------------------------------------------------

BOLD, DIM, REVERSE, RED, ORANGE = "1", "2", "7", "31;1", "33"
_LEAST_WIDTH = 20


def screen(
    snapshot: Snapshot,
    processes: Sequence[views.Process],
    chosen: str,
    title: str,
    last: str,
    size: tuple[int, int],
    now: str,
) -> list[str]:
    """The lines of `gpu top` at the time of day `now`; `size` is the width and the height of the terminal.

    Problems and waits are above the devices, then come the `processes` under their `title`, with the `chosen` one
    marked, and the line `last`. What does not fit is counted.
    """
    width, height = max(size[0], _LEAST_WIDTH), max(size[1], 2)
    lines = list(_lines(snapshot, processes, chosen, title, now))
    if len(lines) > height - 1:
        more = len(lines) - height + 2
        lines = [*lines[: height - 2], (DIM, f"… {more} more lines")]
    lines += [("", "")] * (height - 1 - len(lines))
    cut = [(code, _cut(line, width)) for code, line in [*lines, (REVERSE, clean(last))]]
    return [f"\x1b[{code}m{line}\x1b[0m" if code and line else line for code, line in cut]


def _lines(
    snapshot: Snapshot, processes: Sequence[views.Process], chosen: str, title: str, now: str
) -> Iterator[tuple[str, str]]:
    """The lines of the screen but the last one, each with its colour."""
    yield BOLD, f"{views.device_title(snapshot)} · {now}"
    for problem in views.alarms(snapshot):
        yield RED, f"! {problem}"
    for request in views.waiting(snapshot):
        yield ORANGE, f"! {clean(request)}"
    yield "", ""
    for line in bars(
        (device.title, device.bar, f"{device.fill}  {device.pressure}  {device.remarks}")
        for device in views.device_lines(snapshot)
    ):
        yield "", line
    yield "", ""
    cells = [
        (
            process.name,
            process.user,
            str(process.pid),
            process.state,
            show_bytes(process.card_bytes) if process.card_bytes else "",
            show_bytes(process.host_bytes) if process.host_bytes else "",
        )
        for process in processes
    ]
    header, *rows = table(
        cells, ("NOTEBOOK", "USER", "PID", "STATE", "ON CARDS", "IN RAM"), (2, 4, 5)
    )
    yield DIM, f"  {header}   {clean(title)}"
    for process, row in zip(processes, rows, strict=True):
        yield (REVERSE, f"> {row}") if process.id == chosen else ("", f"  {row}")


def _cut(line: str, most: int) -> str:
    """The part of `line` that fits into `most` columns of the terminal."""
    ends = list(accumulate(map(_character_width, line), initial=0))
    if ends[-1] <= most:
        return line
    return line[: bisect_right(ends, most - 1) - 1] + "…"
