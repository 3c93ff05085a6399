"""The book: devices, the owners with their leases and tickets, and the labels of all these.

A sample is a measurement of a device by its driver, and a share is bytes on a device. An owner is a process
that may hold leases. It writes one section of the book, and its own tickets. A ticket is a waiting request, or
an order to another process. The stored book is called the page; `ledgers/pieces.py` has its format. Error
messages and all user interfaces use the labels, so a lease has the same label everywhere.

A lease has the times of its last uses, as short text. Each time is a whole epoch second, which has
the same meaning after a restart. Several uses in one second count once. So two lists can be merged
repeatedly without counting a use twice.
"""

from __future__ import annotations

import base64
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain, compress
from operator import attrgetter, is_, is_not
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ..compat import StrEnum, dataclass_transform
from ..errors import AmbiguousName, BadSetting
from ..safe_text import lines
from ..units import show_bytes, show_seconds
from .engines import ENGINES

HOST = "host"
# The place of a lease whose bytes are in a file; in a request to evict: drop the bytes.
DISK = "disk"
KERNEL = "kernel"  # the name and the kind of the lease of what a notebook's own code holds
USER = "user"  # the kind of a lease that stands for all memory of a user, for viewers who see only its sum
SCHEMA = 3
MOST_ENTRIES = 1024  # leases and tickets in one page
MOST_EVENTS = 16  # events in one page; every reader decodes them, so older ones are in the journal

# The value of a time or duration that means "this never happened" or "not measured". It is the
# default of such fields, because a field that equals its default is not written into the book.
NEVER = 0.0
LEAST_LOAD_SECONDS = 0.1  # a shorter load counts as this long: shorter times differ by chance
DISK_BYTES_PER_SECOND = 10**9  # of a load that was never measured
# What a byte costs that moves from host memory to a disk: it is written, compared, and read again
DISK_SECONDS_PER_BYTE = 3 / DISK_BYTES_PER_SECOND
HOST_BYTES_PER_SECOND = 10 * 10**9  # of a restore that was never measured


@dataclass_transform(frozen_default=True)
class Value(Struct, frozen=True, omit_defaults=True, gc=False):
    """The base class of all facts: frozen, compared by value, small as JSON.

    Values cannot form reference cycles, so the garbage collector need not track the thousands of
    values in a book (`gc=False`).
    """

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Shows the value in IPython as `print` does. `repr` has every field."""
        printer.text(lines(str(self)))


def encode(value: Value) -> bytes:
    """`value` as JSON."""
    return _encoder.encode(value)


_encoder = msgspec.json.Encoder()


# A lower number is more important.
IMPORTANCE = {"urgent": 1, "high": 5, "normal": 10, "low": 20, "batch": 30}
NORMAL = IMPORTANCE["normal"]
CLASSES = sorted(IMPORTANCE.values())
_NUMBER = re.compile("-?[0-9]{1,9}")
_MOST = 999_999_999
# In the book: the importance of leases of a user who holds more than the cap. Nobody can type it.
OVER_CAP = _MOST + 1
_NAMES = {**{number: name for name, number in IMPORTANCE.items()}, OVER_CAP: "above the cap"}


def parse_importance(value: str | int, *, least: int | None = None, most: int | None = None) -> int:
    """The number that an importance stands for; lower is more important.

    `value` is the name of a class, a whole number, or a whole number as text. The number must be
    from `least` to `most`. A limit that is None does not apply.

    >>> parse_importance("high"), parse_importance(3), parse_importance("20")
    (5, 3, 20)

    Raises BadSetting for any other `value`.
    """
    number: int | None = None
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MOST:
        number = value
    elif isinstance(value, str) and _NUMBER.fullmatch(value):
        number = int(value)
    elif isinstance(value, str):
        number = IMPORTANCE.get(value)
    too_low = number is not None and least is not None and number < least
    too_high = number is not None and most is not None and number > most
    if number is None or too_low or too_high:
        raise BadSetting("importance", value, f"a number or one of {', '.join(IMPORTANCE)}")
    return number


def importance_name(number: int) -> str:
    """The name of the class with this `number`; `importance 7` for a number that is no class.

    >>> importance_name(5), importance_name(7)
    ('high', 'importance 7')
    """
    return _NAMES.get(number, f"importance {number}")


AGEING_SECONDS = 30.0  # of waiting; they are worth one class of importance


def aged_class(importance: int, waited_seconds: float) -> int:
    """The class of a request of this `importance`, from 0 (urgent) to 4 (batch), less 1 for every 30 s of waiting.

    It can be negative, so a call that has waited long enough starts before any new call, however important.

    >>> aged_class(10, 0.0), aged_class(10, 65.0), aged_class(1, 95.0)
    (2, 0, -3)
    """
    return bisect_left(CLASSES, importance) - int(max(0.0, waited_seconds) // AGEING_SECONDS)


# -- devices ---------------------------------------------------------------------------------------


class Device(Value):
    """One memory.

    Examples: a card (`cuda:0`), an instance of a partitioned card (`cuda:0.1`), a simulated card
    (`sim:0`), or the machine's RAM (`host`). An id names the same physical card for every process
    that shares the book. The UUID identifies the physical card.
    """

    id: str
    total_bytes: int
    name: str = ""
    uuid: str = ""
    # The number in the id. For an instance of a partitioned card, this is the number of the card.
    # torch's own number for the card may differ from process to process.
    index: int = 0
    simulated: bool = False
    unified: bool = False  # the card uses the machine's RAM, so card and host share one budget

    def __str__(self) -> str:
        return f"{self.id}: {show_bytes(self.total_bytes)}" + (
            f", {self.name}" if self.name else ""
        )

    @property
    def is_host(self) -> bool:
        """Whether this is the machine's RAM."""
        return self.id == HOST

    @property
    def key(self) -> str:
        """The UUID, or the id of a device without UUID. A UUID stays when cards are renumbered."""
        return self.uuid or self.id


class Sample(Value):
    """The last measurement of a device by its driver (or by the machine, for `host`)."""

    device: str
    taken_at: float
    free_bytes: int | None  # None: the driver gave no number, which means neither 0 nor all bytes
    processes: dict[int, int | None] = {}  # pid -> bytes; None where the driver reports N/A
    utilisation_percent: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    # Bytes a second over PCIe to the card, and from it; None: not counted
    pcie: tuple[int, int] | None = None


class Share(Value):
    """Bytes on a device."""

    device: str
    bytes: int


Shares = tuple[Share, ...]


def beside(shares: Shares, size: int) -> Shares:
    """The `shares` with `size` more bytes, which are divided in proportion to the old sizes.

    >>> beside((Share("sim:0", 2), Share("sim:1", 1)), 4)
    (Share(device='sim:0', bytes=4), Share(device='sim:1', bytes=3))
    """
    total = sum(share.bytes for share in shares)
    grown = []
    passed = 0  # bytes of the shares so far
    given = 0  # bytes of `size` that these shares have received
    for share in shares:
        passed += share.bytes
        due = size * passed // total if total else 0
        grown.append(Share(share.device, share.bytes + due - given))
        given = due
    return tuple(grown)


def bytes_on(shares: Iterable[Share], device: str) -> int:
    """The bytes of the `shares` on the device with the id `device`."""
    return sum([share.bytes for share in shares if share.device == device])


def where(shares: Shares) -> str:
    """The devices of `shares` as text; empty without shares.

    >>> where((Share("cuda:0", 1), Share("cuda:1", 1)))
    'cuda:0,1'
    >>> where((Share("cuda:0", 1), Share("host", 1)))
    'cuda:0 + host'
    """
    ids = list(dict.fromkeys([share.device for share in shares]))
    if len(ids) == 1:
        return ids[0]
    kinds = {id.split(":")[0] for id in ids}
    if len(kinds) != 1:
        return " + ".join(ids)
    numbers = ",".join(id.partition(":")[2] for id in ids)
    return f"{kinds.pop()}:{numbers}"


def one_memory(devices: Iterable[Device]) -> frozenset[str]:
    """The ids of `host` and the cards that share the machine's RAM; empty if every card has its own memory."""
    cards = frozenset(device.id for device in devices if device.unified)
    return cards | {HOST} if cards else cards


# -- owners, leases and tickets --------------------------------------------------------------------


class Owner(Value):
    """A process that may hold leases. Its id is never used again for another process."""

    host: str
    boot: str
    pid: int
    # Clock ticks after boot, from /proc/PID/stat; pid and this number together are unique
    started: int
    serial: int = 0  # several runtimes in one process are several owners
    user: str = ""
    notebook: str = ""
    inode: int = 0  # inode of the lock file that this owner holds while it lives
    # The namespaces in which the pid and the start time are valid; empty if unknown.
    namespaces: str = ""
    server: str = ""  # the name of JupyterHub's server; empty for the user's default server
    version: str = ""  # of gpu-console in the process

    @property
    def id(self) -> str:
        """`PID.STARTED.SERIAL`, the key of the owner's section."""
        return f"{self.pid}.{self.started}.{self.serial}"

    @property
    def label(self) -> str:
        """The owner's name for people: `train.ipynb (pid 4121)`."""
        if not self.notebook or not self.pid:  # without a pid it is the sum of a user's processes
            return self.name
        return f"{self.title} (pid {self.pid})"

    @property
    def name(self) -> str:
        """The owner's name in a list that shows pids beside it: `train.ipynb`, or `pid 4121`."""
        return self.title or f"pid {self.pid}"

    @property
    def title(self) -> str:
        """The file of the notebook, after the name of its server: `train.ipynb`, or `fast/train.ipynb`."""
        return f"{self.server}/{self.file}" if self.server and self.notebook else self.file

    @property
    def file(self) -> str:
        return self.notebook.rsplit("/", 1)[-1]

    @property
    def names(self) -> tuple[str, ...]:
        """What people may type for this owner: its id, its pid, and its notebook's title, file and path."""
        return tuple(filter(None, (self.id, str(self.pid), self.title, self.file, self.notebook)))


class Phase(StrEnum):
    """The phase of a lease: arriving on a device, settled, or leaving the device."""

    ARRIVING = "arriving"  # its room is reserved; its bytes are being loaded or copied
    SETTLED = "settled"
    LEAVING = "leaving"  # being moved out or dropped


class LeaseId(NamedTuple):
    """The address of a lease: the id of its owner in the book, and the model's name. Its text is `owner/name`.

    Input such as `qwen@4121` is parsed into a LeaseId at once; all inner functions use a LeaseId.
    """

    owner: str
    name: str

    def __str__(self) -> str:
        return f"{self.owner}/{self.name}"


class Lease(Value):
    """The claim of a model, or of a block of code, on memory.

    `shares` is where the bytes are, and `target` is where bytes are being moved to. During a move,
    both count in full. If `target` has fewer bytes than the lease, the rest stays in place. A lease
    may be in parts: some bytes on a card, the rest in RAM. A model whose lease is in parts
    cannot be used.
    """

    owner: str
    name: str
    # Key of the decision that started the lease's last load or move. If the same decision is made
    # again, this key shows that the load or move has begun already.
    key: str = ""
    shares: Shares = ()
    target: Shares = ()
    # Where the model's own bytes are or will be, if the lease claims other bytes too; else empty.
    filled: Shares = ()
    # Bytes for cache and activations, which the lease claims on a device besides the model's own
    # bytes.
    working_bytes: int = 0
    phase: Phase = Phase.SETTLED
    # "model", "kernel" (memory of a notebook's own code), or "block": memory for a block of code,
    # which is never moved and is freed when the block of code ends.
    kind: str = "model"
    importance: int = NORMAL
    # How much the fleet wishes the model on this host: 0 not, 1 wished, 2 in the dedicated set. Of
    # equally important leases, those that are wished less leave first.
    wished: int = 0
    keep: bool = False
    keep_alive: float = 0.0
    pins: int = 0  # number of users that hold it now
    pinned_since: float = 0.0
    last_used: float = 0.0
    uses: int = 0
    recent_uses: str = ""  # when the lease was used, see `facts.encode_uses`
    source: str = ""  # digest of the source's content, equal for equal models; empty: unknown
    reload_seconds: float = 0.0
    restore_seconds: float = 0.0
    droppable: bool = False  # whether the source has exactly the same bytes
    movable: bool = True  # whether the backend can move it between memories
    # The bytes of the largest piece, if the model may leave its card piece by piece. The value 0
    # means that the lease leaves as a whole. A lease with pieces is on one card.
    piece_bytes: int = 0
    settled_at: float = 0.0
    away_since: float = 0.0  # when bytes last left the cards; 0: all bytes are there
    # The bytes of the shadow: an unchanged copy, in RAM, of bytes that are on a card. The
    # shadow counts on the host. An offload turns the shadow into the lease's share on the host.
    shadow_bytes: int = 0
    # Pages in RAM that several processes share: the id of the pages, their bytes, and how
    # many of these bytes this lease's model uses. The pages count once for all leases.
    copy: str = ""
    copy_bytes: int = 0
    copied_bytes: int = 0
    # Of the bytes of `shares` in host memory: those that are in a file on a disk instead, and take
    # no RAM (`GPU_PARK_DIR`).
    disk_bytes: int = 0
    disk_room: int = 0  # the bytes that the disk can take more; 0: there is none
    stowing: bool = False  # whether the bytes in RAM are being written there now
    disk_seconds: float = 0.0  # to read all its bytes there, as measured; 0: not measured
    moves_again_at: float = 0.0  # after a failed move: the time before which it is not moved again
    measured_bytes: int | None = None  # for a block of code: its measured peak
    backend: str = ""
    model_type: str = "other"
    quantization: str = ""
    fixed: str = ""  # why torch cannot move a notebook's memory, which is then not movable
    # What the engine of the lease keeps on cards while it sleeps, known from its first sleep on. It
    # counts in its owner's residue, asleep or awake, and only the end of the engine frees it.
    residue: Shares = ()

    def __str__(self) -> str:
        in_use = ", in use" if self.pins else ""
        return lines(f"{self.name}: {show_bytes(self.bytes)} on {self.where}{in_use}")

    @property
    def id(self) -> str:
        """The lease's address as text, `owner/name`."""
        return f"{self.owner}/{self.name}"

    @property
    def bytes(self) -> int:
        """The bytes that the lease claims at its place; for an arriving lease, at its target."""
        return sum(share.bytes for share in (self.shares or self.target))

    @property
    def own_bytes(self) -> int:
        """The model's own bytes, which a move copies. A lease may claim more; see `bytes`."""
        return sum(share.bytes for share in self.filled) if self.filled else self.bytes

    def holding(self, measured: Shares) -> Lease:
        """This lease, settled with the `measured` shares of its own bytes.

        Claims beyond the model's own bytes stay, whatever the measured size of the weights is: a
        whole card stays claimed, and working memory stays as requested. If any bytes are in host
        memory, there are no such claims. On several cards a lease has no pieces.
        """
        settled = replace(self, shares=measured, target=(), filled=(), phase=Phase.SETTLED)
        if self.piece_bytes and len([share for share in measured if share.device != HOST]) > 1:
            settled = replace(settled, piece_bytes=0)
        if any(share.device == HOST for share in measured):
            if self.disk_bytes:
                on_disk = min(self.disk_bytes, settled.bytes_on(HOST))
                settled = replace(settled, disk_bytes=on_disk)
            on_card = any(share.device != HOST for share in measured)
            return replace(settled, shadow_bytes=self.shadow_beyond_target if on_card else 0)
        if self.disk_bytes or self.stowing:
            settled = replace(settled, disk_bytes=0, stowing=False)
        claimed = self.target or self.shares
        claimed_bytes = sum(share.bytes for share in claimed)
        claims_more = claimed_bytes > self.own_bytes + self.working_bytes
        claims: dict[str, int] = {}
        if self.filled and claims_more:
            claims = {share.device: share.bytes for share in claimed}
        for share in beside(measured, self.working_bytes):
            claims[share.device] = max(share.bytes, claims.get(share.device, 0))
        shares = tuple(Share(id, size) for id, size in claims.items())
        if shares == measured:
            return settled
        return replace(settled, shares=shares, filled=measured)

    @property
    def on_host(self) -> bool:
        """Whether all bytes of the lease are in host memory."""
        return bool(self.shares) and all(share.device == HOST for share in self.shares)

    @property
    def on_device(self) -> bool:
        """Whether any bytes of the lease are on a card."""
        for share in self.shares:  # a plain loop: every decision calls this for every lease
            if share.device != HOST:
                return True
        return False

    @property
    def must_return(self) -> bool:
        """Whether bytes that exist nowhere else are in host memory: they may return if the device has room (law 16)."""
        return not self.droppable and self.kind != "block" and self.bytes_on(HOST) > 0

    @property
    def in_parts(self) -> bool:
        """Whether some bytes of the lease are on a card, and the rest in host memory."""
        return len(self.shares) > 1 and self.on_device and not self.all_on_device

    @property
    def all_on_device(self) -> bool:
        """Whether all bytes of the lease are on cards, so that the model can be used."""
        for share in self.shares:
            if share.device == HOST:
                return False
        return bool(self.shares)

    @property
    def card_bytes(self) -> int:
        """The model's own bytes on cards, which an offload of the whole lease copies."""
        own = self.filled or self.shares
        return sum([share.bytes for share in own if share.device != HOST])

    @property
    def leaving_bytes(self) -> int:
        """The model's own bytes that leave the cards in an offload: those of `target`, else all."""
        return sum([share.bytes for share in self.target]) if self.target else self.card_bytes

    def leaving(self, part: int) -> Lease:
        """The lease with the target of an offload: `part` of its bytes on cards. All of them (0) need no target."""
        size = min(part, self.card_bytes)
        return replace(self, target=(Share(HOST, size),)) if size else self

    def freed_by(self, target: Shares) -> Shares:
        """The bytes that become free on each device when the lease's bytes move to `target`.

        An empty `target` means that the lease is dropped, and what its sleeping engine keeps with it.

        >>> whole = Lease("1", "a", shares=(Share("sim:0", 9),), piece_bytes=3)
        >>> whole.freed_by((Share("host", 6),))
        (Share(device='sim:0', bytes=6),)
        """
        if not target or any([share.device != HOST for share in target]):
            ends = self.residue and not target and self.shares != self.residue
            return (*self.shares, *self.residue) if ends else self.shares
        on_cards = tuple([share for share in self.shares if share.device != HOST])
        staying = self.card_bytes - sum([share.bytes for share in target])
        if staying <= 0 or not self.piece_bytes or len(on_cards) > 1:
            return on_cards
        return (Share(on_cards[0].device, on_cards[0].bytes - staying),)

    def freed_soon(self, recalls: Mapping[str, int]) -> Shares:
        """The bytes that become free soon, because the lease is leaving, or is in `recalls` (see `Ticket`)."""
        if self.phase is Phase.LEAVING:
            return self.freed_by(self.target)
        if not recalls or self.id not in recalls:
            return ()
        part = recalls[self.id]
        return self.freed_by((Share(HOST, part),) if part else ())

    def after(self, target: Shares) -> Shares:
        """The places of the model's own bytes after a move to `target`, which may be partial.

        >>> whole = Lease("1", "a", shares=(Share("sim:0", 9),), piece_bytes=3)
        >>> whole.after((Share("host", 6),))
        (Share(device='sim:0', bytes=3), Share(device='host', bytes=6))
        """
        moved = sum(share.bytes for share in target)
        in_host = self.bytes_on(HOST)
        if any(share.device != HOST for share in target):
            returns_in_part = self.piece_bytes and moved < in_host and len(target) == 1
            if not (self.in_parts or returns_in_part) or moved >= self.bytes:
                return target
            id = target[0].device
            there = Share(id, self.bytes_on(id) + moved)
            return (there, Share(HOST, in_host - moved)) if returns_in_part else (there,)
        staying = self.card_bytes - moved
        if staying <= 0 or not self.piece_bytes:
            return (Share(HOST, in_host + moved),)
        card, *others = [share for share in self.shares if share.device != HOST]
        if others:
            return (Share(HOST, in_host + self.card_bytes),)
        return (Share(card.device, staying), Share(HOST, in_host + moved))

    @property
    def where(self) -> str:
        """The lease's devices (such as `cuda:0,1`), or its phase while it has no shares."""
        if self.on_disk:
            return DISK
        return where(self.shares) or self.phase.value

    @property
    def placed(self) -> Shares:
        """Where its bytes are: as `shares`, but bytes in a file are on the `disk`, and not in host memory."""
        if not self.disk_bytes:
            return self.shares
        in_ram = [Share(HOST, self.ram_bytes)] if self.ram_bytes else []
        on_cards = [share for share in self.shares if share.device != HOST]
        return (*on_cards, *in_ram, Share(DISK, self.disk_bytes))

    @property
    def on_disk(self) -> bool:
        """Whether all bytes of the lease are in a file on a disk."""
        return bool(self.disk_bytes) and self.on_host and self.disk_bytes >= self.bytes

    @property
    def ram_bytes(self) -> int:
        """The bytes in host memory, without those that are on a disk."""
        return max(0, self.bytes_on(HOST) - self.disk_bytes)

    @property
    def bytes_on_disk(self) -> int:
        """The bytes that the lease has on a disk, or has reserved there for the move that is under way."""
        return max(self.own_bytes, self.disk_bytes) if self.stowing else self.disk_bytes

    @property
    def stow_bytes(self) -> int:
        """The bytes that can move to the disk once they are in host memory; 0 if not all of them fit."""
        rest = self.own_bytes - self.disk_bytes
        return rest if rest <= self.disk_room else 0

    @property
    def kept_on_disk(self) -> bool:
        """Whether the lease is on a disk, or can leave host memory for one, so that it need not be unloaded."""
        return self.on_disk or (self.on_host and self.stow_bytes > 0)

    @property
    def shed_bytes(self) -> int:
        """The bytes of host memory that the lease gives back for others: its shadow, or what moves to a disk."""
        return self.shadow_bytes or (self.stow_bytes if self.on_host else 0)

    @property
    def seconds_from_disk(self) -> float:
        """Seconds that reading all its bytes from the disk takes, estimated if not measured."""
        return self.disk_seconds or self.own_bytes / DISK_BYTES_PER_SECOND

    def shed(self) -> Lease:
        """The lease after it gave back host memory: its shadow is freed, or else its bytes are on the disk."""
        if self.shadow_bytes:
            return replace(self, shadow_bytes=0)
        left = self.disk_room - self.stow_bytes
        return replace(self, disk_bytes=self.bytes, disk_room=left, stowing=False)

    def bytes_on(self, device: str) -> int:
        """The bytes that are on the device with the id `device` now."""
        return sum(share.bytes for share in self.shares if share.device == device)

    def idle_seconds(self, now: float) -> float:
        """Seconds between the last use and `now`; 0 while the lease is in use."""
        return 0.0 if self.pins else max(0.0, now - self.last_used)

    def seconds_to_load(self, size: int) -> float:
        """Seconds that a load of `size` bytes of this lease takes, estimated if not measured."""
        return max(self.reload_seconds or size / DISK_BYTES_PER_SECOND, LEAST_LOAD_SECONDS)

    def seconds_to_restore(self, size: int) -> float:
        """Seconds that a restore of `size` bytes from host memory takes, estimated if not measured.

        A restore never counts as longer than a load; but the disk is read if the bytes are there.
        """
        measured = self.restore_seconds or size / HOST_BYTES_PER_SECOND
        if self.disk_bytes:
            return max(measured, LEAST_LOAD_SECONDS)
        return max(min(measured, self.seconds_to_load(size)), LEAST_LOAD_SECONDS)

    def claims(self) -> Iterator[Share]:
        """Yields every share that counts against a budget: `shares`, `target` and host memory.

        In host memory, the shadow (a copy of bytes on a card) and the unused bytes of shared pages
        count, and bytes on a disk do not. During an offload the shadow is a part of the target, so
        its bytes count once.
        """
        for share in self.shares:
            yield Share(HOST, self.ram_bytes) if self.disk_bytes and share.device == HOST else share
        yield from self.target
        if beyond := self.shadow_beyond_target:
            yield Share(HOST, beyond)
        if self.copy_bytes > self.copied_bytes:  # the model uses a part; all the pages stay
            yield Share(HOST, self.copy_bytes - self.copied_bytes)

    @property
    def shared_bytes(self) -> int:
        """The bytes that this lease claims in shared pages of host memory; 0 without such pages."""
        if not self.copy:
            return 0
        return min(self.copy_bytes, sum([s.bytes for s in self.claims() if s.device == HOST]))

    @property
    def offload_bytes(self) -> int:
        """The host memory that an offload of `leaving_bytes` needs beyond the lease's shadow.

        If only a part of the model leaves, the shadow may lack this part, and then saves nothing.
        """
        return self.copied_by_offload(self.leaving_bytes)

    def copied_by_offload(self, size: int) -> int:
        """The host memory that an offload of `size` bytes needs; see `offload_bytes`."""
        if not self.shadow_bytes or not self._uses_shadow(size):
            return size
        return max(0, size - self.shadow_bytes)

    @property
    def shadow_beyond_target(self) -> int:
        """The bytes of the shadow that `target` does not include: an offload may turn the shadow into a share."""
        if not self.shadow_bytes:
            return 0
        going = bytes_on(self.target, HOST)
        if not going or not self._uses_shadow(going):
            return self.shadow_bytes
        return max(0, self.shadow_bytes - going)

    def _uses_shadow(self, leaving: int) -> bool:
        """Whether an offload of `leaving` bytes turns the shadow, or a part of it, into a share."""
        on_cards = self.card_bytes
        return self.shadow_bytes >= on_cards or leaving >= on_cards


class Staying(Value):
    """Bytes of a process that cannot leave their card, and the reason."""

    device: str
    why: str
    bytes: int

    def words(self, names: str = "") -> str:
        """A sentence without its full stop. `names` are the variables, as far as they may be shown."""
        names = f" ({names})" if names else ""
        return f"{show_bytes(self.bytes)} stays on {self.device}{names}: {self.why}"

    @staticmethod
    def of(storages: Iterable[Any]) -> tuple[Staying, ...]:
        """What of the `storages` stays: the sum of their `own_bytes`, for each device and reason."""
        sizes: dict[tuple[str, str], int] = {}
        for one in storages:
            if one.stays:
                sizes[one.device, one.stays] = sizes.get((one.device, one.stays), 0) + one.own_bytes
        return tuple(Staying(*key, size) for key, size in sorted(sizes.items()))


# Claimed bytes and promised bytes by device, and the copies.
_Sums = tuple[dict[str, int], dict[str, int], tuple[tuple[str, int], ...]]


class Section(Value, dict=True, gc=True):  # `dict` keeps `_sums`, and needs `gc`
    """The part of the book that one owner writes. No other process may change it."""

    owner: Owner
    leases: tuple[Lease, ...] = ()
    # Maps a device to the bytes that the process holds beyond its leases: CUDA context, the
    # allocator's cache, and tensors of the user's code.
    residue: dict[str, int] = {}
    staying: tuple[Staying, ...] = ()  # the part of the residue that is known not to leave, and why
    # What the owner's user holds above the operator's cap, as a sentence without its full stop.
    over_cap: str = ""
    counts: dict[str, int] = {}  # loaded, offloaded, restored, unloaded, refused
    # Processes that the owner started to run models in. Their memory belongs to the owner's leases.
    engines: tuple[int, ...] = ()
    # When the running cell began; 0: no cell runs, or the owner is no kernel
    busy_since: float = NEVER
    idle_since: float = NEVER  # when the last cell ended; 0: unknown, or a cell runs

    def claims(self) -> dict[str, int]:
        """Bytes claimed on each device by the leases and as residue.

        Computed once for each section, since a write changes only one of many. The caller must not change the result.
        """
        return self._sums[0]

    def promises(self) -> dict[str, int]:
        """Bytes on each device that are reserved for leases still arriving or moving. Do not change the result."""
        return self._sums[1]

    def copies(self) -> tuple[tuple[str, int], ...]:
        """For each lease with shared pages: the id of the pages, and the lease's bytes in them."""
        return self._sums[2]

    def staying_on(self, device: str) -> tuple[Staying, ...]:
        return tuple(part for part in self.staying if part.device == device)

    def cache_on(self, device: str) -> int:
        """The residue on `device` without what is known not to leave: context, cache, own tensors."""
        stays = sum(part.bytes for part in self.staying_on(device))
        return max(0, self.residue.get(device, 0) - stays)

    @cached_property
    def _sums(self) -> _Sums:
        claimed = dict(self.residue)
        promised: dict[str, int] = {}
        copies: list[tuple[str, int]] = []
        for lease in self.leases:
            if lease.copy:
                copies.append((lease.copy, lease.shared_bytes))
                unused = max(0, lease.copy_bytes - lease.copied_bytes)
                claimed[HOST] = claimed.get(HOST, 0) + unused
            for share in lease.shares:
                claimed[share.device] = claimed.get(share.device, 0) + share.bytes
            if lease.disk_bytes:
                claimed[HOST] = claimed.get(HOST, 0) + lease.ram_bytes - lease.bytes_on(HOST)
            for share in lease.target:
                claimed[share.device] = claimed.get(share.device, 0) + share.bytes
                promised[share.device] = promised.get(share.device, 0) + share.bytes
            if lease.shadow_bytes and (beyond := lease.shadow_beyond_target):
                claimed[HOST] = claimed.get(HOST, 0) + beyond
                if lease.phase is Phase.ARRIVING:
                    promised[HOST] = promised.get(HOST, 0) + beyond
        return claimed, promised, tuple(copies)

    @property
    def settled_at(self) -> float:
        """The time at which the newest lease of the section settled; NEVER without leases."""
        return max([lease.settled_at for lease in self.leases], default=NEVER)

    def lease(self, name: str) -> Lease | None:
        """The section's lease with this `name`, or None."""
        for lease in self.leases:  # a plain loop: every step of a decision looks for its lease
            if lease.name == name:
                return lease
        return None


class Ticket(Value):
    """A waiting request, or an order to another owner. A ticket is removed when its writer ends."""

    key: str
    owner: str
    # "use" for a waiting request. An order is one of evict, shed, preload, move, pin,
    # unpin, defrag, who, cancel, hibernate.
    verb: str
    name: str  # use: the model. An order: the id of the lease, or `OWNER_ID/` for the whole process
    arrived: float
    refreshed: float
    importance: int = NORMAL
    seconds: float = 0.0  # how long the load or restore will take
    users: int = 1  # callers that wait for the model with this request
    need: Shares = ()  # the room for which it waits, on the likeliest card
    places: tuple[str, ...] = ()  # allowed cards, or the target of a move; empty: any card
    # How the needed bytes may be divided among `places`. Empty: they must be on one card.
    layout: str = ""
    # The leases that other owners should evict for it, by id: the bytes that should leave; 0: all.
    recalls: dict[str, int] = {}
    # Ids of leases whose shadows (copies in RAM) other owners should free for this request.
    shadows: tuple[str, ...] = ()
    recalled_since: float = 0.0  # time since when exactly these leases are recalled
    held: tuple[str, ...] = ()  # lease ids that the requesting thread itself pins
    # Since when only models in use block it; 0: something else blocks it
    blocked_since: float = 0.0
    because: str = ""
    # The person who made the request, as the requesting process claims. The claim is not proven, so
    # this field is only for display.
    said_by: str = ""
    # `Rules.past_use` of the requesting process; None: it does not share by past use.
    past_use: float | None = None

    @property
    def wish(self) -> Ticket:
        """The ticket without what a renewal changes."""
        return replace(self, refreshed=0.0, because="")

    @property
    def need_bytes(self) -> int:
        """The bytes for which it waits, on all devices."""
        return sum(share.bytes for share in self.need)

    @property
    def need_text(self) -> str:
        """The room for which it waits, such as `2.0 GiB on sim:0`."""
        return " + ".join(f"{show_bytes(share.bytes)} on {share.device}" for share in self.need)


# -- the times of the last uses --------------------------------------------------------------------

MOST_USES = 32  # uses that are kept; with 3 bytes each, the text has at most 128 characters
_BYTES = 3
_SPAN = 1 << (8 * _BYTES)  # seconds, about 194 days: times are known within 97 days of now


def encode_uses(seconds: Iterable[float]) -> str:
    """The text for uses at these epoch `seconds`. Only the newest 32 uses are kept.

    >>> decode_uses(encode_uses([7.9, 3.0, 7.2]), 10.0)
    (3, 7)
    """
    newest = sorted({int(second) for second in seconds})[-MOST_USES:]
    packed = b"".join([(second % _SPAN).to_bytes(_BYTES, "big") for second in newest])
    return base64.b64encode(packed).decode()


def decode_uses(text: str, now: float) -> tuple[int, ...]:
    """The epoch seconds of the uses in `text`, the oldest first. `now` is in epoch seconds."""
    now, half = int(now), _SPAN // 2
    return tuple([now + half - (now + half - second) % _SPAN for second in _unpacked(text)])


@lru_cache(maxsize=4096)
def expected_use(text: str, now: int, youngest: float) -> float:
    """The sum of 1 / (age + `youngest`) over the uses in `text`; 0 if `text` is empty.

    The age of a use is the time from the use to `now`, in seconds. `youngest` is in seconds, and
    `now` in epoch seconds. The result is cached, because a decision needs it several times.
    """
    total = 0.0
    for second in _unpacked(text):
        age = (now - second) % _SPAN
        total += 1.0 / ((age if age < _SPAN // 2 else 0) + youngest)
    return total


@lru_cache(maxsize=4096)
def _unpacked(text: str) -> tuple[int, ...]:
    packed = base64.b64decode(text)
    return tuple(
        int.from_bytes(packed[i : i + _BYTES], "big") for i in range(0, len(packed), _BYTES)
    )


def merged_uses(texts: Iterable[str], now: float) -> str:
    """The newest uses of all `texts` together. `now` is in epoch seconds.

    >>> merged_uses([encode_uses([1, 5]), encode_uses([5, 9])], 10.0) == encode_uses([1, 5, 9])
    True
    """
    different = {text for text in texts if text}
    if len(different) <= 1:
        return next(iter(different), "")
    return encode_uses([second for text in different for second in decode_uses(text, now)])


# -- the book --------------------------------------------------------------------------------------


class Ghost(Value):
    """Memory that a dead process held on a real card, claimed until a sample shows that the driver has freed it."""

    owner: str
    pid: int
    device: str
    bytes: int
    settled_at: float  # when the owner's newest lease settled; older samples do not show its memory
    died_at: float  # when the owner's death was proven

    def gone(self, sample: Sample | None) -> bool:
        """Whether `sample` was taken after the death and no longer lists the process."""
        return (
            sample is not None
            and sample.free_bytes is not None
            and sample.taken_at > self.died_at
            and self.pid not in sample.processes
        )


class Drain(Value):
    """The mark of a drained card: the card gets no new leases, and idle models leave the card."""

    by: str  # the user who drained it
    wall: float  # since when, in epoch seconds


class Event(Value):
    """Something that happened, and why."""

    seq: int
    wall: float  # epoch seconds, for display
    model: str
    # granted, loaded, offloaded, restored, unloaded, moved, misplaced, released, refused, …
    action: str
    reason: str  # one word: request, memory_pressure, evict, owner, death, …
    because: str
    bytes: int = 0
    device: str = ""
    owner: str = ""
    by: str = ""  # the requester, if it is another process: the person (if named) and the process
    shares: Shares = ()  # the parts on several devices; `device` is the first of them
    answers: str = ""  # the key of the ticket that this event answers
    # The candidates that were not chosen, as sentences with the reasons. These sentences are stored
    # in the journal only, because the page must stay small.
    runners_up: tuple[str, ...] = ()
    seconds: float = NEVER  # duration of a load or a restore; 0: not measured
    # For a load: the other models that were in use or arriving on the same cards when the load
    # ended.
    beside: tuple[str, ...] = ()
    notebook: str = ""  # the path of the owner's notebook, to name the owner after its end
    # If a lease left a device or RAM: the times of the lease's last uses
    # (`facts.encode_uses`), the digest of the model's source, and what kind of model it was.
    uses: str = ""
    source: str = ""
    model_type: str = ""
    quantization: str = ""

    @property
    def unnumbered(self) -> Event:
        """The event without what may differ between the book and the journal: its number, and the runners-up."""
        return replace(self, seq=0, runners_up=())

    @property
    def place(self) -> str:
        """The devices on which its bytes are, or were: `sim:0`, or `sim:0,1`."""
        return where(self.shares) or self.device

    @property
    def title(self) -> str:
        """The model's name, or the file name of the notebook whose own memory the event is about."""
        return (self.model == KERNEL and self.notebook.rpartition("/")[2]) or self.model

    def __str__(self) -> str:
        return lines(f"{self.title} {self.action}: {self.because}")


class Book(Value):
    """All leases and tickets of one host. A decision reads the book, and may return a new book."""

    schema: int = SCHEMA
    devices: tuple[Device, ...] = ()
    limits: dict[str, int] = {}  # device -> budget in bytes, set by the first owner
    samples: dict[str, Sample] = {}
    sections: dict[str, Section] = {}
    tickets: tuple[Ticket, ...] = ()
    events: tuple[Event, ...] = ()
    seq: int = 0  # number of the newest event
    counts: dict[str, int] = {}  # counters of owners that have ended, so that totals never decrease
    ghosts: tuple[Ghost, ...] = ()  # memory of dead processes that a driver may not have freed yet
    # Maps Device.key to the mark of a drained card. The mark is in no owner's section, so the mark
    # stays after the owner that set it has ended.
    drained: dict[str, Drain] = {}
    # After the page was lost and made again, nothing is granted before this time (seconds of
    # CLOCK_BOOTTIME), because owners that are not in the new page yet may hold memory. The value 0
    # means that grants are possible. In Redis, this time is stored beside the book.
    opens: float = NEVER
    # Not stored. The decision that made this book is also right after other owners claimed more, while at
    # most so many bytes are claimed on these devices. Empty: it is right on the page that it read.
    holds_below: dict[str, int] = {}

    @property
    def entries(self) -> int:
        """The number of leases and tickets, on which the size of the page depends."""
        leases = sum(map(len, map(_leases_of, self.sections.values())))
        return leases + len(self.tickets)

    def leases(self) -> Iterator[Lease]:
        """Every lease of every owner."""
        return chain.from_iterable([section.leases for section in self.sections.values()])

    def lease(self, owner: str, name: str) -> Lease | None:
        """The lease called `name` of the owner with the id `owner`, or None."""
        section = self.sections.get(owner)
        return section.lease(name) if section else None

    def find(self, lease_id: str) -> Lease | None:
        """The lease with the id `lease_id` (`owner/name`), or None."""
        owner, _, name = lease_id.partition("/")
        return self.lease(owner, name)

    def find_all(self, lease_ids: Iterable[str]) -> list[Lease]:
        """The leases with these ids, without those that are in the book no more."""
        return [lease for id in lease_ids if (lease := self.find(id)) is not None]

    def ticket(self, key: str) -> Ticket | None:
        """The ticket with this `key`, or None."""
        return self._waiting().by_key.get(key)

    def users_waiting(self) -> dict[tuple[str, str], int]:
        """The number of users that wait for each model, by owner and name. Later calls return the same object."""
        return self._waiting().users

    def _waiting(self) -> _Waiting:
        global _last_waiting
        last = _last_waiting
        if last.tickets is not self.tickets:
            users: dict[tuple[str, str], int] = {}
            for ticket in self.tickets:
                if ticket.verb == "use":
                    model = (ticket.owner, ticket.name)
                    users[model] = users.get(model, 0) + ticket.users
            by_key = {ticket.key: ticket for ticket in self.tickets}
            last = _last_waiting = _Waiting(self.tickets, by_key, users)
        return last

    def owner(self, owner_id: str) -> Owner | None:
        """The owner with the id `owner_id`; None without a section of this owner, also if it has a ticket."""
        section = self.sections.get(owner_id)
        return section.owner if section else None

    def title(self, lease: Lease) -> str:
        """The name of `lease` for people; see `lease_title`."""
        return lease_title(lease, self.owner(lease.owner))

    def label(self, owner_id: str) -> str:
        """The label of the owner with the id `owner_id`, or this id if the owner has no section."""
        owner = self.owner(owner_id)
        return owner.label if owner else owner_id

    def owner_ids(self) -> set[str]:
        """The ids of the owners of all sections and tickets."""
        return self.sections.keys() | {ticket.owner for ticket in self.tickets}

    def changed_since(self, old: Book) -> list[str]:
        """The ids of the owners whose sections are not the objects of the book `old`: new or changed ones."""
        if self.sections is old.sections:
            return []
        before = map(old.sections.get, self.sections)
        return [*compress(self.sections, map(is_not, self.sections.values(), before))]

    def claims(self) -> dict[str, int]:
        """Bytes claimed on each device: every share, target of a move, shadow, residue and ghost.

        A shadow is a copy in host memory. Residue is memory of a process beyond its leases; a ghost
        is memory of a dead process. Pages that several leases share count once. The caller must not
        change the result: later calls return the same object, because a decision needs the claims
        several times.
        """
        global _last_claims
        parts = (self.sections, self.ghosts)
        last = _last_claims
        if all(map(is_, parts, last[0])):
            return last[1]
        claimed: dict[str, int] = {}
        for ghost in self.ghosts:
            claimed[ghost.device] = claimed.get(ghost.device, 0) + ghost.bytes
        for section in self.sections.values():
            if section.leases or section.residue:
                for device, size in section.claims().items():
                    claimed[device] = claimed.get(device, 0) + size
        if twice := self.counted_twice():
            claimed[HOST] -= twice
        _last_claims = parts, claimed
        return claimed

    def counted_twice(self) -> int:
        """The bytes of shared host memory that the sum of all claims counts too often.

        Of the leases that share pages, the largest claim counts.
        """
        total, largest = 0, dict[str, int]()
        for section in self.sections.values():
            for copy, size in section.copies() if section.leases else ():
                total += size
                largest[copy] = max(size, largest.get(copy, 0))
        return total - sum(largest.values())

    def with_section(self, section: Section) -> Book:
        """This book with `section` in place of the old section of the same owner."""
        return replace(self, sections={**self.sections, section.owner.id: section})

    def with_lease(self, lease: Lease) -> Book:
        """This book with `lease` in place of one of the same owner and name. KeyError if the owner has no section."""
        section = self.sections[lease.owner]
        others = [old for old in section.leases if old.name != lease.name]
        return self.with_section(replace(section, leases=(*others, lease)))

    def without_lease(self, owner: str, name: str) -> Book:
        """This book without the owner's lease called `name`. KeyError if this owner has no section."""
        section = self.sections[owner]
        others = [lease for lease in section.leases if lease.name != name]
        return self.with_section(replace(section, leases=tuple(others)))

    def with_ticket(self, ticket: Ticket) -> Book:
        """This book with `ticket`, which replaces a ticket with the same key."""
        if self.ticket(ticket.key) is None:
            return replace(self, tickets=(*self.tickets, ticket))
        tickets = [ticket if old.key == ticket.key else old for old in self.tickets]
        return replace(self, tickets=tuple(tickets))

    def without_ticket(self, key: str) -> Book:
        """This book without the ticket with this `key`; the same object if there is no ticket."""
        if self.ticket(key) is None:
            return self
        return replace(self, tickets=tuple(ticket for ticket in self.tickets if ticket.key != key))


_leases_of = attrgetter("leases")


class _Waiting(NamedTuple):
    """The tickets of a book by key, and the users that wait for each model."""

    tickets: tuple[Ticket, ...]
    by_key: dict[str, Ticket]
    users: dict[tuple[str, str], int]


# A decision looks for several tickets in one book, so the index of the last tickets is kept. It is
# valid while `Book.tickets` is the same object.
_last_waiting = _Waiting((), {}, {})

# The parts of the book from which the last claims were computed, and these claims.
_last_claims: tuple[tuple[object, object], dict[str, int]] = ((None, None), {})


def decode_book(data: bytes | memoryview | str) -> Book:
    """The book in `data`, its JSON. Raises msgspec.DecodeError or msgspec.ValidationError."""
    return _decode_book(data)


_decode_book = msgspec.json.Decoder(Book).decode


def overdrafts(old: Book, new: Book) -> dict[str, int]:
    """Maps each device to the bytes that a write would promise above the device's limit.

    `old` is the book as it was read, and `new` the book to be written. The check is for laws 1 and
    2 in docs/architecture.md. Bytes are promised if they are reserved for loads, moves and shadows.
    A device has an entry only if more is promised on it than in `old`. Without a new promise, a
    device above its limit is no error: measured bytes (residue, or a lease that is larger than
    requested) may exceed the limit. If the claims in `old` exceed the limit already, only bytes
    above these claims count. Devices that share the machine's RAM also have one joint entry, such
    as `cuda:0+host`.

    A return may fill a device to its size, not only to its limit: bytes that exist nowhere else
    were there before (law 16). The same holds for the departure that such a return waits for.
    """
    # An unchanged section promises nothing new, and most writes change one section of many.
    changed = new.changed_since(old)
    promises = _promised(new.sections[id] for id in changed)
    if not promises:
        return {}
    gone = old.sections.keys() - new.sections.keys()
    promised = _promised(old.sections[id] for id in (*changed, *gone) if id in old.sections)
    raised = {device for device, size in promises.items() if size > promised.get(device, 0)}
    if not raised:
        return {}

    before = old.claims()
    after = _claims_after(old, new, changed, gone)
    over = {}
    for device in raised:
        limit = new.limits.get(device, after[device])
        if after[device] > limit and _raised_by_returns(old, new, changed, device):
            limit = max(limit, _size_of(new, device))
        over[device] = after[device] - max(limit, before.get(device, 0))
    shared = one_memory(new.devices)
    if shared & raised:  # these devices share one budget, the largest of their budgets
        limit = max(new.limits.get(device, 0) for device in shared)
        sum_before = sum(before.get(device, 0) for device in shared)
        sum_after = sum(after.get(device, 0) for device in shared)
        over["+".join(sorted(shared))] = sum_after - max(limit, sum_before)
    return {device: excess for device, excess in over.items() if excess > 0}


def _size_of(book: Book, device: str) -> int:
    return sum([entry.total_bytes for entry in book.devices if entry.id == device])


def _raised_by_returns(old: Book, new: Book, changed: Collection[str], device: str) -> bool:
    """Whether only returns of bytes that exist nowhere else, or departures for them, promise more."""

    def ordinary_bytes(book: Book) -> int:
        waiting = [ticket for ticket in book.tickets if waits_to_return(book, ticket)]
        total = 0
        for lease in (
            lease for id in changed if id in book.sections for lease in book.sections[id].leases
        ):
            if device == HOST:
                exempt = lease.phase is Phase.LEAVING and not lease.droppable
                exempt = exempt and any(
                    lease.id in ticket.recalls or lease.owner == ticket.owner for ticket in waiting
                )
            else:
                exempt = lease.phase is Phase.ARRIVING and lease.must_return
            if not exempt:
                total += bytes_on(lease.target, device)
        return total

    return ordinary_bytes(new) <= ordinary_bytes(old)


def waits_to_return(book: Book, ticket: Ticket) -> bool:
    """Whether the `ticket` requests the return of bytes that exist nowhere else."""
    lease = book.lease(ticket.owner, ticket.name) if ticket.verb == "use" else None
    return lease is not None and lease.must_return


def _claims_after(
    old: Book, new: Book, changed: Collection[str], gone: Collection[str]
) -> dict[str, int]:
    """The claims of the book `new`, from those of `old`: the sections with the ids `changed` and `gone` differ."""
    if new.ghosts is not old.ghosts:
        return new.claims()
    touched = [book.sections[id] for book in (old, new) for id in changed if id in book.sections]
    if any(section.copies() for section in (*touched, *(old.sections[id] for id in gone))):
        return new.claims()
    claims = dict(old.claims())
    for id in (*changed, *gone):
        for device, size in old.sections[id].claims().items() if id in old.sections else ():
            claims[device] -= size
        for device, size in new.sections[id].claims().items() if id in new.sections else ():
            claims[device] = claims.get(device, 0) + size
    return claims


def _promised(sections: Iterable[Section]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for section in sections:
        for device, size in section.promises().items():
            sums[device] = sums.get(device, 0) + size
    return sums


# -- labels for people -----------------------------------------------------------------------------


THIS_PROCESS = "this process"
ASLEEP = "asleep"


class LeaseState(NamedTuple):
    """What a lease is doing."""

    activity: str  # "arriving", "leaving", "in use", "idle" or "never used"
    seconds: float = 0.0  # how long it has been in use, or idle; 0: not known
    # Of a settled, unused lease in host memory: `in RAM`, `asleep` if it is an engine's, or `parked` if it is a
    # notebook's own memory.
    away: str = ""

    @property
    def word(self) -> str:
        return self.away or self.activity

    def text(
        self, duration: Callable[[float], str] = show_seconds, least_seconds: float = 1.0
    ) -> str:
        """The state with its duration, such as `in use for 40 s` or `in RAM, idle 3 min`.

        `duration` writes the seconds as text. A use shorter than `least_seconds` is written without
        a time.

        >>> LeaseState("idle", 180.0, away="in RAM").text()
        'in RAM, idle 3 min'
        """
        text = self.activity
        if self.activity == "in use" and self.seconds >= least_seconds:
            text = f"in use for {duration(self.seconds)}"
        elif self.activity == "idle":
            text = f"idle {duration(self.seconds)}"
        return f"{self.away}, {text}" if self.away else text


def is_engine(lease: Lease) -> bool:
    """Whether a process of its own computes the model of `lease`, which sleeps where others are offloaded."""
    return lease.backend in (*ENGINES, "llama_cpp")


def away_word(lease: Lease) -> str:
    """What a lease in host memory is called there; empty for any other lease."""
    if not lease.on_host:
        return ""
    if lease.on_disk:
        return "on disk"
    if lease.kind == KERNEL:
        return "parked"
    return ASLEEP if is_engine(lease) else "in RAM"


def lease_state(lease: Lease, now: float) -> LeaseState:
    """The state of `lease` at the time `now`."""
    if lease.phase is not Phase.SETTLED:
        return LeaseState(lease.phase.value)
    if lease.pins:
        return LeaseState("in use", now - lease.pinned_since if lease.pinned_since else 0.0)
    away = away_word(lease)
    if not lease.last_used:
        return LeaseState("never used", away=away)
    return LeaseState("idle", lease.idle_seconds(now), away=away)


def holder_label(owner: Owner, viewer: Owner | None = None) -> str:
    """The label of the process `owner`: `this process`, or `train.ipynb (pid 4121), ann`.

    Without a `viewer`, the process in which a person reads it, the label is the same for every reader. The viewer's own
    user is not named.
    """
    if not owner.pid:  # the sum of a user's processes
        return owner.user
    if viewer is not None and owner.id == viewer.id:
        return THIS_PROCESS
    if not owner.user or (viewer is not None and owner.user == viewer.user):
        return owner.label
    return f"{owner.label}, {owner.user}"


def ended_label(owner_id: str, notebook: str = "") -> str:
    """The label of a process that has left the book: `train.ipynb (pid 4121), ended`. Its id has its pid."""
    pid = f"pid {owner_id.partition('.')[0]}"
    return f"{notebook} ({pid}), ended" if notebook else f"{pid}, ended"


def notebooks_in(events: Iterable[Event]) -> dict[str, str]:
    """The file names of notebooks by their owner's id, from `events`."""
    return {event.owner: event.notebook.rpartition("/")[2] for event in events if event.notebook}


def cards_label(shares: Shares, backend: str = "") -> str:
    """The cards of `shares`: `GPU: 0` or `GPUs: 0,1 (TP:2)`; empty if no share is on a card.

    The degree of tensor parallelism (TP) is shown only if the engine of `backend` is tensor
    parallel.

    >>> from gpu_runtime.facts import Share
    >>> two = (Share("cuda:0", 1), Share("cuda:1", 1))
    >>> cards_label(two[:1]), cards_label(two), cards_label(two, "vllm")
    ('GPU: 0', 'GPUs: 0,1', 'GPUs: 0,1 (TP:2)')
    """
    cards = [share.device for share in shares if share.device != HOST]
    numbers = [device.partition(":")[2] or device for device in cards]
    if len(numbers) < 2:
        return f"GPU: {numbers[0]}" if numbers else ""
    is_parallel = backend in ENGINES and ENGINES[backend].tensor_parallel
    return f"GPUs: {','.join(numbers)}{f' (TP:{len(numbers)})' if is_parallel else ''}"


def place_label(lease: Lease) -> str:
    """The place of `lease`, such as `cuda:0` or `RAM`. For a lease in parts, the bytes on each device.

    >>> from gpu_runtime.facts import Share
    >>> parts = (Share("cuda:0", 24 * 2**30), Share("host", 16 * 2**30))
    >>> place_label(Lease("1", "big", shares=parts))
    '24.0 of 40.0 GiB on cuda:0, 16.0 GiB in RAM'
    """
    if not lease.in_parts:
        return "RAM" if lease.on_host and not lease.on_disk else lease.where
    in_ram = lease.bytes_on(HOST)
    here, whole = show_bytes(lease.bytes - in_ram), show_bytes(lease.bytes)
    number, _, unit = here.partition(" ")
    if whole.endswith(f" {unit}"):
        here = number
    cards = where(tuple(share for share in lease.shares if share.device != HOST))
    return f"{here} of {whole} on {cards}, {show_bytes(in_ram)} in RAM"


def bytes_label(lease: Lease) -> str:
    """The bytes and place of `lease`, such as `40.0 GiB on cuda:0`; see `place_label` for parts."""
    return place_label(lease) if lease.in_parts else f"{show_bytes(lease.bytes)} on {lease.where}"


def lease_title(lease: Lease, owner: Owner | None) -> str:
    """The name of `lease` for people. A kernel's own memory has the name of its notebook, and a sum that of its user.

    >>> lease_title(Lease("1", "kernel", kind="kernel"), Owner("h", "b", 41, 0, notebook="a/train.ipynb"))
    'train.ipynb'
    """
    if lease.kind not in (KERNEL, USER) or owner is None:
        return lease.name
    if lease.kind == USER:
        return owner.user
    return owner.name


# The kinds of leases that are evicted. A block of code keeps its bytes until it ends.
EVICTED = ("model", KERNEL)
# How a reason begins that keeps a notebook's memory for a moment only. Any other reason ends by an act of its user.
PASSING = ("a cell runs", "a thread runs", "the kernel was used meanwhile")


def why_not_moved(events: Sequence[Event], lease: Lease) -> str:
    """The owner's reason for the last failed move of `lease`, as the text `: reason`.

    The reason is from the newest of the `events` about a failed move. The text is empty without such an event.
    Events that answer another process's request (an order) are skipped.
    """
    for event in reversed(events):
        if event.answers:  # the answer to an order, such as a pin by a user without the right
            continue
        if (event.owner, event.model, event.action) == (lease.owner, lease.name, "failed"):
            reason = event.because.partition(": ")[2].rstrip(".")
            return f": {reason}" if reason else ""
    return ""


def notebook_has_name(path: str, name: str) -> bool:
    """Whether `name` is the file name or the path of the notebook at `path`. An empty path is no notebook.

    >>> names = ("train.ipynb", "/ann/train.ipynb", "rain.ipynb", "")
    >>> [notebook_has_name("/ann/train.ipynb", name) for name in names], notebook_has_name("", "")
    ([True, True, False, False], False)
    """
    return path != "" and name in (path, path.rpartition("/")[2])


def of_notebook(sections: Iterable[Section], name: str) -> list[Section]:
    """The kernels of the notebook with this file `name`, path or title. Raises AmbiguousName for several folders."""
    found = [
        section
        for section in sections
        if notebook_has_name(section.owner.notebook, name) or section.owner.title == name != ""
    ]
    paths = tuple(sorted({section.owner.notebook for section in found}))
    if len(paths) > 1:
        raise AmbiguousName(name, paths)
    return found


def held_on_cards(sections: Iterable[Section]) -> list[LeaseId]:
    """The leases in `sections` that an eviction of the whole notebook moves off a card."""
    leases = [lease for section in sections for lease in section.leases]
    held = [lease for lease in leases if lease.kind in EVICTED and lease.on_device]
    return [LeaseId(lease.owner, lease.name) for lease in held]
