"""Channels to a llama.cpp worker, which is a process behind a socket or a thread of this process.

A channel carries the messages that `worker.py` defines. `rpc.py` turns the messages into results
and errors.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ... import threads
from ..processes.processes import Child, python_file
from . import worker

STOP_SECONDS = 10.0  # for a thread to notice that it should end


class Channel:
    """The base of channels: messages to and from one worker."""

    child: Child | None = None  # the worker process, if there is one

    def send(self, message: dict[str, Any]) -> None:
        """Sends `message`. Raises TypeError if `message` cannot be sent.

        If the worker has ended, this method does not fail, and `receive` returns None.
        """
        raise NotImplementedError

    def receive(self) -> dict[str, Any] | None:
        """Waits for the next message and returns it. Returns None if there are no more messages."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the worker, and wakes the thread that waits in `receive`."""
        raise NotImplementedError


class ProcessChannel(Channel):
    """A channel to a worker process: lines of JSON over a socket that no other process has."""

    def __init__(self, log: Path, env: dict[str, str]) -> None:
        """Starts the worker with the environment `env`. Its output goes to the file `log`."""
        self._socket, worker_end = socket.socketpair()
        with worker_end:
            program = python_file(Path(worker.__file__))
            command = [*program, str(worker_end.fileno()), str(os.getpid())]
            self.child = Child(command, log=log, env=env, fds=(worker_end.fileno(),))
        self._file = self._socket.makefile("rb")
        self._sending = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Sends `message` as one line. Raises TypeError for a value that JSON cannot hold."""
        line = worker.to_line(message)
        with self._sending:
            try:
                self._socket.sendall(line)
            except OSError:  # the worker is gone: `receive` reports it
                pass

    def receive(self) -> dict[str, Any] | None:
        """Waits for the next message and returns it.

        Returns None if the socket is closed, or if a line is not a message.
        """
        try:
            line = self._file.readline(worker.LONGEST_LINE)
            return worker.from_line(line) if line.endswith(b"\n") else None
        except (OSError, ValueError):  # closed here, or not a message: the worker is ended
            return None

    def close(self) -> None:
        """Ends the worker and closes the socket."""
        assert self.child is not None
        self.child.end()
        try:
            # This wakes the reading thread. The file is closed when that thread has ended.
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the worker closed its end first
            pass
        self._socket.close()


class ThreadChannel(Channel):
    """A channel to a thread of this process. Any object can be sent."""

    def __init__(self, log: Callable[[str], None]) -> None:
        """Starts the thread. `log` is called with each line that llama.cpp prints."""
        self._inbox = worker.Inbox()
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._running = threads.start(lambda: self._run(log))

    def _run(self, log: Callable[[str], None]) -> None:
        try:
            worker.work(self._inbox, self._answers.put, log)
        finally:
            self._answers.put(None)

    def send(self, message: dict[str, Any]) -> None:
        """Puts `message` into the thread's inbox."""
        self._inbox.take(message)

    def receive(self) -> dict[str, Any] | None:
        """Waits for the next message and returns it. Returns None once the thread has ended."""
        return self._answers.get()

    def close(self) -> None:
        """Requests the end of the thread, and waits for it up to STOP_SECONDS."""
        self._inbox.take(None)
        self._running.wait(STOP_SECONDS)
