"""Answers of the runtime besides snapshots: holders of memory, offers, schedules, replays, maps of allocators."""

from __future__ import annotations

import enum

from ..safe_text import lines
from ..units import show_bytes
from .base import Value
from .book import Book
from .decisions import Grant, PlanLevel, Refuse, Request, Verdict, Wait, World
from .leases import Staying
from .snapshot import DeviceView


class Holder(Value):
    """One name, and the device memory to which the name refers."""

    name: str  # a variable, an output, a model, a thread or a module
    kind: str  # variable, output, last error, running, thread, model, or elsewhere
    device: str  # such as sim:0, or cuda:0,1
    bytes: int  # all storages that the name reaches; two names may reach the same one
    alone_bytes: int  # bytes that become free if only this name is deleted
    cell: str = ""  # the cell that made the object, such as In [7]; empty if unknown
    what: str = ""  # the class of the object, or who else refers to the memory
    stays: str = ""  # why some of its bytes cannot leave their device; empty: all can
    stays_bytes: int = 0  # how many of its bytes


class Holdings(Value):
    """The device memory of one process, by names and without. `held_bytes` is the sum of the next five fields."""

    holders: tuple[Holder, ...]
    held_bytes: int = 0
    explained_bytes: int = 0  # a name refers to them
    graph_bytes: int = 0  # only autograd graphs refer to them
    cached_bytes: int = 0  # reserved by the allocator, and not used
    unknown_bytes: int = 0  # storages without a name
    unseen_bytes: int = 0  # allocated, but no storage was found
    whole: bool = True  # False: the time limit ended the search early
    seconds: float = 0.0
    staying: tuple[Staying, ...] = ()  # the bytes that cannot leave their device, by reason
    # The next six fields are set only in the answer of another process.
    process: str = ""  # such as train.ipynb (pid 4121)
    parked_bytes: int = 0  # bytes that are parked in host memory
    left_out: int = 0  # smaller rows that are not listed
    left_out_bytes: int = 0  # bytes that these rows refer to
    note: str = ""  # why something is not listed
    stays: str = ""  # why the memory of the notebook's own code cannot be parked now


class Offer(Value):
    """The answer of one host: the effort that a use of the model would take on this host."""

    host: str
    name: str  # the model
    level: PlanLevel
    because: str
    seconds: float = 0.0  # until the model can be used
    measured: bool = False  # whether the seconds were measured on that host; else estimated
    victims: tuple[str, ...] = ()  # names of the models that would be evicted
    # The importance of the most important victim; lower is more important. Without victims: 0.
    victims_importance: int = 0
    victims_wished: int = 0  # how much the fleet wishes the victim that it wishes most
    left_bytes: int = 0  # free bytes that stay on the fullest of the model's cards
    need_bytes: int = 0
    users: int = 0  # blocks that use the model on that host now
    answered: bool = True  # False: the host does not answer, or its agent is restarted


class HostRoom(Value):
    """The room of one host for a model. A fleet uses it to choose the hosts that make a plan."""

    host: str
    here: bool = False  # whether the model is on a device of the host
    warm: bool = False  # whether the model is in the host's memory
    drained: bool = False  # whether the host takes no new models
    need_bytes: int = 0  # the size of the model; 0: unknown
    may_split: bool = False  # whether the model may use several cards
    free_bytes: tuple[int, ...] = ()  # of each card
    budget_bytes: tuple[int, ...] = ()  # of each card
    # Importance and wish (see `Lease.wished`) -> for each card, the bytes of such idle leases.
    idle_bytes: dict[tuple[int, int], tuple[int, ...]] = {}


class CellModels(Value):
    """The models that the text of a running or waiting cell names."""

    cell: str  # such as "cell 7"
    uses: tuple[str, ...] = ()  # models that the cell brings onto a device, in order
    mentions: tuple[str, ...] = ()  # all models that the cell names
    running: bool = False


class ScheduledModel(Value):
    """A model that the running cell or a waiting cell uses."""

    name: str
    cell: str  # the first cell that uses it
    running: bool  # whether that cell runs now
    where: str  # sim:0, host, or disk
    ahead: bool = False  # whether it was loaded before its cell began
    loading: bool = False  # whether it is being loaded now
    because: str = ""  # why it is not loaded ahead now; empty if it is on its device


class Schedule(Value):
    """The models of the running cell and the waiting cells, and counts of models loaded ahead."""

    mode: str = "auto"  # the setting GPU_PREFETCH
    cells: tuple[CellModels, ...] = ()  # the running cell and the waiting ones, in order
    models: tuple[ScheduledModel, ...] = ()  # in the order of their first use
    loaded_ahead: int = 0  # models that this process loaded ahead since it started
    used: int = 0  # models loaded ahead that a cell then used
    unused: int = 0  # models loaded ahead that were evicted unused, or that no cell needs now


class Decided(Value):
    """One decision on a request, with everything that the scheduler read for this decision."""

    id: int  # its number in the journal; 0 before it is written
    wall: float  # epoch seconds
    version: str  # of gpu-console
    policy: str
    book: Book
    request: Request
    world: World
    verdict: Verdict

    @property
    def model(self) -> str:
        """The name of the model that was requested."""
        return self.request.lease.name


class Replayed(Value):
    """A recorded decision, and whether the scheduler now reaches the same verdict."""

    id: int
    wall: float  # epoch seconds of the recorded decision
    model: str
    decided: str  # the recorded verdict in a sentence
    now: str  # the verdict of the replay in a sentence
    same: bool
    differs: tuple[str, ...] = ()  # the parts of the verdict that differ, each in a sentence
    version: str = ""  # of gpu-console when the decision was recorded, if that was another one

    def __str__(self) -> str:
        return lines(f"Decision {self.id} on {self.model}: {self.decided} {self.result}")

    @property
    def result(self) -> str:
        """The result of the replay, in sentences."""
        by = f" It was recorded by version {self.version}." if self.version else ""
        if self.same:
            return f"Decided again: the same.{by}"
        return f"Decided again: {self.now} {' '.join(self.differs)}{by}"


def verdict_kind(verdict: Verdict) -> str:
    """The kind of `verdict` as people say it: granted, waiting or refused."""
    kinds: dict[type, str] = {Grant: "granted", Wait: "waiting", Refuse: "refused"}
    return kinds[type(verdict)]


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
        """Whether it has a block that is neither inactive nor released, so that the driver cannot get it back."""
        free = (BlockState.INACTIVE, BlockState.RELEASED)
        return any(block.state not in free for block in self.blocks)


class AllocatorMap(Value):
    """How the allocator of one process has divided its memory of one card. None is unknown, which is not 0."""

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
