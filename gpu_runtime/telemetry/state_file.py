"""A SQLite file that outlives a boot: the history, and the account of hours."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import threads
from ..files import make_directory
from ..ledgers.access import access_to
from . import journal
from .journal import opened

MOST_ROW_BYTES = 1 << 20

log = logging.getLogger("gpu_runtime")


class StateFile:
    """One SQLite file of the helper's, which outlives a boot. Every call opens the file again.

    For readers, a file that is damaged or is another kind of file is empty. The writer renames such a
    file, and begins a new one.
    """

    what = "file"  # its name in warnings

    def __init__(self, path: Path) -> None:
        """The file `path`. The first write creates it."""
        self.path = path
        self._warned = False
        self._lock = threads.awaited(threading.Lock())

    def write(self, act: Callable[[sqlite3.Connection], object]) -> bool:
        """Calls `act` in one transaction, and returns whether this succeeded.

        A failure is logged once. The caller may write the same again later.
        """
        try:
            try:
                self._write(act)
            except sqlite3.Error as error:
                if not _is_unusable(error):
                    raise
                self._set_aside(error)
                self._write(act)
        except (sqlite3.Error, OSError) as error:
            self._warn("written", error)
            return False
        return True

    def _write(self, act: Callable[[sqlite3.Connection], object]) -> None:
        if not self.path.exists():
            make_directory(self.path.parent)
            access_to(self.path.parent).make_file(self.path)
        with self._lock, contextlib.closing(self._connect()) as db:
            db.execute("PRAGMA journal_mode=TRUNCATE")
            act(db)
            db.commit()

    def read(self, query: str, values: tuple[object, ...]) -> list[tuple[Any, ...]]:
        """The rows of the `query`; none if the file cannot be read."""
        try:
            if not self.path.exists():
                return []
            with self._lock, contextlib.closing(self._connect()) as db:
                return db.execute(query, values).fetchall()
        except (sqlite3.Error, OSError) as error:
            self._warn("read", error)
            return []

    def _set_aside(self, error: sqlite3.Error) -> None:
        log.warning(
            "the %s %s cannot be used (%s); it is set aside, and a new one is started",
            self.what,
            self.path,
            error,
        )
        os.replace(self.path, self.path.with_name(f"{self.path.name}.damaged"))
        self.path.with_name(f"{self.path.name}-journal").unlink(missing_ok=True)

    def _connect(self) -> sqlite3.Connection:
        if not journal.sqlite_is_usable():
            raise OSError(errno.EDEADLK, "SQLite cannot be used in this forked process")
        db = opened(self.path)
        # Another user of the ledger may have put anything into the file.
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_ROW_BYTES)
        return db

    def _warn(self, what: str, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            log.warning("the %s %s cannot be %s now (%s)", self.what, self.path, what, error)


def _is_unusable(error: sqlite3.Error) -> bool:
    """Whether `error` means that the file is damaged or is no history, so that another attempt
    would fail too.
    """
    kind = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    return kind in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
