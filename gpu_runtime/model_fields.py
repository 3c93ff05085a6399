"""The table of a model's fields: what people may say of a model, in Python, in a file or in a command.

From the table come the keywords of `register` and their errors, the check of the catalogue's files,
the options of `%gpu load` and `gpu plan`, and the catalogue's page in the docs. To add a field, add
a row here, and read its value in the backend. HTTP sets no field of a model; the fields of a call
are in `serving/fields.py`.

Sources: Helix, Multi-GPU Scheduling, appendix B; Kitchen Brigade, GPU Allocation Semantics, section
4; Model Boss, Backend Registry and Model Pinning; NDIF, GPU Fraction Deployment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .errors import BadSetting
from .facts import ENGINES
from .kinds import (
    COUNT,
    DEVICES,
    DTYPE,
    IMPORTANCE,
    MOST,
    MOST_FACTOR,
    NUMBER,
    PATH,
    SECONDS,
    SEQUENCES,
    SIZE,
    TEMPLATE,
    TEXT,
    TOKENS,
    TRUTH,
    WORD,
    Rule,
    number_in_file,
    one_of,
    optional,
    read,
    unknown_option,
    whole,
    word_of,
    words,
    written_size,
)
from .safe_text import quoted
from .units import MIB

TYPES = {  # word in a file -> type of model
    **dict.fromkeys(("llm", "chat", "text", "completion"), "llm"),
    **dict.fromkeys(("embedding", "embeddings", "embed"), "embedding"),
    **dict.fromkeys(("reranker", "rerank"), "reranker"),
    **dict.fromkeys(("vision", "multimodal"), "vision"),
    **dict.fromkeys(("diffusion", "image"), "diffusion"),
    "other": "other",
}
BACKENDS = {  # word in a file -> backend; an unknown backend is kept under its name
    **{name: name for name in ("transformers", "fake", *ENGINES)},
    **dict.fromkeys(("llama_cpp", "llamacpp", "llama.cpp", "llama-cpp"), "llama_cpp"),
}
PYTHON, CATALOGUE = "python", "catalogue"


class Field(NamedTuple):
    """One field of a model."""

    rule: Rule  # its type and unit, and the check
    meaning: str = ""  # its line in the docs
    backends: tuple[str, ...] = ()  # the backends that use it; empty: all
    only_in: str = ""  # PYTHON or CATALOGUE; empty: both. The command: see TYPED
    default: Any = ...  # of a keyword of `register`, which is a field of ModelSpec; ...: an option
    same_as: str = ""  # the field with the same meaning, for another name in a file
    of_use: bool = False  # whether the option changes no loaded bytes, only the memory in use


def _engines(taking: str) -> tuple[str, ...]:
    """The engines whose line in the registry names `taking`."""
    return tuple(name for name, engine in ENGINES.items() if taking in engine.takes)


_TRANSFORMERS = ("transformers",)
LLAMA = ("llama_cpp", *_engines("llama.cpp"))
# A GGUF file has the dtypes of its weights, and llama.cpp and Ollama convert none.
_CONVERTING = ("transformers", "torch", "fake", *_engines("dtype"))

# -- kinds of values that one field has ----------------------------------------------------------


def _any_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{quoted(value)} cannot be used: it must be text; put it in quotes")
    return value


def _mebibytes(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 2**43:
        raise ValueError(f"{quoted(value)} is not a number of MiB above 0")
    return int(value * MIB)


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
        return written_size(value)
    if not value:
        raise ValueError(
            "it names no card; write a size, or a size for each card, such as {0: 20GiB}"
        )
    return {str(card): written_size(size) for card, size in value.items()}


def _written_arguments(value: Any) -> tuple[str, ...]:
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


def _in_file(kind: Rule | Callable[[Any], Any], meaning: str, same_as: str = "") -> Field:
    """A field that only the catalogue's files have."""
    rule = kind if isinstance(kind, Rule) else Rule("", kind, kind)
    return Field(rule, meaning, (), CATALOGUE, same_as=same_as)


_LAYOUT = one_of("auto", "single", "balanced", "proportional", "whole")
_BACKEND = word_of(BACKENDS, lambda word: WORD.in_file(word.lower()), "backend")
_TYPE = WORD._replace(written=word_of(TYPES, lambda word: "other", "type of model"))
LAYERS = Rule(
    "-1 (all), 0 (CPU only) or a number of layers", whole(-1, MOST), number_in_file(int, least=-1)
)
_SPLIT_MODE = Rule("layer or row", one_of("layer", "row"), one_of("layer", "row"))
_MAIN_GPU = Rule("the number of one of its cards, counted from 0", whole(0, MOST))
_CACHE_DTYPE = Rule("the dtype of a cache, such as float16 or q8_0", DTYPE.read, WORD.written)
_SEED = Rule("a whole number", whole(-1, 2**32 - 1))
_ARGUMENTS = Rule("a list of words, such as ['--seed', '1']", words, _written_arguments)

# -- the table -----------------------------------------------------------------------------------

GROUPS: dict[str, dict[str, Field]] = {  # a heading of the docs -> its fields
    "Name and source": {
        "name": _in_file(TEXT, "A title to show with the name. In a list of models: the name."),
        "id": _in_file(TEXT, "The hub id or the engine's name of the model; the source without a path."),
        "description": _in_file(_any_text, "A sentence for people."),
        "path": _in_file(TEXT, "A file or directory, relative to the manifest's file.", "source"),
        "source": _in_file(TEXT, "The same as `path`, or a hub id."),
        "runtime": _in_file(_BACKEND, "The backend: transformers, llama_cpp, llama-server, vllm, ollama, diffusers, "
                            "fake. An unknown backend is stored; the model then cannot be loaded.", "backend"),
        "backend": Field(TEXT._replace(written=_BACKEND), "The same as `runtime`.", default="auto"),
        "type": _in_file(_TYPE, "chat or llm, embedding, reranker, vision, diffusion or image, other.", "model_type"),
        "model_type": Field(_TYPE, "The same as `type`.", default=""),
        "category": _in_file(_TYPE, "The same as `type`.", "model_type"),
        "enabled": _in_file(TRUTH, "`false`: the model is listed, and cannot be loaded."),
        "revision": Field(WORD, "The revision of a hub id."),
        "trust_remote_code": Field(TRUTH, "`true`: the model's own code may run, if GPU_TRUST_REMOTE_CODE allows it.",
                                   (*_TRANSFORMERS, *_engines("trust_remote_code"))),
        "allow_missing": Field(TRUTH, "`true`: tensors that the files lack get random values. Else the load fails.",
                               (*_TRANSFORMERS, *_engines("allow_missing"))),
    },
    "Size": {
        "memory": _in_file(SIZE, "The memory that the model needs: `10GB` (decimal), `10GiB` or `10G` (binary), "
                           "or bytes.", "size"),
        "size": Field(optional(SIZE), "The same as `memory`.", default=None),
        "vram_mb": _in_file(_mebibytes, "The same as `memory`, as a number of MiB.", "size"),
        "quantization": Field(WORD, "The format of the weights, such as Q4_K_M or int8.", default=""),
        "dtype": Field(DTYPE, "The dtype of the weights: auto, bfloat16, float16 or float32.", _CONVERTING),
        "context_length": Field(TOKENS, "Tokens of context for which memory is reserved.", of_use=True),
        "sequences": Field(SEQUENCES, "The number of contexts at the same time.", of_use=True),
        "cache_dtype": Field(_CACHE_DTYPE, "The dtype of the KV cache, such as float16, fp8 or q8_0.", of_use=True),
    },
    "Place": {
        "gpu_layers": Field(LAYERS, "The number of layers on the GPU. -1: all layers; 0: CPU only.",
                            (*LLAMA, *_engines("gpu_layers"))),
        "gpus": _in_file(_gpus, "The number of GPUs (`2`), or certain GPUs (`[0, 1]`)."),
        "gpu_memory": _in_file(_card_bytes, "The most memory of each GPU: `20GiB`, or `{0: 20GiB, 1: 10GiB}`."),
        "max_tensor_parallel": _in_file(number_in_file(int, above=0),
                                        "The largest number of GPUs to split the model over."),
        "layout": Field(TEXT._replace(written=_LAYOUT),
                        "How the model is split: auto, single, balanced, proportional or whole.", default="auto"),
        "gpu_fraction_factor": _in_file(number_in_file(float, above=0, most=MOST_FACTOR),
                                        "The memory to lease, as a multiple of the weights; replaces the estimate."),
        "fraction_largest_possible": _in_file(number_in_file(float, above=0, most=1), "With `gpu_fraction_factor`: "
                                              "a model above this part of a GPU gets the whole."),
    },
    "llama.cpp": {
        "n_batch": Field(COUNT, "llama.cpp: tokens of a batch.", LLAMA),
        "n_ubatch": Field(COUNT, "llama.cpp: tokens computed at once.", LLAMA),
        "n_threads": Field(COUNT, "llama.cpp: threads of the CPU.", LLAMA),
        "n_threads_batch": Field(COUNT, "llama.cpp: the same for prompts.", LLAMA),
        "type_k": _in_file(WORD, "llama.cpp: the same as `cache_dtype`.", "cache_dtype"),
        "type_v": _in_file(WORD, "llama.cpp: equal to `type_k`."),
        "flash_attn": Field(TRUTH, "llama.cpp: flash attention.", LLAMA),
        "embedding": Field(TRUTH, "llama.cpp: the model makes vectors.", LLAMA),
        "use_mmap": Field(TRUTH, "llama.cpp: the file is mapped.", LLAMA),
        "use_mlock": Field(TRUTH, "llama.cpp: its pages stay in RAM.", LLAMA),
        "offload_kqv": Field(TRUTH, "llama.cpp: `false`: the cache is in host memory.", LLAMA),
        "swa_full": Field(TRUTH, "llama.cpp: windows keep the whole context.", LLAMA),
        "logits_all": Field(TRUTH, "llama.cpp: scores of all tokens.", LLAMA),
        "rope_freq_base": Field(NUMBER, "llama.cpp: the base of RoPE.", LLAMA),
        "rope_freq_scale": Field(NUMBER, "llama.cpp: the scale of RoPE.", LLAMA),
        "seed": Field(_SEED, "llama.cpp: the seed of its random numbers.", LLAMA),
        "chat_format": Field(WORD, "llama.cpp: a format of chats by name.", LLAMA),
        "lora_path": Field(PATH, "llama.cpp: the file of an adapter.", LLAMA),
        "lora_scale": Field(NUMBER, "llama.cpp: the scale of the adapter.", LLAMA),
        "split_mode": Field(_SPLIT_MODE, "llama.cpp: how it is divided over cards: layer or row.", LLAMA),
        "main_gpu": Field(_MAIN_GPU, "llama.cpp: the number of one of its cards.", LLAMA),
        "isolated": Field(TRUTH, "llama.cpp: `false`: it runs in this process, not in one of its own.", ("llama_cpp",)),
    },
    "Who may evict it": {
        "importance": Field(IMPORTANCE, "The importance: urgent, high, normal, low, batch or a number.",
                            default="normal"),
        "keep": Field(TRUTH, "`true`: the model is never evicted.", default=False),
        "pin": _in_file(TRUTH, "The same as `keep`.", "keep"),
        "keep_alive": Field(SECONDS, "An idle model leaves by itself after this time, such as `10m`. "
                            "It reserves nothing.", default=0.0),
    },
    "Engine": {
        "runtime_args": Field(_ARGUMENTS, "Arguments of an engine's command line.", tuple(ENGINES)),
        "attn_implementation": Field(WORD, "Passed to transformers.", _TRANSFORMERS, of_use=True),
        "task": Field(WORD, "Passed to transformers, if `type` does not determine it.", _TRANSFORMERS),
        "chat_template": Field(TEMPLATE, "A chat template, or a file with one, instead of the model's own."),
        "thinking": Field(TRUTH, "Whether the model reasons before it answers, unless the request sets this."),
        "leave_out_tools": Field(TRUTH, "If the chat template takes no tools: leave the tools of a call out, "
                                 "instead of refusing it."),
    },
    "Only in Python": {
        "devices": Field(DEVICES, "The cards on which it may be.", (), PYTHON, ()),
        "torch_dtype": Field(DTYPE, "The same as `dtype`.", _CONVERTING, PYTHON),
        "start_seconds": Field(SECONDS, "The longest start of its server.", tuple(ENGINES), PYTHON),
        "fails": Field(TRUTH, "Its load fails.", ("fake",), PYTHON),
        "shadow": Field(TRUTH, "Its bytes in RAM stay there when it returns to a card.", ("fake",), PYTHON),
        "pieces": Field(COUNT, "The number of pieces that move alone.", ("fake",), PYTHON),
    },
}  # fmt: skip
FIELDS = {name: field for group in GROUPS.values() for name, field in group.items()}
_PLACED = "left out: gpu-console decides where a model goes"
REFUSED = {  # a keyword of a library -> the backends that refuse it, and what to type instead
    "n_gpu_layers": (LLAMA, "given as gpu_layers"),
    "n_ctx": (LLAMA, "given as context_length"),
    **dict.fromkeys(("type_k", "type_v"), (LLAMA, "given as cache_dtype")),
    **dict.fromkeys(("tensor_split", "model_path"), (LLAMA, _PLACED)),
    **dict.fromkeys(
        ("device_map", "quantization_config", "load_in_8bit"), (_TRANSFORMERS, _PLACED)
    ),
    **dict.fromkeys(("load_in_4bit", "offload_folder", "max_memory"), (_TRANSFORMERS, _PLACED)),
}
# Keywords of Runtime.register with their defaults. The specification has a field for each of them.
KEYWORDS = {name: field.default for name, field in FIELDS.items() if field.default is not ...}
# Keywords that the model's backend gets, as its options.
OPTIONS = [
    name for name, field in FIELDS.items() if name not in KEYWORDS and field.only_in != CATALOGUE
]
# The fields that `%gpu load` and `gpu plan` take, in the order of their help: flag, value, help, and words for Tab.
TYPED = {
    "backend": ("--backend", "B", "torch, transformers or fake; else derived from the source", "backends"),
    "size": ("--size", "SIZE", "bytes, such as 8GiB"),
    "importance": ("--importance", "I", "urgent, high, normal, low, batch, or a number", "importances"),
    "keep": ("--keep", "", "never evict it"),
    "context_length": ("--context", "TOKENS", "with memory for a context of that length"),
    "sequences": ("--sequences", "N", "… and for that many sequences at once"),
    "dtype": ("--dtype", "D", "converted, such as to bfloat16"),
}  # fmt: skip
# keyword of `rt.load` and `rt.plan` -> the option of `%gpu load` and `%gpu plan`
FLAGS = {"timeout": "--timeout", **{name: typed[0] for name, typed in TYPED.items()}}


def takes(backend: str, name: str) -> bool:
    """Whether the `backend` uses the field `name`."""
    backends = FIELDS[name].backends
    return not backends or backend in backends


def read_options(backend: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the options `given` for a `backend` by their rules. Leaves out options with None.

    An option that the backend does not use is refused, and the error names the most similar option.
    If such options were ignored, a misspelled `context_length` would reserve no memory for the
    context. Raises BadSetting.
    """
    refused = {
        name: instead for name, (backends, instead) in REFUSED.items() if backend in backends
    }
    known = [name for name in OPTIONS if takes(backend, name)]
    options = {}
    for name, value in given.items():
        if name in refused and value is not None:
            raise BadSetting(name, value, refused[name])
        if name not in known and name not in refused:
            near = (*known, *refused, *KEYWORDS, "restore_on_call")
            raise unknown_option(name, value, near, f"the backend {backend}")
        if value is not None:
            options[name] = read(name, value, FIELDS[name].rule)
    return options


def embedded_tokens(options: Mapping[str, Any], context: int) -> int:
    """The most tokens of one text that llama.cpp embeds with these `options` of a model.

    Without an option, this is the model's `context`.

    A text must be computed in one batch. In several, the vector would be that of the last one alone (measured with
    n_batch=2048 and n_ubatch=512), so both options get the same value.

    >>> embedded_tokens({}, 4096), embedded_tokens({"n_batch": 2048}, 4096)
    (4096, 2048)
    """
    return max(options.get("n_batch") or 0, options.get("n_ubatch") or 0) or context
