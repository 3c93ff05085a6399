"""Whether this process's kernel is running a cell, and since when.

The IPython extension records the start and end of each cell in this module's memory. A record takes
under a microsecond and does not access the ledger. The runtime's monitor thread publishes the
record with this process's other facts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable
from typing import NamedTuple

from .facts import NEVER


class State(NamedTuple):
    """Since when the kernel runs a cell, or since when it is idle, in seconds of CLOCK_BOOTTIME.

    While a cell runs, `idle_since` is 0.0. Between cells, `busy_since` is 0.0. In a script, and
    before the first cell, both are 0.0.
    """

    busy_since: float = NEVER
    idle_since: float = NEVER


class Activity:
    """The cells that are running now.

    Several cells can run at once: a cell can run another cell, and subshells run beside the main
    shell.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns the current time in seconds."""
        self._clock = clock
        # Functions that are called when a cell starts. They wake monitor threads.
        self.watchers: set[Callable[[], None]] = set()
        self.forget()

    def forget(self) -> None:
        """Removes all records, as if no cell had ever run."""
        self._running: dict[Hashable, float] = {}
        self._ended = NEVER

    def began(self, cell: Hashable) -> None:
        """Records the start of `cell`, whose value distinguishes it from other running cells."""
        self._running[cell] = self._clock()
        for watcher in tuple(self.watchers):
            watcher()

    def ended(self, cell: Hashable) -> None:
        """Records the end of `cell`, even if its start was not recorded."""
        self._running.pop(cell, None)
        self._ended = self._clock()

    @property
    def running(self) -> bool:
        """Whether a cell runs now."""
        return bool(self._running)

    @property
    def state(self) -> State:
        """When the oldest running cell started; or when the last cell ended, if no cell runs.

        The time is rounded to a tenth of a second, to keep its text in the ledger short.
        """
        since = list(self._running.values())
        if since:
            return State(busy_since=round(min(since), 1))
        return State(idle_since=round(self._ended, 1))


def _forget_all() -> None:
    """Removes all records and watchers in a forked child, which runs no cell and no monitor."""
    activity.forget()
    activity.watchers.clear()


activity = Activity(lambda: time.clock_gettime(time.CLOCK_BOOTTIME))
os.register_at_fork(after_in_child=_forget_all)
