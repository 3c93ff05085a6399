"""The data that all front ends show: a snapshot of the book and the devices, and recent history."""

from __future__ import annotations

import enum
from collections.abc import Iterator

from ..safe_text import lines
from ..units import show_bytes, show_seconds
from .base import NEVER, Value
from .book import Drain, Event
from .decisions import Rules
from .devices import Device, Sample
from .labels import bytes_label, lease_title
from .leases import Lease, Owner, Section, Ticket
from .models import Declared, ModelSpec


class Level(enum.StrEnum):
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


class ProcessState(enum.StrEnum):
    """The state of a process in the book, as it was when the snapshot was taken."""

    RUNNING = "running"  # the process runs a cell, or is no kernel
    IDLE = "idle"  # the process is a kernel that runs no cell
    STOPPED = "stopped"  # stopped by SIGSTOP or a debugger; it keeps its memory
    # It has crashed, and keeps its memory until the dump is written
    DUMPING = "writing a core dump"
    SILENT = "silent"  # it does not answer a request, or nothing proves that it lives
    ENDED = "ended"  # its leases are about to be removed


UNUSUAL = frozenset(
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

    def leases(self) -> Iterator[Lease]:
        """Every lease of every owner."""
        for section in self.sections.values():
            yield from section.leases

    def lease(self, owner_id: str, name: str) -> Lease | None:
        """The lease called `name` of the owner with this id, or None."""
        section = self.sections.get(owner_id)
        return section.lease(name) if section else None

    def title(self, owner_id: str, name: str) -> str:
        """The name of a lease for people; `name` if there is no such lease."""
        lease = self.lease(owner_id, name)
        return lease_title(lease, self.sections[owner_id].owner) if lease else name

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
