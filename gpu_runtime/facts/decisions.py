"""A model's specification and footprint, a request for it, and the scheduler's verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compat import StrEnum
from ..safe_text import lines
from ..units import show_bytes, show_seconds
from .book import NORMAL, Device, Lease, Sample, Shares, Ticket, Value, importance_name


class Part(Value):
    """One part of a footprint, and the source of its number."""

    name: str  # "weights", "kv_cache", "activations", "room", "margin", "context", "all"
    bytes: int
    # "declared", "measured on …", "safetensors header", "GGUF header", "shapes", "config", "name", …
    source: str
    # How the number was calculated: `32 layers × 8 KV heads × 128 × 2 × 8192 tokens, 16 bits`.
    detail: str = ""

    @property
    def for_use(self) -> bool:
        """Whether this part is memory that the model's code uses while it runs."""
        return self.name in ("kv_cache", "activations", "room")


class Footprint(Value):
    """The bytes that a model needs on a device, part by part; made by `gpu_runtime.estimation`."""

    parts: tuple[Part, ...]
    # Number of attention heads, which the number of tensor-parallel cards must divide. 0: unknown.
    heads: int = 0
    # The bytes of each piece, in order: embeddings, layer 0…n, head. A model on several cards is
    # divided between two pieces. The pieces sum to `bytes`, overheads included. If there are no
    # pieces, the model may be divided at any byte.
    pieces: tuple[int, ...] = ()
    # Sentences about parts that are not counted, and about earlier measurements.
    notes: tuple[str, ...] = ()
    # Whether cache and working memory are allocated together with the weights, so that these bytes
    # count as the model's own bytes.
    at_load: bool = False

    @property
    def bytes(self) -> int:
        """The sum of all parts."""
        return sum([part.bytes for part in self.parts])

    @classmethod
    def of(cls, size: int, source: str = "declared") -> Footprint:
        """A footprint of one part of `size` bytes; `source` names where the number is from."""
        return cls((Part("all", size, source),))

    @property
    def working_bytes(self) -> int:
        """The bytes of the parts `for_use`, claimed while the model is on a device; 0 for `at_load`."""
        if self.at_load:
            return 0
        return sum(part.bytes for part in self.parts if part.for_use)


class Evidence(Value):
    """The facts about a model's size that its source shows before anything is loaded."""

    weight_bytes: int | None = None  # size in memory; None: the source does not show it
    # Where the size was read: "safetensors header", "GGUF header", "shapes", "module"
    source: str = ""
    file_bytes: int = 0  # size of the source's files, if nothing else is known
    file_format: str = ""  # format of those files: gguf or safetensors
    name: str = ""  # name of the source's file or repository, which may contain the size
    config: dict[str, Any] = {}  # the model's config, with Hugging Face's names
    pieces: tuple[int, ...] = ()  # weights of the consecutive pieces between which it may be split
    fingerprint: str = ""  # identifies the content of the source; empty if unknown
    why_unknown: str = ""  # why the size is unknown
    # Whether the engine allocates cache and working memory when it loads the model, so that these
    # bytes are measured together with the weights.
    at_load: bool = False
    parameters: int = 0  # the number of weights; 0: the source does not show it


class Measurement(Value):
    """The memory that a model used after it was loaded, as measured."""

    resident_bytes: int  # size of the model's storages
    # The largest number of bytes during load and use; None: not measured
    peak_bytes: int | None = None
    day: str = ""  # in the form 2026-11-21
    device: str = ""  # a card's name
    name: str = ""  # the model's name, for people who read the file


class Declared(Value):
    """The facts that an owner publishes about a model that it can load."""

    bytes: int = 0  # its declared size; 0: none was declared
    importance: int = NORMAL


UNDECLARED = Declared()


class ModelSpec(Value):
    """The specification of a model before it is loaded. It contains no secrets and no code."""

    name: str
    backend: str
    source: str = ""  # a directory, a file or a hub id; empty for a live Python object
    size: int | None = None  # declared bytes
    model_type: str = "other"  # llm, embedding, reranker, vision, diffusion, other
    quantization: str = ""
    importance: int = NORMAL
    keep: bool = False
    keep_alive: float = 0.0
    layout: str = "auto"
    devices: tuple[str, ...] = ()  # devices on which it may be placed; empty: any
    placement: dict[str, Any] = {}  # fields of PlacementRules that the model overrides
    enabled: bool = True  # False: the model is listed, but a load is refused
    # Options for its backend and its estimate: context_length, gpu_layers, dtype, …
    options: dict[str, Any] = {}

    def __str__(self) -> str:
        size = "size unknown" if self.size is None else show_bytes(self.size)
        kept = ", kept" if self.keep else ""
        source = f", from {self.source}" if self.source else ""
        rank = "" if self.importance == NORMAL else f", {importance_name(self.importance)}"
        return lines(f"{self.name}: {self.backend}, {size}{rank}{kept}{source}")

    @property
    def may_sleep(self) -> bool:
        """Whether its engine may sleep if it can. A program can if the options say how."""
        return bool(self.options.get("sleep", self.backend != "program"))

    @property
    def key(self) -> str:
        """`type:name:quantization`, the name of a model in the HTTP API and the logs."""
        return f"{self.model_type}:{self.name}:{self.quantization or 'none'}"


# -- requests and verdicts -------------------------------------------------------------------------


class Cap(Value):
    """The operator's caps on one user, for all the user's processes together. None means no cap."""

    user: str
    file: str  # the configuration file that sets it
    bytes_per_device: int | None = None  # on each card; host memory is not capped
    # Whether torch itself refuses more bytes; on simulated cards, the next cell is refused.
    enforce: bool = False
    importance: int | None = None  # the highest importance allowed, that is, the lowest number
    keep: bool = True
    longest_lease_seconds: float | None = None  # the limit for a block of code
    card_hours_per_week: float | None = None  # those of `gpu report`, in the last seven days
    # What happens to requests beyond these hours: lower importance, or "refuse".
    after_quota: str = "lower"
    used_card_hours: float = 0.0  # as the process has read them from the account of hours
    tables: dict[str, str] = {}  # key -> the table of the file that sets it, such as users.ann

    def named(self, key: str) -> str:
        """Where the cap on `key` is set, such as `cap [users.ann] keep in /etc/gpu-console/config.toml`."""
        return f"cap [{self.tables.get(key, '')}] {key} in {self.file}"


class Asker(Value):
    """The user who wrote a ticket, as the ledger proves, and the user's rights by the machine's configuration."""

    user: str
    at_home: bool = False  # whether the process that receives the ticket has the same user
    operator: bool = False
    importance: int = 0  # the highest importance (lowest number) that the cap allows; 0: no cap

    @property
    def commands(self) -> bool:
        """Whether this user may request loads, pins and defragmentation, not only evictions."""
        return self.at_home or self.operator


LEAST_WAIT_SECONDS, WAIT_FACTOR = 3.0, 5.0  # see Rules.most_wait


class Rules(Value):
    """The numbers that decisions use. They come from the settings."""

    grace_seconds: float = 5.0  # for so long after a use, only the model's own process evicts it
    # The pressure of a device (0 to 1) at which each level begins.
    moderate: float = 0.60
    high: float = 0.80
    critical: float = 0.90
    # How long a model must be idle before it is evicted at each level of pressure.
    idle_moderate_seconds: float = 120.0
    idle_high_seconds: float = 30.0
    relief: str = "auto"  # or "always", or "never"
    offload: bool = True  # False: evicted models are dropped
    stale_seconds: float = 5.0  # no grant is based on a sample older than this
    passing_seconds: float = 30.0  # a request blocked by a model in use may be passed for so long
    # An owner is unresponsive if it could act on a request, and has not done so for this long.
    answer_seconds: float = 2.0
    refresh_seconds: float = 2.0  # a ticket that was not refreshed for this long is skipped
    # After this wait, a request goes first within its class of importance, and the grace period
    # protects no lease from it. None: the default of `most_wait`.
    most_wait_seconds: float | None = None
    # INFERENCE_MEMORY_LIMIT_GB: a further limit on this owner's models.
    limit_bytes: int | None = None
    cap: Cap | None = None  # the operator's cap on this owner's user
    spared: int = 0  # `PlacementRules.spared` of the request that is decided
    # GPU_FAIRNESS: recent card-hours of this owner's user, by which the queue orders; None: off
    past_use: float | None = None

    def most_wait(self, swap_seconds: float) -> float:
        """Seconds for which other models may keep a model waiting that takes `swap_seconds` to bring.

        By default five times as long as the swap, so that swaps take at most a sixth of the time, and at
        least LEAST_WAIT_SECONDS.

        >>> Rules().most_wait(2.0), Rules().most_wait(0.0), Rules(most_wait_seconds=1.0).most_wait(2.0)
        (10.0, 3.0, 1.0)
        """
        if self.most_wait_seconds is not None:
            return self.most_wait_seconds
        return max(LEAST_WAIT_SECONDS, WAIT_FACTOR * swap_seconds)

    def awake(self, ticket: Ticket, now: float) -> bool:
        """Whether the requesting process still refreshes this `ticket`, and so would use freed room."""
        return now - ticket.refreshed <= self.refresh_seconds


class World(Value):
    """The devices, samples, limits and rules at the moment of the decision."""

    now: float
    wall: float
    devices: tuple[Device, ...]
    limits: dict[str, int]  # device -> budget in bytes, as this process would set it
    # A simulated device has no sample, since the book is its measurement.
    samples: dict[str, Sample] = {}
    rules: Rules = Rules()

    @property
    def cards(self) -> list[Device]:
        """The devices without host memory."""
        return [device for device in self.devices if not device.is_host]

    def device(self, id: str) -> Device | None:
        """The device with this `id`, or None."""
        return next((device for device in self.devices if device.id == id), None)


PLACEMENTS = ("best-fit", "most-free", "fewest-evictions")
LAYOUTS = ("auto", "single", "balanced", "proportional", "whole")


class PlacementRules(Value):
    """Where a footprint may be placed, and how it may be divided among several cards.

    `layout` is one of these:

    - `single`: one card. Models that cannot be divided have this layout.
    - `balanced`: one card if any card can hold the model, else equal shares on several cards, as
      tensor parallelism needs.
    - `proportional`: one card if any card can hold the model, else shares in proportion to the room
      on each card.
    - `auto`: the same as `proportional`.
    - `whole`: as few cards as possible, and all bytes of each card.
    """

    devices: tuple[str, ...] = ()  # empty: any
    layout: str = "single"
    policy: str = "best-fit"  # or "most-free", "fewest-evictions"
    least_cards: int = 1  # if above 1, the model is split even if one card could hold it
    most_cards: int = 0  # the largest number of cards of a split; 0: no limit
    # Maps each card to the most bytes that the model may take of this card. Cards that are missing
    # are not used. If the dictionary is empty, there is no limit.
    card_bytes: dict[str, int] = {}
    # Bytes that stay free on each card of a proportional split, for the driver's own needs.
    margin_bytes: int = 512 * 2**20
    # The overhead of each card of a split, as a fraction of the model's part on that card.
    overhead: float = 0.0
    # If the factor is above 0, a share is the bytes of its weights times the factor. A card that
    # the share nearly fills is then claimed in full. If the factor is 0, the share is estimated
    # from the model.
    factor: float = 0.0
    # With a factor, a share of at least this fraction of a card claims the whole card
    largest_fraction: float = 0.8
    # Models that the fleet wishes at least this much stay (see `Lease.wished`); 0: none stays.
    spared: int = 0


class Candidate(Value):
    """One way to place a footprint, and the reason for or against it."""

    shares: Shares
    fits: bool
    because: str
    victims: tuple[str, ...] = ()
    cost_seconds: float = 0.0  # time to reload the models that it displaces
    filled: Shares = ()  # the model's own bytes, if the shares claim more than these
    worth: float = 0.0  # the highest result of the eviction policy for one of the displaced models


class Request(Value):
    """A request for a model on a device, or for the bytes of a block of code."""

    key: str  # made and stored by the requester before it sends the request
    lease: Lease  # what is wanted, still without shares: owner, name, importance, keep, …
    footprint: Footprint
    arrived: float
    placement: PlacementRules = PlacementRules()
    held: tuple[str, ...] = ()  # lease ids that the requesting thread pins
    wait: bool = True  # False: leave no ticket
    users: int = 1  # callers that wait for the model with this request
    # The least bytes of a part that may return from host memory while the room for the rest is
    # still being made; 0: the model returns as a whole.
    stage_bytes: int = 0
    # Ids of the requester's leases that are leaving for this request now, in other threads.
    under_way: tuple[str, ...] = ()
    title: str = ""  # what sentences call a kernel's own memory: the notebook's name

    @property
    def called(self) -> str:
        """What sentences call that which is requested."""
        return self.title or self.lease.name


class Load(Value, tag=True):
    """Load a model's bytes from its source to `shares`."""

    lease: str
    shares: Shares
    because: str = ""


class Move(Value, tag=True):
    """Copy a model's bytes from the memories in `source` to the memories in `shares`.

    `source` also has bytes that are freed without a copy, such as working memory. If `shares` have
    fewer bytes than the model, the rest of the model stays where it is.
    """

    lease: str
    source: Shares
    shares: Shares
    because: str = ""
    reason: str = "request"
    by: str = ""  # who requested it, if another process did


class _Freeing(Value):
    lease: str
    source: Shares
    because: str = ""
    reason: str = "request"
    by: str = ""  # who requested it, if another process did


class Drop(_Freeing, tag=True):
    """Free a model's bytes at `source`. The bytes can be loaded again from the file or the hub."""


class Shed(_Freeing, tag=True):
    """Give back host memory of a lease.

    Of a model that is on a card, its shadow is freed: the copy in host memory of bytes that stay on
    their card. Of a lease without a shadow, the bytes that have left their card move on to a disk.
    """


Step = Load | Move | Drop | Shed


class Grant(Value, tag=True):
    """The room is reserved. The requester carries out the steps, and finally settles its lease."""

    lease: Lease
    steps: tuple[Step, ...]
    because: str
    considered: tuple[Candidate, ...] = ()
    bytes: int = 0  # bytes that were freed, if the request was to free memory


class Wait(Value, tag=True):
    """There is no room yet. The requester carries out the steps and decides again later."""

    because: str
    steps: tuple[Step, ...] = ()
    # The leases that other owners should evict, by id: the bytes that should leave; 0: all.
    recalls: dict[str, int] = {}
    silent: tuple[str, ...] = ()  # the leases in `recalls` whose owner has not responded
    shadows: tuple[str, ...] = ()  # ids of leases of other owners whose shadows should be freed
    blockers: tuple[str, ...] = ()  # lease ids in use that block the request
    ahead: int = 0  # how many requests are ahead in the queue
    retry_at: float | None = None  # time at which the verdict may change without any event
    considered: tuple[Candidate, ...] = ()

    @property
    def asked(self) -> tuple[str, ...]:
        """The ids of the leases in `recalls`."""
        return tuple(self.recalls)


class Refuse(Value, tag=True):
    """The request cannot be served as things are. Nothing was changed."""

    because: str
    # The kind of a refused request: hopeless, nested, kept, precious (a lease that cannot leave),
    # limit, cap, deadlock, full or drained. Of a refused order: gone, unknown, stays, in use, away,
    # fixed, busy or failed.
    kind: str = "hopeless"
    need_bytes: int = 0
    budget_bytes: int = 0
    device: str = ""
    holders: tuple[str, ...] = ()  # ids of the leases that block the request permanently
    considered: tuple[Candidate, ...] = ()


Verdict = Grant | Wait | Refuse


def verdict_kind(verdict: Verdict) -> str:
    """The kind of `verdict` as people say it: granted, waiting or refused."""
    kinds: dict[type, str] = {Grant: "granted", Wait: "waiting", Refuse: "refused"}
    return kinds[type(verdict)]


Policy = Callable[[Lease, World], float]  # the lease with the lowest result is evicted first


class PlanLevel(StrEnum):
    """The effort that a use of a model takes. The levels are in order, the least effort first."""

    HERE = "here"  # the model is on its device already
    RESTORE = "restore"  # restored from host memory into free room
    ROOM = "room"  # loaded into free room
    RESTORE_EVICTING = "restore-evicting"  # restored, after other models are evicted
    EVICT = "evict"  # loaded, after other models are evicted
    WAIT = "wait"  # models in use, or requests ahead in the queue, block it
    NEVER = "never"  # the request would be refused now

    @property
    def order(self) -> int:
        """The position of the level; a lower number is less effort."""
        return _LEVELS.index(self)


_LEVELS = tuple(PlanLevel)


class Leaver(Value):
    """A lease that may leave for a request, or only its copy in RAM, and what that costs."""

    lease: str  # its id
    # "copy" (in RAM, of bytes that are on a card), "model" or "engine" (on a card), "in RAM" (a
    # model), "asleep" (an engine, in RAM, or what it keeps on a card), "notebook" (on a card) or
    # "to disk" (a model or a notebook's memory, which moves from RAM to a disk)
    what: str
    frees: Shares
    # Seconds that leaving adds to its next use: a read from the disk if it moves there. Else as the
    # policy `keep_score` counts them: a restore if host memory could hold it, else a load.
    seconds: float
    measured: bool  # whether the seconds were measured; else they are estimated
    per_gb: float  # the seconds for each GB that it frees
    leaves: bool = False  # whether it leaves in the plan

    def __str__(self) -> str:
        return lines(f"{self.lease.partition('/')[2]}: {self.what}, {show_seconds(self.seconds)}")


class Plan(Value):
    """A dry run of `use`: every step, the models that would leave, and the other candidates."""

    granted: bool  # whether it would be granted now, or after evictions of idle models
    steps: tuple[Step, ...]
    shares: Shares
    because: str
    considered: tuple[Candidate, ...] = ()  # the others, with the reason why each was not chosen
    asked: tuple[str, ...] = ()  # lease ids that other owners would be requested to evict
    footprint: Footprint | None = None
    name: str = ""
    cards: str = ""  # such as GPU: 0, or GPUs: 0,1 (TP:2)
    # Why the model would not load even with room: it is disabled, or no backend can load it.
    obstacle: str = ""
    level: PlanLevel = PlanLevel.WAIT
    seconds: float = 0.0  # until the model can be used; 0 if the request waits or is refused
    measured: bool = False  # whether `seconds` were measured here; else they are estimated
    victims: tuple[str, ...] = ()  # ids of the leases that would be evicted
    # The importance of the most important victim; lower is more important. Without victims: 0.
    victims_importance: int = 0
    victims_wished: int = 0  # the greatest `Lease.wished` of a victim
    left_bytes: int = 0  # free bytes that stay on the fullest of the model's cards
    # The command that carries the plan out. For a model: the words after `%gpu`, such as
    # `load qwen --context 256`, or a call of `rt.load`. For a size in bytes: the words after `%%gpu`.
    command: str = ""
    # If room is needed: what may leave for it, in the order in which it is taken.
    leavers: tuple[Leaver, ...] = ()

    def __str__(self) -> str:
        if not self.obstacle:
            return lines(self.because)
        return lines(f"{self.because} It would not be loaded: {self.obstacle}.")
