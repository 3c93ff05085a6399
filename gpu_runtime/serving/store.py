"""What serving keeps over a restart, in one SQLite file of this user: the usage of each visitor, and jobs.

The file may be deleted while no server runs. A second server of the same user adds its usage to the file, and keeps
its jobs in memory only.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..files import make_directory, state_home
from ..telemetry.hours import StateFile
from .requests import Json

KEPT_DAYS = 400
MOST_JOB_BYTES = 16 << 20  # a job with a larger result does not survive a restart
_TABLES = (
    """CREATE TABLE IF NOT EXISTS usage (day TEXT, client TEXT, model TEXT, calls INTEGER, prompt_tokens INTEGER,
    answer_tokens INTEGER, PRIMARY KEY (day, client, model)) WITHOUT ROWID""",
    "CREATE TABLE IF NOT EXISTS jobs (id TEXT PRIMARY KEY, body TEXT) WITHOUT ROWID",
)
_ADD = """
INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (day, client, model) DO UPDATE SET
    calls = calls + excluded.calls, prompt_tokens = prompt_tokens + excluded.prompt_tokens,
    answer_tokens = answer_tokens + excluded.answer_tokens
"""
UsageRow = tuple[str, str, str, int, int, int]  # day, client, model, calls, tokens read and written


def default_file() -> Path:
    """The path of the file with usage and jobs, in the state directory."""
    return state_home() / "serving.sqlite"


class Store(StateFile):
    """One file with usage and jobs. Its methods may be called from any thread. If it cannot be used, this is logged."""

    what = "file of usage and jobs"
    most_row_bytes = 2 * MOST_JOB_BYTES

    def __init__(self, path: Path) -> None:
        """The file `path`, which only this user may read. Claims the jobs, unless another server has."""
        super().__init__(path)
        self._claim: int | None = None
        try:
            make_directory(path.parent)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._claim = os.open(path.with_name(f".{path.name}.lock"), flags, 0o600)
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another server runs, or no file can be written, which the first write logs.
        except OSError:
            self.close()
        self._change("DELETE FROM usage WHERE day < date('now', ?)", [(f"-{KEPT_DAYS} days",)])

    @property
    def keeps_jobs(self) -> bool:
        """Whether this server keeps its jobs in the file, because no other server of this user does."""
        return self._claim is not None

    def add_usage(self, rows: Iterable[UsageRow]) -> bool:
        """Adds the calls and tokens in `rows`. Returns whether this succeeded."""
        return self._change(_ADD, list(rows))

    def usage(self, since: str) -> list[UsageRow]:
        """The rows of usage from the day `since` on. A day has the form 2026-01-31."""
        return self.read("SELECT * FROM usage WHERE day >= ?", (since,))

    def put_job(self, id: str, body: Json) -> None:
        """Writes the job with this `id`, unless it is too large or this server keeps no jobs."""
        text = json.dumps(body)
        if self.keeps_jobs and len(text) <= MOST_JOB_BYTES:
            self._change("INSERT OR REPLACE INTO jobs VALUES (?, ?)", [(id, text)])

    def drop_job(self, id: str) -> None:
        """Removes the job with this `id`."""
        self._change("DELETE FROM jobs WHERE id = ?", [(id,)])

    def jobs(self) -> list[Json]:
        """The jobs that an earlier server wrote to the file; none if this server does not keep its jobs there."""
        rows = self.read("SELECT body FROM jobs", ()) if self.keeps_jobs else []
        return [json.loads(body) for (body,) in rows]

    def close(self) -> None:
        """Lets another server keep its jobs in the file."""
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def _change(self, statement: str, rows: list[Any]) -> bool:
        def act(db: sqlite3.Connection) -> None:
            db.execute("PRAGMA synchronous=FULL")  # a power cut loses no usage
            for table in _TABLES:
                db.execute(table)
            db.executemany(statement, rows)

        return self.write(act)
