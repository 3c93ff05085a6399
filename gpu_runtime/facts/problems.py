"""The problems of a host: what is wrong, since when, and how much memory it concerns.

Pure: the input is a snapshot. A card that is full of idle models is no problem, because idle models
leave when a request needs the room. The console, `%gpu health`, `/memory/health`, `/metrics` and
JupyterLab all use this list.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from ..compat import StrEnum
from ..safe_text import lines
from ..units import show_bytes
from .book import HOST, KERNEL, USER, Event, Lease, Owner, Phase, Ticket, Value, lease_title
from .snapshot import DeviceView, Level, ProcessState, Snapshot

LONG_WAIT_SECONDS = 300.0  # a request that waits longer is a problem
REFUSED_SECONDS = 600.0  # a refusal is shown for so long, or until the model is granted room
SWAPPING_SECONDS = 300.0  # the time within which two models evict one another
SWAPPING_PART = 0.1  # of the time between the turns; if the moves take less, nobody is slowed down
LEAST_TURNS = 4  # so many alternating evictions of the same two models are a problem
UNLEASED_BYTES = 2**30  # a desktop normally uses less memory than this without a lease
LOW_HOST_PART = 0.05  # the host's memory is low if a smaller part of it is free
MOST_BUTTONS = 2


class ProblemKind(StrEnum):
    """The kinds of problems, the gravest first. `/metrics` has one figure for each kind."""

    DRIVER_FAULT = "driver_fault"
    STOPPED = "stopped"
    SILENT = "silent"
    HOST_MEMORY_LOW = "host_memory_low"
    DISK_FULL = "disk_full"
    PRESSURE = "pressure"
    LONG_WAIT = "long_wait"
    OVER_CAP = "over_cap"
    SWAPPING = "swapping"
    REFUSED = "refused"
    UNLEASED = "unleased"


class Problem(Value):
    """One problem that the host has at the time of a snapshot."""

    kind: ProblemKind
    subject: str  # the device, process, model or request, as an id that stays the same
    text: str  # what is wrong, and what a person can do
    bytes: int = 0  # the memory that the problem holds or needs; 0: none, or unknown
    wall: float = 0.0  # since when, in epoch seconds; 0: unknown
    # Actions that may help, each as a verb and its object. The object is a lease's id. For `cancel`
    # it is the key of the request, and for `resume` it is `OWNER_ID/`.
    actions: tuple[tuple[str, str], ...] = ()

    @property
    def key(self) -> str:
        """An id that stays the same as long as the problem lasts."""
        return f"{self.kind} {self.subject}"

    def __str__(self) -> str:
        return lines(self.text)


def problems(seen: Snapshot) -> tuple[Problem, ...]:
    """All problems on the host of the snapshot `seen`, the gravest first."""
    found = [
        *_driver_faults(seen),
        *_processes(seen),
        *_low_host_memory(seen),
        *_full_disks(seen),
        *_pressure(seen),
        *_long_waits(seen),
        *_over_cap(seen),
        *_swapping(seen),
        *_refusals(seen),
        *_unleased(seen),
    ]
    order = list(ProblemKind)
    return tuple(sorted(found, key=lambda problem: order.index(problem.kind)))


# -- devices -------------------------------------------------------------------------------------


def _driver_faults(seen: Snapshot) -> Iterator[Problem]:
    if seen.degraded:
        text = f"The monitor cannot see: {seen.degraded}.{_how_to_look(seen, seen.degraded)}"
        yield Problem(ProblemKind.DRIVER_FAULT, "", text)
        return
    for view in seen.devices:
        if view.blind:
            id = view.device.id
            text = f"Nothing is granted on {id}: {view.blind}.{_how_to_look(seen, view.blind)}"
            yield Problem(ProblemKind.DRIVER_FAULT, id, text, view.claimed_bytes)


def _how_to_look(seen: Snapshot, fault: str) -> str:
    """What to type about a driver's `fault`; of a card that is lost, also who is on it."""
    if not re.search(r"\blost\b|off the bus", fault):
        return " To look at it: gpu doctor"
    number = re.search(r"\b(?:cuda:|card )(\d+)", fault)
    held = _largest(seen, f"cuda:{number[1]}") if number else ""
    return (
        f"{held and f' On it: {held}.'} To see why: dmesg | grep Xid. To reset it as root, once its programs have "
        f"ended: nvidia-smi -r -i {number[1] if number else 'N'}. Else restart the machine."
    )


def _low_host_memory(seen: Snapshot) -> Iterator[Problem]:
    for view in seen.devices:
        if not view.device.is_host or view.measured_bytes is None:
            continue
        free = view.device.total_bytes - view.measured_bytes
        if free < LOW_HOST_PART * view.device.total_bytes:
            text = (
                f"Only {show_bytes(max(0, free))} of RAM is free. Evicted models do not fit "
                "there and are loaded from disk again. End programs that hold RAM."
            )
            yield Problem(ProblemKind.HOST_MEMORY_LOW, HOST, text, view.measured_bytes)


def _full_disks(seen: Snapshot) -> Iterator[Problem]:
    for path in seen.full_disks:
        text = (
            "A disk is full: no new notebook can begin, and the history has a gap. Make room on it: "
            f"df -h {path}"
        )
        yield Problem(ProblemKind.DISK_FULL, path, text)


def _pressure(seen: Snapshot) -> Iterator[Problem]:
    """Each card over its budget; with `GPU_RELIEF=always`, also each card at the level CRITICAL."""
    for view in seen.cards if seen.governed else ():
        id, over = view.device.id, view.claimed_bytes - view.limit_bytes
        if over > 0:
            held = _largest(seen, id)
            text = (
                f"{id} is over its budget by {show_bytes(over)}: {held}. Nothing is granted on it."
            )
            yield Problem(ProblemKind.PRESSURE, id, text, over, actions=_idle(seen, id))
        elif seen.rules.relief == "always" and view.level is Level.CRITICAL:
            text = f"Memory pressure critical on {id}. Idle models are evicted (GPU_RELIEF=always)."
            yield Problem(ProblemKind.PRESSURE, id, text, view.claimed_bytes)


def _unleased(seen: Snapshot) -> Iterator[Problem]:
    for view in seen.cards:
        size = view.stranger_bytes or 0
        if size < UNLEASED_BYTES:
            continue
        who = _programs(seen, view) or "Another program"
        text = (
            f"{who} holds {show_bytes(size)} on {view.device.id} and does not use gpu-console: nothing "
            f"can move it. {_how_to_end(seen, view)}"
        )
        yield Problem(ProblemKind.UNLEASED, view.device.id, text, size)


def _how_to_end(seen: Snapshot, view: DeviceView) -> str:
    pids = [str(stranger.pid) for stranger in seen.strangers if stranger.device == view.device.id]
    command = f": kill {' '.join(pids)}" if len(pids) in (1, 2) else ""
    return f"Its user or root can end it{command}"


def _programs(seen: Snapshot, view: DeviceView) -> str:
    here = (program for program in seen.strangers if program.device == view.device.id)
    found = [program.label for program in here]
    more = f" and {len(found) - 2} more" if len(found) > 2 else ""
    return "; ".join(found[:2]) + more


# -- processes -----------------------------------------------------------------------------------

_STATES = {
    ProcessState.STOPPED: (
        ProblemKind.STOPPED,
        "{who} is stopped and holds {size}. To continue it: kill -CONT {pid}. To end it: kill -9 {pid}.",
    ),
    ProcessState.DUMPING: (
        ProblemKind.STOPPED,
        "{who} has crashed and holds {size} until its core dump is written.",
    ),
    ProcessState.SILENT: (
        ProblemKind.SILENT,
        "{who} does not answer and holds {size}. Its interpreter is blocked, or it is gone. "
        "Interrupt its cell: kill -INT {pid}. If that does not help: kill -9 {pid}",
    ),
}


_HELPS = {ProcessState.STOPPED: "resume", ProcessState.SILENT: "interrupt"}


def _processes(seen: Snapshot) -> Iterator[Problem]:
    """Each stopped, crashed or silent process that holds memory, which no other process can move."""
    for id, section in seen.sections.items():
        presence = seen.presences.get(id)
        size = sum(section.claims().values())
        if presence is None or presence.state not in _STATES or not size:
            continue
        kind, text = _STATES[presence.state]
        owner = section.owner
        words = text.format(who=_who(seen, owner), size=show_bytes(size), pid=owner.pid)
        verb = _HELPS.get(presence.state)
        actions = ((verb, f"{id}/"),) if verb else ()
        yield Problem(kind, id, words, size, _wall(seen, presence.since), actions)


# -- requests ------------------------------------------------------------------------------------


def _long_waits(seen: Snapshot) -> Iterator[Problem]:
    for ticket in seen.waiting:
        if seen.now - ticket.arrived < LONG_WAIT_SECONDS:
            continue
        need = ticket.need_text or "memory"
        because = f": {ticket.because}" if ticket.because else "."
        minutes = int(LONG_WAIT_SECONDS // 60)
        text = f"{_requested(seen, ticket)} waits for {need}, over {minutes} min{because}"
        kept = _kept(seen, {share.device for share in ticket.need})
        wall = _wall(seen, ticket.arrived)
        actions = (*kept, ("cancel", ticket.key))
        yield Problem(ProblemKind.LONG_WAIT, ticket.key, text, ticket.need_bytes, wall, actions)


def _requested(seen: Snapshot, ticket: Ticket) -> str:
    section = seen.sections.get(ticket.owner)
    if section is None:
        return ticket.name
    title, who = seen.title(ticket.owner, ticket.name), _who(seen, section.owner)
    return who if ticket.name == KERNEL else f"{_named(title, 'Model')} in {who}"


def _named(title: str, word: str) -> str:
    """`model two`: a bare name reads as a word of the sentence. A block of code has a `#` in its name."""
    return title if "#" in title else f"{word} {title}"


def _of_user(seen: Snapshot, owner: Owner) -> str:
    """` of ann`: the user of `owner`, unless it is the one who looks."""
    return f" of {owner.user}" if owner.user and owner.user != seen.owner.user else ""


def _who(seen: Snapshot, owner: Owner) -> str:
    return f"{owner.label}{_of_user(seen, owner)}"


def _subject(seen: Snapshot, event: Event, word: str = "Model") -> str:
    """The title of what the `event` is about, with its notebook and user while the process lives."""
    section = seen.sections.get(event.owner)
    if section is None:
        return event.title
    is_own = event.model == KERNEL
    where = "" if is_own or not section.owner.notebook else f" in {section.owner.title}"
    title = event.title if is_own else _named(event.title, word)
    return f"{title}{where}{_of_user(seen, section.owner)}"


def _over_cap(seen: Snapshot) -> Iterator[Problem]:
    for id, section in seen.sections.items():
        if not section.over_cap:
            continue
        text = f"{section.over_cap}. In {_who(seen, section.owner)} it leaves first when anybody waits."
        idle = [lease for lease in _unused(seen) if lease.owner == id and lease.on_device]
        size = sum(lease.bytes for lease in section.leases if lease.on_device)
        actions = tuple(("evict", lease.id) for lease in idle[:MOST_BUTTONS])
        yield Problem(ProblemKind.OVER_CAP, id, text, size, actions=actions)


_LEFT = ("offloaded", "unloaded")
_FOR_ANOTHER = ("request", "recall")  # evicted for a request of the same, or of another process
_ARRIVED = ("granted", "loaded", "restored")


def _swapping(seen: Snapshot) -> Iterator[Problem]:
    """Two models that left a card alternately, such as A, B, A, B, at least LEAST_TURNS times in five minutes.

    It is a problem only if their moves take more than SWAPPING_PART of the time.
    """
    recent = [event for event in seen.events if seen.wall - event.wall <= SWAPPING_SECONDS]
    cards = seen.cards
    for view in cards:
        here = [event for event in recent if event.device == view.device.id]
        left = [event for event in here if event.action in _LEFT and event.reason in _FOR_ANOTHER]
        turns = _turns(left)
        if len(turns) < LEAST_TURNS:
            continue
        one, other = turns[-2], turns[-1]
        both = {_lease_of(one), _lease_of(other)}
        lasted = turns[-1].wall - turns[0].wall
        returns = [
            event.seconds
            for event in recent
            if event.action in _ARRIVED and _lease_of(event) in both
            if turns[0].wall < event.wall <= turns[-1].wall
        ]
        part = 2 * sum(returns) / max(lasted, 1e-9)  # a model leaves as fast as it returns
        if part <= SWAPPING_PART:
            continue
        pins = tuple(
            ("pin", _lease_of(event)) for event in (one, other) if _settled(seen, event) is not None
        )
        ways = ["pin one of them"] if pins else []  # first what the button does
        ways += ["use another card for one"] if len(cards) > 1 else []
        ways += ["run them one after the other"] if one.notebook and other.notebook else []
        if not ways:
            ways.append("pin one")
        advice = ", or ".join(ways)
        text = (
            f"{_subject(seen, one)} and {_subject(seen, other, 'model')} evict one another on {view.device.id}: "
            f"{len(turns)} × in turn. Moving takes {100 * min(1.0, part):.0f} % of the time. {advice.capitalize()}."
        )
        subject = f"{view.device.id} {' '.join(sorted(both))}"
        size = one.bytes + other.bytes
        yield Problem(ProblemKind.SWAPPING, subject, text, size, turns[0].wall, pins)


def _turns(left: list[Event]) -> list[Event]:
    """The newest events of `left` in which the same two leases leave alternately."""
    turns: list[Event] = []
    for event in left:
        if turns and _lease_of(event) == _lease_of(turns[-1]):
            turns = turns[-1:]
        elif len(turns) >= 2 and _lease_of(event) != _lease_of(turns[-2]):
            turns = turns[-1:]
        turns.append(event)
    return turns


def _lease_of(event: Event) -> str:
    """The id of the lease that the `event` is about. Two processes may have models of one name."""
    return f"{event.owner}/{event.model}"


def _settled(seen: Snapshot, event: Event) -> Lease | None:
    lease = seen.lease(event.owner, event.model)
    if lease is None or lease.kind != "model" or lease.keep or lease.phase is not Phase.SETTLED:
        return None  # a person can pin models only
    return lease


# The kinds of refusals (`facts.Refuse.kind`) that nobody else can help with. The request does not fit
# on the empty cards, or beside what its own thread holds, or a cap or a limit forbids it. The caller
# got an error that says so. If one person types `%%gpu 900GiB`, the host is still healthy.
_OF_THE_CALLER = frozenset({"hopeless", "nested", "cap", "limit"})


def _refusals(seen: Snapshot) -> Iterator[Problem]:
    """The newest refusal of each model that was not granted room later, unless it is old or `_OF_THE_CALLER`."""
    cards = {view.device.id: view.limit_bytes for view in seen.cards}
    latest: dict[tuple[str, str], Event] = {}
    for event in seen.events:
        if event.action == "refused":
            latest[event.owner, event.model] = event
        elif event.action in _ARRIVED:
            latest.pop((event.owner, event.model), None)
    for event in latest.values():
        if seen.wall - event.wall > REFUSED_SECONDS or event.owner not in seen.sections:
            continue
        if event.reason in _OF_THE_CALLER:
            continue
        subject = _lease_of(event)
        text = f"{_subject(seen, event)} was refused: {event.because}{_ram(seen, event)}"
        large = {id for id, limit in cards.items() if limit >= event.bytes}
        kept = _kept(seen, large)
        yield Problem(ProblemKind.REFUSED, subject, text, event.bytes, event.wall, kept)


def _ram(seen: Snapshot, event: Event) -> str:
    """How full RAM is and who fills it, if the refusal of `event` is for want of room there. Else empty."""
    if event.reason != "precious":
        return ""
    for view in seen.devices:
        if view.device.is_host:
            free, held = show_bytes(max(0, view.room_bytes or 0)), _largest(seen, HOST)
            return (
                f". RAM has {free} of {show_bytes(view.limit_bytes)} free{held and f': {held}'}. "
                f"{_how_to_free_ram(seen)}For more RAM, start the notebooks with a larger "
                "CPU_MEMORY_MAX_PERCENT in their environment"
            )
    return ""


def _how_to_free_ram(seen: Snapshot) -> str:
    """What to type so that the largest parked notebook leaves RAM: for its disk if it has one, or for good."""
    parked = [one for one in seen.leases() if one.kind == KERNEL and one.ram_bytes and not one.pins]
    if not parked:
        return ""
    largest = max(parked, key=lambda lease: lease.ram_bytes)
    owner = seen.sections[largest.owner].owner
    if largest.stow_bytes:
        return f"To move {owner.title} to its disk: gpu hibernate {shlex.quote(owner.title)}. "
    return f"To end {owner.title}, which loses its variables: kill {owner.pid}. "


def _largest(seen: Snapshot, device: str) -> str:
    """The largest holders on the `device` with their bytes, and the number of the others, in words.

    For example `train.ipynb of ann 8.0 GiB, qwen in old.ipynb 4.0 GiB and 2 more`.
    """
    held = [lease for lease in seen.leases() if lease.bytes_on(device)]
    held.sort(key=lambda lease: -lease.bytes_on(device))
    named = []
    for lease in held[:MOST_BUTTONS]:
        owner = seen.sections[lease.owner].owner
        title = lease_title(lease, owner)
        if lease.kind != USER:  # the sum of a user's processes has the user's name
            who = _who(seen, owner)
            title = who if lease.kind == KERNEL else f"{title} in {who}"
        named.append(f"{title} {show_bytes(lease.bytes_on(device))}")
    more = f" and {len(held) - MOST_BUTTONS} more" if len(held) > MOST_BUTTONS else ""
    return ", ".join(named) + more


# -- actions -------------------------------------------------------------------------------------


def _idle(seen: Snapshot, device: str) -> tuple[tuple[str, str], ...]:
    """The actions that evict the largest idle models on the `device`, and park the largest idle notebooks."""
    found = [lease for lease in _unused(seen) if not lease.keep]
    for lease in seen.leases():
        if lease.kind == KERNEL and lease.phase is Phase.SETTLED and lease.movable:
            found += [] if lease.pins else [lease]
    found = [lease for lease in found if lease.bytes_on(device)]
    found.sort(key=lambda lease: lease.bytes_on(device), reverse=True)
    largest = found[:MOST_BUTTONS]
    return tuple([("park" if lease.kind == KERNEL else "evict", lease.id) for lease in largest])


def _kept(seen: Snapshot, devices: set[str]) -> tuple[tuple[str, str], ...]:
    """The actions that unpin the largest unused models on the `devices`, so that they may leave."""
    found = []
    for lease in _unused(seen):
        its_devices = {share.device for share in lease.shares}
        if lease.keep and its_devices & devices:
            found.append(lease)
    found.sort(key=lambda lease: lease.bytes, reverse=True)
    largest = found[:MOST_BUTTONS]
    return tuple([("unpin", lease.id) for lease in largest])


def _unused(seen: Snapshot) -> Iterator[Lease]:
    for lease in seen.leases():
        if lease.kind == "model" and lease.phase is Phase.SETTLED and not lease.pins:
            yield lease


def _wall(seen: Snapshot, stamp: float) -> float:
    """Converts `stamp`, a time of the snapshot's clock, to epoch seconds; 0 for no time."""
    return seen.wall - (seen.now - stamp) if stamp else 0.0
