"""Whether this process's kernel runs a cell, and since when.

The IPython extension notes each cell's begin and end here, in memory: that costs under a microsecond and touches no
ledger. The monitor publishes it with whatever else it says of this process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable
from typing import NamedTuple

from .facts import NEVER


class State(NamedTuple):
    """Seconds of CLOCK_BOOTTIME; 0.0 where it does not apply, or nobody tells, as in a script."""

    busy_since: float = NEVER
    idle_since: float = NEVER


class Activity:
    """The cells that run now. Several may: one cell runs another, and subshells run beside the main one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.watchers: set[Callable[[], None]] = (
            set()
        )  # called as a cell begins: monitors that sleep long
        self.forget()

    def forget(self) -> None:
        """Nothing runs, and nothing ran; in a forked child this is so."""
        self._running: dict[Hashable, float] = {}
        self._ended = 0.0

    def began(self, cell: Hashable) -> None:
        """A cell began, named so that its end can be told from another's."""
        self._running[cell] = self._clock()
        for told in tuple(self.watchers):
            told()

    def ended(self, cell: Hashable) -> None:
        """It ended; of one whose begin was never told, too."""
        self._running.pop(cell, None)
        self._ended = self._clock()

    @property
    def state(self) -> State:
        """Since the oldest cell that still runs began, or since the last one ended.

        To a tenth of a second: it goes into the page with everybody's.
        """
        since = list(self._running.values())
        return (
            State(busy_since=round(min(since), 1))
            if since
            else State(idle_since=round(self._ended, 1))
        )


activity = Activity(lambda: time.clock_gettime(time.CLOCK_BOOTTIME))
os.register_at_fork(after_in_child=activity.forget)
