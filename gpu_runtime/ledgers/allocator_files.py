"""The files with allocator maps: one file for each owner, `owners/ID.map`, replaced as a whole.

An allocator map lists the blocks of a process's memory allocator. Maps are not in the book, because
no decision uses them. If maps were in the book, every kernel would read and decode them after every
allocation. A map counts only if the owner's user wrote the map, and only while the owner lives.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import msgspec

from ..facts import AllocatorMap
from .liveness import Life, life
from .owner_files import Beside

# Bytes of one owner's file. A larger file was not written by gpu-console: a map of 8,192 blocks
# takes at most half of MOST_BYTES.
MOST_BYTES = 1 << 20
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(tuple[AllocatorMap, ...]).decode
Maps = tuple[AllocatorMap, ...]
_Stamp = tuple[int, int, int]  # inode, time of the last write, size


class MapFiles:
    """One owner's view of the maps in the directory `owners` (`LEDGER/BOOT-ID/owners`)."""

    def __init__(self, owners: Path, group: int | None) -> None:
        """`group` is the group that shares the ledger, or None."""
        self._files = Beside(owners, "map", group)
        self._seen: dict[str, tuple[_Stamp, Maps]] = {}

    def publish(self, id: str, maps: Maps) -> None:
        """Writes `maps` as the only maps of the owner `id`. Raises OSError."""
        os.close(self._files.replace(id, _encode(maps)))

    def withdraw(self, id: str) -> None:
        """Removes the maps of the owner `id`, if there are any."""
        self._files.withdraw(id)

    def read(self) -> dict[str, Maps]:
        """The maps of the living owners, by owner id. A file is decoded again only if it changed."""
        found = {}
        for id in self._files.ids():
            maps = self._files.read(id, MOST_BYTES, partial(self._new, id))
            if maps is not None and life(self._files.owners / id) is Life.ALIVE:
                found[id] = maps
        self._seen = {id: seen for id, seen in self._seen.items() if id in found}
        return found

    def _new(self, id: str, fd: int, stat: os.stat_result) -> Maps | None:
        stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        seen = self._seen.get(id)
        if seen is None or seen[0] != stamp:
            try:
                maps = _decode(os.read(fd, MOST_BYTES))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                return None  # another version wrote it, or it is damaged
            own = tuple(map for map in maps if map.owner == id)
            seen = (stamp, own)
            self._seen[id] = seen
        return seen[1]
