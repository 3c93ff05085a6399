"""The journals that other users of a shared ledger wrote. They are only read, and never trusted.

The file is copied into memory, and SQLite works on the copy. So a reader holds no lock that its writer
would wait for, and no file of another user can make SQLite write, or wait, here.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sqlite3
import stat
from pathlib import Path

import msgspec

from ..facts import Event

MOST_EVENTS = 10_000
MOST_BYTES = 64 << 20  # a journal of 10,000 events has about 5 MiB
MOST_STEPS = 5_000_000  # of SQLite in one file, a tenth of a second: its tables may be anything
STEPS_AT_ONCE = 100_000
ATTEMPTS = 3  # its user may write it while it is copied

log = logging.getLogger("gpu_runtime")
_decode = msgspec.json.Decoder(Event).decode
_complained: set[Path] = set()
_endless: dict[Path, int] = {}  # files in which a query did not end, and when they were written


def journals_of_others(users: Path, name: str, since: float) -> list[Path]:
    """The files `name` of the other users in the directory `users`, if written at or after `since`.

    A file counts only if its user wrote it: the directory's name is the uid.
    """
    found = []
    try:
        uids = [entry for entry in os.listdir(users) if entry.isascii() and entry.isdecimal()]
    except OSError:  # no user has written one yet
        return []
    for uid in uids:
        path = users / uid / name
        try:
            written = path.lstat()
        except OSError:  # this user has none for these devices
            continue
        if int(uid) != os.geteuid() and written.st_uid == int(uid) and written.st_mtime >= since:
            found.append(path)
    return found


def events_of(path: Path, model: str | None, since: float) -> list[Event]:
    """The events in another user's file `path`, newest first: of `model` (None: of any), not before `since`.

    Empty if the file cannot be read. That is logged once, and a query that did not end is not tried again
    until the file has changed.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            stamp = path.stat().st_mtime_ns
            return [] if _endless.get(path) == stamp else _read(path, model, since)
        except (sqlite3.Error, OSError) as error:
            if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_INTERRUPT:
                _endless[path] = stamp
            elif attempt < ATTEMPTS:
                continue  # its user may be writing it
            if path not in _complained:
                _complained.add(path)
                log.warning("the journal %s cannot be read (%s)", path, error)
            break
    return []


def _read(path: Path, model: str | None, since: float) -> list[Event]:
    steps = itertools.count(1)
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        db.deserialize(_content(path))
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES)
        db.execute("PRAGMA trusted_schema=OFF")
        db.set_progress_handler(lambda: next(steps) > MOST_STEPS // STEPS_AT_ONCE, STEPS_AT_ONCE)
        rows = db.execute(
            "SELECT body FROM events WHERE (? IS NULL OR model = ?) AND wall >= ? "
            "ORDER BY id DESC LIMIT ?",
            (model, model, since, MOST_EVENTS),
        ).fetchall()
    return [event for event in (_event(body) for (body,) in rows) if event is not None]


def _event(body: object) -> Event | None:
    try:
        return _decode(body)  # type: ignore[arg-type]
    except (msgspec.MsgspecError, TypeError, UnicodeDecodeError):
        return None


def _content(path: Path) -> bytes:
    """The bytes of the file. Raises OSError if it is a link, no file, too large, or another user's."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
            raise OSError(f"it is not a journal: {found.st_size} bytes, mode {found.st_mode:o}")
        if found.st_uid != int(path.parent.name):
            raise OSError(f"uid {found.st_uid} wrote it")
        return file.read(MOST_BYTES)
