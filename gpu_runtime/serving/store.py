"""What serving keeps over a restart, in one SQLite file of this user: the usage of each visitor, and jobs.

The file may be deleted while no server runs. A second server of the same user adds its usage to the file, and keeps
its jobs in memory only.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sqlite3
import threading
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from ..files import make_directory, state_home
from .requests import Json

KEPT_DAYS = 400
BUSY_SECONDS = 5.0
MOST_JOB_BYTES = 16 << 20  # a job with a larger result does not survive a restart
_TABLES = """
CREATE TABLE IF NOT EXISTS usage (day TEXT, client TEXT, model TEXT, calls INTEGER, prompt_tokens INTEGER,
    answer_tokens INTEGER, PRIMARY KEY (day, client, model)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS jobs (id TEXT PRIMARY KEY, body TEXT) WITHOUT ROWID;
"""
_ADD = """
INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (day, client, model) DO UPDATE SET
    calls = calls + excluded.calls, prompt_tokens = prompt_tokens + excluded.prompt_tokens,
    answer_tokens = answer_tokens + excluded.answer_tokens
"""
UsageRow = tuple[str, str, str, int, int, int]  # day, client, model, calls, tokens read and written
log = logging.getLogger("gpu_runtime")


def default_file() -> Path:
    """The path of the file with usage and jobs, in the state directory."""
    return state_home() / "serving.sqlite"


class Store:
    """One file with usage and jobs. Its methods may be called from any thread."""

    def __init__(self, path: Path) -> None:
        """Opens the file `path`, which only this user may read. If it cannot be used, the data is in memory."""
        self._lock = threading.Lock()
        self._claim: int | None = None
        try:
            make_directory(path.parent)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            os.close(os.open(path, flags, 0o600))
            self._db = self._open(str(path))
            self._claim = self._claimed(path.with_name(f".{path.name}.lock"), flags)
        except (OSError, sqlite3.Error) as error:
            log.warning("usage and jobs are kept in memory only: %s: %s", path, error)
            self._db = self._open(":memory:")

    @property
    def keeps_jobs(self) -> bool:
        """Whether this server keeps its jobs in the file: it can be used, and no other server of this user does."""
        return self._claim is not None

    def add_usage(self, rows: Iterable[UsageRow]) -> bool:
        """Adds the calls and tokens in `rows`. Returns False, and logs, if the write fails."""
        return self._write(_ADD, list(rows))

    def usage(self, since: str) -> list[UsageRow]:
        """The rows of usage from the day `since` on. A day has the form 2026-01-31."""
        with self._lock, closing(self._db.cursor()) as cursor:
            return cursor.execute("SELECT * FROM usage WHERE day >= ?", (since,)).fetchall()

    def put_job(self, id: str, body: Json) -> None:
        """Writes the job with this `id`, unless it is too large or this server keeps no jobs. An error is logged."""
        text = json.dumps(body)
        if self.keeps_jobs and len(text) <= MOST_JOB_BYTES:
            self._write("INSERT OR REPLACE INTO jobs VALUES (?, ?)", [(id, text)])

    def drop_job(self, id: str) -> None:
        """Removes the job with this `id`. An error is logged."""
        self._write("DELETE FROM jobs WHERE id = ?", [(id,)])

    def jobs(self) -> list[Json]:
        """The jobs that an earlier server wrote to the file; none if this server does not keep its jobs there."""
        if not self.keeps_jobs:
            return []
        with self._lock, closing(self._db.cursor()) as cursor:
            rows = cursor.execute("SELECT body FROM jobs").fetchall()
        return [json.loads(body) for (body,) in rows]

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._db.close()
            if self._claim is not None:
                os.close(self._claim)
                self._claim = None

    def _write(self, statement: str, rows: list[Any]) -> bool:
        try:
            with self._lock, self._db:
                self._db.executemany(statement, rows)
            return True
        except sqlite3.Error as error:  # a full disk must not end an answer
            log.warning("usage or a job could not be written: %s", error)
            return False

    @staticmethod
    def _open(name: str) -> sqlite3.Connection:
        db = sqlite3.connect(name, timeout=BUSY_SECONDS, check_same_thread=False)
        db.executescript(_TABLES)
        with db:
            db.execute("DELETE FROM usage WHERE day < date('now', ?)", (f"-{KEPT_DAYS} days",))
        return db

    @staticmethod
    def _claimed(path: Path, flags: int) -> int | None:
        handle = os.open(path, flags, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another server runs
            os.close(handle)
            return None
        return handle
