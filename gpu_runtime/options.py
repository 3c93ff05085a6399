"""The table of a model's options: the keywords of `register` that the model's backend gets.

An option that a model's backend does not use is refused, and the error names the most similar
option. If such options were ignored, a misspelled `context_length` would reserve no memory for the
context.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .arguments import (
    DTYPE,
    LAYERS,
    NUMBER,
    PATH,
    SECONDS,
    SEQUENCES,
    TEMPLATE,
    TOKENS,
    TRUTH,
    WORD,
    Rule,
    read,
    unknown_option,
    whole,
    words,
)
from .errors import BadSetting
from .facts import ENGINES

_MOST = 2**31 - 1  # the largest number that is passed to a C library
_COUNT = Rule("a whole number above 0", whole(1, _MOST))


class Option(NamedTuple):
    """A keyword of `register` that goes to the backend."""

    rule: Rule
    backends: tuple[str, ...] = ()  # the backends that use it; empty: all


def _engines(taking: str) -> tuple[str, ...]:
    """The engines whose line in the registry names `taking`."""
    return tuple(name for name, engine in ENGINES.items() if taking in engine.takes)


_LLAMA = ("llama_cpp", *_engines("llama.cpp"))
_TRANSFORMERS = ("transformers",)
_SERVERS = tuple(ENGINES)
# A GGUF file has the dtypes of its weights, and llama.cpp and Ollama convert none.
_CONVERTING = ("transformers", "torch", "fake", *_engines("dtype"))
_SWITCHES = ("use_mmap", "use_mlock", "logits_all", "offload_kqv", "swa_full")
_NUMBERS = ("rope_freq_base", "rope_freq_scale", "lora_scale")
_COUNTS = ("n_batch", "n_ubatch", "n_threads", "n_threads_batch")
_PLACED = "left out: gpu-console decides where a model goes"
# Options that are passed to `llama_cpp.Llama` unchanged.
PASSED_TO_LLAMA = (
    *(*_COUNTS, *_SWITCHES, *_NUMBERS),
    *("seed", "chat_format", "chat_template", "lora_path"),
)
REFUSED_FOR_LLAMA = {  # a keyword of the library -> what to type instead
    "n_gpu_layers": "given as gpu_layers",
    "n_ctx": "given as context_length",
    **dict.fromkeys(("type_k", "type_v"), "given as cache_dtype"),
    **dict.fromkeys(("tensor_split", "model_path"), _PLACED),
}
REFUSED_FOR_TRANSFORMERS = dict.fromkeys(
    ("device_map", "quantization_config", "load_in_8bit", "load_in_4bit", "offload_folder", "max_memory"),
    _PLACED,
)  # fmt: skip


def embedded_tokens(options: Mapping[str, Any], context: int) -> int:
    """The most tokens of one text that llama.cpp embeds with these `options` of a model.

    Without an option, this is the model's `context`.

    A text must be computed in one batch. In several, the vector would be that of the last one alone (measured with
    n_batch=2048 and n_ubatch=512), so both options get the same value.

    >>> embedded_tokens({}, 4096), embedded_tokens({"n_batch": 2048}, 4096)
    (4096, 2048)
    """
    return max(options.get("n_batch") or 0, options.get("n_ubatch") or 0) or context


def _refused(instead: str) -> Rule:
    """The rule of an option that is always refused. `instead` is the advice in the error."""
    return Rule(instead, whole(1, 0))


OPTIONS: dict[str, Option] = {
    "context_length": Option(TOKENS),
    "sequences": Option(SEQUENCES),
    "cache_dtype": Option(DTYPE._replace(expected="the dtype of a cache, such as float16 or q8_0")),
    "gpu_layers": Option(LAYERS, (*_LLAMA, *_engines("gpu_layers"))),
    **dict.fromkeys(("dtype", "torch_dtype"), Option(DTYPE, _CONVERTING)),
    "revision": Option(WORD),
    "attn_implementation": Option(WORD, _TRANSFORMERS),
    "task": Option(WORD, _TRANSFORMERS),
    "chat_template": Option(TEMPLATE),
    "thinking": Option(TRUTH),
    "leave_out_tools": Option(TRUTH),
    "trust_remote_code": Option(TRUTH, ("transformers", *_engines("trust_remote_code"))),
    "allow_missing": Option(TRUTH, ("transformers", *_engines("allow_missing"))),
    "runtime_args": Option(Rule("a list of words, such as ['--seed', '1']", words), _SERVERS),
    "fails": Option(TRUTH, ("fake",)),
    "shadow": Option(TRUTH, ("fake",)),
    "pieces": Option(_COUNT, ("fake",)),
    "start_seconds": Option(SECONDS, _SERVERS),
    "embedding": Option(TRUTH, _LLAMA),
    "split_mode": Option(WORD._replace(expected="layer or row"), _LLAMA),
    "main_gpu": Option(
        Rule("the number of one of its cards, counted from 0", whole(0, _MOST)), _LLAMA
    ),
    "seed": Option(Rule("a whole number", whole(-1, 2**32 - 1)), _LLAMA),
    "chat_format": Option(WORD, _LLAMA),
    "lora_path": Option(PATH, _LLAMA),
    **dict.fromkeys(_NUMBERS, Option(NUMBER, _LLAMA)),
    **dict.fromkeys(_COUNTS, Option(_COUNT, _LLAMA)),
    "isolated": Option(TRUTH, ("llama_cpp",)),
    **dict.fromkeys((*_SWITCHES, "flash_attn"), Option(TRUTH, _LLAMA)),
    **{name: Option(_refused(instead), _LLAMA) for name, instead in REFUSED_FOR_LLAMA.items()},
    **dict.fromkeys(REFUSED_FOR_TRANSFORMERS, Option(_refused(_PLACED), _TRANSFORMERS)),
}


FLAGS = {  # keyword of `rt.load` and `rt.plan` -> the option of `%gpu load` and `%gpu plan`
    "backend": "--backend",
    "size": "--size",
    "importance": "--importance",
    "keep": "--keep",
    "context_length": "--context",
    "sequences": "--sequences",
    "dtype": "--dtype",
    "timeout": "--timeout",
}


def require_none(options: Mapping[str, Any], refused: Mapping[str, str]) -> None:
    """Raises BadSetting if `options` has a name in `refused`, with the advice `refused[name]`."""
    for name, instead in refused.items():
        if name in options:
            raise BadSetting(name, options[name], instead)


def read_options(backend: str, given: Mapping[str, Any], others: Iterable[str]) -> dict[str, Any]:
    """Converts the options `given` for a `backend` by their rules. Leaves out options with None.

    `others` are further names that may be suggested for a misspelled option. Raises BadSetting.
    """
    known = {
        name: option.rule
        for name, option in OPTIONS.items()
        if not option.backends or backend in option.backends
    }
    options = {}
    for name, value in given.items():
        if name not in known:
            raise unknown_option(name, value, (*known, *others), f"the backend {backend}")
        if value is not None:
            options[name] = read(name, value, known[name])
    return options
