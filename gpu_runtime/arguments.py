"""What people may give: the kinds of values, a model's fields, and the arguments of the public methods.

A kind of value is a `Rule`. Values come from Python, or from the catalogue's files. After the check,
the runtime and the book that all processes read get only plain values within their bounds. Nothing
here checks whether a name or a device exists.

The table of a model's fields (GROUPS) says what may be set in Python, in a file or in a command. From
it come the keywords of `register` and their errors, the check of the catalogue's files, the options of
`%gpu load` and `gpu plan`, and the catalogue's page in the docs. To add a field, add a row, and read
its value in the backend. HTTP sets no field of a model; the fields of a call are in `serving/requests.py`.

The table of arguments (RULES) says what the public methods accept; `checked` applies it before a
method runs.

Sources: Helix, Multi-GPU Scheduling, appendix B; Kitchen Brigade, GPU Allocation Semantics, section
4; Model Boss, Backend Registry and Model Pinning; NDIF, GPU Fraction Deployment.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

from .errors import BadSetting, GpuError, reword
from .facts import ENGINES, LeaseId, parse_importance
from .facts import IMPORTANCE as CLASSES
from .safe_text import LONGEST_NAME, MOST_QUOTED, printable, quoted
from .threads import outside_modes
from .units import MIB, parse_bytes, parse_room, parse_seconds

P = ParamSpec("P")
T = TypeVar("T")

LONGEST_TEXT = 4096  # characters of text that is not stored, such as a path
LONGEST_TEMPLATE = 1 << 20  # characters of a chat template
MOST_TOKENS = 2**27
MOST_SEQUENCES = 2**16
MOST_DAYS = 36_500.0  # of a history
MOST_FACTOR = 1000  # the largest multiple of a model's weights that is leased
MOST = 2**31 - 1  # the largest number that is passed to a C library


class Rule(NamedTuple):
    """The allowed values of an argument, and of a field in a file."""

    expected: str  # what to type, as the end of "it must be …"
    read: Callable[[Any], Any]  # the value as the runtime uses it; raises for any other value
    # As `read` for a value in a file, where it differs; raises ValueError with a sentence.
    written: Callable[[Any], Any] | None = None

    def in_file(self, value: Any) -> Any:
        """The `value` in a file, converted. Raises ValueError with a sentence."""
        return (self.written or self.convert)(value)

    def convert(self, value: Any) -> Any:
        """The `value` as `read` converts it. Raises ValueError with a sentence."""
        try:
            return self.read(value)
        except Exception:
            raise _unusable(value, self.expected) from None


def read(name: str, value: Any, rule: Rule) -> Any:
    """The `value` of the argument `name`, converted by `rule`.

    Raises BadSetting, or the GpuError of the rule. BadSetting is also raised if code of the value's
    class raises an exception.
    """
    try:
        return rule.read(value)
    except GpuError:
        raise
    except Exception:
        raise BadSetting(name, value, rule.expected) from None


def unknown_option(name: str, value: Any, known: Iterable[str], taker: str) -> BadSetting:
    """The error for an option that `taker` does not take. The error suggests a `known` name."""
    nearest = difflib.get_close_matches(name[:MOST_QUOTED].lower(), list(known), n=1, cutoff=0.0)
    return BadSetting(name, value, f"an option that {taker} takes; the nearest is {nearest[0]}")


# -- kinds of values -----------------------------------------------------------------------------


def _where(
    is_right: Callable[[Any], object], read: Callable[[Any], Any] | None = None
) -> Callable[[Any], Any]:
    """A function that converts a value by `read`, by default `plain`, and requires that it `is_right`."""

    def reader(value: Any) -> Any:
        found = plain(value) if read is None else read(value)
        if not is_right(found):
            raise ValueError
        return found

    return reader


def _same(value: Any) -> Any:
    return value


def plain(value: Any) -> Any:
    """Converts an object of a subclass of str, int or float, or a NumPy integer, to the plain type.

    Subclasses are converted because a subclass may define its own comparison and its own text. Any
    other value is returned unchanged.

    >>> import enum
    >>> plain(enum.IntEnum("Size", {"ONE": 1}).ONE), plain(True), plain(None)
    (1, True, None)
    """
    kind = type(value)
    if kind in (str, int, float, bool):
        return value
    if issubclass(kind, str):
        return str.__str__(value)
    if issubclass(kind, int):
        return int.__int__(value)
    if issubclass(kind, float):
        return float.__float__(value)
    return operator.index(value) if hasattr(kind, "__index__") else value


def bad_name(name: Any) -> str:
    """Why `name` cannot be the name of a model. Empty if the name is valid.

    >>> bad_name("Qwen/Qwen3:8b"), bad_name("a@b")
    ('', "'a@b' cannot be a name: '@' separates a name from a process")
    """
    if not isinstance(name, str):
        return f"{name!r} is not text; put it in quotes"
    if not name.strip() or name != name.strip():
        return f"{name[:40]!r} cannot be a name: it is empty, or has spaces around it"
    if "@" in name:
        return f"{name[:40]!r} cannot be a name: '@' separates a name from a process"
    if len(name) > LONGEST_NAME or not name.isprintable():
        return f"{name[:40]!r} cannot be a name: it must be at most {LONGEST_NAME} printable characters"
    return ""


def _is_text(value: Any, most: int = LONGEST_TEXT) -> bool:
    """Whether `value` is valid UTF-8 of at most `most` characters that the operating system accepts."""
    is_short = isinstance(value, str) and len(value) <= most and "\0" not in value
    return is_short and value.encode() is not None  # raises for a lone surrogate


_text = _where(_is_text)


def _or_empty(value: Any) -> Any:
    return "" if value is None else plain(value)


# One line of text for the book, at most as long as a name. None becomes an empty text.
_word = _where(
    lambda text: isinstance(text, str) and len(text) <= LONGEST_NAME and text.isprintable(),
    _or_empty,
)


def _one_line(value: Any) -> str:
    """Free text for people, as one line. Text longer than the longest allowed name is shortened."""
    text = _where(lambda text: isinstance(text, str), _or_empty)(value)
    return printable(" ".join(text[:LONGEST_TEXT].split()), LONGEST_NAME)


def _path(value: Any) -> str:
    """A path as text, with the home directory for `~`. Bytes that are not UTF-8 become text as by `os.fsdecode`."""
    text = plain(os.fspath(value))
    if not isinstance(text, str) or len(text) > LONGEST_TEXT or "\0" in text:
        raise ValueError
    os.fsencode(text)
    return os.path.expanduser(text)


def _source(value: Any) -> Any:
    """A path or a hub id as text. Any other object but bytes is returned unchanged."""
    if isinstance(value, (str, os.PathLike)):
        return _path(value)
    return _where(lambda given: not isinstance(given, (bytes, bytearray, memoryview)), _same)(value)


def _model(value: Any) -> str | LeaseId:
    """A model's name as people write it, or the exact id of a lease."""
    if isinstance(value, LeaseId):
        return LeaseId(_text(value.owner), _text(value.name))
    return _text(value)


def _size_or_source(value: Any) -> str | int | float:
    return _path(value) if isinstance(value, (str, os.PathLike)) else SIZE.read(value)


def _devices(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (_word(value),)
    devices = tuple(
        _where(lambda given: isinstance(given, (tuple, list, set, frozenset)), _same)(value)
    )
    if not all(isinstance(device, str) for device in devices):
        raise ValueError
    return tuple(map(_word, devices))


def _cards(value: Any) -> str | tuple[str, ...]:
    return _word(value) if isinstance(value, str) else _devices(value)


def _words(value: Any) -> tuple[str, ...]:
    words = value.split(",") if isinstance(value, str) else _devices(value)
    return tuple(_word(word.strip()) for word in words if word.strip())


def _dtype(value: Any) -> Any:
    """The name of a dtype, also of a dtype of torch."""
    is_torch = type(value).__module__ == "torch"
    return _word(str(value).removeprefix("torch.") if is_torch else value)


def _number(value: Any) -> float:
    number = plain(value)
    if type(number) not in (int, float) or not abs(number) <= MOST:  # also for nan
        raise ValueError
    return float(number)


def words(value: Any) -> list[str]:
    """The arguments of a command line."""
    found = list(map(plain, _where(lambda given: isinstance(given, (list, tuple)), _same)(value)))
    if not all(isinstance(word, (str, int, float)) for word in found):
        raise ValueError
    return [_text(str(word)) for word in found]


def whole(least: int, most: int) -> Callable[[Any], int]:
    """A function that reads a whole number from `least` to `most`."""
    return _where(lambda number: type(number) is int and least <= number <= most)


def optional(rule: Rule) -> Rule:
    """A rule that accepts None, and the values that `rule` accepts."""
    return rule._replace(read=lambda value: None if value is None else rule.read(value))


# -- values in a file ----------------------------------------------------------------------------

_TRUTHS = {
    **dict.fromkeys((True, "1", "on", "t", "true", "y", "yes"), True),
    **dict.fromkeys((False, "0", "off", "f", "false", "n", "no"), False),
}


def _unusable(value: Any, expected: str) -> ValueError:
    return ValueError(f"{quoted(value)} cannot be used: it must be {expected}")


def _text_rule(expected: str, read: Callable[[Any], str]) -> Rule:
    """A rule for text, which must not be empty in a file."""
    rule = Rule(expected, read)

    def written(value: Any) -> str:
        if not isinstance(value, str):
            raise _unusable(value, "text; put it in quotes")
        if not value:
            raise ValueError(f"{quoted(value)} cannot be used: it is empty")
        return rule.convert(value)

    return rule._replace(written=written)


def _written_truth(value: Any) -> bool:
    word = value.lower() if isinstance(value, str) else value
    if isinstance(word, (str, int, float)) and word in _TRUTHS:
        return _TRUTHS[word]
    raise _unusable(value, "true or false")


def number_in_file(
    kind: type, *, least: float = -math.inf, above: float = -math.inf, most: float = MOST
) -> Callable[[Any], Any]:
    """A function that reads an int or a float (`kind`) within these bounds, also from text."""
    expected = "a whole number" if kind is int else "a number"

    def written(value: Any) -> Any:
        is_whole = not isinstance(value, float) or value.is_integer()
        if isinstance(value, bool) or (kind is int and not is_whole):  # True equals 1
            raise ValueError(f"it must be {expected}")
        try:
            number = kind(re.sub(r"\.0+$", "", value) if isinstance(value, str) else value)
        except (TypeError, ValueError, OverflowError):
            raise _unusable(value, expected) from None
        if not abs(number) < math.inf:  # `isfinite` raises for an int above all floats
            raise _unusable(value, expected)
        if number <= above:
            raise _unusable(value, f"greater than {above}")
        if number < least:
            raise _unusable(value, f"greater than or equal to {least}")
        if number > most:
            raise _unusable(value, f"less than or equal to {most}")
        return number

    return written


def one_of(*choices: str) -> Callable[[Any], str]:
    """A function that reads one of the `choices`."""
    *others, last = map(repr, choices)

    def written(value: Any) -> str:
        if isinstance(value, str) and value in choices:
            return plain(value)
        raise _unusable(value, f"{', '.join(others)} or {last}")

    return written


def word_of(
    known: Mapping[str, str], otherwise: Callable[[str], str] | None, what: str
) -> Callable[[Any], str]:
    """Returns a function that replaces a word by its value in the table `known`.

    Any other word becomes the result of `otherwise`. It is a ValueError if `otherwise` is None, or
    if the word looks like a misspelled known word. `what` names the kind of word in errors.
    """

    def written(value: Any) -> str:
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

    return written


def written_size(value: Any) -> int:
    """The bytes of a size in a file."""
    size = parse_bytes(value)
    if size == 0:
        raise ValueError("a size cannot be 0; leave it out if it is not known")
    return size


def _written_importance(value: Any) -> int:
    try:
        return parse_importance(value, least=1)
    except BadSetting:
        raise ValueError(
            f"{quoted(value)} is none of {', '.join(CLASSES)}, nor a number above 0"
        ) from None


# -- the kinds -----------------------------------------------------------------------------------

DTYPES = {
    "auto": "auto",
    **dict.fromkeys(("float32", "fp32", "float"), "float32"),
    **dict.fromkeys(("float16", "fp16", "half"), "float16"),
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
}
MODEL = Rule("the name of a model, such as 'qwen' or 'qwen@4121'", _model)
SOURCE = Rule(
    "a directory, a GGUF file, a hub id (org/name), an nn.Module, or a callable that returns one",
    _source,
)
WORD = _text_rule(f"text of at most {LONGEST_NAME} printable characters", _word)
TEXT = _text_rule(f"text of at most {LONGEST_TEXT} characters", _text)
PATH = _text_rule("the path of a file or directory", _path)
TEMPLATE = _text_rule(
    "a Jinja template, or the path of a file with one",
    _where(lambda text: _is_text(text, LONGEST_TEMPLATE)),
)
TRUTH = Rule(
    "True or False", _where(lambda value: value is True or value is False, _same), _written_truth
)
SECONDS = Rule(
    "seconds, or text such as '30s' or '10m'",
    lambda value: parse_seconds(plain(value)),
    parse_seconds,
)
IMPORTANCE = Rule(
    "urgent, high, normal, low, batch or a number",
    lambda value: parse_importance(plain(value)),
    _written_importance,
)
DTYPE = Rule("auto, bfloat16, float16 or float32", _dtype, word_of(DTYPES, None, "dtype"))
CALLABLE = Rule("a function", _where(callable, _same))
SIZE = Rule("a size, such as '8 GiB'", lambda value: parse_room(plain(value)), written_size)
COUNT = Rule("a whole number above 0", whole(1, MOST))
TOKENS = Rule(COUNT.expected, whole(1, MOST_TOKENS), number_in_file(int, above=0, most=MOST_TOKENS))
SEQUENCES = Rule(
    COUNT.expected, whole(1, MOST_SEQUENCES), number_in_file(int, above=0, most=MOST_SEQUENCES)
)
NUMBER = Rule("a number", _number)
WORDS = Rule("words in a list, or in a text that separates them by commas", _where(bool, _words))
# `isinstance` reads the attribute `__class__`, and a property may raise
OBJECT = Rule("an object", _where(lambda value: value.__class__, _same))
DEVICES = Rule("a device's id such as 'cuda:1', or a list of them", _devices)

# -- the fields of a model --------------------------------------------------------------------------

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


_TRANSFORMERS, PROGRAM = ("transformers",), ("program",)
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


_WHICH_GPUS = "it must be how many cards, such as 2, or which, such as [0, 1] or [cuda:0]"


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
    if not isinstance(words, list) or not {*map(type, words)} <= {str, int, float}:
        raise ValueError("it must be a list of words, such as ['--max-model-len', '32768']")
    return tuple(str(word) for word in words)


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

_PORT_PATH = re.compile(r"/[!-~]*")


_some_words = _where(lambda found: found and found[0], words)


def _port_path(value: Any) -> str:
    return _where(lambda path: _PORT_PATH.fullmatch(path))(value)


def _how(value: Any) -> str | list[str]:
    """A path on the port of a program, or a command."""
    return _port_path(value) if isinstance(value, str) else _some_words(value)


def _sleep(value: Any) -> bool | str | list[str]:
    return value if value is True or value is False else _how(value)


def _written_sleep(value: Any) -> bool | str | list[str]:
    with contextlib.suppress(ValueError):  # it may still say how
        return TRUTH.in_file(value)
    return _SLEEP.convert(value)


_COMMAND = Rule(
    "a list of words with {port}, such as ['server', '--port', '{port}']",
    _where(lambda found: "{port}" in " ".join(found[1:]), _some_words),
)
_HOW = Rule("a path on its port, such as '/sleep', or a command, such as ['sh', 'sleep.sh']", _how)
_SLEEP = Rule(f"true or false; of a program, {_HOW.expected}", _sleep, _written_sleep)
_HEALTH = Rule("a path on its port, such as '/health'", _port_path)

# -- the table -----------------------------------------------------------------------------------

GROUPS: dict[str, dict[str, Field]] = {  # a heading of the docs -> its fields
    "Name and source": {
        "name": _in_file(TEXT, "A title to show with the name. In a list of models: the name."),
        "id": _in_file(TEXT, "The hub id or the engine's name of the model; the source without a path."),
        "description": _in_file(_any_text, "A sentence for people."),
        "path": _in_file(TEXT, "A file or directory, relative to the manifest's file.", "source"),
        "source": _in_file(TEXT, "The same as `path`, or a hub id."),
        "runtime": _in_file(_BACKEND, f"The backend: transformers, llama_cpp, {', '.join(ENGINES)}, fake. "
                            "An unknown backend is stored; the model then cannot be loaded.", "backend"),
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
        "gpu_layers": Field(LAYERS, "The number of layers on the card. -1: all layers; 0: CPU only.",
                            (*LLAMA, *_engines("gpu_layers"))),
        "gpus": _in_file(_gpus, "The number of cards (`2`), or certain cards (`[0, 1]`)."),
        "gpu_memory": _in_file(_card_bytes, "The most memory of each card: `20GiB`, or `{0: 20GiB, 1: 10GiB}`."),
        "max_tensor_parallel": _in_file(number_in_file(int, above=0),
                                        "The largest number of cards to split the model over."),
        "layout": Field(TEXT._replace(written=_LAYOUT),
                        "How the model is split: auto, single, balanced, proportional or whole.", default="auto"),
        "gpu_fraction_factor": _in_file(number_in_file(float, above=0, most=MOST_FACTOR),
                                        "The memory to reserve, as a multiple of the weights; replaces the estimate."),
        "fraction_largest_possible": _in_file(number_in_file(float, above=0, most=1), "With `gpu_fraction_factor`: "
                                              "a model that would claim this part of a card or more gets the whole."),
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
        "offload_kqv": Field(TRUTH, "llama.cpp: `false`: the cache is in RAM.", LLAMA),
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
        "command": Field(_COMMAND, "`program`: its command line, with `{port}`.", PROGRAM),
        "health": Field(_HEALTH, "`program`: the path that answers 200 once it is ready; `/health` by default.",
                        PROGRAM),
        "sleep": Field(_SLEEP, "`false`: if its card is wanted, its engine ends instead of sleeping. `program`: how it "
                       "is put to sleep, as a path that gets a POST, or a command.", (*_engines("sleep"), "llama_cpp")),
        "wake": Field(_HOW, "`program`: how it is woken, as `sleep`.", PROGRAM),
        "asleep": Field(_HOW, "`program`: how it says whether it sleeps: a path that answers a GET with `true` or "
                        "`false`, or an object with one such value; or a command, which ends with 0 while it sleeps, "
                        "and else with 1.", PROGRAM),
        "attn_implementation": Field(WORD, "Passed to transformers.", _TRANSFORMERS, of_use=True),
        "task": Field(WORD, "Passed to transformers, if `type` does not determine it.", _TRANSFORMERS),
        "chat_template": Field(TEMPLATE, "A chat template, or a file with one, instead of the model's own."),
        "thinking": Field(TRUTH, "Whether the model reasons before it answers, unless the request sets this."),
        "leave_out_tools": Field(TRUTH, "If the chat template takes no tools: leave the tools of a call out, "
                                 "instead of refusing it."),
    },
    "Only in Python": {
        "devices": Field(DEVICES, "The cards on which it may be.", (), PYTHON, ()),
        "torch_dtype": Field(DTYPE, "The same as `dtype`.", _CONVERTING, PYTHON, same_as="dtype"),
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
    "backend": ("--backend", "B", "such as transformers, llama_cpp or vllm; else derived from the source", "backends"),
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


def read_keywords(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of `register` as a specification has them, with defaults. Raises BadSetting."""
    made = {
        name: read(name, given.get(name, default), FIELDS[name].rule)
        for name, default in KEYWORDS.items()
    }
    return {**made, "model_type": (made["model_type"] or "other").lower()}


def read_options(backend: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the options `given` for a `backend` by their rules. Leaves out keywords, and options with None.

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
        if name in KEYWORDS:
            continue
        if name not in known and name not in refused:
            near = (*known, *refused, *KEYWORDS, "restore_on_call")
            raise unknown_option(name, value, near, f"the backend {backend}")
        if value is None:
            continue
        if name in refused:
            raise BadSetting(name, value, refused[name])
        found, usual_name = read(name, value, FIELDS[name].rule), FIELDS[name].same_as
        if usual_name:
            options.setdefault(usual_name, found)
        else:
            options[name] = found
    mistaken, expected = program_mistake(backend, options)
    if mistaken:
        raise BadSetting(mistaken, given.get(mistaken), expected)
    return options


def program_mistake(backend: str, given: Mapping[str, Any]) -> tuple[str, str]:
    """The first of a program's fields that does not fit the others, and what it must be; else two empty texts.

    `given` are the fields of a model, with their values.
    """
    how = given.get("sleep", False)
    if backend not in PROGRAM:
        for name in ("command", "health", "wake", "asleep"):
            if name in given:
                return name, "left out: only the backend program takes it"
        if not isinstance(how, bool):
            return "sleep", "true or false, unless the backend is program"
    elif not given.get("command"):
        return "command", f"given with the backend program: {_COMMAND.expected}"
    elif how is True:
        return "sleep", _HOW.expected
    elif how and "wake" not in given:
        return "wake", f"given with sleep: {_HOW.expected}"
    elif not how and ("wake" in given or "asleep" in given):
        return "sleep", f"given with wake and asleep: {_HOW.expected}"
    return "", ""


def embedded_tokens(options: Mapping[str, Any], context: int) -> int:
    """The most tokens of one text that llama.cpp embeds with these `options` of a model.

    Without an option, this is the model's `context`.

    A text must be computed in one batch. In several, the vector would be that of the last one alone (measured with
    n_batch=2048 and n_ubatch=512), so both options get the same value.

    >>> embedded_tokens({}, 4096), embedded_tokens({"n_batch": 2048}, 4096)
    (4096, 2048)
    """
    return max(options.get("n_batch") or 0, options.get("n_ubatch") or 0) or context


# -- the arguments of the public methods ------------------------------------------------------------

# The keys are names of parameters. A key `METHOD.PARAMETER` is the rule for this method only.
RULES: dict[str, Rule] = {
    **dict.fromkeys(("name", "model"), MODEL),
    **dict.fromkeys(
        ("register.name", "adopt.name"),
        Rule(
            f"at most {LONGEST_NAME} printable characters, without '@' or spaces around them",
            _where(lambda name: isinstance(name, str) and not bad_name(name)),
        ),
    ),
    "on_behalf_of.name": Rule("a person's name", _one_line),
    "source": SOURCE,
    "module": OBJECT,
    "optimizer": optional(
        Rule(
            "an optimizer, such as torch.optim.Adam(module.parameters())",
            _where(
                lambda given: (
                    isinstance(given.state, Mapping) and isinstance(given.param_groups, list)
                ),
                OBJECT.read,
            ),
        )
    ),
    **{name: FIELDS[name].rule for name in KEYWORDS if name != "devices"},
    "register.devices": FIELDS["devices"].rule,
    "use.importance": optional(IMPORTANCE),
    "use.keep_alive": optional(SECONDS),
    "timeout": optional(SECONDS),
    "purpose": Rule("text for people", _one_line),
    **dict.fromkeys(("progress", "told", "arrived", "clock"), optional(CALLABLE)),
    **dict.fromkeys("wait drop lost force replay oom checkpoint yes undo end text".split(), TRUTH),
    **dict.fromkeys("restore_on_call dedicated retry monitor".split(), TRUTH),
    "device": WORD._replace(expected="a card's id, such as 'cuda:1'"),
    "free.name": optional(WORD._replace(expected="the name of a variable")),
    "move.device": Rule("a card's id such as 'cuda:1', or a list of them", _cards),
    "stillness": Rule(
        "an object with why_not(), mark() and change()",
        _where(
            lambda item: callable(item.why_not) and callable(item.mark) and callable(item.change),
            _same,
        ),
    ),
    "who": WORD._replace(expected="a notebook's file name or a process id"),
    "process": WORD._replace(
        expected="a process id, or a model that it holds, such as 'qwen@4121'"
    ),
    "limit": optional(Rule("a number of rows, 0 or more", whole(0, MOST))),
    **dict.fromkeys(("seconds", "since", "status.timeout"), SECONDS),
    "by": WORD._replace(expected="one of user, notebook, model, card, waits, time"),
    "points": Rule("a number of moments, 1 to 1,000,000", whole(1, 1_000_000)),
    "name_or_size": Rule("a model's name, a path, or a size such as '8 GiB'", _size_or_source),
    **dict.fromkeys(("requests", "models", "catalog"), optional(PATH)),
    "days": optional(
        Rule("a number of days above 0", _where(lambda days: 0 < days < MOST_DAYS, _number))
    ),
    **dict.fromkeys(("backtest.policy", "engine", "backtest.device", "host"), WORDS),
    "disk": WORD._replace(expected="a size such as 80GB, or a percent such as 20%"),
    "file": PATH,
    "format": WORD._replace(expected="yaml, json, or nothing for a dict"),
    # the arguments of the fleet
    "copies": Rule("a number of copies, 0 to 10,000", whole(0, 10_000)),
    **dict.fromkeys(
        ("drain.host", "create_slot.host"), WORD._replace(expected="the name of a host")
    ),
    "create_slot.devices": Rule(
        "cards of the host, such as 'cuda:1' or 'cuda:0,1'",
        _where(
            lambda cards: cards and (isinstance(cards, str) or len(set(cards)) == len(cards)),
            _cards,
        ),
    ),
    "slot": WORD._replace(expected="the name of a slot, such as 'qwen@box2'"),
    # the arguments of Runtime itself; its other keywords are settings
    **dict.fromkeys(("devices", "ledger", "policy"), optional(TEXT)),
    "wall": CALLABLE,
    "probe": optional(
        Rule("a Probe", _where(lambda probe: callable(probe.samples) and probe.devices, _same))
    ),
}


def rules_of(method: Callable[..., Any]) -> dict[str, Rule]:
    """The rule of each parameter of `method`. Raises KeyError if the table lacks a parameter."""
    code = method.__code__
    names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    return {name: _rule(method.__name__, name) for name in names}


def read_all(method: str, unknown: Mapping[str, Any], **given: Any) -> tuple[Any, ...]:
    """The arguments `given` to `method`, converted by their rules. Raises BadSetting, also for an `unknown` keyword."""
    for name, value in unknown.items():
        raise unknown_option(name, value, given, f"{method}()")
    return tuple(read(name, value, _rule(method, name)) for name, value in given.items())


def _rule(method: str, parameter: str) -> Rule:
    return RULES.get(f"{method}.{parameter}") or RULES[parameter]


def checked(method: Callable[P, T]) -> Callable[P, T]:
    """Wraps `method`, so that it gets only arguments that the table allows.

    `method` runs outside the user's modes of torch; see `outside_modes`.

    If `method` has `**options`, keywords that its signature does not name are passed on unchanged.
    If `method` has no `**options`, such keywords raise BadSetting, which names the nearest keyword.
    An error of the system or of another package is raised as `errors.in_one_sentence` words it.
    """
    rules = rules_of(method)
    takes_more = bool(method.__code__.co_flags & inspect.CO_VARKEYWORDS)
    by_position = tuple(rules.items())
    run = outside_modes(method)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **given: Any) -> T:
        """Calls `method` with the checked arguments."""
        if args:
            paired = zip(by_position, args, strict=False)
            read_args = [read(name, value, rule) for (name, rule), value in paired]
            args = (*read_args, *args[len(read_args) :])
        for name, value in given.items():
            rule = rules.get(name)
            if rule is not None:
                given[name] = read(name, value, rule)
            elif not takes_more:
                raise unknown_option(name, value, rules, f"{method.__name__}()")
        try:
            return run(self, *args, **given)  # type: ignore[call-arg]
        except Exception as error:
            reword(error)
            raise

    call.rules = rules  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]
