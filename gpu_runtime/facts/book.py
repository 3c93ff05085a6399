"""The book: all leases and tickets of one host, and their labels. The stored book is called the page.

A ticket is a waiting request, or an order to another process. Each owner (a process that may hold
leases) writes one section of the book, and its own tickets. `ledgers/pieces.py` has the format of the
page. Error messages and all user interfaces use the labels, so a lease has the same label everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, compress
from operator import attrgetter, is_, is_not
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from ..errors import AmbiguousName
from ..safe_text import lines
from ..units import show_bytes, show_seconds
from .base import (
    HOST,
    KERNEL,
    NEVER,
    SCHEMA,
    USER,
    Device,
    Sample,
    Shares,
    Value,
    one_memory,
    where,
)
from .engines import ENGINES
from .leases import Lease, LeaseId, Owner, Phase, Section, Ticket


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
    return sum([one.total_bytes for one in book.devices if one.id == device])


def _raised_by_returns(old: Book, new: Book, changed: Collection[str], device: str) -> bool:
    """Whether only returns of bytes that exist nowhere else, or departures for them, promise more."""

    def ordinary_bytes(book: Book) -> int:
        waiting = [ticket for ticket in book.tickets if waits_to_return(book, ticket)]
        total = 0
        for lease in (
            one for id in changed if id in book.sections for one in book.sections[id].leases
        ):
            if device == HOST:
                exempt = lease.phase is Phase.LEAVING and not lease.droppable
                exempt = exempt and any(
                    lease.id in ticket.recalls or lease.owner == ticket.owner for ticket in waiting
                )
            else:
                exempt = lease.phase is Phase.ARRIVING and lease.must_return
            if not exempt:
                total += sum([share.bytes for share in lease.target if share.device == device])
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


def away_word(lease: Lease) -> str:
    """What a lease in host memory is called there; empty for any other lease."""
    if not lease.on_host:
        return ""
    if lease.kind == "kernel":
        return "on disk" if lease.on_disk else "parked"
    return ASLEEP if lease.backend in (*ENGINES, "llama_cpp") else "in RAM"


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
    return owner.title or f"pid {owner.pid}"


# The kinds of leases that are evicted. A block of code keeps its bytes until it ends.
EVICTED = ("model", "kernel")
# How a reason begins that keeps a notebook's memory for a moment only. Any other reason ends by an act of its user.
PASSING = ("a cell runs", "a thread runs", "the kernel was used meanwhile")


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
