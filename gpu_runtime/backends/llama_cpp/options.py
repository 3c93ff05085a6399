"""A GGUF model's options, checked and turned into arguments of llama.cpp."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ...errors import BadSetting, NotAModel
from ...facts import Evidence, ModelSpec, Share, Shares, beside
from ..formats import gguf, sources
from ..missing import AbsentBackend

CONTEXT_TOKENS = 4096  # where nobody asks for a length, and the model knows as many
CACHE_TYPES = {
    "float32": 0,
    "f32": 0,
    "float16": 1,
    "f16": 1,
    "fp16": 1,
    "half": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "iq4_nl": 20,
    "bfloat16": 30,
    "bf16": 30,
}  # Source: ggml.h, enum ggml_type
PASSED_ON = (
    "n_batch",
    "n_ubatch",
    "n_threads",
    "n_threads_batch",
    "seed",
    "chat_format",
    "chat_template",
    "use_mmap",
    "use_mlock",
    "rope_freq_base",
    "rope_freq_scale",
    "lora_path",
    "lora_scale",
    "logits_all",
    "offload_kqv",
    "swa_full",
)
OURS = ("n_gpu_layers", "n_ctx", "tensor_split", "type_k", "type_v", "model_path")
SPLIT_MODES = {"layer": 1, "row": 2}  # Source: llama.h, llama_split_mode


def gguf_file(spec: ModelSpec) -> Path:
    """The file that llama.cpp is to open: the first part of a split one. Raises NotAModel, LoadFailed."""
    path = sources.directory(spec.source, spec.name, spec.options.get("revision"))
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        if not found:
            raise NotAModel(
                f"{spec.name}: {path} holds no GGUF file.", name=spec.name, source=spec.source
            )
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
    takes = {
        "context_at_load": context_tokens(spec, found.config),
        "written_scores": not flash_attention(spec),
    }
    if (
        layers := found.config.get("num_hidden_layers")
    ) is None:  # then nothing tells what that context takes
        takes = {}
    elif part < 1:  # the cache lies where its layers do
        takes |= {"all_layers": layers, "num_hidden_layers": min(gpu_layers(spec), layers)}
    return replace(found, weight_bytes=weights, at_load=True, config={**found.config, **takes})


def check(spec: ModelSpec) -> None:
    """Raises BadSetting for an option that cannot be, or that is ours to decide."""
    for option in OURS:
        if option in spec.options:
            said = {"n_gpu_layers": "given as gpu_layers", "n_ctx": "given as context_length"}.get(
                option, "left out: where a model goes is decided here"
            )
            raise BadSetting(option, spec.options[option], said)
    layers = spec.options.get("gpu_layers")
    if layers is not None and (type(layers) is not int or layers < -1):
        raise BadSetting("gpu_layers", layers, "-1 (all), 0 (CPU only) or a number of layers")
    if (mode := spec.options.get("split_mode", "layer")) not in SPLIT_MODES:
        raise BadSetting("split_mode", mode, "layer or row")
    main = spec.options.get("main_gpu", 0)
    if type(main) is not int or main < 0:
        raise BadSetting("main_gpu", main, "which of its cards, counted from 0")
    if (dtype := spec.options.get("cache_dtype")) is not None and str(
        dtype
    ).lower() not in CACHE_TYPES:
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


def arguments(
    spec: ModelSpec,
    shares: Shares,
    path: str,
    config: dict[str, Any],
    cards: tuple[int, ...] | None,
) -> dict[str, Any]:
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
        "model_path": path,
        "name": spec.name,
        "n_gpu_layers": gpu_layers(spec),
        "n_ctx": context_tokens(spec, config),
        "main_gpu": numbers[main] if numbers else 0,
        "split_mode": SPLIT_MODES[spec.options.get("split_mode", "layer")]
        if len(shares) > 1
        else 0,
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
        by_number = {
            int("".join(filter(str.isdigit, name))): sum(buffers[name].values())
            for name in on_cards
        }
        return tuple(
            Share(share.device, max(by_number.get(number, 0), charged.get(share.device, 0)))
            for number, share in enumerate(shares)
        )
    rest = sum(size for of in buffers.values() for name, size in of.items() if name != "model")
    total = round((facts["weight_bytes"] + rest) * part)
    empty = tuple(Share(share.device, 0) for share in shares)
    if len(shares) == 1:
        return (Share(shares[0].device, total),)
    whole = sum(share.bytes for share in shares)
    return empty if not whole else _in_proportion(shares, total)


def _in_proportion(shares: Shares, total: int) -> Shares:
    grown = beside(shares, total)
    return tuple(
        Share(new.device, new.bytes - old.bytes) for new, old in zip(grown, shares, strict=True)
    )
