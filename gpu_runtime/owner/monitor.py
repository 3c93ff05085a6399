"""The monitor: one daemon thread of each runtime that calls the tick (`maintenance.py`) about once a second.

The thread decides nothing. If the devices cannot be measured, it retries less often and logs the reason. No error
ends the thread or the kernel.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from .. import threads
from ..errors import GpuError, ProbeFailed

log = logging.getLogger("gpu_runtime")

FAILURES = 5
REST_SECONDS = 30.0
MOST_REST_SECONDS = 300.0


class Breaker:
    """Stops measuring for 30 s after 5 failures in a row. After the pause, tries once.

    Each further failure doubles the pause, up to 300 s.
    """

    def __init__(self) -> None:
        self.failures = 0
        self.why = ""
        self._until = 0.0
        self._rest = REST_SECONDS

    @property
    def open(self) -> bool:
        """Whether measuring is suspended."""
        return self.failures >= FAILURES

    def allows(self, now: float) -> bool:
        """Whether to measure at `now`, in seconds of the session's clock."""
        return not self.open or now >= self._until

    def failed(self, now: float, why: str) -> None:
        """Counts a failure at `now`. `why` is the first line of the driver's error."""
        self.failures += 1
        self.why = why
        if self.failures > FAILURES:
            self._rest = min(self._rest * 2, MOST_REST_SECONDS)
        if self.open:
            self._until = now + self._rest

    def succeeded(self) -> None:
        """Resets the count of failures and the pause."""
        self.__init__()  # type: ignore[misc]

    def trouble(self) -> str:
        """The reason why the devices cannot be measured; empty if measuring works."""
        if not self.open:
            return ""
        return f"the devices have not answered {self.failures} times in a row ({self.why})"


class Monitor:
    """Calls `tick` about once a second, and at each notification, until it is stopped."""

    def __init__(self, tick: Callable[[], float], wait: Callable[[float], object]) -> None:
        """`tick` returns the seconds until the next round. `wait(seconds)` sleeps."""
        self._tick, self._wait = tick, wait
        self._stopping = threading.Event()
        self._running: threads.Running | None = None

    def start(self) -> None:
        """Starts the thread."""
        self._running = threads.start(self._run)

    def stop(self, ring: Callable[[], None]) -> None:
        """Ends the thread; waits at most 5 s for its end. `ring` wakes the sleeping thread."""
        self._stopping.set()
        ring()
        if self._running and self._running.ident != threading.get_ident():
            self._running.wait(5.0)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with threads.promptly:
                    delay = self._tick()
            except (GpuError, ProbeFailed) as error:
                log.warning("%s", error)
                delay = 1.0
            except Exception:  # the kernel and its monitor must survive any error here
                log.exception("the monitor failed; it tries again in 5 s")
                delay = 5.0
            if not self._stopping.is_set():
                self._safe_wait(delay)

    def _safe_wait(self, delay: float) -> None:
        try:
            self._wait(delay)
        except (GpuError, OSError):  # the next tick logs the same error
            self._stopping.wait(delay)
