"""The memory of one device, as this process holds it: numbers, and real pages where somebody needs them.

A simulated device and the host are the same kind of memory: a capacity, segments cut into blocks, and for a block that
is to hold real bytes, a stretch of a region of real pages. A block is free once nobody refers to it or to its bytes, so
a tensor that a user kept holds exactly its own bytes, as on a card. A real card's memory is torch's to hand out.
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
    """Tells a memory that a block is gone. Its callback is a deque's append, C code that no interrupt can split."""

    key = simulated_allocator.FREE  # until it has one of its own


class Block:
    """Bytes held on a device, until `free` or until the last reference, its buffers included, is gone."""

    __slots__ = ("memory", "size", "note", "segment", "offset", "__weakref__")

    def __init__(self, memory: Memory, size: int) -> None:
        self.memory, self.size, self.note = memory, size, memory._watch(self)
        self.segment = self.offset = 0

    def buffer(self) -> Any:
        """Real pages for these bytes: a writable ctypes array [size] that keeps the block alive. Contents undefined."""
        array = (ctypes.c_ubyte * self.size).from_buffer(
            self.memory._region(self.segment), self.offset
        )
        array.block = self
        return array

    def free(self) -> None:
        """Gives the bytes back now. Only for a block whose buffer was never asked for. Twice is once."""
        self.memory._freed.append(self.note)


class Memory:
    """What this process holds of one device's memory; thread-safe.

    It is watched, not told: a block that dies, by whatever way, leaves a note, and notes are read before every answer.
    Without `capacity_bytes` it is a real card's: nothing is counted here and blocks hold nothing, since torch and
    the driver know better.
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
        self.device, self.capacity_bytes, self.simulated, self.pinned = (
            device,
            capacity_bytes,
            simulated,
            pinned,
        )
        self.torch = torch  # what torch calls it in this process: its number is not everybody's
        self.squeezed_bytes = 0
        self.alloc_retries = self.ooms = 0
        self._state = simulated_allocator.Segments()
        self._regions: dict[int, _Region] = {}
        self._sizes: dict[int, int] = {}  # of the segments, for their regions
        self._freed: collections.deque[Note] = collections.deque()
        self._notes: dict[int, Note] = {}  # of the blocks that there are
        self._failures = 0
        self._lock = threading.Lock()

    @property
    def counted(self) -> bool:
        return self.capacity_bytes is not None

    def allocate(self, size: int, *, force: bool = False) -> Block:
        """That many bytes. Raises OutOfMemory, which is torch's own error too where torch is loaded.

        `force` accepts what is there already, room or not.
        """
        return self.allocate_row([size], force=force)[0]

    def allocate_row(self, sizes: Sequence[int], *, force: bool = False) -> list[Block]:
        """One block per size, side by side and each on a multiple of 512 bytes, or none. Raises as `allocate`."""
        blocks = [
            Block(self, size) for size in sizes
        ]  # made first: whatever happens, they clean up after themselves
        with self._lock:
            state, wanted = self._swept(), sum(sizes)
            if not self.counted:
                return blocks
            room = self.capacity_bytes - self.squeezed_bytes
            short = state.requested + wanted > room
            if not force and (short or self._failures):
                self._failures = max(0, self._failures - 1)
                self._refuse(state, wanted, room)
            state, spot, retried = simulated_allocator.allocate(
                state, sizes, [block.note.key for block in blocks], room
            )
            self.alloc_retries += retried
            offset = spot.offset
            for block in blocks:
                block.segment, block.offset = spot.segment, offset
                offset += simulated_allocator.rounded(block.size)
            self._settle(state)
        return blocks

    def held_bytes(self) -> int:
        """Bytes in blocks; on a real host also the pages that wait here to be used again."""
        with self._lock:
            state = self._swept()
            waiting = (
                0
                if self.simulated
                else sum(
                    run.size
                    for segment in state.segments
                    if segment.id in self._regions
                    for run in segment.runs
                    if run.key == simulated_allocator.FREE
                )
            )
            return state.requested + waiting

    def map(self) -> AllocatorMap:
        """How the allocator has cut what it holds. Not on a real card, where torch is to be asked."""
        with self._lock:
            state = self._swept()
        return allocator_stats.of_segments(
            self.device, state, alloc_retries=self.alloc_retries, ooms=self.ooms
        )

    def pulse(self) -> tuple[object, ...]:
        """Equal for as long as the map is. The same state is the same object, so that is told at once."""
        with self._lock:
            return self._swept(), self.alloc_retries, self.ooms

    def empty_cache(self) -> int:
        """Gives segments that nobody uses back; returns their bytes."""
        if not self.counted:
            return 0
        with self._lock:
            state = self._swept()
            after = simulated_allocator.emptied(state)
            self._settle(after)
            return state.reserved - after.reserved

    def contains(self, address: int) -> bool:
        """Whether that address lies in real pages of this memory."""
        with self._lock:
            return any(
                0 <= address - region.start < len(region) for region in self._regions.values()
            )

    def fail_next(self, times: int = 1) -> None:
        """The next allocations fail as if the device were full: a drill."""
        self._failures = times

    def squeeze(self, size: int) -> None:
        """Strangers hold that many bytes from now on; 0: none. A drill."""
        self.squeezed_bytes = size

    def _watch(self, block: Block) -> Note:
        note = Note(block, self._freed.append)
        note.key = next(_keys)
        self._notes[note.key] = note
        return note

    def _swept(self) -> simulated_allocator.Segments:
        """The state without what was freed meanwhile. A note is removed only once it has been heeded."""
        gone = tuple(self._freed)
        if gone:
            self._settle(
                simulated_allocator.release(self._state, frozenset(note.key for note in gone))
            )
            for note in gone:
                self._freed.popleft()
                self._notes.pop(note.key, None)
        return self._state

    def _settle(self, state: simulated_allocator.Segments) -> None:
        self._state = state  # the one moment at which anything changes
        alive = {segment.id: segment.span for segment in state.segments}
        self._sizes = alive
        for gone in self._regions.keys() - alive.keys():
            del self._regions[gone]

    def _region(self, segment: int) -> _Region:
        with self._lock:
            region = self._regions.get(segment)
            if region is None:
                region = self._regions[segment] = _map(self, self._sizes[segment])
            return region

    def _refuse(self, state: simulated_allocator.Segments, wanted: int, room: int) -> None:
        self.ooms += 1
        free = max(0, room - state.requested)
        raise out_of_memory(
            f"{self.device} out of memory. Tried to allocate {show_bytes(wanted)}. {self.device} has a total capacity "
            f"of {show_bytes(self.capacity_bytes)} of which {show_bytes(free)} is free. This process has "
            f"{show_bytes(state.allocated)} allocated; {show_bytes(state.reserved - state.allocated)} is reserved but "
            f"unallocated.",
            device=self.device,
            asked_bytes=wanted,
            holders=(),
            report="",
        )


class _Region(mmap.mmap):
    """Real pages of one segment, mapped until the last buffer in them is gone."""

    start = 0  # its address
    pinned = False

    def __del__(self) -> None:
        torch = sys.modules.get("torch") if self.pinned else None
        if (
            torch is not None
        ):  # it may be gone already when the process ends, and the driver cleans up then
            torch.cuda.cudart().cudaHostUnregister(self.start)


def _map(memory: Memory, size: int) -> _Region:
    """Fresh pages, in huge pages where the system has them.

    A copy into fresh small pages ran at 0.7 GB/s, into fresh huge pages at 18, into used ones at 22.
    """
    try:
        region = _Region(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise out_of_memory(
            f"{memory.device} out of memory. Tried to allocate {show_bytes(size)}: {error.strerror}.",
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
    """Locks the pages for the card's copy engine. Without that, copies run at a fifth of the bus; they still run.

    torch's own pinned memory rounds up to powers of two: 6 GiB asked, 10 locked.
    """
    cuda = sys.modules["torch"].cuda if "torch" in sys.modules else None
    if cuda is None or not cuda.is_initialized():
        return
    pieces = [
        (region.start + at, min(_TOUCH_BYTES, len(region) - at))
        for at in range(0, len(region), _TOUCH_BYTES)
    ]
    with ThreadPoolExecutor(
        8
    ) as threads:  # ctypes lets go of the GIL; locking untouched pages is slow
        list(threads.map(lambda piece: ctypes.memset(piece[0], 0, piece[1]), pieces))
    if int(cuda.cudart().cudaHostRegister(region.start, len(region), 0)) == 0:
        region.pinned = True


def out_of_memory(message: str, **facts: Any) -> OutOfMemory:
    """OutOfMemory, and torch.OutOfMemoryError as well where torch is loaded: code that catches either, catches it."""
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
