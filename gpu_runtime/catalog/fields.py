"""Reads the fields of a manifest (the description of a model in a catalogue file).

The table `model_fields` says how each field is checked and converted to the project's units: sizes
to bytes, durations to seconds. An unknown field is kept, unless it looks like a misspelled known
field, which is an error.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..backends.engines.recipe import group_flags, is_placeholder
from ..kinds import DTYPE, TOKENS, WORD
from ..model_fields import FIELDS, LAYERS, PYTHON

# The fields that a file may have, in the order of the docs.
KNOWN = {name: field for name, field in FIELDS.items() if field.only_in != PYTHON}


def read_fields(spec: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The values of the known fields in `spec`, and pairs of a wrong field and its problem.

    Fields without a value are left out.
    """
    values: dict[str, Any] = {}
    wrong: list[tuple[str, str]] = []
    for name, field in KNOWN.items():
        if spec.get(name) is None:
            continue
        try:
            values[name] = field.rule.in_file(spec[name])
        except ValueError as error:
            wrong.append((name, str(error).rstrip(".")))
    return values, wrong


def contradictions(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Pairs of a field in `values` and its problem: a field of the same meaning has another value."""
    for meaning in dict.fromkeys(field.same_as or name for name, field in KNOWN.items()):
        names = [name for name in values if meaning in (name, KNOWN[name].same_as)]
        if names[1:] and len({values[name] for name in names}) > 1:
            yield names[1], f"{' and '.join(names)} mean the same, and have different values"


def misspelled_fields(spec: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs of a field of the `spec` that looks misspelled, and the known field that it looks like.

    Fields whose names start with `x-` are left out.

    >>> misspelled_fields({"memroy": 1, "colour": "red", "x-memroy": 2})
    [('memroy', 'memory')]
    """
    found = []
    for unknown in unknown_fields(spec):
        word = unknown.lower().replace("-", "_")
        close = difflib.get_close_matches(word, KNOWN, n=1, cutoff=0.8)
        if close and not word.startswith("x_"):
            found.append((unknown, close[0]))
    return found


def unknown_fields(spec: Mapping[str, Any]) -> list[str]:
    """The fields of the `spec` that no file may have."""
    return [field for field in spec if field not in KNOWN]


# -- an engine's arguments ----------------------------------------------------------------------


def _tokens(text: str) -> int:
    """A number of tokens as vLLM accepts it: 32768, 32k (times 1000), or 32K (times 1024).

    The letters m and M stand for 1000² and 1024². Raises ValueError.
    """
    match = re.fullmatch(r"([0-9]{1,12})([kKmM]?)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a number of tokens")
    scale = {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 2**20}[match[2]]
    return TOKENS.convert(int(match[1]) * scale)


def _layers(text: str) -> int:
    return LAYERS.convert(int(text))


def _unless_auto(text: str) -> str | None:
    return None if text == "auto" else text


# --max-num-seqs and --parallel are not in this table. The sequences that they allow share the
# reserved context, so they need no more memory.
_ARGUMENTS: dict[str, tuple[str, Callable[[str], Any]]] = {  # flag -> its field, and its reader
    **dict.fromkeys(("--max-model-len", "--ctx-size", "-c"), ("context_length", _tokens)),
    "--dtype": ("dtype", DTYPE.in_file),
    **dict.fromkeys(("--quantization", "-q"), ("quantization", WORD.in_file)),
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
