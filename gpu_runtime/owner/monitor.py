"""The monitor: one daemon thread of each runtime that calls the tick (`maintenance.py`) about once a second.

The thread decides nothing. If the devices cannot be measured, it retries less often and logs the reason. No error
ends the thread or the kernel.
"""

from __future__ import annotations

import logging
import math
import os
import sys
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


class _Promptly:
    """A `with` block in which a thread that runs Python code yields the GIL after 0.5 ms, not 5 ms.

    A recall makes about sixty system calls, and each of them releases the GIL. With 5 ms, a recall
    beside a pure-Python loop in the main thread took 400 ms. All runtimes of a process share this
    object. If other code changes the switch interval during the block, the new interval stays.
    """

    SECONDS = 0.0005

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._usual = 0.0

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._usual = sys.getswitchinterval()
                sys.setswitchinterval(min(self.SECONDS, self._usual))

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            ours = math.isclose(sys.getswitchinterval(), self.SECONDS, rel_tol=1e-3)
            if not self._inside and ours:
                sys.setswitchinterval(self._usual)

    def forget(self) -> None:
        """Resets the object in a forked child, where the parent's threads do not exist."""
        if self._inside:
            sys.setswitchinterval(self._usual)
        self._lock, self._inside = threading.Lock(), 0


promptly = _Promptly()
os.register_at_fork(after_in_child=promptly.forget)


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
                with promptly:
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
