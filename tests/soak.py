"""Counts of the attacks that soak runs made, summed over tests and ledgers.

`make soak` writes them to tests/bench/SOAK.md.
"""

import datetime
import os
import platform
from collections import Counter
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).parent / "bench" / "SOAK.md"
# How often an attack is to be made on each ledger; both must hold.
WANTED = {
    "kills": 10_000, "forks": 10_000, "interrupts": 100_000, "torn files": 1_000,
    "interrupts of moves": 10_000, "kills in moves": 10_000,
    "seconds of gpu serve under kills and floods": 300, "operations of a history": 1_000_000,
}  # fmt: skip


class Row(NamedTuple):
    """One kind of attack on one kind of ledger."""

    what: str
    ledger: str  # "keeper", "Redis" or "none"


class Done(NamedTuple):
    """How often an attack was made: in the last soak, and in all soaks that passed."""

    last: int
    held: int


_done: Counter[Row] = Counter()


def add(ledger: str, **counts: float) -> None:
    """Adds counts of the attacks on the `ledger` (`keeper`, `redis` or `none`), by name: `kills=512`."""
    shown = {"keeper": "keeper", "redis": "Redis", "none": "none"}[ledger]
    for name, count in counts.items():
        _done[Row(name.replace("_", " "), shown)] += round(count)


def write(passed: int, failed: int, seconds: float) -> None:
    """Writes the result of a soak, good or bad. The counts of a failed soak are not added to the
    total of the passed ones.
    """
    rows = so_far(RESULTS.read_text() if RESULTS.exists() else "")
    for row, count in _done.items():
        held = rows[row].held if row in rows else 0
        rows[row] = Done(count, held if failed else held + count)
    RESULTS.write_text(
        "# The soaks\n\n"
        "Written by `make soak`. Each test counts what it did, and fails on the first lease that is\n"
        "lost or leaked, on the first byte granted beyond a limit, and on the first process that\n"
        "dies of it or hangs.\n\n"
        f"The last one: {datetime.date.today()}, {os.cpu_count()} × {platform.machine()}, "
        f"Python {platform.python_version()}: {passed} tests passed, {failed} failed, "
        f"in {seconds / 60:.0f} minutes.\n\n"
        "| what | ledger | last time | in all soaks that held | wanted |\n|---|---|---|---|---|\n"
        + "".join(_line(row, rows[row]) for row in sorted(rows))
    )


def _line(row: Row, done: Done) -> str:
    wanted = f"{WANTED[row.what]:,}" if row.what in WANTED else "–"
    return f"| {row.what} | {row.ledger} | {done.last:,} | {done.held:,} | {wanted} |\n"


def so_far(text: str) -> dict[Row, Done]:
    """The rows of that file.

    >>> so_far("| what | ledger | last | all |\\n|---|---|---|---|\\n| kills | Redis | 7 | 1,009 | 10,000 |")
    {Row(what='kills', ledger='Redis'): Done(last=7, held=1009)}
    """
    lines = (line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| "))
    return {
        Row(words[0], words[1]): Done(_number(words[2]), _number(words[3]))
        for words in lines
        if len(words) == 5 and words[2][:1].isdigit()
    }


def _number(text: str) -> int:
    return int(text.replace(",", ""))
