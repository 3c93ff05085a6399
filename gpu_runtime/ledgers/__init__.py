"""Ledgers: the stores that keep the book of leases. `open_ledger(url)` opens one.

A ledger reads the book, checks that a new book is lawful (`invariants.py`), and writes it
atomically. A ledger decides nothing: its caller passes a function that makes the new book. No module
here imports the scheduler, or uses a device or a model.
"""

from __future__ import annotations

import logging
import os

from ..errors import BadSetting, LedgerUnavailable
from ..threads import import_whole
from .access import FILE_SCHEMES, directory_of, require_private, split_redis_url
from .base import Ledger

log = logging.getLogger("gpu_runtime")
_REDIS_SCHEMES = ("redis", "rediss", "unix")


def open_ledger(url: str, *, notebook: str = "", user: str = "") -> Ledger:
    """Opens the book at `url` as a new owner.

    The `url` has one of these forms:

    - `memory:` is a new book that nobody else can open.
    - `memory:NAME` is one book for all callers in this process that use the same name.
    - `keeper:///DIRECTORY` is one book for all processes of this host that use the same directory.
      A process of its own keeps the book, the keeper.
    - `sqlite:///DIRECTORY` means `keeper:///DIRECTORY`, and `…/NAME.db` means `…/NAME`. Version 0.2
      kept the book in an SQLite file.
    - `redis://…`, `rediss://…` and `unix://…` name a Redis, which stores one book for each host.

    `notebook` is the path that others see for this owner. `user` replaces the name of the process's
    user.

    Raises BadSetting for any other URL, and LedgerUnavailable if no book can be kept at `url`.
    """
    scheme, colon, rest = url.partition(":")
    if scheme == "memory":
        from .memory import MemoryLedger

        return MemoryLedger(rest, notebook=notebook, user=user)
    if url.startswith(FILE_SCHEMES) and rest.startswith("///"):
        from .keeper.ledger import KeeperLedger

        directory = directory_of(url, rest)
        if scheme == "sqlite":
            log.warning(
                "GPU_LEDGER=%s is read as keeper://%s: a process keeps the book now", url, directory
            )
        require_private(directory)
        return KeeperLedger(directory, notebook=notebook, user=user)
    if scheme in _REDIS_SCHEMES and rest.startswith("//"):
        return _open_redis(url, notebook=notebook, user=user)
    if url.startswith(FILE_SCHEMES):
        raise _unknown_url(url, path=rest.lstrip("/"))
    raise _unknown_url(url, path="" if colon else url)


def _open_redis(url: str, *, notebook: str, user: str) -> Ledger:
    try:
        import_whole(f"{__name__}.redis.ledger")
        from .redis.ledger import RedisLedger
    except ModuleNotFoundError as error:
        raise LedgerUnavailable(
            "a ledger in Redis needs the package redis, which is not installed.\n"
            "  Install it:  pip install 'gpu-console[redis]'",
            path=url.partition(":")[0],
        ) from error
    require_private(split_redis_url(url)[1])
    return RedisLedger(url, notebook=notebook, user=user)


def _unknown_url(url: str, *, path: str) -> BadSetting:
    """The error for a URL that names no ledger.

    `path` is the part of the URL that looks like a path; it may be empty.
    """
    from ..settings import masked

    suggestion = ""
    if path:
        suggestion = f"; for this path: keeper://{os.path.abspath(os.path.expanduser(path))}"
    return BadSetting(
        "GPU_LEDGER",
        masked(url),
        f"memory:, memory:NAME, keeper:///ABSOLUTE/DIRECTORY or redis://HOST:PORT/DB{suggestion}",
    )
