"""The clock of tests: it moves only when the test sets it."""

from __future__ import annotations


class Clock:
    """A clock in seconds, which code calls in place of `time.monotonic`."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
