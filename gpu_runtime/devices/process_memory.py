"""This process's memory on one device: byte counts, and real pages where bytes must be stored.

A simulated device and the host are modelled in the same way: a capacity, and segments that are cut
into blocks. Most blocks are only counted. If a block must hold bytes, its segment gets real pages
of memory (`locked_pages.Region`). A block is freed once nothing refers to the block or to its
bytes. So a tensor that a user keeps holds exactly its own bytes, as on a card. The memory of a real
card is managed by torch, not here.
"""

from __future__ import annotations

import collections
import ctypes
import itertools
import mmap
import sys
import threading
import weakref
from collections.abc import Collection, Sequence
from typing import Any

from .. import forks
from ..errors import OutOfMemory
from ..facts import AllocatorMap
from ..units import show_bytes
from . import allocator_stats, simulated_allocator
from .locked_pages import Region, pinned

_keys = itertools.count(1)


class Note(weakref.ref):
    """A weak reference to a Block. Once the block is gone, the Note is put into the Memory's queue.

    Python calls the queue's own `append`. It is C code, so an interrupt cannot stop it halfway.
    """

    key = simulated_allocator.FREE  # replaced by a unique key when the block is made (`_watch`)


class Block:
    """Bytes on a device.

    The bytes are held until `free` is called, or until nothing refers to the block or its buffers.
    """

    __slots__ = ("memory", "size", "note", "segment", "offset", "__weakref__")

    def __init__(self, memory: Memory, size: int) -> None:
        self.memory, self.size = memory, size
        self.note = memory._watch(self)
        self.segment = self.offset = 0

    def buffer(self) -> Any:
        """Real pages for the block: a writable ctypes array [size] that keeps the block alive.

        The contents of the array are undefined.
        """
        region = self.memory._region(self.segment)
        array = (ctypes.c_ubyte * self.size).from_buffer(region, self.offset)
        array.block = self
        return array

    def free(self) -> None:
        """Gives the bytes back. The block must have no buffer. A second call does nothing."""
        self.memory._freed.append(self.note)


class Memory:
    """The bytes that this process holds on one device. Thread-safe.

    When a Block is garbage-collected, its `Note` is queued. A method whose result depends on the
    blocks reads the queue first. So no caller has to report that a block is gone.

    `device` is the device's id. If `capacity_bytes` is None, the device is a real card: torch
    manages its memory, and nothing is counted here. If `pinned` is true, pages are locked for a
    card's copy engine. `torch` is torch's name for the device in this process.
    """

    def __init__(
        self,
        device: str,
        capacity_bytes: int | None,
        *,
        simulated: bool = True,
        pinned: bool = False,
        torch: str = "cpu",
    ) -> None:
        self.device, self.capacity_bytes = device, capacity_bytes
        self.simulated, self.pinned = simulated, pinned
        self.torch = torch  # the number of a card can differ between processes
        self.squeezed_bytes = 0
        self.alloc_retries = self.ooms = 0
        self._state = simulated_allocator.Segments()
        self._regions: dict[int, Region] = {}
        self._sizes: dict[int, int] = {}  # segment id -> bytes, for the segment's region
        # Pages shared with other processes (`add_region`). They belong to no segment.
        self._shared: weakref.WeakSet[Region] = weakref.WeakSet()
        self._freed: collections.deque[Note] = collections.deque()
        self._notes: dict[int, Note] = {}  # key -> note of an existing block
        self._failures = 0
        self._lock = forks.awaited(threading.Lock())

    @property
    def counted(self) -> bool:
        """Whether this object counts bytes. The bytes of a real card are not counted here."""
        return self.capacity_bytes is not None

    def allocate(self, size: int, *, force: bool = False) -> Block:
        """A block of `size` bytes. Raises OutOfMemory; see the function `out_of_memory`.

        If `force` is true, the capacity is ignored, because the bytes exist already.
        """
        return self.allocate_row([size], force=force)[0]

    def allocate_row(self, sizes: Sequence[int], *, force: bool = False) -> list[Block]:
        """Allocates a block for each of `sizes`. If not all blocks fit, no block is allocated.

        The blocks lie side by side, and each starts at a multiple of 512 bytes.
        `sizes` are in bytes. `force` and the errors are as in `allocate`.
        """
        # The blocks are made before their bytes are counted. If an interrupt arrives after that,
        # the blocks are deleted, and so the bytes are freed.
        blocks = [Block(self, size) for size in sizes]
        with self._lock:
            state = self._swept()
            if not self.counted:
                return blocks
            wanted = sum(sizes)
            room = self.capacity_bytes - self.squeezed_bytes
            short = state.requested + wanted > room
            if not force and (short or self._failures):
                self._failures = max(0, self._failures - 1)
                self._refuse(state, wanted, room)
            keys = [block.note.key for block in blocks]
            state, spot, retried = simulated_allocator.allocate(state, sizes, keys, room)
            self.alloc_retries += retried
            offset = spot.offset
            for block in blocks:
                block.segment, block.offset = spot.segment, offset
                offset += simulated_allocator.rounded(block.size)
            self._settle(state)
        return blocks

    def held_bytes(self) -> int:
        """Bytes in blocks. On a real host, free pages that are kept for reuse are included."""
        with self._lock:
            state = self._swept()
            reusable = 0
            if not self.simulated:
                for segment in state.segments:
                    if segment.id in self._regions:
                        reusable += _free_bytes(segment)
            return state.requested + reusable

    def map(self) -> AllocatorMap:
        """The map of this memory's allocator. Do not call this method for a real card."""
        with self._lock:
            state = self._swept()
        return allocator_stats.of_segments(
            self.device, state, alloc_retries=self.alloc_retries, ooms=self.ooms
        )

    def pulse(self) -> tuple[object, ...]:
        """A value that changes when the map changes.

        The value contains the present state. Until a change this is the same object, so a
        comparison of two values takes no time.
        """
        with self._lock:
            return self._swept(), self.alloc_retries, self.ooms

    def empty_cache(self) -> int:
        """Releases unused segments, and returns their bytes.

        In segments that are in use, free pages return to the system too, unless pages are locked
        for a card. These segments keep their size.
        """
        if not self.counted:
            return 0
        with self._lock:
            state = self._swept()
            after = simulated_allocator.emptied(state)
            self._settle(after)
            for segment in () if self.pinned else after.segments:
                region = self._regions.get(segment.id)
                if region is not None:
                    _return_free_pages(region, segment)
            return state.reserved - after.reserved

    def contains(self, address: int) -> bool:
        """Whether the `address` is in real pages of this memory."""
        return any(region.contains(address) for region in self._every_region())

    def is_read_only(self, address: int) -> bool:
        """Whether the `address` is in pages of this memory that this process cannot write."""
        return any(
            region.contains(address) and not region.writable for region in self._every_region()
        )

    def is_left_out_of_forks(self, address: int) -> bool:
        """Whether the `address` is in pages of this memory that forked children do not have."""
        return any(region.contains(address) and region.left_out for region in self._every_region())

    def _every_region(self) -> list[Region]:
        with self._lock:
            return [*self._regions.values(), *self._shared]

    def add_region(self, region: Region) -> None:
        """Adds the pages of `region`, which another module mapped.

        After this call, `contains` returns True for the pages' addresses as long as the region
        exists.
        """
        with self._lock:
            self._shared.add(region)

    def lock(self, addresses: Collection[int]) -> None:
        """Locks the pages at the `addresses` for a card's copy engine.

        Pages that were made after this process began to use CUDA are locked already.
        """
        if not self.pinned:
            return
        for region in self._every_region():
            if any(region.contains(address) for address in addresses):
                pinned(region, touched=True)

    def fail_next(self, times: int = 1) -> None:
        """Lets the next `times` allocations fail as if the device were full. For drills."""
        self._failures = times

    def squeeze(self, size: int) -> None:
        """Simulates that other programs hold `size` bytes of the device from now on. For drills."""
        self.squeezed_bytes = size

    def _watch(self, block: Block) -> Note:
        note = Note(block, self._freed.append)
        note.key = next(_keys)
        self._notes[note.key] = note
        return note

    def _swept(self) -> simulated_allocator.Segments:
        """The state without the blocks whose notes are queued.

        A note leaves the queue only after its block was freed in the state. So a block that an
        interrupt leaves queued is freed by the next call.
        """
        gone = tuple(self._freed)
        if gone:
            keys = frozenset(note.key for note in gone)
            self._settle(simulated_allocator.release(self._state, keys))
            for note in gone:
                self._freed.popleft()
                self._notes.pop(note.key, None)
        return self._state

    def _settle(self, state: simulated_allocator.Segments) -> None:
        self._state = state  # one assignment, so an interrupt cannot leave a half-changed state
        alive = {segment.id: segment.span for segment in state.segments}
        self._sizes = alive
        for gone in self._regions.keys() - alive.keys():
            del self._regions[gone]

    def _region(self, segment: int) -> Region:
        with self._lock:
            region = self._regions.get(segment)
            if region is None:
                region = self._regions[segment] = _map_pages(self, self._sizes[segment])
            return region

    def _refuse(
        self,
        state: simulated_allocator.Segments,
        wanted: int,
        room: int,
    ) -> None:
        self.ooms += 1
        free = max(0, room - state.requested)
        unallocated = state.reserved - state.allocated
        raise out_of_memory(
            f"{self.device} out of memory. Tried to allocate {show_bytes(wanted)}. "
            f"{self.device} has a total capacity of {show_bytes(self.capacity_bytes)} "
            f"of which {show_bytes(free)} is free. This process has "
            f"{show_bytes(state.allocated)} allocated; "
            f"{show_bytes(unallocated)} is reserved but unallocated.",
            device=self.device,
            asked_bytes=wanted,
            holders=(),
            report="",
        )


def _free_bytes(segment: simulated_allocator.Segment) -> int:
    return sum(run.size for run in segment.runs if run.key == simulated_allocator.FREE)


def _return_free_pages(region: Region, segment: simulated_allocator.Segment) -> None:
    """Returns the pages of free runs to the system. The next write to these runs gets new pages."""
    at = 0
    for run in segment.runs:
        start = -(-at // mmap.PAGESIZE) * mmap.PAGESIZE
        at += run.size
        end = at // mmap.PAGESIZE * mmap.PAGESIZE
        if run.key <= simulated_allocator.FREE and end > start:
            region.madvise(mmap.MADV_DONTNEED, start, end - start)


def _map_pages(memory: Memory, size: int) -> Region:
    """New pages, in huge pages if the system has them.

    Measured: a copy into new small pages runs at 0.7 GB/s, into new huge pages at 18 GB/s, and into
    used pages at 22 GB/s.
    """
    try:
        region = Region(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise out_of_memory(
            f"{memory.device} out of memory. Tried to allocate {show_bytes(size)}: "
            f"{error.strerror}.",
            device=memory.device,
            asked_bytes=size,
            holders=(),
            report="",
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            region.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # this kernel has no huge pages, so the first copy is slower
    region.start = ctypes.addressof(ctypes.c_ubyte.from_buffer(region))
    if memory.pinned:
        region.leave_out_of_forks()
        pinned(region)
    return region


def out_of_memory(message: str, **facts: Any) -> OutOfMemory:
    """An OutOfMemory error with this `message`, and with these `facts` as attributes.

    If torch is loaded, the error is also a torch.OutOfMemoryError. So code that catches either of
    the two classes works.
    """
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "OutOfMemoryError"):
        return OutOfMemory(message, **facts)
    global _SimulatedOutOfMemory
    if _SimulatedOutOfMemory is None:
        _SimulatedOutOfMemory = type(
            "SimulatedOutOfMemory",
            (OutOfMemory, torch.OutOfMemoryError),
            {
                "__module__": __name__,
                "__doc__": out_of_memory.__doc__,
                "__reduce__": lambda self: (_rebuilt, (str(self), self.facts)),
            },
        )
    return _SimulatedOutOfMemory(message, **facts)


_SimulatedOutOfMemory: Any = None


def _rebuilt(message: str, facts: dict[str, Any]) -> OutOfMemory:
    return out_of_memory(message, **facts)
