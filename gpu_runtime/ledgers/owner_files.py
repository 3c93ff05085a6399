"""An owner's files beside its lock file: `owners/ID.SUFFIX`.

Other processes read the files. A file counts only if it belongs to the user who owns the lock file.
Nothing here decodes the content of the files.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class Beside:
    """The files of one kind, `ID.SUFFIX`, in the directory `owners` (`LEDGER/BOOT-ID/owners`)."""

    def __init__(self, owners: Path, suffix: str, group: int | None) -> None:
        """`group` is the group that shares the ledger, or None."""
        self.owners, self.suffix, self.group = owners, suffix, group

    def path(self, id: str) -> Path:
        """The file of the owner `id`."""
        return self.owners / f"{id}.{self.suffix}"

    def ids(self) -> list[str]:
        """The ids of the owners that have a file of this kind; empty without the directory."""
        try:
            names = os.listdir(self.owners)
        except OSError:  # the directory was deleted
            return []
        ending = f".{self.suffix}"
        return [name.removesuffix(ending) for name in names if name.endswith(ending)]

    def replace(self, id: str, content: bytes) -> int:
        """Replaces the file of the owner `id` by a file with this `content`. Raises OSError.

        Returns a descriptor with which the caller can append to the new file.
        """
        draft = self.owners / f".new-{secrets.token_hex(4)}"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(draft, flags, 0o600)
        try:
            if self.group is not None:
                os.fchown(fd, -1, self.group)
                os.fchmod(fd, 0o640)
            write_all(fd, content)
            os.rename(draft, self.path(id))
            return fd
        except BaseException:
            os.close(fd)
            draft.unlink(missing_ok=True)
            raise

    def withdraw(self, id: str) -> None:
        """Removes the file of the owner `id`, if there is one."""
        try:
            os.unlink(self.path(id))
        except OSError:
            pass  # there is no such file, or another user owns it

    def read(self, id: str, most_bytes: int, read: Callable[[int, os.stat_result], T]) -> T | None:
        """The result of `read(descriptor, stat)` for the file of the owner `id`.

        The result is None if the file does not exist, is no plain file, belongs to another user than
        the owner's lock file, or is larger than `most_bytes`.
        """
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(self.path(id), flags)
        except OSError:  # the owner has no such file
            return None
        try:
            found = os.fstat(fd)
            same_user = found.st_uid == os.lstat(self.owners / id).st_uid
            if not same_user:
                return None  # written by another member
            if not stat.S_ISREG(found.st_mode) or found.st_size > most_bytes:
                return None  # not written by gpu-console
            return read(fd, found)
        except OSError:  # the owner has ended, and its files are removed
            return None
        finally:
            os.close(fd)


def write_all(fd: int, content: bytes) -> None:
    """Writes the whole `content` to the descriptor `fd`. Raises OSError."""
    written = 0
    while written < len(content):
        written += os.write(fd, content[written:])
