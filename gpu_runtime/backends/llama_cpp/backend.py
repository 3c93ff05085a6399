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

from msgspec.structs import replace

from ...errors import BadSetting, CannotGovern, NotAModel, NotResident
from ...facts import Evidence, ModelSpec, Share, Shares, beside, where
from ...devices.process_memory import Block
from ...devices.probe import Probe
from ..registry import Progress
from ..formats import gguf, sources
from ..missing import AbsentBackend
from .rpc import Channel, Engine, ProcessChannel, ThreadChannel
from ..processes.visible_devices import card_environment
from .worker import METHODS, OUR_METHODS
from ..processes.processes import new_log

CONTEXT_TOKENS = 4096  # where nobody asks for a length, and the model knows as many
CACHE_TYPES = {"float32": 0, "f32": 0, "float16": 1, "f16": 1, "fp16": 1, "half": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6,
               "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bfloat16": 30, "bf16": 30}  # Source: ggml.h, enum ggml_type
PASSED_ON = (
    "n_batch", "n_ubatch", "n_threads", "n_threads_batch", "seed", "chat_format", "chat_template", "use_mmap",
    "use_mlock", "rope_freq_base", "rope_freq_scale", "lora_path", "lora_scale", "logits_all", "offload_kqv",
    "swa_full",
)
OURS = ("n_gpu_layers", "n_ctx", "tensor_split", "type_k", "type_v", "model_path")
SPLIT_MODES = {"layer": 1, "row": 2}  # Source: llama.h, llama_split_mode


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
        self._calls_under: Callable[[], AbstractContextManager[Any]] = nullcontext  # pins it; see pool.py

    def __repr__(self) -> str:
        return f"<llama.cpp {self.name} on {self._where if self._engine else 'disk'}>"

    def __getattr__(self, name: str) -> Any:
        if name == "metadata" or name == "chat_format":
            return self._call(name, (), {})
        if name in METHODS + OUR_METHODS:
            return lambda *args, **kwargs: self._call(name, args, kwargs)
        raise AttributeError(f"{self.name} has no {name!r}; a llama.cpp model has {', '.join(METHODS)}")

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
            raise NotResident(f"{self.name} is not loaded.\n  Call it inside:  with rt.use({self.name!r}) as model:",
                              name=self.name, where="not loaded")
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

    def load(self, spec: ModelSpec, shares: Shares, origin: Any = None, *,
             progress: Progress | None = None, into: Any = None) -> Loaded:
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
            facts = engine.load(order, None if progress is None else lambda part: progress(int(total * part), total))
            loaded.shares = taken(facts, shares, offloaded(spec, found.config), self._charged(engine.pid, shares))
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
        raise CannotGovern(f"{name} cannot be moved: llama.cpp places a model when it loads it.\n"
                           f"  Load it again where it should be:  rt.evict({name!r}), then rt.preload({name!r})",
                           name=name, why="llama.cpp cannot move")

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
            return ProcessChannel(log, {**os.environ, **card_environment(self.probe,
                                                                         shares if gpu_layers(spec) else ())}), log

        def told(line: str) -> None:
            with open(log, "a") as file:
                file.write(line)

        return ThreadChannel(told), log

    def _charged(self, pid: int | None, shares: Shares) -> dict[str, int]:
        """What the driver says that the worker holds, its CUDA context too; nothing where it does not tell."""
        return {} if pid is None else self.probe.charged(pid, tuple(share.device for share in shares))


def gguf_file(spec: ModelSpec) -> Path:
    """The file that llama.cpp is to open: the first part of a split one. Raises NotAModel, LoadFailed."""
    path = sources.directory(spec.source, spec.name, spec.options.get("revision"))
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        if not found:
            raise NotAModel(f"{spec.name}: {path} holds no GGUF file.", name=spec.name, source=spec.source)
        path = sources.only(found, spec.name)
    if path.exists() and path.suffix != ".gguf":
        raise NotAModel(f"{spec.name}: {path} is no GGUF file.", name=spec.name, source=spec.source)
    return gguf.files(path, spec.name)[0]


def gguf_evidence(spec: ModelSpec) -> Evidence:
    """What a GGUF file tells of what llama.cpp will take of the card. Raises BadSetting, NotAModel, LoadFailed."""
    check(spec)
    if os.path.exists(os.path.expanduser(spec.source)):
        gguf_file(spec)  # or it is no GGUF, which is said now
    found = AbsentBackend(spec.backend).evidence(spec)
    part = offloaded(spec, found.config)
    weights = None if found.weight_bytes is None else round(found.weight_bytes * part)
    takes = {"context_at_load": context_tokens(spec, found.config), "written_scores": not flash_attention(spec)}
    if (layers := found.config.get("num_hidden_layers")) is None:  # then nothing tells what that context takes
        takes = {}
    elif part < 1:  # the cache lies where its layers do
        takes |= {"all_layers": layers, "num_hidden_layers": min(gpu_layers(spec), layers)}
    return replace(found, weight_bytes=weights, at_load=True, config={**found.config, **takes})


# -- decisions: values in, values out ---------------------------------------------------------------------------------

def check(spec: ModelSpec) -> None:
    """Raises BadSetting for an option that cannot be, or that is ours to decide."""
    for option in OURS:
        if option in spec.options:
            said = {"n_gpu_layers": "given as gpu_layers", "n_ctx": "given as context_length"}.get(
                option, "left out: where a model goes is decided here")
            raise BadSetting(option, spec.options[option], said)
    layers = spec.options.get("gpu_layers")
    if layers is not None and (type(layers) is not int or layers < -1):
        raise BadSetting("gpu_layers", layers, "-1 (all), 0 (CPU only) or a number of layers")
    if (mode := spec.options.get("split_mode", "layer")) not in SPLIT_MODES:
        raise BadSetting("split_mode", mode, "layer or row")
    main = spec.options.get("main_gpu", 0)
    if type(main) is not int or main < 0:
        raise BadSetting("main_gpu", main, "which of its cards, counted from 0")
    if (dtype := spec.options.get("cache_dtype")) is not None and str(dtype).lower() not in CACHE_TYPES:
        raise BadSetting("cache_dtype", dtype, "one of " + ", ".join(CACHE_TYPES))


def gpu_layers(spec: ModelSpec) -> int:
    """Layers that go to the card; -1: all. The setting has been filled in where the model does not say."""
    said = spec.options.get("gpu_layers")
    return -1 if said is None else said


def offloaded(spec: ModelSpec, config: dict[str, Any]) -> float:
    """The part of a model that goes to the card: so many of its layers and the output, which counts as one."""
    layers, all_layers = gpu_layers(spec), config.get("all_layers", config.get("num_hidden_layers"))
    if layers < 0 or not isinstance(all_layers, int):
        return 1.0 if layers else 0.0
    return min(layers, all_layers + 1) / (all_layers + 1)


def context_tokens(spec: ModelSpec, config: dict[str, Any]) -> int:
    """Tokens of context, of all sequences together: as asked for, else what the model knows, up to CONTEXT_TOKENS."""
    knows = config.get("max_position_embeddings")
    usual = min(CONTEXT_TOKENS, knows) if isinstance(knows, int) and knows > 0 else CONTEXT_TOKENS
    return (spec.options.get("context_length") or usual) * (spec.options.get("sequences") or 1)


def flash_attention(spec: ModelSpec) -> bool:
    """Whether attention is computed piece by piece: if asked for, and for a quantised cache, which needs it."""
    quantised = CACHE_TYPES.get(str(spec.options.get("cache_dtype")).lower(), 1) not in (0, 1, 30)
    return bool(spec.options.get("flash_attn", quantised))


def arguments(spec: ModelSpec, shares: Shares, path: str, config: dict[str, Any],
              cards: tuple[int, ...] | None) -> dict[str, Any]:
    """What `Llama` is told.

    `cards` are the numbers of the shares' cards in a process that sees others too; a worker of its own sees just these,
    so they count from 0 in the order of the shares.
    """
    isolated = spec.options.get("isolated", True)
    numbers = tuple(range(len(shares))) if isolated or cards is None else cards
    main = min(spec.options.get("main_gpu", 0), len(shares) - 1)
    split = [0.0] * (max(numbers, default=0) + 1)
    for number, share in zip(numbers, shares, strict=True):
        split[number] += float(share.bytes)
    whole = sum(split) or 1.0
    told = {
        "model_path": path, "name": spec.name, "n_gpu_layers": gpu_layers(spec), "n_ctx": context_tokens(spec, config),
        "main_gpu": numbers[main] if numbers else 0,
        "split_mode": SPLIT_MODES[spec.options.get("split_mode", "layer")] if len(shares) > 1 else 0,
        "embedding": spec.model_type == "embedding" or bool(spec.options.get("embedding")),
        "needs_gpu": cards is not None and gpu_layers(spec) != 0,
    }
    if len(shares) > 1:
        told["tensor_split"] = [round(part / whole, 6) for part in split]
    if (dtype := spec.options.get("cache_dtype")) is not None:
        told["type_k"] = told["type_v"] = CACHE_TYPES[str(dtype).lower()]
    told["flash_attn"] = flash_attention(spec)
    return told | {name: spec.options[name] for name in PASSED_ON if name in spec.options}


def taken(facts: dict[str, Any], shares: Shares, part: float, charged: dict[str, int]) -> Shares:
    """Where a loaded model's bytes lie, by llama.cpp's own account, and by the driver's where that says more.

    On cards its buffers are called by their order (CUDA0, CUDA1). Otherwise it computes on the CPU, and the simulated
    cards hold what would have gone to them: `part` of it all, over the shares in proportion.
    """
    buffers = facts["buffers"]
    on_cards = [name for name in buffers if name[-1:].isdigit()]
    if on_cards:
        by_number = {int("".join(filter(str.isdigit, name))): sum(buffers[name].values()) for name in on_cards}
        return tuple(Share(share.device, max(by_number.get(number, 0), charged.get(share.device, 0)))
                     for number, share in enumerate(shares))
    rest = sum(size for of in buffers.values() for name, size in of.items() if name != "model")
    total = round((facts["weight_bytes"] + rest) * part)
    empty = tuple(Share(share.device, 0) for share in shares)
    if len(shares) == 1:
        return (Share(shares[0].device, total),)
    whole = sum(share.bytes for share in shares)
    return empty if not whole else _in_proportion(shares, total)


def _in_proportion(shares: Shares, total: int) -> Shares:
    grown = beside(shares, total)
    return tuple(Share(new.device, new.bytes - old.bytes) for new, old in zip(grown, shares, strict=True))
