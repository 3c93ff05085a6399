"""The user's signal handlers and exit functions, which must run with the memory of the notebook.

A checkpoint at SIGUSR1, or a save at the end of the process, cannot wait for a cell. While the memory is away, a
function of this module precedes each of them and brings the memory back. All is as before when the memory is back.
"""

from __future__ import annotations

import atexit
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from gpu_runtime import threads

from . import obstacles


class Handlers:
    """The handlers and exit functions of one process."""

    def __init__(
        self,
        with_memory: Callable[..., Any],
        at_exit: Callable[[], None],
        seconds: Callable[[], float],
    ) -> None:
        """`with_memory(function, *args)` brings the memory back and calls `function`.

        `at_exit` brings it back for good. `seconds` returns how long a handler may wait for the memory.
        """
        self._with_memory, self._at_exit, self._seconds = with_memory, at_exit, seconds
        self._theirs: dict[int, Any] = {}
        self._postponed: list[int] = []
        self._overdue: set[int] = set()  # postponed for too long: their handlers run in the block
        self._busy = 0  # how many blocks of our own code run in the main thread that no handler may interrupt

    def precede(self) -> None:
        """Called in the main thread before the memory leaves."""
        if self._theirs or threading.current_thread() is not threading.main_thread():
            return
        for number in signal.valid_signals() - {
            signal.SIGINT
        }:  # the kernel sets SIGINT for each message
            handler = signal.getsignal(number)
            if callable(handler) and not obstacles.is_ours(handler) and handler != self._on_signal:
                self._theirs[number] = handler
                signal.signal(number, self._on_signal)
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)  # the last that is registered runs first

    def restore(self) -> None:
        """Called when the memory is back. Does nothing in another thread than the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        while self._theirs:
            number, handler = self._theirs.popitem()
            if signal.getsignal(number) == self._on_signal:  # else the user has set another one
                signal.signal(number, handler)
        atexit.unregister(self._at_exit)

    @contextlib.contextmanager
    def postponed(self) -> Iterator[None]:
        """A block of our own code in the main thread. A signal that arrives is handled after the block."""
        in_main = threading.current_thread() is threading.main_thread()
        self._busy += in_main
        try:
            yield
        finally:
            self._busy -= in_main
            while in_main and not self._busy and self._postponed:
                signal.raise_signal(self._postponed.pop(0))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._busy and number not in self._overdue:
            # One that arrives twice is handled once, as by the system.
            if number not in self._postponed:
                self._postponed.append(number)
                threads.start(lambda: self._repeat(number))
            return
        self._overdue.discard(number)
        with contextlib.suppress(ValueError):  # it was not postponed
            self._postponed.remove(number)
        handler = self._theirs.get(number)
        if handler is not None:
            self._with_memory(handler, number, frame)

    def _repeat(self, number: int) -> None:
        """Repeats a signal that is still postponed after the time limit. Its handler then runs without the memory."""
        time.sleep(self._seconds())
        if number in self._postponed:
            self._overdue.add(number)
            signal.raise_signal(number)
