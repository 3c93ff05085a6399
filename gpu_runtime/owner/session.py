"""Carries out, in this process, what was decided: asks the book, performs steps, waits, tells what happened.

The mind decides and the hands move; this is where they meet. One `Keeper` belongs to one `Runtime`. Threads: loads run
in the caller's thread, so tracebacks, progress bars and the stop button are natural; moves and drops run where
no interrupt can cut them in half.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from ..attribution import attributed, speaking_for
from ..backends.base import Progress, is_out_of_memory
from ..backends.fault_texts import recognise
from ..errors import (
    DoesNotFit,
    GpuError,
    LedgerUnavailable,
    LoadFailed,
    OutOfMemory,
    ProbeFailed,
    StillInUse,
)
from ..facts import (
    HOST,
    Asker,
    Book,
    Candidate,
    Device,
    Drop,
    Event,
    Footprint,
    Grant,
    Lease,
    Level,
    Load,
    Move,
    Owner,
    Phase,
    PlacementRules,
    Refuse,
    Request,
    Section,
    Share,
    Step,
    Verdict,
    Wait,
    World,
)
from ..kernel_activity import activity
from ..ledgers.access import access_to
from ..ledgers.base import Ledger
from ..ledgers.host_config import Machine, groups_of
from ..scheduler import device_names, drain, explain, quotas, torch_limit
from ..scheduler import transitions as books
from ..scheduler.admission import admit
from ..scheduler.capacity import room
from ..scheduler.eligibility import eviction_step, mark_leaving, reason_to_stay
from ..scheduler.eviction_policy import policy
from ..scheduler.pressure import views
from ..scheduler.recall import Ask, Order, ask, declined, obey
from ..scheduler.relief import relieve
from ..scheduler.transitions import Truth
from ..telemetry.measurements import Measurements
from ..threads import uninterrupted
from ..units import MIB, show_bytes
from . import failures
from .footprints import Sizing
from .pins import Anchor
from .resident import Place, Resident, Stays, held_by

if TYPE_CHECKING:
    from ..devices.probe import Probe
    from ..settings import Settings
    from ..telemetry.journal import Journal

log = logging.getLogger("gpu_runtime")
T = TypeVar("T")

POLL_SECONDS = 1.0  # where no ring comes
LOOKS_PER_SECOND = (
    12  # by all idle kernels of a host together, at most; below that many, each looks every second
)
DOZE_SECONDS = 6.0  # at most: what does not come with a ring is noticed so late in a crowd
NEAR_SECONDS = (
    0.05  # how often we look whether a model of our own, that somebody waits for, has come free
)
IN_TORCH = ("torch", "transformers")  # backends whose bytes torch's allocator holds
LOAD_ATTEMPTS = (
    2  # after an out-of-memory error while loading what may go leaves; then it is tried once more
)


class Key:
    """Names a decision under way; known to its owner for as long as this object lives, however its frame ends, or until
    `done_with(key.note)`.

    That is one call into C, and not a function of ours: an interrupt may come as such a one is entered, before its
    first line, and who keeps the error keeps the frame that has the key.
    """

    __slots__ = ("text", "note", "__weakref__")

    def __init__(self, text: str) -> None:
        self.text, self.note = text, weakref.ref(self)


class _Renamed(Exception):
    """The book calls cards of ours otherwise: ours -> its."""

    def __init__(self, names: dict[str, str]) -> None:
        super().__init__(names)
        self.names = names


class Keeper:
    """This process's residents, and their owner in the ledger."""

    def __init__(
        self,
        ledger: Ledger,
        probe: Probe,
        settings: Settings,
        journal: Journal,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
        machine: Machine | None = None,
        measurements: Measurements | None = None,
    ) -> None:
        self.ledger, self.probe, self.settings, self.journal = ledger, probe, settings, journal
        self.clock, self.wall = clock, wall
        self.activity = activity
        self.rank = policy(settings.gpu_policy)
        self.sizing = Sizing(measurements or Measurements(), probe, wall)
        self.residents: dict[str, Resident] = {}
        self._bounds: dict[
            str, float
        ] = {}  # card -> the part of it that torch may take here, where it was told
        self.blocks: dict[str, tuple[Lease, weakref.ref[Anchor]]] = {}
        self.limits = {device.id: self._limit(device) for device in probe.devices}
        self.on_wait: Callable[[str, Wait | None], None] | None = None
        self.lost_to = ""  # what has made this process useless to the driver; empty: it serves us
        self._keys: set[weakref.ref[Key]] = set()
        self.done_with = self._keys.discard
        self._standing: dict[Key, Ask] = {}  # asks that nobody waits for
        self._numbers = itertools.count(1)
        self._turn = 0
        self.machine = Machine() if machine is None else machine
        self.notebook = ""  # where its path became known after the door was opened
        self._known: dict[str, Asker] = {}
        self._named: tuple[
            Device, ...
        ] = ()  # the book's cards, where they are called as we call them
        self._overstayed: set[str] = set()
        user = ledger.owner.user
        self.rules = replace(settings.rules(), cap=self.machine.cap(user, groups_of(user)))

    @property
    def me(self) -> str:
        return self.ledger.owner.id

    @property
    def owner(self) -> Owner:
        """Ourselves, with the notebook as it is known by now."""
        owner = self.ledger.owner
        return replace(owner, notebook=self.notebook) if self.notebook else owner

    def _limit(self, device: Device) -> int:
        """Usable bytes: total × the percentage that the settings allow."""
        part = (
            self.settings.cpu_memory_max_percent
            if device.is_host
            else self.settings.gpu_memory_max_percent
        )
        return int(device.total_bytes * part)

    # -- the book

    def new_key(self, what: str) -> Key:
        """A name for a decision, noted here before anybody hears of it."""
        return self._note(Key(f"{self.me}:{next(self._numbers)}:{what}"))

    def _note(self, key: Key) -> Key:
        self._keys.add(weakref.ref(key, self._keys.discard))
        return key

    def _uncut(self, key: Key, work: Callable[[], T]) -> T:
        """Does the work where no interrupt reaches it; the key stays known until it is done, whoever waits for it.

        Whoever was interrupted before it began has let go of the key: then it does not begin.
        """
        wanted = key.note

        def act() -> T:
            held = self._note(
                Key(key.text)
            )  # before the look: from here on the key is known, or nothing happens
            try:
                return work() if wanted in self._keys else None  # type: ignore[return-value]
            finally:
                self.done_with(held.note)

        return uninterrupted(act)

    def truth(self) -> Truth:
        """What this process knows of itself at this moment."""
        models = (resident.truth() for resident in list(self.residents.values()))
        blocks = tuple(
            lease for lease, anchor in list(self.blocks.values()) if anchor() is not None
        )
        keys = tuple(key.text for ref in self._keys.copy() if (key := ref()) is not None)
        held = tuple(lease for lease in models if lease is not None)
        engines = tuple(
            pid for resident in list(self.residents.values()) for pid in resident.engines
        )
        return Truth(
            self.owner,
            held + blocks,
            keys,
            self._residue(held),
            tuple(self.residents),
            *self.activity.state,
            engines,
        )

    def _residue(self, held: tuple[Lease, ...]) -> dict[str, int]:
        """Bytes that this process holds on real cards beyond its models: context, cache, tensors of its own.

        A block's bytes are its own business: what its code takes is what it leased.
        """
        if self.probe.simulated:
            return {}
        ours: dict[str, int] = {}
        contexts = self.probe.contexts()  # none of a lease's room for use is ever filled by them
        outside = {
            name for name, resident in list(self.residents.items()) if resident.engines
        }  # not in this process
        blocks = (lease for lease, _ in list(self.blocks.values()))
        for lease in (*(lease for lease in held if lease.name not in outside), *blocks):
            for share in lease.shares:
                ours[share.device] = ours.get(share.device, 0) + share.bytes
                if (
                    lease.kind == "model"
                    and lease.backend not in IN_TORCH
                    and share.device in contexts
                ):
                    contexts[share.device] -= share.bytes
        beyond = {
            device: max(size - ours.get(device, 0), contexts.get(device, 0))
            for device, size in self.probe.used().items()
            if device != HOST
        }
        return {device: size for device, size in beyond.items() if size > 0}

    def world(self, fresh: bool = False) -> World:
        """The devices as they were measured last, or from now on. A driver that does not answer leaves its device
        unmeasured, not free."""
        now = self.clock()
        try:
            samples = self.probe.samples(now, fresh)
        except ProbeFailed as error:
            samples = {}
            log.debug("probe failed: %s", error)
        return World(
            self.clock(), self.wall(), self.probe.devices, self.limits, samples, self.rules
        )

    def decide(
        self,
        decision: Callable[[Book, World], tuple[Book, T]],
        fresh: bool = False,
        in_full: Callable[[list[Event], T], list[Event]] | None = None,
    ) -> T:
        """One transaction: our section as we know it, then the decision. Tells and rings what came of it.

        `fresh`: the devices are measured anew, because much hangs on it or something has just come or gone.
        `in_full`: puts in the events what is for the journal only.
        """
        try:
            return self._decide(decision, self.world(fresh), in_full)
        except _Renamed as otherwise:
            self._rename(otherwise.names)
            return self._decide(decision, self.world(fresh), in_full)

    def _decide(
        self,
        decision: Callable[[Book, World], tuple[Book, T]],
        world: World,
        in_full: Callable[[list[Event], T], list[Event]] | None,
    ) -> T:
        def deciding(book: Book) -> tuple[Book, tuple[T, Book, Book]]:
            self._require_its_names(book)
            base = books.measure(books.publish(book, self.truth(), world), world)
            after, answer = decision(base, world)
            return after, (answer, book, after)

        answer, before, after = self.ledger.transact(deciding)
        if after is not before:
            fresh = [event for event in after.events if event.seq > before.seq]
            self._tell(before, after, in_full(fresh, answer) if in_full and fresh else fresh)
            self.bound(after, world)
        return answer

    def _require_its_names(self, book: Book) -> None:
        """Raises _Renamed where the book calls a card of ours otherwise than when this door was opened: two that see
        different cards opened it at the same moment, or the book was begun anew by another."""
        if book.devices is not self._named:
            if other := device_names.names(self.probe.devices, book):
                raise _Renamed(other)
            self._named = book.devices

    def look(self) -> Book:
        """The book, after our cards are called as it calls them, where nothing of ours lies on them yet."""
        book = self.ledger.read()
        try:
            self._require_its_names(book)
        except _Renamed as otherwise:
            if not self._holds():
                self._rename(otherwise.names)
        return book

    def _holds(self) -> bool:
        return bool(self.blocks) or any(
            resident.handle is not None for resident in list(self.residents.values())
        )

    def _rename(self, names: dict[str, str]) -> None:
        """Calls our cards as the book does. Raises LedgerUnavailable where something lies on them under the old
        names."""
        if self._holds():
            cards = ", ".join(f"{mine} is {theirs}" for mine, theirs in names.items())
            raise LedgerUnavailable(
                f"the book calls cards of this process otherwise by now: {cards}.\n"
                f"  Open the runtime again:  rt.close(), then gpu_runtime.runtime()",
                path=self.ledger.url,
            )
        self.probe.rename(names)
        self.limits = {device.id: self._limit(device) for device in self.probe.devices}
        for resident in list(self.residents.values()):
            places = tuple(names.get(device, device) for device in resident.spec.devices)
            resident.spec = replace(resident.spec, devices=places)

    def announce(self) -> None:
        """Publishes what we are and have; where the book cannot be written now, the monitor does it later."""
        if not self.settings.enable_memory_governor:
            return
        try:
            self.decide(lambda book, world: (book, None))
        except (
            GpuError
        ) as error:  # a ledger or a driver that does not answer now is no reason not to register
            log.debug("announced later: %s", error)

    def bound(self, book: Book, world: World) -> None:
        """Keeps torch, on real cards, from what others have leased there; see bounds.py."""
        if self.probe.simulated or not (self._bounds or self.residents):
            return
        busy = {share.device for lease, _ in list(self.blocks.values()) for share in lease.shares}
        wanted = torch_limit.bounds(book, self.me, world, self.probe.contexts(), busy)
        for card in (self._bounds.keys() | wanted.keys()) - busy:
            fraction = wanted.get(card, torch_limit.ALL)
            if abs(
                self._bounds.get(card, torch_limit.ALL) - fraction
            ) >= 0.001 and self.probe.bound(card, fraction):
                self._bounds[card] = fraction

    def history(
        self,
        limit: int | None = None,
        model: str | None = None,
        actions: Collection[str] = (),
        since: float = 0.0,
    ) -> tuple[Event, ...]:
        """What happened, the newest last: the journal, and what others have so far told in the page only."""
        told = self.journal.tail(limit, model, actions, since)
        try:
            page = self.ledger.read().events
        except LedgerUnavailable:
            return told
        known = {(event.wall, event.seq) for event in told}
        fresh = [
            event
            for event in page
            if (event.wall, event.seq) not in known
            and event.wall >= since
            and (model is None or event.model == model)
            and (not actions or event.action in actions)
        ]
        merged = sorted([*told, *fresh], key=lambda event: (event.wall, event.seq))
        return tuple(merged if limit is None else merged[max(0, len(merged) - limit) :])

    def reap_near(self, book: Book) -> int:
        """Removes whoever is proven dead, where the next in the row of owners is, or one more in turn; how many.

        So every owner is looked at as often as the one before it looks. (All of 64 looking at all cost 7 % of a core.)
        """
        row = sorted(book.sections.keys() | {ticket.owner for ticket in book.tickets} | {self.me})
        me = row.index(self.me)
        self._turn += 1
        near = {row[(me + 1) % len(row)], row[(me + 1 + self._turn) % len(row)]}
        sections = {id: section for id, section in book.sections.items() if id in near}
        tickets = tuple(ticket for ticket in book.tickets if ticket.owner in near)
        return (
            self.reap()
            if self.ledger.dead(replace(book, sections=sections, tickets=tickets))
            else 0
        )

    def quiet(self, book: Book) -> bool:
        """Whether the book says of us what is true, and asks nothing of anybody: then there is nothing to write."""
        if book.tickets or book.ghosts or self.me not in book.sections:
            return False
        if book.drained and drain.has_leases_on_drained(book, self.me, self.world()):
            return False
        return books.publish(book, self.truth(), self.world()) is book

    def in_use(self) -> bool:
        """Whether anything of ours is pinned or leased for code, or a cell runs: then there will soon be news of us."""
        return bool(self.blocks or self.activity.state.busy_since) or any(
            resident.pins for resident in list(self.residents.values())
        )

    def reap(self) -> int:
        """Removes from the book whoever is proven dead; how many that were."""
        dead = self.ledger.dead(self.ledger.read())
        if dead:
            self.decide(lambda book, world: (books.reap(book, dead, world), None))
        return len(dead)

    def _tell(self, before: Book, after: Book, fresh: list[Event]) -> None:
        if fresh:
            self.journal.append(fresh)
            for event in fresh:
                self._log(event)
        waiting = {ticket.owner for ticket in after.tickets}
        concerned = waiting if waiting and books.stirs(before, after) else set()
        for ticket in after.tickets:
            if ticket.owner == self.me:
                concerned.update(
                    id.partition("/")[0] for id in (*ticket.recalls, ticket.name) if "/" in id
                )
        if concerned:
            self.ledger.ring(concerned)

    def _log(self, event: Event) -> None:
        """The lines that operators of the Semantik governor watch for, word for word."""
        resident = self.residents.get(event.model)
        if event.owner != self.me:
            return
        key = resident.spec.key if resident else event.model
        short = f"{resident.spec.model_type}:{event.model}" if resident else event.model
        if event.action == "granted":
            log.info("Memory request approved: %s needs %dMB", key, event.bytes // MIB)
        elif event.action == "offloaded":
            log.info("Offloaded %s to CPU (freed %dMB GPU)", short, event.bytes // MIB)
        elif event.action == "restored":
            log.info("Restored %s from CPU to GPU", short)
        else:
            log.debug("%s %s: %s", event.action, event.model, event.because)

    # -- getting a model onto its device

    def obtain(
        self,
        resident: Resident,
        anchor: Callable[[], Anchor | None] | None,
        *,
        importance: int,
        keep_alive: float,
        timeout: float | None,
        progress: Progress | None = None,
    ) -> None:
        """Brings the model onto its device and pins it. Raises DoesNotFit, Busy, Deadlock, LoadFailed, ….

        Whatever goes wrong, an interrupt too, the book is as it was.
        """
        failures.require_served(self, resident)
        if not self.settings.enable_memory_governor:
            return self._load_ungoverned(resident, anchor, progress)
        attempts = 0
        wanted, footprint = self.wanted(resident, importance, keep_alive), resident.footprint()
        key = self.new_key(
            f"use {resident.spec.name}"
        )  # last: what is interrupted before the `try` lets go of nothing
        try:
            for verdict in self._until_granted(
                key,
                wanted,
                footprint,
                self.placement(resident),
                timeout,
                here=lambda: resident.enter(anchor) if anchor else resident.place is Place.HERE,
            ):
                step = verdict.steps[0]
                attempts += 1
                try:
                    if isinstance(step, Load):
                        self._load(resident, verdict.lease, step, anchor, key, progress)
                    else:
                        self._uncut(
                            key, partial(self._restore, resident, verdict.lease, step, anchor, key)
                        )
                    return
                except Exception as error:
                    if not is_out_of_memory(error) or attempts >= LOAD_ATTEMPTS:
                        raise self._told_of_load(resident, step, error) from error.__cause__
                    failures.make_room(self, resident, step.shares)
        finally:
            self.done_with(
                key.note
            )  # first: from now on the monitor would withdraw it, were we interrupted once more
            self._withdraw(key)

    def wanted(
        self, resident: Resident, importance: int | None = None, keep_alive: float | None = None
    ) -> Lease:
        """The lease to ask for, as the model was registered where nothing else is said."""
        spec = resident.spec
        return Lease(
            self.me,
            spec.name,
            importance=spec.importance if importance is None else importance,
            keep=spec.keep,
            keep_alive=spec.keep_alive if keep_alive is None else keep_alive,
            movable=resident.backend.can_move,
            backend=spec.backend,
            model_type=spec.model_type,
            quantization=spec.quantization,
        )

    def placement(self, resident: Resident) -> PlacementRules:
        """Where it may go, and how it may be divided: by the settings, and by the model's own word where it has one."""
        splits = resident.backend.can_split and len(resident.pieces()) != 1
        layout = resident.spec.layout if splits else "single"
        if layout == "auto":
            layout = getattr(resident.backend, "layout", layout)  # as an engine needs it
        rules = replace(self.settings.placement(), devices=self.places(resident), layout=layout)
        return replace(rules, **resident.spec.placement)

    def places(self, resident: Resident) -> tuple[str, ...]:
        """The cards it may go to: its own list, else the one that INFERENCE_GPU_INDEX names, else any."""
        index = self.settings.inference_gpu_index
        if resident.spec.devices or index is None:
            return resident.spec.devices
        return tuple(
            device.id
            for device in self.probe.devices
            if not device.is_host and device.index == index
        )

    def _until_granted(
        self,
        key: Key,
        wanted: Lease,
        footprint: Footprint,
        placement: PlacementRules,
        timeout: float | None,
        here: Callable[[], bool],
    ) -> Iterator[Grant]:
        """Grants that have steps to perform. Ends, with nothing granted, once `here()` is true.

        The caller performs; taking the next item says that the step failed and the world should be asked again.
        """
        told = False
        try:
            for verdict in self._answers(key, wanted, footprint, placement, timeout, here):
                if isinstance(verdict, Grant):
                    yield verdict
                elif self.on_wait:
                    told = True
                    self.on_wait(wanted.name, verdict)
        finally:
            if told and self.on_wait:
                self.on_wait(wanted.name, None)

    def _answers(
        self,
        key: Key,
        wanted: Lease,
        footprint: Footprint,
        placement: PlacementRules,
        timeout: float | None,
        here: Callable[[], bool],
    ) -> Iterator[Grant | Wait]:
        began = self.clock()
        reaped = False
        asked_at: dict[str, float] = {}  # whom we have asked to publish its pins, and when
        made: tuple[Candidate, ...] = ()  # the ways to make room that were compared last
        while not here():
            request = Request(
                key.text,
                wanted,
                footprint,
                began,
                placement,
                held_by(list(self.residents.values()), threading.get_ident()),
            )
            verdict = self.decide(
                lambda book, world: admit(book, request, world, self.rank),
                fresh=True,
                in_full=partial(explain.with_runners_up, rules=placement, room_made=made),
            )
            if isinstance(verdict, Wait) and (verdict.steps or verdict.asked):
                made = verdict.considered
            if isinstance(verdict, Grant):
                if verdict.steps:
                    yield verdict
                continue
            if (
                not reaped
            ):  # before anybody waits or is refused: is all that stands in the way alive?
                reaped = True
                if self.reap():
                    continue
            if isinstance(verdict, Refuse):
                raise explain.refusal(wanted.name, verdict)
            for step in verdict.steps:
                self._uncut(key, partial(self._step_aside, step, key))
            if verdict.steps:
                continue
            waited = self.clock() - began
            if timeout is not None and waited >= timeout:
                raise explain.busy(self.ledger.read(), wanted.name, verdict, waited)
            yield verdict
            # Pins are published within a second; whoever is said to be in the way is asked to say so now.
            late = self.clock() - POLL_SECONDS
            doubtful = {
                owner
                for id in verdict.blockers
                if asked_at.get(owner := id.partition("/")[0], late) <= late
            }
            self.ledger.ring(doubtful - {self.me})
            asked_at |= dict.fromkeys(doubtful, self.clock())
            self._pause(verdict, None if timeout is None else began + timeout)
            reaped = False

    def _pause(self, verdict: Wait, deadline: float | None) -> None:
        """Until the bell rings, somebody dies, a model of our own that stands in the way comes free, or time may have
        changed things."""
        now = self.clock()
        until = min(t for t in (now + POLL_SECONDS, verdict.retry_at, deadline) if t is not None)
        ours = [
            r for r in list(self.residents.values()) if r.lease.id in verdict.blockers and r.pins
        ]
        step = NEAR_SECONDS if ours else POLL_SECONDS
        others = [
            section.owner for id, section in self.ledger.read().sections.items() if id != self.me
        ]
        while (left := until - self.clock()) > 0:
            if self.ledger.wait(min(step, left), others) or any(
                not resident.pins for resident in ours
            ):
                return

    def _load(
        self,
        resident: Resident,
        lease: Lease,
        step: Load,
        anchor: Callable[[], Anchor | None] | None,
        key: Key,
        progress: Progress | None,
    ) -> None:
        handle = None
        try:
            self.probe.watch_peaks()
            handle, shares, seconds = resident.load(step.shares, progress)
            droppable = resident.backend.droppable(handle)
            settled = replace(
                lease.holding(shares),
                pins=0,
                droppable=droppable,
                reload_seconds=seconds,
                settled_at=self.clock(),
            )
            resident.install(handle, settled, anchor)
        except BaseException as error:
            if not isinstance(
                error, Exception
            ):  # a notebook keeps the traceback, and its frames would keep the bytes
                traceback.clear_frames(error.__traceback__)
            if (
                handle is None or resident.handle is not handle
            ):  # else the interrupt came too late: it is installed
                if handle is not None:
                    resident.backend.drop(handle)
                self._abandon(resident.spec.name, key, error)
            raise
        self.sizing.learn(resident, shares)
        self._settle(resident, step.because, reload_seconds=seconds)
        if elsewhere := resident.backend.elsewhere(handle):
            because = explain.elsewhere(resident.spec.name, resident.lease.where, elsewhere)
            log.warning("%s", because)
            self.decide(
                lambda book, world: (
                    books.note(book, world, resident.lease, "misplaced", "load", because),
                    None,
                )
            )

    def _restore(
        self,
        resident: Resident,
        lease: Lease,
        step: Move,
        anchor: Callable[[], Anchor | None] | None,
        key: Key,
    ) -> None:
        began = time.perf_counter()
        try:
            if not resident.begin_moving():
                raise LoadFailed(
                    f"{resident.spec.name} is being moved by another thread.",
                    name=resident.spec.name,
                    source=resident.spec.source,
                )
            try:
                shares = resident.carry(step)
            except BaseException:
                resident.stay()
                raise
        except BaseException as error:
            self._abandon(resident.spec.name, key, error)
            raise
        seconds = time.perf_counter() - began
        going = replace(
            resident.lease,
            target=lease.target,
            filled=lease.filled,
            working_bytes=lease.working_bytes,
        )
        settled = replace(
            going.holding(shares),
            restore_seconds=seconds,
            settled_at=self.clock(),
            away_since=0.0,
            importance=lease.importance,
            keep_alive=lease.keep_alive,
        )
        resident.settle_at(settled, anchor)
        self.probe.watch_peaks()
        self._settle(resident, step.because, restore_seconds=seconds)

    def _settle(self, resident: Resident, because: str, **seconds: float) -> None:
        """Tells the book what arrived, as measured, and who has it pinned at this moment."""
        lease = resident.lease

        def settle(book: Book, world: World) -> tuple[Book, None]:
            book = books.arrived(
                book,
                self.me,
                lease.name,
                lease.shares,
                world,
                because=because,
                droppable=lease.droppable,
                filled=lease.filled,
                **seconds,
            )
            return books.publish(book, self.truth(), world), None

        self.decide(settle, fresh=True)

    def _abandon(self, name: str, key: Key, error: BaseException) -> None:
        because = (
            "interrupted"
            if isinstance(error, KeyboardInterrupt)
            else f"{type(error).__name__}: {explain.first_line(error)}"
        )
        self.decide(
            lambda book, world: (books.abandon(book, self.me, name, key.text, world, because), None)
        )

    def _withdraw(self, key: Key) -> None:
        """Takes our ticket back, if there is one. Never fails: what stays behind is withdrawn at the next tick."""
        try:
            if self.ledger.read().ticket(key.text):
                self.decide(lambda book, world: (books.withdraw(book, key.text), None))
        except LedgerUnavailable as error:
            log.debug("a ticket stays until the ledger can be written: %s", error)

    def _told_of_load(self, resident: Resident, step: Step, error: BaseException) -> BaseException:
        """The error as its reader needs it: our own and interrupts as they are, others named after the model."""
        name = resident.spec.name
        if is_out_of_memory(error):
            declared = resident.spec.size is not None and isinstance(step, Load)
            return self.out_of_memory(
                error,
                loading=name,
                device=step.shares[0].device,  # type: ignore[union-attr]
                declared_bytes=resident.spec.size if declared else None,
            )
        if isinstance(error, GpuError) or not isinstance(error, Exception):
            return error
        fault = recognise(str(error))
        return explain.load_failed(
            name,
            resident.spec.source,
            error,
            driver_failed=fault is not None and fault.clears_model,
        )

    def _load_ungoverned(
        self,
        resident: Resident,
        anchor: Callable[[], Anchor | None] | None,
        progress: Progress | None,
    ) -> None:
        """ENABLE_MEMORY_GOVERNOR=false: the model goes to the first card, unasked, and nobody makes room for it."""
        card = next(
            d
            for d in self.probe.devices
            if not d.is_host and d.id in (self.places(resident) or (d.id,))
        )
        share = Share(card.id, resident.footprint().bytes)
        try:
            handle, shares, seconds = resident.load((share,), progress)
        except Exception as error:
            raise self._told_of_load(resident, Load("", (share,)), error) from error
        resident.install(
            handle, replace(resident.lease, shares=shares, reload_seconds=seconds), anchor
        )

    # -- stepping aside

    def _step_aside(self, step: Step, key: Key, by: str = "") -> bool:
        """Moves or drops one of our own models; False where it is in use after all, and stays."""
        assert isinstance(step, (Move, Drop))
        name = step.lease.partition("/")[2]
        resident = self.residents.get(name)
        if resident is None or not resident.begin_moving():
            self.decide(
                lambda book, world: (books.abandon(book, self.me, name, key.text, world), None)
            )
            return False
        try:
            if (
                resident.remeasure()
            ):  # what was reserved for it elsewhere may be too little: decide again
                raise Stays("its bytes have changed since they were counted")
            shares = resident.carry(step)
        except BaseException as error:
            resident.lease = replace(resident.lease, droppable=resident.droppable())
            resident.stay()
            because = (
                str(error)
                if isinstance(error, Stays)
                else f"{type(error).__name__}: {explain.first_line(error)}"
            )
            self.decide(
                lambda book, world: (
                    books.abandon(
                        book,
                        self.me,
                        name,
                        key.text,
                        world,
                        f"{name} stays where it is: {because}.",
                    ),
                    None,
                )
            )
            if isinstance(error, Stays):
                return False
            raise
        if not isinstance(step, Drop):
            going = replace(resident.lease, target=step.shares)
            settled = replace(going.holding(shares), settled_at=self.clock())
            resident.settle_at(
                replace(settled, away_since=0.0 if settled.on_device else self.clock())
            )
        self.probe.empty_cache()
        self.probe.watch_peaks()  # what has left is no peak of what stays
        self.decide(
            lambda book, world: (books.left(book, step, shares, world, by), None), fresh=True
        )
        return True

    def carry(self, step: Move | Drop, key: Key, by: str = "") -> bool:
        """Performs a step of our own where no interrupt cuts it in half; False where it was not to be, and nothing
        moved."""
        return self._uncut(key, lambda: self._step_aside(step, key, by))

    def evict(
        self, resident: Resident, because: str, *, drop: bool = False, by: str = ""
    ) -> Move | Drop | None:
        """Makes a model of our own step aside now; the step taken, None where it lies on no device already."""
        if resident.handle is None or (resident.place is Place.AWAY and not drop):
            return None
        key = self.new_key(f"evict {resident.spec.name}")

        def leave(book: Book, world: World) -> tuple[Book, Move | Drop | GpuError]:
            lease = book.lease(self.me, resident.spec.name)
            if lease is None:
                return book, StillInUse(
                    f"{resident.spec.name} is on its way.", name=resident.spec.name
                )
            if why := reason_to_stay(lease, world, asker=self.me, importance=-1):
                return book, explain.still_here(book, self.me, lease, why, world)
            step = eviction_step(
                lease,
                room(book, world).get(HOST, 0),
                world,
                drop=drop,
                because=because,
                reason="evict",
            )
            if step is None:
                return book, DoesNotFit(
                    f"{lease.name} ({show_bytes(lease.bytes)}) exists nowhere else and host memory has no room for it.\n"
                    f"  Raise CPU_MEMORY_MAX_PERCENT, or give it up for good:  rt.forget({lease.name!r})",
                    name=lease.name,
                    need_bytes=lease.bytes,
                    device=HOST,
                )
            return mark_leaving(book, step, key.text), step

        try:
            step = self.decide(leave)
            if isinstance(step, GpuError):
                raise step
            if not self.carry(step, key, by):
                return self.evict(
                    resident, because, by=by
                )  # a user came in between, or it may not be dropped: decide again
            return step
        finally:
            self.done_with(key.note)

    # -- out of memory inside a block

    def out_of_memory(
        self,
        error: BaseException,
        *,
        loading: str = "",
        device: str = "",
        declared_bytes: int | None = None,
    ) -> OutOfMemory:
        """The readable report of an out-of-memory error, as things stand now."""
        world = self.world()
        book = books.publish(self.ledger.read(), self.truth(), world)
        return explain.out_of_memory(
            error,
            book,
            world,
            self.me,
            self.probe.maps(),
            loading=loading,
            device=device,
            declared_bytes=declared_bytes,
        )

    def make_room_after(self, error: BaseException) -> None:
        """After an out-of-memory error in a block: idle leases of ours and cached blocks go, tracebacks let go."""
        traceback.clear_frames(
            error.__traceback__
        )  # frames that have ended would keep their tensors
        for resident in list(self.residents.values()):
            if resident.place is Place.HERE and not resident.pins and not resident.lease.keep:
                try:
                    self.evict(
                        resident, "the device ran out of memory while another model was in use."
                    )
                except GpuError as refused:
                    log.debug("%s stays: %s", resident.spec.name, refused)
        self.probe.empty_cache()

    # -- blocks of code

    def lease_block(
        self,
        name: str,
        size: int,
        anchor: Callable[[], Anchor | None],
        *,
        importance: int,
        timeout: float | None,
    ) -> Lease:
        """Claims bytes for the caller's own code; they are given back when the anchor dies, or before."""
        wanted = Lease(self.me, name, kind="block", importance=importance, movable=False)
        granted = False  # then our ticket is gone with the grant
        key = self.new_key(f"lease {name}")
        try:
            for verdict in self._until_granted(
                key,
                wanted,
                Footprint.of(size),
                PlacementRules(policy=self.settings.gpu_placement),
                timeout,
                here=lambda: name in self.blocks,
            ):
                # Its bytes need no bringing, so nothing is settled: the monitor, or the block's end, publishes what it
                # is.
                lease = replace(
                    verdict.lease,
                    shares=verdict.lease.target,
                    target=(),
                    phase=Phase.SETTLED,
                    key="",
                    settled_at=self.clock(),
                )
                self.blocks[name] = (lease, anchor)
                granted = True
                return lease
            return self.blocks[name][0]
        finally:
            self.done_with(
                key.note
            )  # first: from now on the monitor would withdraw it, were we interrupted once more
            if not granted:
                self._withdraw(key)

    def end_block(self, name: str) -> None:
        lease, _ = self.blocks.pop(name, (None, None))
        for share in lease.shares if lease else ():
            self._bounds.pop(share.device, None)  # the block has lifted it
        self.decide(lambda book, world: (book, None))  # publishing says it all

    # -- for others, and for the monitor

    def obey(self) -> tuple[Order, ...]:
        """Steps aside where others need it; what else they asked for is returned to be done."""
        key = self.new_key("obey")
        try:
            steps, orders = self.decide(
                lambda book, world: _split(
                    obey(book, self.me, world, self.rank, key.text, self._askers(book))
                )
            )
            for step in steps:
                self._step_aside(step, key, by=step.by)
            return orders
        finally:
            self.done_with(key.note)

    def vacate(self) -> None:
        """Moves what is idle off cards that are drained."""
        book = self.ledger.read()
        if not book.drained or not drain.has_leases_on_drained(book, self.me, self.world()):
            return
        key = self.new_key("drain")
        try:
            for step in self.decide(
                lambda book, world: drain.vacate(book, self.me, world, key.text)
            ):
                self._step_aside(step, key)
        finally:
            self.done_with(key.note)

    @property
    def shared(self) -> bool:
        """Whether an operator has set the ledger up for several users."""
        directory = getattr(self.ledger, "directory", None)
        return directory is not None and access_to(directory).group is not None

    def may_drain(self, book: Book) -> str:
        """Why this user may not drain a card of this book's; empty where they may: an operator, and whoever shares the
        cards with nobody else."""
        mine = self.owner.user
        others = sorted({section.owner.user for section in book.sections.values()} - {mine})
        if self.asker(mine).operator or not (self.shared or others):
            return ""
        with_whom = f"{', '.join(others)} use it too" if others else "others share it"
        return f"{mine} may not drain a card: {with_whom}, so it is an operator's to say ({self.machine.file})"

    def _askers(self, book: Book) -> dict[str, Asker]:
        """By ticket key, who asks something of us; a ticket that its owner did not leave is missing."""
        asking = (
            ticket
            for ticket in book.tickets
            if ticket.owner != self.me
            and any(id.partition("/")[0] == self.me for id in (ticket.name, *ticket.recalls))
        )
        return {
            ticket.key: self.asker(user)
            for ticket in asking
            if (user := self.ledger.user_of(book, ticket.owner, ticket))
        }

    def asker(self, user: str) -> Asker:
        """What that user may ask of this process, as the configuration stood when they first did."""
        known = self._known.get(user)
        if known is None:
            groups = groups_of(user)
            cap = self.machine.cap(user, groups)
            known = self._known[user] = Asker(
                user,
                user == self.ledger.owner.user,
                self.machine.is_operator(user, groups),
                (cap.importance if cap else None) or 0,
            )
        return known

    def as_known(self, book: Book) -> dict[str, Section]:
        """The book's sections, each with the user that the ledger vouches for."""
        sections = {}
        for id, section in book.sections.items():
            user = section.owner.user
            if id != self.me and self.ledger.user_of(book, id) != user:
                section = replace(section, owner=replace(section.owner, user=f"{user} (unproven)"))
            sections[id] = section
        return sections

    def tell_overstays(self) -> None:
        """Says of each block of ours that it is held for longer than the operator's cap allows, once."""
        if (
            not self.blocks
            or self.rules.cap is None
            or self.rules.cap.longest_lease_seconds is None
        ):
            return
        book, world = self.ledger.read(), self.world()
        for lease in quotas.overstaying(book, world):
            if lease.owner == self.me and lease.name not in self._overstayed:
                self._overstayed.add(lease.name)
                because = quotas.overstay(book, lease, world)
                log.warning("%s", because)
                self.decide(
                    lambda book, world, lease=lease, because=because: (
                        books.note(
                            book, world, lease, "overstayed", "cap", because, size=lease.bytes
                        ),
                        None,
                    )
                )

    def relieve(self) -> None:
        """Applies the table of pressure levels to our own idle models."""
        key = self.new_key("relieve")
        try:
            steps = self.decide(
                lambda book, world: relieve(book, self.me, world, self.rank, key.text)
            )
            if steps:
                self._log_pressure()
            for step in steps:
                self._step_aside(step, key)
        finally:
            self.done_with(key.note)

    def _log_pressure(self) -> None:
        for view in views(self.ledger.read(), self.world()):
            if view.device.is_host:
                continue
            if view.level is Level.CRITICAL:
                log.error(
                    "CRITICAL memory pressure! Usage: %.1f%%. Forcing aggressive eviction.",
                    view.pressure * 100,
                )
            elif view.level in (Level.HIGH, Level.MODERATE):
                log.warning(
                    "%s memory pressure: %.1f%%. Offloading idle models.",
                    view.level,
                    view.pressure * 100,
                )

    def remeasure(self) -> None:
        """Counts again what was used since the last look: training makes gradients and optimizer state."""
        used = [
            resident
            for resident in list(self.residents.values())
            if resident.uses != resident.uses_counted and resident.place is Place.HERE
        ]
        for resident in used:
            if resident.work.acquire(False):
                try:
                    if (
                        not resident.pins
                    ):  # else it may grow until its use ends, and is looked at again
                        resident.uses_counted = resident.uses
                    resident.remeasure()
                    self.sizing.saw(resident, alone=len(used) == 1)
                finally:
                    resident.work.release()
        self.sizing.saw_contexts()

    def rest(self, seconds: float) -> None:
        """The monitor's sleep: until the bell rings, or a model of ours that somebody waits for comes free."""
        watched = self._watched()
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self.ledger.wait(min(NEAR_SECONDS, left) if watched else left):
                return
            if any(not resident.pins for resident in watched):
                return

    def _watched(self) -> list[Resident]:
        """Models of ours in use where somebody waits for room: the end of that use should be told at once."""
        used = [resident for resident in list(self.residents.values()) if resident.pins]
        wanted = {
            share.device
            for ticket in (self.ledger.read().tickets if used else ())
            if ticket.verb == "use" and ticket.owner != self.me
            for share in ticket.need
        }
        return [
            resident
            for resident in used
            if any(share.device in wanted for share in resident.lease.shares)
        ]

    def ask(
        self,
        verb: str,
        target: str,
        *,
        timeout: float | None,
        wait: bool = True,
        places: tuple[str, ...] = (),
    ) -> Verdict:
        """Asks another owner to act; the last word heard within the time-out."""
        began = self.clock()
        key = self.new_key(f"{verb} {target}")
        asked = self._as_asked(key, verb, target, places)
        settled = False
        looks = 0
        try:
            while True:
                verdict = self.decide(lambda book, world: ask(book, asked, world))
                if isinstance(verdict, Refuse) and verdict.kind == "in use" and looks < 4:
                    looks += 1  # pins may be a second old: whoever is said to use it is asked to say so now
                    self.ledger.ring([target.partition("/")[0]])
                    self.ledger.wait(NEAR_SECONDS)
                    continue
                settled = not isinstance(verdict, Wait)
                if (
                    isinstance(verdict, Refuse) and verdict.kind != "failed"
                ):  # else its owner has told it
                    self._declined(asked, verdict.because)
                if settled or not wait or (timeout is not None and self.clock() - began >= timeout):
                    return verdict
                self._pause(verdict, None if timeout is None else began + timeout)
                self.reap()
        finally:
            if wait or settled:
                self.done_with(key.note)
                if not settled:
                    self._withdraw(key)
            else:
                self._standing[key] = asked  # until it is answered

    def _as_asked(self, key: Key, verb: str, target: str, places: tuple[str, ...] = ()) -> Ask:
        return Ask(
            key.text,
            self.me,
            verb,
            target,
            self.clock(),
            by=self.ledger.owner.user,
            places=places,
            said_by=speaking_for(),
        )

    def decline(self, verb: str, target: str, because: str) -> None:
        """Notes that something was wanted of another owner which may not even be asked."""
        key = self.new_key(f"{verb} {target}")
        self._declined(self._as_asked(key, verb, target), because)
        self.done_with(key.note)

    def _declined(self, asked: Ask, because: str) -> None:
        self.decide(lambda book, world: (declined(book, asked, world, because), None))

    def acted(self, verb: str, name: str, because: str, size: int = 0) -> None:
        """Notes what this process did to a model of its own because somebody asked it to in words of no ticket."""
        if by := self.person:
            lease = next(
                (lease for lease in self.truth().leases if lease.name == name), Lease(self.me, name)
            )
            self.decide(
                lambda book, world: (
                    books.note(book, world, lease, verb, verb, because, size=size, by=by),
                    None,
                )
            )

    @property
    def person(self) -> str:
        """For whom this thread acts, and in which process; empty where it acts for its own user alone."""
        return (
            attributed(said, f"{self.owner.user}, {self.owner.label}")
            if (said := speaking_for())
            else ""
        )

    def follow_up(self) -> None:
        """Ends the asks that nobody waits for once they are answered; else they would be obeyed again and again."""
        for key, asked in list(self._standing.items()):
            verdict = self.decide(lambda book, world, asked=asked: ask(book, asked, world))
            if not isinstance(verdict, Wait):
                self._standing.pop(key, None)
                self.done_with(key.note)


def _split(
    answer: tuple[Book, tuple[Step, ...], tuple[Order, ...]],
) -> tuple[Book, tuple[tuple[Step, ...], tuple[Order, ...]]]:
    book, steps, orders = answer
    return book, (steps, orders)
