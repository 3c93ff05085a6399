"""What serving keeps over a restart, in one SQLite file of this user: the usage of each visitor, and jobs.

The file may be deleted while no server runs. A second server of the same user adds its usage to the file, and keeps
its jobs in memory only.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from ..files import make_directory, state_home
from .requests import Json
from .thread_stream import in_thread

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


WRITE_SECONDS = 1.0  # the longest time for which calls are in memory only
MOST_DAYS = 400
RECENT_DAYS = 30
RECENT_SECONDS = 5.0  # how long `recent` returns the same rows
_Place = tuple[str, str, str]  # day, client, model


class Usage:
    """The calls of one gateway, and their tokens, by visitor, model and day, in its event loop."""

    def __init__(self, store: Store | None = None, wall: Callable[[], float] = time.time) -> None:
        """The counts go to `store`; without a store they stay in memory. `wall` returns epoch seconds."""
        self._store = store
        self._wall = wall
        self._new: dict[_Place, list[int]] = {}  # calls, tokens read and written
        self._writing: asyncio.Task[None] | None = None
        self._recent: list[Json] = []
        self._recent_until = 0.0  # epoch seconds

    def add(self, client: str, facts: Json) -> None:
        """Counts one call of the visitor `client`. `facts` are the facts of the call in the request log."""
        place = (self._day(0), client, facts["model"])
        self._count(place, 1, facts["prompt_tokens"], facts["completion_tokens"])
        if self._store is not None and self._writing is None:
            self._writing = asyncio.ensure_future(self._write_soon())

    def of(self, days: int, client: str | None = None) -> list[Json]:
        """Rows with the calls and tokens of each client and model in the last `days`; of `client` alone, if given."""
        since = self._day(days - 1)
        rows = self._store.usage(since) if self._store is not None else []
        sums: dict[tuple[str, str], list[int]] = {}
        for day, who, model, *counts in (*rows, *self._rows()):
            if day >= since and client in (None, who):
                known = sums.setdefault((who, model), [0, 0, 0])
                sums[who, model] = [a + b for a, b in zip(known, counts, strict=True)]
        return [
            {
                "client": who,
                "model": model,
                "calls": calls,
                "prompt_tokens": read,
                "answer_tokens": made,
            }
            for (who, model), (calls, read, made) in sorted(sums.items())
        ]

    def recent(self) -> list[Json]:
        """The rows of the last RECENT_DAYS for all clients. They may be RECENT_SECONDS old."""
        if self._wall() >= self._recent_until:
            self._recent, self._recent_until = self.of(RECENT_DAYS), self._wall() + RECENT_SECONDS
        return self._recent

    async def close(self) -> None:
        """Writes the counts that are not in the store yet."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
            await self._write()

    async def _write_soon(self) -> None:
        await asyncio.sleep(WRITE_SECONDS)
        self._writing = None
        await self._write()

    async def _write(self) -> None:
        rows, store = self._rows(), self._store
        self._new.clear()
        if rows and store is not None and not await in_thread(lambda: store.add_usage(rows)):
            # Such as a full disk: these calls are written with the next one.
            for day, client, model, *counts in rows:
                self._count((day, client, model), *counts)

    def _count(self, place: _Place, *counts: int) -> None:
        known = self._new.get(place, [0, 0, 0])
        self._new[place] = [a + b for a, b in zip(known, counts, strict=True)]

    def _rows(self) -> list[UsageRow]:
        return [(*place, *counts) for place, counts in self._new.items()]  # type: ignore[misc]

    def _day(self, ago: int) -> str:
        now = datetime.fromtimestamp(self._wall(), UTC)
        return (now - timedelta(days=ago)).date().isoformat()
