"""Calls to a llama.cpp model in a worker: requests, answers, streams and cancellation.

If an engine ends by itself, its watcher is called once, before any caller gets the error. The
watcher frees the lease. So when a caller gets the error, the memory is free already.
"""

from __future__ import annotations

import itertools
import queue
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ... import threads
from ...devices.process_memory import out_of_memory
from ...errors import BadCall, EngineDied, EngineFault, GpuError, LoadFailed, ProcessLost
from ...fault_texts import (
    MOST_DECODE_FAILURES,
    Fault,
    Kind,
    decode_failures,
    last_line,
    recognise,
)
from ..processes.engine import Engine
from ..processes.processes import in_words
from .channels import Channel

_CALLER_ERRORS = (  # classes of the errors that the caller caused, not the engine
    "ValueError",
    "TypeError",
    "KeyError",
    "IndexError",
    "AttributeError",
    "NotImplementedError",
    "AssertionError",
    "RecursionError",
    "UnicodeDecodeError",
    "TemplateError",
    "UndefinedError",
    "TemplateSyntaxError",
)
_LLAMA_ERROR = re.compile(r"error loading model: (.+)")  # in llama.cpp's log


class LlamaEngine(Engine):
    """A model that is called through a channel. Thread-safe. Calls are answered one after the
    other.
    """

    def __init__(self, name: str, channel: Channel, log: Path | None) -> None:
        """An engine for the model `name` over `channel`. Error messages name the file `log`."""
        super().__init__()
        self.name, self.log = name, log
        self.facts: dict[str, Any] = {}
        self._channel = channel
        self._numbers = itertools.count(1)
        self._pending: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._load_messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._failures = 0  # decode failures in a row
        threads.start(self._read)

    @property
    def pid(self) -> int | None:
        """The process id of the worker. None for a model in this process."""
        return self._channel.child.pid if self._channel.child else None

    @property
    def pids(self) -> tuple[int, ...]:
        """The process id of the worker as a tuple; empty without a worker."""
        return (self.pid,) if self.pid else ()

    @property
    def alive(self) -> bool:
        """Whether the engine can still answer calls."""
        return self.error is None

    # -- the load

    def load(
        self, arguments: dict[str, Any], progress: Callable[[float], None] | None
    ) -> dict[str, Any]:
        """Loads the model with these `arguments` of Llama. Returns the worker's facts about it.

        `progress` is called with the finished part of the load, from 0 to 1. After any failure, an
        interrupt included, the engine ends. Raises LoadFailed, and the device's out-of-memory
        error.
        """
        try:
            self._channel.send({"load": arguments})
            while "loaded" not in (message := threads.next_item(self._load_messages)):
                if "failed" in message:
                    raise self._load_error(message["failed"])
                if "over" in message:
                    raise self._load_error({"type": "", "text": ""}) from self.error
                if progress:
                    progress(message["progress"])
            self.facts = message["loaded"]
            return self.facts
        except BaseException:
            self.end()
            raise

    def _load_error(self, failure: dict[str, str]) -> GpuError:
        """The error for a load whose `failure` the worker reported."""
        kind, text = failure["type"], failure["text"]
        if kind == "NoOffload":
            return self._no_gpu_support(text)
        if kind in ("ModuleNotFoundError", "ImportError"):
            return LoadFailed(
                f"{self.name} needs llama-cpp-python, which is not installed here ({text}).\n"
                f"  Install it:  pip install 'gpu-console[llama]'",
                name=self.name,
                source="",
                why=text,
                mistake=True,
            )
        log = self._channel.child.tail() if self._channel.child else ""
        fault = recognise(f"{text}\n{log}")
        if fault is not None and fault.kind is Kind.OUT_OF_MEMORY:
            return out_of_memory(fault.line)
        why = fault.line if fault else text or last_line(log) or "its process ended"
        named = _LLAMA_ERROR.search(log)  # `text` names only the file
        if named and not fault:
            why = f"{why} ({named[1].strip()})"
        return LoadFailed(
            f"{self.name} could not be loaded: {why}.{self._log_line}",
            name=self.name,
            source="",
            why=why,
            kind=fault.kind.value if fault else "",
            log=str(self.log or ""),
            mistake=text.startswith("Model path does not exist"),
        )

    def _no_gpu_support(self, why: str) -> LoadFailed:
        return LoadFailed(
            f"{self.name} needs a GPU, and this build of llama-cpp-python has no GPU support: it would run "
            f"on the CPU.\n"
            f"  Build it with:  CMAKE_ARGS=-DGGML_CUDA=on pip install --force-reinstall --no-cache-dir "
            f"llama-cpp-python\n  Or run it on the CPU:  gpu_layers=0",
            name=self.name,
            source="",
            why=why,
            mistake=True,
        )

    @property
    def _log_line(self) -> str:
        return f"\n  Its log:  {self.log}" if self.log else ""

    # -- its end

    def end(self) -> None:
        """Ends the engine and all processes and threads that it started. A repeated call does
        nothing.
        """
        self._wanted = False
        self._close(
            EngineDied(
                f"{self.name} was unloaded; its next use loads it again.",
                name=self.name,
                pid=self.pid,
                status=None,
                kind="ended",
                why="it was unloaded",
                log=str(self.log or ""),
            )
        )

    def _close(self, error: GpuError) -> None:
        """Ends the engine. Waiting calls raise `error`, or the error of an earlier end."""
        with self._changed:
            # The error is set before the channel is closed. When the reading thread finds the
            # channel closed, it calls this method with another error, which then has no effect.
            self.error = self.error or error
        self._channel.close()
        self._report_loss()
        if self._reporting:
            # The watcher has made this call, and an outer call of this method waits for the
            # watcher. The outer call then wakes the waiting callers.
            return
        with self._changed:
            waiting, self._pending = list(self._pending.values()), {}
        self._load_messages.put({"over": True})
        for answers in waiting:
            answers.put({"over": True})

    def _read(self) -> None:
        """Passes each message to the caller that waits for it, until the channel ends.

        Runs in a separate thread.
        """
        while (message := self._channel.receive()) is not None:
            number = message.get("id")
            if number is None:
                self._load_messages.put(message)
                continue
            with self._changed:
                answers = self._pending.get(number)
                if answers is not None and "item" not in message:
                    del self._pending[number]
            if answers is not None:
                answers.put(message)
        self._close(self._death())

    def _death(self) -> GpuError:
        """The error for an engine that ended by itself, with the reason that its log shows."""
        child = self._channel.child
        status = child.end() if child else None
        fault = recognise(child.tail() if child else "")
        kind = fault.kind if fault else Kind.CRASH
        how = in_words(status) if status is not None else "its thread ended"
        why = f"{how}: {fault.line}" if fault else how
        return EngineDied(
            f"the engine of {self.name} (pid {self.pid}) is gone: {why}.\n"
            f"  Its memory is free; the next use of {self.name} loads it again.{self._log_line}",
            name=self.name,
            pid=self.pid,
            status=status,
            kind=kind.value,
            why=why,
            log=str(self.log or ""),
        )

    # -- calls

    def ask(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cancelled: threads.Cancellation | None = None,
    ) -> Any:
        """The result of the model's `method`, called with `args` and `kwargs`.

        Setting `cancelled` cancels the call, and the result is then None. Raises BadCall,
        EngineDied, EngineFault, ProcessLost, and the device's out-of-memory error.
        """
        number, answers = self._send_call(method, args, kwargs)
        if cancelled is not None:
            cancelled.then(lambda: self.cancel(number))
        try:
            message = answers.get()
        except BaseException:  # after an interrupt, the engine need not continue
            self.cancel(number)
            raise
        return self._outcome(method, message)

    def stream(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cancelled: threads.Cancellation | None = None,
    ) -> Iterator[Any]:
        """Yields the items that the model's `method` produces, called with `args` and `kwargs`.

        If the iterator is closed before its end, or `cancelled` is set, the engine stops computing.
        Raises the errors of `ask`.
        """
        number, answers = self._send_call(method, args, kwargs)
        if cancelled is not None:
            cancelled.then(lambda: self.cancel(number))
        done = False
        try:
            while True:
                message = answers.get()
                if "item" not in message:
                    done = True
                    last = self._outcome(method, message)
                    if last is not None:
                        yield last
                    return
                yield message["item"]
        finally:
            if not done:
                self.cancel(number)

    def cancel(self, number: int) -> None:
        """Cancels the call with this `number`, because its answer is no longer wanted.

        A thread that waits for the answer gets None at once.
        """
        with self._changed:
            answers = self._pending.pop(number, None)
        if answers is not None:  # the call has not ended
            self._channel.send({"cancel": number})
            answers.put({"end": None})

    def _send_call(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int, queue.SimpleQueue[Any]]:
        """Sends a call. Returns the number of the call and the queue of its answers."""
        answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with self._changed:
            self.require()
            number = next(self._numbers)
            self._pending[number] = answers
        try:
            self._channel.send({"id": number, "call": method, "args": list(args), "kwargs": kwargs})
        except TypeError as error:
            with self._changed:
                self._pending.pop(number, None)
            raise BadCall(
                f"{self.name}: {method} got an argument that an isolated model cannot take: {error}.\n"
                f"  A model in this process accepts any object:  "
                f"rt.register({self.name!r}, …, isolated=False)",
                name=self.name,
                method=method,
                why=str(error),
            ) from None
        return number, answers

    def _outcome(self, method: str, message: dict[str, Any]) -> Any:
        """The result in `message`, the last message of a call of `method`.

        If the call has failed, raises the error of the call.
        """
        if "over" in message:
            self.require()  # raises: the engine has ended
        if "end" in message:
            self._failures = 0
            return message["end"]
        kind, text = message["error"]["type"], message["error"]["text"]
        # The text of a caller's error may quote the caller's input. So do not search it for faults.
        fault = None if kind in _CALLER_ERRORS else recognise(text)
        self._failures = decode_failures(self._failures, fault)
        if kind in _CALLER_ERRORS:
            raise BadCall(
                f"{self.name} refused {method}: {text}.", name=self.name, method=method, why=text
            )
        if fault is not None and fault.kind is Kind.OUT_OF_MEMORY:
            raise out_of_memory(f"{self.name}: {fault.line}")
        raise self._fault_error(fault, text)

    def _fault_error(self, fault: Fault | None, text: str) -> EngineFault | ProcessLost:
        """The error for a fault of the engine. `fault` is None if the fault is unknown.

        `text` is the engine's message. Closes the engine if the model must be loaded again, or if
        this process has lost the GPU.
        """
        kind = fault.kind.value if fault else "error"
        line = (fault.line if fault else text).strip().rstrip(".")
        if fault is not None and fault.loses_context and self.pid is None:
            lost = self._process_lost(kind, line)
            self._close(lost)
            return lost
        reloads = fault is not None and (
            fault.clears_model or self._failures >= MOST_DECODE_FAILURES
        )
        times = f", {self._failures} times in a row" if self._failures > 1 else ""
        consequence = "It is still loaded."
        if reloads:
            consequence = (
                f"It was unloaded; the next use of {self.name} loads it again, in a new worker."
            )
        error = EngineFault(
            f"{self.name} failed{times} ({kind}): {line}.\n  {consequence}",
            name=self.name,
            kind=kind,
            why=line,
            log=str(self.log or ""),
            reloads=reloads,
        )
        if reloads:
            self._close(error)
        return error

    def _process_lost(self, kind: str, line: str) -> ProcessLost:
        return ProcessLost(
            f"this process can no longer use the GPU: {self.name}, which runs in it, failed ({kind}):\n"
            f"  {line}.\n"
            f"  Restart the kernel. With a worker of its own (isolated=True) only that worker would have "
            f"been lost.",
            name=self.name,
            kind=kind,
            why=line,
        )
