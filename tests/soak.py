"""Counts of the attacks that soak runs made, summed over tests and ledgers.

`make soak` writes them to tests/bench/SOAK.md. `SOAK=1 pytest …` of a part of its tests does so too.
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
    "kills": 10_000, "forks": 10_000, "interrupts": 100_000,
    "interrupts of moves": 10_000, "kills in moves": 10_000,
    "seconds of gpu serve under kills and floods": 300, "operations of a history": 1_000_000,
}  # fmt: skip


class Row(NamedTuple):
    """One kind of attack on one kind of ledger."""

    what: str
    ledger: str  # "keeper", "Redis" or "none"


class Done(NamedTuple):
    """How often an attack was made: in the last soak that made it, and in all soaks that passed."""

    last: int
    held: int
    day: str  # of that last soak


_done: Counter[Row] = Counter()


def add(ledger: str, **counts: float) -> None:
    """Adds counts of the attacks on the `ledger` (`keeper`, `redis` or `none`), by name: `kills=512`."""
    shown = {"keeper": "keeper", "redis": "Redis", "none": "none"}[ledger]
    for name, count in counts.items():
        _done[Row(name.replace("_", " "), shown)] += round(count)


def write(run: str, examples: int, passed: int, failed: int, skipped: int, seconds: float) -> None:
    """Writes the result of a soak, good or bad. The counts of a failed soak are not added to the
    total of the passed ones. `run` has the words that chose the tests; `tests` alone stands for all.
    Without property tests, `examples` is 0.
    """
    if not passed + failed:
        return  # the tests were only listed
    text = RESULTS.read_text() if RESULTS.exists() else ""
    rows, today = so_far(text), str(datetime.date.today())
    for row, count in _done.items():
        held = rows[row].held if row in rows else 0
        rows[row] = Done(count, held if failed else held + count, today)
    parts = (line for line in text.splitlines() if line.startswith("| `"))
    runs = {} if run.split()[0] == "tests" else {line.split("`")[1]: line for line in parts}
    cells = (
        today,
        f"{examples:,}" if examples else "–",
        passed,
        failed,
        skipped,
        round(seconds / 60),
    )
    runs[run] = f"| `{run}` | {' | '.join(map(str, cells))} |"
    RESULTS.write_text(
        "# The soaks\n\n"
        "Written by `make soak`. Each test counts what it did, and fails on the first lease that is\n"
        "lost or leaked, on the first byte granted beyond a limit, and on the first process that\n"
        f"dies of it or hangs. The last run: {os.cpu_count()} × {platform.machine()}, "
        f"Python {platform.python_version()}.\n\n"
        "| what | ledger | last time | day | in all soaks that held | wanted |\n"
        "|---|---|---|---|---|---|\n"
        + "".join(_line(row, rows[row]) for row in sorted(rows))
        + "\n| tests | day | examples of a property | passed | failed | skipped | minutes |\n"
        "|---|---|---|---|---|---|---|\n" + "".join(f"{runs[run]}\n" for run in sorted(runs))
    )


def _line(row: Row, done: Done) -> str:
    wanted = f"{WANTED[row.what]:,}" if row.what in WANTED else "–"
    return (
        f"| {row.what} | {row.ledger} | {done.last:,} | {done.day} | {done.held:,} | {wanted} |\n"
    )


def so_far(text: str) -> dict[Row, Done]:
    """The rows of that file.

    >>> so_far("| what | ledger | last time | day | all |\\n| kills | Redis | 7 | 2026-11-27 | 1,009 | 10,000 |")
    {Row(what='kills', ledger='Redis'): Done(last=7, held=1009, day='2026-11-27')}
    """
    lines = (line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| "))
    return {
        Row(words[0], words[1]): Done(_number(words[2]), _number(words[4]), words[3])
        for words in lines
        if len(words) == 6 and words[2][:1].isdigit()
    }


def _number(text: str) -> int:
    return int(text.replace(",", ""))
