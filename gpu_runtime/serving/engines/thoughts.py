"""Separates a model's thoughts from its answer. This module is pure.

A model that thinks writes its thoughts between two tags before its answer. Some chat templates write the first tag
themselves, at the end of the prompt.
"""

from __future__ import annotations

from ...stop_text import held_back

TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))  # DeepSeek and Qwen; Mistral


def tags_of(template: str) -> tuple[str, str] | None:
    """The tags around the thoughts of the model with this chat `template`, or None if the template shows none.

    >>> tags_of("{{ '<think>' }}"), tags_of("{{ messages }}")
    (('<think>', '</think>'), None)
    """
    return next((tags for tags in TAGS if any(tag in template for tag in tags)), None)


class Thoughts:
    """Separates thoughts from the answer. The text arrives in pieces.

    >>> reader = Thoughts(("<think>", "</think>"), begun=False)
    >>> [reader.feed(text) for text in ("<thi", "nk>17 is", " prime.</think>", "Yes.")]
    [('', ''), ('17 is', ''), (' prime.', ''), ('', 'Yes.')]
    """

    def __init__(self, tags: tuple[str, str], begun: bool) -> None:
        """The thoughts are between the `tags`. If `begun`, the prompt ends with the first tag."""
        self._opens, self._closes = tags
        self._held = ""
        # True: the text belongs to the thoughts. False: it belongs to the answer. None: this is not known yet.
        self._thinks: bool | None = True if begun else None
        self._at_start = True  # of the thoughts or of the answer, where spaces are left out

    def feed(self, text: str) -> tuple[str, str]:
        """Adds `text`. Returns the new part of the thoughts, and the new part of the answer."""
        self._held += text
        if self._thinks is None:
            self._look_for_beginning()
        thought = self._take_thought() if self._thinks else ""
        answer = ""
        if self._thinks is False:
            answer, self._held = self._without_spaces(self._held), ""
        return thought, answer

    def rest(self) -> tuple[str, str]:
        """The held-back part of the thoughts, and that of the answer. Call this when no more text follows."""
        held, self._held = self._held, ""
        return (held.rstrip(), "") if self._thinks else ("", held)

    def _look_for_beginning(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(self._opens):
            self._thinks = True
            self._held = begun.removeprefix(self._opens)
        elif not self._opens.startswith(begun):
            # Without thoughts, the answer keeps its first spaces.
            self._thinks = self._at_start = False

    def _take_thought(self) -> str:
        """The new part of the thoughts. Spaces at its end, and text that may begin the closing tag, are held back."""
        at = self._held.find(self._closes)
        if at >= 0:
            thought = self._without_spaces(self._held[:at].rstrip())
            self._held = self._held[at + len(self._closes) :]
            self._thinks, self._at_start = False, True
            return thought
        safe = self._held[: len(self._held) - held_back(self._held, (self._closes,))].rstrip()
        self._held = self._held[len(safe) :]
        return self._without_spaces(safe)

    def _without_spaces(self, text: str) -> str:
        """The `text`, without its first spaces at the start of the thoughts or of the answer."""
        if self._at_start:
            text = text.lstrip()
            self._at_start = not text
        return text
