"""How long a prompt may be, decided before it is tokenised whole.

Tokenising is slow: a body of 32 MiB takes many seconds, during which the model answers nobody else, and it
cannot be interrupted. So a prompt has a limit of characters, which is checked before the call waits for its
model. With the model at hand, a prompt is counted piece by piece, until it ends or is too long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

MOST_CHARACTERS = 4_000_000  # of all texts of one request: about a million tokens
LONGEST_TOKEN = 256  # characters; usual vocabularies have runs of up to 128 spaces
PIECE_CHARACTERS = 32_768
CUT_TOKENS = 16  # a cut inside a token, such as a special one, adds fewer


def characters(body: Mapping[str, Any]) -> int:
    """The number of characters in the prompt, input and messages of a request's `body`.

    >>> characters({"messages": [{"role": "user", "content": [{"type": "text", "text": "four"}]}]})
    4
    >>> characters({"input": ["a", "bc"], "model": "qwen"})
    3
    """
    return sum(map(len, texts(body)))


def texts(body: Mapping[str, Any]) -> Iterator[str]:
    """The texts in the prompt, input and messages of a request's `body`."""
    for value in (body.get("prompt"), body.get("input"), *_contents(body.get("messages"))):
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            for part in value:
                text = part.get("text") if isinstance(part, Mapping) else part
                if isinstance(text, str):
                    yield text


def _contents(messages: Any) -> Iterator[Any]:
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, Mapping):
            yield message.get("content")


def tokens_if_too_many(
    text: str,
    most: int,
    count: Callable[[str], int],
    cancelled: Callable[[], bool] = lambda: False,
) -> int:
    """At least how many tokens `text` has, if that is more than `most`; else 0.

    `count` returns the tokens of a piece. Counting ends as soon as the result is known, or when `cancelled()`
    is true: then the result is 0.
    """
    counted = 0
    for number, at in enumerate(range(0, len(text), PIECE_CHARACTERS)):
        if cancelled():
            return 0
        counted += count(text[at : at + PIECE_CHARACTERS])
        at_least = counted - number * CUT_TOKENS
        if at_least > most:
            return at_least
    return 0
