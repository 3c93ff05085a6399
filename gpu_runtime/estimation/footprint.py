"""How many bytes a model needs on a device, part by part, and where each number came from. Nothing is loaded.

Pure: what a source tells of itself (`Evidence`), what was declared and what was measured before go in; a `Footprint`
comes out. The first of these that is known gives the weights:

    declared size > measured before > header of the files > module without data > size of the files > the name

Then comes what was asked for beyond them. A *lease holds* the weights and the room for use that the registration asked
for (`context_length`, `sequences`): cache and activations, from the config. Where nothing was asked, nothing is kept:
what code then takes beyond its models is measured, and stands in the book as its process's residue.

*No overhead twice.* A declared size is the whole, room for use included. A measured one is what the storages took, and
takes no factor. Where only files' sizes or a name are known, a factor stands in for what cannot be reckoned, and it
goes as soon as cache and activations can be. The CUDA context is counted for a process's first model on a card alone,
until it is there: from then on it is residue.

*Peak.* What a model took at its peak is remembered and shown, but not leased: one large batch would make its lease
large for good. While torch keeps those bytes, they are in the book as residue.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..errors import UnknownSize
from ..facts import Evidence, Footprint, Measurement, Part
from ..units import show_bytes
from . import kv_cache

FILE_FACTORS = {
    "gguf": 1.1,
    "safetensors": 1.3,
}  # Source: the estimation chain of the Model Boss coordinator
CONTEXT_BYTES = (
    500 * 2**20
)  # of a CUDA context, until this process has measured one. Source: NDIF, about 400 MiB

# Bits a weight, scales and the few tensors kept larger included. Source: llama.cpp, tools/quantize/README, Llama 2 7B;
# for those not there (IQ*, TQ*, *_0, *_1) the block of the type itself.
QUANT_BITS = {
    "Q2_K": 3.35,
    "Q2_K_S": 3.35,
    "Q3_K_S": 3.50,
    "Q3_K_M": 3.91,
    "Q3_K_L": 4.27,
    "Q3_K": 3.91,
    "Q4_K_S": 4.58,
    "Q4_K_M": 4.84,
    "Q4_K": 4.84,
    "Q5_K_S": 5.52,
    "Q5_K_M": 5.68,
    "Q5_K": 5.68,
    "Q6_K": 6.56,
    "Q8_K": 9.13,
    "Q4_0": 4.5,
    "Q4_1": 5.0,
    "Q5_0": 5.5,
    "Q5_1": 6.0,
    "Q8_0": 8.5,
    "IQ1_S": 1.56,
    "IQ1_M": 1.75,
    "IQ2_XXS": 2.06,
    "IQ2_XS": 2.31,
    "IQ2_S": 2.56,
    "IQ2_M": 2.7,
    "IQ3_XXS": 3.06,
    "IQ3_XS": 3.3,
    "IQ3_S": 3.44,
    "IQ3_M": 3.66,
    "IQ4_XS": 4.25,
    "IQ4_NL": 4.5,
    "TQ1_0": 1.69,
    "TQ2_0": 2.06,
    "MXFP4": 4.25,
    "NVFP4": 4.5,
}
_WORDS = {  # by which other formats are called in names
    "fp32": 32,
    "float32": 32,
    "f32": 32,
    "fp16": 16,
    "float16": 16,
    "f16": 16,
    "bf16": 16,
    "bfloat16": 16,
    "half": 16,
    "fp8": 8,
    "int8": 8,
    "8bit": 8,
    "w8a8": 8,
    "w8a16": 8,
    "awq": 4.5,
    "gptq": 4.5,
    "int4": 4.5,
    "4bit": 4.5,
    "nf4": 4.5,
    "fp4": 4.5,
    "w4a16": 4.5,
    "bnb": 4.5,
}
_COUNT = re.compile(r"(?<![a-z0-9.])(?:(\d{1,3})x)?(\d+(?:\.\d+)?)([mbt])(?![a-z0-9])")
_EXPERTS_SHARE = (
    0.83  # of n × size: experts share attention. Mixtral 8x7B has 46.7 of 56 billion weights
)


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
    """The footprint of a model, from the best that is known of it.

    `options` are those of its registration; `context_bytes` what its process's first use of a card will take there
    beyond it, 0 where that is there already or the devices are simulated.
    Raises UnknownSize, which asks for a size, where nothing is known; BadSetting for an option that cannot be.
    """
    wanted = kv_cache.wish(options or {}, evidence.config)
    weights = _weights(name, evidence, measured, quantization)
    if declared is not None:
        parts = _declared(declared, weights, wanted is not None)
    elif weights is None:
        raise UnknownSize(name, evidence.why_unknown or "neither its source nor its name tells it")
    else:
        # An engine's cache was measured with its weights; where none of these goes to the card, no cache does.
        whole = evidence.at_load and (measured is not None or evidence.weight_bytes == 0)
        parts = (
            weights,
            *(() if whole else _room(name, evidence.config, wanted) or _margin(weights, evidence)),
        )
    if context_bytes and declared is None and not (evidence.at_load and measured is not None):
        parts = (
            *parts,
            Part(
                "context",
                context_bytes,
                "measured" if context_bytes != CONTEXT_BYTES else "typical",
                "of CUDA, once for this process on that card",
            ),
        )
    total = sum(part.bytes for part in parts)
    return Footprint(
        parts,
        kv_cache.attention_heads(evidence.config),
        _stretched(evidence.pieces, total),
        _notes(evidence, measured, wanted),
        evidence.at_load,
    )


def _weights(
    name: str, evidence: Evidence, measured: Measurement | None, quantization: str
) -> Part | None:
    if measured is not None:
        where = f" on {measured.device}" if measured.device else ""
        when = (
            f"after it was loaded{where} on {measured.day}"
            if measured.day
            else "as it lies here now"
        )
        return Part("weights", measured.resident_bytes, "measured", when)
    if evidence.weight_bytes is not None:
        return Part("weights", evidence.weight_bytes, evidence.source)
    if evidence.file_bytes:
        return Part(
            "weights", evidence.file_bytes, "file size", f"of its {evidence.file_format} files"
        )
    told = from_name(name, quantization) or from_name(evidence.name, quantization)
    return None if told is None else Part("weights", told[0], "name", told[1])


def _declared(declared: int, weights: Part | None, asked: bool) -> tuple[Part, ...]:
    """A declared size is the whole. What it has beyond the weights is kept for use where a context was asked for."""
    if not asked or weights is None or weights.bytes >= declared:
        return (Part("all", declared, "declared"),)
    return weights, Part(
        "room", declared - weights.bytes, "declared", "what is left of the declared size, for use"
    )


def _room(name: str, config: Mapping[str, Any], wanted: kv_cache.Wish | None) -> tuple[Part, ...]:
    if wanted is None:
        return ()
    layers, parts = kv_cache.cache_layers(config), []
    if layers is None:
        raise UnknownSize(
            name,
            "its config does not tell what its cache takes, so no context_length can be reserved "
            "for; a declared size can include it",
        )
    cache = kv_cache.kv_cache_bytes(
        layers, tokens=wanted.tokens, sequences=wanted.sequences, bits=wanted.cache_bits
    )
    if cache:
        parts.append(Part("kv_cache", cache, "config", _cache_in_words(layers, wanted)))
    if active := kv_cache.activation_bytes(config, wanted):
        at_once = min(wanted.tokens, kv_cache.batch_tokens(config) or wanted.tokens)
        parts.append(
            Part(
                "activations",
                active,
                "config",
                f"{_times(wanted)}{at_once:,} tokens read in one pass",
            )
        )
    return tuple(parts)


def _margin(weights: Part, evidence: Evidence) -> tuple[Part, ...]:
    """What stands in for cache and activations, where the weights themselves are only guessed."""
    if weights.source not in ("file size", "name"):
        return ()
    format = evidence.file_format or (
        "gguf" if any(word in weights.detail for word in QUANT_BITS) else "safetensors"
    )
    factor = FILE_FACTORS[format]
    return (
        Part(
            "margin",
            round(weights.bytes * (factor - 1)),
            weights.source,
            f"× {factor} for cache and activations, which it does not tell",
        ),
    )


def _cache_in_words(layers: tuple[kv_cache.Layer, ...], wanted: kv_cache.Wish) -> str:
    windows = sorted({layer.window for layer in layers if layer.window})
    count = sum(1 for layer in layers if layer.values)
    several = "s" if count > 1 else ""
    what = f"{_times(wanted)}{wanted.tokens:,} tokens, {count} layer{several}, {wanted.cache_bits:g} bits"
    some = sum(1 for layer in layers if layer.window and layer.values)
    return what + (f", {some} of them within {windows[-1]:,} tokens" if windows else "")


def _times(wanted: kv_cache.Wish) -> str:
    return f"{wanted.sequences} × " if wanted.sequences > 1 else ""


def _notes(
    evidence: Evidence, measured: Measurement | None, wanted: kv_cache.Wish | None
) -> tuple[str, ...]:
    notes = []
    if (
        measured is not None
        and measured.day
        and (measured.peak_bytes or 0) > measured.resident_bytes
    ):
        notes.append(
            f"At its peak it took {show_bytes(measured.peak_bytes)}, measured on {measured.day}."
        )
    if wanted is None and (
        layers := kv_cache.cache_layers(evidence.config) if evidence.config else None
    ):
        bits = 8.0 * kv_cache.item_bytes({}, evidence.config)
        one = kv_cache.kv_cache_bytes(layers, tokens=1, bits=bits)
        if one:
            notes.append(
                f"Its KV cache grows by {show_bytes(one)} a token while it writes, and is not counted. "
                f"Reserve for it:  context_length=TOKENS"
            )
    return tuple(notes)


def _stretched(pieces: tuple[int, ...], total: int) -> tuple[int, ...]:
    """The pieces, each with its part of what comes on top; they sum to the total, to the byte.

    >>> _stretched((1, 1, 2), 10)
    (2, 3, 5)
    """
    whole = sum(pieces)
    if not whole:
        return ()
    ends, done = [0], 0
    for piece in pieces:
        done += piece
        ends.append(done * total // whole)
    return tuple(end - start for start, end in zip(ends, ends[1:]))  # noqa: B905 - pairwise


def from_name(name: str, quantization: str = "") -> tuple[int, str] | None:
    """Bytes of the weights, as the name tells them, and how it was read; None where it tells nothing.

    Half precision where it names no format. The largest number counts where there are several.

    >>> from_name("Llama-2-7B-Q4_K_M.gguf")
    (4235000000, '7B at 4.84 bits (Q4_K_M)')
    >>> from_name("Mixtral-8x7B-Instruct-AWQ")[1], from_name("writer")
    ('8x7B at 4.5 bits (awq)', None)
    """
    text = name.lower().replace("_", "-")
    scale = {"m": 10**6, "b": 10**9, "t": 10**12}
    found = [
        (
            float(m[2]) * scale[m[3]] * (int(m[1]) * _EXPERTS_SHARE if m[1] else 1),
            m[0].upper().replace("X", "x"),
        )
        for m in _COUNT.finditer(text)
    ]
    if not found:
        return None
    count, said = max(found)
    bits, format = _bits(f"{name} {quantization}")
    return int(count * bits / 8), f"{said} at {bits:g} bits ({format})"


def _bits(text: str) -> tuple[float, str]:
    upper = text.upper().replace("-", "_")
    for word in sorted(QUANT_BITS, key=len, reverse=True):
        if re.search(rf"(?<![A-Z0-9]){word}(?![A-Z0-9])", upper):
            return QUANT_BITS[word], word
    words = set(re.split(r"[^a-z0-9]+", text.lower())) | {
        "".join(pair) for pair in re.findall(r"(\d)[-_ ]?(bit)", text.lower())
    }
    known = [word for word in _WORDS if word in words]
    return (float(_WORDS[known[0]]), known[0]) if known else (16.0, "half precision")
