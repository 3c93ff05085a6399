"""The backend for GGUF models, which llama-cpp-python runs in a worker process or in this process.

An out-of-memory error or a failed check in llama.cpp ends the process in which it runs. So a worker
process is the default: after a crash the caller gets one error, and nothing else is affected.
`isolated=False` loads the model into this process. Users get the same kind of object in both cases.
llama.cpp cannot move a loaded model, so an evicted model is dropped, and loaded again later.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...devices.probe import Probe
from ...engine_logs import new_log
from ...facts import Evidence, ModelSpec, Shares
from ..base import Progress
from ..processes.engine import EngineBackend, EngineHandle, EngineModel
from ..processes.processes import card_environment
from .options import (
    gguf_evidence,
    gguf_file,
    gpu_layers,
    llama_arguments,
    offloaded,
    taken,
    waiting_environment,
)
from .rpc import Channel, LlamaEngine, ProcessChannel, ThreadChannel
from .worker import METHODS, OUR_METHODS


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
