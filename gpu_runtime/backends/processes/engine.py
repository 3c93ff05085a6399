"""Engines (the program or thread that runs one model), and the common part of their backends.

An engine ends, is restarted, and explains both in errors. Engines place a model when they load it,
and by default they never move it or change its weights. So an evicted model is dropped and loaded
again later. `model_processes.py` overrides this.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

from ...devices.probe import Probe
from ...devices.process_memory import Block, out_of_memory
from ...engine_logs import new_log
from ...errors import CannotGovern, EngineDied, GpuError, LoadFailed, NotResident
from ...facts import ModelSpec, Share, Shares, where
from ...fault_texts import Kind, last_line, recognise
from ..base import Backend, Progress
from .processes import MOST_RESTARTS, in_words

OnLoss = Callable[[str, str], None]  # called with kind and because


class Engine:
    """The program or thread that runs one model.

    An engine is lost if it ended by itself and is not restarted. This is reported once.
    """

    def __init__(self) -> None:
        self.error: GpuError | None = None  # why the engine is lost; None: it is not
        self._wanted = True  # False: it was ended on purpose
        self._on_loss: OnLoss | None = None
        self._loss_reported = self._reporting = False
        self._changed = threading.Condition()

    @property
    def pids(self) -> tuple[int, ...]:
        """The ids of the engine's processes; empty if the model runs in this process."""
        return ()

    def end(self) -> None:
        """Ends the engine and everything that it started. A repeated call does nothing."""
        raise NotImplementedError

    def watch(self, on_loss: OnLoss) -> None:
        """Calls `on_loss(kind, because)` once: when the engine is lost, or now if it is lost already."""
        with self._changed:
            self._on_loss = on_loss
        self._report_loss()

    def _report_loss(self) -> None:
        with self._changed:
            if self.error is None or self._on_loss is None:
                return
            if self._loss_reported or not self._wanted:
                return
            self._loss_reported = self._reporting = True
        try:
            self._on_loss(self.error.facts["kind"], str(self.error).splitlines()[0])
        finally:
            self._reporting = False

    def require(self) -> None:
        """Raises the error of a lost engine, as a new object with a traceback of its own."""
        if self.error is not None:
            raise type(self.error)(str(self.error), **self.error.facts)


class RestartedEngine(Engine):
    """An engine in separate processes, which are restarted at most MOST_RESTARTS times."""

    title: str  # what messages call the engine: "server" or "process"

    def __init__(self, spec: ModelSpec) -> None:
        """The engine of the model `spec`. The engine's output is appended to the file `log`."""
        super().__init__()
        self.spec, self.log = spec, new_log(spec.name)
        self.restarts = 0
        self._pid: int | None = None  # named in errors

    def _wait_for_end(self) -> tuple[int, str] | None:
        """Waits for the end of the processes. Returns their exit status and the end of their log;
        None if they were ended on purpose.
        """
        raise NotImplementedError

    def _start_again(self) -> None:
        """Starts new processes on the same cards. Raises the errors of a load."""
        raise NotImplementedError

    def _supervise(self) -> None:
        """Restarts the processes if they end by themselves. Runs in a separate thread."""
        while ended := self._wait_for_end():
            status, output = ended
            fault = recognise(output)
            kind = fault.kind if fault else Kind.CRASH
            why = f"{in_words(status)}: {fault.line}" if fault else in_words(status)
            if self.restarts >= MOST_RESTARTS:
                return self._give_up(kind, why, status)
            self.restarts += 1
            try:
                self._start_again()
            except Exception as error:  # noqa: BLE001 - the next call raises it
                first_line = str(error).splitlines()[0]
                return self._give_up(kind, f"{why}; the restart failed: {first_line}", status)

    def _give_up(self, kind: Kind, why: str, status: int) -> None:
        """Records that the engine is lost, reports the loss, then wakes the waiting callers."""
        name = self.spec.name
        times = "once" if self.restarts == 1 else f"{self.restarts} times"
        text = (
            f"the {self.title} of {name} is gone: {why.rstrip('.')}.\n"
            f"  It was restarted {times}. Its memory is free; the next use of {name} loads it again."
        )
        with self._changed:
            self.error = self.died(kind, text, why, status, self._pid)
        self._report_loss()
        with self._changed:  # wake the callers last: by now the book shows the loss
            self._changed.notify_all()

    def died(
        self, kind: Kind, text: str, why: str, status: int | None = None, pid: int | None = None
    ) -> EngineDied:
        """The error with the message `text` for an engine that ended because of `why`, in a few words.

        `pid` was its process, and `status` is the exit status.
        """
        return EngineDied(
            f"{text}\n  Its log:  {self.log}",
            name=self.spec.name,
            pid=pid,
            status=status,
            kind=kind.value,
            why=why,
            log=str(self.log),
        )

    def _load_error(self, why: str, output: str) -> GpuError:
        """The error for a load that failed because of `why`, with the line of `output` that explains it.

        If a device had no room, it is an out-of-memory error, else LoadFailed.
        """
        fault = recognise(output)
        if fault is not None and fault.kind is Kind.OUT_OF_MEMORY:
            return out_of_memory(fault.line)
        explanation = fault.line if fault else last_line(output)
        detail = f": {explanation}" if explanation else ""
        return LoadFailed(
            f"{self.spec.name} could not be loaded: {why}{detail}.\n  Its log:  {self.log}",
            name=self.spec.name,
            source=self.spec.source,
            why=why,
            kind=fault.kind.value if fault else "",
            log=str(self.log),
        )


# -- models in engines ------------------------------------------------------------------------------

E = TypeVar("E", bound=Engine)


class EngineModel(Generic[E]):
    """The base of the object that `use` yields: the model's name and, while loaded, its engine."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._engine: E | None = None
        self._where = ""
        # A function that returns a context manager. Each call of the model runs inside it.
        # `owner/governed_calls.py` sets a function whose context manager pins the model.
        self._calls_under: Callable[[], AbstractContextManager[Any]] = nullcontext

    def _loaded_engine(self, hint: str = "Call it inside:  with rt.use({!r}) as model:") -> E:
        """The engine of the model. Raises NotResident, with the `hint`, if it is not loaded."""
        if self._engine is None:
            text = f"{self.name} is not loaded.\n  {hint.format(self.name)}"
            raise NotResident(text, name=self.name, where="not loaded")
        return self._engine


V = TypeVar("V", bound=EngineModel[Any])


class EngineHandle(Generic[E, V]):
    """An engine with its model, and the record of the model's bytes on each device."""

    def __init__(self, engine: E, value: V) -> None:
        """A handle of `engine`. When the handle is freed, the engine ends. `use` yields `value`."""
        self.engine, self.value = engine, value
        self.shares: Shares = ()
        self.blocks: list[Block] = []
        self._end = weakref.finalize(self, engine.end)

    @property
    def pids(self) -> tuple[int, ...]:
        """As `Engine.pids`."""
        return self.engine.pids

    def watch(self, on_loss: OnLoss) -> None:
        """As `Engine.watch`."""
        self.engine.watch(on_loss)

    def loaded(self, shares: Shares, probe: Probe) -> None:
        """Counts the bytes of `shares` on the devices of `probe`, and gives the engine to `value`.

        Raises the device's out-of-memory error.
        """
        self.shares = shares
        for share in shares:
            self.blocks.append(probe.place(share.device).allocate(share.bytes))
        self.value._engine, self.value._where = self.engine, where(shares)

    def end(self) -> None:
        """Ends the engine and frees the model's bytes. A repeated call does nothing."""
        self._end()
        if self.value._engine is self.engine:
            self.value._engine = None
        blocks, self.blocks, self.shares = self.blocks, [], ()
        for block in blocks:
            block.free()


H = TypeVar("H", bound=EngineHandle[Any, Any])


class EngineBackend(Backend, Generic[H, V]):
    """The part of a backend that is the same for all engines."""

    can_move = False
    engine_name: str  # as in messages
    model_type: ClassVar[type]  # what `use` yields
    probe: Probe

    def runs_here(self, spec: ModelSpec) -> bool:
        return False

    def value(self, model: H) -> V:
        return model.value  # type: ignore[no-any-return]

    def move(self, model: H, shares: Shares) -> NoReturn:
        """Always raises CannotGovern."""
        name = model.value.name
        raise CannotGovern(
            f"{name} cannot be moved: {self.engine_name} places a model when it loads it.\n"
            f"  Load it again where it should be:  rt.evict({name!r}), then rt.preload({name!r})",
            name=name,
            why=f"{self.engine_name} cannot move",
        )

    def load(
        self,
        spec: ModelSpec,
        shares: Shares,
        origin: Any = None,
        *,
        progress: Progress | None = None,
        into: Any = None,
    ) -> H:
        """Starts an engine for the model of `spec` on the cards of `shares`, and returns its handle.

        The other arguments are as in `Backend.load`. Raises BadSetting, NotAModel, LoadFailed, and
        the device's out-of-memory error.
        """
        engine, start = self._prepared(spec, shares, progress or (lambda done, total: None))
        handle = EngineHandle(engine, self._reused(into, spec.name))
        try:
            handle.loaded(start(handle.value), self.probe)
            return handle  # type: ignore[return-value]
        except BaseException:
            handle.end()
            raise

    def _prepared(
        self, spec: ModelSpec, shares: Shares, report: Progress
    ) -> tuple[Engine, Callable[[V], Shares]]:
        """An engine, and a function that starts it for the object that `use` yields.

        The function returns the bytes of the model on each device. `report` gets bytes done and in
        total.
        """
        raise NotImplementedError

    def drop(self, model: H) -> None:
        model.end()

    def measure(self, model: H) -> Shares:
        """The bytes of `model` as measured by the last load or move; empty once it is dropped."""
        return model.shares

    def droppable(self, model: H) -> bool:
        """Always True, because the engine of `model` never changes its weights."""
        return True

    def _charged(self, pids: Iterable[int], shares: Shares) -> Shares:
        """The bytes that the driver reports for the processes `pids`; where it reports none, `shares`."""
        devices = tuple(share.device for share in shares)
        charged: dict[str, int] = {}
        for pid in pids:
            for device, size in self.probe.charged(pid, devices).items():
                charged[device] = charged.get(device, 0) + size
        return tuple(
            Share(share.device, charged.get(share.device) or share.bytes) for share in shares
        )

    def _reused(self, into: Any, name: str) -> V:
        """The object that `use` yields for the model `name`: that of the earlier load `into` (its
        handle, or the object itself), else a new one.
        """
        kept = getattr(into, "value", into)
        value = kept if isinstance(kept, self.model_type) else self.model_type(name)
        return value  # type: ignore[no-any-return]
