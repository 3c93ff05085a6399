"""A file on a local disk that has the bytes of storages that left their card, so that they take no RAM.

The file has no name. No other user can open it, no cleaner of temporary files removes it, and the
system frees its blocks when the process ends, however it ends. The space is reserved before the
first byte is written. The file is written and read in pieces, past the page cache where the file
system allows it. Each piece has a digest. After the write all pieces are read from the disk and
compared, and only then may the caller free the bytes in RAM.

The digest is the piece's CRC-32 and the sum of its 64-bit words. Other bytes in its place, such as
those of another file after a lost write, pass both with a probability of 2⁻⁹⁶. Bytes in another
order have the same sum, and pass the CRC with 2⁻³². A burst of up to 32 wrong bits never passes. A
digest against an attacker would add nothing: only this user's processes can open the file, and they
can write this process's memory too. Measured on one core: CRC-32 3.9 GiB/s, the sum 10, SHA-256 1.7.

An encrypted file (`GPU_PARK_ENCRYPT`) has the same layout. Each piece is encrypted in its buffer by
AES-256-GCM, whose tag is then the digest. The key is new for each file and is never written, so a
nonce is the number of a piece. Measured on a busy machine, in turns: 1 GiB is written and compared
in 1.8 s, against 2.5 s for a plain file.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import mmap
import os
import tempfile
import time
import weakref
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...devices.allocators import rounded
from ...threads import import_whole, side_by_side
from ...units import MIB
from .. import base
from ..base import NotStill
from . import streams
from .storages import ALIGNED_BYTES

PIECE_BYTES = 4 * MIB
WORKERS = 8  # threads that copy, digest, write or read, each with a buffer of one piece
_WORDS_AT_ONCE = 32752  # for more, torch uses threads of its own, which wait for one another
BLOCK_BYTES = 4096  # what is written past the page cache is a multiple of it

# Takes the place in the file, and a buffer for its bytes there.
Part = Callable[[int, torch.Tensor], None]


class Damaged(Exception):
    """Bytes of the file are not what was written, or cannot be read."""

    def __init__(self, start: int, end: int, why: str) -> None:
        """The bytes are those from `start` to `end`. `why` is the end of a sentence about them."""
        super().__init__(why)
        self.start, self.end = start, end


class ParkFile:
    """A new file of `size` bytes in `directory`. It ends with this object and its mappings."""

    def __init__(self, directory: Path, size: int, *, encrypted: bool = False) -> None:
        """Reserves the space. Raises OSError, for example if the disk is full."""
        self.directory, self.size = directory, size
        self._cipher = _Cipher() if encrypted else None
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        self._digests: dict[int, Any] = {}  # of each piece: its digest, or its tag
        _open_files.add(self)
        fd = self._file.fileno()
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, rounded(size, BLOCK_BYTES))
            with contextlib.suppress(OSError):  # this file system has only the page cache
                flags = fcntl.fcntl(fd, fcntl.F_GETFL)
                fcntl.fcntl(fd, fcntl.F_SETFL, flags | getattr(os, "O_DIRECT", 0))
        except BaseException:
            self._file.close()
            raise

    def write(self, fill: Part) -> float:
        """Writes the file. `fill` puts the bytes of one piece into a buffer, [n] uint8.

        It is called for each piece once, in several threads. Then all pieces are read and compared.
        Returns the seconds of this reading. Raises OSError, Damaged and the errors of `fill`.
        """
        fd = self._file.fileno()

        def put(number: int, pages: mmap.mmap, buffer: torch.Tensor) -> None:
            """Writes the piece `number`."""
            start, count = number * PIECE_BYTES, self._bytes_of(number)
            fill(start, buffer[:count])
            done, end = 0, rounded(count, BLOCK_BYTES)
            with memoryview(pages) as content:
                if self._cipher:
                    self._digests[number] = self._cipher.encrypt(number, content, end)
                else:
                    self._digests[number] = _digest(content[:end], buffer[:end])
                while done < end:
                    done += os.pwrite(fd, content[done:end], start + done)

        self._side_by_side(put, range(self._pieces))
        os.fsync(fd)
        began = time.perf_counter()
        if hasattr(os, "posix_fadvise"):  # without it, a cached page could be compared with itself
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self.read(lambda start, buffer: None)
        return time.perf_counter() - began

    def read(self, drain: Part, ranges: Iterable[tuple[int, int]] | None = None) -> None:
        """Reads and compares the pieces, and calls `drain` with each of them, in several threads.

        `ranges` limits this to the pieces with bytes from a start to an end. Raises Damaged.
        """
        numbers: Iterable[int] = range(self._pieces)
        if ranges is not None:
            numbers = {
                number
                for start, end in ranges
                for number in range(start // PIECE_BYTES, -(-end // PIECE_BYTES))
            }
        fd = self._file.fileno()

        def get(number: int, pages: mmap.mmap, buffer: torch.Tensor) -> None:
            """Reads the piece `number`."""
            start, count = number * PIECE_BYTES, self._bytes_of(number)
            damaged = partial(Damaged, start, start + count)
            done, end = 0, rounded(count, BLOCK_BYTES)
            with memoryview(pages) as content:
                while done < end:
                    try:
                        size = os.preadv(fd, [content[done:end]], start + done)
                    except OSError as error:
                        raise damaged(f"cannot be read: {error.strerror}") from error
                    if not size:
                        raise damaged("are missing: the file is too short")
                    done += size
                written = self._digests[number]
                if self._cipher:
                    same = self._cipher.decrypts(number, content, end, written)
                else:
                    same = _digest(content[:end], buffer[:end]) == written
                if not same:
                    raise damaged("are not what was written")
            drain(start, buffer[:count])

        self._side_by_side(get, sorted(numbers))

    def mapped(self) -> mmap.mmap:
        """All pages of a file that is not encrypted, mapped. A page takes RAM only while it is used."""
        return mmap.mmap(
            self._file.fileno(), rounded(self.size, BLOCK_BYTES), flags=mmap.MAP_PRIVATE
        )

    @property
    def _pieces(self) -> int:
        return -(-self.size // PIECE_BYTES)

    def _bytes_of(self, number: int) -> int:
        return min(PIECE_BYTES, self.size - number * PIECE_BYTES)

    def _side_by_side(
        self, work: Callable[[int, mmap.mmap, torch.Tensor], None], numbers: Sequence[int]
    ) -> None:
        """Calls `work` for the pieces `numbers`, in WORKERS threads. Raises the first error."""
        errors: list[BaseException] = []

        def worker(own: Sequence[int]) -> None:
            """Does the work for the pieces `own`, until one fails in any thread."""
            try:
                most = min(PIECE_BYTES, rounded(self.size, BLOCK_BYTES))
                pages = _pages(most + (BLOCK_BYTES if self._cipher else 0))
                buffer = torch.frombuffer(pages, dtype=torch.uint8)
                for number in own:
                    if errors:
                        return
                    work(number, pages, buffer)
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                errors.append(error)

        side_by_side([partial(worker, numbers[n::WORKERS]) for n in range(WORKERS)])
        if errors:
            try:
                raise errors.pop(0)
            finally:
                del errors[:]  # the traceback has this frame


_open_files: weakref.WeakSet[ParkFile] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child that outlives its parent would keep the blocks. A mapping of a simulated card keeps them."""
    for file in list(_open_files):
        file._file.close()


os.register_at_fork(after_in_child=_close_in_child)


# -- the storages in a file


class Stored(NamedTuple):
    """The place of a storage's bytes in a file."""

    file: ParkFile
    start: int
    bytes: int


class Written(NamedTuple):
    """A file with the bytes of offloaded storages, which they may move to; see `written`."""

    stored: Mapping[int, Stored]  # by the key of the storage
    exchanges: int  # what `exchanges` of the handle was
    seconds: float  # what the write and the comparison took
    read_seconds: float  # what the comparison took

    def mapped(self) -> Mapping[int, torch.Tensor]:
        """The bytes of each storage, [nbytes] uint8, mapped from a file that is not encrypted."""
        pages = {place.file: place.file.mapped() for place in self.stored.values()}
        return {
            key: torch.frombuffer(
                pages[place.file], dtype=torch.uint8, count=place.bytes, offset=place.start
            )
            for key, place in self.stored.items()
        }


@contextlib.contextmanager
def in_place(handle: Any, exchanges: int) -> Iterator[None]:
    """While the block runs, no byte of the model `handle` is exchanged. Raises NotStill if some were since."""
    with handle.gate:
        if handle.exchanges != exchanges:
            raise NotStill("its memory returned")
        yield


def written(
    handle: Any,
    contents: Mapping[int, Callable[[], torch.Tensor]],
    sizes: Sequence[int],
    exchanges: int,
    directory: Path,
    *,
    encrypted: bool,
) -> Written:
    """Writes storages of the model `handle` to a new file in `directory`, and compares the file with them.

    `contents` maps the key of each storage to a function that returns its bytes, [n] uint8, in host
    memory; `sizes` are their numbers of bytes. They stay there. `exchanges` was read with them.
    Raises OSError, Damaged of this module, and NotStill if bytes are exchanged meanwhile.
    """
    ends = [*itertools.accumulate([rounded(size, ALIGNED_BYTES) for size in sizes])]
    starts, reads = [0, *ends][:-1], [*contents.values()]
    began = time.perf_counter()
    file = ParkFile(directory, ends[-1] if ends else 0, encrypted=encrypted)

    def fill(start: int, buffer: torch.Tensor) -> None:
        """Copies the bytes from `start` on into the `buffer`."""
        with in_place(handle, exchanges):
            for i, part, inner in _overlaps(starts, sizes, start, len(buffer)):
                _copy_bytes(buffer[inner], reads[i]()[part])

    read_seconds = file.write(fill)
    stored = map(partial(Stored, file), starts, sizes)
    seconds = time.perf_counter() - began
    return Written(dict(zip(contents, stored, strict=True)), exchanges, seconds, read_seconds)


def read(rows: Iterable[tuple[int, Stored, torch.Tensor | None]]) -> None:
    """Copies each storage, a key and its place, to a tensor [nbytes] uint8; for None it only compares.

    Raises Damaged of `backends.base`, with the keys.
    """
    files: dict[ParkFile, list[tuple[int, Stored, torch.Tensor | None]]] = {}
    for row in rows:
        files.setdefault(row[1].file, []).append(row)
    for file, here in files.items():
        _read_file(file, sorted(here, key=lambda row: row[1].start))


def _read_file(file: ParkFile, rows: list[tuple[int, Stored, torch.Tensor | None]]) -> None:
    """As `read`, for storages in the same `file`, in their order there."""
    starts, sizes = [place.start for _, place, _ in rows], [place.bytes for _, place, _ in rows]

    def drain(start: int, buffer: torch.Tensor) -> None:
        """Copies the bytes in the `buffer` to the tensors that have some of them."""
        for i, part, inner in _overlaps(starts, sizes, start, len(buffer)):
            target = rows[i][2]
            if target is not None:
                _copy_bytes(target[part], buffer[inner])

    try:
        file.read(drain, [(start, start + size) for start, size in zip(starts, sizes, strict=True)])
    except Damaged as error:
        lost = [i for i, *_ in _overlaps(starts, sizes, error.start, error.end - error.start)]
        keys = frozenset([rows[i][0] for i in lost])
        size = sum([sizes[i] for i in lost])
        raise base.Damaged(f"{error}", file.directory, keys, size) from None
    finally:
        rows.clear()  # frames in the traceback of an error have this list


def _copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies `source`, uint8 on the CPU, to `target`. Between CPU tensors torch's own threads take no part.

    They wait for one another. On busy cores, several copies at a time took ten times as long.
    """
    if target.device.type == "cpu":
        start = torch._C._data_address(source) + source.storage_offset()  # it may refuse writes
        ctypes.memmove(target.data_ptr(), start, source.nbytes)
        return
    with streams.current_card(str(target.device)):
        target.copy_(source)


def _overlaps(
    starts: Sequence[int], sizes: Sequence[int], start: int, count: int
) -> Iterator[tuple[int, slice, slice]]:
    """The storages with bytes among the `count` bytes from `start` of a file in which they begin at `starts`.

    Yields for each its number, and where these bytes are: in the storage, and after `start`.
    """
    for i in range(max(0, bisect_right(starts, start) - 1), len(starts)):
        if starts[i] >= start + count:
            return
        low = max(start, starts[i])
        high = min(start + count, starts[i] + sizes[i])
        if low < high:
            yield i, slice(low - starts[i], high - starts[i]), slice(low - start, high - start)


def _pages(size: int) -> mmap.mmap:
    """New memory for a piece. In huge pages, the disk is read and written at twice the rate.

    Each request to the disk is then for memory that is contiguous.
    """
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # the system has none
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _digest(content: memoryview, same: torch.Tensor) -> tuple[int, int]:
    """The digest of `content`, which is also in the tensor `same`; a multiple of BLOCK_BYTES."""
    words = same.view(torch.int64).split(_WORDS_AT_ONCE)
    return zlib.crc32(content), sum([int(part.sum()) for part in words])


class _Cipher:
    """AES-256-GCM with a new key, for the pieces of one file.

    It works in place, and needs one AES block of room behind the bytes.
    """

    def __init__(self) -> None:
        import_whole("cryptography.hazmat.primitives.ciphers")
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        self.key = os.urandom(32)
        self._wrong = InvalidTag
        self._of = lambda number, tag=None: Cipher(
            algorithms.AES(self.key), modes.GCM(number.to_bytes(12, "big"), tag)
        )

    def encrypt(self, number: int, content: memoryview, count: int) -> bytes:
        """Encrypts the first `count` bytes of `content`, which is the piece `number`. Returns the tag."""
        encryptor = self._of(number).encryptor()
        encryptor.update_into(content[:count], content)
        encryptor.finalize()
        return bytes(encryptor.tag)

    def decrypts(self, number: int, content: memoryview, count: int, tag: bytes) -> bool:
        """Decrypts what `encrypt` made. Returns whether the bytes are those that were encrypted."""
        decryptor = self._of(number, tag).decryptor()
        decryptor.update_into(content[:count], content)
        try:
            decryptor.finalize()
        except self._wrong:  # the caller raises Damaged
            return False
        return True
