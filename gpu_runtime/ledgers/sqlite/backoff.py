"""How fast one door may come back to a book that others want too.

Whoever has just written is awake, and would be back before the one whose turn it is has woken up. Up to eight turns in
a row that is welcome: the first costs five times as much as the others, whose memory lies in the processor's cache (64
processes: 800 transactions a second with two turns each, 2,900 with eight). Then it lets the others in, where there are
others. Whoever lost a race waits at random, the longer the more often it lost. All waits are multiples of what one
attempt costs, so they fit a slow machine as well as a fast one.
"""

from __future__ import annotations

import random
import threading
import time

FREE_TURNS = 8  # in a row
IN_A_ROW_SECONDS = 0.002
CROWDED_SECONDS = 0.1  # how long it is remembered that others were there
MOST_DOUBLINGS = 4  # 4 · 2⁴ is beyond the cap of 50


class Pace:
    """The waits of one door. Answers in seconds; the caller sleeps."""

    def __init__(self) -> None:
        self.attempt_seconds = 0.0001  # processor time of an attempt that nothing slowed down
        self._here = threading.local()
        self._crowded_at = float("-inf")

    def crowded(self, now: float) -> None:
        """Others are there: we had to wait for our turn, or lost a race."""
        self._crowded_at = now

    def before(self, now: float) -> float:
        """Seconds to wait before a transaction: 0, unless this thread has had eight in a row and others are there."""
        here = self._here
        in_a_row = now - getattr(here, "ended_at", float("-inf")) < IN_A_ROW_SECONDS
        here.turns = here.turns + 1 if in_a_row else 1
        here.row = here.row + 1 if in_a_row else 1
        here.lines_up = here.row > 2 and now - self._crowded_at <= CROWDED_SECONDS
        if here.turns <= FREE_TURNS or now - self._crowded_at > CROWDED_SECONDS:
            return 0.0
        here.turns = 1
        return random.uniform(2, 6) * self.attempt_seconds

    @property
    def lines_up(self) -> bool:
        """Whether this thread writes without pause, and others too: trying in vain would hold up those in line."""
        return self._here.lines_up

    @property
    def goes_on(self) -> bool:
        """Whether this thread is likely to be back at once: it has been twice, and may again."""
        return 2 < self._here.turns < FREE_TURNS

    def lost(self, times: int, now: float) -> float:
        """Seconds to wait after the race was lost so many times in this transaction."""
        self.crowded(now)
        return self.attempt_seconds * (
            1 + random.uniform(0, min(50, 4 * 2 ** min(times, MOST_DOUBLINGS)))
        )

    def ended(self, attempt_seconds: float, now: float) -> None:
        """Notes the end of a transaction, and the processor time of its last attempt."""
        self._here.ended_at = now
        # Near the least: the mean is made of a few attempts that met a cold cache or a collection of garbage.
        self.attempt_seconds = min(attempt_seconds, self.attempt_seconds * 1.02, 0.01)


def processor_seconds() -> float:
    return time.thread_time()
