"""The clocks of tests: one that moves only when a test sets it, and the patience of waits for real events.

A test waits for an event, and never for a time. The end of a wait is only there to name what did not happen. It is far
later than the event on an idle machine, and later still where the machine is slow at the start of the run.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

USUAL_SECONDS = 0.39  # what `_slowness` measures on an idle machine of 2 cores
_MEASURED = "TESTS_SLOWNESS"


class Clock:
    """A clock in seconds, which code calls in place of `time.monotonic`."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def _slowness() -> float:
    """How many times longer than usual three Python processes take now, each with a loop. At least 1."""
    began = time.perf_counter()
    for _ in range(3):
        subprocess.run([sys.executable, "-S", "-c", "for _ in range(5_000_000): pass"], check=True)
    return max(1.0, (time.perf_counter() - began) / USUAL_SECONDS)


# Measured once a run: the workers of the run and the processes of the tests inherit it.
if _MEASURED not in os.environ:
    os.environ[_MEASURED] = f"{_slowness():.2f}"
SLOWNESS = float(os.environ[_MEASURED])


def scaled(seconds: float) -> float:
    """The end of a wait that takes `seconds` at most on an idle machine, for this machine now."""
    return seconds * SLOWNESS


# An event that must happen takes a few seconds at most, beside five workers on 2 cores.
PATIENCE = round(scaled(60))


def until(condition: Callable[[], Any], what: str = "the condition did not become true") -> Any:
    """Waits until `condition()` is true, and returns its value. Fails with `what` after PATIENCE."""
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end, f"within {PATIENCE:.0f} s: {what}"
        time.sleep(0.005)  # the only way to learn what another process has done
    return found


def finished(
    command: Sequence[Any], *, timeout: float = PATIENCE, **options: Any
) -> subprocess.CompletedProcess[str]:
    """The process of `command` after its end, with its output as text. `options` are those of `subprocess.run`."""
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)


def pytest_timeout_set_timer(item: Any, settings: Any) -> object:
    """Scales the time-out of a test, whether it is `timeout` of pyproject.toml or the test's own mark.

    pytest calls it before the plugin's own, if a conftest.py imports it.
    """
    own = settings._replace(timeout=scaled(settings.timeout))
    return item.config.pluginmanager.get_plugin("timeout").pytest_timeout_set_timer(item, own)
