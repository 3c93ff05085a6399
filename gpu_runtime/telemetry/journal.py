"""What happened and why, kept beyond the page's last few events and beyond a boot.

One SQLite table that every owner of a ledger appends to. History is worth having but nothing stands on it: where it
cannot be written, that is logged once and the work goes on.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import msgspec

from ..facts import Event
from ..ledgers.access import access_to

KEPT = 10_000  # events in the file; the oldest go first
EVERY_SECONDS = 1.0

log = logging.getLogger("gpu_runtime")
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Event).decode


class Journal:
    """Appends events and tells the latest. `path=None` keeps them in this process only.

    A file is opened for each write, so nothing is carried across a fork; and where much happens it is written once a
    second, since opening it takes longer than granting a lease. Who is killed may so leave the last second untold here;
    the page has it.
    """

    def __init__(
        self, path: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = path
        self._clock = clock
        self._recent: deque[Event] = deque(maxlen=KEPT)
        self._unwritten: deque[Event] = deque(maxlen=KEPT)
        self._written_at = float("-inf")
        self._lock = threading.Lock()
        self._broken = False

    def append(self, events: Iterable[Event]) -> None:
        """Keeps these events. Never fails: what cannot be written to the file stays in memory."""
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

    def flush(self) -> None:
        """Writes what has not been written yet."""
        if self._unwritten:
            with self._lock:
                self._write()

    def _write(self) -> None:
        rows = list(self._unwritten)
        if not rows or self._broken:
            return
        try:
            with contextlib.closing(self._open()) as db:
                db.executemany(
                    "INSERT INTO events(wall, model, body) VALUES (?, ?, ?)",
                    [(e.wall, e.model, _encode(e)) for e in rows],
                )
                if any(e.seq % 500 == 0 for e in rows):
                    db.execute(
                        "DELETE FROM events WHERE id <= (SELECT max(id) FROM events) - ?", (KEPT,)
                    )
                db.commit()
        except (sqlite3.Error, OSError) as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
                return  # many write at once: the next time
            self._broken = True
            log.warning(
                "the journal %s cannot be written (%s); history is kept in memory only",
                self._path,
                error,
            )
        self._unwritten.clear()
        self._written_at = self._clock()

    def tail(
        self,
        limit: int | None = None,
        model: str | None = None,
        actions: Collection[str] = (),
        since: float = 0.0,
    ) -> tuple[Event, ...]:
        """The latest events, the newest last: of one model, of these actions (none: of any), since that wall time."""
        count = KEPT if limit is None else limit

        def latest(events: Iterable[Event]) -> tuple[Event, ...]:
            wanted = (event for event in events if not actions or event.action in actions)
            return tuple(itertools.islice(wanted, count))[::-1]

        with self._lock:
            self._write()
            if self._path is not None and not self._broken and self._path.exists():
                try:
                    with contextlib.closing(self._open()) as db:
                        # Read as far back as needed, and no more is decoded: a journal is full with 10,000 events.
                        return latest(
                            _decode(row[0])
                            for row in db.execute(
                                "SELECT body FROM events WHERE (? IS NULL OR model = ?) AND wall >= ? ORDER BY id DESC",
                                (model, model, since),
                            )
                        )
                except (sqlite3.Error, OSError, msgspec.MsgspecError) as error:
                    log.warning("the journal %s cannot be read (%s)", self._path, error)
            return latest(
                event
                for event in reversed(self._recent)
                if model in (None, event.model) and event.wall >= since
            )

    def _open(self) -> sqlite3.Connection:
        """A connection for one use: never held, so nothing is carried across a fork."""
        assert self._path is not None
        if not self._path.exists():
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            access_to(self._path.parent).make_file(self._path)
        if (
            self._path.is_symlink()
        ):  # in a shared ledger it could lead to a database of ours elsewhere
            raise OSError(errno.ELOOP, "it is a link", str(self._path))
        db = sqlite3.connect(self._path, timeout=0.5)
        db.execute("PRAGMA synchronous=OFF")
        db.execute("PRAGMA trusted_schema=OFF")
        db.execute(
            "CREATE TABLE IF NOT EXISTS events(id INTEGER PRIMARY KEY, wall REAL, model TEXT, body BLOB)"
        )
        return db
