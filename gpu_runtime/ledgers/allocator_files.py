"""The maps of allocators that owners put beside the book: a file an owner, `owners/ID.map`, replaced whole.

They lie beside the book, not in it: nobody decides by them, and a page that carried them would be read and decoded by
every kernel after every allocation. Only what its owner's user wrote counts, and only while that owner lives.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

import msgspec

from ..facts import AllocatorMap
from .liveness import Life, life

MOST_BYTES = (
    1 << 20
)  # of one owner's: more is no map of ours; one of 8,192 blocks has half of that at most
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(tuple[AllocatorMap, ...]).decode
Maps = tuple[AllocatorMap, ...]


class MapFiles:
    """One owner's view of the maps in `LEDGER/BOOT-ID/owners`; `group` shares the ledger, where one does."""

    def __init__(self, owners: Path, group: int | None) -> None:
        self.owners, self.group = owners, group
        self._seen: dict[str, tuple[tuple[int, int, int], Maps]] = {}

    def publish(self, id: str, maps: Maps) -> None:
        """Puts this owner's maps in the place of its last. Raises OSError."""
        draft = self.owners / f".new-{secrets.token_hex(4)}"
        fd = os.open(
            draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            with open(fd, "wb") as file:
                if self.group is not None:
                    os.fchown(fd, -1, self.group)
                    os.fchmod(fd, 0o640)
                file.write(_encode(maps))
            os.rename(draft, self.owners / f"{id}.map")
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    def withdraw(self, id: str) -> None:
        """Removes this owner's maps, if there are any."""
        try:
            os.unlink(self.owners / f"{id}.map")
        except OSError:
            pass

    def read(self) -> dict[str, Maps]:
        """By owner id, the maps of those that live. One that has not changed is not read again."""
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

    def _read(self, id: str) -> Maps | None:
        try:
            fd = os.open(
                self.owners / f"{id}.map",
                os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW,
            )
        except OSError:
            return None
        try:
            is_, owner = os.fstat(fd), os.lstat(self.owners / id)
            if (
                not stat.S_ISREG(is_.st_mode)
                or is_.st_uid != owner.st_uid
                or is_.st_size > MOST_BYTES
            ):
                return None  # another member's work, or nothing of ours
            stamp = (is_.st_ino, is_.st_mtime_ns, is_.st_size)
            seen = self._seen.get(id)
            if seen is None or seen[0] != stamp:
                told = _decode(os.read(fd, MOST_BYTES))
                seen = self._seen[id] = (stamp, tuple(one for one in told if one.owner == id))
            return seen[1]
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
        finally:
            os.close(fd)
