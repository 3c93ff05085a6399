"""Parses and filters the command-line arguments that users add to an engine (`runtime_args`).

The recipe of an engine adds them to its own arguments. The catalogue checks manifests with the same
parser.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ...facts import ModelSpec

RESERVED_FLAGS = (  # the lease decides these
    *("--gpu-memory-utilization", "--tensor-split", "--main-gpu", "--device", "--split-mode"),
    *("-ts", "-mg", "-sm"),
)
_PLACEHOLDER = re.compile(r"\{(tensor_parallel|gpu_memory_utilization|port)\}")
_VALUE = re.compile(r"(?!-)|-\d")  # the next word is a value unless it looks like a flag


def group_flags(words: tuple[str, ...]) -> Iterator[tuple[str, str | None, tuple[str, ...]]]:
    """For each flag in `words`: the flag, its value or None, and the words of both together.

    >>> list(group_flags(("--seed", "1", "-ngl", "-1")))
    [('--seed', '1', ('--seed', '1')), ('-ngl', '-1', ('-ngl', '-1'))]
    >>> list(group_flags(("--fast", "--top=5")))
    [('--fast', None, ('--fast',)), ('--top', '5', ('--top=5',))]
    """
    index = 0
    while index < len(words):
        word = words[index]
        flag, equals, value = word.partition("=")
        following = words[index + 1 : index + 2]
        if equals:
            yield flag, value, (word,)
            index += 1
        elif flag.startswith("-") and following and _VALUE.match(following[0]):
            yield flag, following[0], (word, *following)
            index += 2
        else:
            yield flag, None, (word,)
            index += 1


def is_placeholder(value: str | None) -> bool:
    """Whether the `value` of a flag has a placeholder, which is replaced when the engine starts.

    >>> is_placeholder("{tensor_parallel}"), is_placeholder('{"image": 10}')
    (True, False)
    """
    return value is not None and _PLACEHOLDER.search(value) is not None


def user_arguments(spec: ModelSpec, values: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The `runtime_args` of `spec`, without the flags whose values the lease decides.

    `values` replace the placeholders `{tensor_parallel}` (the number of cards),
    `{gpu_memory_utilization}` (the part of each card) and `{port}`. A placeholder without a value
    stays.

    >>> words = ["--tp={tensor_parallel}"]
    >>> user_arguments(ModelSpec("a", "vllm", options={"runtime_args": words}), {"tensor_parallel": "2"})
    ('--tp=2',)
    >>> words = ["--seed", "1", "--gpu-memory-utilization", "1"]
    >>> user_arguments(ModelSpec("a", "vllm", options={"runtime_args": words}))
    ('--seed', '1')
    """
    words = tuple(str(word) for word in spec.options.get("runtime_args", ()))
    kept: list[str] = []
    for flag, _, flag_words in group_flags(words):
        if flag not in RESERVED_FLAGS:
            kept += flag_words
    known = values or {}
    return tuple(
        _PLACEHOLDER.sub(lambda found: known.get(found[1], found[0]), word) for word in kept
    )


def has_flag(words: tuple[str, ...], *flags: str) -> bool:
    """Whether one of the `flags` is in the user's `words`. If so, the recipe leaves out its own flag.

    >>> has_flag(("--ctx-size=512",), "--ctx-size", "-c")
    True
    """
    return any(word.partition("=")[0] in flags for word in words)
