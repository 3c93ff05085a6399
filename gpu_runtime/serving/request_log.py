"""The request log: one line of JSON for each call, with the durations of the call's parts and its outcome.

The lines go to the logger `gpu_runtime.requests`. `open_log` writes them to a file. The lines contain no text of a
prompt or of an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from logging.handlers import WatchedFileHandler
from typing import Any

from .. import limited_files
from .requests import Refused

STDERR = "-"
request_id: ContextVar[str] = ContextVar("request_id", default="")
log = logging.getLogger("gpu_runtime.requests")
log.propagate = False  # otherwise other handlers would mix these lines with messages for people
log.addHandler(logging.NullHandler())
log.setLevel(logging.WARNING)  # so that no line is written before `open_log` is called


class CallRecord:
    """The facts of one call, which are written once, when the call has ended."""

    def __init__(self, clock: Callable[[], float], kind: str, client: str) -> None:
        """The record of a call of this `kind` by the visitor `client`. The call begins now, by the `clock`."""
        self._clock = clock
        self._began = clock()
        self._written = False
        # What the call waits for now, in words for its caller.
        self.state: Callable[[], str] = lambda: "waiting"
        self.loads = asyncio.Event()  # set once a model is brought to its device for the call
        self.streams = False  # whether the call ends only at the end of its stream
        self.facts: dict[str, Any] = {
            "time": round(time.time(), 3),
            "id": request_id.get(),
            "kind": kind,
            "client": client,
            "outcome": "cancelled",
        }

    def note(self, **facts: Any) -> None:
        """Adds `facts` to the line of this call, which has seconds rounded to milliseconds."""
        self.facts |= facts

    def note_end(self) -> None:
        """Adds the seconds since the call arrived."""
        self.note(seconds=self._clock() - self._began)

    def write(self) -> None:
        """Writes the line of this call. A second call of this method does nothing."""
        if self._written or not log.isEnabledFor(logging.INFO):
            return
        self._written = True
        self.note_end()
        line = {
            name: round(value, 3) if isinstance(value, float) else value
            for name, value in self.facts.items()
        }
        log.info(json.dumps(line, ensure_ascii=False))

    @contextlib.contextmanager
    def until_answered(self) -> Iterator[None]:
        """A context manager in which the answer is made. At its end the line is written.

        The line of a stream is written later: its sender calls `write` when the stream ends.
        """
        token = _current.set(self)
        try:
            yield
        except Refused as refused:
            self.note(outcome="refused", status=refused.status, code=refused.code)
            raise
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.note(outcome="failed", code=type(error).__name__)
            raise
        else:
            if self.streams:
                return
            self.note(outcome="answered")
        finally:
            _current.reset(token)
            if not self.streams:
                self.write()


_current: ContextVar[CallRecord] = ContextVar("call_record")


def current() -> CallRecord:
    """The record of the call that this task answers."""
    return _current.get()


def open_log(target: str | None) -> None:
    """Writes the log's lines to the file `target`; to standard error if `target` is "-"; nowhere if it is None.

    Raises OSError if the file cannot be opened, or if it is a pipe or a device.
    """
    if target is None:
        return
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if target != STDERR:
        limited_files.open_regular(target, to_append=True).close()
        handler = WatchedFileHandler(target)  # follows a program that rotates the file
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)


def reopen_log() -> None:
    """Opens the log's file again if it was renamed or removed, so that the file exists before the next call.

    An error is logged, and the next line tries again.
    """
    for handler in log.handlers:
        if isinstance(handler, WatchedFileHandler):
            try:
                handler.reopenIfNeeded()
            except OSError as error:
                logging.getLogger("gpu_runtime").warning(
                    "the request log cannot be opened: %s", error
                )
