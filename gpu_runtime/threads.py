"""Threads that the stop button cannot strike while they are started."""

from __future__ import annotations

import _thread
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from . import threads


class Running:
    """A thread that was started; `wait` for its end."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._ended = _thread.allocate_lock()
        self._ended.acquire()
        self.ident = 0

    def wait(self, timeout: float = -1) -> bool:
        """True once it has ended, False after `timeout` seconds (-1: never)."""
        if not self._ended.acquire(timeout=timeout):
            return False
        with contextlib.suppress(RuntimeError):  # another who waited was faster to let go
            self._ended.release()
        return True

    def run(self) -> None:
        self.ident = _thread.get_ident()
        try:
            self._work()
        finally:
            self._ended.release()


def start(work: Callable[[], None]) -> Running:
    """Runs it in a thread of its own, for which the end of the process does not wait.

    Not `threading.Thread`: its `start` waits until the new thread says that it lives, and an interrupt of that wait
    leaves the lock held with which it would say so. The thread then never runs, and a process that waits for it never
    ends.
    """
    running = Running(work)
    _thread.start_new_thread(running.run, ())
    return running


def side_by_side(works: Sequence[Callable[[], None]]) -> None:
    """Does them all at the same time, and comes back when all are done. None of them may raise."""
    running = []
    for work in works[1:]:
        try:
            running.append(start(work))
        except RuntimeError:  # too late for new threads: the interpreter is ending
            work()
    for work in works[:1]:
        work()
    for one in running:
        one.wait()


MOST_SECONDS = 60.0
_moving: set[object] = set()


def finish() -> None:
    """Waits for work that goes on though nobody waits for it any more: an interpreter that ends would cut it in
    half."""
    until = time.monotonic() + MOST_SECONDS
    while _moving and time.monotonic() < until:
        time.sleep(0.01)


def uninterrupted(work: Callable[[], Any]) -> Any:
    """Runs `work` in a thread of its own, where no KeyboardInterrupt is delivered, and waits for it.

    An interrupt ends the waiting, not the work: a move once begun finishes, and settles itself.
    """
    outcome: list[Any] = []

    def run() -> None:
        _moving.add(mark := object())
        try:
            outcome.append((work(), None))
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            outcome.append((None, error))
        finally:
            _moving.discard(mark)

    threads.start(run).wait()
    result, error = outcome[0]
    if error is not None:
        raise error
    return result
