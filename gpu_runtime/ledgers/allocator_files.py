"""The allocator maps beside the book: one file per owner, `owners/ID.map`, replaced as a whole.

They are beside the book, not in it. No decision uses them, and a page that held them would be read
and decoded by every kernel after every allocation. A map counts only if the owner's user wrote it,
and only while that owner lives.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

import msgspec

from ..facts import AllocatorMap
from .liveness import Life, life

# Of one owner. A larger file is not one of our maps; a map of 8,192 blocks takes at most half of
# that.
MOST_BYTES = 1 << 20
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(tuple[AllocatorMap, ...]).decode
Maps = tuple[AllocatorMap, ...]
_Stamp = tuple[int, int, int]  # inode, time of the last write, size


class MapFiles:
    """One owner's view of the maps in the directory `owners` (`LEDGER/BOOT-ID/owners`)."""

    def __init__(self, owners: Path, group: int | None) -> None:
        """`group` is the one that shares the ledger, or None."""
        self.owners, self.group = owners, group
        self._seen: dict[str, tuple[_Stamp, Maps]] = {}

    def publish(self, id: str, maps: Maps) -> None:
        """Replaces the maps of the owner `id` by `maps`. Raises OSError."""
        draft = self.owners / f".new-{secrets.token_hex(4)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(draft, flags, 0o600)
        try:
            with open(fd, "wb") as file:
                if self.group is not None:
                    os.fchown(fd, -1, self.group)
                    os.fchmod(fd, 0o640)
                file.write(_encode(maps))
            os.rename(draft, self._file(id))
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    def withdraw(self, id: str) -> None:
        """Removes the maps of the owner `id`, if there are any."""
        try:
            os.unlink(self._file(id))
        except OSError:
            pass

    def read(self) -> dict[str, Maps]:
        """The maps of the living owners, by owner id. An unchanged file is not read again."""
        try:
            names = [name for name in os.listdir(self.owners) if name.endswith(".map")]
        except OSError:
            return {}
        found = {}
        for id in (name.removesuffix(".map") for name in names):
            maps = self._read(id)
            if maps is not None and life(self.owners / id) is Life.ALIVE:
                found[id] = maps
        self._seen = {id: seen for id, seen in self._seen.items() if id in found}
        return found

    def _file(self, id: str) -> Path:
        return self.owners / f"{id}.map"

    def _read(self, id: str) -> Maps | None:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(self._file(id), flags)
        except OSError:
            return None
        try:
            return self._read_open(id, fd)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
        finally:
            os.close(fd)

    def _read_open(self, id: str, fd: int) -> Maps | None:
        found = os.fstat(fd)
        same_user = found.st_uid == os.lstat(self.owners / id).st_uid
        if not same_user:
            return None  # written by another member
        if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
            return None  # not one of our maps
        stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
        seen = self._seen.get(id)
        if seen is None or seen[0] != stamp:
            maps = _decode(os.read(fd, MOST_BYTES))
            own = tuple(map for map in maps if map.owner == id)
            seen = (stamp, own)
            self._seen[id] = seen
        return seen[1]
