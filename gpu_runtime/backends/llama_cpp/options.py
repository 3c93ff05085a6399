"""Checks the options of a GGUF model, and turns them into arguments of `llama_cpp.Llama`.

This module also reads a model's size from its file, and counts the bytes of a loaded model
(`taken`). Nothing here starts a process or imports llama_cpp. The backend `llama_cpp` and the
recipe of `llama-server` share these functions.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ...arguments import embedded_tokens
from ...errors import BadSetting, NotAModel
from ...facts import Evidence, ModelSpec, Share, Shares, beside
from ..formats import gguf, sources
from ..formats.sources import AbsentBackend

IN_PROCESS = "llama_cpp"  # the backend that uses llama-cpp-python; the other is llama-server
MEAN_POOLING = 1  # LLAMA_POOLING_TYPE_MEAN. Source: llama.cpp, include/llama.h
CONTEXT_TOKENS = 4096  # default length, if the model supports as many
CACHE_TYPES = {
    **dict.fromkeys(("float32", "f32"), 0),
    **dict.fromkeys(("float16", "f16", "fp16", "half"), 1),
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "iq4_nl": 20,
    **dict.fromkeys(("bfloat16", "bf16"), 30),
}  # value of the option cache_dtype -> ggml_type. Source: ggml.h, enum ggml_type
_UNQUANTISED = ("", "f32", "f16", "bf16")
# How often a thread of the engine looks for work before it sleeps. GNU's OpenMP looks 300,000 times,
# which took 6 ms of a core after each batch, and 20 times the batch itself on a busy machine: the
# server, its clients and other engines wait for that core. 20,000 looks take 0.4 ms. With 2,000, an
# engine beside another one that looks for long took twice as long. Measured for one token of
# llama-server: 3.9 ms with each count; beside four busy loops 52, 20 and 19 ms with 300,000, 20,000
# and 2,000. Source: libgomp, Environment Variables, GOMP_SPINCOUNT.
LOOKS_FOR_WORK = {"GOMP_SPINCOUNT": "20000"}
# Options that are passed to `llama_cpp.Llama` unchanged.
PASSED_TO_LLAMA = """n_batch n_ubatch n_threads n_threads_batch use_mmap use_mlock logits_all offload_kqv swa_full
    rope_freq_base rope_freq_scale lora_scale seed chat_format chat_template lora_path""".split()
SPLIT_MODES = {"layer": 1, "row": 2}  # Source: llama.h, llama_split_mode


def waiting_environment() -> dict[str, str]:
    """Variables for a process that runs llama.cpp: its threads sleep soon after their work.

    Empty if the user's own variables set how threads wait.
    """
    own = os.environ.keys() & {"OMP_WAIT_POLICY", *LOOKS_FOR_WORK}
    return {} if own else LOOKS_FOR_WORK


def gguf_file(spec: ModelSpec) -> Path:
    """The file that llama.cpp opens for `spec`; of a split model, the first part.

    Raises NotAModel, LoadFailed.
    """
    path = sources.directory(spec.source, spec.name, spec.options.get("revision"))
    fault = ""
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        if found:
            path = sources.only(found, spec.name)
        else:
            fault = "holds no GGUF file"
    elif path.exists() and path.suffix != ".gguf":
        fault = "is not a GGUF file"
    if fault:
        text = f"{spec.name}: {path} {fault}."
        raise NotAModel(text, name=spec.name, source=spec.source)
    return gguf.files(path, spec.name)[0]


def gguf_evidence(spec: ModelSpec) -> Evidence:
    """What the GGUF file of `spec` shows about the memory that llama.cpp takes on the card.

    llama.cpp allocates cache and work space when it loads. So the evidence includes the context:
    its length is the option `context_length`, or the default. Raises BadSetting, NotAModel,
    LoadFailed.
    """
    check(spec)
    if os.path.lexists(os.path.expanduser(spec.source)):
        gguf_file(spec)  # raises for a local path that is not a GGUF file
    found = AbsentBackend(spec.backend).evidence(spec)
    part = offloaded(spec, found.config)
    weights = None if found.weight_bytes is None else round(found.weight_bytes * part)
    if found.file_bytes and part == 0:
        weights = 0
    config = {**found.config, "one_sequence": spec.backend == IN_PROCESS}
    layers = config.get("num_hidden_layers")
    if layers is None and gpu_layers(spec) >= 0:
        config["layers_on_card"] = gpu_layers(spec)
    if layers is not None:  # otherwise the size of the context's cache is unknown
        config["context_at_load"] = _sequence_tokens(spec, found.config)
        config["batch_tokens"] = _batch_tokens(spec, found.config)
        config["written_scores"] = not flash_attention(spec)
        if part < 1:  # the cache of a layer is on the same device as the layer
            config["all_layers"] = layers
            config["num_hidden_layers"] = min(gpu_layers(spec), layers)
    return replace(found, weight_bytes=weights, at_load=True, config=config)


def check(spec: ModelSpec) -> None:
    """Raises BadSetting if llama.cpp does not have the cache of `spec`."""
    dtype = spec.options.get("cache_dtype")
    if dtype is not None and str(dtype).lower() not in CACHE_TYPES:
        raise BadSetting("cache_dtype", dtype, "one of " + ", ".join(CACHE_TYPES))


def gpu_layers(spec: ModelSpec) -> int:
    """The number of layers of the model of `spec` on the card; -1: all."""
    layers = spec.options.get("gpu_layers")
    return -1 if layers is None else layers


def offloaded(spec: ModelSpec, config: dict[str, Any]) -> float:
    """The part of the layers of the file's `config` that is on the card, from 0 to 1.

    The output counts as one more layer.
    """
    layers = gpu_layers(spec)
    all_layers = config.get("all_layers", config.get("num_hidden_layers"))
    if layers == 0:
        return 0.0
    if layers < 0 or not isinstance(all_layers, int):
        return 1.0
    return min(layers, all_layers + 1) / (all_layers + 1)


def context_tokens(spec: ModelSpec, config: dict[str, Any]) -> int:
    """The tokens in the contexts of all sequences of `spec` together.

    In the backend llama_cpp all sequences use one context, because they are computed one after the
    other.
    """
    sequences = 1 if spec.backend == IN_PROCESS else spec.options.get("sequences") or 1
    return _sequence_tokens(spec, config) * sequences


def _sequence_tokens(spec: ModelSpec, config: dict[str, Any]) -> int:
    """The option `context_length`, else what the model supports, at most CONTEXT_TOKENS."""
    supported = config.get("max_position_embeddings")
    usual = CONTEXT_TOKENS
    if isinstance(supported, int) and supported > 0:
        usual = min(CONTEXT_TOKENS, supported)
    return spec.options.get("context_length") or usual


def _batch_tokens(spec: ModelSpec, config: dict[str, Any]) -> int:
    """The most tokens that llama.cpp computes at once for `spec`. `config` is that of the file."""
    if embeds(spec):
        return embedded_tokens(spec.options, _sequence_tokens(spec, config))
    given = [spec.options.get(name) for name in ("n_batch", "n_ubatch")]
    return min(gguf.BATCH_TOKENS if count is None else count for count in given)


def embeds(spec: ModelSpec) -> bool:
    """Whether the model of `spec` makes vectors of texts."""
    return spec.model_type == "embedding" or bool(spec.options.get("embedding"))


def cache_type(spec: ModelSpec) -> str:
    """The dtype of the cache of the model `spec` as ggml names it, such as f16; empty if none is set."""
    number = CACHE_TYPES.get(str(spec.options.get("cache_dtype")).lower())
    names = (name for name, other in CACHE_TYPES.items() if other == number)
    return min(names, key=len, default="")


def flash_attention(spec: ModelSpec) -> bool:
    """The option `flash_attn` of `spec`; without it, true for a quantised cache, which needs it."""
    return bool(spec.options.get("flash_attn", cache_type(spec) not in _UNQUANTISED))


def llama_arguments(
    spec: ModelSpec,
    shares: Shares,
    path: str,
    config: dict[str, Any],
    cards: tuple[int, ...] | None,
) -> dict[str, Any]:
    """The arguments of `Llama` that load the file `path` of `spec`, split over its `shares`.

    `config` is the config of the file. `cards` are the numbers that the cards of the shares have in
    this process; None if the cards are simulated, or if a server loads the file. For a worker
    process and a server, which see no other cards, the numbers are 0, 1 and so on.
    """
    isolated = spec.options.get("isolated", True)
    numbers = tuple(range(len(shares))) if isolated or cards is None else cards
    main = min(spec.options.get("main_gpu", 0), len(shares) - 1)
    several = len(shares) > 1
    split_mode = SPLIT_MODES[spec.options.get("split_mode", "layer")] if several else 0
    arguments = {
        "model_path": path,
        "name": spec.name,
        "n_gpu_layers": gpu_layers(spec),
        "n_ctx": context_tokens(spec, config),
        "main_gpu": numbers[main] if numbers else 0,
        "split_mode": split_mode,
        "embedding": embeds(spec),
        "needs_gpu": cards is not None and gpu_layers(spec) != 0,
        "flash_attn": flash_attention(spec),
    }
    if several:
        arguments["tensor_split"] = _tensor_split(numbers, shares)
    dtype = spec.options.get("cache_dtype")
    if dtype is not None:
        arguments["type_k"] = arguments["type_v"] = CACHE_TYPES[str(dtype).lower()]
    if arguments["embedding"] and config and not config.get("pooling_type"):
        arguments["pooling_type"] = MEAN_POOLING  # without it, each token has a vector of its own
    passed_on = {name: spec.options[name] for name in PASSED_TO_LLAMA if name in spec.options}
    if arguments["embedding"]:
        passed_on["n_batch"] = passed_on["n_ubatch"] = _batch_tokens(spec, config)
    return arguments | passed_on


def _tensor_split(numbers: tuple[int, ...], shares: Shares) -> list[float]:
    """The part of the model on each card, by the card's number; 0 for a card without a share."""
    split = [0.0] * (max(numbers, default=0) + 1)
    for number, share in zip(numbers, shares, strict=True):
        split[number] += float(share.bytes)
    total = sum(split) or 1.0
    return [round(part / total, 6) for part in split]


def taken(
    facts: dict[str, Any],
    shares: Shares,
    part: float,
    charged: dict[str, int],
    numbers: Sequence[int] | None = None,
) -> Shares:
    """The bytes that a loaded model holds on the devices of its `shares`.

    `facts` are the worker's report of a load, with the buffers that llama.cpp allocated. For
    each card, the buffers' bytes count, or the driver's figure in `charged` if it is larger.

    `numbers` are llama.cpp's numbers of the cards, as in the names of their buffers (CUDA0, CUDA1).
    None means 0, 1 and so on, in the order of `shares`, as in a worker process.

    If no buffer is on a card, llama.cpp computes on the CPU, as it does for simulated cards. A card
    would hold the fraction `part` of the weights and of the cache (see `offloaded`), and the whole
    work space. Results are in host memory in both cases. These bytes are divided in proportion to
    `shares`.
    """
    buffers = facts["buffers"]
    on_cards = {name: sizes for name, sizes in buffers.items() if name[-1:].isdigit()}
    if on_cards:
        number_of = {name: int("".join(filter(str.isdigit, name))) for name in on_cards}
        by_number = {number_of[name]: sum(sizes.values()) for name, sizes in on_cards.items()}
        return tuple(
            Share(share.device, max(by_number.get(number, 0), charged.get(share.device, 0)))
            for number, share in zip(numbers or range(len(shares)), shares, strict=True)
        )
    by_use: dict[str, int] = {}
    for sizes in buffers.values():
        for use, size in sizes.items():
            by_use[use] = by_use.get(use, 0) + size
    cache = by_use.get("KV", 0) + by_use.get("RS", 0)
    total = round((facts["weight_bytes"] + cache) * part)
    if part:
        total += by_use.get("compute", 0)
    if len(shares) == 1:
        return (Share(shares[0].device, total),)
    if not sum(share.bytes for share in shares):
        return tuple(Share(share.device, 0) for share in shares)
    pairs = zip(beside(shares, total), shares, strict=True)
    return tuple(Share(new.device, new.bytes - old.bytes) for new, old in pairs)
