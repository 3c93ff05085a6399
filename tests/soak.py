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
    """Only called for a whole soak: what came of it, good or bad."""
    rows = "\n".join(f"| {name.replace('_', ' ')} | {count:,} |" for name, count in sorted(_done.items()))
    RESULTS.write_text(
        "# The last soak\n\n"
        "Written by `make soak`. Each test counts what it did, and fails on the first lease that is lost or leaked, on the\n"
        "first byte that is granted beyond a limit, and on the first kernel that dies of it.\n\n"
        f"{datetime.date.today()}, {os.cpu_count()} × {platform.machine()}, Python {platform.python_version()}: "
        f"{passed} tests passed, {failed} failed, in {seconds / 60:.0f} minutes.\n\n"
        f"| what | how often |\n|---|---|\n{rows}\n")
