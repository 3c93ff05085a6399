"""One daemon thread a runtime: publishes pins, obeys recalls, relieves pressure, reaps the dead.

It holds no opinion: each tick asks the keeper to do what was decided. Where the devices cannot be read it backs off and
says so, and never takes a kernel down with it.
"""

from __future__ import annotations

import logging
import math
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
    """After 5 failures in a row nothing is tried for 30 s, then once; each further failure doubles the rest, to 300
    s."""

    def __init__(self) -> None:
        self.failures = 0
        self.why = ""
        self._until = 0.0
        self._rest = REST_SECONDS

    @property
    def open(self) -> bool:
        return self.failures >= FAILURES

    def allows(self, now: float) -> bool:
        return not self.open or now >= self._until

    def failed(self, now: float, why: str) -> None:
        self.failures += 1
        self.why = why
        if self.failures >= FAILURES:
            if self.failures > FAILURES:
                self._rest = min(self._rest * 2, MOST_REST_SECONDS)
            self._until = now + self._rest

    def succeeded(self) -> None:
        self.__init__()  # type: ignore[misc]

    def trouble(self) -> str:
        """Why the devices cannot be seen; empty while they can."""
        return (
            f"the devices have not answered {self.failures} times in a row ({self.why})"
            if self.open
            else ""
        )


class _Promptly:
    """While it lasts, a thread that runs Python lets others have the GIL after 0.5 ms instead of 5.

    A recall takes some sixty calls of the operating system, each of which gives up the GIL: beside a main thread in a
    pure-Python loop that came to 400 ms. Runtimes share it, and whatever somebody else has set meanwhile stays.
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
            if not self._inside and math.isclose(
                sys.getswitchinterval(), self.SECONDS, rel_tol=1e-3
            ):
                sys.setswitchinterval(self._usual)


promptly = _Promptly()


class Monitor:
    """Calls `tick` about once a second, at once when somebody rings, until stopped."""

    def __init__(self, tick: Callable[[], float], wait: Callable[[float], bool]) -> None:
        self._tick, self._wait = tick, wait
        self._stopping = threading.Event()
        self._running: threads.Running | None = None

    def start(self) -> None:
        self._running = threads.start(self._run)

    def stop(self, ring: Callable[[], None]) -> None:
        """Ends the thread; `ring` wakes it."""
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
            except (
                Exception
            ):  # a kernel must outlive its monitor's worst day, and the monitor its own
                log.exception("the monitor stumbled; it goes on")
                delay = 5.0
            if not self._stopping.is_set():
                self._safe_wait(delay)

    def _safe_wait(self, delay: float) -> None:
        try:
            self._wait(delay)
        except GpuError:
            self._stopping.wait(delay)
