"""One card of the simulated accelerator (tests/simgpu.py): its memory, its allocator, and its streams of work.

The memory is a region of real pages, and the addresses in it are real. Work is a function that reads and writes these
addresses. The work of a stream is done in order, and only when a caller waits for it.

The allocator follows torch's caching allocator for CUDA. It takes segments from the card, and cuts blocks from them.
A segment belongs to one stream and one pool. The same stream may use a freed block again at once, because it does its
work in order. A block that was recorded on other streams waits: it is used again only after the work that these
streams had at the time of the free. A segment can be given back to the card only if all of its blocks are free.

Without `caching` a segment has exactly one block, and is given back with this block. This module does not know
tensors.
"""

import bisect
import collections
import ctypes
import mmap
import threading
from collections.abc import Callable, Iterator
from typing import Any

ALIGNMENT = 512  # bytes, as in torch's allocator
DEFAULT = 0  # the stream that every card has
PRIVATE_POOL = (0, 1)  # the pool of a captured graph
SHARED_POOL = (0, 0)
_running = threading.RLock()  # one thread does work at a time


class Queue:
    """The work of one stream, in the order in which it is done."""

    def __init__(self, card: int, stream: int) -> None:
        self.card, self.stream = card, stream
        self._pending: collections.deque[Callable[[], None]] = collections.deque()
        self.launched = self.done = 0

    def launch(self, work: Callable[[], None]) -> int:
        """Adds `work` at the end of the queue and returns its number."""
        self._pending.append(work)
        self.launched += 1
        return self.launched

    def run(self, number: int | None = None) -> None:
        """Does the work up to and including that number. Without a number it does all work.

        Raises what the work raises.
        """
        wanted = self.launched if number is None else number
        with _running:
            while self.done < wanted:
                work = self._pending[0]
                try:
                    work()
                finally:
                    self._pending.popleft()
                    self.done += 1


class Block:
    """A run of bytes inside a segment."""

    def __init__(self, address: int, span: int) -> None:
        self.address, self.span = address, span
        self.size = 0  # what was asked for; 0: it is free
        self.users: set[int] = set()  # streams that it was recorded on
        self.waits: list[tuple[Queue, int]] = []  # it was freed, and waits for this work

    @property
    def state(self) -> str:
        """The state of the block, in the words of torch's snapshots."""
        if self.size:
            return "active_allocated"
        return "active_pending_free" if self.waits else "inactive"


class Segment:
    """Memory that the allocator took from the card."""

    def __init__(self, address: int, size: int, stream: int, pool: tuple[int, int]) -> None:
        self.address, self.size, self.stream, self.pool = address, size, stream, pool
        self.blocks = [Block(address, rounded(size))]

    @property
    def is_free(self) -> bool:
        """Whether the segment can be given back to the card: no block of it is in use."""
        return all(block.state == "inactive" for block in self.blocks)

    def cut(self, block: Block, size: int) -> None:
        """Allocates the first `size` bytes of the free `block`. The remaining bytes stay free."""
        span = rounded(size)
        if block.span > span:
            rest = Block(block.address + span, block.span - span)
            self.blocks.insert(self.blocks.index(block) + 1, rest)
        block.span, block.size = span, size

    def merge(self) -> None:
        """Joins adjacent free blocks."""
        joined: list[Block] = []
        for block in self.blocks:
            last = joined[-1] if joined else None
            if last is not None and last.state == block.state == "inactive":
                last.span += block.span
            else:
                joined.append(block)
        self.blocks = joined


class Full(Exception):
    """The card has no room for that many bytes."""


class Card:
    """The memory and the streams of one card."""

    def __init__(self, index: int, capacity_bytes: int, arena_bytes: int) -> None:
        """`capacity_bytes` is the limit of the card.

        `arena_bytes` is the range of addresses. It is larger, so that segments fit in any order.
        """
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        self._pages = mmap.mmap(-1, arena_bytes, flags=flags)
        begin = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._pages))
        self._first, self._end = -(-begin // ALIGNMENT) * ALIGNMENT, begin + arena_bytes
        self.index, self.capacity_bytes = index, capacity_bytes
        self.caching, self.segment_bytes = False, 0
        self.used_bytes = self.peak_bytes = self.ooms = 0
        self.segments: list[Segment] = []  # by address
        self.queues: dict[int, Queue] = {}
        self._places: dict[int, tuple[Segment, Block]] = {}  # by address, blocks in use
        self._pending: dict[int, Segment] = {}  # by address; they have blocks that wait for work
        self._gone: collections.deque[int] = collections.deque()  # freed, and not yet seen
        self._lock = threading.RLock()

    @property
    def reserved_bytes(self) -> int:
        """The bytes of all segments, which a driver would show as used."""
        self._sweep()
        return sum(segment.size for segment in self.segments)

    def queue(self, stream: int) -> Queue:
        """The queue of that stream."""
        return self.queues.setdefault(stream, Queue(self.index, stream))

    def synchronise(self) -> None:
        """Does all work of all streams of this card."""
        for queue in list(self.queues.values()):
            queue.run()

    # -- the allocator

    def allocate(
        self, size: int, stream: int = DEFAULT, pool: tuple[int, int] = SHARED_POOL
    ) -> int:
        """The address of `size` bytes for that stream. The bytes keep their earlier content. Raises Full."""
        with self._lock:
            self._sweep()
            found = self._cached(size, stream, pool) if self.caching else None
            segment, block = found or self._grow(size, stream, pool)
            segment.cut(block, size)
            self._places[block.address] = segment, block
            self.used_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            return block.address

    def free(self, address: int) -> None:
        """Frees the block at that address. Garbage collection may call this at any time."""
        self._gone.append(address)
        if self._lock.acquire(blocking=False):
            try:
                if not self._sweeping:
                    self._sweep()
            finally:
                self._lock.release()

    def record(self, address: int, stream: int) -> None:
        """Notes that `stream` uses the block, too: after a free, the block waits for the work of `stream`."""
        with self._lock:
            found = self._places.get(address)
            if found is not None and found[0].stream != stream:
                found[1].users.add(stream)

    def empty_cache(self) -> None:
        """Gives back the segments without a block in use. As on CUDA, the card first finishes its work."""
        self._sweep()
        if any(block.waits for segment in self.segments for block in segment.blocks):
            self.synchronise()
        with self._lock:
            self._sweep()
            self.segments = [segment for segment in self.segments if not segment.is_free]

    _sweeping = False

    def _sweep(self) -> None:
        """Records the blocks that were freed, and those whose last stream has finished with them."""
        with self._lock:
            self._sweeping = True
            try:
                while self._gone:
                    segment = self._note_free(self._gone.popleft())
                    self._pending[segment.address] = segment
                for segment in list(self._pending.values()):
                    self._settle(segment)
            finally:
                self._sweeping = False

    def _settle(self, segment: Segment) -> None:
        """Joins the free blocks of a segment, and gives the segment back if no cache keeps it."""
        for block in segment.blocks:
            block.waits = [(q, number) for q, number in block.waits if q.done < number]
        segment.merge()
        if not any(block.waits for block in segment.blocks):
            del self._pending[segment.address]
        if not self.caching and segment.is_free:
            self.segments.remove(segment)

    def _note_free(self, address: int) -> Segment:
        """Marks the block at that address as free, and returns its segment."""
        segment, block = self._places.pop(address)
        self.used_bytes -= block.size
        users = (self.queue(stream) for stream in block.users)
        block.waits = [(queue, queue.launched) for queue in users]
        block.size, block.users = 0, set()
        return segment

    def _cached(
        self, size: int, stream: int, pool: tuple[int, int]
    ) -> tuple[Segment, Block] | None:
        """The smallest free block that is large enough, of the same stream and pool. None if there is none."""
        own = [one for one in self.segments if (one.stream, one.pool) == (stream, pool)]
        free = [(one, block) for one in own for block in one.blocks if block.state == "inactive"]
        wanted = rounded(size)
        fitting = [(b.span, b.address, one, b) for one, b in free if b.span >= wanted]
        return min(fitting, key=lambda one: one[:2])[2:] if fitting else None

    def _grow(self, size: int, stream: int, pool: tuple[int, int]) -> tuple[Segment, Block]:
        """A new segment and its only block. If the card has no room, cached memory is given back first."""
        wanted = max(size, self.segment_bytes if self.caching else 0)
        if self.reserved_bytes + wanted > self.capacity_bytes:
            self.empty_cache()
            if self.reserved_bytes + wanted > self.capacity_bytes:
                wanted = size
            if self.reserved_bytes + wanted > self.capacity_bytes:
                self.ooms += 1
                raise Full
        address = next(at for at, end in self._gaps() if end - at >= rounded(wanted))
        segment = Segment(address, wanted, stream, pool)
        bisect.insort(self.segments, segment, key=lambda one: one.address)
        return segment, segment.blocks[0]

    def _gaps(self) -> Iterator[tuple[int, int]]:
        """The ranges of addresses without a segment."""
        at = self._first
        for segment in self.segments:
            yield at, segment.address
            at = segment.address + rounded(segment.size)
        yield at, self._end

    # -- what torch reports

    def snapshot(self) -> list[dict[str, Any]]:
        """The segments, as `torch.cuda.memory_snapshot()` lists those of a card."""
        self._sweep()
        return [
            {
                "device": self.index, "address": one.address, "total_size": one.size, "stream": one.stream,
                "segment_pool_id": one.pool, "segment_type": "large",
                "allocated_size": sum(block.size for block in one.blocks),
                "blocks": [{"address": b.address, "size": b.span, "state": b.state} for b in one.blocks],
            }
            for one in self.segments
        ]  # fmt: skip

    def stats(self) -> dict[str, int]:
        """The counts that `torch.cuda.memory_stats()` would return for this card."""
        reserved = self.reserved_bytes
        used = {"current": self.used_bytes, "peak": self.peak_bytes}
        counts = {f"allocated_bytes.all.{name}": size for name, size in used.items()}
        return counts | {"reserved_bytes.all.current": reserved, "num_ooms": self.ooms}


def rounded(size: int) -> int:
    """`size` bytes, rounded up to the alignment of a block."""
    return max(1, -(-size // ALIGNMENT)) * ALIGNMENT
