"""Tests whether this process can use SQLite, if it was forked.

A fork waits until no thread of gpu-console is inside SQLite (`forks.py`). But a fork does not wait
for the threads of other libraries, such as the thread that saves IPython's history. A lock that
such a thread held stays locked in the child for ever, and the first call that needs this lock never
returns. So the child makes its first call in a separate thread, and waits for the call only a
limited time.
"""

from __future__ import annotations

import os
import sqlite3

from .. import forks, threads

TRY_SECONDS = 3.0
_began_as = os.getpid()
_usable_in: dict[int, bool] = {}  # process id -> what was found; one entry at most


def is_usable() -> bool:
    """Whether this process can use SQLite. A forked child tests this once, in 0.2 ms."""
    pid = os.getpid()
    if pid == _began_as:
        return True
    if pid not in _usable_in:
        found = forks.is_clean() and threads.start(_use_once).wait(TRY_SECONDS)
        _usable_in.clear()
        _usable_in[pid] = found
    return _usable_in[pid]


def _use_once() -> None:
    """Makes a call that takes each of SQLite's global locks: for memory, page cache and files."""
    try:
        db = sqlite3.connect("file:/proc/self/cmdline?mode=ro", uri=True)
        db.execute("PRAGMA schema_version").fetchall()
    except sqlite3.Error:
        pass  # expected: the file is no database
