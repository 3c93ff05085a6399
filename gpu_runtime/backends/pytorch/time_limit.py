"""A limit of time for work that can end early with a part of its result."""

from __future__ import annotations

import time
from collections.abc import Callable


class Limit:
    """A limit of time, in seconds from its creation; None is no limit."""

    def __init__(
        self,
        seconds: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        """The limit is also reached once `stop` returns True."""
        self._clock, self.began = clock, clock()
        self._stop = stop
        self._seconds = float("inf") if seconds is None else seconds

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since it was made."""
        return self._clock() - self.began

    @property
    def over(self) -> bool:
        """Whether the time is used up."""
        stopped = self._stop is not None and self._stop()
        return stopped or self.elapsed_seconds >= self._seconds
