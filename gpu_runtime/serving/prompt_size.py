"""Decides whether a prompt is too long, without tokenising the whole prompt.

Tokenising a body of 32 MiB takes many seconds and cannot be interrupted. During that time the model answers no other
call. So a limit of characters is checked before the call waits for its model. Later, the tokens of the prompt are
counted piece by piece, until the prompt ends or is too long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

MOST_CHARACTERS = 4_000_000  # of all texts of one request: about a million tokens
LONGEST_TOKEN = 256  # characters; in usual vocabularies, the longest is a run of 128 spaces
PIECE_CHARACTERS = 32_768
CUT_TOKENS = 16  # a cut inside a token (also a special one) adds fewer tokens to the count


def characters(body: Mapping[str, Any]) -> int:
    """The number of characters in the texts of a request's `body`.

    >>> characters({"messages": [{"role": "user", "content": [{"type": "text", "text": "four"}]}]})
    4
    >>> characters({"input": ["a", "bc"], "model": "qwen"})
    3
    """
    return sum(map(len, texts(body)))


def given_tokens(body: Mapping[str, Any]) -> int:
    """The number of tokens in the prompt or input of a request's `body` that are given as numbers.

    >>> given_tokens({"prompt": [[1, 2], [3]]}), given_tokens({"prompt": "a"})
    (3, 0)
    """
    lists = [value for name in ("prompt", "input") if isinstance(value := body.get(name), list)]
    parts = [part for given in lists for part in given]
    return sum(len(part) if isinstance(part, list) else isinstance(part, int) for part in parts)


def texts(body: Mapping[str, Any]) -> Iterator[str]:
    """The texts in the prompt, input, query, documents and messages of a request's `body`."""
    values = (body.get(name) for name in ("prompt", "input", "query", "documents"))
    for value in (*values, *_contents(body.get("messages"))):
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
    text: str, most: int, count: Callable[[str], int], cancelled: Callable[[], bool] = lambda: False
) -> int:
    """A lower bound of the number of tokens in `text` if that number is more than `most`, otherwise 0.

    `count` returns the number of tokens of a piece of text. Counting ends as soon as the result is known, or when
    `cancelled()` is true, with the result 0.
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
