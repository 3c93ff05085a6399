"""The use of the devices over the last day, on disk. Older parts have fewer moments.

The history is one SQLite table in the directory of the journal, with a row for each device and
moment. The host's helper process writes the table, and other processes read the table. Nothing
depends on the table.

The fullest of several moments is the moment with the most memory in use. After half an hour, only
the fullest moment of every 15 s is kept, and after three hours the fullest moment of every minute.
After a day, no moment is kept. Only recorded moments are returned; no figure is an average.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sqlite3
import threading
from collections.abc import Iterable
from pathlib import Path

import msgspec

from .. import forks
from ..facts import Moment
from ..ledgers.access import access_to
from ..private_paths import make_directory
from . import after_fork
from .journal import opened

DAY = 86400.0
# (age, stretch) in seconds. Of the moments older than `age`, one of each `stretch` is kept.
THINNED = ((1800.0, 15.0), (10800.0, 60.0))
AHEAD_SECONDS = 60.0  # a moment later than now + this was written while the clock was wrong
MOST_ROW_BYTES = 1 << 20

log = logging.getLogger("gpu_runtime")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Moment).decode
_Row = tuple[float, str, int, bytes]  # wall time, device, peak bytes, encoded moment

# Selects the rowid of the fullest moment for each device and stretch of time. With max(), SQLite
# takes the other columns from the row that has the maximum.
_FULLEST = """SELECT id FROM (SELECT rowid AS id, max(peak) FROM moments WHERE wall >= ? AND wall < ?
    GROUP BY device, CAST(wall / ? AS INTEGER))"""


class Record:
    """The history in one file. Every call opens the file again.

    For readers, a file that is damaged or is no history has no moments. The writer renames such a
    file, and begins a new one.
    """

    def __init__(self, path: Path) -> None:
        """The history in the file `path`. The first write creates the file."""
        self.path = path
        self._warned = False
        self._lock = forks.awaited(threading.Lock())

    # Writing

    def append(self, moments: Iterable[Moment]) -> bool:
        """Writes `moments`, and returns whether this succeeded.

        A failure is logged once. The caller may pass the same moments again later.
        """
        rows = [(one.wall, one.device, one.peak_bytes, _encode(one)) for one in moments]
        try:
            try:
                self._insert(rows)
            except sqlite3.Error as error:
                if not _is_unusable(error):
                    raise
                self._set_aside(error)
                self._insert(rows)
        except (sqlite3.Error, OSError) as error:
            self._warn("written", error)
            return False
        return True

    def _insert(self, rows: list[_Row]) -> None:
        if not self.path.exists():
            make_directory(self.path.parent)
            access_to(self.path.parent).make_file(self.path)
        with self._lock, contextlib.closing(self._connect()) as db:
            db.execute("PRAGMA journal_mode=TRUNCATE")
            db.execute(
                "CREATE TABLE IF NOT EXISTS moments(wall REAL, device TEXT, peak INTEGER, body BLOB)"
            )
            db.execute("CREATE INDEX IF NOT EXISTS moments_of ON moments(device, wall, peak)")
            db.executemany(
                "INSERT INTO moments(wall, device, peak, body) VALUES (?, ?, ?, ?)", rows
            )
            db.commit()

    def thin(self, now: float) -> None:
        """Removes moments that are too old at the wall time `now`, and moments that are too many
        for their age.
        """
        try:
            with self._lock, contextlib.closing(self._connect()) as db:
                db.execute(
                    "DELETE FROM moments WHERE wall < ? OR wall > ?",
                    (now - DAY, now + AHEAD_SECONDS),
                )
                for age, stretch in THINNED:
                    edge = (
                        (now - age) // stretch * stretch
                    )  # only complete stretches, so each is thinned once
                    db.execute(
                        f"DELETE FROM moments WHERE wall < ? AND rowid NOT IN ({_FULLEST})",
                        (edge, 0.0, edge, stretch),
                    )
                db.commit()
        except (sqlite3.Error, OSError) as error:
            self._warn("thinned", error)

    def _set_aside(self, error: sqlite3.Error) -> None:
        log.warning(
            "the history %s cannot be used (%s); it is set aside, and a new one is started",
            self.path,
            error,
        )
        os.replace(self.path, self.path.with_name(f"{self.path.name}.damaged"))
        self.path.with_name(f"{self.path.name}-journal").unlink(missing_ok=True)

    # Reading

    def between(self, since: float, until: float, most: int) -> tuple[Moment, ...]:
        """At most `most` moments of each device from the wall time `since` to `until`, in order.

        The period is divided into stretches of time, and the fullest moment of each stretch is
        returned. The ends of the stretches are at fixed times, so a chart that is redrawn for a
        later period does not flicker.
        """
        # Stretches begin at multiples of their length, so the period can overlap one stretch more
        # than its length suggests. With `most` = 1, one stretch covers all time.
        stretch = max((until - since) / (most - 1), 1e-3) if most > 1 else 1e18
        try:
            if most < 1 or not self.path.exists():
                return ()
            with self._lock, contextlib.closing(self._connect()) as db:
                rows = db.execute(
                    f"SELECT body FROM moments WHERE rowid IN ({_FULLEST}) ORDER BY wall, rowid",
                    (since, until, stretch),
                ).fetchall()
        except (sqlite3.Error, OSError) as error:
            self._warn("read", error)
            return ()
        moments = (_decoded(body) for (body,) in rows)
        return tuple(moment for moment in moments if moment is not None)

    # Both

    def _connect(self) -> sqlite3.Connection:
        if not after_fork.is_usable():
            raise OSError(errno.EDEADLK, "SQLite cannot be used in this forked process")
        db = opened(self.path)
        # Another user of the ledger may have put anything into the file.
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_ROW_BYTES)
        return db

    def _warn(self, what: str, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            log.warning("the history %s cannot be %s now (%s)", self.path, what, error)


def _is_unusable(error: sqlite3.Error) -> bool:
    """Whether `error` means that the file is damaged or is no history, so that another attempt
    would fail too.
    """
    kind = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    return kind in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)


def _decoded(body: object) -> Moment | None:
    try:
        return _decode(body)  # type: ignore[arg-type]
    except (msgspec.MsgspecError, TypeError, UnicodeDecodeError):
        return None
