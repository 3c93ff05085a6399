"""What a decision takes and what it returns: requests, rules, steps and verdicts."""

from __future__ import annotations

from collections.abc import Callable

from .base import Value
from .devices import Device, Sample, Shares
from .leases import Lease
from .models import Footprint


class Cap(Value):
    """What the operator allows one user, counting all of that user's processes together. None: no cap."""

    user: str
    file: str  # where it is written
    bytes_per_device: int | None = (
        None  # on each card; host memory, where others make one step aside to, is not capped
    )
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
    limit_bytes: int | None = (
        None  # INFERENCE_MEMORY_LIMIT_GB: a further limit on this owner's models
    )
    cap: Cap | None = None  # the operator's, on this owner's user


class World(Value):
    """The devices as they are now. What is decided is decided for this moment."""

    now: float
    wall: float
    devices: tuple[Device, ...]
    limits: dict[str, int]  # device -> budget in bytes, as this process would set it
    samples: dict[
        str, Sample
    ] = {}  # none for a simulated device: there the book is the measurement
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
    card_bytes: dict[
        str, int
    ] = {}  # the most that it may take of each card; one not named takes nothing. Empty: no bound
    margin_bytes: int = (
        512 * 2**20
    )  # left free on each card of a proportional split, for the driver's own needs
    overhead: float = (
        0.0  # what each card of a split takes beyond its part, as a fraction of that part
    )
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
    obstacle: str = (
        ""  # why it would not be loaded whatever the room: it is disabled, or no backend here can
    )

    def __str__(self) -> str:
        return self.because + (
            f" It would not be loaded: {self.obstacle}." if self.obstacle else ""
        )
