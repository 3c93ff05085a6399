"""Between the keeper and its clients: frames on sockets, the book in sealed shared memory, a keeper's start.

A frame is the length as four bytes, then a message.

The keeper alone writes the memory; every client maps it to read. The memory has two halves, each with a page:
a prefix, an index of the page's pieces, the pieces. The keeper writes the half that nobody should read now, and
makes it valid last. A reader takes the newer valid half, and copies the pieces that it does not have. The prefix
has a checksum of the index, and the index one of each piece. So a page that changed during the copy is noticed,
and a prefix of which only a part is written.

The memory outlives the keeper: every client holds it. The next keeper finds it among the open files
of its user's processes, and goes on with the newest page.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ...files import child_environment, open_files
from ..pieces import UNREADABLE, Head, Page, Piece, joined, page_at

SERVER = "gpu_runtime.ledgers.keeper.server"  # the module that a keeper runs
SOCKET = "keeper.sock"
WANTED = "keeper.wanted"  # a member asks the service for a keeper, by this file
MOST_FRAME_BYTES = 4 << 20
HANGING_SECONDS = 5.0  # a keeper that does not answer for so long is ended, and replaced
_LENGTH = struct.Struct("<I")


def frame(content: bytes) -> bytes:
    """`content` with its length in front."""
    return _LENGTH.pack(len(content)) + content


def frames_in(received: bytearray) -> Iterator[bytes]:
    """Takes the whole frames out of `received`. Raises ValueError for one that is too long."""
    while len(received) >= _LENGTH.size:
        [size] = _LENGTH.unpack_from(received)
        if size > MOST_FRAME_BYTES:
            raise ValueError(f"a frame of {size} bytes")
        end = _LENGTH.size + size
        if len(received) < end:
            return
        content = bytes(received[_LENGTH.size : end])
        del received[:end]
        yield content


@contextmanager
def socket_path(directory: Path, name: str) -> Iterator[str]:
    """A short path to `name` in `directory`: a socket's path may have only 107 bytes."""
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def open_log(directory: Path) -> BinaryIO:
    """The file that a keeper prints to. Raises OSError."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(os.open(directory / "keeper.log", flags, 0o600), "ab")


def spawn(arguments: list[str], log: int, **inherited: int) -> subprocess.Popen[bytes]:
    """A new process of `server.py` with these `arguments`. It prints to the descriptor `log`.

    Its environment has a variable GPU_KEEPER_… for each descriptor that is `inherited`. Raises OSError.
    """
    return subprocess.Popen(
        [sys.executable, "-m", SERVER, *arguments],
        # In the notebook's directory, a module of the user could hide a standard module.
        cwd="/",
        env={
            **child_environment(),
            **{f"GPU_KEEPER_{name}": str(descriptor) for name, descriptor in inherited.items()},
        },
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=list(inherited.values()),
        start_new_session=True,  # else the stop button would interrupt the keeper too
    )


# -- the book in shared memory ---------------------------------------------------------------------


MOST_BYTES = 4 << 20  # of one page
_PREFIX = struct.Struct("<QII")  # revision (0: not valid), bytes of the index, its checksum
_WHOLE = 2 * MOST_BYTES
_TRIES = 1000  # a reader that finds no whole page so often reads memory of another program
# No more seals, no shrinking, no growing, no new map for writing. Python has no name for the last one.
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | 0x10


class Torn(Exception):
    """Raised for memory without a whole page."""


class Reader:
    """A map of the memory behind a descriptor."""

    def __init__(self, descriptor: int) -> None:
        """Maps the memory; the descriptor can be closed then. Raises OSError, ValueError."""
        self._memory = mmap.mmap(descriptor, _WHOLE, prot=mmap.PROT_READ)

    def revision(self) -> int:
        """The revision of the newest page."""
        return max(self._prefix(0)[0], self._prefix(1)[0])

    def page(self, known: int = 0) -> Page:
        """The newest page, with the pieces that changed after the revision `known`. Raises Torn."""
        for _ in range(_TRIES):
            for half in sorted((0, 1), key=self._prefix, reverse=True):
                head = self._prefix(half)
                if head.revision:
                    with suppress(ValueError, *UNREADABLE):  # it is written just now
                        start = half * MOST_BYTES + _PREFIX.size
                        return page_at(self._memory, start, head, known)
        raise Torn

    def _prefix(self, half: int) -> Head:
        return Head(*_PREFIX.unpack_from(self._memory, half * MOST_BYTES))

    def close(self) -> None:
        """Unmaps the memory."""
        self._memory.close()


class Writer:
    """New memory for one book. Only this object can write it."""

    def __init__(self, name: str) -> None:
        """Makes the memory. `name` distinguishes the books of a host. Raises OSError."""
        self.descriptor = os.memfd_create(_file_name(name), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, _WHOLE)
        self._memory = mmap.mmap(self.descriptor, _WHOLE)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)

    def write(self, revision: int, pieces: Mapping[str, Piece]) -> None:
        """Publishes a page. Raises ValueError if it is too large; the last page then stays."""
        head, whole = joined(revision, pieces)
        if len(whole) + _PREFIX.size > MOST_BYTES:
            raise ValueError(f"the book takes {len(whole)} bytes, and {MOST_BYTES} are the most")
        start = (revision % 2) * MOST_BYTES
        _PREFIX.pack_into(self._memory, start, 0, 0, 0)
        self._memory[start + _PREFIX.size : start + _PREFIX.size + len(whole)] = whole
        _PREFIX.pack_into(self._memory, start, *head)

    def close(self) -> None:
        """Closes the memory here. It ends with the last process that has it."""
        self._memory.close()
        os.close(self.descriptor)


def newest(name: str) -> Page | None:
    """The newest page of the book `name` that a process of this user still has; None without one.

    Memory that another user made is left out, because that user could have written anything.
    """
    found: list[Page] = []
    seen: set[int] = set()
    wanted = f"/memfd:{_file_name(name)} (deleted)"
    for process in filter(str.isdigit, os.listdir("/proc")):
        for path, target in open_files(process):
            if target == wanted:
                with suppress(OSError, Torn, ValueError):  # closed meanwhile, or not a whole page
                    page = _page_behind(path, seen)
                    found += [page] if page else []
    return max(found, key=lambda page: page.revision, default=None)


def _page_behind(path: str, seen: set[int]) -> Page | None:
    """The page in the memory file `path`; None if it is not sealed by this user, or was read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        file = os.fstat(descriptor)
        is_ours = stat.S_ISREG(file.st_mode) and file.st_uid == os.geteuid()
        if not is_ours or file.st_ino in seen:
            return None
        seen.add(file.st_ino)
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            return None
        reader = Reader(descriptor)
        try:
            return reader.page()
        finally:
            reader.close()
    finally:
        os.close(descriptor)


def _file_name(name: str) -> str:
    return f"gpu-console-{name}"


def book_name(directory: Path) -> str:
    """The name of the book in `directory`, for its memory and for the keeper's abstract address."""
    return f"{zlib.crc32(os.fsencode(os.path.realpath(directory))):08x}-{os.geteuid()}"
