"""This process's memory on one device: byte counts, and real pages if they are needed.

A simulated device and the host are the same kind of memory: a capacity, segments cut into blocks,
and for a block that must hold real bytes, a stretch of a region of real pages. A block is free once
nothing refers to it or to its bytes, so a tensor that a user kept holds exactly its own bytes, as
on a card. A real card's memory is managed by torch, not here.
"""

from __future__ import annotations

import collections
import ctypes
import itertools
import mmap
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..errors import OutOfMemory
from ..facts import AllocatorMap
from ..units import MIB, show_bytes
from . import allocator_stats, simulated_allocator

_keys = itertools.count(1)
_TOUCH_BYTES = 64 * MIB  # one thread's piece


class Note(weakref.ref):
    """Informs a memory that a block is gone.

    Its callback is a deque's append: C code that no interrupt can split.
    """

    key = simulated_allocator.FREE  # until it has one of its own


class Block:
    """Bytes held on a device until `free`, or until the last reference or buffer is gone."""

    __slots__ = ("memory", "size", "note", "segment", "offset", "__weakref__")

    def __init__(self, memory: Memory, size: int) -> None:
        self.memory, self.size = memory, size
        self.note = memory._watch(self)
        self.segment = self.offset = 0

    def buffer(self) -> Any:
        """Real pages for these bytes: a writable ctypes array [size] that keeps the block alive.

        Its contents are undefined.
        """
        region = self.memory._region(self.segment)
        array = (ctypes.c_ubyte * self.size).from_buffer(region, self.offset)
        array.block = self
        return array

    def free(self) -> None:
        """Gives the bytes back. Only for a block without a buffer; a second call does nothing."""
        self.memory._freed.append(self.note)


class Memory:
    """The bytes that this process holds on one device; thread-safe.

    A block that is garbage-collected, in whatever way, leaves a note, and notes are read before
    every answer; so no caller has to report that it is gone.

    `device` is its id. Without `capacity_bytes` it is a real card's: nothing is counted here and
    blocks hold nothing, since torch and the driver know better. `pinned` locks real pages for a
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
        self.torch = torch  # in another process the card may have another number
        self.squeezed_bytes = 0
        self.alloc_retries = self.ooms = 0
        self._state = simulated_allocator.Segments()
        self._regions: dict[int, _Region] = {}
        self._sizes: dict[int, int] = {}  # of the segments, for their regions
        self._freed: collections.deque[Note] = collections.deque()
        self._notes: dict[int, Note] = {}  # of the blocks that exist
        self._failures = 0
        self._lock = threading.Lock()

    @property
    def counted(self) -> bool:
        """Whether its bytes are counted here: not those of a real card."""
        return self.capacity_bytes is not None

    def allocate(self, size: int, *, force: bool = False) -> Block:
        """A block of `size` bytes. Raises OutOfMemory (torch's own error too if torch is loaded).

        `force` ignores the capacity, for bytes that exist already.
        """
        return self.allocate_row([size], force=force)[0]

    def allocate_row(self, sizes: Sequence[int], *, force: bool = False) -> list[Block]:
        """One block per size, side by side and each on a multiple of 512 bytes; all or none.

        `sizes` are bytes; `force` and errors as in `allocate`.
        """
        # The blocks are made first: whatever happens then, they free themselves.
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
        """Bytes in blocks; on a real host also the pages that are free here and kept for reuse."""
        with self._lock:
            state = self._swept()
            reusable = 0
            if not self.simulated:
                for segment in state.segments:
                    if segment.id in self._regions:
                        reusable += _free_bytes(segment)
            return state.requested + reusable

    def map(self) -> AllocatorMap:
        """How the allocator has cut its memory. Not for a real card, whose memory is torch's."""
        with self._lock:
            state = self._swept()
        return allocator_stats.of_segments(
            self.device, state, alloc_retries=self.alloc_retries, ooms=self.ooms
        )

    def pulse(self) -> tuple[object, ...]:
        """A value that is equal for as long as the map is.

        An unchanged state is the same object, so the comparison is immediate.
        """
        with self._lock:
            return self._swept(), self.alloc_retries, self.ooms

    def empty_cache(self) -> int:
        """Gives unused segments back; returns their bytes."""
        if not self.counted:
            return 0
        with self._lock:
            state = self._swept()
            after = simulated_allocator.emptied(state)
            self._settle(after)
            return state.reserved - after.reserved

    def contains(self, address: int) -> bool:
        """Whether that `address` is in real pages of this memory."""
        with self._lock:
            for region in self._regions.values():
                if 0 <= address - region.start < len(region):
                    return True
        return False

    def fail_next(self, times: int = 1) -> None:
        """The next allocations, so many `times`, fail as if the device were full: a drill."""
        self._failures = times

    def squeeze(self, size: int) -> None:
        """From now on other programs hold `size` bytes of it; 0: none. A drill."""
        self.squeezed_bytes = size

    def _watch(self, block: Block) -> Note:
        note = Note(block, self._freed.append)
        note.key = next(_keys)
        self._notes[note.key] = note
        return note

    def _swept(self) -> simulated_allocator.Segments:
        """The state without freed blocks. A note is removed only once it was applied."""
        gone = tuple(self._freed)
        if gone:
            keys = frozenset(note.key for note in gone)
            self._settle(simulated_allocator.release(self._state, keys))
            for note in gone:
                self._freed.popleft()
                self._notes.pop(note.key, None)
        return self._state

    def _settle(self, state: simulated_allocator.Segments) -> None:
        self._state = state  # the only moment at which anything changes
        alive = {segment.id: segment.span for segment in state.segments}
        self._sizes = alive
        for gone in self._regions.keys() - alive.keys():
            del self._regions[gone]

    def _region(self, segment: int) -> _Region:
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


class _Region(mmap.mmap):
    """Real pages of one segment, mapped until the last buffer in them is gone."""

    start = 0  # its address
    pinned = False

    def __del__(self) -> None:
        torch = sys.modules.get("torch") if self.pinned else None
        # When the process ends torch may be gone already; then the driver cleans up.
        if torch is not None:
            torch.cuda.cudart().cudaHostUnregister(self.start)


def _map_pages(memory: Memory, size: int) -> _Region:
    """Fresh pages, in huge pages if the system has them.

    A copy into fresh small pages ran at 0.7 GB/s, into fresh huge pages at 18, into used ones at
    22.
    """
    try:
        region = _Region(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
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
            pass  # a kernel without huge pages: slower the first time, else the same
    region.start = ctypes.addressof(ctypes.c_ubyte.from_buffer(region))
    if memory.pinned:
        _pin(region)
    return region


def _pin(region: _Region) -> None:
    """Locks the pages for the card's copy engine. Without that, copies run at a fifth of the bus.

    torch's own pinned memory rounds up to powers of two: 6 GiB requested, 10 locked.
    """
    cuda = sys.modules["torch"].cuda if "torch" in sys.modules else None
    if cuda is None or not cuda.is_initialized():
        return
    pieces = []
    for at in range(0, len(region), _TOUCH_BYTES):
        pieces.append((region.start + at, min(_TOUCH_BYTES, len(region) - at)))
    # Locking untouched pages is slow, so touch them first; ctypes releases the GIL.
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda piece: ctypes.memset(piece[0], 0, piece[1]), pieces))
    if int(cuda.cudart().cudaHostRegister(region.start, len(region), 0)) == 0:
        region.pinned = True


def out_of_memory(message: str, **facts: Any) -> OutOfMemory:
    """OutOfMemory with that `message` and these `facts` as attributes.

    It is a torch.OutOfMemoryError as well if torch is loaded: code that catches either, catches it.
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
