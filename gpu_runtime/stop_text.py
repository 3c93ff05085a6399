"""Cuts a text at its first stop string. The text may arrive in pieces.

llama.cpp's worker runs this file, because as a program the worker has no package. So it imports only the standard
library.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class StopText:
    """Cuts a text at its first stop string. The text may arrive in pieces, and a stop string may span several pieces.

    >>> stop = StopText(["END"])
    >>> [stop.feed(text) for text in ("one E", "N", "D two")], stop.hit
    (['one ', '', ''], True)
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are the stop strings."""
        self._stops = stops
        self._held = ""  # an end of the text that may begin a stop string
        self.hit = False  # whether a stop string was found

    def feed(self, text: str) -> str:
        """Adds `text`, and returns the new part of the whole text that may be sent now.

        An end of the text that may be the beginning of a stop string is held back.
        """
        if self.hit:
            return ""
        text = self._held + text
        found = [at for at in map(text.find, self._stops) if at >= 0]
        if found:
            self.hit = True
            self._held = ""
            return text[: min(found)]
        safe = len(text) - held_back(text, self._stops)
        self._held = text[safe:]
        return text[:safe]

    def rest(self) -> str:
        """The text that was held back. Call this when no more text follows."""
        held, self._held = self._held, ""
        return held


def held_back(text: str, words: Iterable[str]) -> int:
    """The length of the longest end of `text` that may be the beginning of one of the `words`.

    >>> held_back("one <thi", ["<think>"]), held_back("one", ["two"])
    (4, 0)
    """
    longest = 0
    for word in words:
        for size in range(longest + 1, len(word)):
            if text.endswith(word[:size]):
                longest = size
    return longest
