"""The lease of a notebook's kernel: what its own code holds on a card, beyond the governed models.

The lease is opened by itself, counted after each cell and never droppable. It is in use while a cell
runs. When another process needs the card, the memory of an idle kernel is parked in host memory. It
returns before the next cell runs, by the same request as a model's. If it cannot return, the cell is
refused and no line of it runs. The `Stillness` of the front end says when a kernel may be parked.
"""

from __future__ import annotations

import gc
import re
import sys
import traceback
import weakref
from typing import Any

from msgspec.structs import replace

from .. import threads
from ..backends.base import NotStill, Stillness, is_out_of_memory
from ..errors import CannotGovern, GpuError, StillInUse
from ..facts import NORMAL, Book, Footprint, LeaseId, ModelSpec, Outcome, lease_title
from ..scheduler import relief
from ..scheduler.eligibility import reason_to_stay
from ..units import MIB, parse_bytes, show_bytes, show_seconds
from . import acquire, failures, operations, release
from .pins import Anchor, new_anchor
from .resident import Place, Resident
from .session import Session, log

NAME = "kernel"
LEAST_BYTES = MIB  # a kernel that holds less has no lease
LONGEST_COUNT_SECONDS = 0.05
COUNT_SHARE = 20  # the next count follows a slow one after so many times its duration
PARK_AGAIN_SECONDS = 60.0  # an idle kernel that could not be parked is tried again after this time
SWAPS_A_TURN = 5  # a turn lasts at least this many times what leaving and returning takes


class KernelResident(Resident):
    """What a kernel holds, as a model that leaves and returns whole.

    Unlike a model it may be used while its bytes are copied out. The exchange that follows is made only
    if it was not used meanwhile.
    """

    _moving = False

    def begin_moving(self) -> bool:
        """False if a cell runs, if it is moving already, or if nothing is held."""
        with self.gate:
            if self.pins or self.handle is None or self._moving:
                return False
            self._moving = True
        return True

    def swapped(self) -> None:
        """The bytes have left or returned, but the lease does not show it yet."""
        with self.gate:
            self.place = Place.MOVING

    def stay(self) -> None:
        super().stay()
        self._moving = False

    def settle_at(self, lease: Any, anchor: Any = None) -> None:
        super().settle_at(lease, anchor)
        self._moving = False

    def carry(self, step: Any) -> Any:
        """Performs the step. Raises StillInUse if something runs, or the kernel was used meanwhile."""
        try:
            return super().carry(step)
        except NotStill as error:
            raise StillInUse(f"{error}", name=NAME) from None


class Kernel:
    """The kernel of this process. Its front end calls `begin` before each cell, and `end` after it."""

    def __init__(self, session: Session, stillness: Stillness) -> None:
        """`stillness` knows whether anything runs in the kernel that may use its memory."""
        self._session, self._stillness = session, stillness
        self._handle: Any = None
        self._running: list[Anchor] = []  # one for each cell that runs; they pin the lease
        self._park_next = False  # `park` was called by a cell; done at the cell's end
        self._turn_began = session.clock()
        self._count_again_at = 0.0
        self._uncounted = False
        self._park_again_at = 0.0
        self.refused = ""  # why the next cell must not run: its memory is away

    @property
    def resident(self) -> KernelResident | None:
        """The lease's resident; None while the kernel holds too little to have one."""
        found = self._session.residents.get(NAME)
        return found if isinstance(found, KernelResident) else None

    # -- cells

    def begin(self) -> str:
        """Called before a cell runs: returns what is away, and pins it for the cell.

        The result is a sentence if something returned. `refused` says why the cell must not run.
        """
        self.refused = ""
        resident = self.resident
        if resident is None:
            return ""
        anchor = new_anchor()
        news = why = ""
        try:
            self._yield_turn(resident)
            if not resident.enter(weakref.ref(anchor)):
                news = self._return(resident, anchor)
        except KeyboardInterrupt:
            why = "Its return was interrupted."
        except Exception as error:  # IPython would ignore it, and run the cell
            why = str(error)
        # For example, the ledger cannot be read. A cell whose memory is on its card runs all the same.
        if why and not resident.enter(weakref.ref(anchor)):
            self.refused = f"{self._still_away(resident)} {why}"
        self._running.append(anchor)
        return news

    def _return(self, resident: KernelResident, anchor: Anchor) -> str:
        session = self._session
        since, began = resident.lease.away_since, session.clock()
        acquire.obtain(session, resident, weakref.ref(anchor))
        self._turn_began = now = session.clock()
        if not since:
            return ""
        size, away = show_bytes(resident.lease.bytes), show_seconds(began - since)
        return f"{size} came back from RAM in {show_seconds(now - began)}, after {away} away."

    def _still_away(self, resident: KernelResident) -> str:
        return (
            f"{show_bytes(resident.lease.bytes)} of this kernel is parked in host memory, so the cell "
            f"did not run."
        )

    def end(self) -> None:
        """Called after a cell: ends its pin, and counts what the kernel holds now."""
        if self._running:
            self._running.pop()
        if self._running:
            return
        if (resident := self.resident) is not None:
            release.try_again_now(resident)  # the reason for the failed attempt may have ended
            self._park_again_at = 0.0
            resident.failed_moves = 0
        self.count_when_due(idle=False)
        if self._park_next:
            self._park_next = False
            threads.start(lambda: self.park_quietly("It was parked by hand."))

    def _yield_turn(self, resident: KernelResident) -> None:
        """Leaves the card before a cell if another process waits for it and this turn is over.

        Under Run All the next cell follows at once, so the kernel would never be idle.
        """
        session = self._session
        if resident.place is not Place.HERE or resident.pins or not self._is_needed(resident):
            return
        lease, settings = resident.lease, session.settings
        swap_seconds = 2 * lease.restore_seconds
        turn = max(settings.gpu_park_turn_seconds, SWAPS_A_TURN * swap_seconds)
        if session.clock() - self._turn_began < turn:
            return
        try:
            release.evict(session, resident, "Its turn on the card is over, and another waits.")
        except GpuError as error:
            log.debug("the kernel keeps its turn: %s", error)
            self._turn_began = session.clock()  # one attempt a turn

    def _is_needed(self, resident: KernelResident) -> bool:
        """Whether a request of another process needs this kernel to leave."""
        id = resident.lease.id
        cards = {share.device for share in resident.lease.shares}
        for ticket in self._session.ledger.read().tickets:
            if ticket.owner == self._session.me or ticket.verb != "use":
                continue
            if id in ticket.recalls or any(share.device in cards for share in ticket.need):
                return True
        return False

    # -- counting

    def count_when_due(self, idle: bool) -> None:
        """Counts, unless the last count was so slow that another one now would be felt.

        On a simulated card a count is a search of all objects: 40 ms for 170,000. Between cells it
        takes at most a twentieth of the time. A count that was left out is made when the kernel is `idle`.
        """
        clock = self._session.clock
        began = clock()
        self._uncounted = not idle and began < self._count_again_at
        if self._uncounted:
            return
        self.count()
        seconds = clock() - began
        slow = seconds > LONGEST_COUNT_SECONDS
        self._count_again_at = began + (COUNT_SHARE * seconds if slow else 0.0)

    def catch_up(self) -> None:
        """Counts what could not be counted between cells, if no cell runs now."""
        if self._uncounted and not self._running:
            self.count_when_due(idle=True)

    def count(self) -> None:
        """Counts what the kernel holds on its card, and opens, corrects or ends its lease."""
        if "torch" not in sys.modules:
            return
        session, resident = self._session, self.resident
        if resident is not None and resident.place is not Place.HERE:
            return
        backend = session.backend(NAME)
        if self._handle is None:
            self._handle = backend.open(  # type: ignore[attr-defined]
                self._stillness, lambda: _governed(session)
            )
        size = sum(share.bytes for share in backend.measure(self._handle))
        if resident is None and size >= LEAST_BYTES:
            self._open()
        elif resident is not None and size < LEAST_BYTES:
            session.residents.pop(NAME, None)
            session.publish()
        elif resident is not None and resident.remeasure() and session.dozing:
            session.wake_monitor()

    def _open(self) -> None:
        """Opens the lease for what was counted."""
        session, handle = self._session, self._handle
        spec = ModelSpec(NAME, NAME, model_type="kernel", devices=handle.devices)
        resident = KernelResident(spec, session.backend(NAME), session.me, session.clock)
        resident.footprint = lambda: Footprint.of(resident.lease.own_bytes, "measured")
        handle.on_swapped = resident.swapped
        now = session.clock()
        lease = replace(
            resident.lease,
            kind=NAME,
            shares=resident.backend.measure(handle),
            movable=session.settings.gpu_park != "never",
            settled_at=now,
            last_used=now,
            backend=NAME,
            model_type=NAME,
        )
        resident.install(handle, lease, None)
        session.residents[NAME] = resident
        session.start_monitor()
        size = show_bytes(lease.bytes)
        because = f"This notebook's own code holds {size} on {lease.where}."
        session.note(lease, "adopted", "cell", because, size=lease.bytes)

    def make_room(self, error: BaseException) -> str:
        """After a cell that ended with the out-of-memory `error`: garbage and idle leases leave the card.

        Plain code takes memory without a request to the ledger. Returns a sentence for the user; empty if `error`
        is another one. Nothing is run again.
        """
        if not is_out_of_memory(error):
            return ""
        _clear_frames(error)
        gc.collect()
        self.count_when_due(idle=True)
        if isinstance(error, GpuError):  # our own error names the processes that hold the memory
            return ""
        session = self._session
        wanted, freed, left = _bytes_wanted(error), 0, []
        book, world = session.ledger.read(), session.world(fresh=True)
        cards = {device.id for device in session.probe.devices if not device.is_host}
        for lease in sorted(book.leases(), key=lambda lease: lease.last_used):
            here = sum(lease.bytes_on(card) for card in cards)
            why = reason_to_stay(lease, world, asker=session.me, importance=NORMAL)
            if not here or why or (lease.owner, lease.name) == (session.me, NAME):
                continue
            if failures.evict_anywhere(session, lease, "A cell ran out of memory."):
                freed += here
                left.append(lease_title(lease, book.owner(lease.owner)))
            if wanted and freed >= wanted:
                break
        session.probe.empty_cache()
        if not left:
            return "Nothing idle could leave the GPU. Who holds its memory:  %gpu"
        return (
            f"{show_bytes(freed)} came free ({', '.join(left)} moved to RAM): run the cell again."
        )

    # -- parking by hand

    def park(self) -> Outcome:
        """Parks the kernel now, or at the end of the cell that runs. Raises GpuError."""
        resident = self.resident
        if resident is None:
            self.count()
            resident = self.resident
        if resident is None:
            because = "this kernel's own code holds nothing on a card"
            return Outcome(verb="park", name=NAME, done=True, because=because, bytes=0)
        if self._running:
            self._park_next = True
            because = f"{show_bytes(resident.lease.bytes)} leaves when this cell has ended"
            return Outcome(verb="park", name=NAME, done=False, because=because, bytes=0)
        return replace(operations.evict(self._session, self._id(), timeout=None), verb="park")

    def park_quietly(self, because: str) -> None:
        """Parks the kernel, unless an attempt failed a moment ago. A failure is logged."""
        resident, now = self.resident, self._session.clock()
        if resident is None or now < self._park_again_at:
            return
        try:
            release.evict(self._session, resident, because)
        except GpuError as error:
            self._park_again_at = now + PARK_AGAIN_SECONDS
            log.warning("the kernel was not parked: %s", error)

    def _id(self) -> LeaseId:
        return LeaseId(self._session.me, NAME)


def _clear_frames(error: BaseException) -> None:
    """Clears the ended frames of `error` and its causes, which would keep their tensors alive."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        current = pending.pop()
        if current is not None and id(current) not in seen:
            seen.add(id(current))
            traceback.clear_frames(current.__traceback__)
            pending += [current.__cause__, current.__context__]


def _bytes_wanted(error: BaseException) -> int:
    """The bytes that torch could not allocate, by its message; 0 if it does not say."""
    found = re.search(r"Tried to allocate ([\d.]+ [KMGT]?i?B)", str(error))
    return parse_bytes(found[1]) if found else 0


def _governed(session: Session) -> set[int]:
    """The keys (`storage._cdata`) of all storages that belong to models of this process."""
    keys: set[int] = set()
    for resident in list(session.residents.values()):
        groups = getattr(resident.handle, "groups", None)
        if groups is not None:
            keys.update(group.storage._cdata for group in groups())
    return keys


def attach(session: Session, stillness: Stillness) -> Kernel:
    """The kernel of this process. Its front end reports each cell to it."""
    session.kernel = Kernel(session, stillness)
    return session.kernel


def look_after(session: Session) -> None:
    """Counts what was not counted yet, and parks a kernel that is idle for as long as the settings say."""
    settings, kernel = session.settings, session.kernel
    if kernel is None:
        return
    kernel.catch_up()
    _relieve(session, kernel.resident)
    if settings.gpu_park != "idle":
        return
    resident = kernel.resident
    if resident is None or resident.place is not Place.HERE or resident.pins:
        return
    if resident.lease.idle_seconds(session.clock()) < settings.gpu_park_idle_seconds:
        return
    kernel.park_quietly(f"It was idle for {show_seconds(settings.gpu_park_idle_seconds)}.")


def _relieve(session: Session, resident: KernelResident | None) -> None:
    """Parks the kernel if its card holds more than its limit, and this kernel is the one to leave."""
    if resident is None or resident.pins or resident.place is not Place.HERE:
        return
    book = session.ledger.read()
    cards = {share.device for share in resident.lease.shares}
    claims = book.claims()
    if not any(claims.get(card, 0) > book.limits.get(card, claims.get(card, 0)) for card in cards):
        return
    key = session.new_key("park")
    try:
        steps = session.decide(
            lambda book, world: relief.park_kernels(book, session.me, world, session.rank, key.text)
        )
        for step in steps:
            release.step_aside(session, step, key)
    finally:
        session.done_with(key.note)


# -- by name


def park(session: Session, who: str = "") -> Outcome:
    """Parks the kernel of the notebook or process `who`, or this process's own; see Runtime.park."""
    if not who:
        return _own(session).park()
    return replace(operations.evict(session, find(session, who), timeout=None), verb="park")


def unpark(session: Session, who: str = "") -> Outcome:
    """Brings a parked kernel back to its card; see Runtime.unpark."""
    target = find(session, who) if who else _own(session)._id()
    if not who and _own(session).resident is None:
        because = "nothing of this kernel is parked"
        return Outcome(verb="unpark", name=NAME, done=True, because=because, bytes=0)
    return replace(operations.preload(session, target), verb="unpark")


def _own(session: Session) -> Kernel:
    kernel = session.kernel
    if kernel is None:
        raise CannotGovern(
            "only the kernel of a notebook can be parked: in a script nobody knows when it is idle.\n"
            "  In a notebook:  %load_ext gpu",
            name=NAME,
            why="it is no notebook's kernel",
        )
    return kernel


def find(session: Session, who: str) -> LeaseId:
    """The lease of the kernel of `who`: a notebook's file name, a process id or an owner's id.

    Raises GpuError, which names the existing kernels.
    """
    book = session.ledger.read()
    found = [id for id in book.sections if who in _names_of(book, id)]
    if len(found) == 1:
        return LeaseId(found[0], NAME)
    known = [section.owner.label for id, section in book.sections.items() if section.lease(NAME)]
    those = f"Kernels with memory of their own: {', '.join(sorted(known)) or 'none'}."
    if found:
        raise GpuError(f"{who} is the name of {len(found)} kernels. {those}\n  Use a process id.")
    raise GpuError(f"no kernel {who!r} holds memory. {those}", process=who)


def _names_of(book: Book, id: str) -> tuple[str, ...]:
    section = book.sections[id]
    if section.lease(NAME) is None:
        return ()
    owner = section.owner
    file = owner.notebook.rsplit("/", 1)[-1]
    return tuple(name for name in (id, str(owner.pid), file, owner.notebook) if name)
