"""Reads in /proc whether a process lives, and whether it is stopped.

A pid can be used again for another process. A pid and a start time together identify a process, for
an observer in the same namespaces. Nothing here uses owners or lock files.
"""

from __future__ import annotations

import enum
import os
import re
from pathlib import Path


class Life(enum.StrEnum):
    """Whether an owner lives. ALIVE and DEAD are proven; UNKNOWN means that neither is proven."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


class Sight(enum.StrEnum):
    """The present state of an owner's process, as far as it can be seen."""

    ALIVE = "alive"
    STOPPED = "stopped"
    DUMPING = "dumping"  # it has crashed, and holds everything until its core dump is written
    DEAD = "dead"
    UNKNOWN = "unknown"


def start_ticks(stat: str) -> int:
    """When a process started, in clock ticks after the boot: field 22 of /proc/PID/stat (`stat`).

    >>> start_ticks("7 (a) b) S 1 " + "0 " * 17 + "4321 99")
    4321
    """
    # The name in field 2 may contain blanks and brackets. No field after the last bracket contains
    # blanks or brackets.
    return int(stat.rpartition(")")[2].split()[19])


def namespaces() -> str:
    """The namespaces that define the pid and start time of this process; empty if unknown.

    Two processes with the same result see each other under the same pid and start time.
    """
    try:
        ids = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "time")]
    except OSError:  # an old kernel
        return ""
    return "-".join(map(str, ids))


def life_of_process(pid: int, started: int) -> Life:
    """Whether the process `pid` that began at `started` (clock ticks after the boot) lives."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:  # no process has this number
        return Life.DEAD
    except PermissionError:
        pass  # another user's process
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # hidden from this user, or it ended just now
        return Life.UNKNOWN
    ended = start_ticks(stat) != started or is_zombie(stat)
    return Life.DEAD if ended else Life.ALIVE


def is_zombie(stat: str) -> bool:
    """Whether a process has ended, but its parent has not noticed; `stat` is /proc/PID/stat.

    A process still lives if its first thread has ended and another thread runs.

    >>> is_zombie("7 (python) Z 1 " + "0 " * 15 + "1 0 4321"), is_zombie("7 (a) R 1 ")
    (True, False)
    """
    fields = stat.rpartition(")")[2].split()
    return fields[0] in "ZX" and fields[17] == "1"


def in_status(status: str) -> Sight:
    """The state of a living process, from the text of /proc/PID/status (`status`).

    >>> in_status("Name: a\\nState:\\tT (stopped)\\n"), in_status("State:\\tD\\nCoreDumping:\\t1\\n")
    (<Sight.STOPPED: 'stopped'>, <Sight.DUMPING: 'dumping'>)
    """
    if "\nCoreDumping:\t1" in status:
        return Sight.DUMPING
    return Sight.STOPPED if re.search(r"^State:\s+[Tt]", status, re.MULTILINE) else Sight.ALIVE


def sight_of_process(pid: int, started: int) -> Sight:
    """The state of the process `pid` that began at `started` (clock ticks after the boot).

    ALIVE if the state cannot be read.
    """
    if life_of_process(pid, started) is Life.DEAD:
        return Sight.DEAD
    try:
        return in_status(Path(f"/proc/{pid}/status").read_text())
    except OSError:  # hidden from this user, or it ended just now
        return Sight.ALIVE
