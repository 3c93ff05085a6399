"""Keys name the decisions in progress. This process notes a key before sending it anywhere.

A ticket is the entry of a waiting request in the book; a ticket has the key of its decision.
"""

from __future__ import annotations

import itertools
import weakref
from _thread import get_ident
from collections.abc import Callable
from typing import TypeVar

from ..threads import uninterrupted

T = TypeVar("T")


class Key:
    """The name of a decision in progress. The session knows a key only while this object exists.

    A KeyboardInterrupt can arrive before a function's first line. The traceback then keeps the
    frame alive, and the frame keeps the key alive. So release the key with one C call:
    `session.done_with(key.note)`.
    """

    __slots__ = ("text", "note", "ended_by", "thread", "__weakref__")

    def __init__(self, text: str) -> None:
        self.text = text
        self.note = weakref.ref(self)
        self.ended_by = ""  # who ended the wait with this key; empty: nobody
        self.thread = get_ident()  # the thread that made the decision


class Keys:
    """The keys of one owner. The monitor withdraws each ticket whose key is not known here."""

    def __init__(self, owner: str) -> None:
        """`owner` is the owner's id in the book."""
        self._owner = owner
        self._known: set[weakref.ref[Key]] = set()
        self._numbers = itertools.count(1)
        self.done_with = self._known.discard  # one C call, see Key

    def new(self, what: str) -> Key:
        """A new key for a decision that `what` describes."""
        return self._note(Key(f"{self._owner}:{next(self._numbers)}:{what}"))

    def texts(self) -> tuple[str, ...]:
        """The texts of all keys that are known now."""
        return tuple(key.text for key in self._living())

    def end(self, text: str, by: str) -> bool:
        """Notes that the wait with the key `text` was ended. Returns whether that key is known.

        `by` is the person or the process that ended the wait.
        """
        keys = [key for key in self._living() if key.text == text]
        for key in keys:
            key.ended_by = by
        return bool(keys)

    def end_of(self, thread: int, by: str) -> None:
        """Notes for each key of the `thread` that its wait was ended, by the person or program `by`."""
        for key in self._living():
            if key.thread == thread:
                key.ended_by = key.ended_by or by

    def _living(self) -> list[Key]:
        return [key for ref in self._known.copy() if (key := ref()) is not None]

    def uninterrupted(self, key: Key, work: Callable[[], T]) -> T:
        """Runs `work` in a thread that gets no interrupts. The key stays known until `work` ends.

        If the caller was interrupted before the work started, `key` is gone and the work is
        skipped.
        """
        return uninterrupted(self.kept(key, work))

    def kept(self, key: Key, work: Callable[[], T]) -> Callable[[], T]:
        """The function `work`, during which the key stays known. See `uninterrupted`."""
        wanted = key.note

        def act() -> T:
            # An interrupt of the caller ends its key. So a second key with the same text is noted for
            # the time of `work`. It is noted before the check of the first key, which can end at once.
            held = self._note(Key(key.text))
            try:
                return work() if wanted in self._known else None  # type: ignore[return-value]
            finally:
                self.done_with(held.note)

        return act

    def _note(self, key: Key) -> Key:
        try:
            self._known.add(weakref.ref(key, self._known.discard))
            return key
        except BaseException:  # an interrupt after the addition: its traceback keeps this frame
            self.done_with(key.note)
            raise
