"""Keeps the files of a model unchanged while a load has them mapped into memory.

A process that reads a mapped page beyond the end of a file is killed (SIGBUS), and with it the
whole notebook. So a load holds a read lease of the operating system (fcntl) on each file. If
another process opens such a file for writing, or truncates it, that process waits until the load
has ended. The load fails once it notices the waiting process. The system grants a lease to the
owner of a file and to root, on local file systems. A file without a lease is unprotected.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Callable, Iterable, Iterator

from ...errors import LoadFailed


@contextlib.contextmanager
def untouched(paths: Iterable[str], name: str) -> Iterator[Callable[[], None]]:
    """A context manager that keeps the files `paths` of the model `name` unchanged.

    The value is a function that raises LoadFailed once a process waits to write one of the files.
    Call this function every few seconds, because after /proc/sys/fs/lease-break-time (45 s) the
    operating system lets the waiting process continue.
    """
    leased = {path: file for path in paths if (file := _leased(path)) is not None}

    def check() -> None:
        for path, file in leased.items():
            if fcntl.fcntl(file, fcntl.F_GETLEASE) != fcntl.F_RDLCK:
                raise LoadFailed(
                    f"{name} cannot be loaded: another process started to write {path}.\n"
                    f"  Load it again once the file is complete.",
                    name=name,
                    source=path,
                )

    try:
        yield check
    finally:
        for file in leased.values():
            # Closing the file does not end the lease if a forked child has inherited the file.
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            os.close(file)


def _leased(path: str) -> int | None:
    """A descriptor of the file `path` with a read lease on it; None if the system grants no lease."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # the load itself reports a file that cannot be opened
        return None
    try:
        # The usual signal, SIGIO, would end this process. SIGURG is ignored.
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except (OSError, AttributeError):  # not granted, or not Linux
        os.close(file)
        return None
    return file
