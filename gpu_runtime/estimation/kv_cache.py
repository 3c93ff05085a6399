"""The memory that a running model uses beyond its weights: KV cache and activations.

Pure. A config with Hugging Face's names goes in, and bytes come out; a GGUF header is translated
into such a config first. A value that the config does not contain is None, never zero. All figures
are for inference, without gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import BadSetting

# Bits of one value in the cache, scales included.
CACHE_BITS = {
    **dict.fromkeys(("float32", "f32"), 32.0),
    **dict.fromkeys(("float16", "f16", "fp16", "half", "bfloat16", "bf16"), 16.0),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "float8_e4m3fn", "float8_e5m2", "int8"), 8.0),
    "q8_0": 8.5,
    "q5_1": 6.0,
    "q5_0": 5.5,
    "q4_1": 5.0,
    **dict.fromkeys(("q4_0", "iq4_nl"), 4.5),
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
        tokens = longest_context(config)
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


def longest_context(config: Mapping[str, Any]) -> int | None:
    """The longest context, in tokens, that `config` names, or None."""
    return _number(_text(config), *_CONTEXT)


def batch_tokens(config: Mapping[str, Any]) -> int | None:
    """The tokens that the engine reads at once; None: the whole context."""
    return _number(config, "batch_tokens")


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
    batch = batch_tokens(text)
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
            value = max((one for one in value if type(one) is int), default=None)
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
