"""The nouns of the house, as frozen values.

Whatever is decided is decided from these and ends as these. They hold no locks, tensors or clocks, and travel
as JSON, so any process can read the book that another wrote. Times are seconds of CLOCK_BOOTTIME unless a name says
`wall`; sizes are bytes.
"""
from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from .units import show_bytes

HOST = "host"
SCHEMA = 1
MOST_ENTRIES = 256  # leases and tickets in one page
MOST_EVENTS = 16  # events in one page, which all pay for; older ones live in the journal

NEVER = 0.0  # of a time, or not measured; say it by this name: what *is* the default takes no room in the page

IMPORTANCE = {"urgent": 1, "high": 5, "normal": 10, "low": 20, "batch": 30}  # lower is more important
NORMAL = IMPORTANCE["normal"]


class Value(Struct, frozen=True, omit_defaults=True, gc=False):
    """What all facts are: frozen, compared by value, small as JSON.

    Values cannot refer to each other in a circle, so the collector of garbage need not walk over a page's thousands.
    """


class Owner(Value):
    """A process that may hold leases, named so that no later process can be taken for it."""

    host: str
    boot: str
    pid: int
    started: int  # clock ticks after boot, from /proc/PID/stat: a pid comes back, the pair does not
    serial: int = 0  # several runtimes in one process are several owners
    user: str = ""
    notebook: str = ""
    inode: int = 0  # of the lock file that this owner holds for life

    @property
    def id(self) -> str:
        return f"{self.pid}.{self.started}.{self.serial}"

    @property
    def label(self) -> str:
        """How people call it: `train.ipynb (pid 4121)`."""
        return f"{self.notebook.rsplit('/', 1)[-1]} (pid {self.pid})" if self.notebook else f"pid {self.pid}"


class Device(Value):
    """One memory: a card (`cuda:0`), an instance of a partitioned one (`cuda:0.1`), a simulated card (`sim:0`), or the
    machine's RAM (`host`). The id names one physical card for everybody who shares the book; the UUID says which.
    """

    id: str
    total_bytes: int
    name: str = ""
    uuid: str = ""
    index: int = 0  # the number in its id, of an instance its card's; what torch calls the card is each process's own
    simulated: bool = False
    unified: bool = False  # its memory is the machine's: it and the host draw on one budget

    @property
    def is_host(self) -> bool:
        return self.id == HOST

    @property
    def key(self) -> str:
        """What outlives its name: the UUID, where it has one."""
        return self.uuid or self.id


class Sample(Value):
    """What a device's driver (or the machine, for `host`) last said."""

    device: str
    taken_at: float
    free_bytes: int | None  # None: the driver would not say; that is neither zero nor all
    processes: dict[int, int | None] = {}  # pid -> bytes; None where the driver says N/A
    utilisation_percent: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None


class Share(Value):
    """Bytes on a device."""

    device: str
    bytes: int


Shares = tuple[Share, ...]


class Part(Value):
    """One part of a footprint, and where its number came from."""

    name: str  # "weights", "kv_cache", "activations", "room", "margin", "context", "all"
    bytes: int
    source: str  # "declared", "measured on …", "safetensors header", "GGUF header", "shapes", "config", "name", …
    detail: str = ""  # how it was reckoned: `32 layers × 8 KV heads × 128 × 2 × 8192 tokens, 16 bits`

    @property
    def for_use(self) -> bool:
        """Whether it is room that the model's code takes while it runs, and that its lease keeps for it."""
        return self.name in ("kv_cache", "activations", "room")


class Footprint(Value):
    """The bytes that a model needs on a device, part by part. How they are found: `estimate.py`."""

    parts: tuple[Part, ...]
    heads: int = 0  # attention heads, which a tensor-parallel degree must divide; 0: unknown, any degree
    # Bytes of the indivisible consecutive pieces that the model may be cut between when it goes over several cards:
    # embeddings, layer 0…n, head. They sum to `bytes`, overheads included. Empty: it may be cut at any byte.
    pieces: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()  # sentences: what is not counted, and what was measured before
    at_load: bool = False  # cache and work space are taken with the weights, and are as much the model's own bytes

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @classmethod
    def of(cls, size: int, source: str = "declared") -> Footprint:
        return cls((Part("all", size, source),))

    @property
    def working_bytes(self) -> int:
        """Of these, room for use: it holds no weights, and stays claimed as long as the model is on a device."""
        return 0 if self.at_load else sum(part.bytes for part in self.parts if part.for_use)


class Evidence(Value):
    """What a model's source tells of its size, nothing of it loaded."""

    weight_bytes: int | None = None  # once in memory; None: it cannot be told from the source itself
    source: str = ""  # where that was read: "safetensors header", "GGUF header", "shapes", "module"
    file_bytes: int = 0  # of its files, where nothing but their size is known
    file_format: str = ""  # of those: gguf or safetensors
    name: str = ""  # of its file or repository, which may tell its size too
    config: dict[str, Any] = {}  # by Hugging Face's names
    pieces: tuple[int, ...] = ()  # weights of the consecutive pieces that it may be cut between
    fingerprint: str = ""  # of the source as it is now; empty: it could not be told from another
    why_unknown: str = ""  # what went wrong, where it cannot be told
    at_load: bool = False  # its engine takes cache and work space when it loads, so they are measured with the weights


class Measurement(Value):
    """What a model was seen to take, once it had been loaded."""

    resident_bytes: int  # of its storages
    peak_bytes: int | None = None  # the most, while it was loaded and used; None: not seen
    day: str = ""  # as 2026-11-21
    device: str = ""  # a card's name
    name: str = ""  # the model's, for whoever reads the file


class ModelSpec(Value):
    """What is known of a model before it is loaded. No secrets, no code."""

    name: str
    backend: str
    source: str = ""  # a directory, a file or a hub id; empty for what came from live Python
    size: int | None = None  # declared bytes
    model_type: str = "other"  # llm, embedding, reranker, vision, diffusion, other
    quantization: str = ""
    importance: int = NORMAL
    keep: bool = False
    keep_alive: float = 0.0
    layout: str = "auto"
    devices: tuple[str, ...] = ()  # where it may go; empty: anywhere
    placement: dict[str, Any] = {}  # fields of PlacementRules on which the model has its own word
    enabled: bool = True  # False: it is known, and refuses to load
    options: dict[str, Any] = {}  # what its backend and its estimate go by: context_length, gpu_layers, dtype, …

    @property
    def key(self) -> str:
        """`type:name:quantization`, as the HTTP face and the logs name a model."""
        return f"{self.model_type}:{self.name}:{self.quantization or 'none'}"


class Phase(enum.StrEnum):
    ARRIVING = "arriving"  # its room is reserved; bytes are on their way
    SETTLED = "settled"
    LEAVING = "leaving"  # being moved out or dropped


class Lease(Value):
    """A model's, or a block of code's, claim on memory.

    `shares` is where its bytes lie, `target` where they are going. While they travel both count in full.
    """

    owner: str
    name: str
    key: str = ""  # of the decision that set it moving: a decision made twice is recognised by it
    shares: Shares = ()
    target: Shares = ()
    filled: Shares = ()  # where its own bytes lie, or will, if it claims more than them; empty: all of it
    working_bytes: int = 0  # room for its use, cache and activations, that it claims on a device beside its own bytes
    phase: Phase = Phase.SETTLED
    kind: str = "model"  # or "block": bytes for code, never moved, gone at the end of the block
    importance: int = NORMAL
    keep: bool = False
    keep_alive: float = 0.0
    pins: int = 0  # how many users hold it right now
    pinned_since: float = 0.0
    last_used: float = 0.0
    uses: int = 0
    reload_seconds: float = 0.0
    restore_seconds: float = 0.0
    droppable: bool = False  # its source can reproduce it, byte for byte
    movable: bool = True  # its backend can move it between memories
    settled_at: float = 0.0
    away_since: float = 0.0  # since when it lies in host memory
    measured_bytes: int | None = None  # of a block: what its code really took at the peak
    backend: str = ""
    model_type: str = "other"
    quantization: str = ""

    @property
    def id(self) -> str:
        return f"{self.owner}/{self.name}"

    @property
    def bytes(self) -> int:
        return sum(share.bytes for share in (self.shares or self.target))

    @property
    def own_bytes(self) -> int:
        """What it is itself, where it claims more: the bytes that move when it moves."""
        return sum(share.bytes for share in self.filled) if self.filled else self.bytes

    def holding(self, measured: Shares) -> Lease:
        """This lease, settled with what was measured; where it claims more than it fills, it goes on claiming that.

        A whole card stays whole. Room for use stays as large as it was asked for, whatever the weights turn out to be;
        in host memory there is none of it.

        >>> Lease("1", "a", target=(Share("sim:0", 9),), filled=(Share("sim:0", 4),)).holding((Share("sim:0", 5),)).shares
        (Share(device='sim:0', bytes=9),)
        """
        settled = replace(self, shares=measured, target=(), filled=(), phase=Phase.SETTLED)
        if all(share.device == HOST for share in measured):
            return settled
        claimed = self.target or self.shares
        more = sum(share.bytes for share in claimed) > self.own_bytes + self.working_bytes
        claims = {share.device: share.bytes for share in claimed} if self.filled and more else {}
        for share in beside(measured, self.working_bytes):
            claims[share.device] = max(share.bytes, claims.get(share.device, 0))
        shares = tuple(Share(id, size) for id, size in claims.items())
        return replace(settled, shares=shares, filled=measured) if shares != measured else settled

    @property
    def on_host(self) -> bool:
        return bool(self.shares) and all(share.device == HOST for share in self.shares)

    @property
    def on_device(self) -> bool:
        for share in self.shares:  # a plain loop: every decision asks this of every lease
            if share.device != HOST:
                return True
        return False

    @property
    def where(self) -> str:
        """`cuda:0`, `cuda:0,1`, `host`, or `arriving` for what lies nowhere yet."""
        return where(self.shares) or self.phase.value

    def idle_seconds(self, now: float) -> float:
        return 0.0 if self.pins else max(0.0, now - self.last_used)

    def claims(self) -> Iterator[Share]:
        yield from self.shares
        yield from self.target


def beside(shares: Shares, size: int) -> Shares:
    """The shares with that many bytes more, spread over them in proportion.

    >>> beside((Share("sim:0", 2), Share("sim:1", 1)), 4)
    (Share(device='sim:0', bytes=4), Share(device='sim:1', bytes=3))
    """
    total, given, done = sum(share.bytes for share in shares), 0, 0
    grown = []
    for share in shares:
        done += share.bytes
        end = size * done // total if total else 0
        grown.append(Share(share.device, share.bytes + end - given))
        given = end
    return tuple(grown)


def where(shares: Shares) -> str:
    """`cuda:0` for one device, `cuda:0,1` for several of a kind, empty for none.

    >>> where((Share("cuda:0", 1), Share("cuda:1", 1)))
    'cuda:0,1'
    """
    ids = list(dict.fromkeys(share.device for share in shares))
    if len(ids) < 2 or len({id.split(":")[0] for id in ids}) > 1:
        return " + ".join(ids)
    return f"{ids[0].split(':')[0]}:" + ",".join(id.split(":")[1] for id in ids)


class Section(Value):
    """The part of the book that one owner writes, and nobody else."""

    owner: Owner
    leases: tuple[Lease, ...] = ()
    residue: dict[str, int] = {}  # device -> bytes this process holds beyond its leases (context, cache, own tensors)
    names: tuple[str, ...] = ()  # models that it can load when asked
    counts: dict[str, int] = {}  # loaded, offloaded, restored, unloaded, refused
    engines: tuple[int, ...] = ()  # processes that it has started to run models in; their memory is its leases'
    busy_since: float = NEVER  # since when its kernel runs a cell; 0: it runs none, or is no kernel
    idle_since: float = NEVER  # when its last cell ended; 0: unknown, or it runs one

    def lease(self, name: str) -> Lease | None:
        return next((lease for lease in self.leases if lease.name == name), None)


class Ticket(Value):
    """A request that waits, or something asked of another owner. It ends with its asker."""

    key: str
    owner: str
    verb: str  # "use", or what is asked of the target's owner: evict, restore, preload, move, pin, unpin, defrag
    name: str  # the model wanted (use), or the lease id asked about
    arrived: float
    refreshed: float
    importance: int = NORMAL
    need: Shares = ()  # the room it waits for, on the likeliest card
    places: tuple[str, ...] = ()  # cards that would do as well, or where to move it; empty: any
    layout: str = ""  # how the need may be divided otherwise among these places; empty: it is for one card
    recalls: tuple[str, ...] = ()  # lease ids asked to step aside for it
    recalled_since: float = 0.0  # since when just these are asked
    held: tuple[str, ...] = ()  # lease ids that the asking thread itself pins
    blocked_since: float = 0.0  # since when only models in use stand in its way; 0: they do not
    because: str = ""
    said_by: str = ""  # the person for whom it was asked, as the asking process claims: for display, no proof


class Ghost(Value):
    """What a process held on a real card when it died: claimed until a sample shows that the driver has freed it."""

    owner: str
    pid: int
    device: str
    bytes: int
    settled_at: float  # when the last of it came: an older sample has not seen it
    died_at: float  # when its death was proven

    def gone(self, sample: Sample | None) -> bool:
        """Whether this sample was taken after the death, and no longer lists the process."""
        return (sample is not None and sample.free_bytes is not None and sample.taken_at > self.died_at
                and self.pid not in sample.processes)


class Drain(Value):
    """That a card takes no new leases, and what is idle there leaves."""

    by: str  # the user who said so
    wall: float  # since when, in epoch seconds


class Event(Value):
    """Something that happened, and why."""

    seq: int
    wall: float  # epoch seconds, for display
    model: str
    action: str  # granted, loaded, offloaded, restored, unloaded, moved, misplaced, released, refused, …
    reason: str  # one word: request, memory_pressure, evict, owner, death, …
    because: str
    bytes: int = 0
    device: str = ""
    owner: str = ""
    by: str = ""  # who asked, where that is somebody else: a person, as far as one was named, and their process
    shares: Shares = ()  # what lay where, if that was on several devices; `device` is the first of them
    answers: str = ""  # the key of the ticket that this answers
    # What else was considered, and why it lost, in sentences. In the journal only: the page must stay small.
    runners_up: tuple[str, ...] = ()
    seconds: float = NEVER  # that a load or a return took; 0: not measured

    def __str__(self) -> str:
        return f"{self.model} {self.action}: {self.because}"


class Book(Value):
    """All leases and tickets of one host: the one page that every decision reads and writes."""

    schema: int = SCHEMA
    devices: tuple[Device, ...] = ()
    limits: dict[str, int] = {}  # device -> budget in bytes, set by the first owner
    samples: dict[str, Sample] = {}
    sections: dict[str, Section] = {}
    tickets: tuple[Ticket, ...] = ()
    events: tuple[Event, ...] = ()
    seq: int = 0  # of the newest event
    counts: dict[str, int] = {}  # of owners that are gone, so that totals never fall
    ghosts: tuple[Ghost, ...] = ()  # what the dead held, as long as a driver may still hold it
    drained: dict[str, Drain] = {}  # Device.key -> by whom; nobody's own, so it outlives who said so

    @property
    def entries(self) -> int:
        """Leases and tickets: what the size of the page goes by."""
        return sum(len(section.leases) for section in self.sections.values()) + len(self.tickets)

    def leases(self) -> Iterator[Lease]:
        for section in self.sections.values():
            yield from section.leases

    def lease(self, owner: str, name: str) -> Lease | None:
        section = self.sections.get(owner)
        return section.lease(name) if section else None

    def find(self, lease_id: str) -> Lease | None:
        """The lease of that id (`owner/name`)."""
        owner, _, name = lease_id.partition("/")
        return self.lease(owner, name)

    def ticket(self, key: str) -> Ticket | None:
        return next((ticket for ticket in self.tickets if ticket.key == key), None)

    def owner(self, owner_id: str) -> Owner | None:
        section = self.sections.get(owner_id)
        return section.owner if section else None

    def claims(self) -> dict[str, int]:
        """Bytes claimed on each device: every share, every target of a move, every residue, every ghost."""
        claimed: dict[str, int] = {}
        for ghost in self.ghosts:
            claimed[ghost.device] = claimed.get(ghost.device, 0) + ghost.bytes
        for section in self.sections.values():
            for lease in section.leases:
                for share in lease.shares:
                    claimed[share.device] = claimed.get(share.device, 0) + share.bytes
                for share in lease.target:
                    claimed[share.device] = claimed.get(share.device, 0) + share.bytes
            for device, size in section.residue.items():
                claimed[device] = claimed.get(device, 0) + size
        return claimed

    def with_section(self, section: Section) -> Book:
        return replace(self, sections={**self.sections, section.owner.id: section})

    def with_lease(self, lease: Lease) -> Book:
        """This book with the lease put in its owner's section, in place of the one of that name."""
        section = self.sections[lease.owner]
        others = tuple(old for old in section.leases if old.name != lease.name)
        return self.with_section(replace(section, leases=(*others, lease)))

    def without_lease(self, owner: str, name: str) -> Book:
        section = self.sections[owner]
        return self.with_section(replace(section, leases=tuple(o for o in section.leases if o.name != name)))

    def with_ticket(self, ticket: Ticket) -> Book:
        """This book with the ticket, in its old place where it had one."""
        if self.ticket(ticket.key) is None:
            return replace(self, tickets=(*self.tickets, ticket))
        return replace(self, tickets=tuple(ticket if t.key == ticket.key else t for t in self.tickets))

    def without_ticket(self, key: str) -> Book:
        return replace(self, tickets=tuple(ticket for ticket in self.tickets if ticket.key != key))


class Cap(Value):
    """What the operator allows one user, counting all of that user's processes together. None: no cap."""

    user: str
    file: str  # where it is written
    bytes_per_device: int | None = None  # on each card; host memory, where others make one step aside to, is not capped
    importance: int | None = None  # the highest that may be asked for, that is, the lowest number
    keep: bool = True
    longest_lease_seconds: float | None = None  # of a block of code
    tables: dict[str, str] = {}  # key -> the table that says so, such as users.ann

    def named(self, key: str) -> str:
        """`cap [users.ann] keep in /etc/gpu-console/config.toml`, so that it can be found and argued about."""
        return f"cap [{self.tables.get(key, '')}] {key} in {self.file}"


class Asker(Value):
    """Who left a ticket, as the ledger vouches for it and the machine's configuration knows them."""

    user: str
    at_home: bool = False  # the very user whose process is asked
    operator: bool = False
    importance: int = 0  # the highest that their cap allows

    @property
    def commands(self) -> bool:
        """Whether more may be asked than to step aside: to load, to pin, to defragment."""
        return self.at_home or self.operator


class Rules(Value):
    """The numbers that decisions go by; settings, as values."""

    grace_seconds: float = 5.0
    moderate: float = 0.60
    high: float = 0.80
    critical: float = 0.90
    idle_moderate_seconds: float = 120.0
    idle_high_seconds: float = 30.0
    relief: str = "auto"  # or "always", or "never"
    offload: bool = True  # False: what leaves is dropped
    reserve_bytes: int = 0  # measured free memory that stays untouched
    stale_seconds: float = 5.0  # a sample older than this is no ground for a grant
    passing_seconds: float = 30.0  # how long a request blocked by a model in use may be passed
    answer_seconds: float = 2.0  # an owner asked so long ago, and idle still, does not answer
    refresh_seconds: float = 2.0  # a ticket not refreshed for so long is skipped
    ageing_seconds: float = 30.0  # waiting so long is worth one class of importance
    limit_bytes: int | None = None  # INFERENCE_MEMORY_LIMIT_GB: a further limit on this owner's models
    cap: Cap | None = None  # the operator's, on this owner's user


class World(Value):
    """The devices as they are now. What is decided is decided for this moment."""

    now: float
    wall: float
    devices: tuple[Device, ...]
    limits: dict[str, int]  # device -> budget in bytes, as this process would set it
    samples: dict[str, Sample] = {}  # none for a simulated device: there the book is the measurement
    rules: Rules = Rules()

    def device(self, id: str) -> Device | None:
        return next((device for device in self.devices if device.id == id), None)


class PlacementRules(Value):
    """Where a footprint may go, and how it may be divided among several cards.

    `layout` is `single` (one card), `balanced` (one card where one can hold it, else equal shares, as tensor
    parallelism needs), `proportional` (the same, in proportion to the room on each card), `auto` (the same as
    `proportional`) or `whole` (as few cards as do, each of them taken whole). Who cannot be split says `single`.
    """

    devices: tuple[str, ...] = ()  # empty: any
    layout: str = "single"
    policy: str = "best-fit"  # or "most-free", "fewest-evictions"
    least_cards: int = 1  # more: it is split although one card could hold it
    most_cards: int = 0  # the largest degree of a split; 0: as many as there are
    card_bytes: dict[str, int] = {}  # the most that it may take of each card; one not named takes nothing. Empty: no bound
    margin_bytes: int = 512 * 2**20  # left free on each card of a proportional split, for the driver's own needs
    overhead: float = 0.0  # what each card of a split takes beyond its part, as a fraction of that part
    factor: float = 0.0  # a share is the weights times this, and a card that this nearly fills is taken whole; 0: the estimate
    largest_fraction: float = 0.8  # of a card, that such a share may take


class Candidate(Value):
    """One way to place a footprint, and what speaks for or against it."""

    shares: Shares
    fits: bool
    because: str
    victims: tuple[str, ...] = ()
    cost_seconds: float = 0.0  # of reloading whom it displaces
    filled: Shares = ()  # where its own bytes would lie, if the shares are more than them


class Request(Value):
    """Somebody wants a model on a device, or bytes for a block of code."""

    key: str  # made, and noted by its maker, before it is sent
    lease: Lease  # what is wanted, still without shares: owner, name, importance, keep, …
    footprint: Footprint
    arrived: float
    placement: PlacementRules = PlacementRules()
    held: tuple[str, ...] = ()  # lease ids that the asking thread pins
    wait: bool = True  # False: leave no ticket


class Load(Value, tag=True):
    """Bring a model's bytes from its source to its shares."""

    lease: str
    shares: Shares
    because: str = ""


class Move(Value, tag=True):
    """Carry a model's bytes from one memory to another."""

    lease: str
    source: Shares
    shares: Shares
    because: str = ""
    reason: str = "request"
    by: str = ""  # who asked, where that is somebody else


class Drop(Value, tag=True):
    """Let a model's bytes go; its source has them."""

    lease: str
    source: Shares
    because: str = ""
    reason: str = "request"
    by: str = ""  # who asked, where that is somebody else


Step = Load | Move | Drop


class Grant(Value, tag=True):
    """The room is yours; do these steps, then settle."""

    lease: Lease
    steps: tuple[Step, ...]
    because: str
    considered: tuple[Candidate, ...] = ()
    bytes: int = 0  # that came free, where that was asked


class Wait(Value, tag=True):
    """Not yet. Do these steps of your own (they make room), then ask again."""

    because: str
    steps: tuple[Step, ...] = ()
    asked: tuple[str, ...] = ()  # lease ids of others that were asked to step aside
    silent: tuple[str, ...] = ()  # those of them whose owner has not answered
    blockers: tuple[str, ...] = ()  # lease ids in use that stand in the way
    ahead: int = 0  # how many requests come first
    retry_at: float | None = None  # when time alone will have changed the answer
    considered: tuple[Candidate, ...] = ()


class Refuse(Value, tag=True):
    """Never, as things stand; nothing was touched."""

    because: str
    kind: str = "hopeless"  # or nested, kept, precious (what cannot leave), limit, cap, deadlock, full, drained
    need_bytes: int = 0
    budget_bytes: int = 0
    device: str = ""
    holders: tuple[str, ...] = ()  # lease ids that stand in the way for good
    considered: tuple[Candidate, ...] = ()


Verdict = Grant | Wait | Refuse
Policy = Callable[[Lease, World], float]  # the lowest leaves first


class Level(enum.StrEnum):
    """How full a device is."""

    LOW = "LOW"
    MODERATE = "MODERATE"
    HIGH = "HIGH"
    CRITICAL = "CRITICAL"
    UNKNOWN = "UNKNOWN"


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
        return any(block.state not in (BlockState.INACTIVE, BlockState.RELEASED) for block in self.blocks)


class AllocatorMap(Value):
    """How one process's allocator has cut what it took of one card. None: unknown, which is not 0."""

    owner: str  # the id of the owner in the book
    device: str
    wall: float  # when it was drawn; it is drawn anew once something has changed
    allocated_bytes: int
    reserved_bytes: int
    inactive_bytes: int | None = None  # reserved, and held by nobody
    releasable_bytes: int | None = None  # of these, in segments that nobody uses: defragmenting gives them back
    largest_free_bytes: int | None = None  # the largest inactive block: the largest request that needs no new memory
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
        return room if view.device.simulated else max(self.largest_free_bytes, room + (self.releasable_bytes or 0))


class Stranger(Value):
    """A process on a real card that is no owner in the book."""

    device: str
    pid: int
    bytes: int | None  # None: the driver will not say
    user: str = ""  # empty, as the command: it cannot be seen from here
    command: str = ""


class DeviceView(Value):
    """One device as a face shows it."""

    device: Device
    limit_bytes: int
    claimed_bytes: int
    measured_bytes: int | None  # in use according to the driver; None: unknown
    level: Level
    pressure: float  # 0 to 1 and beyond: the larger of claimed / limit and measured / total
    sample: Sample | None = None
    residue_bytes: int = 0
    stranger_bytes: int | None = None  # in use and leased by nobody; None: unknown, or simulated
    drained: Drain | None = None
    room_bytes: int | None = None  # what a grant may spend now, negative in an overdraft; None: not known
    blind: str = ""  # why nothing can be granted: the device cannot be seen well enough


class Outcome(Value):
    """What a verb did, or why it did not yet."""

    verb: str
    name: str
    done: bool
    because: str
    bytes: int = 0  # freed (evict, defrag) or taken (preload, restore)
    where: str = ""  # where the model lies now
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.verb} {self.name}: {self.because}".replace(" :", ":")


class Applied(Value):
    """What became of a file of models, by their names."""

    file: str
    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what is kept and has no effect here


class Health(Value):
    """One line on the fullest device."""

    healthy: bool  # False at CRITICAL
    pressure: Level
    used_percent: float | None  # measured, all cards together; None: unknown
    message: str

    def __str__(self) -> str:
        return f"{self.pressure}: {self.message}"


class Plan(Value):
    """What `use` would do now: every step, what would be displaced, and what else was considered."""

    granted: bool  # without waiting for a model in use
    steps: tuple[Step, ...]
    shares: Shares
    because: str
    considered: tuple[Candidate, ...] = ()  # the others with the reason they lost
    asked: tuple[str, ...] = ()  # lease ids of other owners that would be asked to step aside
    footprint: Footprint | None = None
    name: str = ""
    cards: str = ""  # GPU: 0, or GPUs: 0,1,2 (TP:3)
    obstacle: str = ""  # why it would not be loaded whatever the room: it is disabled, or no backend here can

    def __str__(self) -> str:
        return self.because + (f" It would not be loaded: {self.obstacle}." if self.obstacle else "")


class Moment(Value):
    """One device at one time of its history."""

    wall: float  # epoch seconds
    device: str
    total_bytes: int
    limit_bytes: int  # its budget
    measured_bytes: int | None  # in use; None: the driver would not say. What no lease claims is the rest
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
        """What a summary of several moments keeps the highest of: what is in use, or claimed, whichever is more."""
        return max(self.claimed_bytes, self.measured_bytes or 0)


class History(Value):
    """How the devices of a host were used, and what happened meanwhile."""

    moments: tuple[Moment, ...]  # of all devices, the newest last
    events: tuple[Event, ...]  # the newest last
    seconds: float  # how far it was asked to look back

    def of(self, device: str) -> tuple[Moment, ...]:
        """The moments of one device."""
        return tuple(moment for moment in self.moments if moment.device == device)


class Unanswered(Value):
    """Somebody asks something of a process, and it does not answer."""

    owner: Owner  # who does not answer
    ticket: Ticket  # what is asked
    since: float  # since when, by the clock of the snapshot's `now`


class Snapshot(Value):
    """Everything a face needs, as of one moment."""

    now: float
    wall: float
    owner: Owner  # who looked
    devices: tuple[DeviceView, ...]
    sections: dict[str, Section]
    tickets: tuple[Ticket, ...]
    events: tuple[Event, ...]
    specs: tuple[ModelSpec, ...]  # models registered in the looking process
    simulated: bool
    governed: bool = True  # False: ENABLE_MEMORY_GOVERNOR is off
    degraded: str = ""  # why the monitor cannot see; empty: it can
    ledger: str = ""
    totals: dict[str, int] = {}  # evictions, offloads, unloads, restorations of this boot
    strangers: tuple[Stranger, ...] = ()  # processes on the cards that lease nothing, the largest first
    host: str = ""  # whose book this is, where it is not the looker's own
    seen_seconds: float = 0.0  # since anybody there last showed itself, for another host
    rules: Rules = Rules()  # the looker's: thresholds of the levels, reserve, grace
    unanswered: tuple[Unanswered, ...] = ()  # who does not answer what is asked of them, the longest silent first

    def leases(self) -> Iterator[Lease]:
        for section in self.sections.values():
            yield from section.leases

    def __str__(self) -> str:
        """A line a device and a lease, for `print`; the faces show it with bars and in colour."""
        cards = [f"{view.device.id}: {show_bytes(view.claimed_bytes)} of {show_bytes(view.limit_bytes)} claimed, pressure "
                 f"{view.level}" for view in self.devices]
        held = [f"  {lease.name}: {show_bytes(lease.bytes)} on {lease.where}{', in use' if lease.pins else ''}"
                for lease in self.leases()]
        return "\n".join([*cards, *held])


def encode(value: Value) -> bytes:
    """The value as JSON."""
    return _encoder.encode(value)


def decode_book(data: bytes | memoryview | str) -> Book:
    """The book that a page holds. Raises msgspec.DecodeError or msgspec.ValidationError for anything else."""
    return _decode_book(data)


def decode_section(data: bytes | str) -> Section:
    """The section that a roster holds. Raises as decode_book."""
    return _decode_section(data)


_encoder = msgspec.json.Encoder()
_decode_book = msgspec.json.Decoder(Book).decode
_decode_section = msgspec.json.Decoder(Section).decode


def one_memory(devices: Iterable[Device]) -> frozenset[str]:
    """The host and the cards whose memory it is: whatever lies on any of them, it takes of the same bytes. Empty where
    every card has memory of its own."""
    cards = frozenset(device.id for device in devices if device.unified)
    return cards | {HOST} if cards else cards


def overdrafts(old: Book, new: Book) -> dict[str, int]:
    """Devices that this write would grant beyond max(limit, old sum), and by how much: laws 1 and 2.

    Facts are always accepted: a lease that settled larger than it asked for, or residue, may show an overdraft. Only
    bytes that are newly *promised* (targets) may not.
    """
    # What a section promised before and does still cancels out: most writes change one of many.
    changed = [id for id, section in new.sections.items() if old.sections.get(id) is not section]
    promises = _promised(new.sections[id] for id in changed)
    gone = old.sections.keys() - new.sections.keys() if promises else ()
    promised = _promised(old.sections[id] for id in (*changed, *gone) if id in old.sections)
    more = {device for device, size in promises.items() if size > promised.get(device, 0)}
    if not more:
        return {}
    before, after = old.claims(), new.claims()
    over = {device: after[device] - max(new.limits.get(device, after[device]), before.get(device, 0))
            for device in more}
    shared = one_memory(new.devices)
    if shared & more:  # they have one budget, the largest of theirs
        limit = max(new.limits.get(device, 0) for device in shared)
        over["+".join(sorted(shared))] = sum(after.get(device, 0) for device in shared) - max(
            limit, sum(before.get(device, 0) for device in shared))
    return {device: excess for device, excess in over.items() if excess > 0}


def _promised(sections: Iterable[Section]) -> dict[str, int]:
    """Bytes on each device that are reserved for what is still on its way."""
    sums: dict[str, int] = {}
    for section in sections:
        for lease in section.leases:
            for share in lease.target:
                sums[share.device] = sums.get(share.device, 0) + share.bytes
    return sums
