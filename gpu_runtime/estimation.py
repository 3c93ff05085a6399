"""Estimates the bytes that a model needs before it is loaded, part by part, with each number's source.

Pure: nothing here reads a file, a device or a clock. `owner/sizing.py` reads the sources and
stores the measurements. There are three inputs: the declared size, earlier measurements, and the
`Evidence` that the source gives. The result is a `Footprint`. Nothing is loaded. The size of the
weights is taken from the first known source in this list:
    declared size > measured before > header of the files > module without data > size of the files
    > the name

A lease covers the weights. If the registration requested room for use (`context_length`,
`sequences`), the lease also covers KV cache and activations, calculated from the config: a config
with Hugging Face's names, into which a GGUF header is translated first. A value that the config does
not contain is None, never zero. All figures are for inference, without gradients. Memory that code
uses beyond its leases is measured, and the book (all leases and requests) counts it as the residue
of its process.

*No overhead is counted twice.* Overheads are cache, activations and the CUDA context. A declared
size includes them, so nothing is added to it. To any other size, cache and activations of the
requested use are added, if they can be calculated. If not, and if only the size of the files or the
name is known, a fraction of the weights is added instead. The CUDA context is added for a process's
first model on a card. Afterwards the context is part of the residue.

*Peak.* The peak use of a model is stored and shown, but not leased: one large batch would make the
lease large forever. While torch keeps the bytes of a peak, they are in the book as residue.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from .errors import BadSetting, UnknownSize
from .facts import Evidence, Footprint, Measurement, Part
from .units import counted, show_bytes

# Source: the estimation chain of the Model Boss coordinator.
FILE_FACTORS = {"gguf": 1.1, "safetensors": 1.3}
# Bytes of a CUDA context, until this process has measured one. Source: NDIF, about 400 MiB.
CONTEXT_BYTES = 500 * 2**20

# Bits for each weight, including scales and the few tensors with more bits. Source: llama.cpp,
# tools/quantize/README, Llama 2 7B. For types that this source does not list (IQ*, TQ*, *_0, *_1),
# the number is calculated from the type's block.
QUANT_BITS = {
    **{"Q2_K": 3.35, "Q2_K_S": 3.35},
    **{"Q3_K_S": 3.50, "Q3_K_M": 3.91, "Q3_K_L": 4.27, "Q3_K": 3.91},
    **{"Q4_K_S": 4.58, "Q4_K_M": 4.84, "Q4_K": 4.84},
    **{"Q5_K_S": 5.52, "Q5_K_M": 5.68, "Q5_K": 5.68},
    **{"Q6_K": 6.56, "Q8_K": 9.13},
    **{"Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 5.5, "Q5_1": 6.0, "Q8_0": 8.5},
    **{"IQ1_S": 1.56, "IQ1_M": 1.75, "IQ2_XXS": 2.06, "IQ2_XS": 2.31, "IQ2_S": 2.56, "IQ2_M": 2.7},
    **{"IQ3_XXS": 3.06, "IQ3_XS": 3.3, "IQ3_S": 3.44, "IQ3_M": 3.66, "IQ4_XS": 4.25, "IQ4_NL": 4.5},
    **{"TQ1_0": 1.69, "TQ2_0": 2.06, "MXFP4": 4.25, "NVFP4": 4.5},
}
# Names of other formats -> bits for each weight.
_WORD_BITS = {
    **dict.fromkeys(("fp32", "float32", "f32"), 32),
    **dict.fromkeys(("fp16", "float16", "f16", "bf16", "bfloat16", "half"), 16),
    **dict.fromkeys(("fp8", "int8", "8bit", "w8a8", "w8a16"), 8),
    **dict.fromkeys(("awq", "gptq", "int4", "4bit", "nf4", "fp4", "w4a16", "bnb"), 4.5),
}
_COUNT = re.compile(r"(?<![a-z0-9.])(?:(\d{1,3})x)?(\d+(?:\.\d+)?)([mbt])(?![a-z0-9])")
_SCALES = {"m": 10**6, "b": 10**9, "t": 10**12}
# A model with n experts has this fraction of n × size weights, because experts share attention.
# Mixtral 8x7B has 46.7 of 56 billion weights.
_EXPERTS_SHARE = 0.83


def footprint(
    name: str,
    evidence: Evidence,
    *,
    declared: int | None = None,
    measured: Measurement | None = None,
    working_bytes: int | None = None,
    options: Mapping[str, Any] | None = None,
    quantization: str = "",
    context_bytes: int = 0,
) -> Footprint:
    """The footprint of the model `name`, from the best known source of its size.

    `evidence` is from the model's source, `declared` is the model's declared size in bytes,
    `measured` is an earlier measurement, and `options` are the options of the registration.
    `working_bytes` is what a loaded model was measured to take besides `measured`, if that is known.
    `quantization` is the model's format, if the name does not show it. `context_bytes` is the size
    of the CUDA context that the load will create, or 0.

    Raises UnknownSize if nothing shows the size; the error tells the user to declare the size.
    Raises BadSetting for an option that cannot be used.
    """
    use = planned_use(options or {}, evidence.config)
    weights = _weights(name, evidence, measured, quantization)
    if working_bytes is not None and weights is not None:
        room = Part("room", working_bytes, "measured", "the rest of what its engine takes")
        parts: tuple[Part, ...] = (weights, room)
    elif declared is not None:
        parts = _declared(declared, weights, use is not None)
    elif weights is None:
        raise UnknownSize(name, evidence.why_unknown or "neither its source nor its name shows it")
    else:
        parts = (weights, *_beyond_weights(name, weights, evidence, measured, use))
    context_is_measured = evidence.at_load and measured is not None
    if context_bytes and declared is None and not context_is_measured:
        parts = (*parts, _context(context_bytes))
    total = sum(part.bytes for part in parts)
    return Footprint(
        parts,
        heads=attention_heads(evidence.config),
        pieces=_stretched(evidence.pieces, total),
        notes=_notes(evidence, measured, use),
        at_load=evidence.at_load and working_bytes is None,
    )


def _weights(
    name: str, evidence: Evidence, measured: Measurement | None, quantization: str
) -> Part | None:
    """The part for the weights, from the best known source; None if no source shows their size."""
    if measured is not None:
        when = "as it is in memory now"
        if measured.day:
            on_device = f" on {measured.device}" if measured.device else ""
            when = f"after it was loaded{on_device} on {measured.day}"
        return Part("weights", measured.resident_bytes, "measured", when)
    if evidence.weight_bytes is not None:
        return Part("weights", evidence.weight_bytes, evidence.source)
    if evidence.file_bytes:
        files = f"of its {evidence.file_format} files"
        return Part("weights", evidence.file_bytes, "file size", files)
    # The name of the file says more than the name that a person gave the model.
    found = from_name(evidence.name, quantization) or from_name(name, quantization)
    if found is None:
        return None
    size, how = found
    layers, all_layers = _typical_layers(name, evidence)
    if len(layers) < all_layers:
        size = size * len(layers) // all_layers
        how += f", {len(layers)} of {all_layers} layers"
    return Part("weights", size, "name", how)


def _typical_layers(name: str, evidence: Evidence) -> tuple[tuple[Layer, ...], int]:
    """The cache of the layers on the card, and the number of all layers, if only a name is known."""
    count, _ = _count_in(evidence.name) or _count_in(name) or (0.0, "")
    layers = typical_layers(count)
    return layers[: evidence.config.get("layers_on_card")], len(layers)


def _declared(declared: int, weights: Part | None, use_requested: bool) -> tuple[Part, ...]:
    """The parts of a declared size: a single part, or the weights and the room for use."""
    if not use_requested or weights is None or weights.bytes >= declared:
        return (Part("all", declared, "declared"),)
    rest = declared - weights.bytes
    return weights, Part("room", rest, "declared", "the rest of the declared size, for use")


def _beyond_weights(
    name: str,
    weights: Part,
    evidence: Evidence,
    measured: Measurement | None,
    use: PlannedUse | None,
) -> tuple[Part, ...]:
    """The parts for cache and activations; a margin if these cannot be calculated."""
    if evidence.at_load:
        # Nothing is added to the measured size of an engine, because it includes the cache. Nothing
        # is added if the engine's weights are in host memory, because its cache is there too.
        if measured is not None or evidence.weight_bytes == 0:
            return ()
    if use and weights.source == "name" and cache_layers(evidence.config) is None:
        return _typical_cache(name, evidence, use), *_margin(weights, evidence)
    return _room(name, evidence.config, use) or _margin(weights, evidence)


def _typical_cache(name: str, evidence: Evidence, use: PlannedUse) -> Part:
    """The largest cache that the model can have, if only its name is known."""
    _, text = _count_in(evidence.name) or _count_in(name) or (0.0, "")
    layers, _ = _typical_layers(name, evidence)
    size = _cache_bytes(layers, use)
    words = f"{_cache_in_words(layers, use)}: at most, as for {text} without grouped attention"
    return Part("kv_cache", size, "name", words)


def _cache_bytes(layers: tuple[Layer, ...], use: PlannedUse) -> int:
    return kv_cache_bytes(layers, use.tokens, use.sequences, use.cache_bits)


def _context(size: int) -> Part:
    source = "typical" if size == CONTEXT_BYTES else "measured"
    return Part("context", size, source, "of CUDA, once for this process on that card")


def _room(name: str, config: Mapping[str, Any], use: PlannedUse | None) -> tuple[Part, ...]:
    """The parts for cache and activations of the requested use; empty if `use` is None."""
    if use is None:
        return ()
    layers = cache_layers(config)
    if layers is None:
        raise UnknownSize(
            name,
            "its config does not show the size of its cache, so no context_length can be reserved; "
            "a declared size can include it",
        )
    parts = []
    cache = _cache_bytes(layers, use)
    if cache:
        parts.append(Part("kv_cache", cache, "config", _cache_in_words(layers, use)))
    active = activation_bytes(config, use)
    if active:
        at_once = min(use.tokens, _number(config, _BATCH) or use.tokens)
        how = f"{_times(use)}{at_once:,} tokens read in one pass"
        parts.append(Part("activations", active, "config", how))
    return tuple(parts)


def _margin(weights: Part, evidence: Evidence) -> tuple[Part, ...]:
    """The margin for cache and activations, if only the size of the files or the name is known.

    It is a fraction of the weights, which depends on the file format.
    """
    if weights.source not in ("file size", "name"):
        return ()
    quantized = "gguf" if any(word in weights.detail for word in QUANT_BITS) else "safetensors"
    factor = FILE_FACTORS[evidence.file_format or quantized]
    size = round(weights.bytes * (factor - 1))
    how = f"× {factor} for cache and activations, which it does not show"
    return (Part("margin", size, weights.source, how),)


def _cache_in_words(layers: tuple[Layer, ...], use: PlannedUse) -> str:
    """The cache as text, such as `2 × 8,192 tokens, 32 layers, 16 bits`."""
    with_cache = [layer for layer in layers if layer.values]
    with_window = [layer for layer in with_cache if layer.window]
    count = counted(len(with_cache), "layer")
    text = f"{_times(use)}{use.tokens:,} tokens, {count}, {use.cache_bits:g} bits"
    longest_window = max((layer.window for layer in layers), default=0)
    if longest_window:
        text += f", {len(with_window)} of them within {longest_window:,} tokens"
    return text


def _times(use: PlannedUse) -> str:
    return f"{use.sequences} × " if use.sequences > 1 else ""


def _notes(
    evidence: Evidence, measured: Measurement | None, use: PlannedUse | None
) -> tuple[str, ...]:
    """Sentences about the measured peak, and about a cache that is not counted."""
    notes = []
    if measured is not None and measured.day:
        peak = measured.peak_bytes or 0
        if peak > measured.resident_bytes:
            notes.append(f"At its peak it took {show_bytes(peak)}, measured on {measured.day}.")
    if use is None and evidence.config:
        each = _cache_bytes_per_token(evidence.config)
        if each:
            notes.append(
                f"Its KV cache grows by {show_bytes(each)} per generated token, and is not counted. "
                "Reserve room for it:  context_length=TOKENS"
            )
    return tuple(notes)


def _cache_bytes_per_token(config: Mapping[str, Any]) -> int:
    """Bytes of cache for one more token of a sequence; 0 if the config shows no cache."""
    layers = cache_layers(config)
    if not layers:
        return 0
    bits = 8.0 * item_bytes({}, config)
    return kv_cache_bytes(layers, tokens=1, bits=bits)


def _stretched(pieces: tuple[int, ...], total: int) -> tuple[int, ...]:
    """The `pieces`, all enlarged in proportion to their sizes, so that they sum to `total` bytes.

    >>> _stretched((1, 1, 2), 10)
    (2, 3, 5)
    """
    whole = sum(pieces)
    if not whole:
        return ()
    ends = [passed * total // whole for passed in accumulate(pieces, initial=0)]
    return tuple(end - start for start, end in pairwise(ends))


def from_name(name: str, quantization: str = "") -> tuple[int, str] | None:
    """The bytes of the weights according to the `name`, and a text on how they were computed.

    None if `name` has no number of weights; the largest counts. Each weight has 16 bits if neither
    `name` nor `quantization` contains a known format.

    >>> from_name("Llama-2-7B-Q4_K_M.gguf")
    (4235000000, '7B at 4.84 bits (Q4_K_M)')
    >>> from_name("Mixtral-8x7B-Instruct-AWQ")[1], from_name("writer")
    ('8x7B at 4.5 bits (awq)', None)
    """
    found = _count_in(name)
    if found is None:
        return None
    count, text = found
    bits, format = _bits(f"{name} {quantization}")
    return int(count * bits / 8), f"{text} at {bits:g} bits ({format})"


def _count_in(name: str) -> tuple[float, str] | None:
    """The largest number of weights in the `name`, with its text, such as `8x7B`; else None."""
    matches = _COUNT.finditer(name.lower().replace("_", "-"))
    return max((_weight_count(match) for match in matches), default=None)


def _weight_count(match: re.Match[str]) -> tuple[float, str]:
    """The number of weights in a match of `_COUNT`, and its text, such as `8x7B`."""
    experts, size, scale = match.groups()
    count = float(size) * _SCALES[scale]
    if experts:
        count *= int(experts) * _EXPERTS_SHARE
    return count, match[0].upper().replace("X", "x")


def _bits(text: str) -> tuple[float, str]:
    """Bits for each weight in the format that the `text` names, and the format."""
    upper = text.upper().replace("-", "_")
    for quantization in sorted(QUANT_BITS, key=len, reverse=True):
        if re.search(rf"(?<![A-Z0-9]){quantization}(?![A-Z0-9])", upper):
            return QUANT_BITS[quantization], quantization
    lower = text.lower()
    words = set(re.split(r"[^a-z0-9]+", lower))
    words.update("".join(pair) for pair in re.findall(r"(\d)[-_ ]?(bit)", lower))
    for word, bits in _WORD_BITS.items():
        if word in words:
            return float(bits), word
    return 16.0, "half precision"


# -- KV cache and activations ----------------------------------------------------------------------


# Bits of one value in the cache, scales included.
CACHE_BITS = {
    **dict.fromkeys(("float32", "f32"), 32.0),
    **dict.fromkeys(("float16", "f16", "fp16", "half", "bfloat16", "bf16"), 16.0),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "float8_e4m3fn", "float8_e5m2", "int8"), 8.0),
    **{
        name.lower(): QUANT_BITS[name]
        for name in ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL")
    },
    "int4": 4.0,
}
_MOST_LAYERS = 10_000  # a larger number in a config is treated as an error
# Keys under which multimodal models keep the config of their language model.
_NESTED = ("text_config", "llm_config", "language_config")
# Maps a model type to n: every n-th layer reads the whole context, and all other layers have a
# window. The number n is used if the config has a window but no pattern. The numbers are from
# transformers.
_PATTERNS = {
    **dict.fromkeys(("gemma2", "gpt_oss"), 2),
    **dict.fromkeys(("cohere2", "olmo3", "llama4_text"), 4),
    "gemma3n_text": 5,
    **dict.fromkeys(("gemma3", "gemma3_text"), 6),
}
_GENERATES = (
    *("CausalLM", "LMHead", "ConditionalGeneration", "ImageTextToText", "Seq2SeqLM"),
    "LMHeadModel",
)
# Activation functions that are computed in several steps, so that more intermediate values exist.
_UNFUSED = {"gelu_new", "gelu_fast", "quick_gelu", "gelu_accurate"}
_RECURRENT = ("linear", "mamba", "conv", "recurrent")  # in the name of a recurrent layer's type

# The different names of the same number.
_WIDTH = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_DECODER_LAYERS = ("num_decoder_layers", "decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
_GROUPS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv")
_HEAD_SIZE = ("head_dim", "kv_channels", "d_kv")
_INNER = ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size")
_WINDOW = ("sliding_window", "attention_chunk_size", "sliding_window_size")
_BATCH = "batch_tokens"  # that the engine reads at once; without it, the whole context
_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")
_EXPERT_INNER = ("moe_intermediate_size", "expert_ffn_hidden_size")
_CONTEXT = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"),
    *("max_sequence_length", "model_max_length"),
)


class Layer(NamedTuple):
    """The cache of one layer, which keeps `values` numbers for each of the last `window` tokens.

    If `window` is 0, the layer keeps the values of all tokens.
    """

    values: int
    window: int = 0


class PlannedUse(NamedTuple):
    """The use of a model for which room is reserved."""

    tokens: int  # context of each sequence
    sequences: int
    cache_bits: float
    item_bytes: int  # bytes of one activation value
    eager: bool = False  # whether attention stores its whole matrix of scores


def planned_use(options: Mapping[str, Any], config: Mapping[str, Any]) -> PlannedUse | None:
    """The use that `context_length`, `sequences` and `cache_dtype` in `options` describe.

    The context of a sequence is `context_length`, else `config["context_at_load"]` of an engine that
    allocates its cache at load, else the longest context that `config` names; None without all of
    these and `sequences`. If `config["one_sequence"]` is true, the engine computes one sequence
    after the other, and `sequences` is ignored. Raises BadSetting for a value that cannot be used.
    """
    tokens = options.get("context_length")
    if tokens is None:
        tokens = config.get("context_at_load")
    sequences = None if config.get("one_sequence") else options.get("sequences")
    if tokens is None and sequences is None:
        return None
    for name, given in (("context_length", tokens), ("sequences", sequences)):
        if given is not None and (type(given) is not int or given < 1):
            raise BadSetting(name, given, "a whole number above 0")
    if tokens is None:
        tokens = _number(_text(config), *_CONTEXT)
    if tokens is None:
        expected = "given with context_length, since the model's config does not contain its own"
        raise BadSetting("sequences", sequences, expected)
    item = item_bytes(options, config)
    return PlannedUse(
        tokens,
        sequences=sequences or 1,
        cache_bits=_cache_bits(options.get("cache_dtype"), item),
        item_bytes=item,
        eager=options.get("attn_implementation") == "eager",
    )


def _cache_bits(dtype: Any, item_bytes: int) -> float:
    """Bits of a cached value with this `dtype`; without a dtype, the bits of an activation."""
    if dtype is None:
        return 8.0 * item_bytes
    bits = _bits_of(dtype)
    if bits is None:
        raise BadSetting("cache_dtype", dtype, "one of " + ", ".join(CACHE_BITS))
    return bits


def _bits_of(dtype: Any) -> float | None:
    return CACHE_BITS.get(str(dtype).removeprefix("torch.").lower())


def item_bytes(options: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """Bytes of an activation: by the `dtype` in `options`, else in `config`, else 2."""
    for source in (options, config, _text(config)):  # transformers converts all parts to one dtype
        for name in ("dtype", "torch_dtype"):
            bits = _bits_of(source.get(name))
            if bits is not None and bits >= 16:
                return int(bits) // 8
    return 2


def attention_heads(config: Mapping[str, Any]) -> int:
    """The number of attention heads of a layer, from `config`; 0 if the number is unknown."""
    return _number(_text(config), *_HEADS) or 0


# -- the KV cache ----------------------------------------------------------------------------------


def kv_cache_bytes(
    layers: Sequence[Layer], tokens: int, sequences: int = 1, bits: float = 16.0
) -> int:
    """Bytes of the cache for `sequences` sequences of `tokens` tokens, with `bits` bits a value.

    `layers` is the result of `cache_layers`. The number of bytes is a lower bound: an engine that
    allocates pages or blocks rounds up.

    >>> llama_3_8b = [Layer(2 * 8 * 128)] * 32
    >>> kv_cache_bytes(llama_3_8b, tokens=8192)
    1073741824

    Source: Pope et al. 2022, arXiv:2211.05102.
    """
    kept = sum(layer.values * min(tokens, layer.window or tokens) for layer in layers)
    return math.ceil(kept * sequences * bits / 8)


def typical_layers(weights: float) -> tuple[Layer, ...]:
    """Estimates the cache of each layer of a transformer with this number of `weights`.

    An upper bound: every head has keys and values of its own. Models with grouped heads keep a
    quarter or less. A transformer has about 12 × layers × width² weights, and about one layer for
    each 128 of its width: Llama 2 7B has 32 layers of width 4096, and 13B has 40 of width 5120.

    >>> llama_2_7b = typical_layers(7e9)
    >>> len(llama_2_7b), llama_2_7b[0]
    (33, Layer(values=8422, window=0))

    Source: Kaplan et al. 2020, arXiv:2001.08361, table 1; Touvron et al. 2023, arXiv:2307.09288.
    """
    width = (weights * 128 / 12) ** (1 / 3)
    return (Layer(2 * round(width)),) * max(1, round(width / 128))


def cache_layers(config: Mapping[str, Any]) -> tuple[Layer, ...] | None:
    """The cache of each layer of the model with this `config`.

    The result is empty for a model without a cache, and None if the config does not show the cache.

    - Multi-head attention keeps a key and a value for each head.
    - Grouped-query attention keeps a key and a value for each group of heads.
    - Multi-head latent attention keeps one compressed vector and one rotary key for all heads.
    - Layers with a sliding window (or chunks) drop the tokens outside the window.
    - Recurrent layers keep a state that does not grow with the context, and that is not counted.

    Source: Ainslie et al. 2023, arXiv:2305.13245 (grouped queries); DeepSeek-AI 2024, arXiv:2405.04434
    (latent).
    """
    if not _generates(config):
        return ()
    text = _text(config)
    encoder_decoder = bool(config.get("is_encoder_decoder"))
    count = _number(text, *_DECODER_LAYERS) if encoder_decoder else None
    count = count or _number(text, *_LAYERS)
    if count is None or count > _MOST_LAYERS:
        return None
    window = _number(text, *_WINDOW) or 0
    # In some models, the last layers have no cache of their own and read the cache of another
    # layer.
    with_own_cache = count - min(_number(text, "num_kv_shared_layers") or 0, count)
    caches = 2 if encoder_decoder else 1  # one for the decoder, one for the encoder's output
    layers = []
    for index, kind in enumerate(_kinds(text, count)):
        values = _values(text, index, whole=kind == "full")
        if values is None:
            return None
        if kind == "none" or index >= with_own_cache:
            values = 0
        layers.append(Layer(values * caches, window if kind == "window" else 0))
    return tuple(layers)


def _values(text: Mapping[str, Any], index: int, *, whole: bool) -> int | None:
    """The number of values that one layer keeps for a token; None if the config does not show it.

    `whole` is True if the layer reads the whole context.
    """
    latent = _number(text, "kv_lora_rank")
    rotary = _number(text, "qk_rope_head_dim")
    if latent and rotary:
        return latent + rotary
    heads = attention_heads(text)
    if not heads:
        return None
    groups = _groups(text, index, heads)
    size = _number(text, *_HEAD_SIZE)
    if size is None:
        width = _number(text, *_WIDTH)
        size = width // heads if width else None
    if whole:
        groups = _number(text, "num_global_key_value_heads") or groups
        size = _number(text, "global_head_dim") or size
    if not size:
        return None
    value_size = _number(text, "v_head_dim") or size
    return groups * (size + value_size)


def _groups(text: Mapping[str, Any], index: int, heads: int) -> int:
    """The number of keys that one layer keeps for a token; the number of values is the same."""
    if text.get("multi_query") and "num_kv_heads" not in text:
        return 1
    groups = _at(text, index, *_GROUPS)
    return heads if groups is None else groups


def _kinds(text: Mapping[str, Any], count: int) -> list[str]:
    """The kind of each layer: `full` attention, attention in a `window`, or `none`."""
    types = text.get("layer_types", text.get("layers_block_type"))
    if isinstance(types, (list, tuple)) and len(types) >= count:
        return [_kind(str(word)) for word in types[:count]]
    model = str(text.get("model_type", ""))
    uses_window = text.get("use_sliding_window", not model.startswith("qwen"))
    if _number(text, *_WINDOW) is None or not uses_window:
        return ["full"] * count
    has_window = _windows(text, model, count)
    return ["window" if windowed else "full" for windowed in has_window]


def _windows(text: Mapping[str, Any], model: str, count: int) -> list[bool]:
    """For each layer of a model with a window: whether the window limits the layer."""
    pattern = text.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern:  # a letter for each layer, such as LLLG
        return [pattern[n % len(pattern)] == "L" for n in range(count)]
    if isinstance(pattern, (list, tuple)) and pattern:
        return [bool(pattern[n % len(pattern)]) for n in range(count)]
    every = _number(text, "sliding_window_pattern") or _PATTERNS.get(model)
    if every:
        return [(n + 1) % every != 0 for n in range(count)]
    first = text.get("max_window_layers", 0)
    return [not isinstance(first, int) or n >= first for n in range(count)]


def _kind(word: str) -> str:
    """The kind of a layer, from `word`, the name of the layer's type in the config."""
    if "sliding" in word or "chunked" in word:
        return "window"
    return "none" if any(part in word for part in _RECURRENT) else "full"


# -- activations -----------------------------------------------------------------------------------


def activation_bytes(config: Mapping[str, Any], use: PlannedUse) -> int | None:
    """The most bytes of activations at one time, while the context of `use` is read in one pass; None
    if the `config` does not show the size.

    The peak is where the feed-forward layer multiplies its two halves. At the peak, each token
    needs three vectors of the layer's inner width and four vectors of the model's width. With
    experts, each expert that a token uses needs these vectors. The logits of the last token (one
    score for each word of the vocabulary) are added. Attention that stores its scores
    (`attn_implementation="eager"`) holds a matrix of attention scores for each head, twice.

    If the engine reads the context in batches, `batch_tokens` in `config` is the size of a batch.
    An example is llama.cpp with 512 tokens; all sequences share a batch. See `_batch_values`.

    `tests/backends/test_estimates.py` compares the result with a forward pass of transformers, and
    with the buffers of llama.cpp.
    """
    text = _text(config)
    width = _number(text, *_WIDTH)
    if not width:
        return None
    values = _values_per_token(text, width)
    vocabulary = _number(text, "vocab_size") or 0
    batch = _number(text, _BATCH)
    if batch:
        tokens = use.tokens * use.sequences
        return min(batch, tokens) * _batch_values(text, width, values, tokens) * 4
    size = use.tokens * values * use.item_bytes
    if use.eager:
        scores = attention_heads(text) * use.tokens**2 * (use.item_bytes + 4)
        size = max(size, scores + use.tokens * 11 * width * use.item_bytes)
    last_scores = vocabulary * (use.item_bytes + 4) if _generates(config) else 0
    return use.sequences * (size + last_scores)


def _batch_values(text: Mapping[str, Any], width: int, values: int, tokens: int) -> int:
    """Values, of 4 bytes each, that llama.cpp's work buffer holds for each token of a batch.

    The steps of a layer use the buffer one after the other, so the largest step counts: the
    feed-forward layer with its `values`, the logits, or the attention. A mask over all `tokens` is
    kept meanwhile. If the attention scores are stored, there is a matrix of them for each head.

    Measured with llama.cpp of November 2026 on 16 shapes: within 2 %.
    """
    heads = attention_heads(text)
    mask = tokens if text.get("written_scores") else tokens // 2  # float32, else float16
    logits = (_number(text, "vocab_size") or 0) + 2 * width
    attention = 5 * width + (_values(text, 0, whole=True) or 2 * width) + mask
    if text.get("written_scores"):
        attention += heads * tokens
    return max(values + mask, logits, attention)


def _values_per_token(text: Mapping[str, Any], width: int) -> int:
    """Values that exist for each token at the peak of a feed-forward layer."""
    inner = _number(text, *_INNER) or 4 * width
    function = text.get("activation_function", text.get("hidden_act"))
    of_inner, of_width = 3, 4
    if isinstance(function, str) and function in _UNFUSED:
        of_inner, of_width = 5, 2
    dense = of_inner * inner + of_width * width
    experts = _number(text, *_EXPERTS)
    if not experts:
        return dense
    expert_inner = _number(text, *_EXPERT_INNER) or inner
    with_experts = experts * (of_inner * expert_inner + 4 * width) + 4 * width
    some_are_dense = _number(text, "first_k_dense_replace")
    return max(dense, with_experts) if some_are_dense else with_experts


# -- reading a config ------------------------------------------------------------------------------


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `config`, in which values of the language model's inner config replace outer values."""
    for key in _NESTED:
        inner = config.get(key)
        if isinstance(inner, Mapping):
            return {**config, **inner}
    return config


def _generates(config: Mapping[str, Any]) -> bool:
    """Whether the model generates tokens and so has a cache. Embedders and classifiers do not."""
    architectures = config.get("architectures")
    if not isinstance(architectures, (list, tuple)) or not architectures:
        return True
    return any(str(name).endswith(_GENERATES) for name in architectures)


def _number(config: Mapping[str, Any], *names: str) -> int | None:
    """The first of `names` in `config` with a whole number above 0, or a list, whose largest counts."""
    for name in names:
        value = config.get(name)
        if isinstance(value, (list, tuple)):
            value = max((number for number in value if type(number) is int), default=None)
        if type(value) is int and value > 0:
            return value
    return None


def _at(config: Mapping[str, Any], index: int, *names: str) -> int | None:
    """The first of `names` in `config` with an integer from 0 on, or a list, that for layer `index`."""
    for name in names:
        value = config.get(name)
        if isinstance(value, (list, tuple)):
            value = value[index] if index < len(value) else None
        if type(value) is int and value >= 0:
            return value
    return None
