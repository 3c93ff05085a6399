"""Extra command-line arguments that a user may pass to an engine."""

from __future__ import annotations

import re
from collections.abc import Iterator

OURS = (
    "--gpu-memory-utilization",
    "--tensor-split",
    "--main-gpu",
    "--device",
    "--split-mode",
    "-ts",
    "-mg",
    "-sm",
)


def grouped(words: tuple[str, ...]) -> Iterator[tuple[str, str | None, tuple[str, ...]]]:
    """Each flag, its value (None: it has none), and the words that said so.

    >>> list(grouped(("--seed", "1", "-ngl", "-1", "--fast", "--top=5")))
    [('--seed', '1', ('--seed', '1')), ('-ngl', '-1', ('-ngl', '-1')), ('--fast', None, ('--fast',)), ('--top', '5', ('--top=5',))]
    """
    index = 0
    while index < len(words):
        flag, equals, value = words[index].partition("=")
        took = words[index : index + 1]
        if (
            not equals
            and flag.startswith("-")
            and words[index + 1 :]
            and re.match(r"(?!-)|-\d", words[index + 1])
        ):
            took = words[index : index + 2]
            equals, value = "=", took[1]
        index += len(took)
        yield flag, value if equals else None, took
