"""Maps of an allocator's segments and blocks."""

from __future__ import annotations

import enum

from .base import Value
from .snapshot import DeviceView


class BlockState(enum.StrEnum):
    """What becomes of a stretch of a segment."""

    ALLOCATED = "allocated"
    PENDING = "pending"  # freed, and not yet to be used again: another stream may still read it
    INACTIVE = "inactive"  # reserved, and held by nobody
    RELEASED = "released"  # given back to the driver, inside a segment whose other parts are in use
    MIXED = "mixed"  # several small ones of more than one state, told as one


class Block(Value, array_like=True):
    """A stretch of a segment."""

    bytes: int
    state: BlockState
    count: int = 1  # neighbours of one state are told as one
    inactive_bytes: int = 0  # of a mixed one


class SegmentMap(Value, array_like=True):
    """Memory that an allocator took from its device in one piece, and how it is cut."""

    address: int  # a simulated one's are counted from the first
    bytes: int
    kind: str  # small, large, expandable, or private: a pool of its own, such as a CUDA graph's
    blocks: tuple[Block, ...]  # in the order of their addresses; together they are `bytes`

    @property
    def in_use(self) -> bool:
        """Whether something in it is allocated, so that it cannot be given back."""
        return any(
            block.state not in (BlockState.INACTIVE, BlockState.RELEASED) for block in self.blocks
        )


class AllocatorMap(Value):
    """How one process's allocator has cut what it took of one card. None: unknown, which is not 0."""

    owner: str  # the id of the owner in the book
    device: str
    wall: float  # when it was drawn; it is drawn anew once something has changed
    allocated_bytes: int
    reserved_bytes: int
    inactive_bytes: int | None = None  # reserved, and held by nobody
    releasable_bytes: int | None = (
        None  # of these, in segments that nobody uses: defragmenting gives them back
    )
    largest_free_bytes: int | None = (
        None  # the largest inactive block: the largest request that needs no new memory
    )
    alloc_retries: int = 0
    ooms: int = 0
    segments: tuple[SegmentMap, ...] = ()  # the largest ones, where there are too many to tell
    left_out: int = 0  # segments that are not told
    left_out_bytes: int = 0

    def largest_request_bytes(self, view: DeviceView) -> int | None:
        """The most that this process could now allocate there in one piece, within the card's budget; None: unknown.

        torch takes it of its largest free block, or of new memory, once whatever is releasable has been released. A
        simulated card's account is of what is allocated, and its allocator gives free blocks back where room is short.
        """
        if view.room_bytes is None or self.largest_free_bytes is None:
            return None
        room = max(0, view.room_bytes)
        return (
            room
            if view.device.simulated
            else max(self.largest_free_bytes, room + (self.releasable_bytes or 0))
        )
