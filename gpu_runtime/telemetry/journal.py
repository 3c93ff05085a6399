"""The journal: the history of events with their reasons, including events of earlier boots.

The journal is one SQLite table, to which every process of a ledger appends. The book (the ledger's
current leases and requests) has only the newest events. A second table has the newest decisions,
with all inputs of each decision. In a shared ledger, each user has a separate journal, and
everybody reads the events of all journals. Nothing depends on the journal. If it cannot be written,
the failure is logged once.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import logging
import os
import sqlite3
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from .. import forks
from ..facts import Decided, Event
from ..ledgers.access import JournalPlace, access_to, make_own_journal, require_no_link
from ..private_paths import make_directory
from . import after_fork
from . import decided as decisions
from .users_journals import events_of, journals_of_others

KEPT = 10_000  # events in the file; the oldest are removed first
EVERY_SECONDS = 1.0

log = logging.getLogger("gpu_runtime")
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Event).decode


class Journal:
    """Appends events and returns the latest events.

    The file is opened for each write, so no connection is carried across a fork. Opening takes
    longer than granting a lease, so events are collected and written together once a second. If
    this process is killed, the events of the last second are missing in the journal. The book still
    has these events.
    """

    def __init__(
        self,
        path: Path | None = None,
        users: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """If `path`, the file, is None, the events stay in this process. `clock` returns seconds.

        In a shared ledger, `users` is the directory with the journals of all users.
        """
        self._path = path
        self._users = users
        self._is_ours = (
            False  # whether the path to the file was checked: only this user can write it
        )
        self._clock = clock
        self._recent: deque[Event] = deque(maxlen=KEPT)
        self._unwritten: deque[Event] = deque(maxlen=KEPT)
        # Decisions that are not in the file: all of them if there is no file.
        self._decided: deque[Decided] = deque(maxlen=decisions.KEPT)
        self._numbered = 0  # how many decisions this process has recorded
        self._written_at = float("-inf")
        self._lock = forks.awaited(threading.Lock())
        self._reading_others = forks.awaited(threading.Lock())  # no writer waits for it
        self._broken = False

    def append(self, events: Iterable[Event]) -> None:
        """Adds `events`. Never fails: if the file cannot be written, the events stay in memory."""
        rows = list(events)
        if not rows:
            return
        with self._lock:
            self._recent.extend(rows)
            if self._path is None or self._broken:
                return
            self._unwritten.extend(rows)
            if self._clock() - self._written_at >= EVERY_SECONDS:
                self._write()

    def record(self, decided: Decided) -> None:
        """Stores the decision `decided`, unless its book is too large. Never fails."""
        if not decisions.is_small(decided):
            return
        with self._lock:
            self._numbered += 1
            self._decided.append(replace(decided, id=self._numbered))
            if self._clock() - self._written_at >= EVERY_SECONDS:
                self._write()

    def decided(self, name: str, limit: int) -> tuple[Decided, ...]:
        """The newest decisions of this user's processes about the model `name`, at most `limit`.

        The newest decision is first. If there is none and `name` is a number, the result is the
        decision with this number.
        """
        with self._lock:
            self._write()
            if self._path is not None and not self._broken and self._path.exists():
                try:
                    with contextlib.closing(self._connect()) as db:
                        return decisions.select(db, name, limit)
                except (sqlite3.Error, OSError) as error:
                    log.warning("the journal %s cannot be read (%s)", self._path, error)
            kept = tuple(reversed(self._decided))
        found = tuple(one for one in kept if one.model == name)[:limit]
        return found or tuple(one for one in kept if name == str(one.id))

    def flush(self) -> None:
        """Writes the events and decisions that are not written yet. Never fails."""
        if self._unwritten or self._decided:
            with self._lock:
                self._write()

    def _write(self) -> None:
        rows, decided = list(self._unwritten), list(self._decided)
        if not (rows or decided) or self._broken or self._path is None:
            return
        try:
            with contextlib.closing(self._connect()) as db:
                if decided:
                    decisions.insert(db, decided)
                self._insert(db, rows)
        except (sqlite3.Error, OSError) as error:
            kind = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if kind == sqlite3.SQLITE_BUSY:
                return  # many processes write at once; the next write includes these
            self._broken = True
            log.warning(
                "the journal %s cannot be written (%s); history is kept in memory only",
                self._path,
                error,
            )
        self._unwritten.clear()
        if not self._broken:
            self._decided.clear()
        self._written_at = self._clock()

    def _insert(self, db: sqlite3.Connection, rows: list[Event]) -> None:
        db.executemany(
            "INSERT INTO events(wall, model, body) VALUES (?, ?, ?)",
            [(event.wall, event.model, _encode(event)) for event in rows],
        )
        if any(event.seq % 500 == 0 for event in rows):
            db.execute("DELETE FROM events WHERE id <= (SELECT max(id) FROM events) - ?", (KEPT,))
        db.commit()

    def tail(
        self,
        limit: int | None = None,
        model: str | None = None,
        actions: Collection[str] = (),
        since: float = 0.0,
        source: str = "",
    ) -> tuple[Event, ...]:
        """At most `limit` of the latest events. The newest event is last.

        The result has only events of `model` (None: any model) whose action is in `actions` (empty:
        any action). Events before the wall time `since` are left out. `source` is the digest of a
        model's source; if it is given, only events of models from equal sources are returned.
        """
        count = KEPT if limit is None else limit

        def latest(events: Iterable[Event]) -> tuple[Event, ...]:
            """The newest `count` wanted events. The newest is first in `events`, and last in the result."""
            wanted = (event for event in events if not actions or event.action in actions)
            if source:
                wanted = (event for event in wanted if event.source == source)
            return tuple(itertools.islice(wanted, count))[::-1]

        with self._reading_others:
            others = self._of_others(model, since, source)
        with self._lock:
            self._write()
            if self._path is not None and not self._broken and self._path.exists():
                try:
                    with contextlib.closing(self._connect()) as db:
                        # Rows are decoded one by one, and no more than needed: a full journal has
                        # 10,000 events.
                        stored = _stored_events(db, model, since, source)
                        return latest(_merged([stored, *others]))
                except (sqlite3.Error, OSError, msgspec.MsgspecError) as error:
                    log.warning("the journal %s cannot be read (%s)", self._path, error)
            kept = (
                event
                for event in reversed(self._recent)
                if model in (None, event.model) and event.wall >= since
            )
            return latest(_merged([kept, *others]))

    def _of_others(self, model: str | None, since: float, source: str) -> list[list[Event]]:
        """The events of each other user's journal. The newest event is first."""
        if self._users is None or self._path is None or not after_fork.is_usable():
            return []
        files = journals_of_others(self._users, self._path.name, since)
        return [events_of(file, model, since, source) for file in files]

    def _connect(self) -> sqlite3.Connection:
        """A connection for one use, closed after it: no connection is carried across a fork."""
        assert self._path is not None
        if not after_fork.is_usable():
            raise OSError(errno.EDEADLK, "SQLite cannot be used in this forked process")
        if self._users is not None:
            if not (self._is_ours and self._path.exists()):
                make_own_journal(JournalPlace(self._path, self._users))
                self._is_ours = True
        elif not self._path.exists():
            make_directory(self._path.parent)
            access_to(self._path.parent).make_file(self._path)
        db = opened(self._path)
        db.execute(
            "CREATE TABLE IF NOT EXISTS events(id INTEGER PRIMARY KEY, wall REAL, model TEXT, body BLOB)"
        )
        db.execute("CREATE INDEX IF NOT EXISTS events_of_model ON events(model)")
        return db


def opened(path: Path) -> sqlite3.Connection:
    """Opens the database `path` in a directory where other users may have made files.

    Raises OSError if the file is a link, or if SQLite's journal for the file is not a plain file.
    """
    # In a shared ledger, another user could put a link here that leads to a database of this user.
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link", str(path))
    if not _has_plain_journal(path):
        raise OSError(errno.EINVAL, "its journal is not a file", str(path))
    db = sqlite3.connect(path, timeout=0.5)
    try:
        require_no_link(db, path)
        db.execute("PRAGMA synchronous=OFF")
        db.execute("PRAGMA trusted_schema=OFF")
    except BaseException:
        db.close()
        raise
    return db


def _has_plain_journal(database: Path) -> bool:
    """Whether the journal beside the file `database` is a plain file, or is missing.

    SQLite opens the journal at each read. If the journal is a pipe, SQLite waits for ever.
    """
    try:
        return stat.S_ISREG(os.lstat(f"{database}-journal").st_mode)
    except OSError:  # there is none, or SQLite will report the error
        return True


def _stored_events(
    db: sqlite3.Connection, model: str | None, since: float, source: str
) -> Iterable[Event]:
    """The events in the file that are of `model` (None: any model) and not before `since`, newest
    first.

    If `source` is given, only events that contain this text are decoded.
    """
    # The text of the query depends on `model`: "? IS NULL OR model = ?" would not use the index.
    # Without the index, the events of one model in a full journal take 7 ms.
    of_model = "" if model is None else "model = :model AND"
    rows = db.execute(
        f"SELECT body FROM events WHERE {of_model} wall >= :since AND instr(body, :source) "
        "ORDER BY id DESC",
        {"model": model, "since": since, "source": source.encode()},
    )
    return (_decode(row[0]) for row in rows)


def _merged(sources: list[Iterable[Event]]) -> Iterable[Event]:
    """The events of all `sources`, newest first. Each source has its newest event first, too."""
    if len(sources) == 1:
        return sources[0]
    return heapq.merge(*sources, key=lambda event: (event.wall, event.seq), reverse=True)
