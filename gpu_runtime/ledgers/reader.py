"""Reads a book without being an owner: no lock file, no socket, no repair, no write.

The reader is for programs that only watch. While the book is being written or rebuilt, `look` may
return None, and the program has to call it again.
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

from ..errors import GpuError
from ..facts import SCHEMA, Book
from ..threads import import_whole
from .decoding import UNREADABLE, decode_page
from .location import split_redis_url
from .sqlite import files
from .sqlite.page import MOST_BYTES, SETTLED_NANOSECONDS

SELECT = "SELECT rev, schema, body FROM main.book WHERE host=?"
_UNREADABLE = (OSError, sqlite3.Error, *UNREADABLE)

log = logging.getLogger("gpu_runtime")


class Peek(Protocol):
    """Reads one host's book."""

    def look(self) -> Book | None:
        """The current book; None if it cannot be read now."""


def peek(url: str, directory: Path) -> Peek:
    """A reader of the ledger at `url`, whose files of this boot are in `directory`.

    Nothing is opened or connected yet. Raises BadSetting for an invalid URL of a Redis.
    """
    if url.startswith("keeper:"):
        from .keeper.ledger import KeeperPeek

        return KeeperPeek(directory)
    if url.startswith("sqlite:"):
        return FilePeek(directory)
    return RedisPeek(url, directory.name)


class FilePeek:
    """Reads the book in an SQLite file.

    The file is opened only if the book has changed, and closed after reading.
    """

    def __init__(self, directory: Path) -> None:
        """`directory` has the ledger's files of this boot."""
        self._directory = directory
        self._seen: tuple[tuple[str, int, int], Book] | None = None

    def look(self) -> Book | None:
        """The current book; None if it cannot be read now."""
        name = files.current(self._directory)
        try:
            return self._look_at(name)
        except _UNREADABLE as error:
            log.debug("not read: %s", error)
            return None

    def _look_at(self, name: str) -> Book | None:
        if not files.inode_of(self._directory, name):
            return None
        stat = os.stat(self._directory / name)
        version = (name, stat.st_ino, stat.st_mtime_ns)
        if self._seen is not None and self._seen[0] == version:
            return self._seen[1]
        # Two writes within a few milliseconds can have the same time. So a book that was written
        # just now is not kept for the next call. The age is computed before the read, because the
        # second write may happen during the read.
        settled = time.time_ns() - stat.st_mtime_ns > SETTLED_NANOSECONDS
        book = self._read(name)
        self._seen = (version, book) if settled else None
        return book

    def _read(self, name: str) -> Book:
        url = f"file:{quote(str(self._directory / name))}?mode=ro"
        with contextlib.closing(sqlite3.connect(url, uri=True, timeout=0.05)) as db:
            db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES)
            db.execute("PRAGMA trusted_schema=OFF")
            rows = db.execute(SELECT, (self._directory.name,)).fetchall()
        [(rev, schema, body)] = rows
        if schema > SCHEMA:
            raise ValueError(f"schema {schema}")
        return decode_page(body, rev, schema)


class RedisPeek:
    """Reads the page of one host in a Redis."""

    def __init__(self, url: str, boot: str) -> None:
        """`boot` is the boot id of the host, which names its page. Raises BadSetting."""
        import_whole(f"{__package__}.redis.connection")
        from .redis.connection import RedisConnection
        from .redis.scripts import PAGE, look_at

        server, _ = split_redis_url(url)
        self._connection = RedisConnection(server)
        self._look = lambda ask: look_at(ask, PAGE + boot)

    def look(self) -> Book | None:
        """The current book; None if it cannot be read now."""
        try:
            seen = self._connection.converse(self._look)
        except GpuError as error:
            log.debug("not read: %s", error)
            return None
        return seen.book if seen else None
