"""GGUF models by llama-cpp-python: each in a worker process of its own, or, where asked for, in this one.

An out-of-memory error or a failed check of llama.cpp ends its process, so the default is isolated: a crash costs its
caller one error, and nobody else anything. `isolated=False` loads into this process. What users hold is the same in
both. Nothing can be moved: llama.cpp places a model when it loads it, so what has to go is dropped, and loaded again.
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
from .options import arguments, gguf_evidence, gguf_file, gpu_layers, offloaded, taken
from .rpc import Channel, Engine, ProcessChannel, ThreadChannel
from .worker import METHODS, OUR_METHODS


class LlamaModel:
    """What `use` yields: a model that computes elsewhere, with the methods of `llama_cpp.Llama`.

    `create_chat_completion(messages, stream=True)` gives an iterator; to close it ends the generation. A call while the
    model is away brings it back first, if this process governs it; without that it raises NotResident. So nothing can
    be called that was closed.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._engine: Engine | None = None
        self._where = ""
        self._calls_under: Callable[[], AbstractContextManager[Any]] = (
            nullcontext  # pins it; see pool.py
        )

    def __repr__(self) -> str:
        return f"<llama.cpp {self.name} on {self._where if self._engine else 'disk'}>"

    def __getattr__(self, name: str) -> Any:
        if name == "metadata" or name == "chat_format":
            return self._call(name, (), {})
        if name in METHODS + OUR_METHODS:
            return lambda *args, **kwargs: self._call(name, args, kwargs)
        raise AttributeError(
            f"{self.name} has no {name!r}; a llama.cpp model has {', '.join(METHODS)}"
        )

    @property
    def pid(self) -> int | None:
        """The worker that it runs in; None in process, and while it is not loaded."""
        return self._engine.pid if self._engine else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("__call__", args, kwargs)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *METHODS]

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("stream"):
            return self._stream(method, args, kwargs)
        with self._calls_under():
            return self._present().ask(method, args, kwargs)

    def _stream(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
        with self._calls_under():  # pinned for as long as somebody reads
            yield from self._present().stream(method, args, kwargs)

    def _present(self) -> Engine:
        engine = self._engine
        if engine is None:
            raise NotResident(
                f"{self.name} is not loaded.\n  Call it inside:  with rt.use({self.name!r}) as model:",
                name=self.name,
                where="not loaded",
            )
        return engine


class Loaded:
    """A loaded model: its engine, and the account of its bytes. The handle of this backend."""

    def __init__(self, engine: Engine, value: LlamaModel) -> None:
        self.engine, self.value = engine, value
        self.shares: Shares = ()
        self.blocks: list[Block] = []
        self.stamp = ""  # of its file, when it was loaded
        self._end = weakref.finalize(self, engine.end)

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that it runs in, where that is not this one."""
        return (self.engine.pid,) if self.engine.pid else ()

    def watch(self, lost: Callable[[str, str], None]) -> None:
        """Has `lost(kind, because)` called, once, if it ends by itself."""
        self.engine.watch(lost)

    def end(self) -> None:
        self._end()
        if self.value._engine is self.engine:
            self.value._engine = None
        blocks, self.blocks, self.shares = self.blocks, [], ()
        for block in blocks:
            block.free()


class LlamaCppBackend:
    """GGUF files. Options: context_length, sequences, cache_dtype, gpu_layers, main_gpu, split_mode, isolated, and
    those of PASSED_ON."""

    name = "llama_cpp"
    can_move = False
    can_split = True

    def __init__(self, probe: Probe) -> None:
        self.probe = probe

    def evidence(self, spec: ModelSpec, origin: Any = None) -> Evidence:
        """The weights that go to the card, from the header; cache and work space are taken when it loads, and so are
        reckoned whether or not a context was asked for."""
        return gguf_evidence(spec)

    def pieces(self, spec: ModelSpec, origin: Any = None, model: Any = None) -> tuple[int, ...]:
        return ()

    def load(
        self,
        spec: ModelSpec,
        shares: Shares,
        origin: Any = None,
        *,
        progress: Progress | None = None,
        into: Any = None,
    ) -> Loaded:
        found = self.evidence(spec)
        order = arguments(spec, shares, str(gguf_file(spec)), found.config, self._cards(shares))
        isolated = spec.options.get("isolated", True)
        total = sum(share.bytes for share in shares)
        if progress:
            progress(0, total)
        engine = Engine(spec.name, *self._channel(spec, shares, isolated))
        kept = into.value if isinstance(into, Loaded) else into
        value = kept if isinstance(kept, LlamaModel) else LlamaModel(spec.name)
        loaded = Loaded(engine, value)
        try:
            order["verbose"] = isolated  # in a worker that goes to its log
            facts = engine.load(
                order, None if progress is None else lambda part: progress(int(total * part), total)
            )
            loaded.shares = taken(
                facts, shares, offloaded(spec, found.config), self._charged(engine.pid, shares)
            )
            for share in loaded.shares:
                loaded.blocks.append(self.probe.place(share.device).allocate(share.bytes))
            if progress:
                progress(total, total)
            loaded.stamp = found.fingerprint
            value._engine, value._where = engine, where(loaded.shares)
            return loaded
        except BaseException:
            loaded.end()
            raise

    def value(self, model: Loaded) -> LlamaModel:
        return model.value

    def move(self, model: Loaded, shares: Shares) -> NoReturn:
        name = model.value.name
        raise CannotGovern(
            f"{name} cannot be moved: llama.cpp places a model when it loads it.\n"
            f"  Load it again where it should be:  rt.evict({name!r}), then rt.preload({name!r})",
            name=name,
            why="llama.cpp cannot move",
        )

    def drop(self, model: Loaded) -> None:
        model.end()

    def measure(self, model: Loaded) -> Shares:
        return model.shares

    def elsewhere(self, model: Loaded) -> tuple[str, ...]:
        return ()

    def droppable(self, model: Loaded) -> bool:
        return True  # its weights are never changed

    def unchanged(self, model: Loaded) -> bool:
        return True

    def _cards(self, shares: Shares) -> tuple[int, ...] | None:
        """What this process calls the cards, for a model that runs in it; None on simulated ones."""
        names = [self.probe.place(share.device).torch for share in shares]
        return None if "cpu" in names else tuple(int(name.partition(":")[2] or 0) for name in names)

    def _channel(self, spec: ModelSpec, shares: Shares, isolated: bool) -> tuple[Channel, Path]:
        log = new_log(spec.name)
        if isolated:
            return ProcessChannel(
                log,
                {**os.environ, **card_environment(self.probe, shares if gpu_layers(spec) else ())},
            ), log

        def told(line: str) -> None:
            with open(log, "a") as file:
                file.write(line)

        return ThreadChannel(told), log

    def _charged(self, pid: int | None, shares: Shares) -> dict[str, int]:
        """What the driver says that the worker holds, its CUDA context too; nothing where it does not tell."""
        return (
            {} if pid is None else self.probe.charged(pid, tuple(share.device for share in shares))
        )


# -- decisions: values in, values out ---------------------------------------------------------------------------------
