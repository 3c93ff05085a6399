"""Maps of an allocator's segments and blocks."""

from __future__ import annotations

import enum

from ..units import show_bytes
from .base import Value
from .snapshot import DeviceView


class BlockState(enum.StrEnum):
    """What a part of a segment is used for."""

    ALLOCATED = "allocated"
    PENDING = "pending"  # freed, but not reusable yet, because another stream may still read it
    INACTIVE = "inactive"  # reserved and unused
    RELEASED = "released"  # returned to the driver, while other parts of the segment are in use
    MIXED = "mixed"  # several small neighbours of different states, shown as one


class AllocatorBlock(Value, array_like=True):
    """A part of a segment."""

    bytes: int
    state: BlockState
    count: int = 1  # number of neighbouring blocks with the same state, shown as one
    inactive_bytes: int = 0  # inactive bytes of a mixed block


class SegmentMap(Value, array_like=True):
    """One piece of memory that an allocator took from its device, divided into blocks."""

    address: int  # simulated segments have consecutive addresses, from 0
    bytes: int
    kind: str  # small, large, expandable, or private: a pool of its own, such as a CUDA graph's
    blocks: tuple[AllocatorBlock, ...]  # in the order of their addresses; together they are `bytes`

    @property
    def in_use(self) -> bool:
        """Whether the segment has a block that is neither inactive nor released.

        Such a segment cannot be given back to the driver.
        """
        free = (BlockState.INACTIVE, BlockState.RELEASED)
        return any(block.state not in free for block in self.blocks)


class AllocatorMap(Value):
    """How the allocator of one process has divided the memory that it took from one card.

    A field that is None is unknown, which is not the same as 0.
    """

    owner: str  # the id of the owner in the book
    device: str
    wall: float  # when the map was made; a change leads to a new map
    allocated_bytes: int
    reserved_bytes: int
    inactive_bytes: int | None = None  # reserved and unused
    # Inactive bytes in segments that are entirely unused: defragmenting releases them.
    releasable_bytes: int | None = None
    # Bytes of the largest inactive block. A larger request needs new memory.
    largest_free_bytes: int | None = None
    alloc_retries: int = 0
    ooms: int = 0
    segments: tuple[SegmentMap, ...] = ()  # the largest ones, if there are too many to list
    left_out: int = 0  # segments that are not listed
    left_out_bytes: int = 0

    def __str__(self) -> str:
        used = f"{show_bytes(self.allocated_bytes)} of {show_bytes(self.reserved_bytes)}"
        return f"allocator of {self.owner} on {self.device}: {used} reserved is allocated"

    def largest_request_bytes(self, view: DeviceView) -> int | None:
        """The largest piece of memory that this process could allocate now; None if unknown.

        `view` is the card, whose free room limits new memory. torch uses its largest free block. If
        this block is too small, torch releases the segments that are entirely unused, and takes new
        memory. On a simulated card only allocated bytes are claimed, so all free room can be used.
        """
        if view.room_bytes is None or self.largest_free_bytes is None:
            return None
        room = max(0, view.room_bytes)
        if view.device.simulated:
            return room
        return max(self.largest_free_bytes, room + (self.releasable_bytes or 0))
