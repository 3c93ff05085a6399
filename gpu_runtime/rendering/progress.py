"""The progress of a load: one line that is updated until the load ends.

In a notebook a display is updated in place, and in a terminal a line is overwritten. The line that
remains in the notebook depends only on the outcome, so executed notebooks can be compared.
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
    """A context manager around a load. The load calls the object to report its progress.

    Subclasses decide where the line is shown.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Shows the load of the model `name`. The redraws are limited by `clock`, in seconds."""
        self.title = f"loading {views.clean(name)}"
        self._clock = clock
        self._drawn_at = float("-inf")
        self.done_bytes = self.all_bytes = 0
        self.begun = False

    def __call__(self, done_bytes: int, all_bytes: int) -> None:
        """Shows that `done_bytes` of `all_bytes` are loaded, at most once every 0.1 s."""
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
        """Shows the bar with a `note` behind it."""
        raise NotImplementedError

    def settle(self, failed: bool) -> None:
        """Shows the final state. `failed` is True if the load raised an error."""
        raise NotImplementedError

    def line(self, note: str) -> str:
        """The bar as text, with the `note` behind it."""
        part = min(1.0, self.done_bytes / self.all_bytes) if self.all_bytes else 0.0
        filled = "█" * round(part * text.BAR_CELLS)
        return f"{self.title}  {filled:·<{text.BAR_CELLS}}  {note}"


class NotebookProgress(Progress):
    """One display in the cell's output, updated in place."""

    count = 0  # displays made so far, for their ids, which are not saved in the notebook

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Shows the load of the model `name`. The redraws are limited by `clock`, in seconds."""
        super().__init__(name, clock)
        self._handle: Any = None

    def draw(self, note: str) -> None:
        """Shows the bar with a `note`, in the same display as before."""
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
        """Shows a full bar, or an empty bar if the load `failed`.

        The progress at the failure is random, and executed notebooks must be comparable.
        """
        self.done_bytes = 0 if failed else self.all_bytes
        self.draw("stopped" if failed else f"{show_bytes(self.all_bytes)}, done")


class TerminalProgress(Progress):
    """One line that is removed at the end. It writes nothing if the stream is not a terminal."""

    def __init__(
        self, name: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Shows the load of the model `name` on `stream`, which defaults to standard error.

        The redraws are limited by `clock`, in seconds.
        """
        super().__init__(name, clock)
        self._stream = sys.stderr if stream is None else stream

    def draw(self, note: str) -> None:
        """Overwrites the line with the bar and a `note`."""
        if self._stream.isatty():
            self._stream.write(f"\r{self.line(note)}\x1b[K")
            self._stream.flush()

    def settle(self, failed: bool) -> None:
        """Removes the line, whether the load `failed` or not."""
        if self._stream.isatty():
            self._stream.write("\r\x1b[K")
            self._stream.flush()
