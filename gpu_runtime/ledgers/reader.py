"""Ledgers as programs see them that only watch: which ones are open, and what their books have.

A reader is no owner: no lock file, no socket, no repair, no write. While the book is being written
or rebuilt, `look` may return None, and the program has to call it again.

The ledgers that processes have open are found from the open files that /proc lists. A register of
ledgers could be out of date. The operating system's list of a process's open files is always
current. Only processes of this user are seen. A ledger in memory is not found, because it has no
files.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol

from ..errors import GpuError
from ..facts import Book
from ..files import open_files
from ..threads import import_whole
from .access import FILE_SCHEMES, split_redis_url
from .keeper.wire import SOCKET
from .liveness import boot_id

log = logging.getLogger("gpu_runtime")


class Peek(Protocol):
    """Reads one host's book."""

    def look(self) -> Book | None:
        """The current book; None if it cannot be read now."""


def peek(url: str, directory: Path) -> Peek:
    """A reader of the ledger at `url`, whose files of this boot are in `directory`.

    Nothing is opened or connected yet. Raises BadSetting for an invalid URL of a Redis.
    """
    if url.startswith(FILE_SCHEMES):
        from .keeper.ledger import KeeperPeek

        return KeeperPeek(directory)
    return RedisPeek(url, directory.name)


class RedisPeek:
    """Reads the page of one host in a Redis."""

    def __init__(self, url: str, boot: str) -> None:
        """`boot` is the boot id of the host, which names its page. Raises BadSetting."""
        import_whole(f"{__package__}.redis.connection")
        from .redis.connection import PAGE, RedisConnection, look_at

        server, _ = split_redis_url(url)
        self._connection = RedisConnection(server)
        self._look = lambda ask: look_at(ask, PAGE + boot)

    def look(self) -> Book | None:
        """The current book; None if it cannot be read now."""
        try:
            seen = self._connection.converse(self._look)
        except GpuError as error:
            log.debug("not read: %s", error)
            return None
        return seen.page.book if seen and seen.page else None


# -- the ledgers that processes have open ----------------------------------------------------------


PROC = Path("/proc")
_MOST_CHILDREN = 64  # once a tree has this many processes, no further children are read


class OpenLedger(NamedTuple):
    """A ledger that a process has open."""

    url: str  # may contain a password; not for display
    directory: Path  # the ledger's files of this boot


def of_process(pid: int, proc: Path = PROC) -> tuple[OpenLedger, ...]:
    """The ledgers that the process `pid` has open, in the order of its file descriptors.

    The result is empty if the process has ended or belongs to another user.
    """
    found: dict[Path, None] = {}
    for _, target in open_files(pid, proc):
        match = _owners_of(boot_id()).match(target)
        if match:
            found[Path(match[1])] = None
    ledgers = (_ledger(pid, directory, proc) for directory in found)
    return tuple(ledger for ledger in ledgers if ledger is not None)


def family(pid: int, proc: Path = PROC) -> tuple[int, ...]:
    """The process `pid` and its descendants. A kernel may run below a launcher script."""
    found = [pid]
    for parent in found:
        if len(found) >= _MOST_CHILDREN:
            break
        try:
            children = (proc / f"{parent}/task/{parent}/children").read_text().split()
        except OSError:  # the process has ended, or this Linux does not list children
            continue
        found += [int(child) for child in children]
    return tuple(found)


def processes_of_this_user(proc: Path = PROC) -> Iterator[int]:
    """The pids of all processes of this user, except this process."""
    for entry in os.scandir(proc):
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            is_own = entry.stat().st_uid == os.geteuid()
        except OSError:  # the process has just ended
            continue
        if is_own:
            yield int(entry.name)


def book_of(ledger: OpenLedger) -> Book | None:
    """The book of an open `ledger`; None if it cannot be read now, or if its URL cannot be opened."""
    try:
        return peek(ledger.url, ledger.directory).look()
    except GpuError:  # any process of the user may have set this URL
        return None


def of_processes(pids: Iterable[int], proc: Path = PROC) -> dict[OpenLedger, frozenset[int]]:
    """Maps each ledger that one of the `pids` has open to the processes that have it open."""
    found: dict[OpenLedger, set[int]] = {}
    for pid in pids:
        for ledger in of_process(pid, proc):
            found.setdefault(ledger, set()).add(pid)
    return {ledger: frozenset(holders) for ledger, holders in found.items()}


@lru_cache(maxsize=1)
def _owners_of(boot: str) -> re.Pattern[str]:
    # An owner keeps the owners' directory open, and its lock file in this directory. The directory is
    # `LEDGER/BOOT-ID/owners`, or `LEDGER/BOOT-ID.owners` in a shared ledger. An owner with a keeper keeps
    # `LEDGER/BOOT-ID` open.
    return re.compile(rf"(/.*/{re.escape(boot)})(?:[/.]owners(?:/|$)|$)")


def _ledger(pid: int, directory: Path, proc: Path) -> OpenLedger | None:
    """The ledger whose files of this boot are in `directory`.

    The files of a ledger in Redis do not contain the ledger's URL, since the URL may have a
    password. So the URL is read from the environment with which the process `pid` was started. The
    result is None if that environment has no URL of a Redis in GPU_LEDGER, or if the owners' files
    of that URL are not in `directory`.
    """
    if (directory / SOCKET).exists():
        return OpenLedger(f"keeper://{directory.parent}", directory)
    try:
        environment = (proc / f"{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # the process has just ended
        return None
    for line in environment:
        name, _, value = line.partition(b"=")
        url = value.decode(errors="replace")
        if name == b"GPU_LEDGER" and url.startswith(("redis://", "rediss://", "unix://")):
            is_same = directory.is_relative_to(split_redis_url(url)[1])
            return OpenLedger(url, directory) if is_same else None
    return None
