"""The files with an owner's answers to `who` (which variables hold memory).

Each owner has two files. All members of a shared ledger can read `owners/ID.who`. Only the owner's
own user can read `owners/ID.told`. An answer is not in the book, because everybody reads the book,
and an answer may have names of variables. A file keeps one answer for each of the eight processes
that asked most recently.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec

from ..facts import Holdings
from .owner_files import Beside

MOST_BYTES = 512 << 10  # a larger file was not written by gpu-console
MOST_ASKERS = 8

Answers = dict[str, Holdings]  # the id of the asking owner -> its last answer
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Answers).decode


class AnswerFiles:
    """Stores the answers of one owner, and reads the answers of other owners. Thread-safe."""

    def __init__(self, owners: Path, group: int | None) -> None:
        """`owners` is the directory `LEDGER/BOOT-ID/owners`.

        `group` is the group that shares the ledger, or None.
        """
        self._public = Beside(owners, "who", group)
        self._private = Beside(owners, "told", None)
        self._lock = threading.Lock()
        self._given: dict[str, Answers] = {"who": {}, "told": {}}

    def publish(self, id: str, asker: str, answer: Holdings, *, private: bool) -> None:
        """Stores the `answer` of the owner `id` for the owner `asker`. Raises OSError."""
        files = self._private if private else self._public
        with self._lock:
            given = self._given[files.suffix]
            given.pop(asker, None)
            given[asker] = answer
            while len(given) > MOST_ASKERS:
                del given[next(iter(given))]
            os.close(files.replace(id, _encode(given)))

    def read(self, id: str, asker: str) -> Holdings | None:
        """The last answer of the owner `id` to `asker`; None if there is none to read.

        If both files have an answer, the result is the private one.
        """
        for files in (self._private, self._public):
            answers = files.read(id, MOST_BYTES, lambda fd, _: _read(fd))
            if answers is not None and asker in answers:
                return answers[asker]
        return None

    def withdraw(self, id: str) -> None:
        """Removes the answers of the owner `id`."""
        self._private.withdraw(id)
        self._public.withdraw(id)


def _read(fd: int) -> Answers | None:
    try:
        return _decode(os.read(fd, MOST_BYTES))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None  # another version wrote it, or it is damaged
