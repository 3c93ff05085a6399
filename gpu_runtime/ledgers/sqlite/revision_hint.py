"""The newest revision of the book that any process has written, in a file beside the book.

An old copy that is put over the book is itself a valid book. A process that has seen a newer
revision notices; this file lets all others notice too, which would otherwise grant bytes that were
granted since. It is written after each write and read before each look and each write: 2 µs. The
hint can only warn. If it is missing or wrong, a book is accepted until a process remembers a newer
revision.
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
_ENTRY = struct.Struct("<IQ")  # the checksum of the book's name, and its revision
_SUM = struct.Struct("<I")


class RevisionHint:
    """One process's view of the hint.

    No method raises: if the file cannot be used, nothing is known.
    """

    def __init__(self, directory: Path) -> None:
        """`directory` is the ledger's, of this boot."""
        self._fd = -1
        with contextlib.suppress(OSError):
            access_to(directory).make_file(directory / FILE)
            self._fd = os.open(directory / FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            weakref.finalize(self, os.close, self._fd).atexit = False

    def of(self, book: str) -> int:
        """The newest revision recorded for the book named `book`; 0 if nothing is known."""
        try:
            content = os.pread(self._fd, _ENTRY.size + _SUM.size, 0)
        except OSError:
            return 0
        entry, checksum = content[: _ENTRY.size], content[_ENTRY.size :]
        if len(checksum) != _SUM.size:
            return 0
        if _SUM.unpack(checksum)[0] != zlib.crc32(entry):
            return 0  # or it was read while it was written
        name_checksum, rev = _ENTRY.unpack(entry)
        return rev if name_checksum == zlib.crc32(book.encode()) else 0

    def record(self, book: str, rev: int) -> None:
        """Records that the book named `book` has been written at the revision `rev`."""
        entry = _ENTRY.pack(zlib.crc32(book.encode()), rev)
        with contextlib.suppress(OSError):  # a full disk
            os.pwrite(self._fd, entry + _SUM.pack(zlib.crc32(entry)), 0)
