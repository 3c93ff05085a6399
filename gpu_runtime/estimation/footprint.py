"""The bytes that a model needs on a device, part by part, with the source of each number.

Pure. There are three inputs: the declared size, earlier measurements, and the `Evidence` that the
source gives. The result is a `Footprint`. Nothing is loaded. The size of the weights is taken from
the first known source in this list:
    declared size > measured before > header of the files > module without data > size of the files
    > the name

A lease covers the weights. If the registration requested room for use (`context_length`,
`sequences`), the lease also covers KV cache and activations, calculated from the config. Memory
that code uses beyond its leases is measured, and the book (all leases and requests) counts it as
the residue of its process.

*No overhead is counted twice.* Overheads are cache, activations and the CUDA context. A declared
size includes them, so nothing is added to it. To any other size, cache and activations of the
requested use are added, if they can be calculated. If not, and if only the size of the files or the
name is known, a fraction of the weights is added instead. The CUDA context is added for a process's
first model on a card. Afterwards the context is part of the residue.

*Peak.* The peak use of a model is stored and shown, but not leased: one large batch would make the
lease large forever. While torch keeps the bytes of a peak, they are in the book as residue.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

from ..errors import UnknownSize
from ..facts import Evidence, Footprint, Measurement, Part
from ..units import show_bytes
from . import kv_cache

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
    options: Mapping[str, Any] | None = None,
    quantization: str = "",
    context_bytes: int = 0,
) -> Footprint:
    """The footprint of the model `name`, from the best known source of its size.

    `evidence` is from the model's source, `declared` is the model's declared size in bytes,
    `measured` is an earlier measurement, and `options` are the options of the registration.
    `quantization` is the model's format, if the name does not show it. `context_bytes` is the size
    of the CUDA context that the load will create, or 0.

    Raises UnknownSize if nothing shows the size; the error tells the user to declare the size.
    Raises BadSetting for an option that cannot be used.
    """
    use = kv_cache.planned_use(options or {}, evidence.config)
    weights = _weights(name, evidence, measured, quantization)
    if declared is not None:
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
        heads=kv_cache.attention_heads(evidence.config),
        pieces=_stretched(evidence.pieces, total),
        notes=_notes(evidence, measured, use),
        at_load=evidence.at_load,
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


def _typical_layers(name: str, evidence: Evidence) -> tuple[tuple[kv_cache.Layer, ...], int]:
    """The cache of the layers on the card, and the number of all layers, if only a name is known."""
    count, _ = _count_in(evidence.name) or _count_in(name) or (0.0, "")
    layers = kv_cache.typical_layers(count)
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
    use: kv_cache.PlannedUse | None,
) -> tuple[Part, ...]:
    """The parts for cache and activations; a margin if these cannot be calculated."""
    if evidence.at_load:
        # Nothing is added to the measured size of an engine, because it includes the cache. Nothing
        # is added if the engine's weights are in host memory, because its cache is there too.
        if measured is not None or evidence.weight_bytes == 0:
            return ()
    if use and weights.source == "name" and kv_cache.cache_layers(evidence.config) is None:
        return _typical_cache(name, evidence, use), *_margin(weights, evidence)
    return _room(name, evidence.config, use) or _margin(weights, evidence)


def _typical_cache(name: str, evidence: Evidence, use: kv_cache.PlannedUse) -> Part:
    """The largest cache that the model can have, if only its name is known."""
    _, text = _count_in(evidence.name) or _count_in(name) or (0.0, "")
    layers, _ = _typical_layers(name, evidence)
    size = _cache_bytes(layers, use)
    words = f"{_cache_in_words(layers, use)}: at most, as for {text} without grouped attention"
    return Part("kv_cache", size, "name", words)


def _cache_bytes(layers: tuple[kv_cache.Layer, ...], use: kv_cache.PlannedUse) -> int:
    return kv_cache.kv_cache_bytes(layers, use.tokens, use.sequences, use.cache_bits)


def _context(size: int) -> Part:
    source = "typical" if size == CONTEXT_BYTES else "measured"
    return Part("context", size, source, "of CUDA, once for this process on that card")


def _room(
    name: str, config: Mapping[str, Any], use: kv_cache.PlannedUse | None
) -> tuple[Part, ...]:
    """The parts for cache and activations of the requested use; empty if `use` is None."""
    if use is None:
        return ()
    layers = kv_cache.cache_layers(config)
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
    active = kv_cache.activation_bytes(config, use)
    if active:
        at_once = min(use.tokens, kv_cache.batch_tokens(config) or use.tokens)
        how = f"{_times(use)}{at_once:,} tokens read in one pass"
        parts.append(Part("activations", active, "config", how))
    return tuple(parts)


def _margin(weights: Part, evidence: Evidence) -> tuple[Part, ...]:
    """The margin for cache and activations, if only the size of the files or the name is known.

    It is a fraction of the weights, which depends on the file format.
    """
    if weights.source not in ("file size", "name"):
        return ()
    factor = FILE_FACTORS[evidence.file_format or _format_in(weights.detail)]
    size = round(weights.bytes * (factor - 1))
    how = f"× {factor} for cache and activations, which it does not show"
    return (Part("margin", size, weights.source, how),)


def _format_in(detail: str) -> str:
    """The file format that belongs to the quantization in the text `detail`."""
    return "gguf" if any(word in detail for word in QUANT_BITS) else "safetensors"


def _cache_in_words(layers: tuple[kv_cache.Layer, ...], use: kv_cache.PlannedUse) -> str:
    """The cache as text, such as `2 × 8,192 tokens, 32 layers, 16 bits`."""
    with_cache = [layer for layer in layers if layer.values]
    with_window = [layer for layer in with_cache if layer.window]
    several = "s" if len(with_cache) > 1 else ""
    text = (
        f"{_times(use)}{use.tokens:,} tokens, {len(with_cache)} layer{several}, "
        f"{use.cache_bits:g} bits"
    )
    longest_window = max((layer.window for layer in layers), default=0)
    if longest_window:
        text += f", {len(with_window)} of them within {longest_window:,} tokens"
    return text


def _times(use: kv_cache.PlannedUse) -> str:
    return f"{use.sequences} × " if use.sequences > 1 else ""


def _notes(
    evidence: Evidence, measured: Measurement | None, use: kv_cache.PlannedUse | None
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
    layers = kv_cache.cache_layers(config)
    if not layers:
        return 0
    bits = 8.0 * kv_cache.item_bytes({}, config)
    return kv_cache.kv_cache_bytes(layers, tokens=1, bits=bits)


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
