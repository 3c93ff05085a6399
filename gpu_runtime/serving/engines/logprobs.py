"""The probabilities of an answer's tokens, in the formats of OpenAI's Chat and Completions. This module is pure.

A probability is what the model computed for a token, before temperature, penalties, biases and grammars change it. It
is given as its natural logarithm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from ...facts import Value
from ..requests import Json

LEAST = -9999.0  # stands for a probability of zero, because JSON has no infinity
Scored = tuple[bytes, float]  # the bytes of a token, and the logarithm of its probability


class Token(Value):
    """A token that the model wrote. Its bytes may be only a part of a character."""

    data: bytes
    logprob: float | None  # None for the first token of a prompt
    top: tuple[Scored, ...] = ()  # the most probable tokens in its place, in order


def count_of(body: Mapping[str, Any]) -> int | None:
    """How many of the most probable tokens `body` requests for each token; None if it requests no probabilities.

    >>> count_of({"logprobs": True}), count_of({"logprobs": True, "top_logprobs": 2})  # Chat
    (0, 2)
    >>> count_of({"logprobs": 3}), count_of({}), count_of({"logprobs": False})  # the first: Completions
    (3, None, None)
    """
    wanted = body.get("logprobs")
    if wanted is None or wanted is False:
        return None
    return (body.get("top_logprobs") or 0) if wanted is True else wanted


class Unsent:
    """Holds each token that the model wrote until the text with the token's first byte is sent to the caller.

    The text may be sent later than its tokens are written, because the beginning of a stop string is held back.

    >>> unsent = Unsent()
    >>> for data in (b"Hel", b"lo", b" EN", b"D"):
    ...     unsent.add(Token(data, -0.5))
    >>> [token.data for token in unsent.take("Hello")]
    [b'Hel', b'lo']
    >>> [token.data for token in unsent.take_rest()]
    [b' EN', b'D']
    """

    def __init__(self) -> None:
        """There are no tokens and no text yet."""
        self._tokens: deque[Token] = deque()
        self._begin = 0  # where the first of the tokens begins, in bytes of the answer
        self._sent = 0  # bytes of the answer

    def add(self, token: Token) -> None:
        """Adds the next `token` that the model wrote."""
        self._tokens.append(token)

    def take(self, text: str) -> tuple[Token, ...]:
        """Removes and returns the tokens that begin in `text`, which is the next part of the answer."""
        self._sent += len(text.encode())
        taken = []
        while self._tokens and self._begin < self._sent:
            token = self._tokens.popleft()
            self._begin += len(token.data)
            taken.append(token)
        return tuple(taken)

    def take_rest(self) -> tuple[Token, ...]:
        """Removes and returns all tokens. Call this at the end of a text that no stop string has cut."""
        rest = tuple(self._tokens)
        self._tokens.clear()
        return rest


class LogprobsWriter:
    """Writes the field `logprobs` of one choice, whole or chunk by chunk."""

    def __init__(self, chat: bool) -> None:
        """Writes the format of Chat if `chat` is true, else the format of Completions."""
        self._chat = chat
        self._offset = 0  # in characters of the text of Completions

    def field(self, tokens: Iterable[Token], text: str) -> Json | None:
        """The field for the next `tokens`, which begin in `text`; None if there are none."""
        found = list(tokens)
        if not found:
            return None
        if self._chat:
            return {"content": [_entry(token) for token in found], "refusal": None}
        if found[0].logprob is None:  # a prompt may have tokens before its text, such as <s>
            self._offset = len(text) - sum(len(_text(token.data)) for token in found)
        offsets = []
        for token in found:
            offsets.append(max(0, self._offset))
            self._offset += len(_text(token.data))
        return {
            "tokens": [_name(token.data) for token in found],
            "token_logprobs": [_finite(token.logprob) for token in found],
            "top_logprobs": [_top(token) for token in found],
            "text_offset": offsets,
        }


def _entry(token: Token) -> Json:
    top = [_described(data, logprob) for data, logprob in token.top]
    return {**_described(token.data, token.logprob), "top_logprobs": top}


def _described(data: bytes, logprob: float) -> Json:
    return {"token": _text(data), "logprob": _finite(logprob), "bytes": list(data)}


def joined(one: Json | None, next: Json | None) -> Json | None:
    """The fields `one` and `next` of one choice, as one field.

    >>> joined({"content": [1], "refusal": None}, {"content": [2], "refusal": None})
    {'content': [1, 2], 'refusal': None}
    """
    if one is None or next is None:
        return one or next
    return {name: value and value + next[name] for name, value in one.items()}


def _top(token: Token) -> dict[str, float | None] | None:
    """The most probable tokens and the written `token`, with the logarithms of their probabilities."""
    if token.logprob is None:
        return None
    pairs = (*token.top, (token.data, token.logprob))
    return {_name(data): _finite(logprob) for data, logprob in pairs}


def _name(data: bytes) -> str:
    r"""The text of a token; for a part of a character its bytes, as in OpenAI's Completions.

    >>> _name(b"fox"), _name(b"\xe2\x80")
    ('fox', 'bytes:\\xe2\\x80')
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST)
