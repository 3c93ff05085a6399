"""Models of other backends, each in a child process, which is restarted if it ends by itself.

The lease of the model belongs to this process, not to the child. So the lease stays while the child
is restarted on the same cards, and no waiting request can get the cards in between. A guard (see
`orphan_guard.py`) ends the child when this process ends. `model_program.py` is the child's program.
"""

from __future__ import annotations

import functools
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ... import threads
from ...devices.probe import Probe
from ...errors import EngineDied
from ...facts import Evidence, ModelSpec, Share, Shares
from ...fault_texts import Kind
from ...files import child_environment
from ..base import Backend, Progress
from ..registry import open_backend
from .engine import (
    STOP_SECONDS,
    EngineBackend,
    EngineHandle,
    EngineModel,
    RestartedEngine,
    guarded,
    in_words,
)
from .orphan_guard import descendants
from .remote_calls import Ended, MessageSocket, Packed, Requests, uncopied


class Program(Requests):
    """A process that runs `model_program.py`, and the requests to it."""

    def __init__(self, log: Path, progress: Progress | None) -> None:
        """Starts the process under a guard. Its output is appended to the file `log`.

        `progress` is called during the load, with bytes done and bytes in total.
        """
        own, its = socket.socketpair()
        with its:
            module, number = f"{__package__}.model_program", str(its.fileno())
            words = [sys.executable, "-P", "-m", module, number]
            self.child, self._line = guarded(words, log, child_environment(), [its.fileno()])
        super().__init__(MessageSocket(own), progress)

    def end(self) -> int:
        """Ends the process and everything that it started. Returns the exit status of its guard."""
        self._line.close()
        self.child.wait(STOP_SECONDS + 1.0)
        return self.child.end()


class ModelProcess(RestartedEngine):
    """The process of one model, from its first start to its end, restarts included."""

    title = "process"

    def __init__(self, backend: str, devices: str, probe: Probe, spec: ModelSpec) -> None:
        """A process in which the backend named `backend` loads the model of `spec`.

        The process starts when the method `load` is called. `devices` is the value of GPU_DEVICES
        with which `probe` was opened.
        """
        super().__init__(spec)
        self._order = (backend, devices, tuple(device.id for device in probe.devices))
        self._shares: Shares = ()
        self._program: Program | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """The guard, then the program; empty while no program runs."""
        program = self._program
        return (program.child.pid, *descendants(program.child.pid)) if program else ()

    # -- start and end

    def load(self, shares: Shares, progress: Progress | None) -> Shares:
        """Starts the process and loads the model onto `shares`. Returns the measured shares.

        Raises LoadFailed, the errors of the backend, and the device's out-of-memory error.
        """
        program, measured = self._start(shares, progress)
        self._install(program, measured)
        threads.start(self._supervise)
        return measured

    def _start(self, shares: Shares, progress: Progress | None) -> tuple[Program, Shares]:
        program = Program(self.log, progress)
        try:
            return program, program.request("load", *self._order, self.spec, shares)
        except Ended:
            raise self._load_error(in_words(program.end()), program.child.tail()) from None
        except BaseException:
            program.end()
            raise

    def _install(self, program: Program, shares: Shares) -> None:
        """From now on, requests go to the started `program`, whose model is on `shares`.

        If the method `end` was called while the program started, the program is ended instead.
        """
        with self._changed:
            if self._wanted:
                self._program, self._shares = program, shares
                self._changed.notify_all()
                return
        program.end()

    def end(self) -> None:
        with self._changed:
            self._wanted = False
            program, self._program = self._program, None
            self._changed.notify_all()
        if program is not None:
            program.end()

    def _wait_for_end(self) -> tuple[int, str] | None:
        program = self._program
        if program is None:
            return None
        program.reading.wait()
        with self._changed:
            if not self._wanted:
                return None
            self._program = None
        return program.end(), program.child.tail()

    def _start_again(self) -> None:
        self._install(*self._start(self._shares, None))

    # -- requests

    def request(self, kind: str, *args: Any) -> Any:
        """The result of the method `kind` of `model_program.Model`. Waits during a restart.

        Raises the error of the method. Raises EngineDied if the process ends before its answer, if
        it is gone for good, and if the model was unloaded.
        """
        program = self._running()
        try:
            return program.request(kind, *args)
        except Ended:
            raise self._cut_off() from None

    def stream(self, function: Callable[..., Iterator[Any]], *args: Any) -> Iterator[Any]:
        """Yields the items of `function(value, *args)`, which the model's process imports and runs.

        `value` is the model's object there. Raises the errors of `request`.
        """
        program = self._running()
        try:
            yield from program.stream("stream", function, *args)
        except Ended:
            raise self._cut_off() from None

    def _running(self) -> Program:
        """The program that runs now. Waits while the process is restarted. Raises EngineDied."""
        with self._changed:
            self._changed.wait_for(lambda: self._program or self.error or not self._wanted)
            self.require()
            if self._program is not None:
                return self._program
        raise self.died(Kind.CRASH, f"{self.spec.name} was unloaded.", "it was unloaded")

    def _cut_off(self) -> EngineDied:
        text = f"the process of {self.spec.name} ended before its answer.\n  It is restarted."
        return self.died(Kind.CRASH, text, "it ended before its answer")

    def move(self, shares: Shares) -> Shares:
        """Moves the model to `shares` and returns the shares as measured after the move."""
        self._shares = self.request("move", shares)
        return self._shares


class ProcessModel(EngineModel[ModelProcess]):
    """The object that `use` yields for a model in a separate process."""

    def run_there(self, path: tuple[str, ...], given: Packed) -> Packed:
        """The packed result of a call on the model; see `remote_calls.run`.

        Call this method inside `rt.use`. Raises NotResident, EngineDied.
        """
        return self._loaded_engine().request("call", path, uncopied(given))

    def stream(self, function: Callable[..., Iterator[Any]], *args: Any) -> Iterator[Any]:
        """As `ModelProcess.stream`. Raises NotResident too."""
        return self._loaded_engine().stream(function, *args)

    def __repr__(self) -> str:
        return f"<{self.name} in a process of its own, on {self._where or 'disk'}>"


ProcessHandle = EngineHandle[ModelProcess, ProcessModel]


class ProcessBackend(EngineBackend[ProcessHandle, ProcessModel]):
    """Loads the models of another backend, each model into a separate process."""

    model_type = ProcessModel

    def __init__(self, name: str, devices: str, probe: Probe) -> None:
        """Loads the models of the backend `name`. `probe` was opened with GPU_DEVICES=`devices`."""
        self.name = self.engine_name = name
        self.probe, self._devices = probe, devices

    @functools.cached_property
    def inner(self) -> Backend:
        """The backend that the processes use. This process uses it only to read sources."""
        return open_backend(self.name, self.probe)

    @property
    def can_move(self) -> bool:  # type: ignore[override]
        return self.inner.can_move and self.name != "llama_cpp"  # which only sleeps

    @property
    def can_split(self) -> bool:  # type: ignore[override]
        return self.inner.can_split

    def evidence(self, spec: ModelSpec, origin: Any = None) -> Evidence:
        return self.inner.evidence(spec)

    def pieces(self, spec: ModelSpec, origin: Any = None, model: Any = None) -> tuple[int, ...]:
        return self.inner.pieces(spec)

    def _prepared(
        self, spec: ModelSpec, shares: Shares, report: Progress
    ) -> tuple[ModelProcess, Callable[[ProcessModel], Shares]]:
        if self.name == "llama_cpp":  # the model needs no second process
            spec = replace(spec, options={**spec.options, "isolated": False, "sleep": False})
        process = ModelProcess(self.name, self._devices, self.probe, spec)

        def start(value: ProcessModel) -> Shares:
            measured = process.load(shares, report)
            return self._charged(process.pids, measured)

        return process, start

    def move(self, model: ProcessHandle, shares: Shares) -> None:  # type: ignore[override]
        size = sum(share.bytes for share in model.shares)
        held = [self.probe.place(share.device).allocate(share.bytes) for share in shares]
        try:
            model.shares = model.engine.move(shares)
            held, model.blocks = model.blocks, held
        finally:  # the blocks of the old place, or after a failure those of the new one
            for block in held:
                block.free()
        # Its CUDA contexts: on each card where it was, although nothing of the model is left there.
        cards = tuple(Share(device.id, 0) for device in self.probe.devices)
        model.kept = self._beyond(model.pids, cards, model.shares, size)

    def elsewhere(self, model: ProcessHandle) -> tuple[str, ...]:
        return model.engine.request("ask", "elsewhere")

    def droppable(self, model: ProcessHandle) -> bool:
        return self._holds(model, "droppable")

    def unchanged(self, model: ProcessHandle) -> bool:
        return self._holds(model, "unchanged")

    def _holds(self, model: ProcessHandle, kind: str) -> bool:
        """The answer of the process of `model` to the request `kind`; True if the process is gone."""
        try:
            return model.engine.request("ask", kind)
        except EngineDied:  # no changed weights can be lost any more
            return True
