"""The newest revision of the book that anybody has written, in a file beside it.

An old copy that is put over the book is a lawful book. Whoever has seen a newer one knows better; this tells the
others, who would grant from it what has been granted since. Told after each write, asked before each look and each
write: 2 µs.
A hint that can only warn: without it, or where it is wrong, a book is good until somebody remembers a newer one.
"""

from __future__ import annotations

import contextlib
import os
import struct
import weakref
import zlib
from pathlib import Path

from ..access import access_to

FILE = "newest"
_SAID = struct.Struct("<IQ")  # which book, by the sum of its name, and its revision
_SUM = struct.Struct("<I")


class Newest:
    """One process's view of it. Nothing here ever raises: where it cannot be had, nothing is known."""

    def __init__(self, directory: Path) -> None:
        self._fd = -1
        with contextlib.suppress(OSError):
            access_to(directory).make_file(directory / FILE)
            self._fd = os.open(directory / FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            weakref.finalize(self, os.close, self._fd).atexit = False

    def of(self, book: str) -> int:
        """The newest revision of the book of that name; 0 where nothing is known of it."""
        try:
            said = os.pread(self._fd, _SAID.size + _SUM.size, 0)
        except OSError:
            return 0
        body, total = said[: _SAID.size], said[_SAID.size :]
        if len(total) != _SUM.size or _SUM.unpack(total)[0] != zlib.crc32(
            body
        ):  # or read while it was written
            return 0
        which, rev = _SAID.unpack(body)
        return rev if which == zlib.crc32(book.encode()) else 0

    def tell(self, book: str, rev: int) -> None:
        """Says that the book of that name has been written at this revision."""
        body = _SAID.pack(zlib.crc32(book.encode()), rev)
        with contextlib.suppress(OSError):  # a full disk
            os.pwrite(self._fd, body + _SUM.pack(zlib.crc32(body)), 0)
