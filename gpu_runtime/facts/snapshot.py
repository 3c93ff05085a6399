"""What the faces show: a snapshot of the book, the devices, and recent history."""

from __future__ import annotations

import enum
from collections.abc import Iterator

from ..units import show_bytes
from .base import Value
from .book import Drain, Event
from .decisions import Rules
from .devices import Device, Sample
from .leases import Lease, Owner, Section, Ticket
from .models import ModelSpec


class Level(enum.StrEnum):
    """How full a device is."""

    LOW = "LOW"
    MODERATE = "MODERATE"
    HIGH = "HIGH"
    CRITICAL = "CRITICAL"
    UNKNOWN = "UNKNOWN"


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
    room_bytes: int | None = (
        None  # what a grant may spend now, negative in an overdraft; None: not known
    )
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


class Moment(Value):
    """One device at one time of its history."""

    wall: float  # epoch seconds
    device: str
    total_bytes: int
    limit_bytes: int  # its budget
    measured_bytes: (
        int | None
    )  # in use; None: the driver would not say. What no lease claims is the rest
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
    strangers: tuple[
        Stranger, ...
    ] = ()  # processes on the cards that lease nothing, the largest first
    host: str = ""  # whose book this is, where it is not the looker's own
    seen_seconds: float = 0.0  # since anybody there last showed itself, for another host
    rules: Rules = Rules()  # the looker's: thresholds of the levels, reserve, grace
    unanswered: tuple[
        Unanswered, ...
    ] = ()  # who does not answer what is asked of them, the longest silent first

    def leases(self) -> Iterator[Lease]:
        for section in self.sections.values():
            yield from section.leases

    def __str__(self) -> str:
        """A line a device and a lease, for `print`; the faces show it with bars and in colour."""
        cards = [
            f"{view.device.id}: {show_bytes(view.claimed_bytes)} of {show_bytes(view.limit_bytes)} claimed, pressure "
            f"{view.level}"
            for view in self.devices
        ]
        held = [
            f"  {lease.name}: {show_bytes(lease.bytes)} on {lease.where}{', in use' if lease.pins else ''}"
            for lease in self.leases()
        ]
        return "\n".join([*cards, *held])
