"""Calls to a model that computes elsewhere, in a process or a thread of its own: asked, answered, streamed, cancelled.

An engine that ends, by whatever way, says so once to whoever watches it, before any caller hears of it: when the error
is seen, the lease is free already.
"""

from __future__ import annotations

import itertools
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ... import threads
from ...devices.process_memory import out_of_memory
from ...errors import BadCall, EngineDied, EngineFault, GpuError, LoadFailed, ProcessLost
from ..fault_texts import MOST_DECODE_FAILURES, Fault, Kind, decode_failures, recognise
from ..processes.processes import Child, in_words
from . import worker

_REFUSED = (
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
STOP_SECONDS = 10.0  # for a thread to notice that it is to end
Lost = Callable[[str, str], None]  # kind and because


class Channel:
    """Messages to an engine, and from it; None once there will be no more."""

    child: Child | None = None

    def send(self, message: dict[str, Any]) -> None:
        """Never fails: where nobody is there any more, `receive` says so. Raises TypeError for what cannot be sent."""
        raise NotImplementedError

    def receive(self) -> dict[str, Any] | None:
        """The next message; waits for it."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends whoever computes there, and wakes who waits in `receive`."""
        raise NotImplementedError


class ProcessChannel(Channel):
    """To a process of its own, by lines of JSON over a socket that nobody else can reach."""

    def __init__(self, log: Path, env: dict[str, str]) -> None:
        import os

        ours, theirs = socket.socketpair()
        with theirs:
            command = [*worker_command(), str(theirs.fileno()), str(os.getpid())]
            self.child = Child(command, log=log, env=env, fds=(theirs.fileno(),))
        self._socket, self._file = ours, ours.makefile("rb")
        self._sending = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        line = worker.to_line(message)
        with self._sending:
            try:
                self._socket.sendall(line)
            except OSError:  # it is gone: whoever reads is told so
                pass

    def receive(self) -> dict[str, Any] | None:
        try:
            line = self._file.readline(worker.LONGEST_LINE)
            return worker.from_line(line) if line.endswith(b"\n") else None
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        assert self.child is not None
        self.child.end()
        try:
            self._socket.shutdown(
                socket.SHUT_RDWR
            )  # wakes whoever reads; the file is closed with its last reader
        except OSError:  # the other side was faster
            pass
        self._socket.close()


def worker_command() -> list[str]:
    from ..processes.processes import python_file

    return python_file(Path(__file__).with_name("worker.py"))


class ThreadChannel(Channel):
    """To a thread of this process. What is sent may be any object."""

    def __init__(self, told: Callable[[str], None]) -> None:
        self._desk = worker.Desk()
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._running = threads.start(lambda: self._run(told))

    def _run(self, told: Callable[[str], None]) -> None:
        try:
            worker.work(self._desk, self._answers.put, told)
        finally:
            self._answers.put(None)

    def send(self, message: dict[str, Any]) -> None:
        self._desk.take(message)

    def receive(self) -> dict[str, Any] | None:
        return self._answers.get()

    def close(self) -> None:
        self._desk.take(None)
        self._running.wait(STOP_SECONDS)


class Engine:
    """A loaded model at the other end of a channel. Thread-safe; calls are answered one after the other."""

    def __init__(self, name: str, channel: Channel, log: Path | None) -> None:
        self.name, self.log = name, log
        self._channel = channel
        self._numbers = itertools.count(1)
        self._pending: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._news: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()  # of the load
        self._lock = threading.Lock()
        self._over: GpuError | None = None  # why there is no more
        self._wanted = True  # False: it is ended on purpose
        self._lost: Lost | None = None
        self._told = self._telling = False
        self._failures = 0
        self.facts: dict[str, Any] = {}
        threads.start(self._read)

    @property
    def pid(self) -> int | None:
        return self._channel.child.pid if self._channel.child else None

    @property
    def alive(self) -> bool:
        return self._over is None

    # -- the load

    def load(
        self, order: dict[str, Any], progress: Callable[[float], None] | None
    ) -> dict[str, Any]:
        """What the model is, once it is loaded. On any failure, an interrupt too, nothing of the engine stays."""
        try:
            self._channel.send({"load": order})
            while "loaded" not in (news := self._news.get()):
                if "failed" in news:
                    raise self._load_error(news["failed"])
                if "over" in news:
                    raise self._load_error({"type": "", "text": ""}) from self._over
                if progress:
                    progress(news["progress"])
            self.facts = news["loaded"]
            return self.facts
        except BaseException:
            self.end()
            raise

    def _load_error(self, told: dict[str, str]) -> GpuError:
        kind, text = told["type"], told["text"]
        log = self._channel.child.tail() if self._channel.child else ""
        fault = recognise(f"{text}\n{log}")
        if kind == "NoOffload":
            return LoadFailed(
                f"{self.name} is to run on a GPU, and this build of llama-cpp-python has no GPU support: it would run "
                f"on the CPU.\n"
                f"  Build it with:  CMAKE_ARGS=-DGGML_CUDA=on pip install --force-reinstall --no-cache-dir "
                f"llama-cpp-python\n  Or say that the CPU is meant:  gpu_layers=0",
                name=self.name,
                source="",
                why=text,
            )
        if kind in ("ModuleNotFoundError", "ImportError"):
            return LoadFailed(
                f"{self.name} needs llama-cpp-python, which is not installed here ({text}).\n"
                f"  Install it:  pip install 'gpu-console[llama]'",
                name=self.name,
                source="",
                why=text,
            )
        if fault is not None and fault.kind is Kind.OUT_OF_MEMORY:
            return out_of_memory(fault.line, device="", asked_bytes=0, holders=(), report="")
        where = f"\n  Its log:  {self.log}" if self.log else ""
        why = fault.line if fault else text or _last_words(log) or "its process ended"
        return LoadFailed(
            f"{self.name} could not be loaded: {why}.{where}",
            name=self.name,
            source="",
            why=why,
            kind=fault.kind.value if fault else "",
            log=str(self.log or ""),
        )

    # -- its life

    def watch(self, lost: Lost) -> None:
        """Has `lost(kind, because)` called once, if it ends by itself; at once, if it has already."""
        with self._lock:
            self._lost = lost
        self._tell_loss()

    def _tell_loss(self) -> None:
        with self._lock:
            if self._over is None or self._lost is None or self._told or not self._wanted:
                return
            self._told, self._telling, lost, over = True, True, self._lost, self._over
        try:
            lost(over.facts["kind"], str(over).splitlines()[0])
        finally:
            self._telling = False

    def end(self) -> None:
        """Ends it and all it started. Twice is once."""
        self._wanted = False
        self._close(
            EngineDied(
                f"{self.name} was put away; its next use loads it anew.",
                name=self.name,
                pid=self.pid,
                status=None,
                kind="ended",
                why="it was put away",
                log=str(self.log or ""),
            )
        )

    def _close(self, why: GpuError) -> None:
        with self._lock:
            self._over = (
                self._over or why
            )  # first: the reader will find the channel closed, and has another story
        self._channel.close()
        self._tell_loss()
        if self._telling:  # and puts us away meanwhile: callers hear of it once the book has it
            return
        with self._lock:
            waiting, self._pending = list(self._pending.values()), {}
        self._news.put({"over": True})
        for answers in waiting:
            answers.put({"over": True})

    def _read(self) -> None:
        """Hands out what comes, until nothing more does. Runs in a thread of its own."""
        while (message := self._channel.receive()) is not None:
            number = message.get("id")
            if number is None:
                self._news.put(message)
                continue
            with self._lock:
                answers = self._pending.get(number)
                if answers is not None and "item" not in message:
                    del self._pending[number]
            if answers is not None:
                answers.put(message)
        self._close(self._death())

    def _death(self) -> GpuError:
        child = self._channel.child
        status = child.end() if child else None
        said = child.tail() if child else ""
        fault = recognise(said)
        kind = fault.kind if fault else Kind.CRASH
        how = in_words(status) if status is not None else "its thread ended"
        why = f"{how}: {fault.line}" if fault else how
        return EngineDied(
            f"the engine of {self.name} (pid {self.pid}) is gone: {why}.\n"
            f"  Its memory came free; the next use of {self.name} loads it anew."
            + (f"\n  Its log:  {self.log}" if self.log else ""),
            name=self.name,
            pid=self.pid,
            status=status,
            kind=kind.value,
            why=why,
            log=str(self.log or ""),
        )

    # -- calls

    def ask(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The answer to a call. Raises BadCall, EngineDied, EngineFault, and the device's out-of-memory error."""
        number, answers = self._asked(method, args, kwargs)
        try:
            message = answers.get()
        except BaseException:  # the stop button: it need not go on computing
            self.cancel(number)
            raise
        return self._outcome(method, message)

    def stream(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
        """The items of an answer as they come. Closed before its end, the engine stops computing it."""
        number, answers = self._asked(method, args, kwargs)
        done = False
        try:
            while True:
                message = answers.get()
                if "item" not in message:
                    done = True
                    self._outcome(method, message)
                    return
                yield message["item"]
        finally:
            if not done:
                self.cancel(number)

    def cancel(self, number: int) -> None:
        """Nobody waits for that answer any more."""
        with self._lock:
            self._pending.pop(number, None)
        self._channel.send({"cancel": number})

    def _asked(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int, queue.SimpleQueue[Any]]:
        answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with self._lock:
            if self._over is not None:
                raise _again(self._over)
            number = next(self._numbers)
            self._pending[number] = answers
        try:
            self._channel.send({"id": number, "call": method, "args": list(args), "kwargs": kwargs})
        except TypeError as error:
            with self._lock:
                self._pending.pop(number, None)
            raise BadCall(
                f"{self.name}: {method} was given what an isolated model cannot take: {error}.\n"
                f"  Python objects can be given in process:  rt.register({self.name!r}, …, isolated=False)",
                name=self.name,
                method=method,
                why=str(error),
            ) from None
        return number, answers

    def _outcome(self, method: str, message: dict[str, Any]) -> Any:
        if "over" in message:
            assert self._over is not None
            raise _again(self._over)
        if "end" in message:
            self._failures = 0
            return message["end"]
        kind, text = message["error"]["type"], message["error"]["text"]
        fault = None if kind in _REFUSED else recognise(text)  # its words may be the caller's own
        self._failures = decode_failures(self._failures, fault)
        if kind in _REFUSED:
            raise BadCall(
                f"{self.name} refused {method}: {text}.", name=self.name, method=method, why=text
            )
        if fault is not None and fault.kind is Kind.OUT_OF_MEMORY:
            raise out_of_memory(
                f"{self.name}: {fault.line}", device="", asked_bytes=0, holders=(), report=""
            )
        raise self._fault(fault, text)

    def _process_lost(self, kind: str, first: str) -> ProcessLost:
        return ProcessLost(
            f"this process can use the GPU no more: {self.name}, which runs in it, failed ({kind}):\n  {first}.\n"
            f"  Restart the kernel. A model that runs in a worker of its own (isolated=True) would have cost that "
            f"alone.",
            name=self.name,
            kind=kind,
            why=first,
        )

    def _fault(self, fault: Fault | None, text: str) -> EngineFault | ProcessLost:
        reloads = fault is not None and (
            fault.clears_model or self._failures >= MOST_DECODE_FAILURES
        )
        kind = fault.kind.value if fault else "error"
        first = (fault.line if fault else text).strip().rstrip(".")
        many = f", {self._failures} times in a row" if self._failures > 1 else ""
        if fault is not None and fault.loses_context and self.pid is None:
            lost = self._process_lost(kind, first)
            self._close(lost)
            return lost
        then = (
            f"It was put away; the next use of {self.name} loads it anew, in a fresh worker."
            if reloads
            else "It is still loaded."
        )
        error = EngineFault(
            f"{self.name} failed{many} ({kind}): {first}.\n  {then}",
            name=self.name,
            kind=kind,
            why=first,
            log=str(self.log or ""),
            reloads=reloads,
        )
        if reloads:
            self._close(error)
        return error


def _again(error: GpuError) -> GpuError:
    """The same error, for one more caller: a traceback of its own."""
    return type(error)(str(error), **error.facts)


def _last_words(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
