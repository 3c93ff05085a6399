"""RESULTS.md: one table, one line a row. A row is known by what it measures; its history is git's."""

import datetime
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).with_name("RESULTS.md")
HEAD = "| what | figure | target | | date | machine |\n|---|---|---|---|---|---|"
MEASURED = "–"  # the target of a figure that has none
NOT_RUN = "not run"
_MARKS = {True: "reached", False: "**missed**"}


class Row(NamedTuple):
    """One figure. `what` has no measured value, so that a later run finds its row."""

    what: str
    figure: str
    target: str
    reached: bool | None  # None: it has no target, or was not measured

    @classmethod
    def against(
        cls, what: str, mine: float, other: float, most: float, unit: str = "ms", digits: int = 0
    ) -> "Row":
        """The row of a time, given in seconds, that may be `most` times as long as the `other` one."""
        one, two = (time * {"s": 1, "ms": 1e3, "µs": 1e6}[unit] for time in (mine, other))
        figure = f"{one:.{digits}f} of {two:.{digits}f} {unit} = {mine / other:.2f}×"
        return cls(what, figure, f"≤ {most}×", mine / other <= most)

    def line(self, machine: str) -> str:
        """The row as a line of the table, measured today on this `machine`."""
        mark = _MARKS.get(self.reached, "measured" if self.target == MEASURED else NOT_RUN)
        mark = NOT_RUN if self.figure.startswith(NOT_RUN) else mark
        cells = (self.what, self.figure, self.target, mark, f"{datetime.date.today()}", machine)
        return f"| {' | '.join(cells)} |"


def this_machine() -> str:
    """The processors and the Python of this machine."""
    return f"{os.cpu_count()} × {platform.machine()}, Python {platform.python_version()}"


def merged(old: str, lines: Iterable[str], *, all_parts: bool = False) -> str:
    """The text `old` of RESULTS.md with `lines` in place of the rows of the same figures.

    New rows are at the end. A figure that was not run keeps its row. If `lines` are those of `all_parts`, the
    rows that are not among them are removed: nothing measures them any more.

    >>> old = "words\\n\\n| a | 1 | \\n| b | 2 |\\n"
    >>> merged(old, ["| b | 3 |", "| c | 4 |", "| a | not run |"]).splitlines()[2:]
    ['| a | 1 | ', '| b | 3 |', '| c | 4 |']
    >>> merged(old, ["| b | 3 |"], all_parts=True).splitlines()[2:]
    ['| b | 3 |']
    """
    lines = list(lines)
    known = {_what(one) for one in (*lines, *HEAD.splitlines())}
    new = {_what(one): one for one in lines if f"| {NOT_RUN}" not in one}
    rows = old.splitlines()
    if all_parts:
        rows = [one for one in rows if not one.startswith("| ") or _what(one) in known]
    kept = [new.pop(_what(one), one) if one.startswith("| ") else one for one in rows]
    return "\n".join([*kept, *new.values()]) + "\n"


def _what(line: str) -> str:
    return line.split(" | ")[0].removeprefix("| ")
