"""What a model takes beyond its weights while it runs: its KV cache and its activations, from its config.

Pure: a config by Hugging Face's names goes in (a GGUF header is translated before it comes here), bytes come out. What
the config does not say is None, never zero. All figures are for inference, without gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import BadSetting

CACHE_BITS = {  # of one value in the cache, scales included
    "float32": 32.0,
    "f32": 32.0,
    "float16": 16.0,
    "f16": 16.0,
    "fp16": 16.0,
    "half": 16.0,
    "bfloat16": 16.0,
    "bf16": 16.0,
    "fp8": 8.0,
    "fp8_e4m3": 8.0,
    "fp8_e5m2": 8.0,
    "float8_e4m3fn": 8.0,
    "float8_e5m2": 8.0,
    "int8": 8.0,
    "q8_0": 8.5,
    "q5_1": 6.0,
    "q5_0": 5.5,
    "q4_1": 5.0,
    "q4_0": 4.5,
    "iq4_nl": 4.5,
    "int4": 4.0,
}
_MOST_LAYERS = 10_000  # a config that says more is not believed
_NESTED = (
    "text_config",
    "llm_config",
    "language_config",
)  # where models of several senses keep the one that writes
# Every how many layers one sees the whole context, where a config gives a window and no pattern: as transformers does.
_PATTERNS = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma3_text": 6,
    "gemma3n_text": 5,
    "cohere2": 4,
    "gpt_oss": 2,
    "olmo3": 4,
    "llama4_text": 4,
}
_GENERATES = (
    "CausalLM",
    "LMHead",
    "ConditionalGeneration",
    "ImageTextToText",
    "Seq2SeqLM",
    "LMHeadModel",
)
_UNFUSED = {
    "gelu_new",
    "gelu_fast",
    "quick_gelu",
    "gelu_accurate",
}  # computed step by step, so more of it is alive


class Layer(NamedTuple):
    """What one layer keeps of each token: so many values, of so many tokens at most (0: of all)."""

    values: int
    window: int = 0


class Wish(NamedTuple):
    """How much of a model's use is to be reserved for."""

    tokens: int  # of context, for each sequence
    sequences: int
    cache_bits: float
    item_bytes: int  # of an activation
    eager: bool = False  # attention that writes out its whole matrix of scores


def wish(options: Mapping[str, Any], config: Mapping[str, Any]) -> Wish | None:
    """What the options `context_length`, `sequences` and `cache_dtype` ask for; None where the first two are not given.

    With `sequences` alone the context is the longest that the model knows. Raises BadSetting.
    """
    tokens, sequences = options.get("context_length"), options.get("sequences")
    if tokens is None and sequences is None:
        if (at_load := config.get("context_at_load")) is None:
            return None
        tokens = at_load  # its engine takes a cache of that length, asked or not
    for name, given in (("context_length", tokens), ("sequences", sequences)):
        if given is not None and (type(given) is not int or given < 1):
            raise BadSetting(name, given, "a whole number above 0")
    if tokens is None and (tokens := longest_context(config)) is None:
        raise BadSetting(
            "sequences",
            sequences,
            "given with context_length, since the model does not tell its own",
        )
    item = item_bytes(options, config)
    said = options.get("cache_dtype")
    bits = 8.0 * item if said is None else CACHE_BITS.get(str(said).removeprefix("torch.").lower())
    if bits is None:
        raise BadSetting("cache_dtype", said, "one of " + ", ".join(CACHE_BITS))
    return Wish(tokens, sequences or 1, bits, item, options.get("attn_implementation") == "eager")


def item_bytes(options: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """Bytes of an activation: as the `dtype` option says, else the config, else two."""
    for said in (
        options.get("dtype"),
        options.get("torch_dtype"),
        _text(config).get("dtype"),
        _text(config).get("torch_dtype"),
    ):
        bits = CACHE_BITS.get(str(said).removeprefix("torch.").lower())
        if bits is not None and bits >= 16:
            return int(bits) // 8
    return 2


def longest_context(config: Mapping[str, Any]) -> int | None:
    """The longest context, in tokens, that the config names."""
    return _number(
        _text(config),
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "seq_length",
        "n_ctx",
        "max_sequence_length",
        "model_max_length",
    )


def batch_tokens(config: Mapping[str, Any]) -> int | None:
    """Tokens that the engine reads at once, where it says; None: a whole context."""
    return _number(config, "batch_tokens")


def attention_heads(config: Mapping[str, Any]) -> int:
    """Attention heads of a layer; 0 where the config does not say."""
    names = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
    return _number(_text(config), *names) or 0


# -- the KV cache -------------------------------------------------------------------------------------------------


def kv_cache_bytes(
    layers: Sequence[Layer], *, tokens: int, sequences: int = 1, bits: float = 16.0
) -> int:
    """Bytes of the cache of so many sequences, each of so many tokens, at so many bits a value.

    A lower bound: an engine that allocates it in pages or blocks rounds up.

    >>> llama_3_8b = [Layer(2 * 8 * 128)] * 32
    >>> kv_cache_bytes(llama_3_8b, tokens=8192)
    1073741824

    Source: Pope et al. 2022, arXiv:2211.05102.
    """
    kept = sum(layer.values * min(tokens, layer.window or tokens) for layer in layers)
    return math.ceil(kept * sequences * bits / 8)


def cache_layers(config: Mapping[str, Any]) -> tuple[Layer, ...] | None:
    """What each layer keeps of each token; empty for a model without a cache, None where the config does not tell.

    Multi-head attention keeps a key and a value for each head; grouped-query attention for each group of heads;
    multi-head latent attention one compressed vector and one rotary key for all of them. Layers with a sliding window
    (or chunks) forget what lies outside it. Layers of a recurrent kind keep a state that does not grow with the
    context, which is not counted.

    Source: Ainslie et al. 2023, arXiv:2305.13245 (grouped queries); DeepSeek-AI 2024, arXiv:2405.04434 (latent).
    """
    text = _text(config)
    if not _generates(config):
        return ()
    count = (
        _number(text, "num_decoder_layers", "decoder_layers")
        if config.get("is_encoder_decoder")
        else None
    )
    count = count or _number(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if count is None or count > _MOST_LAYERS:
        return None
    kinds = _kinds(text, count)
    window = _number(text, "sliding_window", "attention_chunk_size", "sliding_window_size") or 0
    shared = min(
        _number(text, "num_kv_shared_layers") or 0, count
    )  # the last ones, which read another layer's
    layers = []
    for index, kind in enumerate(kinds):
        values = _values(text, index, whole=kind == "full")
        if values is None:
            return None
        if kind == "none" or index >= count - shared:
            values = 0
        layers.append(
            Layer(
                values * (2 if config.get("is_encoder_decoder") else 1),
                window if kind == "window" else 0,
            )
        )
    return tuple(layers)


def _values(text: Mapping[str, Any], index: int, *, whole: bool) -> int | None:
    """Values that one layer keeps of a token."""
    latent, rope = _number(text, "kv_lora_rank"), _number(text, "qk_rope_head_dim")
    if latent and rope:
        return latent + rope
    heads = attention_heads(text)
    if not heads:
        return None
    groups = _at(
        text, index, "num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv"
    )
    if text.get("multi_query") and "num_kv_heads" not in text:
        groups = 1
    if groups is None:
        groups = heads
    width = _number(text, "hidden_size", "n_embd", "d_model")
    size = _number(text, "head_dim", "kv_channels", "d_kv") or (width // heads if width else None)
    if whole:
        groups, size = (
            _number(text, "num_global_key_value_heads") or groups,
            _number(text, "global_head_dim") or size,
        )
    return groups * (size + (_number(text, "v_head_dim") or size)) if size else None


def _kinds(text: Mapping[str, Any], count: int) -> list[str]:
    """Of each layer: `full` attention, a `window` of it, or `none`."""
    said = text.get("layer_types", text.get("layers_block_type"))
    if isinstance(said, (list, tuple)) and len(said) >= count:
        return [_kind(str(word)) for word in said[:count]]
    model, every = str(text.get("model_type", "")), _number(text, "sliding_window_pattern")
    window = _number(text, "sliding_window", "attention_chunk_size", "sliding_window_size")
    if window is None or not text.get("use_sliding_window", not model.startswith("qwen")):
        return ["full"] * count
    if isinstance(pattern := text.get("sliding_window_pattern"), str) and pattern:  # such as LLLG
        return ["window" if pattern[n % len(pattern)] == "L" else "full" for n in range(count)]
    if isinstance(pattern, (list, tuple)) and pattern:
        return ["window" if pattern[n % len(pattern)] else "full" for n in range(count)]
    if every := every or _PATTERNS.get(model):
        return ["window" if (n + 1) % every else "full" for n in range(count)]
    first = text.get("max_window_layers", 0)
    return ["window" if not isinstance(first, int) or n >= first else "full" for n in range(count)]


def _kind(word: str) -> str:
    if "sliding" in word or "chunked" in word:
        return "window"
    return (
        "none" if any(sign in word for sign in ("linear", "mamba", "conv", "recurrent")) else "full"
    )


# -- activations --------------------------------------------------------------------------------------------------


def activation_bytes(config: Mapping[str, Any], wanted: Wish) -> int | None:
    """The most that is alive at once beside weights and cache, while a context is read in one pass; None: unknown.

    That is where the feed-forward layer multiplies its two halves: three vectors of its inner width and four of the
    model's, for each token; with experts, those for each expert that a token goes to. Then the last token's scores.
    Attention written out (`attn_implementation="eager"`) holds a matrix of scores for each head, twice.
    An engine that reads in batches (llama.cpp: 512 tokens, in float32, and the scores of all of them) says so in its
    config; it uses one buffer for one after the other, and beside it, where it writes attention out, the whole matrix
    of each head and a mask.
    Checked against what a forward pass of transformers really keeps alive: `tests/backends/test_estimates.py`.
    """
    text = _text(config)
    width = _number(text, "hidden_size", "n_embd", "d_model")
    if not width:
        return None
    inner = (
        _number(text, "intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size")
        or 4 * width
    )
    said = text.get("activation_function", text.get("hidden_act"))
    alive, beside = (5, 2) if isinstance(said, str) and said in _UNFUSED else (3, 4)
    values = alive * inner + beside * width
    if experts := _number(text, "num_experts_per_tok", "num_experts_per_token", "moe_topk"):
        each = _number(text, "moe_intermediate_size", "expert_ffn_hidden_size") or inner
        values = max(
            values if _number(text, "first_k_dense_replace") else 0,
            experts * (alive * each + 4 * width) + 4 * width,
        )
    vocabulary = _number(text, "vocab_size") or 0
    if batch := batch_tokens(text):
        at_once, matrices = (
            min(batch, wanted.tokens),
            attention_heads(text) + 1 if config.get("written_scores") else 0,
        )
        return wanted.sequences * at_once * (max(values, vocabulary) + matrices * wanted.tokens) * 4
    size = wanted.tokens * values * wanted.item_bytes
    if wanted.eager:
        scores = attention_heads(text) * wanted.tokens**2 * (wanted.item_bytes + 4)
        size = max(size, scores + wanted.tokens * 11 * width * wanted.item_bytes)
    last = vocabulary * (wanted.item_bytes + 4) if _generates(config) else 0
    return wanted.sequences * (size + last)


# -- reading a config ---------------------------------------------------------------------------------------------


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of the config that describes the language model."""
    for key in _NESTED:
        if isinstance(inner := config.get(key), Mapping):
            return {**config, **inner}
    return config


def _generates(config: Mapping[str, Any]) -> bool:
    """Whether it writes token after token, and so keeps a cache. An embedder or a classifier reads once."""
    architectures = config.get("architectures")
    if not isinstance(architectures, (list, tuple)) or not architectures:
        return True
    return any(str(name).endswith(_GENERATES) for name in architectures)


def _number(config: Mapping[str, Any], *names: str) -> int | None:
    """The first of these that is a whole number above 0; of a list, the largest."""
    for name in names:
        value = config.get(name)
        if isinstance(value, (list, tuple)):
            value = max((one for one in value if type(one) is int), default=None)
        if type(value) is int and value > 0:
            return value
    return None


def _at(config: Mapping[str, Any], index: int, *names: str) -> int | None:
    """The same for one layer, where a list tells it for each; zero is a layer without."""
    for name in names:
        value = config.get(name)
        if isinstance(value, (list, tuple)):
            value = value[index] if index < len(value) else None
        if type(value) is int and value >= 0:
            return value
    return None
