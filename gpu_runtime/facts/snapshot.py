"""The data that all front ends show: a snapshot of the book and the devices, and recent history.

Also other answers of the runtime: holders of memory, offers, schedules, replays, maps of allocators.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..compat import StrEnum
from ..safe_text import lines
from ..units import show_bytes, show_seconds
from .book import (
    KERNEL,
    NEVER,
    Book,
    Device,
    Drain,
    Event,
    Lease,
    Owner,
    Sample,
    Section,
    Staying,
    Ticket,
    Value,
    bytes_label,
    lease_title,
)
from .decisions import (
    Declared,
    Leaver,
    ModelSpec,
    PlanLevel,
    Request,
    Rules,
    Verdict,
    World,
)


class Level(StrEnum):
    """How full a device is."""

    LOW = "LOW"
    MODERATE = "MODERATE"
    HIGH = "HIGH"
    CRITICAL = "CRITICAL"
    UNKNOWN = "UNKNOWN"


class Stranger(Value):
    """A process that the driver lists on a real card, and whose pid is not in the book."""

    device: str
    pid: int
    bytes: int | None  # None if the driver gives no number
    user: str = ""  # user and command are empty if they are not visible from this process
    command: str = ""

    @property
    def label(self) -> str:
        """What is known about it, such as `python, bob, pid 4121`."""
        return ", ".join(filter(None, (self.command, self.user, f"pid {self.pid}")))


class DeviceView(Value):
    """One device as the status shows it."""

    device: Device
    limit_bytes: int
    claimed_bytes: int
    measured_bytes: int | None  # bytes in use according to the driver; None: unknown
    level: Level
    pressure: float  # 0 to 1 and beyond: the larger of claimed / limit and measured / total
    sample: Sample | None = None
    residue_bytes: int = 0
    stranger_bytes: int | None = None  # in use without a lease; None: unknown, or simulated
    drained: Drain | None = None
    # Bytes that a grant may spend now, negative in an overdraft; None: unknown.
    room_bytes: int | None = None
    blind: str = ""  # why nothing can be granted: no recent measurement of the device


class Outcome(Value):
    """The result of a verb such as `evict`, or why the verb's work is not done yet."""

    verb: str
    name: str
    done: bool
    because: str
    bytes: int = 0  # freed (evict, defrag) or taken (preload, restore)
    where: str = ""  # where the model is now
    seconds: float = 0.0

    def __str__(self) -> str:
        return lines(f"{self.verb} {self.name}: {self.because}".replace(" :", ":"))


class Applied(Value):
    """The result of applying a file of models; each field lists models by their names."""

    file: str
    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # sentences about fields that are stored but have no effect here


class Health(Value):
    """Whether the host has a problem, how full its cards are, and one line for people."""

    healthy: bool  # False if there is a problem; a full card is none
    pressure: Level
    # Of the bytes of all cards, those in use; None: unknown. It is for programs. The text has the
    # pressure, because the status shows it beside each card.
    used_percent: float | None
    message: str
    fullest: str = ""  # the card with the highest pressure, such as `sim:1 79 %`

    def __str__(self) -> str:
        return lines(f"{self.pressure}: {self.message}")


class Moment(Value):
    """The use of one device at one time. A history consists of such moments."""

    wall: float  # epoch seconds
    device: str
    total_bytes: int
    limit_bytes: int  # its budget
    # Bytes in use, with or without a lease; None: the driver gave no number.
    measured_bytes: int | None
    level: Level
    utilisation_percent: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    claims: dict[str, int] = {}  # `model@pid` -> bytes leased there

    @property
    def claimed_bytes(self) -> int:
        return sum(self.claims.values())

    @property
    def peak_bytes(self) -> int:
        """The larger of claimed and measured bytes. A summary of moments keeps the highest."""
        return max(self.claimed_bytes, self.measured_bytes or 0)


class History(Value):
    """The use of the devices of a host over a period, and the events in this period."""

    moments: tuple[Moment, ...]  # of all devices, the newest last
    events: tuple[Event, ...]  # the newest last
    seconds: float  # the length of the requested period

    def __str__(self) -> str:
        devices = ", ".join(dict.fromkeys(moment.device for moment in self.moments))
        counts = f"{len(self.moments)} moments, {len(self.events)} events"
        return f"history of {devices or 'no device'} over {show_seconds(self.seconds)}: {counts}"

    def of(self, device: str) -> tuple[Moment, ...]:
        return tuple(moment for moment in self.moments if moment.device == device)


class Unanswered(Value):
    """A request to which a process does not respond."""

    owner: Owner  # the process that does not respond
    ticket: Ticket  # the request
    since: float  # by the clock of the snapshot's `now`


class ProcessState(StrEnum):
    """The state of a process in the book, as it was when the snapshot was taken."""

    RUNNING = "running"  # the process runs a cell, or is no kernel
    IDLE = "idle"  # the process is a kernel that runs no cell
    STOPPED = "stopped"  # stopped by SIGSTOP or a debugger; it keeps its memory
    # It has crashed, and keeps its memory until the dump is written
    DUMPING = "writing a core dump"
    SILENT = "silent"  # it does not answer a request, or nothing proves that it lives
    ENDED = "ended"  # its leases are about to be removed


_UNUSUAL = frozenset(
    {ProcessState.STOPPED, ProcessState.DUMPING, ProcessState.SILENT, ProcessState.ENDED}
)


class Presence(Value):
    """The state of a process, and the time since when the process has been in this state."""

    state: ProcessState
    since: float = NEVER  # by the clock of the snapshot's `now`; 0: unknown

    def text(self, now: float) -> str:
        """The state with its duration at the time `now`: `silent for 12 s`, `stopped`.

        >>> Presence(ProcessState.SILENT, 8.0).text(20.0), Presence(ProcessState.ENDED).text(20.0)
        ('silent for 12 s', 'ended')
        """
        if not self.since:
            return self.state.value
        return f"{self.state.value} for {show_seconds(max(0.0, now - self.since))}"


class Snapshot(Value):
    """The state of the host at one moment, with everything that front ends show."""

    now: float
    wall: float
    owner: Owner  # the process that took the snapshot
    devices: tuple[DeviceView, ...]
    sections: dict[str, Section]
    tickets: tuple[Ticket, ...]
    events: tuple[Event, ...]
    specs: tuple[ModelSpec, ...]  # models registered in the process that took the snapshot
    simulated: bool
    governed: bool = True  # False: the setting ENABLE_MEMORY_GOVERNOR is off
    degraded: str = ""  # why the monitor cannot measure; empty: it can
    ledger: str = ""
    totals: dict[str, int] = {}  # evictions, offloads, unloads, restorations of this boot
    # Processes on the cards whose pids are not in the book, the largest first.
    strangers: tuple[Stranger, ...] = ()
    host: str = ""  # the host of this book, if it is another one
    seen_seconds: float = 0.0  # for another host: time since one of its processes was last active
    rules: Rules = Rules()  # rules of the process that took the snapshot: levels, reserve, grace
    # Processes that do not respond to a request, the longest unresponsive first.
    unanswered: tuple[Unanswered, ...] = ()
    # Owner id -> the state of its process. Empty for another host, whose processes are not visible.
    presences: dict[str, Presence] = {}
    names: dict[str, tuple[str, ...]] = {}  # owner id -> models that it can load on request
    # Owner id -> name of a model that the owner can load -> the size and importance that the owner
    # declares.
    declared: dict[str, dict[str, Declared]] = {}
    operates: bool = True  # False: its process may not act on the processes of other users
    # The user for whom it was made: the memory of every other user is one sum. Empty: all is shown.
    member: str = ""
    # Lease id -> why a person cannot move it off its card: it exists nowhere else, and RAM has no room for it.
    stays: dict[str, str] = {}
    full_disks: tuple[str, ...] = ()  # directories of the ledger and the history whose disk is full

    @property
    def cards(self) -> list[DeviceView]:
        """The devices without host memory."""
        return [view for view in self.devices if not view.device.is_host]

    def leases(self) -> Iterator[Lease]:
        """Every lease of every owner."""
        for section in self.sections.values():
            yield from section.leases

    def lease(self, owner_id: str, name: str) -> Lease | None:
        """The lease called `name` of the owner with this id, or None."""
        section = self.sections.get(owner_id)
        return section.lease(name) if section else None

    @property
    def own_leases(self) -> dict[str, Lease]:
        """The leases of the process that has made the snapshot, by name."""
        section = self.sections.get(self.owner.id)
        return {lease.name: lease for lease in section.leases} if section else {}

    @property
    def waiting(self) -> tuple[Ticket, ...]:
        """The requests that wait for room, in the order of the queue."""
        return tuple(ticket for ticket in self.tickets if ticket.verb == "use")

    def is_asleep(self, ticket: Ticket) -> bool:
        """Whether other requests overtake the waiting `ticket`, because its process has stopped."""
        return not self.rules.awake(ticket, self.now)

    def state_of(self, owner_id: str) -> ProcessState | None:
        """The state of the process with this id; None if it is unknown."""
        presence = self.presences.get(owner_id)
        return presence.state if presence else None

    def trouble(self, owner_id: str) -> Presence | None:
        """The state of the process with this id if it is stopped, silent or ended; else None."""
        return self.presences[owner_id] if self.state_of(owner_id) in _UNUSUAL else None

    def title(self, owner_id: str, name: str) -> str:
        """The name of a lease for people, also of one that is requested. A notebook's own code has its name."""
        section = self.sections.get(owner_id)
        lease = section.lease(name) if section else None
        if lease is None:
            lease = Lease(owner_id, name, kind=KERNEL if name == KERNEL else "model")
        return lease_title(lease, section.owner if section else None)

    def __str__(self) -> str:
        """One line for each device and each lease, for `print`."""
        shown = []
        for view in self.devices:
            claimed, limit = show_bytes(view.claimed_bytes), show_bytes(view.limit_bytes)
            shown.append(f"{view.device.id}: {claimed} of {limit} claimed, pressure {view.level}")
        for lease in self.leases():
            in_use = ", in use" if lease.pins else ""
            shown.append(f"  {lease.name}: {bytes_label(lease)}{in_use}")
        return lines("\n".join(shown))


# -- other answers ---------------------------------------------------------------------------------


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
    optimizer_bytes: int = 0  # of `explained_bytes`, the state of torch's optimizers
    # The next six fields are set only in the answer of another process.
    process: str = ""  # such as train.ipynb (pid 4121)
    parked_bytes: int = 0  # bytes that are parked in host memory
    left_out: int = 0  # smaller rows that are not listed
    left_out_bytes: int = 0  # bytes that these rows refer to
    note: str = ""  # why something is not listed
    stays: str = ""  # why the memory of the notebook's own code cannot be parked now


class OutOfMemoryStory(Value):
    """Why a cell of this notebook ran out of memory, and what to type."""

    headline: str
    lines: tuple[str, ...]  # the user's lines that the error came through, the one that failed last
    held: Holdings  # of this notebook, when the error was raised
    others: tuple[str, ...]  # what stepped aside, and what else is on the card and why it stays
    advice: str  # one thing to type or to do
    fits: str = ""  # the largest number with which the cell would fit, by two earlier runs of it
    device: str = ""
    wanted_bytes: int = 0  # 0: unknown
    free_bytes: int = 0
    # From torch's memory history, which a real card has from a kernel's first such error on: the lines that led to the
    # allocation that failed, and the lines that allocated what was held, with the bytes in front.
    stack: tuple[str, ...] = ()
    allocated: tuple[str, ...] = ()

    def rows(self, full: bool = False) -> list[tuple[str, str]]:
        """The story after its headline, as pairs of a label and words: at most seven, or with `full` all of it."""
        parts = {
            "in autograd graphs": self.held.graph_bytes,
            "optimizer state": self.held.optimizer_bytes,
            "cache": self.held.cached_bytes,
        }
        largest = sorted(self.held.holders, key=lambda holder: -holder.bytes)
        names = [f"{holder.name} {show_bytes(holder.bytes)}" for holder in largest if holder.bytes]
        of_it = ", ".join(f"{show_bytes(size)} {what}" for what, size in parts.items() if size)
        held = [show_bytes(self.held.held_bytes)]
        held += ["of it " + of_it] if of_it else []
        held = [": ".join(filter(None, ["; ".join(held), ", ".join(_first(names, full))]))]
        rows: dict[str, Iterable[str]] = {
            "your line": self.lines if full else self.lines[-1:],
            "this notebook": held,
            "others": self.others if full else ["; ".join(_first(self.others, full))],
            "would fit": [self.fits],
            "allocation": self.stack if full else (),
            "allocated by": self.allocated if full else (),
            "type": [self.advice],
            "more": () if full else ["%gpu why --oom"],
        }
        return [(label, words) for label, some in rows.items() for words in some if words]

    def __str__(self) -> str:
        return lines("\n".join([self.headline, *(": ".join(row) for row in self.rows())]))


def _first(names: Sequence[str], full: bool) -> list[str]:
    """The `names`; unless `full`, the first three and how many more there are."""
    if full or len(names) <= 4:
        return list(names)
    return [*names[:3], f"{len(names) - 3} more"]


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


class Decisions(tuple[Event, ...]):
    """The decisions on a model or notebook, the newest first."""

    # What may leave for it now, if it would need room; see `Plan.leavers`.
    leavers: tuple[Leaver, ...] = ()


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


class BlockState(StrEnum):
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
