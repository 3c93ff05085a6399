"""The book: all leases and tickets of one host, with its encoding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
from msgspec.structs import replace

from .base import NEVER, SCHEMA, Value
from .devices import Device, Sample, Shares, one_memory
from .leases import Lease, Owner, Section, Ticket


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
        return (
            sample is not None
            and sample.free_bytes is not None
            and sample.taken_at > self.died_at
            and self.pid not in sample.processes
        )


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
    drained: dict[
        str, Drain
    ] = {}  # Device.key -> by whom; nobody's own, so it outlives who said so

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
        return self.with_section(
            replace(section, leases=tuple(o for o in section.leases if o.name != name))
        )

    def with_ticket(self, ticket: Ticket) -> Book:
        """This book with the ticket, in its old place where it had one."""
        if self.ticket(ticket.key) is None:
            return replace(self, tickets=(*self.tickets, ticket))
        return replace(
            self, tickets=tuple(ticket if t.key == ticket.key else t for t in self.tickets)
        )

    def without_ticket(self, key: str) -> Book:
        return replace(self, tickets=tuple(ticket for ticket in self.tickets if ticket.key != key))


def decode_book(data: bytes | memoryview | str) -> Book:
    """The book that a page holds. Raises msgspec.DecodeError or msgspec.ValidationError for anything else."""
    return _decode_book(data)


def decode_section(data: bytes | str) -> Section:
    """The section that a roster holds. Raises as decode_book."""
    return _decode_section(data)


_decode_book = msgspec.json.Decoder(Book).decode
_decode_section = msgspec.json.Decoder(Section).decode


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
    over = {
        device: after[device] - max(new.limits.get(device, after[device]), before.get(device, 0))
        for device in more
    }
    shared = one_memory(new.devices)
    if shared & more:  # they have one budget, the largest of theirs
        limit = max(new.limits.get(device, 0) for device in shared)
        over["+".join(sorted(shared))] = sum(after.get(device, 0) for device in shared) - max(
            limit, sum(before.get(device, 0) for device in shared)
        )
    return {device: excess for device, excess in over.items() if excess > 0}


def _promised(sections: Iterable[Section]) -> dict[str, int]:
    """Bytes on each device that are reserved for what is still on its way."""
    sums: dict[str, int] = {}
    for section in sections:
        for lease in section.leases:
            for share in lease.target:
                sums[share.device] = sums.get(share.device, 0) + share.bytes
    return sums
