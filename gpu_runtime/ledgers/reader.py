"""Reads a book without being an owner: no lock, no bell, nothing mended, nothing written.

For who only watches. What cannot be read now (it is being written, mended, or made anew) is read the next time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import msgspec

from ..errors import GpuError
from ..facts import SCHEMA, Book, decode_book
from .sqlite import files
from .sqlite.page import MOST_BYTES, SETTLED_NANOSECONDS
from .sqlite.recovery import unsealed

SELECT = "SELECT rev, schema, body FROM main.book WHERE host=?"

log = logging.getLogger("gpu_runtime")


class Peek(Protocol):
    """Looks at one host's book."""

    def look(self) -> Book | None:
        """The book as it stands; None where it cannot be read now."""
        ...


def peek(url: str, directory: Path) -> Peek:
    """`directory` is the ledger's, of this boot. Raises GpuError where the URL says nothing that could be opened."""
    if url.startswith("sqlite:"):
        return FilePeek(directory)
    return RedisPeek(url, directory.name)


class FilePeek:
    """The book in an SQLite file; it is opened for each look at what has changed, and held by nobody in between."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seen: tuple[tuple[str, int, int], Book] | None = None

    def look(self) -> Book | None:
        name = files.current(self._directory)
        try:
            if not files.inode_of(self._directory, name):
                return None
            stat = os.stat(self._directory / name)
            written = (name, stat.st_ino, stat.st_mtime_ns)
            if self._seen is not None and self._seen[0] == written:
                return self._seen[1]
            book = self._read(name)
            settled = (
                time.time_ns() - stat.st_mtime_ns > SETTLED_NANOSECONDS
            )  # else its time may stand for two writes
            self._seen = (written, book) if settled else None
            return book
        except (OSError, sqlite3.Error, msgspec.MsgspecError, ValueError, TypeError) as error:
            log.debug("not read: %s", error)
            return None

    def _read(self, name: str) -> Book:
        url = f"file:{quote(str(self._directory / name))}?mode=ro"
        with contextlib.closing(sqlite3.connect(url, uri=True, timeout=0.05)) as db:
            db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES)
            db.execute("PRAGMA trusted_schema=OFF")
            rows = db.execute(SELECT, (self._directory.name,)).fetchall()
        [(rev, schema, body)] = rows
        if schema > SCHEMA:
            raise ValueError(f"schema {schema}")
        return decode_book(unsealed(body, rev))


class RedisPeek:
    """The page of one host in a Redis."""

    def __init__(self, url: str, boot: str) -> None:
        from .redis.connection import Wire
        from .redis.ledger import _split
        from .redis.scripts import PAGE, look_at

        self._wire = Wire(_split(url)[0])
        self._look = lambda ask: look_at(ask, PAGE + boot)

    def look(self) -> Book | None:
        try:
            seen = self._wire.converse(self._look)
        except GpuError as error:
            log.debug("not read: %s", error)
            return None
        return seen.book if seen else None
