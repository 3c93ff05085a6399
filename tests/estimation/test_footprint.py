"""The footprint: how many bytes a model needs, and the source of each number."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime import estimation
from gpu_runtime.errors import BadSetting, UnknownSize
from gpu_runtime.estimation import (
    CONTEXT_BYTES,
    QUANT_BITS,
    Layer,
    PlannedUse,
    activation_bytes,
    attention_heads,
    cache_layers,
    footprint,
    from_name,
    kv_cache_bytes,
)
from gpu_runtime.facts import Evidence, Footprint, Measurement, Part
from gpu_runtime.units import GIB, MIB

LLAMA_3_8B = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=8192,
    torch_dtype="bfloat16",
)
MISTRAL = dict(
    model_type="mistral",
    num_hidden_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    sliding_window=4096,
)
GEMMA_3_27B = dict(
    model_type="gemma3",
    text_config=dict(
        model_type="gemma3_text",
        num_hidden_layers=62,
        hidden_size=5376,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=128,
        sliding_window=1024,
        sliding_window_pattern=6,
    ),
)
HEADER = Evidence(16 * GIB, "safetensors header", config=LLAMA_3_8B)
MEASURED = Measurement(15 * GIB, 19 * GIB, "2026-11-21", "NVIDIA H100")


def parts(found: Footprint) -> list[tuple[str, int, str]]:
    return [(part.name, part.bytes, part.source) for part in found.parts]


@settings(max_examples=100)
@given(st.integers(1, 3000), st.integers(1, 900), st.integers(1, 8), st.booleans())
def test_the_widest_layer_counts_whether_it_is_dense_or_has_experts(inner, of_expert, used, dense):
    """The first layers of some models with experts are dense, and may be wider."""

    def peak(**fields: int) -> int | None:
        config = {**LLAMA_3_8B, "hidden_size": 32, "intermediate_size": inner, **fields}
        return activation_bytes(config, PlannedUse(64, 1, 16.0, 2, False))

    experts = dict(moe_intermediate_size=of_expert, num_experts_per_tok=used)
    some_dense = max(peak(), peak(**experts))
    expected = some_dense if dense else peak(**experts)
    assert peak(**experts, first_k_dense_replace=int(dense)) == expected


# -- the chain ----------------------------------------------------------------------------------------------------

FILES = Evidence(file_bytes=10 * GIB, file_format="gguf")
CHAIN = [  # in each row, everything below it is known too; the first known one is used
    (dict(declared=20 * GIB, measured=MEASURED), HEADER, [("all", 20 * GIB, "declared")]),
    (dict(measured=MEASURED), HEADER, [("weights", 15 * GIB, "measured")]),
    (dict(), HEADER, [("weights", 16 * GIB, "safetensors header")]),
    (dict(), Evidence(5 * GIB, "shapes", file_bytes=9 * GIB), [("weights", 5 * GIB, "shapes")]),
    (dict(), FILES, [("weights", 10 * GIB, "file size"), ("margin", GIB, "file size")]),
    (
        dict(),
        Evidence(file_bytes=10 * GIB, file_format="safetensors"),
        [("weights", 10 * GIB, "file size"), ("margin", 3 * GIB, "file size")],
    ),
    (dict(), Evidence(), [("weights", 4_235_000_000, "name"), ("margin", 423_500_000, "name")]),
]


@pytest.mark.parametrize(
    ("known", "evidence", "expected"),
    CHAIN,
    ids=["declared", "measured", "header", "shapes", "gguf file", "safetensors file", "name"],
)
def test_the_weights_are_from_the_best_known_source(known, evidence, expected):
    """The sources in their order are: declared, measured, header, shapes, file size, name.

    Only estimates from a file's size or from a name are multiplied by a factor.
    """
    assert parts(footprint("Llama-2-7B-Q4_K_M", evidence, **known)) == expected


def test_an_unknown_size_is_an_error_that_asks_for_a_size():
    """An unknown size is never taken as zero, since a model of no bytes would fit anywhere."""
    with pytest.raises(
        UnknownSize, match=r"the size of writer is unknown: its factory failed.\n.*size='8 GiB'"
    ):
        footprint("writer", Evidence(why_unknown="its factory failed"))
    with pytest.raises(ValueError, match="neither its source nor its name shows it"):
        footprint("writer", Evidence())


def test_a_declared_size_is_the_whole():
    """The bytes beyond the weights are room for the context, which stays claimed after the load."""
    asked = footprint("m", HEADER, declared=20 * GIB, options=dict(context_length=8192))
    assert parts(asked) == [
        ("weights", 16 * GIB, "safetensors header"),
        ("room", 4 * GIB, "declared"),
    ]
    assert (asked.bytes, asked.working_bytes) == (20 * GIB, 4 * GIB)
    for gib in (10, 16):
        less = footprint("m", HEADER, declared=gib * GIB, options=dict(context_length=8192))
        assert parts(less) == [("all", gib * GIB, "declared")]
    assert parts(footprint("m", Evidence(), declared=20 * GIB, context_bytes=CONTEXT_BYTES)) == [
        ("all", 20 * GIB, "declared")
    ]


def test_the_factor_is_left_out_if_cache_and_activations_can_be_calculated():
    """The factor stands for the cache and the activations, so using both would count them twice."""
    files = Evidence(file_bytes=10 * GIB, file_format="safetensors", config=LLAMA_3_8B)
    found = footprint("m", files, options=dict(context_length=100))
    assert [part.name for part in found.parts] == ["weights", "kv_cache", "activations"]


def test_a_requested_context_is_reserved():
    found = footprint("m", HEADER, options=dict(context_length=8192, sequences=2))
    assert parts(found)[:2] == [
        ("weights", 16 * GIB, "safetensors header"),
        ("kv_cache", 2 * GIB, "config"),
    ]
    assert found.parts[1].detail == "2 × 8,192 tokens, 32 layers, 16 bits"
    assert found.working_bytes == found.bytes - 16 * GIB and found.heads == 32
    assert not found.notes


def test_a_context_that_was_not_requested_is_mentioned_and_not_counted():
    """The context grows while the model generates, and its memory is then measured."""
    found = footprint("m", HEADER)
    assert found.bytes == 16 * GIB and found.working_bytes == 0
    [note] = found.notes
    assert "grows by 128 KiB" in note and "context_length=TOKENS" in note
    double = replace(HEADER, config={**LLAMA_3_8B, "torch_dtype": "float32"})
    assert "grows by 256 KiB" in footprint("m", double).notes[0]


def test_the_peak_is_shown_and_not_leased():
    """If the peak were leased, one large batch would make the lease large for ever."""
    found = footprint("m", HEADER, measured=MEASURED)
    assert found.bytes == 15 * GIB
    assert found.parts[0].detail == "after it was loaded on NVIDIA H100 on 2026-11-21"
    assert found.notes[0] == "At its peak it took 19.0 GiB, measured on 2026-11-21."
    for fields in ({"peak_bytes": 15 * GIB}, {"peak_bytes": None}, {"day": ""}):
        flat = footprint("m", HEADER, measured=replace(MEASURED, **fields))
        assert not any("peak" in note for note in flat.notes)


@pytest.mark.parametrize(
    ("measured", "weights", "expected"),
    [
        (None, 16 * GIB, ["weights", "kv_cache", "activations", "context"]),
        (MEASURED, 16 * GIB, ["weights"]),  # measured with its cache and its context
        (None, 0, ["weights", "context"]),  # its cache is in host memory, as its weights are
    ],
)
def test_an_engine_that_allocates_at_load_counts_its_cache_once(measured, weights, expected):
    config = {**LLAMA_3_8B, "context_at_load": 8192, "batch_tokens": 512, "one_sequence": True}
    evidence = Evidence(weights, "GGUF header", config=config, at_load=True)
    options = {"sequences": 4}
    found = footprint("m", evidence, measured=measured, options=options, context_bytes=MIB)
    assert [part.name for part in found.parts] == expected
    assert found.at_load and found.working_bytes == 0
    if "kv_cache" in expected:
        _, cache, active, _ = found.parts
        assert (cache.bytes, cache.detail) == (GIB, "8,192 tokens, 32 layers, 16 bits")
        assert active.detail == "512 tokens read in one pass"


def test_the_layers_within_a_window_are_told():
    windowed = Evidence(GIB, "shapes", config=GEMMA_3_27B)
    found = footprint("m", windowed, options=dict(context_length=8192))
    assert "62 layers, 16 bits, 52 of them within 1,024 tokens" in found.parts[1].detail


def test_the_cuda_context_is_a_part_of_its_own():
    found = footprint("m", HEADER, context_bytes=CONTEXT_BYTES)
    assert parts(found)[-1] == ("context", CONTEXT_BYTES, "typical") and found.working_bytes == 0
    measured = footprint("m", HEADER, context_bytes=420 * MIB)
    assert parts(measured)[-1] == ("context", 420 * MIB, "measured")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("context_length", 0),
        ("context_length", "8k"),
        ("sequences", -1),
        ("sequences", True),
        ("cache_dtype", "q9"),
    ],
)
def test_an_invalid_option_is_named(name, value):
    with pytest.raises(BadSetting, match=f"{name}={value!r}"):
        footprint("m", HEADER, options={"context_length": 8, name: value})


def test_a_context_cannot_be_reserved_if_the_config_does_not_describe_the_cache():
    with pytest.raises(UnknownSize, match="its config does not show the size of its cache"):
        footprint("m", Evidence(GIB, "GGUF header"), options=dict(context_length=8192))


def test_a_context_is_reserved_for_a_model_that_only_its_name_describes():
    """The estimate is an upper bound: the cache of a model of that size with full attention."""
    found = footprint("llama-7B-Q4_K_M", Evidence(), options=dict(context_length=8192))
    assert [(part.name, part.source) for part in found.parts] == [
        ("weights", "name"),
        ("kv_cache", "name"),
        ("margin", "name"),
    ]
    cache = found.parts[1]
    # The bound is for Llama 2 7B: 32 layers of 4096, with keys and values of 16 bits.
    assert 4 * GIB <= cache.bytes <= 4.5 * GIB
    assert cache.detail.endswith("at most, as for 7B without grouped attention")
    for options in (dict(context_length=16384), dict(context_length=8192, sequences=2)):
        twice = footprint("llama-7B-Q4_K_M", Evidence(), options=options)
        assert twice.parts[1].bytes == 2 * cache.bytes


@given(billions=st.integers(1, 2000), tokens=st.integers(1, 2**27))
def test_a_larger_model_never_has_a_smaller_cache(billions, tokens):
    def cache(count):
        layers = estimation.typical_layers(count)
        return estimation.kv_cache_bytes(layers, tokens=tokens)

    assert cache(billions * 1e9) <= cache((billions + 1) * 1e9)


@given(weights=st.lists(st.integers(0, 10**12), max_size=90), extra=st.integers(0, 10**12))
def test_the_pieces_sum_to_the_footprint(weights, extra):
    """No piece is smaller than its weights, since a model is only split between pieces."""
    evidence = Evidence(sum(weights), "safetensors header", pieces=tuple(weights))
    found = footprint("m", evidence, context_bytes=extra)
    assert sum(found.pieces) == (found.bytes if any(weights) else 0)
    assert all(piece >= weight for piece, weight in zip(found.pieces, weights))  # noqa: B905 - no pieces where all is zero


# -- names --------------------------------------------------------------------------------------------------------


def test_the_name_of_the_file_says_more_than_the_name_of_the_entry():
    """With `codellama-7b: {path: codellama-7b.Q4_K_M.gguf, gpu_layers: 20}`, 20 of about 33 layers
    are on the card, in 4.84 bits. The entry's name alone means 16 bits.
    """
    config = {"context_at_load": 4096}
    file = Evidence(name="codellama-7b.Q4_K_M.gguf", config=config, at_load=True)
    whole = footprint("codellama-7b", file)
    assert whole.parts[0].bytes == from_name("codellama-7b.Q4_K_M.gguf")[0]
    part = replace(file, config={**config, "layers_on_card": 20})
    for before, after in zip(whole.parts, footprint("codellama-7b", part).parts, strict=True):
        assert after.bytes == pytest.approx(before.bytes * 20 / 33, rel=0.01)
    assert footprint("codellama-7b", replace(file, config={"layers_on_card": 0})).bytes == 0


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("Llama-2-7b-hf", 14e9),
        ("Qwen/Qwen2.5-0.5B-Instruct", 1e9),
        ("gpt-neo-125M", 250e6),
        ("phi-2_7B-fp32", 28e9),
        ("Llama-3.1-8B-Instruct-GPTQ-INT4", 4.5e9),
        ("llama3:70b", 140e9),
        ("codellama-7b.Q4_K_M.gguf", 4.235e9),
        ("Llama-3.3-70B-Instruct-UD-Q4_K_XL", 42.35e9),
        ("m-13B-8bit", 13e9),
        ("m-13B-bnb-4bit", 7.3125e9),
        ("Qwen3-30B-A3B", 60e9),
        ("Mixtral-8x7B-v0.1", 92.96e9),
        ("Mixtral-8x7B-Instruct-AWQ", 26.145e9),
        ("DeepSeek-R1-Distill-Qwen-1.5B", 3e9),
        ("kimi-1T-fp8", 1e12),
    ],
)
def test_a_name_shows_weights_and_format(name, size):
    assert from_name(name)[0] == pytest.approx(size, rel=1e-9)


@pytest.mark.parametrize(
    "name", ["writer", "gemma-3n-E4B", "bert-base", "model-4bit", "v2", "phi-4-Q4_K_M", "a100b"]
)
def test_a_name_without_a_size_gives_no_guess(name):
    """For example, E4B means that four billion of eight billion weights are active, so it is no size."""
    assert from_name(name) is None


def test_a_registered_quantization_counts_if_the_name_has_none():
    assert from_name("Llama-7B", "Q8_0")[0] == 7e9 * 8.5 / 8


@pytest.mark.parametrize("word", QUANT_BITS)
def test_every_quantisation_is_recognised(word):
    """The longest known word counts: `Q4_K_M` is not read as `Q4_K`."""
    assert from_name(f"m-8B-{word}.gguf")[1] == f"8B at {QUANT_BITS[word]:g} bits ({word})"


# -- the KV cache -------------------------------------------------------------------------------------------------


def cache_gib(config: dict, tokens: int, **more) -> float:
    return kv_cache_bytes(cache_layers(config), tokens=tokens, **more) / GIB


@pytest.mark.parametrize(
    ("config", "tokens", "gib"),
    [
        (LLAMA_3_8B, 8192, 1.0),  # grouped queries: 8 of 32
        (MISTRAL, 4096, 0.5),
        (MISTRAL, 32768, 0.5),  # tokens outside the window are dropped
        ({**MISTRAL, "layer_types": ["full_attention"] + ["linear_attention"] * 31}, 32768, 0.125),
        ({**LLAMA_3_8B, "num_kv_shared_layers": 16}, 8192, 0.5),
        # which layers see all: by letters, by a list, by the model's own rule, by their types
        ({**MISTRAL, "sliding_window_pattern": "LLLG"}, 32768, 1.375),
        ({**MISTRAL, "sliding_window_pattern": [1, 1, 0]}, 32768, 22 / 32 * 0.5 + 10 / 32 * 4),
        ({**MISTRAL, "layer_types": ["chunked_attention", "full_attention"] * 16}, 32768, 2.25),
        ({**MISTRAL, "sliding_window": None, "v_head_dim": 64}, 32768, 3.0),
        (
            {
                **MISTRAL,
                "layer_types": ["full_attention", "sliding_attention"] * 16,
                "num_global_key_value_heads": 4,
                "global_head_dim": 64,
            },
            32768,
            0.25 + 2 / 4,
        ),
        ({"num_hidden_layers": 1, "text_config": LLAMA_3_8B}, 8192, 1.0),
        (  # the decoder's own cache, and that of the encoder's output
            {**LLAMA_3_8B, "is_encoder_decoder": True, "decoder_layers": 8},
            8192,
            2 * 8 / 32,
        ),
        ({**MISTRAL, "model_type": "cohere2"}, 32768, 1.375),  # every fourth layer sees all
        ({**LLAMA_3_8B, "multi_query": True, "num_key_value_heads": None}, 8192, 1 / 8),
        # a number for each layer
        ({**LLAMA_3_8B, "num_key_value_heads": [8] * 16 + [4] * 16}, 8192, 0.75),
    ],
)
def test_the_cache_follows_from_the_config(config, tokens, gib):
    """The families that transformers has: `test_the_estimated_cache_is_that_of_a_forward_pass`."""
    assert cache_gib(config, tokens) == pytest.approx(gib)


@pytest.mark.parametrize(
    ("option", "dtype", "gib"),
    [("cache_dtype", dtype, gib) for dtype, gib in [("float32", 2), ("bfloat16", 1), ("fp8", 0.5)]]
    + [("cache_dtype", "q8_0", 0.53125), ("dtype", "float32", 2), ("torch_dtype", "float32", 2)],
)
def test_the_cache_may_have_another_dtype(option, dtype, gib):
    """The dtype of the load is that of the cache too, whatever the files have."""
    found = footprint("m", HEADER, options={"context_length": 8192, option: dtype})
    assert found.parts[1].bytes == gib * GIB


def test_with_sequences_alone_the_context_is_the_longest_of_the_model():
    assert footprint("m", HEADER, options=dict(sequences=1)).parts[1].bytes == GIB
    with pytest.raises(BadSetting, match="given with context_length"):
        footprint("m", Evidence(GIB, "shapes"), options=dict(sequences=1))


def test_a_model_that_generates_no_text_has_no_cache():
    """An embedding model reads its input once and generates nothing, so it needs no KV cache."""
    bert = dict(
        architectures=["BertModel"], num_hidden_layers=12, hidden_size=768, num_attention_heads=12
    )
    assert cache_layers(bert) == () and attention_heads(bert) == 12
    assert footprint("m", Evidence(MIB, "safetensors header", config=bert)).notes == ()


@pytest.mark.parametrize(
    "config",
    [
        {},
        dict(num_hidden_layers=10**9, num_attention_heads=8, hidden_size=64),
        dict(num_hidden_layers="many"),
        dict(num_hidden_layers=-3, num_attention_heads=8, hidden_size=64),
        dict(num_hidden_layers=2),
        dict(num_hidden_layers=True, num_attention_heads=1, hidden_size=1),
        dict(num_hidden_layers=2, num_attention_heads=4),
    ],
)
def test_an_unusable_config_gives_an_unknown_size(config):
    """No content of a config causes a crash, a size of zero, or a tuple of a billion layers."""
    assert cache_layers(config) is None


FIELDS = (
    "num_hidden_layers hidden_size num_attention_heads num_key_value_heads head_dim sliding_window "
    "layer_types kv_lora_rank qk_rope_head_dim text_config sliding_window_pattern architectures "
    "intermediate_size vocab_size max_window_layers num_experts_per_tok model_type"
).split()
SCALARS = st.none() | st.booleans() | st.integers(-2, 99) | st.floats() | st.text(max_size=5)
LISTS = st.lists(st.integers(-1, 9) | st.text(max_size=9), max_size=9)


@given(st.dictionaries(st.sampled_from(FIELDS), SCALARS | LISTS))
def test_no_config_can_crash_the_estimate(config):
    """A config may be any downloaded file, so any values in it must give a size or None."""
    layers = cache_layers(config)
    assert layers is None or kv_cache_bytes(layers, tokens=100) >= 0
    active = activation_bytes(config, PlannedUse(100, 1, 16.0, 2))
    assert active is None or active > 0


@given(
    st.lists(st.builds(Layer, st.integers(0, 4096), st.integers(0, 4096)), max_size=80),
    st.integers(1, 10**6),
    st.integers(1, 64),
)
def test_a_longer_context_never_needs_less_and_sequences_add_up(layers, tokens, sequences):
    one = kv_cache_bytes(layers, tokens=tokens)
    assert kv_cache_bytes(layers, tokens=2 * tokens) >= one
    assert kv_cache_bytes(layers, tokens=tokens, sequences=sequences) == sequences * one


def test_eager_attention_holds_its_scores():
    use = PlannedUse(8192, 1, 16.0, 2)
    flash, eager = (activation_bytes(LLAMA_3_8B, use._replace(eager=it)) for it in (False, True))
    assert eager > 32 * 8192**2 * 6 > 10 * flash


def test_a_part_shows_whether_it_is_room_for_use():
    names = ("weights", "kv_cache", "activations", "room", "context", "all")
    for_use = {name for name in names if Part(name, 1, "x").for_use}
    assert for_use == {"kv_cache", "activations", "room"}
