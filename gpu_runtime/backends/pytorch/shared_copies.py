"""Copies of models in host memory that the processes of a user share.

Processes that load the same unchanged files share one copy.

The shared pages contain a first page, the content of each storage, and an index with the digest of
each storage. The first page is written last. Without it other processes do not use the pages, so
they never use incomplete pages. If nothing has written to the pages since then, their content needs
no comparison. Otherwise a process that loads the model from them compares the digests.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from ...devices.process_memory import Memory
from ...devices.shared_pages import SharedPages, held_by
from ..formats.safetensors import Checkpoint
from . import storages as st
from .fingerprint import WORDS, digest

MAGIC = "gpu-console shared copy 1"
PAGE_BYTES = 4096
ALIGNED_BYTES = 512
WRITTEN_BYTES = 64 << 20  # written at a time, so that a load can be interrupted
LEAST_BYTES = 1 << 20  # a smaller model is not shared

Layout = tuple[tuple[Any, ...], ...]


class TornCopy(Exception):
    """Raised when the bytes of a shared copy differ from the bytes that its index describes."""


class _First(msgspec.Struct, frozen=True):
    """The first of the shared pages, which describes the pages and the place of the index."""

    magic: str
    index_at: int
    index_bytes: int
    # The last field is a text, because `_read` cuts off the zero bytes at the end of the page.
    content: str


class _Stored(msgspec.Struct, frozen=True):
    """The entry of one storage in the index. `layout` is a digest of the storage's layout."""

    layout: str
    at: int
    size: int
    digest: bytes
    # Of each tensor: name, dtype, offset in items, shape, strides.
    tensors: tuple[tuple[str, str, int, tuple[int, ...], tuple[int, ...]], ...]


def content_id(checkpoint: Checkpoint, dtype: Any) -> str:
    """An id of the unchanged files of a model and of the form to which their weights are converted.

    The form depends on the dtype and on the version of transformers. The keys of the digests are
    part of the id too, because processes compare their digests.
    """
    keys = digest(torch.ones(4, dtype=torch.uint8)).tolist()
    text = repr((checkpoint.stamps, str(dtype), version("transformers"), keys))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class CopiedPart(NamedTuple):
    """The shared pages that hold bytes of a loaded model, as a weak reference, and their size."""

    pages: weakref.ref[SharedPages]
    name: str
    bytes: int

    @property
    def claim(self) -> dict[str, Any]:
        """The fields of a lease about the shared pages: their name, size and bytes in use."""
        pages = self.pages()
        used = pages.used_bytes() if pages is not None else 0
        name, size = (self.name, self.bytes) if used else ("", 0)
        return {"copy": name, "copy_bytes": size, "copied_bytes": used}


def name_of(content: str, pages: SharedPages) -> str:
    """The name of `pages`, which differs for two copies of the files with the id `content`."""
    return f"{content[:16]}.{pages.inode}"


class SharedCopy:
    """The shared pages of one model: complete pages that were found, or new pages to be written."""

    def __init__(self, pages: SharedPages, content: str, index: tuple[_Stored, ...] = ()) -> None:
        """`index` describes the content of complete pages. New pages have no index."""
        self.pages, self.content = pages, content
        self.index = {stored.layout: stored for stored in index}
        self.is_new = not index
        self._adopted = False  # whether the model has the bytes of the pages, and no others
        self._places: dict[str, tuple[int, int]] = {}
        self._index_at = 0  # after all content, once that is written
        self._arrays: dict[str, Any] = {}  # by layout: the mapped bytes of complete pages

    @classmethod
    def found(cls, pids: Iterable[int], content: str) -> SharedCopy | None:
        """The complete copy with the id `content` that one of the processes `pids` has, or None."""
        for pages in held_by(pids):
            index = _read(pages, content)
            if index:
                return cls(pages, content, index)
        return None

    @classmethod
    def new(cls, groups: Sequence[st.Group], content: str) -> SharedCopy | None:
        """New pages for a copy of `groups`; None below LEAST_BYTES, and if /dev/shm has no room."""
        size = st.nbytes(groups)
        if size < LEAST_BYTES:
            return None
        rows = sum(-(-group.nbytes // (4 * WORDS)) for group in groups)
        slots = sum(len(group.slots) for group in groups)
        index = 16 * rows + 512 * (len(groups) + slots)
        pages = SharedPages.create(PAGE_BYTES + size + ALIGNED_BYTES * len(groups) + index)
        return None if pages is None else cls(pages, content)

    @property
    def bytes(self) -> int:
        """The bytes of all storages."""
        return sum(size for _, size in self._all_places().values())

    def _all_places(self) -> dict[str, tuple[int, int]]:
        return self._places or {key: (one.at, one.size) for key, one in self.index.items()}

    def fits(self, groups: Sequence[st.Group]) -> bool:
        """Whether the complete copy has exactly the storages `groups`."""
        wanted = {_key(group.layout): group.nbytes for group in groups}
        return wanted == {key: stored.size for key, stored in self.index.items()}

    @property
    def part(self) -> CopiedPart:
        """The bytes of the loaded model that are in the shared pages."""
        name = name_of(self.content, self.pages)
        return CopiedPart(weakref.ref(self.pages), name, self.bytes)

    def tensors(
        self,
        going: Sequence[st.Group],
        sources: Sequence[Tensor],
        host: Memory,
        progress: Callable[[int, int], None] | None,
    ) -> list[Tensor]:
        """The content of each of `going` in the shared pages, as a tensor [nbytes] of uint8.

        `sources` are the present bytes of `going`. New pages first get these bytes. The bytes of
        complete pages are compared with the sources, except sources that are in these pages
        already. `progress` is called as in `storages.copied`. Raises TornCopy if bytes differ.
        Also raises OutOfMemory and OSError.
        """
        if self.is_new:
            self._write(going, sources, progress)
        self.map(host)
        found = [_tensor(self._arrays.get(_key(group.layout))) for group in going]
        self._arrays = {}  # the tensors hold them
        pairs = [] if self.is_new else zip(sources, found, strict=True)
        for source, target in pairs:
            if source.data_ptr() != target.data_ptr() and not torch.equal(source, target):
                raise TornCopy(self.content)
        self._adopted = True
        return found

    def map(self, host: Memory) -> None:
        """Maps the pages, counted in `host`, into memory. Raises OutOfMemory and OSError."""
        if self._arrays:
            return
        full = {key: place for key, place in self._all_places().items() if place[1]}
        arrays = self.pages.blocks(host, list(full.values()))
        self._arrays = dict(zip(full, arrays, strict=True))

    def weights(self, names: Collection[str]) -> dict[str, Tensor]:
        """The tensors with these `names` in complete pages, which must be mapped.

        Tied weights share a storage in the result too.
        """
        found: dict[str, Tensor] = {}
        for key, stored in self.index.items():
            storage = _tensor(self._arrays.get(key)).untyped_storage()
            for name, dtype, offset, size, stride in stored.tensors:
                if name in names:
                    empty = torch.empty(0, dtype=getattr(torch, dtype.removeprefix("torch.")))
                    found[name] = empty.set_(storage, offset, size, stride)
        return found

    def _write(
        self,
        going: Sequence[st.Group],
        sources: Sequence[Tensor],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        at, done, total = PAGE_BYTES, 0, sum(source.nbytes for source in sources)
        for group, source in zip(going, sources, strict=True):
            self._places[_key(group.layout)] = (at, source.nbytes)
            content = memoryview(source.numpy())
            for start in range(0, source.nbytes, WRITTEN_BYTES):
                self.pages.write(at + start, content[start : start + WRITTEN_BYTES])
                done += min(WRITTEN_BYTES, source.nbytes - start)
                if progress:
                    progress(done, total)
            at += -(-source.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
        self._index_at = at

    def complete(self, given: Mapping[Layout, Tensor]) -> None:
        """Writes the index of new pages, so that other processes can use them.

        `given` has the digest of each storage, by the layout of the storage. If it lacks a storage
        of the pages, or if the index has no room, nothing is written. Raises OSError.
        """
        index = tuple(
            _Stored(key, *self._places[key], given[layout].numpy().tobytes(), _tensors(layout))
            for layout, key in ((layout, _key(layout)) for layout in given)
            if key in self._places
        )
        content = msgspec.msgpack.encode(index)
        whole = self._index_at and len(index) == len(self._places)
        if not whole or self._index_at + len(content) > self.pages.size:
            return
        self.pages.write(self._index_at, memoryview(content))
        first = _First(MAGIC, self._index_at, len(content), self.content)
        self.pages.write(0, memoryview(msgspec.msgpack.encode(first)))
        self.pages.seal()

    def proven(self, groups: Sequence[st.Group]) -> dict[Layout, Tensor]:
        """The digests of the storages `groups` in the index.

        Empty if the model may have other bytes; then the caller must compare digests.
        """
        if self.is_new or not self._adopted or not self.pages.untouched:
            return {}
        rows = {group.layout: self.index[_key(group.layout)].digest for group in groups}
        return {
            layout: torch.tensor(memoryview(row).cast("q"), dtype=torch.int64).view(-1, 2)
            for layout, row in rows.items()
        }

    def require_same(self, given: Mapping[Layout, Tensor]) -> None:
        """Raises TornCopy if the digests `given` differ from those in the index."""
        for layout, sums in given.items():
            stored = self.index.get(_key(layout))
            if stored is None or stored.digest != sums.numpy().tobytes():
                raise TornCopy(self.content)


def _read(pages: SharedPages, content: str) -> tuple[_Stored, ...]:
    """The index of `pages` if they are complete and have the id `content`; else empty."""
    try:
        decoder = msgspec.msgpack.Decoder(_First)
        page = pages.read(0, PAGE_BYTES).rstrip(b"\0")
        first = decoder.decode(page)
        if first.magic != MAGIC or first.content != content:
            return ()
        found = pages.read(first.index_at, first.index_bytes)
        index = msgspec.msgpack.decode(found, type=tuple[_Stored, ...])
    except (OSError, ValueError, OverflowError, msgspec.MsgspecError):  # not ours, or damaged
        return ()
    within = all(0 <= one.at and 0 <= one.size <= pages.size - one.at for one in index)
    return index if within else ()


def _tensor(array: Any) -> Tensor:
    """The bytes of `array` as a tensor [n] of uint8; an empty tensor if `array` is None."""
    if array is None:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(array, dtype=torch.uint8)


def _tensors(layout: Layout) -> tuple[tuple[Any, ...], ...]:
    return tuple((name, str(dtype), *place) for name, _, dtype, *place in layout)


def _key(layout: Layout) -> str:
    return hashlib.blake2b(repr(layout).encode(), digest_size=16).hexdigest()
