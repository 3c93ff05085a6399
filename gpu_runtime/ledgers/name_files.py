"""The files with the names of the models that each owner can load: `owners/ID.names`.

The names are not in the book. There may be 20,000 names, and all processes would read and write
them with the book, although only a request from another process needs them. Each line of the file
is one change: `+"qwen"` adds a name, `-"qwen"` removes it, and `+["qwen", 8589934592, 5]` adds a
name with the model's size in bytes and its importance. So a new name costs one short write, however
many names there are.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..facts import NORMAL, UNDECLARED, Declared
from .liveness import Life, life
from .owner_files import Beside, write_all

MOST_BYTES = 8 << 20  # a larger file was not written by gpu-console
CHECK_SECONDS = 10.0  # between two checks whether this owner's file was deleted
SPARE_LINES = 64  # lines of removed names after which the file is written again

Names = dict[str, Declared]


class _Seen(NamedTuple):
    """An owner's file as it was last read."""

    inode: int
    offset: int  # offset of the first byte that was not read yet
    names: Names


class NameFiles:
    """Publishes the names of one owner, and reads the names of all owners. Thread-safe."""

    def __init__(self, owners: Path, group: int | None) -> None:
        """`owners` is the directory `LEDGER/BOOT-ID/owners`.

        `group` is the group that shares the ledger, or None.
        """
        self._files = Beside(owners, "names", group)
        self._lock = threading.Lock()
        self._written: Names = {}
        self._lines = 0
        self._checked_at = float("-inf")
        self._fd = -1
        self._close: Callable[[], object] = int  # closes the descriptor; `int` does nothing
        self._seen: dict[str, _Seen] = {}

    def add(self, id: str, name: str, declared: Declared) -> None:
        """Adds `name` to the names of this owner, `id`. Raises OSError."""
        with self._lock:
            if self._written.get(name) == declared:
                return
            if self._fd < 0:
                self._write_anew(id, {name: declared})
            else:
                self._append(added={name: declared}, removed=[])

    def publish(self, id: str, names: Mapping[str, Declared]) -> None:
        """Replaces the names of this owner, `id`, by `names`. Raises OSError.

        If the names are unchanged, the file is looked for at most every CHECK_SECONDS, and written
        again if it was deleted.
        """
        with self._lock:
            if not names and self._fd < 0:
                return
            wanted = dict(names)
            same = wanted == self._written
            now = time.monotonic()
            if same and now - self._checked_at < CHECK_SECONDS:
                return
            self._checked_at = now
            if not self._in_place(id) or self._lines > 2 * len(wanted) + SPARE_LINES:
                self._write_anew(id, wanted)
            elif not same:
                added = {
                    name: declared
                    for name, declared in wanted.items()
                    if self._written.get(name) != declared
                }
                removed = [name for name in self._written if name not in wanted]
                self._append(added, removed)

    def withdraw(self, id: str) -> None:
        """Removes the file of this owner, `id`."""
        self._files.withdraw(id)

    def read(self) -> dict[str, Names]:
        """The names of the living owners, by owner id. Only new lines of a file are read."""
        found = {}
        for id in self._files.ids():
            names = self._files.read(id, MOST_BYTES, partial(self._new, id))
            if names and life(self._files.owners / id) is Life.ALIVE:
                found[id] = names
        self._seen = {id: seen for id, seen in self._seen.items() if id in found}
        return found

    def _new(self, id: str, fd: int, stat: os.stat_result) -> Names:
        seen = self._seen.get(id)
        if seen is None or seen.inode != stat.st_ino or seen.offset > stat.st_size:
            seen = _Seen(stat.st_ino, 0, {})
        if seen.offset == stat.st_size:
            return seen.names
        content = os.pread(fd, stat.st_size - seen.offset, seen.offset)
        whole, newline, _ = content.rpartition(b"\n")  # the last line may be unfinished
        names = _changed(seen.names, whole.split(b"\n"))
        self._seen[id] = _Seen(stat.st_ino, seen.offset + len(whole) + len(newline), names)
        return names

    # The methods below are called with the lock held.

    def _in_place(self, id: str) -> bool:
        """Whether this owner's file is still at its path, where other processes look for it."""
        if self._fd < 0:
            return False
        try:
            return os.stat(self._files.path(id)).st_ino == os.fstat(self._fd).st_ino
        except OSError:  # the file was deleted
            return False

    def _write_anew(self, id: str, written: Names) -> None:
        lines = [_line(name, declared) for name, declared in written.items()]
        fd = self._files.replace(id, b"".join(lines))
        self._close()
        self._fd, self._written, self._lines = fd, dict(written), len(written)
        self._close = weakref.finalize(self, os.close, fd)
        self._close.atexit = False

    def _append(self, added: Names, removed: list[str]) -> None:
        lines = [b"-%s\n" % json.dumps(name).encode() for name in removed]
        lines += [_line(name, declared) for name, declared in added.items()]
        write_all(self._fd, b"".join(lines))
        self._lines += len(lines)
        for name in removed:
            self._written.pop(name, None)
        self._written.update(added)


def _line(name: str, declared: Declared) -> bytes:
    value: Any = name
    if declared != UNDECLARED:
        value = [name, declared.bytes, declared.importance]
    return b"+%s\n" % json.dumps(value).encode()


def _changed(names: Names, lines: Iterable[bytes]) -> Names:
    """The `names` after the changes in `lines`. An unreadable line changes nothing."""
    after = dict(names)
    for line in lines:
        try:
            value = json.loads(line[1:])
        except ValueError:  # a line that was cut off, as on a full disk
            continue
        name, size, importance = value if _has_facts(value) else (value, 0, NORMAL)
        if not isinstance(name, str):
            continue
        if line.startswith(b"+"):
            after[name] = Declared(size, importance)
        else:
            after.pop(name, None)
    return after


def _has_facts(value: Any) -> bool:
    """Whether `value` is a name with a size and an importance.

    The check is needed because another user may have written the file.
    """
    if not isinstance(value, list) or [type(part) for part in value] != [str, int, int]:
        return False
    return value[1] >= 0
