"""The common part of backends whose models run in an engine: a server, a worker or a thread.

This module counts the bytes of the engine's model. Engines place a model when they load it, and by
default they never move it or change its weights. So an evicted model is dropped and loaded again
later. `model_processes.py` overrides this.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

from ...devices.probe import Probe
from ...devices.process_memory import Block
from ...errors import CannotGovern, NotResident
from ...facts import ModelSpec, Share, Shares, where
from ..base import Backend
from .engine import Engine, OnLoss

E = TypeVar("E", bound=Engine)


class EngineModel(Generic[E]):
    """The base of the object that `use` yields: the model's name and, while loaded, its engine."""

    def __init__(self, name: str) -> None:
        """The object for the model `name`, which is not loaded yet."""
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
        """The process ids of the engine; empty if the model runs in this process."""
        return self.engine.pids

    def watch(self, on_loss: OnLoss) -> None:
        """Calls `on_loss(kind, because)` one time if the engine is lost; see `Engine.watch`."""
        self.engine.watch(on_loss)

    def loaded(self, shares: Shares, probe: Probe) -> None:
        """Counts the bytes of `shares` on the devices of `probe`. Gives the engine to `value`.

        `value` is the object that `use` yields. Raises the device's out-of-memory error.
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
        """False: the model of `spec` runs in a process of its own."""
        return False

    def value(self, model: H) -> V:
        """The object that `use` yields for the handle `model`."""
        return model.value  # type: ignore[no-any-return]

    def move(self, model: H, shares: Shares) -> NoReturn:
        """Always raises CannotGovern: `model` cannot be moved to other `shares`."""
        name = model.value.name
        raise CannotGovern(
            f"{name} cannot be moved: {self.engine_name} places a model when it loads it.\n"
            f"  Load it again where it should be:  rt.evict({name!r}), then rt.preload({name!r})",
            name=name,
            why=f"{self.engine_name} cannot move",
        )

    def drop(self, model: H) -> None:
        """Ends the engine of `model`. A repeated call does nothing."""
        model.end()

    def measure(self, model: H) -> Shares:
        """The bytes of `model` on each device, as measured by the last load or move.

        Empty once `model` is dropped.
        """
        return model.shares

    def droppable(self, model: H) -> bool:
        """Always True, because the engine of `model` never changes its weights."""
        return True

    def _charged(self, pids: Iterable[int], shares: Shares) -> Shares:
        """The bytes that the driver reports for the processes `pids` on the devices of `shares`.

        On a device where the driver reports no bytes, the result has the bytes of `shares`.
        """
        devices = tuple(share.device for share in shares)
        charged: dict[str, int] = {}
        for pid in pids:
            for device, size in self.probe.charged(pid, devices).items():
                charged[device] = charged.get(device, 0) + size
        return tuple(
            Share(share.device, charged.get(share.device) or share.bytes) for share in shares
        )

    def _reused(self, into: Any, name: str) -> V:
        """The object that `use` yields for the model `name`: that of an earlier load, or a new one.

        `into` is the handle or the object of the earlier load. For any other `into`, a new object
        is made.
        """
        kept = getattr(into, "value", into)
        value = kept if isinstance(kept, self.model_type) else self.model_type(name)
        return value  # type: ignore[no-any-return]
