"""The newest revision of the book that any process has written, in a file beside the book.

An old copy of the book may replace the book, for example from a backup. The copy is a valid book,
so only a process that has seen a newer revision notices the replacement. Any other process would
grant bytes that are granted already. With this file, all processes notice the replacement. The file
is written after each write of the book, and read before each read and write (2 µs). If the file is
missing or wrong, a process accepts the book, unless it has itself seen a newer revision.

The file also saves work. If a process's own copy of the book has the newest revision, the process
decides on its copy, without a read. If the copy is older, the process reads the book again before
it tries to write.
"""

from __future__ import annotations

import contextlib
import functools
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
    """One process's access to the file with the newest revision.

    No method raises. If the file cannot be used, the newest revision is unknown.
    """

    def __init__(self, directory: Path) -> None:
        """`directory` has the ledger's files of this boot."""
        self._fd = -1
        with contextlib.suppress(OSError):  # the hint is optional
            access_to(directory).make_file(directory / FILE)
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(directory / FILE, flags)
            weakref.finalize(self, os.close, self._fd).atexit = False

    def of(self, book: str) -> int:
        """The newest revision that is recorded for the book named `book`; 0 if nothing is known."""
        try:
            content = os.pread(self._fd, _ENTRY.size + _SUM.size, 0)
        except OSError:  # there is no file: nothing is known
            return 0
        entry, checksum = content[: _ENTRY.size], content[_ENTRY.size :]
        if len(checksum) != _SUM.size:
            return 0
        [expected] = _SUM.unpack(checksum)
        if expected != zlib.crc32(entry):
            return 0  # the file is damaged, or was read while it was written
        name_checksum, rev = _ENTRY.unpack(entry)
        return rev if name_checksum == _checksum(book) else 0

    def record(self, book: str, rev: int) -> None:
        """Records that the book named `book` has been written at the revision `rev`."""
        entry = _ENTRY.pack(_checksum(book), rev)
        checksum = _SUM.pack(zlib.crc32(entry))
        with contextlib.suppress(OSError):  # no file, or a full disk; the hint is optional
            os.pwrite(self._fd, entry + checksum, 0)


@functools.lru_cache(4)
def _checksum(book: str) -> int:
    return zlib.crc32(book.encode())
