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
from ..errors import BadSetting
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
        """Adds `facts` to the line of this call. Seconds are rounded to milliseconds there."""
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
        """The answer is made in this block. At its end the line is written; for a stream, its sender does it."""
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
current = _current.get  # the record of the call that this task answers


def open_log(target: str | None) -> None:
    """Writes the log's lines to the file `target`; to standard error if that is "-"; nowhere if it is None.

    Raises BadSetting if the file cannot be opened, or if it is a pipe or a device.
    """
    if target is None:
        return
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if target != STDERR:
        try:
            limited_files.open_regular(target, to_append=True).close()
            handler = WatchedFileHandler(target)  # follows a program that rotates the file
        except OSError as error:
            expected = f"a file that can be written ({error.strerror or error}), or -"
            raise BadSetting("GPU_SERVE_LOG", target, expected) from None
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)


def reopen_log() -> None:
    """Opens the log's file again if it was renamed or removed, before the next call needs it. An error is logged."""
    for handler in log.handlers:
        if isinstance(handler, WatchedFileHandler):
            try:
                handler.reopenIfNeeded()
            except OSError as error:
                logging.getLogger("gpu_runtime").warning(
                    "the request log cannot be opened: %s", error
                )
