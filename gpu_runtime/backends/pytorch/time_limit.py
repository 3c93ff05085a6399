"""A time limit for searches. A search that reaches its limit returns what it has found so far."""

from __future__ import annotations

import time
from collections.abc import Callable


class Limit:
    """A time limit in seconds, counted from the creation of this object."""

    def __init__(
        self,
        seconds: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        """`seconds` is the limit; None means no limit. The limit is also reached once `stop`
        returns True.
        """
        self._clock, self.began = clock, clock()
        self._stop = stop
        self._seconds = float("inf") if seconds is None else seconds

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since this object was created."""
        return self._clock() - self.began

    @property
    def over(self) -> bool:
        """Whether the limit is reached."""
        stopped = self._stop is not None and self._stop()
        return stopped or self.elapsed_seconds >= self._seconds
