"""Owners, leases, tickets, and the section of the book that each owner writes."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from .base import HOST, NEVER, NORMAL, Value
from .devices import Share, Shares, beside, where


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
        return (
            f"{self.notebook.rsplit('/', 1)[-1]} (pid {self.pid})"
            if self.notebook
            else f"pid {self.pid}"
        )


class Phase(enum.StrEnum):
    ARRIVING = "arriving"  # its room is reserved; bytes are on their way
    SETTLED = "settled"
    LEAVING = "leaving"  # being moved out or dropped


class LeaseId(NamedTuple):
    """Which lease is meant: the id of its owner in the book, and the model's name.

    Text such as `qwen@4121` is parsed into this at the edge; everything inside uses this value.
    As text it is `owner/name`, as tickets carry it.
    """

    owner: str
    name: str

    def __str__(self) -> str:
        return f"{self.owner}/{self.name}"


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


class Section(Value):
    """The part of the book that one owner writes, and nobody else."""

    owner: Owner
    leases: tuple[Lease, ...] = ()
    residue: dict[
        str, int
    ] = {}  # device -> bytes this process holds beyond its leases (context, cache, own tensors)
    names: tuple[str, ...] = ()  # models that it can load when asked
    counts: dict[str, int] = {}  # loaded, offloaded, restored, unloaded, refused
    engines: tuple[
        int, ...
    ] = ()  # processes that it has started to run models in; their memory is its leases'
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
    layout: str = (
        ""  # how the need may be divided otherwise among these places; empty: it is for one card
    )
    recalls: tuple[str, ...] = ()  # lease ids asked to step aside for it
    recalled_since: float = 0.0  # since when just these are asked
    held: tuple[str, ...] = ()  # lease ids that the asking thread itself pins
    blocked_since: float = 0.0  # since when only models in use stand in its way; 0: they do not
    because: str = ""
    said_by: str = (
        ""  # the person for whom it was asked, as the asking process claims: for display, no proof
    )
