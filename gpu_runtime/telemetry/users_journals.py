"""Reads the journals that other users of a shared ledger wrote. The content of these journals is
never trusted.

Each file is copied into memory, and SQLite works on the copy. So the reader holds no lock, and the
writer never waits for it. A file of another user cannot make SQLite write or wait in this process.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sqlite3
from pathlib import Path

import msgspec

from ..facts import Event
from ..private_paths import read_plain

MOST_EVENTS = 10_000
MOST_BYTES = 64 << 20  # a journal of 10,000 events has about 5 MiB
MOST_STEPS = (
    5_000_000  # SQLite's steps for one file, about 0.1 s; a hostile file could need endless steps
)
STEPS_AT_ONCE = 100_000
ATTEMPTS = 3  # the other user may write the file while it is copied

log = logging.getLogger("gpu_runtime")
_decode = msgspec.json.Decoder(Event).decode
_complained: set[Path] = set()
_endless: dict[Path, int] = {}  # files whose query took too many steps -> their write time


def journals_of_others(users: Path, name: str, since: float) -> list[Path]:
    """The files with this `name` that belong to other users and were written at or after `since`.

    `users` has a directory for each user. The name of the directory is the uid. A file counts only
    if it belongs to the user with this uid.
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


def events_of(path: Path, model: str | None, since: float, source: str = "") -> list[Event]:
    """The events in another user's file `path`, newest first. Empty if the file cannot be read.

    The result has only events of `model` (None: any model) that are not before the wall time
    `since`, and that contain the text `source`. A file that cannot be read is logged once. If a
    query of the file takes too many steps, the file is not read again until it has changed.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            stamp = path.stat().st_mtime_ns
            return [] if _endless.get(path) == stamp else _read(path, model, since, source)
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


def _read(path: Path, model: str | None, since: float, source: str) -> list[Event]:
    steps = itertools.count(1)
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        db.deserialize(read_plain(path, MOST_BYTES, int(path.parent.name)))
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES)
        db.execute("PRAGMA trusted_schema=OFF")
        db.set_progress_handler(lambda: next(steps) > MOST_STEPS // STEPS_AT_ONCE, STEPS_AT_ONCE)
        rows = db.execute(
            "SELECT body FROM events WHERE (? IS NULL OR model = ?) AND wall >= ? "
            "AND instr(body, ?) ORDER BY id DESC LIMIT ?",
            (model, model, since, source.encode(), MOST_EVENTS),
        ).fetchall()
    return [event for event in (_event(body) for (body,) in rows) if event is not None]


def _event(body: object) -> Event | None:
    try:
        return _decode(body)  # type: ignore[arg-type]
    except (msgspec.MsgspecError, TypeError, UnicodeDecodeError):
        return None
