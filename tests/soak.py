"""What a soak has done, summed over its tests and written to tests/bench/SOAK.md by `make soak`."""

from __future__ import annotations

import datetime
import os
import platform
from collections import Counter
from pathlib import Path

RESULTS = Path(__file__).parent / "bench" / "SOAK.md"
_done: Counter[str] = Counter()


def add(**counts: float) -> None:
    """Counts of what was done, by name: `kills=512`."""
    _done.update({name: round(count) for name, count in counts.items()})


def write(passed: int, failed: int, seconds: float) -> None:
    """Only called for a whole soak: what came of it, good or bad. One that failed is not added to what held so far."""
    held = so_far(RESULTS.read_text() if RESULTS.exists() else "")
    if not failed:
        held.update(_done)
    rows = "\n".join(
        f"| {name.replace('_', ' ')} | {_done[name]:,} | {held[name]:,} |"
        for name in sorted(_done.keys() | held.keys())
    )
    RESULTS.write_text(
        "# The last soak\n\n"
        "Written by `make soak`. Each test counts what it did, and fails on the first lease that is\n"
        "lost or leaked, on the first byte granted beyond a limit, and on the first kernel that\n"
        "dies of it.\n\n"
        f"{datetime.date.today()}, {os.cpu_count()} × {platform.machine()}, Python {platform.python_version()}: "
        f"{passed} tests passed, {failed} failed, in {seconds / 60:.0f} minutes.\n\n"
        f"| what | how often | in all soaks that held |\n|---|---|---|\n{rows}\n"
    )


def so_far(text: str) -> Counter[str]:
    """What the last column of that file says.

    >>> so_far("| what | how often | in all |\\n|---|---|---|\\n| blocks served | 7 | 1,009 |")
    Counter({'blocks_served': 1009})
    """
    rows = (line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| "))
    return Counter(
        {
            row[0].replace(" ", "_"): int(row[-1].replace(",", ""))
            for row in rows
            if row[-1][:1].isdigit()
        }
    )
