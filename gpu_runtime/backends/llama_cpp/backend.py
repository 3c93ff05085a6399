"""The backend for GGUF models by llama-cpp-python: in a worker process each, or in this process.

An out-of-memory error or a failed check of llama.cpp ends its process. So the default is a worker: a crash
costs the caller one error and nobody else anything. `isolated=False` loads into this process. Users hold
the same kind of object in both cases. llama.cpp places a model when it loads it, so nothing can be moved:
an evicted model is dropped, and loaded again later.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

from ...devices.probe import Probe
from ...devices.process_memory import Block
from ...errors import CannotGovern, NotResident
from ...facts import Evidence, ModelSpec, Shares, where
from ..base import Progress
from ..processes.processes import new_log
from ..processes.visible_devices import card_environment
from .channels import Channel, ProcessChannel, ThreadChannel
from .options import gguf_evidence, gguf_file, gpu_layers, llama_arguments, offloaded, taken
from .rpc import LlamaEngine
from .worker import METHODS, OUR_METHODS


class LlamaModel:
    """What `use` yields: a proxy with the methods of `llama_cpp.Llama`, whose model computes elsewhere.

    `create_chat_completion(messages, stream=True)` returns an iterator; closing it ends the generation. A
    call while the model is evicted first restores it, if this process governs it; otherwise it raises
    NotResident. So a call never reaches a closed model.
    """

    def __init__(self, name: str) -> None:
        """A proxy for the model `name`, not loaded yet."""
        self.name = name
        self._engine: LlamaEngine | None = None
        self._where = ""
        self._calls_under: Callable[[], AbstractContextManager[Any]] = nullcontext  # pins the model

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
        """The process id of its worker; None without a worker and while it is not loaded."""
        return self._engine.pid if self._engine else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("__call__", args, kwargs)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *METHODS]

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("stream"):
            return self._stream(method, args, kwargs)
        with self._calls_under():
            return self._loaded_engine().ask(method, args, kwargs)

    def _stream(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
        with self._calls_under():  # the model stays pinned until the iterator ends
            yield from self._loaded_engine().stream(method, args, kwargs)

    def _loaded_engine(self) -> LlamaEngine:
        engine = self._engine
        if engine is None:
            raise NotResident(
                f"{self.name} is not loaded.\n"
                f"  Call it inside:  with rt.use({self.name!r}) as model:",
                name=self.name,
                where="not loaded",
            )
        return engine


class LlamaHandle:
    """The handle of this backend: an engine with its model, and the account of the model's bytes."""

    def __init__(self, engine: LlamaEngine, value: LlamaModel) -> None:
        """Ends `engine` when the handle is garbage-collected. `value` is what users hold."""
        self.engine, self.value = engine, value
        self.shares: Shares = ()
        self.blocks: list[Block] = []
        self._end = weakref.finalize(self, engine.end)

    @property
    def pids(self) -> tuple[int, ...]:
        """The worker's process id; empty for a model in this process."""
        return (self.engine.pid,) if self.engine.pid else ()

    def watch(self, on_loss: Callable[[str, str], None]) -> None:
        """Has `on_loss(kind, because)` called once if the engine ends by itself."""
        self.engine.watch(on_loss)

    def end(self) -> None:
        """Ends the engine and frees its bytes. Repeating is safe."""
        self._end()
        if self.value._engine is self.engine:
            self.value._engine = None
        blocks, self.blocks, self.shares = self.blocks, [], ()
        for block in blocks:
            block.free()


class LlamaCppBackend:
    """Loads GGUF files.

    Options of a model: context_length, sequences, cache_dtype, flash_attn, gpu_layers, main_gpu,
    split_mode, isolated, and those of `options.PASSED_ON`.
    """

    name = "llama_cpp"
    can_move = False
    can_split = True

    def __init__(self, probe: Probe) -> None:
        """Loads to the devices of `probe`."""
        self.probe = probe

    def evidence(self, spec: ModelSpec, origin: Any = None) -> Evidence:
        """The weights of `spec` that go to the card, from the header; `origin` is ignored.

        Cache and work space are taken at the load, so they count even if no context was requested.
        """
        return gguf_evidence(spec)

    def pieces(self, spec: ModelSpec, origin: Any = None, model: Any = None) -> tuple[int, ...]:
        """Empty: llama.cpp divides the `model` of `spec` itself. `origin` is ignored."""
        return ()

    def load(
        self,
        spec: ModelSpec,
        shares: Shares,
        origin: Any = None,
        *,
        progress: Progress | None = None,
        into: Any = None,
    ) -> LlamaHandle:
        """A handle to the model of `spec`, loaded to the cards of `shares`; `origin` is ignored.

        `progress` is called with bytes done and in total. `into` is a handle or a LlamaModel of an earlier
        load, which gets the new engine.
        Raises BadSetting, NotAModel, LoadFailed, and the device's out-of-memory error.
        """
        found = self.evidence(spec)
        path = str(gguf_file(spec))
        arguments = llama_arguments(spec, shares, path, found.config, self._card_numbers(shares))
        isolated = spec.options.get("isolated", True)
        arguments["verbose"] = isolated  # a worker's output goes to its log
        total = sum(share.bytes for share in shares)
        if progress:
            progress(0, total)
        engine = LlamaEngine(spec.name, *self._open_channel(spec, shares, isolated))
        kept = into.value if isinstance(into, LlamaHandle) else into
        value = kept if isinstance(kept, LlamaModel) else LlamaModel(spec.name)
        handle = LlamaHandle(engine, value)

        def report(part: float) -> None:
            if progress:
                progress(int(total * part), total)

        try:
            facts = engine.load(arguments, report)
            part = offloaded(spec, found.config)
            handle.shares = taken(facts, shares, part, self._charged(engine.pid, shares))
            for share in handle.shares:
                handle.blocks.append(self.probe.place(share.device).allocate(share.bytes))
            if progress:
                progress(total, total)
            value._engine, value._where = engine, where(handle.shares)
            return handle
        except BaseException:
            handle.end()
            raise

    def value(self, model: LlamaHandle) -> LlamaModel:
        """The LlamaModel of the handle `model`."""
        return model.value

    def move(self, model: LlamaHandle, shares: Shares) -> NoReturn:
        """Always raises CannotGovern: `model` cannot be moved to other `shares`."""
        name = model.value.name
        raise CannotGovern(
            f"{name} cannot be moved: llama.cpp places a model when it loads it.\n"
            f"  Load it again where it should be:  rt.evict({name!r}), then rt.preload({name!r})",
            name=name,
            why="llama.cpp cannot move",
        )

    def drop(self, model: LlamaHandle) -> None:
        """Ends the engine of `model`. Repeating is safe."""
        model.end()

    def measure(self, model: LlamaHandle) -> Shares:
        """The bytes of `model` by device, as measured after its load; empty once it is dropped."""
        return model.shares

    def elsewhere(self, model: LlamaHandle) -> tuple[str, ...]:
        """Empty: the tensors of `model` are not visible here."""
        return ()

    def droppable(self, model: LlamaHandle) -> bool:
        """True: the weights of `model` are never changed."""
        return True

    def unchanged(self, model: LlamaHandle) -> bool:
        """True: the weights of `model` are never changed."""
        return True

    def _card_numbers(self, shares: Shares) -> tuple[int, ...] | None:
        """This process's numbers of the shares' cards; None for simulated cards."""
        names = [self.probe.place(share.device).torch for share in shares]
        if "cpu" in names:
            return None
        return tuple(int(name.partition(":")[2] or 0) for name in names)

    def _open_channel(
        self, spec: ModelSpec, shares: Shares, isolated: bool
    ) -> tuple[Channel, Path]:
        """A new channel, to a worker process or to a thread, and the path of its log."""
        log = new_log(spec.name)
        if isolated:
            cards = card_environment(self.probe, shares if gpu_layers(spec) else ())
            return ProcessChannel(log, {**os.environ, **cards}), log

        def append_to_log(line: str) -> None:
            with open(log, "a") as file:
                file.write(line)

        return ThreadChannel(append_to_log), log

    def _charged(self, pid: int | None, shares: Shares) -> dict[str, int]:
        """Bytes by device that the driver charges to the worker, its CUDA context included.

        Empty without a worker, and where the driver does not report it.
        """
        if pid is None:
            return {}
        return self.probe.charged(pid, tuple(share.device for share in shares))
