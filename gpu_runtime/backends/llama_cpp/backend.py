"""The backend for GGUF models, which llama-cpp-python runs in a worker process or in this process.

An out-of-memory error or a failed check in llama.cpp ends the process in which it runs. So a worker
process is the default: after a crash the caller gets one error, and nothing else is affected.
`isolated=False` loads the model into this process. Users get the same kind of object in both cases.
llama.cpp cannot move a loaded model, so an evicted model is dropped, and loaded again later.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ... import threads
from ...devices.probe import Probe
from ...devices.process_memory import out_of_memory
from ...errors import BadCall, EngineDied, EngineFault, GpuError, LoadFailed, ProcessLost
from ...facts import Evidence, ModelSpec, Shares
from ...fault_texts import MOST_DECODE_FAILURES, Fault, Kind, decode_failures, last_line, recognise
from ...files import new_log
from ..base import Progress
from ..processes.engine import (
    Child,
    Engine,
    EngineBackend,
    EngineHandle,
    EngineModel,
    card_environment,
    in_words,
    python_file,
)
from . import worker
from .options import (
    gguf_evidence,
    gguf_file,
    gpu_layers,
    llama_arguments,
    offloaded,
    taken,
    waiting_environment,
)
from .worker import METHODS, OUR_METHODS

# -- calls to a model in a worker: channels, requests, answers, streams and cancellation
#
# The worker is a process behind a socket, or a thread of this process. `worker.py` defines the
# messages.
#
# If an engine ends by itself, its watcher is called once, before any caller gets the error. The
# watcher frees the lease. So when a caller gets the error, the memory is free already.

STOP_SECONDS = 10.0  # for a thread to notice that it should end
_CALLER_ERRORS = frozenset(  # classes of the errors that the caller caused, not the engine
    "ValueError TypeError KeyError IndexError AttributeError NotImplementedError AssertionError "
    "RecursionError UnicodeDecodeError TemplateError UndefinedError TemplateSyntaxError".split()
)
_LLAMA_ERROR = re.compile(r"error loading model: (.+)")  # in llama.cpp's log


class Channel:
    """The base of channels: messages to and from one worker."""

    child: Child | None = None  # the worker process, if there is one

    def send(self, message: dict[str, Any]) -> None:
        """Sends `message`, also to a worker that has ended. Raises TypeError if it cannot be sent."""
        raise NotImplementedError

    def receive(self) -> dict[str, Any] | None:
        """Waits for the next message; None if there are no more messages."""
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
        line = worker.to_line(message)
        with self._sending, contextlib.suppress(OSError):  # the worker is gone: see `receive`
            self._socket.sendall(line)

    def receive(self) -> dict[str, Any] | None:
        try:
            line = self._file.readline(worker.LONGEST_LINE)
            return worker.from_line(line) if line.endswith(b"\n") else None
        except (OSError, ValueError):  # closed here, or not a message: the worker is ended
            return None

    def close(self) -> None:
        assert self.child is not None
        self.child.end()
        with contextlib.suppress(OSError):  # the worker closed its end first
            # This wakes the reading thread. The file is closed when that thread has ended.
            self._socket.shutdown(socket.SHUT_RDWR)
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
        self._inbox.take(message)

    def receive(self) -> dict[str, Any] | None:
        return self._answers.get()

    def close(self) -> None:
        self._inbox.take(None)
        self._running.wait(STOP_SECONDS)


class LlamaEngine(Engine):
    """A model that is called through a channel, one call after the other. Thread-safe."""

    def __init__(self, name: str, channel: Channel, log: Path | None) -> None:
        """An engine for the model `name` over `channel`. Error messages name the file `log`."""
        super().__init__()
        self.name, self.log = name, log
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
        return (self.pid,) if self.pid else ()

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
            return message["loaded"]
        except BaseException:
            self.end()
            raise

    def _load_error(self, failure: dict[str, str]) -> GpuError:
        kind, text = failure["type"], failure["text"]
        needs = ""
        if kind == "NoOffload":
            needs = (
                "a GPU, and this build of llama-cpp-python has no GPU support: it would run on the CPU.\n"
                "  Build it with:  CMAKE_ARGS=-DGGML_CUDA=on pip install --force-reinstall "
                "--no-cache-dir llama-cpp-python\n  Or run it on the CPU:  gpu_layers=0"
            )
        if kind in ("ModuleNotFoundError", "ImportError"):
            needs = (
                f"llama-cpp-python, which is not installed here ({text}).\n"
                f"  Install it:  pip install 'gpu-console[llama]'"
            )
        if needs:
            words = f"{self.name} needs {needs}"
            return LoadFailed(words, name=self.name, source="", why=text, mistake=True)
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

    @property
    def _log_line(self) -> str:
        return f"\n  Its log:  {self.log}" if self.log else ""

    # -- its end

    def end(self) -> None:
        self._wanted = False
        text = f"{self.name} was unloaded; its next use loads it again."
        self._close(self._died(text, "ended", "it was unloaded"))

    def _died(self, text: str, kind: str, why: str, status: int | None = None) -> EngineDied:
        facts = {"pid": self.pid, "status": status, "kind": kind, "why": why}
        return EngineDied(text, name=self.name, log=str(self.log or ""), **facts)

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
        """Passes each message to the caller that waits for it, in a thread, until the channel ends."""
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
        text = (
            f"the engine of {self.name} (pid {self.pid}) is gone: {why}.\n"
            f"  Its memory is free; the next use of {self.name} loads it again.{self._log_line}"
        )
        return self._died(text, kind.value, why, status)

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
        number, answers = self._send_call(method, args, kwargs, cancelled)
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
        number, answers = self._send_call(method, args, kwargs, cancelled)
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
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cancelled: threads.Cancellation | None,
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
        if cancelled is not None:
            cancelled.then(lambda: self.cancel(number))
        return number, answers

    def _outcome(self, method: str, message: dict[str, Any]) -> Any:
        """The result in the last `message` of a call of `method`. Raises the error of the call."""
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
        """The error for a fault of the engine with the message `text`; `fault` is None if it is unknown.

        Closes the engine if the model must be loaded again, or if this process has lost the GPU.
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
            again = f"the next use of {self.name} loads it again, in a new worker"
            consequence = f"It was unloaded; {again}."
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


# -- the backend


class LlamaModel(EngineModel[LlamaEngine]):
    """The object that `use` yields: a proxy with the methods of `llama_cpp.Llama`.

    `create_chat_completion(messages, stream=True)` returns an iterator; closing the iterator ends
    the generation. If the model was evicted, a call first loads it again. If no runtime manages the
    model, the call raises NotResident. So a call never reaches a closed model. Every method also
    takes `cancelled`, a `threads.Cancellation`. Setting it, in any thread, ends the call at once.
    """

    def __repr__(self) -> str:
        return f"<llama.cpp {self.name} on {self._where if self._engine else 'disk'}>"

    def __getattr__(self, name: str) -> Any:
        if name in ("metadata", "chat_format"):
            return self._call(name, (), {})
        if name in METHODS + OUR_METHODS:
            return lambda *args, **kwargs: self._call(name, args, kwargs)
        raise AttributeError(
            f"{self.name} has no {name!r}; a llama.cpp model has {', '.join(METHODS)}"
        )

    @property
    def pid(self) -> int | None:
        """The process id of the worker. None if the model runs in this process or is not loaded."""
        return self._engine.pid if self._engine else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("__call__", args, kwargs)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *METHODS]

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("stream"):
            return self._stream(method, args, kwargs)
        cancelled = kwargs.pop("cancelled", None)
        with self._calls_under():
            return self._loaded_engine().ask(method, args, kwargs, cancelled)

    def _stream(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
        cancelled = kwargs.pop("cancelled", None)
        with self._calls_under():  # the model stays pinned until the iterator ends
            yield from self._loaded_engine().stream(method, args, kwargs, cancelled)


LlamaHandle = EngineHandle[LlamaEngine, LlamaModel]


class LlamaCppBackend(EngineBackend[LlamaHandle, LlamaModel]):
    """Loads GGUF files.

    The options of a model are context_length, sequences, cache_dtype, flash_attn, gpu_layers,
    main_gpu, split_mode, embedding, revision, isolated, and those in `options.PASSED_TO_LLAMA`.
    """

    name, engine_name = "llama_cpp", "llama.cpp"
    model_type = LlamaModel

    def __init__(self, probe: Probe) -> None:
        self.probe = probe

    def evidence(self, spec: ModelSpec, origin: Any = None) -> Evidence:
        return gguf_evidence(spec)

    def runs_here(self, spec: ModelSpec) -> bool:
        return not spec.options.get("isolated", True)

    def _prepared(
        self, spec: ModelSpec, shares: Shares, report: Progress
    ) -> tuple[LlamaEngine, Callable[[LlamaModel], Shares]]:
        found = self.evidence(spec)
        path = str(gguf_file(spec))
        arguments = llama_arguments(spec, shares, path, found.config, self._card_numbers(shares))
        isolated = not self.runs_here(spec)
        arguments["verbose"] = isolated  # a worker's output goes to its log
        total = sum(share.bytes for share in shares)
        report(0, total)
        engine = LlamaEngine(spec.name, *self._open_channel(spec, shares, isolated))

        def start(value: LlamaModel) -> Shares:
            facts = engine.load(arguments, lambda part: report(int(total * part), total))
            part = offloaded(spec, found.config)
            if engine.pid is None:
                charged, numbers = {}, self._card_numbers(shares)
            else:  # the driver's figures include the worker's CUDA context
                devices = tuple(share.device for share in shares)
                charged, numbers = self.probe.charged(engine.pid, devices), None
            report(total, total)
            return taken(facts, shares, part, charged, numbers)

        return engine, start

    def _card_numbers(self, shares: Shares) -> tuple[int, ...] | None:
        """The numbers that the cards of `shares` have in this process. None for simulated cards."""
        names = [self.probe.place(share.device).torch for share in shares]
        if "cpu" in names:
            return None
        return tuple(int(name.partition(":")[2] or 0) for name in names)

    def _open_channel(
        self, spec: ModelSpec, shares: Shares, isolated: bool
    ) -> tuple[Channel, Path]:
        """A new channel to a worker, which is a process or a thread, and the path of its log."""
        log = new_log(spec.name)
        if isolated:
            cards = card_environment(self.probe, shares if gpu_layers(spec) else ())
            return ProcessChannel(log, {**os.environ, **waiting_environment(), **cards}), log

        def append_to_log(line: str) -> None:
            with open(log, "a") as file:
                file.write(line)

        return ThreadChannel(append_to_log), log
