"""Owners, leases, tickets, and the section of the book that each owner writes.

The book is all leases and tickets of a host. An owner is a process that may hold leases. The table
`rt.leases()` is built in `gpu_runtime/owner/status.py`.

A lease has the times of its last uses, as short text. Each time is a whole epoch second, which has
the same meaning after a restart. Several uses in one second count once. So two lists can be merged
repeatedly without counting a use twice.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from msgspec.structs import replace

from ..compat import StrEnum
from ..safe_text import lines
from ..units import show_bytes
from .base import DISK, HOST, NEVER, NORMAL, Share, Shares, Value, beside, where


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
        if not self.notebook:
            return f"pid {self.pid}"
        if not self.pid:  # the sum of a user's processes
            return self.title
        return f"{self.title} (pid {self.pid})"

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
    # Of the bytes of a notebook's own code that are in RAM: those that are in a file on a disk
    # instead, and take no RAM (`GPU_PARK_DIR`).
    disk_bytes: int = 0
    disk_room: int = 0  # the bytes that the disk can take more; 0: there is none
    stowing: bool = False  # whether the bytes in RAM are being written there now
    moves_again_at: float = 0.0  # after a failed move: the time before which it is not moved again
    measured_bytes: int | None = None  # for a block of code: its measured peak
    backend: str = ""
    model_type: str = "other"
    quantization: str = ""
    fixed: str = ""  # why torch cannot move a notebook's memory, which is then not movable

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

        An empty `target` means that the lease is dropped.

        >>> whole = Lease("1", "a", shares=(Share("sim:0", 9),), piece_bytes=3)
        >>> whole.freed_by((Share("host", 6),))
        (Share(device='sim:0', bytes=6),)
        """
        if not target or any([share.device != HOST for share in target]):
            return self.shares
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
        return self.freed_by((Share(HOST, part),)) if part else self.shares

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
    def on_disk(self) -> bool:
        """Whether all bytes of the lease are in a file on a disk."""
        return bool(self.disk_bytes) and self.on_host and self.disk_bytes >= self.bytes

    @property
    def ram_bytes(self) -> int:
        """The bytes in host memory, without those that are on a disk."""
        return max(0, self.bytes_on(HOST) - self.disk_bytes)

    @property
    def stow_bytes(self) -> int:
        """The bytes that can move to the disk once they are in host memory; 0 if not all of them fit."""
        rest = self.own_bytes - self.disk_bytes
        return rest if rest <= self.disk_room else 0

    @property
    def shed_bytes(self) -> int:
        """The bytes of host memory that the lease gives back for others: its shadow, or what moves to a disk."""
        return self.shadow_bytes or (self.stow_bytes if self.on_host else 0)

    def bytes_on(self, device: str) -> int:
        """The bytes that are on the device with the id `device` now."""
        return sum(share.bytes for share in self.shares if share.device == device)

    def idle_seconds(self, now: float) -> float:
        """Seconds between the last use and `now`; 0 while the lease is in use."""
        return 0.0 if self.pins else max(0.0, now - self.last_used)

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
        size = self.leaving_bytes
        if not self.shadow_bytes or not self._uses_shadow(size):
            return size
        return max(0, size - self.shadow_bytes)

    @property
    def shadow_beyond_target(self) -> int:
        """The bytes of the shadow that `target` does not include: an offload may turn the shadow into a share."""
        if not self.shadow_bytes:
            return 0
        going = sum(share.bytes for share in self.target if share.device == HOST)
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


class Section(Value):
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
        return self._sums()[1]

    def promises(self) -> dict[str, int]:
        """Bytes on each device that are reserved for leases still arriving or moving. Do not change the result."""
        return self._sums()[2]

    def copies(self) -> tuple[tuple[str, int], ...]:
        """For each lease with shared pages: the id of the pages, and the lease's bytes in them."""
        return self._sums()[3]

    def staying_on(self, device: str) -> tuple[Staying, ...]:
        return tuple(one for one in self.staying if one.device == device)

    def cache_on(self, device: str) -> int:
        """The residue on `device` without what is known not to leave: context, cache, own tensors."""
        stays = sum(one.bytes for one in self.staying_on(device))
        return max(0, self.residue.get(device, 0) - stays)

    def _sums(self) -> _Sums:
        known = _known_sums.get(id(self))
        if known is not None and known[0] is self:
            return known
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
        if len(_known_sums) >= _MOST_SUMS:
            _known_sums.clear()
        found = _known_sums[id(self)] = self, claimed, promised, tuple(copies)
        return found

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


# The sections whose sums are known, by Python's `id()`. The entries keep the sections alive, so no
# other object can get the same id.
_Sums = tuple[Section, dict[str, int], dict[str, int], tuple[tuple[str, int], ...]]
_known_sums: dict[int, _Sums] = {}
_MOST_SUMS = 4096


class Ticket(Value):
    """A waiting request, or an order to another owner. A ticket is removed when its writer ends."""

    key: str
    owner: str
    # "use" for a waiting request. An order is one of evict, shed, preload, move, pin,
    # unpin, defrag, who, cancel.
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
