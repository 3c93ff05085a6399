"""The line that a cell shows while its model waits for memory.

The line names the holder of the memory, how long the holder has used it, and how many requests are
ahead in the queue. The line is removed when the wait is over. A wait of less than a second shows
nothing.
"""

from __future__ import annotations

import html as escaping
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from gpu_runtime.facts import Wait
from gpu_runtime.safe_text import lines
from gpu_runtime.units import show_bytes

QUIET_SECONDS = 1.0


def sentence(name: str, wait: Wait) -> str:
    """The `wait` of the model `name` in words.

    For example `qwen waits for 12.0 GiB on cuda:0: llama (14.0 GiB on cuda:0) is in use by
    train.ipynb; 2 ahead of you`.
    """
    place = next((candidate.shares[0] for candidate in wait.considered), None)
    name = "this notebook" if name == "kernel" else name
    need = f" for {show_bytes(place.bytes)} on {place.device}" if place else ""
    ahead = f"; {wait.ahead} ahead of you" if wait.ahead else ""
    return lines(f"{name} waits{need}: {wait.because}{ahead}").replace("\n", " ")


class WaitLine:
    """Shows a line for each wait of the main thread, and removes the line at the end of the wait."""

    def __init__(self, notebook: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """Shows waits in a `notebook`, or else in a terminal; `clock` returns seconds."""
        self._notebook, self._clock = notebook, clock
        self._began: float | None = None
        self._handle: Any = None
        self._count = 0

    def __call__(self, name: str, wait: Wait | None) -> None:
        """Shows that the model `name` waits. If `wait` is None, the wait is over."""
        if threading.current_thread() is not threading.main_thread():
            return
        if wait is None:
            self._began = None
            self._show("")
        elif self._began is None:
            self._began = self._clock()
        elif self._clock() - self._began >= QUIET_SECONDS:
            self._show(sentence(name, wait))

    def _show(self, line: str) -> None:
        if self._notebook:
            self._display(line)
        elif sys.stderr.isatty():
            sys.stderr.write(f"\r{line}\x1b[K")
            sys.stderr.flush()

    def _display(self, line: str) -> None:
        from IPython.display import display

        if self._handle is None and not line:
            return
        bundle = {
            "text/plain": line,
            "text/html": f"<i>{escaping.escape(line)}</i>" if line else "",
        }
        if self._handle is None:
            self._count += 1
            self._handle = display(bundle, raw=True, display_id=f"gpu-waiting-{self._count}")
        else:
            self._handle.update(bundle, raw=True)
        if not line:
            self._handle = None


def quiet_line(line: str) -> None:
    """Shows one `line` in small italics above the output of the cell."""
    from IPython.display import display

    bundle = {"text/plain": line, "text/html": f"<small><i>{escaping.escape(line)}</i></small>"}
    display(bundle, raw=True)
