"""Finds the tokens of an answer's text among the tokens of a chat. This module is pure.

A chat lists all tokens that the model wrote: those of its thoughts, of the tags around them, of its text, and of its
tool calls. The Responses API lists only the tokens of a text.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from ..engines.thoughts import TAGS

_TAGS = "|".join(re.escape(tag) for pair in TAGS for tag in pair)
# What the model writes between its thoughts and its text.
_BETWEEN = re.compile(rf"\s*(?:{_TAGS})?\s*".encode())


class _Placed(NamedTuple):
    entry: dict[str, Any]
    begin: int  # in bytes of all that the model wrote
    end: int


class TextTokens:
    """The tokens that the model wrote, until the text that they belong to is known.

    The tokens are dicts in the format of a chat. Their bytes are compared with the thoughts and the text.

    >>> tokens = TextTokens()
    >>> tokens.add({"token": word, "logprob": -1.0} for word in ("<think>", "Hm", "</think>", "\\n\\nOne", " two"))
    >>> tokens.skip("Hm")
    >>> [token["token"] for token in tokens.take("One two")]
    ['\\n\\nOne', ' two']
    """

    def __init__(self) -> None:
        """There are no tokens yet."""
        self._placed: deque[_Placed] = deque()
        self._data = b""  # of the tokens, from `_begin` on
        self._begin = 0

    def add(self, entries: Iterable[dict[str, Any]]) -> None:
        """Adds the next tokens that the model wrote."""
        end, parts = self._begin + len(self._data), []
        for entry in entries:
            known = entry.get("bytes")  # some engines send none
            data = str(entry.get("token", "")).encode() if known is None else bytes(known)
            begin, end = end, end + len(data)
            self._placed.append(_Placed({**entry, "bytes": list(data)}, begin, end))
            parts.append(data)
        self._data += b"".join(parts)

    def skip(self, text: str) -> None:
        """Removes the tokens up to the end of `text`, which is no part of the answer's text, such as a thought."""
        self._remove_until(self._place(text)[1])

    def take(self, text: str) -> list[dict[str, Any]]:
        """Removes and returns the tokens of `text`, which is the next part of the answer's text."""
        begin, end = self._place(text)
        self._remove_until(begin)
        taken = []
        while self._placed and self._placed[0].begin < end:
            taken.append(self._placed.popleft().entry)
        self._remove_until(end)
        return taken

    def _place(self, text: str) -> tuple[int, int]:
        """Where `text` begins and ends. If it is not found, it is everything that the tokens have written.

        It is not found if a token is no valid UTF-8, because the text then has a replacement character instead.
        """
        data = text.encode()
        after_tags = _BETWEEN.match(self._data).end()  # type: ignore[union-attr]
        places = (at for at in (0, after_tags) if self._data.startswith(data, at))
        at = next(places, self._data.find(data))
        if at < 0:
            return self._begin, self._begin + len(self._data)
        return self._begin + at, self._begin + at + len(data)

    def _remove_until(self, end: int) -> None:
        """Removes the tokens before `end`. A token of which a part follows `end` stays."""
        self._data = self._data[end - self._begin :]
        self._begin = end
        while self._placed and self._placed[0].end <= end:
            self._placed.popleft()
