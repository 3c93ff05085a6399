"""The backend for GGUF models, which llama-cpp-python runs in a worker process or in this process.

An out-of-memory error or a failed check in llama.cpp ends the process in which it runs. So a worker
process is the default: after a crash the caller gets one error, and nothing else is affected.
`isolated=False` loads the model into this process. Users get the same kind of object in both cases.
llama.cpp cannot move a loaded model. An evicted model sleeps: its worker frees all of it, and loads it
again when it wakes, which takes a fraction of the time of a new process.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ... import threads
from ...devices.probe import Probe
from ...devices.process_memory import out_of_memory
from ...errors import BadCall, EngineFault, GpuError, LoadFailed, ProcessLost
from ...facts import Evidence, ModelSpec, Shares
from ...fault_texts import MOST_DECODE_FAILURES, Fault, Kind, decode_failures, last_line, recognise
from ...files import child_environment, new_log
from ..base import Progress
from ..processes import engine
from ..processes.engine import (
    Child,
    Engine,
    EngineBackend,
    EngineHandle,
    EngineModel,
    card_environment,
    in_words,
)
from ..processes.remote_calls import Ended, Failed, MessageSocket, Requests, pack
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

# -- calls to a model in a worker
#
# The worker is a process behind a socket, or a thread of this process. Requests and answers are as in
# `processes/remote_calls.py`.
#
# If an engine ends by itself, its watcher is called once, before any caller gets the error. The
# watcher frees the lease. So when a caller gets the error, the memory is free already.

STOP_SECONDS = 10.0  # for a thread to notice that it should end
_CALLER_ERRORS = frozenset(  # classes of the errors that the caller caused, not the engine
    "ValueError TypeError KeyError IndexError AttributeError NotImplementedError AssertionError "
    "RecursionError UnicodeDecodeError TemplateError UndefinedError TemplateSyntaxError".split()
)
_LLAMA_ERROR = re.compile(r"error loading model: (.+)")  # in llama.cpp's log


class Thread:
    """A worker in a thread of this process. Any object can be sent to it."""

    def __init__(self, log: Callable[[str], None]) -> None:
        """Starts the thread. `log` is called with each line that llama.cpp prints."""
        self._inbox = worker.Inbox()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._running = threads.start(lambda: self._run(log))

    def _run(self, log: Callable[[str], None]) -> None:
        try:
            worker.work(self._inbox, lambda *answer: self._answers.put(answer), log)
        finally:
            self._answers.put(None)

    def send(self, message: Any) -> None:
        """Sends the `message`, also to a thread that has ended."""
        self._inbox.take(message)

    def receive(self) -> Any:
        """The next answer. Raises EOFError if there are no more."""
        if (answer := self._answers.get()) is None:
            raise EOFError
        return answer

    def close(self) -> None:
        """Ends the thread, and waits for its end."""
        self._inbox.take(None)
        self._running.wait(STOP_SECONDS)


class LlamaEngine(Engine):
    """A model in a worker, which computes one call after the other. Thread-safe."""

    title = "engine"

    def __init__(
        self, name: str, log: Path, connection: MessageSocket | Thread, child: Child | None
    ) -> None:
        """The model `name` in the worker behind the `connection`; `child` is the worker's process, if any.

        The worker's output is in the file `log`.
        """
        super().__init__(name, log)
        self._connection, self._child = connection, child
        self._failures = 0  # decode failures in a row
        self._load_seconds = 0.0
        self.bytes_asleep = 0  # of the worker itself
        self._requests = Requests(connection, on_end=self._ended)

    @property
    def pid(self) -> int | None:
        """The process id of the worker. None for a model in this process."""
        return self._child.pid if self._child else None

    @property
    def pids(self) -> tuple[int, ...]:
        return (self.pid,) if self.pid else ()

    # -- the load, sleep

    def load(
        self, arguments: dict[str, Any], progress: Callable[[float], None] | None
    ) -> dict[str, Any]:
        """Loads the model with these `arguments` of Llama. Returns the worker's facts about it.

        `progress` is called with the finished part of the load, from 0 to 1. After any failure, an
        interrupt included, the engine ends. Raises LoadFailed, and the device's out-of-memory error.
        """
        began = time.perf_counter()
        try:
            for found in self._requests.stream("load", arguments):
                if isinstance(found, dict):
                    self._load_seconds = time.perf_counter() - began
                    return found
                if progress:
                    progress(found)
            raise Ended
        except (Failed, Ended) as error:
            raise self._load_error(error) from None
        finally:
            if not self._load_seconds:
                self.end()

    def sleep_or_wake(self, verb: str) -> str:
        """As `Engine.sleep_or_wake`. It has as much time as its load took, at least LEAST_CHANGE_SECONDS."""
        seconds = max(engine.LEAST_CHANGE_SECONDS, self._load_seconds)
        try:
            self._requests.request(verb, seconds=seconds)
        except TimeoutError:
            return "it did not answer in time"
        except Failed as error:
            return error.text
        except Ended:
            self.require()
        return ""

    def _load_error(self, error: Failed | Ended) -> GpuError:
        kind, text = error.args if isinstance(error, Failed) else ("", "")
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
        log = self._child.tail() if self._child else ""
        fault = recognise(f"{text}\n{log}")
        why = fault.line if fault else text or last_line(log) or "its process ended"
        named = _LLAMA_ERROR.search(log)  # `text` names only the file
        if named and not fault:
            why = f"{why} ({named[1].strip()})"
        mistake = text.startswith("Model path does not exist")
        return self._failed_load(why, fault, mistake=mistake)

    # -- its end

    def end(self) -> None:
        self._wanted = False
        text = f"{self.name} was unloaded; its next use loads it again."
        self._close(self.died("ended", text, "it was unloaded", pid=self.pid))

    def _close(self, error: GpuError) -> None:
        """Ends the engine. Waiting calls raise `error`, or the error of an earlier end."""
        with self._changed:
            self.error = self.error or error
        if self._child:
            self._child.end()
        else:
            self._connection.close()
        self._report_loss()

    def _ended(self) -> None:
        """Called in the thread that reads the answers, before waiting calls get their error.

        The loss is in the book by then. It may be reported in another thread, whose call has failed.
        """
        status = self._child.end() if self._child else None
        fault = recognise(self._child.tail() if self._child else "")
        kind = fault.kind if fault else Kind.CRASH
        how = in_words(status) if status is not None else "its thread ended"
        why = f"{how}: {fault.line}" if fault else how
        text = (
            f"the engine of {self.name} (pid {self.pid}) is gone: {why}.\n"
            f"  Its memory is free; the next use of {self.name} loads it again."
        )
        self._close(self.died(kind, text, why, status, self.pid))
        with self._changed:
            self._changed.wait_for(lambda: not self._reporting)

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
        given = self._given(method, args, kwargs)
        with self._errors_of(method):
            return self._requests.request("call", method, given, cancelled=cancelled)

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
        given = self._given(method, args, kwargs)
        with self._errors_of(method):
            yield from self._requests.stream("call", method, given, cancelled=cancelled)

    def _given(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of a call as they are sent. Raises BadCall, and the error of an ended engine."""
        self.require()
        if self._child is None:
            return args, kwargs
        try:
            return pack((args, kwargs), share=False)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise BadCall(
                f"{self.name}: {method} got an argument that an isolated model cannot take: {error}.\n"
                f"  A model in this process accepts any object:  "
                f"rt.register({self.name!r}, …, isolated=False)",
                name=self.name,
                method=method,
                why=str(error),
            ) from None

    @contextlib.contextmanager
    def _errors_of(self, method: str) -> Iterator[None]:
        """A context manager for a call of `method`, whose errors it raises as those of `ask`."""
        try:
            yield
            self._failures = 0
        except Ended:
            self.require()  # raises: the engine has ended
        except Failed as error:
            raise self._call_error(method, error) from None

    def _call_error(self, method: str, error: Failed) -> Exception:
        kind, text = error.kind, error.text
        # The text of a caller's error may quote the caller's input. So do not search it for faults.
        fault = None if kind in _CALLER_ERRORS else recognise(text)
        self._failures = decode_failures(self._failures, fault)
        if kind in _CALLER_ERRORS:
            refused = f"{self.name} refused {method}: {text}."
            return BadCall(refused, name=self.name, method=method, why=text)
        if fault is not None and fault.kind is Kind.OUT_OF_MEMORY:
            return out_of_memory(f"{self.name}: {fault.line}")
        return self._fault_error(fault, text)

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
        return f"<llama.cpp {self.name} on {self._where or 'disk'}>"

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
    can_move = True
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
        engine = self._engine(spec, shares, isolated)

        def start(value: LlamaModel) -> Shares:
            facts = engine.load(arguments, lambda part: report(int(total * part), total))
            engine.bytes_asleep = facts["own_bytes"]
            part = offloaded(spec, found.config)
            if engine.pid is None:
                charged, numbers = {}, self._card_numbers(shares)
            else:  # the driver's figures include the worker's CUDA context
                charged, numbers = self._on_cards((engine.pid,), shares), None
            report(total, total)
            return taken(facts, shares, part, charged, numbers)

        return engine, start

    def _bytes_asleep(self, spec: ModelSpec, handle: LlamaHandle) -> int:
        """The bytes of the worker itself."""
        return handle.engine.bytes_asleep

    def _card_numbers(self, shares: Shares) -> tuple[int, ...] | None:
        """The numbers that the cards of `shares` have in this process. None for simulated cards."""
        names = [self.probe.place(share.device).torch for share in shares]
        if "cpu" in names:
            return None
        return tuple(int(name.partition(":")[2] or 0) for name in names)

    def _engine(self, spec: ModelSpec, shares: Shares, isolated: bool) -> LlamaEngine:
        """An engine with a new worker, which is a process if the model is `isolated`, else a thread."""
        log = new_log(spec.name)
        if isolated:
            cards = card_environment(self.probe, shares if gpu_layers(spec) else ())
            environment = {**child_environment(), **waiting_environment(), **cards}
            own, its = socket.socketpair()
            with its:
                command = [sys.executable, "-P", "-m", worker.__name__, str(its.fileno())]
                child = Child(
                    [*command, str(os.getpid())], log=log, env=environment, fds=(its.fileno(),)
                )
            return LlamaEngine(spec.name, log, MessageSocket(own), child)

        def append_to_log(line: str) -> None:
            with open(log, "a") as file:
                file.write(line)

        return LlamaEngine(spec.name, log, Thread(append_to_log), None)
