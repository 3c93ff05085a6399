"""This process's memory on one device: byte counts, and real pages where bytes must be stored.

A simulated device and the host are modelled in the same way: a capacity, and segments that are cut
into blocks. Most blocks are only counted. If a block must hold bytes, its segment gets real pages
of memory (`Region`). A block is freed once nothing refers to the block or to its bytes. So a tensor
that a user keeps holds exactly its own bytes, as on a card. The memory of a real card is managed by
torch, not here. The driver of a card can lock pages in memory, so that its copy engine can use them
directly (`pinned`).
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import mmap
import os
import stat
import sys
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from ..errors import OutOfMemory
from ..facts import AllocatorMap
from ..files import open_files
from ..threads import awaited, freed
from ..units import MIB, show_bytes
from . import allocators

_keys = itertools.count(1)
_TOUCH_BYTES = 64 * MIB  # bytes that one thread touches at a time
_libc = ctypes.CDLL(None)
_locking = freed(threading.Lock())


def trim_heap() -> None:
    """Returns to the system what the C library keeps of memory that this process has freed.

    Tensors of up to 32 MiB come from the heap of the thread that makes them, of which glibc has up
    to eight for each core, and a freed one stays there. The tensors of a simulated card return in
    other threads than they were made in: without this call, a notebook of 300 tensors of 1 MiB
    grew by 24 MiB a round of parking, up to 700. The end of each heap, up to 64 MiB, stays.
    """
    trim = getattr(_libc, "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)


class Note(weakref.ref):
    """A weak reference to a Block. Once the block is gone, the Note is put into the Memory's queue.

    The queue's own `append` is C code, which an interrupt cannot stop halfway.
    """

    key = allocators.FREE  # replaced by a unique key when the block is made (`_watch`)


class Block:
    """Bytes on a device, until `free` is called, or nothing refers to the block or its buffers."""

    __slots__ = ("memory", "size", "note", "segment", "offset", "__weakref__")

    def __init__(self, memory: Memory, size: int) -> None:
        self.memory, self.size = memory, size
        self.note = memory._watch(self)
        self.segment = self.offset = 0

    def buffer(self) -> Any:
        """Real pages for the block: a writable ctypes array [size], undefined, that keeps it alive."""
        return _array(self.memory._region(self.segment), self.offset, self)

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
        self.counted = capacity_bytes is not None  # whether this object counts bytes
        self.simulated, self.pinned = simulated, pinned
        self.torch = torch  # the number of a card can differ between processes
        self.squeezed_bytes = 0
        self.alloc_retries = self.ooms = 0
        self._state = allocators.Segments()
        self._regions: dict[int, Region] = {}
        self._sizes: dict[int, int] = {}  # segment id -> bytes, for the segment's region
        # Pages shared with other processes (`add_region`). They belong to no segment.
        self._shared: weakref.WeakSet[Region] = weakref.WeakSet()
        self._freed: collections.deque[Note] = collections.deque()
        self._notes: dict[int, Note] = {}  # key -> note of an existing block
        self._failures = 0
        self._lock = awaited(threading.Lock())

    def allocate(self, size: int, *, force: bool = False) -> Block:
        """A block of `size` bytes. Raises OutOfMemory; see the function `out_of_memory`.

        If `force` is true, the capacity is ignored, because the bytes exist already.
        """
        return self.allocate_row([size], force=force)[0]

    def allocate_row(self, sizes: Sequence[int], *, force: bool = False) -> list[Block]:
        """Allocates a block of bytes for each of `sizes`, or none if not all of them fit.

        The blocks lie side by side, and each starts at a multiple of 512 bytes. `force` and the
        errors are as in `allocate`.
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
            state, segment, offset, retried = allocators.allocate(state, sizes, keys, room)
            self.alloc_retries += retried
            for block in blocks:
                block.segment, block.offset = segment, offset
                offset += allocators.rounded(block.size)
            self._settle(state)
        return blocks

    def held_bytes(self) -> int:
        """Bytes in blocks. On a real host, free pages that are kept for reuse are included."""
        with self._lock:
            state = self._swept()
            if self.simulated:
                return state.requested
            mapped = [segment for segment in state.segments if segment.id in self._regions]
            return state.requested + sum(segment.free for segment in mapped)

    def map(self) -> AllocatorMap:
        """The map of this memory's allocator. Do not call this method for a real card."""
        with self._lock:
            state = self._swept()
        return allocators.of_segments(self.device, state, self.alloc_retries, self.ooms)

    def pulse(self) -> tuple[object, ...]:
        """A value that changes when the map changes. Two equal values are compared at once."""
        with self._lock:
            return self._swept(), self.alloc_retries, self.ooms

    def empty_cache(self) -> int:
        """Releases unused segments, and returns their bytes.

        Free pages in used segments return to the system too, unless pages are locked for a card.
        """
        if not self.counted:
            return 0
        with self._lock:
            state = self._swept()
            after = allocators.emptied(state)
            self._settle(after)
            for segment in () if self.pinned else after.segments:
                region = self._regions.get(segment.id)
                if region is not None:
                    _return_free_pages(region, segment)
            return state.reserved - after.reserved

    def region_at(self, address: int) -> Region | None:
        """The real pages of this memory that contain the `address`; None if there are none."""
        with self._lock:
            regions = [*self._regions.values(), *self._shared]
        return next((region for region in regions if region.contains(address)), None)

    def add_region(self, region: Region) -> None:
        """Adds the pages of `region`, which another module mapped, as long as the region exists."""
        with self._lock:
            self._shared.add(region)

    def lock(self, addresses: Collection[int]) -> None:
        """Locks the pages at the `addresses` that were made before this process used CUDA."""
        if not self.pinned:
            return
        for region in {self.region_at(address) for address in addresses} - {None}:
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

    def _swept(self) -> allocators.Segments:
        """The state without the blocks whose notes are queued.

        A note leaves the queue only after that, so an interrupt leaves it to the next call.
        """
        gone = tuple(self._freed)
        if gone:
            keys = frozenset(note.key for note in gone)
            self._settle(allocators.release(self._state, keys))
            for note in gone:
                self._freed.popleft()
                self._notes.pop(note.key, None)
        return self._state

    def _settle(self, state: allocators.Segments) -> None:
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

    def _refuse(self, state: allocators.Segments, wanted: int, room: int) -> None:
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
        )


def out_of_memory(message: str, **facts: Any) -> OutOfMemory:
    """An OutOfMemory error with this `message`, and with the `facts` that are known as attributes.

    If torch is loaded, the error is also a torch.OutOfMemoryError. So code that catches either of
    the two classes works.
    """
    facts = {"device": "", "asked_bytes": 0, "holders": (), "report": "", **facts}
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
                "__reduce__": lambda self: (partial(out_of_memory, **self.facts), (str(self),)),
            },
        )
    return _SimulatedOutOfMemory(message, **facts)


_SimulatedOutOfMemory: Any = None


# -- real pages ----------------------------------------------------------------------------------


class Region(mmap.mmap):
    """The pages of one segment or of one shared file, mapped until no buffer in them is left."""

    start = 0  # the region's address
    pinned = False
    lock_tried = False  # a lock that failed once is not tried again
    writable = True
    left_out = False  # whether forked children do not have the pages
    pages: Any = None  # the object whose shared pages are mapped; the region keeps it open

    def __del__(self) -> None:
        torch = sys.modules.get("torch") if self.pinned else None
        # When the process ends, torch may already be gone. Then the driver unlocks the pages.
        if torch is not None:
            with _used_card(torch):
                torch.cuda.cudart().cudaHostUnregister(self.start)

    def contains(self, address: int) -> bool:
        """Whether the `address` is in these pages."""
        return 0 <= address - self.start < len(self)

    def make_writable(self, writable: bool) -> None:
        """Sets whether this process may write the pages. If not, a write ends the process."""
        if writable is self.writable:
            return
        rights = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        _libc.mprotect(ctypes.c_void_p(self.start), ctypes.c_size_t(len(self)), rights)
        self.writable = writable

    def leave_out_of_forks(self) -> None:
        """Unmaps the pages in each forked child, because a card may write them.

        The Python object also exists in the child, and there it is never freed. If it were freed,
        it would unmap its addresses, and the child may have other memory at these addresses.
        """
        if hasattr(mmap, "MADV_DONTFORK"):
            self.madvise(mmap.MADV_DONTFORK)
            self.left_out = True
            _left_out.add(self)


_left_out: weakref.WeakSet[Region] = weakref.WeakSet()


def _keep_left_out() -> None:
    for region in _left_out:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(region))


os.register_at_fork(after_in_child=_keep_left_out)


def pinned(region: Region, *, touched: bool = False) -> None:
    """Locks the pages of the `region` in memory for the card's copy engine, once CUDA is used.

    Pages that are not `touched` yet may be overwritten with zeros. Without the lock, copies reach a
    fifth of the bus speed. An earlier try is not repeated. torch's own pinned memory is not used,
    because torch rounds up to powers of two: for a request of 6 GiB it locked 10 GiB.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    with _locking:
        if region.lock_tried:
            return
        region.lock_tried = True
    pieces = []
    for at in range(0, 0 if touched else len(region), _TOUCH_BYTES):
        pieces.append((region.start + at, min(_TOUCH_BYTES, len(region) - at)))
    # Locking untouched pages is slow, so they are touched first. ctypes releases the GIL meanwhile.
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda piece: ctypes.memset(piece[0], 0, piece[1]), pieces))
    writable = region.writable
    with _used_card(torch):
        region.make_writable(True)  # the driver refuses other pages
        error = torch.cuda.cudart().cudaHostRegister(region.start, len(region), 0)
        region.make_writable(writable)
        region.pinned = int(error) == 0
        if not region.pinned:
            _clear_error(torch)


def _used_card(torch: Any) -> contextlib.AbstractContextManager[Any]:
    """A context in which torch's current card is one that this process uses already.

    Pages that are locked through one card are locked for all cards. In a new thread the current
    card is card 0, and the call would create a CUDA context there, which takes about 400 MB.

    Source: pytorch/pytorch#21081.
    """
    cuda = torch.cuda
    used = [card for card in range(cuda.device_count()) if torch._C._cuda_hasPrimaryContext(card)]
    if not used or cuda.current_device() in used:
        return contextlib.nullcontext()
    return cuda.device(used[0])


def _clear_error(torch: Any) -> None:
    """Clears the error that a failed call of the CUDA runtime leaves in this thread.

    torch raises it after the next start of a CUDA kernel, which would be the user's, and has no
    function that clears it. So a small CUDA kernel is started here.

    Source: c10/cuda/CUDAException.h, C10_CUDA_ERROR_HANDLED and C10_CUDA_KERNEL_LAUNCH_CHECK.
    """
    with contextlib.suppress(RuntimeError):  # raising the error clears it
        torch.ones(1, device="cuda")


def _return_free_pages(region: Region, segment: allocators.Segment) -> None:
    """Returns the pages of free runs to the system. The next write to these runs gets new pages."""
    at = 0
    for run in segment.runs:
        start = -(-at // mmap.PAGESIZE) * mmap.PAGESIZE
        at += run.size
        end = at // mmap.PAGESIZE * mmap.PAGESIZE
        if run.key <= allocators.FREE and end > start:
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
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # without huge pages, the first copy is slower
            region.madvise(mmap.MADV_HUGEPAGE)
    region.start = ctypes.addressof(ctypes.c_ubyte.from_buffer(region))
    if memory.pinned:
        region.leave_out_of_forks()
        pinned(region)
    return region


# -- pages in host memory that several processes of one user share
#
# The pages are in a file in /dev/shm that has no name. A process opens the file through the
# descriptor of another process that has the file open. The system frees the pages when the last of
# these processes closes the file or dies, for whatever reason. So no process has to remove anything.

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
    for path, target in (file for pid in pids for file in open_files(pid)):
        pages = _opened(path) if target.startswith(f"{DIRECTORY}/#") else None
        if pages is not None:
            yield pages


def _opened(path: str) -> SharedPages | None:
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:  # the process has closed it, or it belongs to another user
        return None
    found = os.fstat(file)
    ours = found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode)
    if not ours or found.st_mode & 0o077 or found.st_nlink:
        os.close(file)
        return None
    return SharedPages(file)
