"""The table of the fields of a manifest (the description of a model in a catalogue file).

The table checks each field and converts its value to the project's units: sizes to bytes, durations
to seconds. An unknown field is kept, unless it looks like a misspelled known field, which is an
error. The documentation of the fields is generated from this table.

Sources: Helix, Multi-GPU Scheduling, appendix B; Kitchen Brigade, GPU Allocation Semantics, section
4; Model Boss, Backend Registry and Model Pinning; NDIF, GPU Fraction Deployment.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from ..arguments import (
    LAYERS,
    LONGEST_TEXT,
    MOST_FACTOR,
    MOST_SEQUENCES,
    MOST_TOKENS,
    TEMPLATE,
    TOKENS,
    WORD,
    Rule,
)
from ..backends.engines.recipe import group_flags, is_placeholder
from ..errors import BadSetting
from ..facts import ENGINES, IMPORTANCE, parse_importance
from ..options import OPTIONS
from ..safe_text import quoted
from ..units import MIB, parse_bytes, parse_seconds

TYPES = {  # word in a manifest -> type of model
    **dict.fromkeys(("llm", "chat", "text", "completion"), "llm"),
    **dict.fromkeys(("embedding", "embeddings", "embed"), "embedding"),
    **dict.fromkeys(("reranker", "rerank"), "reranker"),
    **dict.fromkeys(("vision", "multimodal"), "vision"),
    **dict.fromkeys(("diffusion", "image"), "diffusion"),
    "other": "other",
}
BACKENDS = {  # word in a manifest -> backend; an unknown backend is kept under its name
    **{name: name for name in ("transformers", "fake", *ENGINES)},
    **dict.fromkeys(("llama_cpp", "llamacpp", "llama.cpp", "llama-cpp"), "llama_cpp"),
}
DTYPES = {
    "auto": "auto",
    **dict.fromkeys(("float32", "fp32", "float"), "float32"),
    **dict.fromkeys(("float16", "fp16", "half"), "float16"),
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
}


def _whole(value: Any) -> Any:
    if isinstance(value, (bool, float)):
        raise ValueError("it must be a whole number")
    return value


def _size(value: Any) -> int:
    if value == 0:
        raise ValueError("a size cannot be 0; leave it out if it is not known")
    return parse_bytes(value)


def _mebibytes(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 2**43:
        raise ValueError(f"{quoted(value)} is not a number of MiB above 0")
    return int(value * MIB)


def _importance(value: Any) -> int:
    try:
        return parse_importance(value, least=1)
    except BadSetting:
        raise ValueError(
            f"{quoted(value)} is none of {', '.join(IMPORTANCE)}, nor a number above 0"
        ) from None


def _word_of(
    known: Mapping[str, str], otherwise: Callable[[str], str] | None, what: str
) -> Callable[[Any], str]:
    """Returns a function that replaces a word by its value in the table `known`.

    Any other word becomes the result of `otherwise`. It is a ValueError if `otherwise` is None, or
    if the word looks like a misspelled known word. `what` names the kind of word in errors.
    """

    def read(value: Any) -> str:
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{quoted(value)} is not a {what}; it must be text")
        word = value.strip().lower()
        if word in known:
            return known[word]
        close = difflib.get_close_matches(word, known, n=1, cutoff=0.75)
        if close:
            raise ValueError(f"{quoted(value)} is not a known {what}; did you mean {close[0]}?")
        if otherwise is None:
            listed = ", ".join(known)
            raise ValueError(f"{quoted(value)} is not a known {what}: it is one of {listed}")
        return otherwise(value.strip())

    return read


_WHICH_GPUS = "it must be how many GPUs, such as 2, or which, such as [0, 1] or [cuda:0]"


def _gpus(value: Any) -> int | tuple[str, ...]:
    """The number of cards, or the chosen cards (index, id or UUID, as text)."""
    if isinstance(value, list):
        named = [isinstance(card, (int, str)) and not isinstance(card, bool) for card in value]
        if not value or not all(named):
            raise ValueError(_WHICH_GPUS)
        return tuple(str(card) for card in value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(_WHICH_GPUS)
    return value


def _card_bytes(value: Any) -> int | dict[str, int]:
    """The most bytes of each card: one number for all cards, or one number for each card."""
    if not isinstance(value, dict):
        return _size(value)
    if not value:
        raise ValueError(
            "it names no card; write a size, or a size for each card, such as {0: 20GiB}"
        )
    return {str(card): _size(size) for card, size in value.items()}


def _arguments(value: Any) -> tuple[str, ...]:
    """Command-line arguments, read from a list or from a mapping of flags to values."""
    words = _flag_words(value) if isinstance(value, dict) else value
    if not isinstance(words, list) or not all(map(_is_argument, words)):
        raise ValueError("it must be a list of words, such as ['--max-model-len', '32768']")
    return tuple(str(word) for word in words)


def _is_argument(word: Any) -> bool:
    return isinstance(word, (str, int, float)) and not isinstance(word, bool)


def _flag_words(flags: Mapping[str, Any]) -> list[Any]:
    """The words of a mapping of flags to values: True is no word, False and None leave out the flag."""
    words: list[Any] = []
    for name, value in flags.items():
        if value is False or value is None:
            continue
        words.append(name if name.startswith("-") else f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(value)
    return words


def _by(rule: Rule) -> Callable[[Any], Any]:
    """Returns a function that checks and converts a value by `rule`, as `rt.register` does."""

    def read(value: Any) -> Any:
        try:
            return rule.read(value)
        except Exception:
            problem = f"{quoted(value)} cannot be used: it must be {rule.expected}"
            raise ValueError(problem) from None

    return read


def _option(name: str) -> Callable[[Any], Any]:
    """Returns a function that checks and converts a value as the option `name` of `rt.register`."""
    return _by(OPTIONS[name].rule)


Count = Annotated[int, BeforeValidator(_option("n_batch"))]
Number = Annotated[float, BeforeValidator(_option("rope_freq_base"))]
Text = Annotated[str, Field(min_length=1, max_length=LONGEST_TEXT)]
Word = Annotated[str, Field(min_length=1), AfterValidator(_by(WORD))]
Template = Annotated[str, Field(min_length=1), AfterValidator(_by(TEMPLATE))]
Whole = Annotated[int, BeforeValidator(_whole)]
Size = Annotated[int, BeforeValidator(_size)]
ModelType = Annotated[str, BeforeValidator(_word_of(TYPES, lambda word: "other", "type of model"))]
_backend = _word_of(BACKENDS, lambda word: _by(WORD)(word.lower()), "backend")
Backend = Annotated[str, BeforeValidator(_backend)]


def _field(description: str) -> Any:
    return Field(None, description=description)


class Fields(BaseModel):
    """The checked fields of a manifest. The documentation shows the same descriptions."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: Text | None = _field("A title to show with the name. In a list of models: the name.")
    id: Text | None = _field(
        "The hub id or the engine's name of the model; the source without a path."
    )
    description: str | None = _field("A sentence for people.")
    path: Text | None = _field("A file or directory, relative to the manifest's file.")
    source: Text | None = _field("The same as `path`, or a hub id.")
    runtime: Backend | None = _field(
        "The backend: transformers, llama_cpp, llama-server, vllm, ollama, "
        "diffusers, fake. An unknown backend is stored; the model then cannot be loaded."
    )
    backend: Backend | None = _field("The same as `runtime`.")
    type: ModelType | None = _field(
        "chat or llm, embedding, reranker, vision, diffusion or image, other."
    )
    model_type: ModelType | None = _field("The same as `type`.")
    category: ModelType | None = _field("The same as `type`.")
    quantization: Word | None = _field("The format of the weights, such as Q4_K_M or int8.")
    memory: Size | None = _field(
        "The memory that the model needs: `10GB` (decimal), `10GiB` or `10G` (binary), or bytes."
    )
    size: Size | None = _field("The same as `memory`.")
    vram_mb: Annotated[int, BeforeValidator(_mebibytes)] | None = _field(
        "The same as `memory`, as a number of MiB."
    )
    context_length: Annotated[Whole, Field(gt=0, le=MOST_TOKENS)] | None = _field(
        "Tokens of context for which memory is reserved."
    )
    sequences: Annotated[Whole, Field(gt=0, le=MOST_SEQUENCES)] | None = _field(
        "The number of contexts at the same time."
    )
    cache_dtype: Text | None = _field("The dtype of the KV cache, such as float16, fp8 or q8_0.")
    gpu_layers: Annotated[Whole, Field(ge=-1)] | None = _field(
        "The number of layers on the GPU. -1: all layers; 0: CPU only."
    )
    dtype: Annotated[str, BeforeValidator(_word_of(DTYPES, None, "dtype"))] | None = _field(
        "The dtype of the weights: auto, bfloat16, float16 or float32."
    )
    gpus: Annotated[int | tuple[str, ...], BeforeValidator(_gpus)] | None = _field(
        "The number of GPUs (`2`), or certain GPUs (`[0, 1]`)."
    )
    gpu_memory: Annotated[int | dict[str, int], BeforeValidator(_card_bytes)] | None = _field(
        "The most memory of each GPU: `20GiB`, or `{0: 20GiB, 1: 10GiB}`."
    )
    max_tensor_parallel: Annotated[Whole, Field(gt=0)] | None = _field(
        "The largest number of GPUs to split the model over."
    )
    layout: Literal["auto", "single", "balanced", "proportional", "whole"] | None = _field(
        "How the model is split: auto, single, balanced, proportional or whole."
    )
    gpu_fraction_factor: (
        Annotated[float, Field(gt=0, le=MOST_FACTOR, allow_inf_nan=False)] | None
    ) = _field("The memory to lease, as a multiple of the weights; replaces the estimate.")
    fraction_largest_possible: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = (
        _field("With `gpu_fraction_factor`: a model above this part of a GPU gets the whole.")
    )
    importance: Annotated[int, BeforeValidator(_importance)] | None = _field(
        "The importance: urgent, high, normal, low, batch or a number."
    )
    keep: bool | None = _field("`true`: the model is never evicted.")
    pin: bool | None = _field("The same as `keep`.")
    keep_alive: Annotated[float, BeforeValidator(parse_seconds)] | None = _field(
        "An idle model leaves by itself after this time, such as `10m`. It reserves nothing."
    )
    enabled: bool | None = _field("`false`: the model is listed, and cannot be loaded.")
    runtime_args: Annotated[tuple[str, ...], BeforeValidator(_arguments)] | None = _field(
        "Arguments of an engine's command line."
    )
    trust_remote_code: bool | None = _field(
        "`true`: the model's own code may run, if GPU_TRUST_REMOTE_CODE allows it."
    )
    allow_missing: bool | None = _field(
        "`true`: tensors that the files lack get random values. Else the load fails."
    )
    revision: Text | None = _field("The revision of a hub id.")
    attn_implementation: Text | None = _field("Passed to transformers.")
    task: Text | None = _field("Passed to transformers, if `type` does not determine it.")
    chat_template: Template | None = _field(
        "A chat template, or a file with one, instead of the model's own."
    )
    thinking: bool | None = _field(
        "Whether the model reasons before it answers, unless the request sets this."
    )
    n_batch: Count | None = _field("llama.cpp: tokens of a batch.")
    n_ubatch: Count | None = _field("llama.cpp: tokens computed at once.")
    n_threads: Count | None = _field("llama.cpp: threads of the CPU.")
    n_threads_batch: Count | None = _field("llama.cpp: the same for prompts.")
    type_k: Text | None = _field("llama.cpp: the same as `cache_dtype`.")
    type_v: Text | None = _field("llama.cpp: equal to `type_k`.")
    flash_attn: bool | None = _field("llama.cpp: flash attention.")
    embedding: bool | None = _field("llama.cpp: the model makes vectors.")
    use_mmap: bool | None = _field("llama.cpp: the file is mapped.")
    use_mlock: bool | None = _field("llama.cpp: its pages stay in RAM.")
    offload_kqv: bool | None = _field("llama.cpp: `false`: the cache is in host memory.")
    swa_full: bool | None = _field("llama.cpp: windows keep the whole context.")
    logits_all: bool | None = _field("llama.cpp: scores of all tokens.")
    rope_freq_base: Number | None = _field("llama.cpp: the base of RoPE.")
    rope_freq_scale: Number | None = _field("llama.cpp: the scale of RoPE.")
    seed: Annotated[int, BeforeValidator(_option("seed"))] | None = _field(
        "llama.cpp: the seed of its random numbers."
    )
    chat_format: Text | None = _field("llama.cpp: a format of chats by name.")
    lora_path: Text | None = _field("llama.cpp: the file of an adapter.")
    lora_scale: Number | None = _field("llama.cpp: the scale of the adapter.")
    split_mode: Literal["layer", "row"] | None = _field(
        "llama.cpp: how it is divided over cards: layer or row."
    )
    main_gpu: Annotated[int, BeforeValidator(_option("main_gpu"))] | None = _field(
        "llama.cpp: the number of one of its cards."
    )
    isolated: bool | None = _field(
        "llama.cpp: `false`: it runs in this process, not in one of its own."
    )
    leave_out_tools: bool | None = _field(
        "If the chat template takes no tools: leave the tools of a call out, instead of refusing it."
    )


SYNONYMS = (  # fields with the same meaning
    ("path", "source"),
    ("runtime", "backend"),
    ("type", "model_type", "category"),
    ("memory", "size", "vram_mb"),
    ("keep", "pin"),
    ("cache_dtype", "type_k"),
)


def misspelled_fields(spec: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs of a field of the `spec` that looks misspelled, and the known field that it looks like.

    Fields whose names start with `x-` are left out.

    >>> misspelled_fields({"memroy": 1, "colour": "red", "x-memroy": 2})
    [('memroy', 'memory')]
    """
    found = []
    for unknown in unknown_fields(spec):
        word = unknown.lower().replace("-", "_")
        close = difflib.get_close_matches(word, Fields.model_fields, n=1, cutoff=0.8)
        if close and not word.startswith("x_"):
            found.append((unknown, close[0]))
    return found


def unknown_fields(spec: Mapping[str, Any]) -> list[str]:
    """The fields of the `spec` that the class Fields does not have."""
    return [field for field in spec if field not in Fields.model_fields]


_EXPECTED = {
    "string_type": "it must be text; put it in quotes",
    "string_too_short": "it is empty",
    **dict.fromkeys(("bool_type", "bool_parsing"), "it must be true or false"),
    **dict.fromkeys(("int_type", "int_parsing"), "it must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing", "finite_number"), "it must be a number"),
}


def in_words(complaint: Any) -> str:
    """The pydantic error `complaint` as a sentence."""
    kind, given = complaint["type"], complaint["input"]
    if kind == "value_error":
        return str(complaint["ctx"]["error"]).rstrip(".")
    if kind in _EXPECTED:
        return f"{quoted(given)} cannot be used: {_EXPECTED[kind]}"
    expected = complaint["msg"].removeprefix("Input should be ")
    return f"{quoted(given)} cannot be used: it must be {expected}"


# -- an engine's arguments ----------------------------------------------------------------------


def _tokens(text: str) -> int:
    """A number of tokens as vLLM accepts it: 32768, 32k (times 1000), or 32K (times 1024).

    The letters m and M stand for 1000² and 1024². Raises ValueError.
    """
    match = re.fullmatch(r"([0-9]{1,12})([kKmM]?)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a number of tokens")
    scale = {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 2**20}[match[2]]
    return _by(TOKENS)(int(match[1]) * scale)


def _layers(text: str) -> int:
    return _by(LAYERS)(int(text))


def _unless_auto(text: str) -> str | None:
    return None if text == "auto" else text


# --max-num-seqs and --parallel are not in this table. The sequences that they allow share the
# reserved context, so they need no more memory.
_ARGUMENTS: dict[str, tuple[str, Callable[[str], Any]]] = {  # flag -> its field, and its reader
    **dict.fromkeys(("--max-model-len", "--ctx-size", "-c"), ("context_length", _tokens)),
    "--dtype": ("dtype", _word_of(DTYPES, None, "dtype")),
    **dict.fromkeys(("--quantization", "-q"), ("quantization", _by(WORD))),
    "--revision": ("revision", str),
    **dict.fromkeys(("--n-gpu-layers", "--gpu-layers", "-ngl"), ("gpu_layers", _layers)),
    **dict.fromkeys(("--kv-cache-dtype", "--cache-type-k", "-ctk"), ("cache_dtype", _unless_auto)),
    **dict.fromkeys(("--tensor-parallel-size", "-tp"), ("max_tensor_parallel", int)),
}
TRUST = "--trust-remote-code"


def read_arguments(words: tuple[str, ...]) -> Iterator[tuple[str, str, Any]]:
    """Yields each flag of `words` with its field and its value, None for a flag without a value.

    The field is empty for an unknown flag, and for a value that is a placeholder such as `{port}`.

    >>> list(read_arguments(("--max-model-len", "32k", "--trust-remote-code", "--seed=1")))
    [('--max-model-len', 'context_length', 32000), ('--trust-remote-code', '', None), ('--seed', '', '1')]

    Raises ValueError if a value is missing or cannot be read.
    """
    for flag, value, _ in group_flags(words):
        field, read = _ARGUMENTS.get("" if is_placeholder(value) else flag, ("", str))
        if field and value is None:
            raise ValueError(f"{flag} needs a value")
        try:
            yield flag, field, None if value is None else read(value)
        except ValueError as error:
            raise ValueError(f"{flag} {value}: {error}") from None


def is_trust(flag: str) -> bool:
    """Whether `flag` is --trust-remote-code. Engines also accept underscores and abbreviations.

    >>> is_trust("--trust_remote_code"), is_trust("--trust"), is_trust("--seed")
    (True, True, False)
    """
    return len(flag) > 2 and TRUST.startswith(flag.lower().replace("_", "-"))
