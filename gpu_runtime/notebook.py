"""What this process's kernel tells of its notebook: its path, the running cell, the next cells, their memory.

The IPython extension records the start and end of each cell here. A record takes under a microsecond
and does not access the ledger. The runtime's monitor thread publishes the record with this process's
other facts. The extension also reads the cells that will run next, and runtimes load models ahead
for them. This module connects the extension and the runtimes, since neither may import the other. A
script has no cells.

`telemetry/measurements.py` keeps the memory that each cell took in its last run. A kernel without a
lease looks into its file before each cell. So this module imports only modules that a kernel has
loaded anyway. An import of `telemetry/measurements.py` would add 60 ms to the kernel's first cell.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
import weakref
from collections.abc import Callable, Collection, Hashable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from .facts import NEVER, CellModels
from .files import fallback_home, read_plain, state_home
from .safe_text import LONGEST_PATH, printable


def notebook_path() -> str:
    """The path of the notebook that this kernel runs; empty until the front end has set the path.

    Jupyter sets an environment variable. Visual Studio Code and some servers set a name in the
    notebook's namespace, sometimes only after the kernel has started. The name of a file may have
    any bytes. Bytes that are not UTF-8 are written as escapes.
    """
    return _shown(_published_path())


_shown = lru_cache(4)(partial(printable, most=LONGEST_PATH))  # each cell asks
_DRIVE = re.compile(r"[A-Za-z]:\\")


def _published_path() -> str:
    names = variables()
    # Through a Jupyter server, Visual Studio Code starts kernels with an invented path, such as
    # train-jvsc-1f0c….ipynb. Its own variable has the path where it runs, perhaps on Windows.
    if path := _text(names.get("__vsc_ipynb_file__")):
        return path.replace("\\", "/") if _DRIVE.match(path) else path
    return os.environ.get("JPY_SESSION_NAME") or _text(names.get("__session__"))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def variables() -> dict[str, Any]:
    """The variables of this notebook by name; empty in a script."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return getattr(shell, "user_ns", None) or {}


# -- whether a cell runs ---------------------------------------------------------------------------


class State(NamedTuple):
    """Since when the kernel runs a cell, or since when it is idle, in seconds of CLOCK_BOOTTIME.

    While a cell runs, `idle_since` is 0.0. Between cells, `busy_since` is 0.0. In a script, and
    before the first cell, both are 0.0.
    """

    busy_since: float = NEVER
    idle_since: float = NEVER


class Activity:
    """The running cells. Several can run at once: a cell can run another one, and subshells run beside it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns the current time in seconds."""
        self._clock = clock
        # Functions that are called when a cell starts. They wake monitor threads.
        self.watchers: set[Callable[[], None]] = set()
        self.forget()

    def forget(self) -> None:
        """Removes all records, as if no cell had ever run."""
        self._running: dict[Hashable, float] = {}
        self._ended = NEVER

    def began(self, cell: Hashable) -> None:
        """Records the start of `cell`, whose value distinguishes it from other running cells."""
        self._running[cell] = self._clock()
        for watcher in tuple(self.watchers):
            watcher()

    def ended(self, cell: Hashable) -> None:
        """Records the end of `cell`, even if its start was not recorded."""
        self._running.pop(cell, None)
        self._ended = self._clock()

    @property
    def running(self) -> bool:
        """Whether a cell runs now."""
        return bool(self._running)

    @property
    def state(self) -> State:
        """When the oldest running cell started; or when the last cell ended, if no cell runs.

        The time is rounded to a tenth of a second, to keep its text in the ledger short.
        """
        since = list(self._running.values())
        if since:
            return State(busy_since=round(min(since), 1))
        return State(idle_since=round(self._ended, 1))


def _forget_all() -> None:
    """Removes all records and watchers in a forked child, which runs no cell and no monitor."""
    activity.forget()
    activity.watchers.clear()


activity = Activity(lambda: time.clock_gettime(time.CLOCK_BOOTTIME))
os.register_at_fork(after_in_child=_forget_all)


# -- the upcoming cells ----------------------------------------------------------------------------


Governed = Callable[[Any], str]  # a value -> the name of the model that it is, or ""
Reader = Callable[[Collection[str], Governed], tuple[CellModels, ...]]


class Follower(Protocol):
    """An object that acts on upcoming cells, such as the look-ahead of a runtime."""

    def wake(self) -> None:
        """Called in any thread when the cells have changed. This method must return at once."""


class Upcoming:
    """The upcoming cells of one kernel."""

    def __init__(self) -> None:
        self.followers: weakref.WeakSet[Follower] = weakref.WeakSet()
        self._reader: Reader | None = None

    def read_by(self, reader: Reader | None) -> None:
        """Sets the function that reads the cells; None if this process no longer has cells."""
        self._reader = reader
        self.changed()

    def cells(self, known: Collection[str], governed: Governed) -> tuple[CellModels, ...]:
        """The running cell, if there is one, and the waiting cells in their order.

        `known` are the names of all models. `governed(value)` returns the name of the model that
        the object `value` is; empty if it is no model. It is called with the values of variables.
        """
        return self._reader(known, governed) if self._reader else ()

    def changed(self) -> None:
        """Wakes the followers, because a cell began, ended or was queued."""
        for follower in list(self.followers):
            follower.wake()


def _forget() -> None:
    """Removes the reader and the followers in a forked child: the cells belong to the parent."""
    upcoming.__init__()  # type: ignore[misc]


upcoming = Upcoming()
os.register_at_fork(after_in_child=_forget)


# -- what a cell took in its last run --------------------------------------------------------------


FILE = "cells.json"  # in the state directory, see telemetry/measurements.py
LONGEST = 1 << 20  # bytes; a larger file is not read
MAGIC_LINE = re.compile(r"(?:[\w\s,*]+=)?\s*%gpu(?:ctl)?\b")


def cell_key(notebook: str, text: str) -> str:
    """The key of the cell with the code `text` in the notebook at the path `notebook`.

    The key is empty for a cell without code, and for a cell of `%gpu` lines only: such a cell takes
    no memory by itself, and what its commands load requests its own room. The key is a digest, so
    the file contains neither code nor names.

    >>> cell_key("a.ipynb", "# who holds it?\\n%gpu who\\ndf = %gpu leases")
    ''
    """
    text = text.strip()
    lines = [line.strip() for line in text.splitlines()]
    if all(not line or line.startswith("#") or MAGIC_LINE.match(line) for line in lines):
        return ""
    return hashlib.sha256(f"{notebook}\0{text}".encode("utf-8", "replace")).hexdigest()[:20]


def is_remembered(key: str) -> bool:
    """Whether this user's file has the bytes that the cell with this `key` took.

    The file is in /var/tmp if the state directory is on a network file system. Both are searched, which takes less
    time than the check for this.
    """
    for directory in (state_home(), fallback_home()):
        try:
            # Another user could have put a pipe there, and a cell would wait for it.
            known = json.loads(read_plain(Path(directory, FILE), LONGEST, os.geteuid()))
            if key in known["cell_bytes"]:
                return True
        except (OSError, ValueError, KeyError, TypeError):  # no file, or a damaged one
            continue
    return False
