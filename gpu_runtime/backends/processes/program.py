"""`Program`: a process that runs one model, and the requests to this process.

The process runs `model_program.py`. If it ends, `model_processes.py` starts a new one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ... import threads
from ..base import Progress
from .message_socket import MessageSocket
from .processes import STOP_SECONDS, guarded


class Ended(Exception):
    """Raised when the process has ended before it answered."""


class Program:
    """A process that runs `model_program.py`, and the requests to it."""

    def __init__(self, log: Path, progress: Progress | None) -> None:
        """Starts the process under a guard. Its output is appended to the file `log`.

        `progress` is called during the load, with bytes done and bytes in total.
        """
        own, its = socket.socketpair()
        self._messages = MessageSocket(own)
        with its:
            module, number = f"{__package__}.model_program", str(its.fileno())
            words = [sys.executable, "-P", "-m", module, number]
            self.child, self._line = guarded(words, log, {**os.environ}, [its.fileno()])
        self._numbers = itertools.count(1)
        self._pending: dict[int, queue.SimpleQueue[tuple[str, Any]]] = {}
        self._lock = threading.Lock()
        self._over = False
        self._progress = progress
        self.reading = threads.start(self._read)

    def request(self, kind: str, *args: Any) -> Any:
        """Sends a request of this `kind` with the arguments `args`, and returns its result.

        Raises the error of the request, or Ended if the process ends before it answers.
        """
        with self._answers(kind, args) as answers:
            what, value = threads.next_item(answers)
        if what == "result":
            return value
        try:
            raise value
        finally:
            del value  # else error and traceback keep each other alive until the next collection

    def stream(self, *args: Any) -> Iterator[Any]:
        """Sends a request "stream" with the arguments `args`, and yields its items.

        If the iterator is closed before its end, the process ends the stream after its next item.
        Raises the error of the request, or Ended.
        """
        with self._answers("stream", args) as answers:
            while True:
                what, value = answers.get()
                if what != "item":
                    break
                yield value
            try:
                if what == "error":
                    raise value
            finally:
                del value

    @contextlib.contextmanager
    def _answers(self, kind: str, args: tuple[Any, ...]) -> Iterator[queue.SimpleQueue[Any]]:
        """A context manager that sends a request, and yields the queue of its answers.

        The last answer is the request's result or its error. If a stream is left before this
        answer, the process gets a request to cancel it.
        """
        answers: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        number = next(self._numbers)
        self._send(number, kind, args, answers)
        try:
            yield answers
        finally:
            if self._pending.pop(number, None) and kind == "stream":
                with contextlib.suppress(Ended):  # the process has ended, and the stream with it
                    self._send(number, "cancel", (number,))

    def _send(self, number: int, kind: str, args: tuple[Any, ...], answers: Any = None) -> None:
        with self._lock:
            if self._over:
                raise Ended
            if answers is not None:
                self._pending[number] = answers
        try:
            self._messages.send((number, kind, args))
        except OSError:  # the process has just ended; the reading thread answers
            pass
        except BaseException:  # the request cannot be pickled
            self._pending.pop(number, None)
            raise

    def _read(self) -> None:
        """Puts each answer into the queue of its request, until the process ends.

        Runs in a separate thread.
        """
        try:
            while True:
                number, what, value = self._messages.receive()
                if what == "progress":
                    if self._progress:
                        self._progress(*value)
                    continue
                known = self._pending.get if what == "item" else self._pending.pop
                if answers := known(number, None):
                    answers.put((what, value))
        except (EOFError, OSError):  # the process has ended; `finally` answers its requests
            pass
        finally:
            with self._lock:
                self._over = True
                waiting = list(self._pending.values())
            self._messages.close()
            for answers in waiting:
                answers.put(("error", Ended()))

    def end(self) -> int:
        """Ends the process and everything that it started. Returns the exit status of its guard.

        A repeated call only returns this status.
        """
        self._line.close()
        self.child.wait(STOP_SECONDS + 1.0)
        return self.child.end()
