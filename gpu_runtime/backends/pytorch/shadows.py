"""Shadows: copies of storages that stay in RAM while a model is on a card. Processes of a user can share them.

When a storage with a shadow leaves its card, its bytes are compared with the digest of the loaded
bytes. If they are equal, nothing is copied: the shadow becomes the storage's bytes. The copies of
parking are made by `storages.copied`; parking compares them with the same digest.
"""

from __future__ import annotations

import functools
import hashlib
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from ...devices.allocators import rounded
from ...devices.process_memory import Memory, SharedPages, held_by
from ...facts import HOST
from ..base import is_out_of_memory
from ..formats.safetensors import Checkpoint
from . import storages as st
from . import swap
from .torch_model import TorchModel

# -- a fingerprint of a storage's bytes, computed on the device where the bytes are
#
# A tensor's `_version` does not show every change. Fused optimizers, BatchNorm statistics,
# `p.data.add_()`, NumPy views and dlpack change bytes without a change of `_version`. So the present
# bytes are compared with the bytes that were loaded from the source, by their fingerprints.

WORDS = 65536  # 32-bit words in a row
# Words that torch converts at once. For more words torch uses several threads, which wait for one
# another in each row. On two busy cores, a digest then took 30 times as long as with one thread.
_WORDS_OF_ONE_THREAD = 16384
_ROWS_ON_A_CARD = 24  # 6 MiB of words at a time, so the scratch is 24 MiB


def digest(content: Tensor) -> Tensor:
    """The fingerprint of `content`, [n] uint8: two sums for each row of 256 KiB.

    The result is [rows, 2] int64 on the CPU. Only the sums leave the card. Each sum is Σ wordᵢ·keyᵢ
    modulo 2⁶⁴ over the 32-bit words of a row. Every place in a row has two random 64-bit keys, one
    for each sum, which are drawn once per boot and user.

    If two rows differ, their first sums are equal with a probability of at most 2⁻³³, and both sums
    with at most 2⁻⁶⁶. Reason: in at least one word the difference is an odd number times 2ᵏ with
    k ≤ 31. Then at most 2ᵏ of the 2⁶⁴ possible keys of that word make the sums equal. This holds for
    any change made without knowledge of the keys. Code in this process that reads the keys could
    make a change that the digest does not show.

    An exchange of two rows is detected, because each row has its own sums.

    Measured: 1.8 GB/s on a CPU core (blake2b: 1.4 GB/s).

    Source: Carter and Wegman 1979, multilinear hashing; Lemire and Kaser 2014, arXiv:1202.4961.
    """
    row_bytes = 4 * WORDS
    whole = content.numel() // row_bytes * row_bytes
    sums = _sums(content[:whole].view(torch.int32).view(-1, WORDS))
    rest = content[whole:]
    if rest.numel():
        last = torch.zeros(-(-rest.numel() // 4) * 4, dtype=torch.uint8, device=content.device)
        last[: rest.numel()].copy_(rest)
        sums = torch.cat([sums, _sums(last.view(torch.int32).view(1, -1))])
    return sums.cpu()


def _sums(rows: Tensor) -> Tensor:
    keys = _keys(rows.device)[:, : rows.shape[1]]
    sums = torch.empty(len(rows), 2, dtype=torch.int64, device=rows.device)
    if rows.device.type == "cpu":
        words = torch.empty(rows.shape[1], dtype=torch.int64)
        parts = words.split(_WORDS_OF_ONE_THREAD)
        for index in range(len(rows)):  # one row at a time fits into the processor's cache
            for part, content in zip(parts, rows[index].split(_WORDS_OF_ONE_THREAD), strict=True):
                part.copy_(content)
            torch.mv(keys, words, out=sums[index])
    else:
        for start in range(0, len(rows), _ROWS_ON_A_CARD):  # cards have no integer matrix product
            part = rows[start : start + _ROWS_ON_A_CARD]
            for key in (0, 1):  # the words become 64-bit numbers in the product
                sums[start : start + len(part), key] = (part * keys[key]).sum(1)
    return sums


_on_cards: dict[torch.device, Tensor] = {}


def keys_on_cards() -> tuple[Tensor, ...]:
    """The keys that `digest` keeps on cards. They are not offloaded."""
    return tuple(_on_cards.values())


def forget_keys(cards: Iterable[torch.device]) -> None:
    """Frees the keys on these `cards`. A later digest makes them again."""
    for card in cards:
        _on_cards.pop(card, None)


def every_key() -> tuple[Tensor, ...]:
    """The keys that `digest` keeps, on cards and on the CPU."""
    return (*keys_on_cards(), *([_host_keys()] if _host_keys.cache_info().currsize else ()))


def _keys(device: torch.device) -> Tensor:
    """The random keys on `device`, [2, WORDS] int64."""
    if device.type == "cpu":
        return _host_keys()
    if device not in _on_cards:
        _on_cards[device] = _host_keys().to(device)
    return _on_cards[device]


@functools.cache
def _host_keys() -> Tensor:
    """The random keys on the CPU, [2, WORDS] int64.

    The keys are derived from the user and the random id of the boot. So all processes of a user
    have the same keys until a reboot, and can compare their digests.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:  # the digests of this process are not comparable
        boot = os.urandom(32)
    seed = b"gpu-console digest %d %s" % (os.getuid(), boot)
    keys = bytearray(hashlib.shake_256(seed).digest(2 * WORDS * 8))
    return torch.frombuffer(keys, dtype=torch.int64).view(2, WORDS)


# -- shadows of models on a card


def ready(
    model: TorchModel, going: Sequence[st.Group], places: Sequence[Memory]
) -> dict[int, Tensor]:
    """The shadows of those storages in `going` that move to the host unchanged, by index.

    `places` has the target of each storage. If a storage has changed, its shadow is freed, to make
    room in host memory for the new bytes.
    """
    found: dict[int, Tensor] = {}
    leaving = [i for i, memory in enumerate(places) if memory.device == HOST]
    if any(going[i].storage._cdata in model.shadow for i in leaving):
        st.synchronise({going[i].storage.device for i in leaving})
    for i in leaving:
        storage = going[i].storage._cdata
        shadow = model.shadow.get(storage)
        if shadow is None:
            continue
        if _unchanged(model, going[i], shadow):
            found[i] = shadow
        else:
            model.shadow = {key: it for key, it in model.shadow.items() if key != storage}
    return found


def _unchanged(model: TorchModel, group: st.Group, shadow: Tensor) -> bool:
    known = model.digests.get(group.storage._cdata)
    if known is None or shadow.nbytes != group.nbytes or group.storage._cdata in model.away:
        return False
    try:
        return torch.equal(digest(group.bytes), known)
    except Exception as error:
        if is_out_of_memory(error):  # without room for the digest, the storage is copied
            return False
        raise


def new_bytes(
    shadows: dict[int, Tensor], sources: list[Tensor], places: Sequence[Memory], host: Memory
) -> list[Tensor]:
    """The new bytes of each of `sources`: its shadow if `ready` found one, else a copy as by `storages.copied`."""
    rest = [i for i in range(len(sources)) if i not in shadows]
    copies = st.copied([sources[i] for i in rest], [places[i] for i in rest], host)
    made = {**shadows, **dict(zip(rest, copies, strict=True))}
    copies.clear()
    return [made.pop(i) for i in range(len(places))]


def staying(
    model: TorchModel,
    going: Sequence[st.Group],
    places: Sequence[Memory],
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
) -> dict[int, Tensor]:
    """The shadows that remain when the storages `going` move from the host to cards.

    `sources` are the present bytes of these storages, and `targets` the copies on the cards. The
    result maps each storage's `_cdata` after the second phase to its shadow. Usually the shadow is
    the source. But if the second phase swaps the data pointers of source and target, the target has
    the bytes in host memory, and is the shadow.
    """
    found: dict[int, Tensor] = {}
    for group, memory, source, target in zip(going, places, sources, targets, strict=True):
        storage = group.storage._cdata
        before = model.own.get(storage)
        if memory.device == HOST or before is None or before.device != HOST or source.is_meta:
            continue
        content = target.untyped_storage()
        if not (swap.can_swap() and group.storage.device == content.device):
            found[content._cdata] = source  # the tensors are bound to the storage of the copy
        elif storage in model.away:
            found[storage] = source
        else:  # the two storages exchange their bytes
            found[storage] = target
    return found


# -- copies that the processes of a user share
#
# Processes that load the same unchanged files share one copy.
#
# The shared pages contain a first page, the content of each storage, and an index with the digest of
# each storage. The first page is written last. Without it other processes do not use the pages, so
# they never use incomplete pages. If nothing has written to the pages since then, their content needs
# no comparison. Otherwise a process that loads the model from them compares the digests.

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
        return self._places or {key: (stored.at, stored.size) for key, stored in self.index.items()}

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
        """The tensors with these `names` in complete pages, which must be mapped. Tied weights share a storage."""
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
            at += rounded(source.nbytes, ALIGNED_BYTES)
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
        """The digests in the index of the storages `groups`; empty if the caller must compare the bytes."""
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
    within = all(0 <= stored.at and 0 <= stored.size <= pages.size - stored.at for stored in index)
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
