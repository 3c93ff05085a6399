"""One process as an owner in the ledger: its facts about itself, and its transactions.

A `Session` belongs to one `Runtime`. The session holds this process's models and blocks of code,
publishes them in the owner's section (the owner's part of the book), and runs each decision of the
scheduler in a transaction of the ledger. The functions in `acquire`, `release`, `requests`,
`maintenance` and other modules choose the decision; their first parameter is the session. Loads run
in a thread that the caller waits for, and that it can leave or stop. Moves and drops run in a thread
that an interrupt cannot stop.

After the session come two of its parts: the keys of its decisions, and its blocks of code.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
import weakref
from _thread import get_ident
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from msgspec.structs import replace

from .. import threads
from ..backends.base import Backend
from ..backends.formats.sources import AbsentBackend
from ..backends.registry import backend_names, open_backend
from ..catalog.files import Catalogued
from ..devices.probe import Probe
from ..errors import GpuError, LedgerUnavailable, ProbeFailed
from ..facts import (
    DISK_SECONDS_PER_BYTE,
    KERNEL,
    Asker,
    Book,
    Device,
    Event,
    Lease,
    ModelSpec,
    Owner,
    Phase,
    Staying,
    Ticket,
    Wait,
    World,
)
from ..ledgers.base import Ledger
from ..ledgers.host_config import Machine, groups_of
from ..notebook import activity
from ..scheduler import capacity, transitions
from ..scheduler.policies import policy
from ..scheduler.transitions import Truth
from ..settings import Settings
from ..telemetry import hours
from ..telemetry.journal import Journal
from ..telemetry.measurements import Measurements
from ..telemetry.recorder import Record
from ..threads import Stoppable, uninterrupted
from ..units import MIB
from .allocator_maps import Maps
from .monitor import Breaker, Monitor
from .pins import AnchorRef, thread_of
from .resident import Resident, held_by
from .sizing import Sizing, residue

log = logging.getLogger("gpu_runtime")
T = TypeVar("T")
Decision = Callable[[Book, World], tuple[Book, T]]

PUBLISH_SECONDS = 0.05  # the longest wait of a cell until the book shows that it runs
CARD_HOURS_SECONDS = 300.0  # between two reads of the account of hours
WEEK_SECONDS = 7 * 86400.0
DAY_SECONDS, HALF_LIFE_SECONDS = 86400.0, 43200.0  # of the past use that GPU_FAIRNESS=day counts
POLL_SECONDS = 1.0  # between two reads of the book without a notification
NEAR_SECONDS = 0.05  # between two checks of an own model that a waiting request needs


class _Renamed(Exception):
    """The book has other names for devices of this process.

    `names` maps this process's names to the book's names.
    """

    def __init__(self, names: dict[str, str]) -> None:
        super().__init__(names)
        self.names = names


class Session:
    """This process's models, blocks of code and owner record, and its transactions on the book."""

    def __init__(
        self,
        ledger: Ledger,
        probe: Probe,
        settings: Settings,
        journal: Journal,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
        catalogue: Catalogued,
        machine: Machine | None = None,
        measurements: Measurements | None = None,
        record: Record | None = None,
        recording: Any = None,
    ) -> None:
        """`clock` returns seconds of CLOCK_BOOTTIME, `wall` epoch seconds. `machine` is the
        operator's configuration. `record` is the history of device samples, and `recording` the
        helper process that writes it on simulated devices.
        """
        self.ledger, self.probe, self.settings, self.journal = ledger, probe, settings, journal
        self.me = ledger.owner.id  # this owner's id in the book
        self.clock, self.wall = clock, wall
        self.catalogue, self.activity = catalogue, activity
        self.machine = Machine() if machine is None else machine
        self.record, self.recording = record, recording
        self.rank = policy(settings.gpu_policy)
        self.disk_seconds_per_byte = DISK_SECONDS_PER_BYTE  # until this disk is measured
        self.disk_read_seconds_per_byte = 0.0  # of that, the return; 0: not measured
        self.disk_measured_at = math.inf
        self.disk_error = ""  # why this disk cannot be used, as it was last logged
        self.sizing = Sizing(measurements or Measurements(), probe, wall)
        self.maps = Maps(ledger, probe, clock=clock, wall=wall)
        user = ledger.owner.user
        self.rules = replace(settings.rules(), cap=self.machine.cap(user, groups_of(user)))
        self.placement = settings.placement()
        self._card_hours_at = -math.inf  # when the account of hours was read
        self.residents: dict[str, Resident] = {}
        self.wished: Mapping[str, int] = {}  # in the agent of a fleet: `Lease.wished`, by model
        self.blocks = Blocks()
        self.backends: dict[str, Backend] = {}
        self.limits = {device.id: self._limit(device) for device in probe.devices}
        # Protects residents and the monitor's start; no load holds it.
        self.lock = threading.RLock()
        # Held for one transaction. A signal handler of the user may begin a second one in the thread.
        self._turn = threads.freed(threading.RLock())
        self._turns_ended = 0
        self.guest = False  # True for a command that sends requests and holds no model itself
        self.notebook = ""  # the notebook's path, if it became known after the ledger was opened
        self.process_lost = ""  # why the driver no longer serves this process; empty if it does
        self.on_wait: Callable[[str, Wait | None], None] | None = None
        self.on_arrival: Callable[[Any], None] | None = None  # takes an arrivals.Arrival
        self.keys = Keys(self.me)
        self.new_key, self.done_with = self.keys.new, self.keys.done_with
        self.uninterrupted = self.keys.uninterrupted
        self.standing: dict[Key, Ticket] = {}  # requests to other owners that no caller waits for
        self.loads: dict[str, Stoppable] = {}  # the loads that run now, by the model's name
        self.users: dict[str, Asker] = {}  # what each user may request of this process
        self._torch_limits: dict[str, float] = {}  # card -> fraction that torch may allocate here
        self._named: tuple[Device, ...] = ()  # the book's devices when the names last agreed
        self.kernel: Any = None  # the Kernel of a notebook, see kernel.py; None in a script
        self.look_ahead: Any = None
        self.monitor: Monitor | None = None
        self.monitor_started = self.dozing = self.closed = False
        self.breaker = Breaker()
        # Other owners' requests that are carried out, by key: the answer, once it was given.
        self.orders: dict[str, tuple[str, str, int] | None] = {}
        self.overstayed: set[str] = set()  # blocks whose overlong lease was logged
        self.reap_calls = 0
        # The last `Memory.pulse` of host memory, and when it was first seen.
        self.host_pulse: tuple[Any, float] | None = None
        self.checked_at, self.opened_at = clock(), time.monotonic()
        self.changed_at = clock()  # when a tick last found a use, or something to publish
        self._announced = False  # whether the book has had a section of this owner

    @property
    def owner(self) -> Owner:
        """This owner, with the notebook's path if the path is known."""
        owner = self.ledger.owner
        return replace(owner, notebook=self.notebook) if self.notebook else owner

    def _limit(self, device: Device) -> int:
        """Usable bytes of a device: its total times the fraction that the settings allow."""
        if device.is_host:
            fraction = self.settings.cpu_memory_max_percent
        else:
            fraction = self.settings.gpu_memory_max_percent
        return int(device.total_bytes * fraction)

    def backend(self, name: str) -> Backend:
        """The backend `name`, which is opened at its first use."""
        backend = self.backends.get(name)
        if backend is not None:
            return backend
        if name in backend_names():
            opened = open_backend(name, self.probe, self.settings)
        else:
            opened = AbsentBackend(name)
        return self.backends.setdefault(name, opened)

    # -- the facts of this process about itself

    def truth(self) -> Truth:
        """The current facts of this process, from which its section of the book is written."""
        residents = [r for r in list(self.residents.values()) if r.handle is not None]
        models = tuple(lease for r in residents if (lease := r.truth()) is not None)
        if self.wished:
            wished = self.wished
            models = tuple(replace(model, wished=wished.get(model.name, 0)) for model in models)
        blocks = self.blocks.running(self._lift_torch_limit)
        engines = tuple(pid for resident in residents for pid in resident.engines)
        return Truth(
            self.owner,
            models + blocks,
            self.keys.texts(),
            self._residue(models),
            *self.activity.state,
            engines,
            self.staying(),
        )

    def staying(self) -> tuple[Staying, ...]:
        """What the notebook's own code holds on a card, and cannot leave it."""
        return self.kernel.staying if self.kernel is not None else ()

    def _residue(self, models: tuple[Lease, ...]) -> dict[str, int]:
        found = self._own_residue(models)
        for resident in list(self.residents.values()):
            for device, size in getattr(resident.handle, "kept", {}).items():
                found[device] = found.get(device, 0) + size
        return found

    def _own_residue(self, models: tuple[Lease, ...]) -> dict[str, int]:
        """The residue of this process, without its engines."""
        if self.probe.simulated:
            found: dict[str, int] = {}
            for part in self.staying():
                found[part.device] = found.get(part.device, 0) + part.bytes
            return found
        engine_models = {r.spec.name for r in list(self.residents.values()) if r.engines}
        in_process = [lease for lease in models if lease.name not in engine_models]
        blocks = [lease for lease, _ in list(self.blocks.values())]
        return residue((*in_process, *blocks), self.probe.used(), self.probe.contexts())

    def holds_memory(self) -> bool:
        """Whether a model or a block of this process occupies memory."""
        residents = list(self.residents.values())
        return bool(self.blocks) or any(resident.handle is not None for resident in residents)

    def pinned_by_caller(self) -> tuple[str, ...]:
        """Ids of the leases that the calling thread holds until a block of it ends: models, and its leased blocks.

        For the thread of a load, those of its caller too.
        """
        asking = [threading.get_ident()]
        for thread in asking:
            asking += [load.caller for load in list(self.loads.values()) if load.thread == thread]
        residents, blocks = list(self.residents.values()), list(self.blocks.values())
        held = [id for thread in asking for id in held_by(residents, thread)]
        held += [lease.id for lease, at in blocks if lease.bytes and thread_of(at) in asking]
        return tuple(dict.fromkeys(held))

    def in_use(self) -> bool:
        """Whether changes are likely soon: a model is in use, or a block of code or a cell runs."""
        busy = self.blocks or self.activity.running
        return bool(busy) or any(resident.in_use() for resident in list(self.residents.values()))

    def _read_card_hours(self, now: float) -> None:
        """Puts this user's card-hours into the rules: of seven days for a cap on them, and for GPU_FAIRNESS.

        The account is read every CARD_HOURS_SECONDS at most. A ledger in memory keeps none.
        """
        cap, fair = self.rules.cap, self.settings.gpu_fairness == "day"
        capped = cap is not None and cap.card_hours_per_week is not None
        if self.record is None or not (capped or fair):
            return
        if now < self._card_hours_at + CARD_HOURS_SECONDS:
            return
        self._card_hours_at = now
        account = hours.Hours(self.record.path.with_name(hours.FILE))
        user, wall = self.ledger.owner.user, self.wall()
        if cap is not None and capped:
            used = account.card_hours(user, wall, WEEK_SECONDS)
            self.rules = replace(self.rules, cap=replace(cap, used_card_hours=used))
        if fair:
            used = account.card_hours(user, wall, DAY_SECONDS, HALF_LIFE_SECONDS)
            self.rules = replace(self.rules, past_use=round(used, 1))  # as `why` shows it

    def world(self, fresh: bool = False) -> World:
        """The devices as measured last; measured now if `fresh` is true.

        If the driver does not answer, the devices count as unmeasured, and nothing counts as free.
        """
        now = self.clock()
        self._read_card_hours(now)
        try:
            samples = self.probe.samples(now, fresh)
        except ProbeFailed as error:
            samples = {}
            log.debug("probe failed: %s", error)
        return World(
            self.clock(), self.wall(), self.probe.devices, self.limits, samples, self.rules
        )

    # -- transactions

    def transact(
        self,
        decision: Decision[T],
        fresh: bool = False,
        in_full: Callable[[list[Event], T], list[Event]] | None = None,
    ) -> T:
        """Updates this owner's part of the book and runs `decision`, in one transaction.

        After the transaction, notifies the owners that the write concerns and journals the events.
        If `fresh` is true, the devices are measured first. `in_full(events, answer)` adds details
        that only the journal keeps. Raises LedgerUnavailable.
        """
        try:
            return self._transact(decision, self.world(fresh), in_full)
        except _Renamed as renamed:
            self._rename(renamed.names)
            return self._transact(decision, self.world(fresh), in_full)

    def _transact(
        self,
        decision: Decision[T],
        world: World,
        in_full: Callable[[list[Event], T], list[Event]] | None,
    ) -> T:
        def deciding(book: Book) -> tuple[Book, tuple[T, Book, Book]]:
            self._require_equal_names(book)
            base = transitions.measure(transitions.publish(book, self.truth(), world), world)
            after, answer = decision(base, world)
            return after, (answer, book, after)

        answer, before, after = self.in_turn(lambda: self.ledger.transact(deciding))
        if after is not before:
            self._notify(before, after)  # first: the others need not wait 3 ms for the journal
            events = [event for event in after.events if event.seq > before.seq]
            if in_full and events:
                events = in_full(events, answer)
            self._journal(events)
            self.limit_torch(after, world)
        return answer

    def in_turn(self, transact: Callable[[], T]) -> T:
        """The result of `transact`, which no write of another thread of this process disturbs.

        If 500 threads write at once, each write makes the others decide again, and some give up. So a
        thread waits for its turn, for as long as the turns of others end; see `threads.in_turn`.
        """
        ended = self._turns_ended

        def work(has_turn: bool) -> T:
            if not has_turn and self._turns_ended != ended:
                return self.in_turn(transact)
            try:
                return transact()
            finally:
                self._turns_ended += 1

        return threads.in_turn(self._turn, work)

    def publish(self) -> None:
        """Writes this owner's section as it is now."""
        self.transact(lambda book, world: (book, None))

    def announce(self, name: str) -> None:
        """Publishes that this process can load the model `name`.

        The first call also publishes this owner. If the ledger cannot be written now, the monitor
        publishes the name later.
        """
        if not self.settings.enable_memory_governor:
            return
        try:
            self.ledger.add_name(name, self.residents[name].declared())
            if self.dozing:
                self.wake_monitor()  # it publishes the rest of a long list
            if not self._announced:
                self.publish()
                self._announced = True
        except (GpuError, OSError) as error:  # what fails now must not stop `register`
            log.debug("announced later: %s", error)

    def publish_names(self) -> None:
        """Publishes the names of the models that this process can load, if they have changed."""
        if not self.settings.enable_memory_governor:
            return
        try:
            residents = list(self.residents.items())
            self.ledger.publish_names(
                {name: resident.declared() for name, resident in residents if name != KERNEL}
            )
        except OSError as error:  # a full disk: others keep the last names
            log.debug("the names are published later: %s", error)

    def note(
        self,
        lease: Lease,
        action: str,
        reason: str,
        because: str,
        *,
        fresh: bool = False,
        **more: Any,
    ) -> None:
        """Writes one event on a lease into the book."""
        self.transact(
            lambda book, world: (
                transitions.note(book, world, lease, action, reason, because, **more),
                None,
            ),
            fresh=fresh,
        )

    def withdraw(self, key: Key) -> None:
        """Removes what the book still has for `key`: a ticket, or the bytes of a grant. Never raises GpuError.

        Call it after `done_with`. If the removal fails, the monitor does it at its next tick. If it is
        interrupted, as by a second press of the stop button, the monitor, which may doze, does it now.
        """
        try:
            book = self.ledger.read()
            moving = {lease.key for lease in book.leases() if lease.phase is not Phase.SETTLED}
            if book.ticket(key.text) or key.text in moving:
                self.transact(lambda book, world: (book.without_ticket(key.text), None))
        except LedgerUnavailable as error:
            log.debug("a ticket stays until the ledger can be written: %s", error)
        except BaseException:
            self.wake_monitor()
            raise

    def reap(self) -> int:
        """Removes owners that are proven dead from the book. Returns the number of dead owners."""
        dead = self.ledger.dead(self.ledger.read())
        if dead:
            self.transact(lambda book, world: (transitions.reap(book, dead, world), None))
        return len(dead)

    # -- reading

    def read_book(self) -> Book:
        """Reads the book. If this process holds no memory, it uses the book's device names from now on."""
        book = self.ledger.read()
        try:
            self._require_equal_names(book)
        except _Renamed as renamed:
            if not self.holds_memory():
                self._rename(renamed.names)
        return book

    def look(self) -> tuple[Book, World]:
        """The book, with the section of this process updated, and the devices.

        If this process has nothing in the book, the devices are the devices of the other owners.
        """
        book, world = self.read_book(), self.world()
        if self.residents or self.blocks or self.me in book.sections:
            book = transitions.publish(book, self.truth(), world)
        elif book.sections and book.devices:
            world = replace(world, devices=book.devices, limits={**world.limits, **book.limits})
        return book, world

    # -- names of devices

    def _require_equal_names(self, book: Book) -> None:
        """Raises _Renamed if the book uses another name for a device of this process.

        The names differ in two cases: two processes that see different cards opened the ledger at
        the same moment, or another owner has made a new book.
        """
        if book.devices is not self._named:
            if other := transitions.device_names(self.probe.devices, book):
                raise _Renamed(other)
            self._named = book.devices

    def _rename(self, names: dict[str, str]) -> None:
        """Gives the devices of this process the book's names.

        Raises LedgerUnavailable if this process holds memory on the devices under the old names.
        """
        if self.holds_memory():
            cards = ", ".join(f"{ours} is {theirs}" for ours, theirs in names.items())
            raise LedgerUnavailable(
                f"the book has other names for devices of this process: {cards}.\n"
                f"  Open the runtime again:  rt.close(), then gpu_runtime.runtime()",
                path=self.ledger.url,
            )
        self.probe.rename(names)
        self.limits = {device.id: self._limit(device) for device in self.probe.devices}
        for resident in list(self.residents.values()):
            devices = tuple(names.get(device, device) for device in resident.spec.devices)
            resident.spec = replace(resident.spec, devices=devices)

    # -- after a transaction

    def _journal(self, events: list[Event]) -> None:
        if events:
            self.journal.append(events)
        for event in events:
            if event.owner == self.me:
                resident = self.residents.get(event.model)
                log_event(event, resident.spec if resident else None)

    def _notify(self, before: Book, after: Book) -> None:
        concerned: set[str] = set()
        waiting = {ticket.owner for ticket in after.tickets}
        if waiting and transitions.affects_waiters(before, after):
            concerned |= waiting
        concerned |= transitions.newly_addressed(before, after, self.me)
        concerned |= transitions.able_to_offload(before, after)
        if concerned:
            self.ledger.ring(concerned)

    def limit_torch(self, book: Book, world: World) -> None:
        """Caps torch's allocator on real cards: torch cannot take what other owners have leased."""
        cap = self.rules.cap
        enforced = cap is not None and cap.enforce
        if self.probe.simulated or not (self._torch_limits or self.residents or enforced):
            return
        busy = {share.device for lease, _ in list(self.blocks.values()) for share in lease.shares}
        wanted = capacity.torch_bounds(book, self.me, world, self.probe.beyond_torch(), busy)
        for card in (self._torch_limits.keys() | wanted.keys()) - busy:
            fraction = wanted.get(card, capacity.ALL)
            current = self._torch_limits.get(card, capacity.ALL)
            if abs(current - fraction) >= 0.001 and self.probe.bound(card, fraction):
                self._torch_limits[card] = fraction

    def forget_torch_limit(self, card: str) -> None:
        """Forgets the cap on a card, because a block of code has lifted it."""
        self._torch_limits.pop(card, None)

    def _lift_torch_limit(self, card: str) -> None:
        """Lifts the cap of a block of code that was interrupted before it lifted the cap itself."""
        self.probe.bound(card, capacity.ALL)
        self.forget_torch_limit(card)

    # -- the monitor

    def start_monitor(self) -> None:
        """Starts the monitor, at the first model or lease. A process that only reads needs none."""
        if not self.settings.enable_memory_governor:
            return
        with self.lock:
            if self.monitor_started:
                return
            self.monitor_started = True
            try:
                if self.monitor:
                    self.monitor.start()  # raises RuntimeError if the system starts no more threads
                    self.activity.watchers.add(self.cell_began)
            except BaseException:
                self.monitor_started = False
                raise
        budget = sum(self.limits[card.id] for card in self.probe.cards)
        log.info(
            "GovernedModelManager initialized with memory governor (gpu_budget=%dMB)", budget // MIB
        )

    def cell_began(self) -> None:
        """Publishes that a cell runs, and waits until moves of modules in training have ended.

        A cell that blocks the interpreter at once (a long call into C) would look idle for ever, since no thread
        could publish it. So the cell waits for the publication, for at most PUBLISH_SECONDS.
        """
        if self.residents and not self.closed:
            threads.start(self.publish_quietly).wait(PUBLISH_SECONDS)
        if self.dozing and not self.closed:
            self.wake_monitor()
        for resident in list(self.residents.values()):
            resident.await_move()

    def publish_quietly(self) -> None:
        """As `publish`, for a caller that needs no error if the ledger cannot be written now."""
        with contextlib.suppress(GpuError):  # the monitor publishes it at its next tick
            self.publish()

    def wake_monitor(self) -> None:
        """Ends the monitor's sleep now."""
        self.dozing = False
        self.ledger.ring([self.me])


# -- keys name the decisions in progress; this process notes a key before sending it anywhere
#
# A ticket is the entry of a waiting request in the book; a ticket has the key of its decision.


class Key:
    """The name of a decision in progress. The session knows a key only while this object exists.

    A KeyboardInterrupt can arrive before a function's first line. The traceback then keeps the
    frame alive, and the frame keeps the key alive. So release the key with one C call:
    `session.done_with(key.note)`.
    """

    __slots__ = ("text", "note", "ended_by", "thread", "__weakref__")

    def __init__(self, text: str) -> None:
        self.text = text
        self.note = weakref.ref(self)
        self.ended_by = ""  # who ended the wait with this key; empty: nobody
        self.thread = get_ident()  # the thread that made the decision


class Keys:
    """The keys of one owner. The monitor withdraws each ticket whose key is not known here."""

    def __init__(self, owner: str) -> None:
        """`owner` is the owner's id in the book."""
        self._owner = owner
        self._known: set[weakref.ref[Key]] = set()
        self._numbers = itertools.count(1)
        self.done_with = self._known.discard  # one C call, see Key

    def new(self, what: str) -> Key:
        """A new key for a decision that `what` describes."""
        return self._note(Key(f"{self._owner}:{next(self._numbers)}:{what}"))

    def texts(self) -> tuple[str, ...]:
        """The texts of all keys that are known now."""
        return tuple(key.text for key in self._living())

    def end(self, text: str, by: str) -> bool:
        """Notes that the wait with the key `text` was ended. Returns whether that key is known.

        `by` is the person or the process that ended the wait.
        """
        keys = [key for key in self._living() if key.text == text]
        for key in keys:
            key.ended_by = by
        return bool(keys)

    def end_of(self, thread: int, by: str) -> None:
        """Notes for each key of the `thread` that its wait was ended, by the person or program `by`."""
        for key in self._living():
            if key.thread == thread:
                key.ended_by = key.ended_by or by

    def _living(self) -> list[Key]:
        return [key for ref in self._known.copy() if (key := ref()) is not None]

    def uninterrupted(self, key: Key, work: Callable[[], T]) -> T:
        """Runs `work` in a thread that gets no interrupts. The key stays known until `work` ends.

        If the caller was interrupted before the work started, `key` is gone and the work is
        skipped.
        """
        return uninterrupted(self.kept(key, work))

    def kept(self, key: Key, work: Callable[[], T]) -> Callable[[], T]:
        """The function `work`, during which the key stays known. See `uninterrupted`."""
        wanted = key.note

        def act() -> T:
            # An interrupt of the caller ends its key. So a second key with the same text is noted for
            # the time of `work`. It is noted before the check of the first key, which can end at once.
            held = self._note(Key(key.text))
            try:
                return work() if wanted in self._known else None  # type: ignore[return-value]
            finally:
                self.done_with(held.note)

        return act

    def _note(self, key: Key) -> Key:
        try:
            self._known.add(weakref.ref(key, self._known.discard))
            return key
        except BaseException:  # an interrupt after the addition: its traceback keeps this frame
            self.done_with(key.note)
            raise


# -- blocks of user code
#
# An anchor is an object that lives as long as the block's `with` statement runs.


class Blocks(dict[str, tuple[Lease, AnchorRef]]):
    """Maps the name of a block to the block's lease and anchor."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)
        self.leased_bytes = 0  # the sum over all blocks until now, including ended blocks

    def new_number(self) -> int:
        """The number of the next block."""
        return next(self._numbers)

    def running(self, ended: Callable[[str], None]) -> tuple[Lease, ...]:
        """The leases of the running blocks. Removes the blocks that an interrupt has ended.

        An interrupt can skip the code at the end of a block. In this case this method removes the
        block, and calls `ended(card)` for each card on which the block had leased memory.
        """
        leases = []
        for name, (lease, anchor) in list(self.items()):
            if anchor():
                leases.append(lease)
            elif self.pop(name, None):  # None: the block's own end was faster
                for share in lease.shares:
                    ended(share.device)
        return tuple(leases)


# -- log lines of the Semantik governor, a memory manager whose features this project continues
#
# Their exact text must not change, because operators search logs for them.


def log_event(event: Event, spec: ModelSpec | None) -> None:
    """Logs what happened to a model of this process. `spec` is None if the model was forgotten."""
    key = spec.key if spec else event.model
    short = f"{spec.model_type}:{event.model}" if spec else event.model
    if event.action == "granted":
        log.info("Memory request approved: %s needs %dMB", key, event.bytes // MIB)
    elif event.action == "offloaded":
        log.info("Offloaded %s to CPU (freed %dMB GPU)", short, event.bytes // MIB)
    elif event.action == "restored":
        log.info("Restored %s from CPU to GPU", short)
    else:
        log.debug("%s %s: %s", event.action, event.model, event.because)
