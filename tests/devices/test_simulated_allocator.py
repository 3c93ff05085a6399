"""The allocator of segments on a simulated card.

No byte is lost, free neighbours are joined, and a request for at most the free bytes always fits.
"""

import ctypes
import itertools
import mmap

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from gpu_runtime.devices.allocators import FREE, HOLE
from gpu_runtime.devices.process_memory import Memory
from gpu_runtime.errors import OutOfMemory
from gpu_runtime.units import KIB, MIB

CAPACITY = 64 * MIB
sizes = st.one_of(
    st.integers(1, 4 * KIB), st.integers(1, 12 * MIB), st.sampled_from([0, MIB, 10 * MIB, CAPACITY])
)


class Allocator(RuleBasedStateMachine):
    """A state machine of allocations, releases, emptied caches and other programs' memory, in any order."""

    blocks = Bundle("blocks")

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory("sim:0", CAPACITY)
        self.held: dict[int, int] = {}  # key -> bytes
        self.squeezed = 0

    @rule(target=blocks, row=st.lists(sizes, min_size=1, max_size=4))
    def allocate(self, row):
        fits = sum(self.held.values()) + sum(row) <= CAPACITY - self.squeezed
        try:
            blocks = self.memory.allocate_row(row)
        except OutOfMemory:
            assert not fits
            return multiple()
        assert fits
        self.held.update({block.note.key: block.size for block in blocks})
        return multiple(*blocks)

    @rule(block=consumes(blocks))
    def free(self, block):
        del self.held[block.note.key]
        block.free()

    @rule()
    def empty_cache(self):
        before = self.memory.map().reserved_bytes
        released = self.memory.empty_cache()
        assert self.memory.map().reserved_bytes == before - released

    @rule(size=st.integers(0, CAPACITY))
    def squeeze(self, size):
        self.memory.squeeze(size)
        self.squeezed = size

    @invariant()
    def bytes_are_conserved(self):
        assert self.memory.held_bytes() == sum(self.held.values())

    @invariant()
    def allocated_is_at_most_reserved_is_at_most_what_there_is(self):
        figures = self.memory.map()
        rounding = 512 * len(self.held)
        assert (
            sum(self.held.values()) <= figures.allocated_bytes <= sum(self.held.values()) + rounding
        )
        assert figures.allocated_bytes <= figures.reserved_bytes <= CAPACITY + rounding
        assert figures.largest_free_bytes <= figures.reserved_bytes - figures.allocated_bytes

    @invariant()
    def neighbours_that_are_free_are_one(self):
        for segment in self.memory._state.segments:
            for left, right in itertools.pairwise(segment.runs):
                assert left.key != right.key or left.key > FREE
            assert all(
                run.size > 0 and (run.key > FREE or run.requested == 0) for run in segment.runs
            )

    @invariant()
    def every_block_has_a_place_of_its_own(self):
        for segment in self.memory._state.segments:
            keys = [run.key for run in segment.runs if run.key not in (FREE, HOLE)]
            assert len(set(keys)) == len(keys)


TestAllocator = Allocator.TestCase


def test_an_exact_fit_fits_whatever_the_memory_was_used_for():
    """Small blocks scattered over large segments must not make the last byte unreachable."""
    memory = Memory("sim:0", 32 * MIB)
    scattered = [memory.allocate(3 * MIB) for _ in range(10)]
    for block in scattered[::2]:
        block.free()
    rest = memory.allocate(17 * MIB)
    assert memory.held_bytes() == memory.map().reserved_bytes == 32 * MIB
    assert memory.alloc_retries > 0
    rest.free()
    memory.squeeze(16 * MIB)  # other programs take it
    with pytest.raises(OutOfMemory):
        memory.allocate(2 * MIB)


def test_segments_have_torchs_sizes():
    """2 MiB for small requests, 20 MiB for medium ones; a large one has its own."""
    memory = Memory("sim:0", 1024 * MIB)
    reserved = []
    for size in (512 * KIB, 5 * MIB, 21 * MIB + 1):
        block = memory.allocate(size)
        reserved.append(memory.map().reserved_bytes // MIB)
        block.free()
        memory.empty_cache()
    assert reserved == [2, 20, 22]


def test_freed_memory_stays_reserved_and_is_used_again():
    memory = Memory("sim:0", 100 * MIB)
    memory.allocate(30 * MIB).free()
    kept = memory.allocate(29 * MIB)
    figures = memory.map()
    assert (figures.allocated_bytes, figures.reserved_bytes, figures.largest_free_bytes) == (
        29 * MIB,
        30 * MIB,
        MIB,
    )
    kept.free()
    assert memory.empty_cache() == 30 * MIB


def test_out_of_memory_reports_requested_and_free_bytes():
    memory = Memory("sim:0", 10 * MIB)
    kept = memory.allocate(8 * MIB)
    said = r"sim:0 out of memory. Tried to allocate 4.0 MiB.*of which 2.0 MiB is free"
    with pytest.raises(OutOfMemory, match=said) as error:
        memory.allocate(4 * MIB)
    assert (error.value.device, error.value.asked_bytes, memory.ooms) == ("sim:0", 4 * MIB, 1)
    kept.free()


def test_a_block_is_free_once_nothing_refers_to_it_or_its_bytes():
    """A reference to the bytes alone, such as a tensor that a user kept, keeps the block of memory."""
    memory = Memory("host", 10 * MIB)
    buffer = memory.allocate(MIB).buffer()
    assert memory.held_bytes() == MIB
    buffer[:3] = b"abc"
    view = memoryview(buffer)[1:3]
    del buffer
    assert bytes(view) == b"bc" and memory.held_bytes() == MIB
    del view
    assert memory.held_bytes() == 0


def test_pages_are_reused():
    """Fresh pages would cost many times the time of a copy."""
    memory = Memory("host", 100 * MIB)
    first = ctypes.addressof(memory.allocate(40 * MIB).buffer())
    assert ctypes.addressof(memory.allocate(40 * MIB).buffer()) == first


def test_on_a_real_host_reusable_pages_count_as_held():
    """Reusable pages belong to this process until empty_cache returns them to the host."""
    memory = Memory("host", 100 * MIB, simulated=False)
    memory.allocate(40 * MIB).buffer()
    assert memory.held_bytes() == 40 * MIB
    assert memory.empty_cache() == 40 * MIB
    assert memory.held_bytes() == 0


def test_a_released_run_is_free_for_good_even_when_released_twice():
    memory = Memory("sim:0", 10 * MIB)
    block = memory.allocate(MIB)
    block.free()
    heir = memory.allocate(MIB)
    block.free()
    del block
    assert memory.held_bytes() == MIB
    heir.free()


def resident_pages(address: int, size: int) -> int:
    """The number of the pages from `address` on that are in RAM."""
    marks = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), marks) == 0
    return sum(mark & 1 for mark in marks)


def test_the_pages_of_freed_bytes_return_to_the_system_though_their_segment_is_in_use():
    """After a part of a model had left a simulated card, its pages stayed in RAM."""
    memory = Memory("sim:0", 100 * MIB)
    left, stays = (block.buffer() for block in memory.allocate_row([24 * MIB, 24 * MIB]))
    for buffer in (left, stays):
        ctypes.memset(buffer, 7, len(buffer))
    address = ctypes.addressof(left)
    before = memory.map()
    del left, buffer
    assert memory.empty_cache() == 0
    huge_page = 512  # the system may fill one page at the end again
    assert resident_pages(address, 24 * MIB) <= huge_page
    assert bytes(stays) == b"\x07" * len(stays)
    assert memory.map().reserved_bytes == before.reserved_bytes
    again = memory.allocate(24 * MIB).buffer()
    assert ctypes.addressof(again) == address
    ctypes.memset(again, 1, len(again))


def test_page_locked_memory_keeps_its_pages():
    """The card's driver copies from the pages that it has locked, so they must stay the same."""
    memory = Memory("host", 100 * MIB, pinned=True)
    left, stays = (block.buffer() for block in memory.allocate_row([24 * MIB, 24 * MIB]))
    ctypes.memset(left, 7, len(left))
    address = ctypes.addressof(left)
    del left
    memory.empty_cache()
    assert resident_pages(address, 24 * MIB) == 24 * MIB // mmap.PAGESIZE
