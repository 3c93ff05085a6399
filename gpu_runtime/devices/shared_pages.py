"""Pages in host memory that several processes of one user share.

The pages are in a file in /dev/shm that has no name. A process opens the file through the
descriptor of another process that has the file open. The system frees the pages when the last of
these processes closes the file or dies, for whatever reason. So no process has to remove anything.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .process_memory import Block, Memory, Region, pinned

DIRECTORY = "/dev/shm"


class SharedPages:
    """A file without a name in /dev/shm, open in this process."""

    def __init__(self, file: int) -> None:
        """`file` is the descriptor, which this object closes."""
        self.file = file
        found = os.fstat(file)
        self.size, self.inode = found.st_size, found.st_ino
        self._blocks: weakref.WeakSet[Block] = weakref.WeakSet()

    def __del__(self) -> None:
        os.close(self.file)

    @classmethod
    def create(cls, size: int) -> SharedPages | None:
        """New pages for `size` bytes; None if /dev/shm does not exist or has too little room."""
        try:
            file = os.open(DIRECTORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except (OSError, AttributeError):  # the system has no such files
            return None
        try:
            # Every page is reserved now. Otherwise a write into a full /dev/shm ends the process.
            os.posix_fallocate(file, 0, size)
        except OSError:  # /dev/shm has no room; the caller keeps a copy of its own
            os.close(file)
            return None
        return cls(file)

    def write(self, at: int, content: memoryview) -> None:
        """Writes `content` at the offset `at`. Raises OSError."""
        done = 0
        while done < len(content):
            done += os.pwrite(self.file, content[done : done + (64 << 20)], at + done)

    def seal(self) -> None:
        """Ends the writing. `untouched` notices each later write. Raises OSError."""
        os.utime(self.file, ns=(0, 0))

    @property
    def untouched(self) -> bool:
        """Whether no process has written the pages since `seal`, which sets the file's time to 0.

        A write sets this time to now, but one through a MAP_SHARED mapping only later. So a process
        with a card, which alone makes such mappings, sets it to now before it makes one.
        """
        return os.fstat(self.file).st_mtime_ns == 0

    def read(self, at: int, size: int) -> bytes:
        """At most `size` bytes at the offset `at`. Raises OSError."""
        return os.pread(self.file, size, at)

    def blocks(self, memory: Memory, places: Sequence[tuple[int, int]]) -> list[Any]:
        """ctypes arrays over the pages at these `places`, pairs of offset and size.

        The bytes of the arrays are counted in `memory`, which is the host's memory. The pages stay
        mapped until the last array is gone. Raises OutOfMemory and OSError.
        """
        counted = memory.allocate_row([size for _, size in places])
        region = self._mapped(memory)
        self._blocks.update(counted)
        return [_array(region, at, block) for (at, _), block in zip(places, counted, strict=True)]

    def used_bytes(self) -> int:
        """The bytes of the arrays from `blocks` that this process still has."""
        return sum(block.size for block in self._blocks)

    def _mapped(self, memory: Memory) -> Region:
        # With a card, the pages are registered with the driver, so they must be the file's own
        # pages (MAP_SHARED). No code can write such pages, because every access to offloaded
        # weights raises an error. Without a card, the user can write the weights. In this case
        # MAP_PRIVATE gives this process its own copy of each written page.
        kind = mmap.MAP_SHARED if memory.pinned else mmap.MAP_PRIVATE
        if memory.pinned:
            os.utime(self.file)
        region = Region(self.file, self.size, flags=kind)
        region.start = ctypes.addressof(ctypes.c_ubyte.from_buffer(region))
        region.pages = self
        if memory.pinned:
            region.leave_out_of_forks()
            pinned(region, touched=True)
            region.make_writable(False)
        memory.add_region(region)
        return region


def _array(region: Region, at: int, block: Block) -> Any:
    array = (ctypes.c_ubyte * block.size).from_buffer(region, at)
    array.block = block
    return array


def held_by(pids: Iterable[int]) -> Iterator[SharedPages]:
    """The shared pages that the processes `pids` hold, if they are processes of this user.

    An open file of a process counts only if this user owns the file, no other user may open the
    file, and the file is in /dev/shm without a name.
    """
    for pid in pids:
        directory = f"/proc/{pid}/fd"
        try:
            names = os.listdir(directory)
        except OSError:  # the process has ended, or belongs to another user
            continue
        for name in names:
            pages = _opened(f"{directory}/{name}")
            if pages is not None:
                yield pages


def _opened(path: str) -> SharedPages | None:
    try:
        if not os.readlink(path).startswith(f"{DIRECTORY}/#"):
            return None
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:  # the process has closed it, or it belongs to another user
        return None
    found = os.fstat(file)
    ours = found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode)
    if not ours or found.st_mode & 0o077 or found.st_nlink:
        os.close(file)
        return None
    return SharedPages(file)
