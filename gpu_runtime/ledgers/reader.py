"""Reads a book without being an owner: no lock file, no socket, no repair, no write.

The reader is for programs that only watch. While the book is being written or rebuilt, `look` may
return None, and the program has to call it again.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

from ..errors import GpuError
from ..facts import Book
from ..threads import import_whole
from .location import FILE_SCHEMES, split_redis_url

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
        from .redis.connection import RedisConnection
        from .redis.scripts import PAGE, look_at

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
