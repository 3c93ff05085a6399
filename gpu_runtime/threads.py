"""Threads that the stop button cannot strike while they are started."""
from __future__ import annotations

import _thread
import contextlib
from collections.abc import Callable, Sequence


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
