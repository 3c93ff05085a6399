"""How far a load has come: one line that moves, and settles when the load ends.

In a notebook it is a display that is updated in place, in a terminal a line that is written over. What remains in
the notebook depends on the outcome alone, so that executed notebooks can be compared.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO

from gpu_runtime.units import show_bytes

from . import html, text, views
from .render import Shown

REDRAW_SECONDS = 0.1


class Progress:
    """Called with (bytes so far, bytes in all); used as a context around the load. Subclasses say where it shows."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.title = f"loading {views.clean(name)}"
        self._clock = clock
        self._drawn_at = float("-inf")
        self.done_bytes = self.all_bytes = 0
        self.begun = False

    def __call__(self, done_bytes: int, all_bytes: int) -> None:
        self.done_bytes, self.all_bytes, self.begun = done_bytes, all_bytes, True
        now = self._clock()
        if now - self._drawn_at >= REDRAW_SECONDS:
            self._drawn_at = now
            self.draw(f"{show_bytes(done_bytes)} of {show_bytes(all_bytes)}")

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.begun:
            self.settle(failed=error is not None)

    def draw(self, note: str) -> None:
        raise NotImplementedError

    def settle(self, failed: bool) -> None:
        raise NotImplementedError

    def line(self, note: str) -> str:
        cells = (
            round(min(1.0, self.done_bytes / self.all_bytes) * text.BAR_CELLS)
            if self.all_bytes
            else 0
        )
        return f"{self.title}  {'█' * cells:·<{text.BAR_CELLS}}  {note}"


class NotebookProgress(Progress):
    """One display of the cell, updated in place."""

    count = 0  # displays so far: an id lives in the session, and is not kept in the notebook

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(name, clock)
        self._handle: Any = None

    def draw(self, note: str) -> None:
        from IPython.display import display

        picture = Shown(
            None,
            lambda: self.line(note),
            lambda: html.progress(self.title, self.done_bytes, self.all_bytes, note),
        )
        if self._handle is None:
            NotebookProgress.count += 1
            self._handle = display(picture, display_id=f"gpu-progress-{NotebookProgress.count}")
        else:
            self._handle.update(picture)

    def settle(self, failed: bool) -> None:
        if failed:
            self.done_bytes = 0  # how far it had come is chance
        else:
            self.done_bytes = self.all_bytes
        self.draw("stopped" if failed else f"{show_bytes(self.all_bytes)}, done")


class TerminalProgress(Progress):
    """One line, gone at the end. Nothing at all where the stream is no terminal."""

    def __init__(
        self, name: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(name, clock)
        self._stream = sys.stderr if stream is None else stream

    def draw(self, note: str) -> None:
        if self._stream.isatty():
            self._stream.write(f"\r{self.line(note)}\x1b[K")
            self._stream.flush()

    def settle(self, failed: bool) -> None:
        if self._stream.isatty():
            self._stream.write("\r\x1b[K")
            self._stream.flush()
