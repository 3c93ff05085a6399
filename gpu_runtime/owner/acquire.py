"""Gets memory for a model or a block of code: requests it, and waits for the grant.

`Use` is the block of `rt.use`, and `obtain` its request: the wanted lease and the rules for its
cards, then one decision after the other until the grant. `arrivals.perform` loads or restores then.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from msgspec.structs import replace

from .. import threads
from ..backends.base import Progress, is_out_of_memory
from ..catalog.fields import require_loadable
from ..devices.allocators import Peak, counts_bytes, limit, part_of
from ..errors import DoesNotFit, NotResident, first_line
from ..facts import (
    ASLEEP,
    KERNEL,
    NORMAL,
    Book,
    Candidate,
    Decided,
    Device,
    Footprint,
    Grant,
    Lease,
    Load,
    Move,
    Phase,
    PlacementRules,
    Refuse,
    Request,
    Share,
    Shed,
    Step,
    Verdict,
    Wait,
    World,
    away_word,
    encode_uses,
    lease_title,
    parse_importance,
)
from ..safe_text import LONGEST_NAME, printable
from ..scheduler import admission, refusals
from ..scheduler.admission import admit
from ..scheduler.placement import with_runners_up
from ..threads import outside_modes
from ..units import parse_room, parse_seconds, show_bytes, show_seconds
from ..user_frames import shorten_interrupt
from ..version import VERSION
from . import arrivals, disk, failures, release, requests
from .pins import AnchorRef, Held
from .resident import Place, Resident
from .session import NEAR_SECONDS, POLL_SECONDS, Key, Session

log = logging.getLogger("gpu_runtime")

LOAD_ATTEMPTS = 2  # after an out-of-memory error, room is made and the load is tried once more


# -- a model


class Use(Held):
    """A `with` block that yields the model, on its device and pinned while the block runs."""

    __slots__ = ("_session", "_resident", "_wishes")

    def __init__(self, session: Session, resident: Resident, *wishes: Any) -> None:
        """`wishes` are the arguments importance, timeout and keep_alive of `obtain`."""
        self._anchor = self._kept = None
        self._session, self._resident, self._wishes = session, resident, wishes

    def _typed(self) -> tuple[str, str]:
        return f"rt.use({self._resident.spec.name!r})", "model"

    def _start(self, anchor: AnchorRef) -> Any:
        resident, session = self._resident, self._session
        if not resident.enter(anchor):
            obtain(session, resident, anchor, *self._wishes)
        if resident.shares_storages:
            for base in resident.bases():
                if not base.enter(anchor):
                    obtain(session, base, anchor, *self._wishes)
        self._renew_keep_alive()
        if session.dozing:
            session.wake_monitor()
        return resident.value

    def _start_if_here(self, anchor: AnchorRef) -> tuple[Any, ...]:
        if self._resident.shares_storages or not self._resident.enter(anchor):
            return ()
        self._renew_keep_alive()
        if self._session.dozing:
            self._session.wake_monitor()
        return (self._resident.value,)

    def _renew_keep_alive(self) -> None:
        """A `keep_alive` of this block replaces that of an earlier one."""
        if self._wishes and self._wishes[2] is not None:
            seconds = parse_seconds(self._wishes[2])
            self._resident.lease = replace(self._resident.lease, keep_alive=seconds)

    def _release(self, anchor: AnchorRef) -> None:
        self._resident.pins.discard(anchor)
        for base in self._resident.bases() if self._resident.shares_storages else ():
            base.pins.discard(anchor)

    def _finish(self, error: BaseException | None) -> None:
        if error is not None:  # leaving the modes costs 1.7 µs, as much as all else here
            outside_modes(failures.finish_block)(self._session, error, self._resident)


class ModelCall(Use):
    """The `with` block of one direct call of the model, such as `model(x)`."""

    __slots__ = ()
    is_call = True


def call(session: Session, resident: Resident, restore: bool) -> Held:
    """Returns the `with` block for a call of the model through a reference that the user has kept.

    Raises NotResident if `restore` is false and the model is not on its device.
    """
    if not restore and resident.place is not Place.HERE:
        raise NotResident(
            f"{resident.spec.name} is {resident.place.value}, and was registered with "
            f"restore_on_call=False.\n"
            f"  Call it inside:  with rt.use({resident.spec.name!r}) as model:",
            name=resident.spec.name,
            where=resident.place.value,
        )
    return ModelCall(session, resident)


@outside_modes
def obtain(
    session: Session,
    resident: Resident,
    anchor: AnchorRef | None,
    importance: str | int | None = None,
    timeout: str | float | None = None,
    keep_alive: str | float | None = None,
    progress: Progress | None = None,
    with_load: bool = False,
    for_wish: bool = False,
) -> None:
    """Brings the model onto its device, and pins it if `anchor` is given.

    `anchor` refers weakly to an object, and the pin lasts as long as this object. If `importance`
    or `keep_alive` is None, the value of the registration applies. If `timeout` is None, the wait
    has no limit. If `with_load` is true, the time of a load counts too. If `for_wish` is true, models
    that the fleet wishes as much as this one stay. Raises DoesNotFit, Busy,
    Deadlock, LoadFailed, ModelDisabled, BadSetting, ProcessLost, OutOfMemory.
    """
    spec = resident.spec
    if resident.handle is None:
        require_loadable(spec)
    rank = spec.importance if importance is None else parse_importance(importance)
    alive = spec.keep_alive if keep_alive is None else parse_seconds(keep_alive)
    limit = None if timeout is None else parse_seconds(timeout)
    if session.process_lost and resident.backend.runs_here(spec):
        raise failures.process_lost(*session.process_lost.split(": ", 1))
    if anchor is not None and resident.pauses:
        _let_others_pass(session, resident, limit)
    requested = session.wall()
    with in_one_line(session, partial(outcome_of, session, resident)):
        if session.settings.enable_memory_governor:
            given = (anchor, rank, alive, for_wish, limit, progress, with_load)
            try:
                _obtain_governed(session, resident, *given)
            except DoesNotFit:  # what must leave the card may need the RAM that its bytes take
                if not (resident.lease.on_host and resident.lease.stow_bytes):
                    raise
                disk.stow(session, resident, "What leaves the card for it needs its place in RAM.")
                _obtain_governed(session, resident, *given)
        else:
            _load_ungoverned(session, resident, anchor, progress)
    if anchor is not None:
        # Not the time of the grant: all callers that waited for one load would count as one use.
        resident.note_uses(encode_uses([requested]))


def _let_others_pass(session: Session, resident: Resident, timeout: float | None) -> None:
    """Waits while the model takes no new uses, unless this thread uses a model itself. Raises Busy."""
    if session.pinned_by_caller():
        return
    began, name = session.clock(), resident.spec.name
    deadline = math.inf if timeout is None else began + timeout
    wait = Wait(f"{name} leaves for a request of another process, which has waited for long")
    while resident.pauses and resident.place is Place.HERE:
        now = session.clock()
        if now >= deadline:
            raise refusals.busy(session.ledger.read(), name, wait, now - began)
        session.ledger.wait(min(NEAR_SECONDS, deadline - now))


def _obtain_governed(
    session: Session,
    resident: Resident,
    anchor: AnchorRef | None,
    importance: int,
    keep_alive: float,
    for_wish: bool,
    timeout: float | None,
    progress: Progress | None,
    with_load: bool,
) -> None:
    began = session.clock()
    session.start_monitor()  # where the system had no thread for it when the model was registered
    _end_if_stranded(session, resident)
    deadline = began + timeout if with_load and timeout is not None else None
    attempts, spec = 0, resident.spec

    def wishes() -> tuple[Lease, Footprint, PlacementRules]:
        """What to request. This reads the model's source if the model is not loaded."""
        rules = placement(session, resident, for_wish)
        wanted = wanted_lease(session, resident, importance, keep_alive)
        return wanted, resident.footprint(), rules

    if resident.handle is not None:
        wanted, footprint, rules = wishes()
    else:
        wanted, footprint, rules = arrivals.read_source(session, spec.name, wishes, deadline)

    def pin_here() -> bool:
        resident.require_known()
        if anchor is None:
            return resident.place is Place.HERE
        return resident.enter(anchor, waited=True)

    # The key is made right before the `try`, so an interrupt before the `try` leaves nothing to
    # release.
    key, lost = session.new_key(f"use {resident.spec.name}"), False
    try:
        stage = release.STAGE_BYTES
        for verdict in grants(session, key, wanted, footprint, rules, timeout, pin_here, stage):
            step = verdict.steps[0]
            attempts += 1
            try:
                if arrivals.perform(session, resident, verdict, anchor, key, progress, deadline):
                    return
                attempts = 0
            except Exception as error:
                if isinstance(step, Move) and resident.handle is None:
                    log.warning("%s", first_line(error))  # an engine that did not wake
                    lost = True
                    break
                if not is_out_of_memory(error) or attempts >= LOAD_ATTEMPTS:
                    # Without a name for the report: see pins.py.
                    raise failures.load_error(session, resident, step, error) from error.__cause__
                failures.evict_idle(
                    session,
                    {share.device for share in step.shares},  # type: ignore[union-attr]
                    f"the device ran out of memory while {spec.name} was loaded.",
                    importance=spec.importance,
                    spared=resident.lease.id,
                )
    finally:
        # The key is released first. Once the key is gone, the monitor withdraws the ticket, even if
        # this thread is interrupted again.
        session.done_with(key.note)
        session.withdraw(key)
        arrivals.stop_unwanted_load(session, resident.spec.name)
    if lost:  # it is started anew, on any card
        left = None if timeout is None else max(0.0, timeout - (session.clock() - began))
        _obtain_governed(
            session, resident, anchor, importance, keep_alive, for_wish, left, progress, with_load
        )


def _end_if_stranded(session: Session, resident: Resident) -> None:
    """Ends an engine that sleeps while its card is drained: it wakes nowhere else, but can be started there."""
    if resident.place is not Place.AWAY or resident.spec.keep:
        return
    if away_word(resident.lease) != ASLEEP:
        return
    keys = {device.id: device.key for device in session.probe.devices}
    drained = session.ledger.read().drained
    if any(keys.get(card) in drained for card in resident.must_return_to()):
        because = f"{resident.spec.name} slept, and its card was drained meanwhile."
        release.evict(session, resident, because, drop=True)


# -- waiting for a grant


def grants(
    session: Session,
    key: Key,
    wanted: Lease,
    footprint: Footprint,
    rules: PlacementRules,
    timeout: float | None,
    is_over: Callable[[], bool],
    stage_bytes: int = 0,
) -> Iterator[Grant]:
    """Yields grants that have steps to perform. Ends as soon as `is_over()` returns true.

    The caller performs the steps of each grant. If the steps fail, or if they return only a part of
    the model, the caller takes the next item, for which the request is decided again. Parts of at
    least `stage_bytes` return while room is made for the rest; 0 means that no part returns alone.
    Raises Busy, and the errors of `refusals.refusal`.
    """
    began = session.clock()
    deadline = None if timeout is None else began + timeout
    because = ""
    rung_at: dict[str, float] = {}  # owner -> when it was rung to publish its pins
    compared: tuple[Candidate, ...] = ()  # the last ways to make room that were compared
    departures = _Departures(session, key)
    reported = False  # whether the front end shows a wait
    kernel = session.kernel
    held: tuple[str, ...] = ()
    # Before the first wait: has the notebook freed memory, and are all owners in the way alive? The
    # first look comes once, since nothing else of the cell runs while its request waits.
    looks = iter((lambda: kernel is not None and kernel.has_changed(held), session.reap))
    try:
        while not is_over():
            if key.ended_by:
                raise refusals.wait_ended(
                    wanted.name, key.ended_by, because, session.clock() - began
                )
            held = session.pinned_by_caller()
            request = Request(
                key.text,
                wanted,
                footprint,
                began,
                rules,
                held,
                stage_bytes=stage_bytes,
                under_way=departures.under_way(),
                title=lease_title(wanted, session.owner) if wanted.kind == KERNEL else "",
            )
            verdict = _admitted(session, request, compared)
            if isinstance(verdict, Grant):
                if verdict.steps:
                    if reported and session.on_wait and not admission.is_part(verdict.lease):
                        reported = False
                        session.on_wait(wanted.name, None)
                    yield verdict
                continue
            if isinstance(verdict, Wait) and (verdict.steps or verdict.asked):
                compared = verdict.considered
            if any(look() for look in looks):
                continue
            if isinstance(verdict, Refuse):
                raise refusals.refusal(wanted.name, verdict)
            returns = stage_bytes and session.ledger.read().lease(session.me, wanted.name)
            wait = not (returns and returns.piece_bytes)
            if any([departures.start(step, wait) for step in verdict.steps]):
                continue
            verdict = arrivals.with_stopped_load(
                session, wanted.name, requests.explained(session, verdict)
            )
            because = verdict.because
            if deadline is not None and session.clock() >= deadline:
                waited = session.clock() - began
                raise refusals.busy(session.ledger.read(), wanted.name, verdict, waited)
            if session.on_wait:
                reported = True
                session.on_wait(wanted.name, verdict)
            _ring_blockers(session, verdict, rung_at)
            requests.pause(session, verdict, deadline)
            session.reap()  # before the next decision, which would count the bytes of the dead
    finally:
        if reported and session.on_wait:
            session.on_wait(wanted.name, None)


def _admitted(
    session: Session, request: Request, compared: tuple[Candidate, ...]
) -> Grant | Wait | Refuse:
    """Decides the request in one transaction, and records the decision. Memory is measured first.

    `compared` are the ways to make room that the caller has compared before. They only add details
    to the journal; see `with_runners_up`.
    """
    in_full = partial(with_runners_up, rules=request.placement, room_made=compared)

    def decide(book: Book, world: World) -> tuple[Book, tuple[Verdict, Book, Book, World]]:
        after, verdict = admit(book, request, world, session.rank)
        return after, (verdict, book, after, world)

    verdict, book, after, world = session.transact(
        decide, fresh=True, in_full=lambda events, answer: in_full(events, answer[0])
    )
    if _is_new(book, after, request, verdict):
        # Fields that no decision reads are left out.
        sections = {id: replace(section, counts={}) for id, section in book.sections.items()}
        bare = replace(book, sections=sections, events=(), counts={})
        plain = replace(verdict, considered=())
        rule = session.settings.gpu_policy
        session.journal.record(Decided(0, world.wall, VERSION, rule, bare, request, world, plain))
    return verdict


def _is_new(book: Book, after: Book, request: Request, verdict: Verdict) -> bool:
    """Whether `verdict` differs from the earlier verdict on `request` and should be recorded.

    `book` is the book before the decision, and `after` the book after the decision. A request that
    waits is decided again whenever the book changes, mostly with the same result. A block of code
    that gets free memory at once is not recorded: programs may lease often, and nothing was decided.
    """
    is_block = request.lease.kind == "block"
    if is_block and isinstance(verdict, Grant) and book.ticket(request.key) is None:
        return False
    if after.seq > book.seq:  # a new event: the request was granted or refused, or begins to wait
        return True
    if not isinstance(verdict, Wait):
        return False
    if any(after.find(step.lease) is not book.find(step.lease) for step in verdict.steps):
        return True
    asked = (verdict.recalls, verdict.shadows)
    ticket = book.ticket(request.key)
    return any(asked) and (ticket is None or (ticket.recalls, ticket.shadows) != asked)


class _Departures:
    """The leases of this process that leave for one request."""

    def __init__(self, session: Session, key: Key) -> None:
        self._session, self._key = session, key
        self._threads: dict[str, threads.Running] = {}  # by lease id

    def under_way(self) -> tuple[str, ...]:
        """The ids of the leases that are leaving in other threads now."""
        return tuple([id for id, thread in self._threads.items() if not thread.wait(0)])

    def start(self, step: Step, wait: bool) -> bool:
        """Performs the `step`. Returns at its end, or at once if `wait` is false.

        A step that has only one stage blocks even if `wait` is false: no part of the waiting model
        can return before the step ends. Returns False if host memory cannot be given back now, since
        it is moving: the step would be decided again at once, and again.
        """
        session, key = self._session, self._key
        resident = session.residents.get(step.lease.partition("/")[2])
        act = partial(release.step_aside, session, step, key)
        if wait or resident is None or not release.stage_bytes(resident, step):
            done = session.uninterrupted(key, act)
            return done or not isinstance(step, Shed)
        self._threads[step.lease] = threads.start(partial(self._leave, step.lease, act))
        return True

    def _leave(self, lease_id: str, act: Callable[[], bool]) -> None:
        """Calls `act` in a separate thread. Only logs an error, since the request is decided again."""
        try:
            self._session.uninterrupted(self._key, act)
        except Exception as error:  # the request thread meets the same ledger, and raises
            level = logging.DEBUG if self._session.closed else logging.WARNING
            log.log(level, "%s did not leave: %s", lease_id, first_line(error))


def _ring_blockers(session: Session, verdict: Wait, rung_at: dict[str, float]) -> None:
    """Notifies the other owners whose leases block the request, so that they publish their pins.

    Without a notification, an owner publishes its pins within a second. `rung_at` has the time of
    each owner's last notification. An owner is notified again only after POLL_SECONDS.
    """
    now = session.clock()
    owners = {id.partition("/")[0] for id in verdict.blockers}
    due = {owner for owner in owners if now - rung_at.get(owner, -math.inf) >= POLL_SECONDS}
    rung_at.update(dict.fromkeys(due, now))
    session.ledger.ring(due - {session.me})


# -- the request for a model: the wanted lease, and the rules for its cards


def wanted_lease(
    session: Session,
    resident: Resident,
    importance: int | None = None,
    keep_alive: float | None = None,
) -> Lease:
    """The lease to request for a model.

    `importance` and `keep_alive` (seconds) default to the values of the registration.
    """
    spec = resident.spec
    return Lease(
        session.me,
        spec.name,
        importance=spec.importance if importance is None else importance,
        wished=session.wished.get(spec.name, 0),
        keep=spec.keep,
        keep_alive=spec.keep_alive if keep_alive is None else keep_alive,
        movable=resident.backend.can_move and spec.may_sleep,
        recent_uses=resident.recent_uses,
        reload_seconds=resident.lease.reload_seconds,
        restore_seconds=resident.lease.restore_seconds,
        source=resident.content,
        backend=spec.backend,
        model_type=spec.model_type,
        quantization=spec.quantization,
        kind=KERNEL if spec.backend == KERNEL else "model",
    )


def placement(session: Session, resident: Resident, for_wish: bool = False) -> PlacementRules:
    """Rules for where the model may be placed and how it may be divided.

    The model's own rules override the settings. If `for_wish` is true, the model is loaded because
    the fleet wishes it, and not for a use. Models that are wished as much stay then.
    """
    splits = resident.backend.can_split and len(resident.pieces()) != 1
    layout = resident.spec.layout if splits else "single"
    if layout == "auto":
        layout = resident.backend.layout  # an engine may require a layout
    devices = allowed_devices(session, resident)
    rules = replace(session.placement, devices=devices, layout=layout)
    rules = replace(rules, **resident.spec.placement)
    if for_wish:
        rules = replace(rules, spared=session.wished.get(resident.spec.name, 0))
    return bound_to(resident.must_return_to(), rules)


def bound_to(cards: Mapping[str, int], rules: PlacementRules) -> PlacementRules:
    """Returns the `rules`, changed to take from each card exactly the bytes in `cards`.

    `cards` maps ids of cards to bytes. Memory that left several cards for host memory returns to
    each card with the bytes that it had there. With less than two cards, or with unknown bytes, the
    rules are unchanged.
    """
    if len(cards) < 2 or not all(cards.values()):
        return rules
    return replace(
        rules,
        layout="proportional",
        card_bytes=dict(cards),
        least_cards=len(cards),
        most_cards=len(cards),
        margin_bytes=0,
    )


def allowed_devices(session: Session, resident: Resident) -> tuple[str, ...]:
    """Ids of the cards on which the model may be placed. Empty means any card.

    The model's own list overrides the card that INFERENCE_GPU_INDEX names. Memory that a live
    autograd graph holds returns only to the card that it left.
    """
    if bound := resident.must_return_to():
        return tuple(bound)
    index = session.settings.inference_gpu_index
    if resident.spec.devices or index is None:
        return resident.spec.devices
    cards = session.probe.cards
    return tuple(card.id for card in cards if card.index == index)


# -- a request that the stop button interrupts


@contextlib.contextmanager
def in_one_line(
    session: Session, outcome: Callable[[], str] = lambda: "nothing is held"
) -> Iterator[None]:
    """A `with` block that shows a KeyboardInterrupt as one line: the seconds and the `outcome`.

    After an interrupt, `outcome` is called at the end of the block. By then the code in the block
    must have released its request.
    """
    began = session.clock()
    try:
        yield
    except KeyboardInterrupt as error:
        waited = show_seconds(session.clock() - began)
        shorten_interrupt(error, f"Interrupted after {waited}; {outcome()}.")
        raise


def outcome_of(session: Session, resident: Resident) -> str:
    """The state of the model after an interrupted request for it.

    The text is the end of a sentence.
    """
    if load := session.loads.get(resident.spec.name):
        return arrivals.load_state(session, load)
    if resident.place is not Place.HERE:
        return "nothing is held"
    return f"{resident.spec.name} is on {resident.lease.where}, and not in use by this request"


# -- without a governor (ENABLE_MEMORY_GOVERNOR=0): no ledger, and nothing is evicted


def _load_ungoverned(
    session: Session, resident: Resident, anchor: AnchorRef | None, progress: Progress | None
) -> None:
    """Loads the model onto the first allowed card. `anchor` and `progress` are as in `obtain`."""
    allowed = allowed_devices(session, resident)
    cards = [device.id for device in session.probe.cards]
    share = Share(
        next(id for id in cards if not allowed or id in allowed), resident.footprint().bytes
    )
    try:
        handle, shares, seconds = resident.load((share,), progress)
    except Exception as error:
        raise failures.load_error(session, resident, Load("", (share,)), error) from error
    lease = replace(
        wanted_lease(session, resident),
        shares=shares,
        reload_seconds=seconds,
        droppable=resident.backend.droppable(handle),
    )
    resident.install(handle, lease, anchor)


# -- blocks of the user's own code that lease memory: the lease, the cap on torch, the measured
# use.
#
# The use is measured by torch, and only on a real card that this process uses. In other cases the
# measured figures are unknown; they are never reported as zero.


class LeasedBlock:
    """The object that `rt.lease` yields: the lease and its device, and later the measured use.

    `peak_bytes` and `delta_bytes` are None while the block runs, and also if the use cannot be
    measured.
    """

    def __init__(self, lease: Lease, device: Device, torch: str = "") -> None:
        """`torch` is torch's name of the device in this process, such as cuda:0, or empty."""
        self.lease = lease
        self.device = device
        self._torch = torch
        self.bytes = lease.bytes
        self.peak_bytes: int | None = None
        self.delta_bytes: int | None = None
        self._before = 0
        self._peak: Peak | None = None  # None before the process uses CUDA
        self._found, self._set = 1.0, 0.0  # torch's bound before the block, and the block's own
        # A cap needs CUDA, so a block that leases bytes starts CUDA if no code has started it.
        self._cuda = _cuda_of(torch, start=bool(self.bytes))
        if self._cuda:
            self._before = self._cuda.memory_allocated(self._torch)
            self._peak = Peak(self._cuda, self._torch)
            if self.bytes:  # a lease of nothing only measures
                self._cap()

    def _cap(self) -> None:
        """Limits torch to the bytes that it reserved before the block, plus the leased bytes."""
        size = self._cuda.memory_reserved(self._torch) + self.bytes
        self._set = max(part_of(self._cuda, self._torch, size), 0.01)
        self._found = _bound(self._cuda, self._torch, 1.0)
        limit(self._cuda, self._torch, self._set)
        _capped.append(self)

    def _uncap(self, cuda: Any) -> None:
        """Restores the bound that torch had before the block. A bound that was set since the block began stays."""
        if self not in _capped:
            return
        _capped.remove(self)
        for later in _capped:  # a block that began after this one finds what this one found
            if later._torch == self._torch and abs(later._found - self._set) < 1e-6:
                later._found = self._found
        if cuda and abs(_bound(cuda, self._torch, self._set) - self._set) < 1e-6:
            limit(cuda, self._torch, self._found)

    def end(self) -> None:
        """Measures the block's use of memory for the last time and restores torch's bound."""
        # Looked up again: the block may have started CUDA, and a child forked in it has no CUDA.
        cuda = _cuda_of(self._torch)
        if cuda:
            peak = self._peak.bytes if self._peak else cuda.max_memory_allocated(self._torch)
            self.peak_bytes = peak - self._before
            self.delta_bytes = cuda.memory_allocated(self._torch) - self._before
        self._uncap(cuda)

    def __repr__(self) -> str:
        peak = "unknown" if self.peak_bytes is None else show_bytes(self.peak_bytes)
        leased = show_bytes(self.bytes)
        return f"<{leased} on {self.device.id}; peak {peak}>"


_capped: list[LeasedBlock] = []  # the running blocks that bound torch


def _bound(cuda: Any, name: str, unknown: float) -> float:
    """The part of the card that torch may take now; `unknown` if this torch cannot tell."""
    read = getattr(cuda, "get_per_process_memory_fraction", None)
    return read(name) if read else unknown


def _cuda_of(name: str, *, start: bool = False) -> Any:
    """torch.cuda if torch already uses CUDA and `name` is torch's name of a card, else None.

    The result is also None if torch has an allocator that counts no bytes.

    If `start` is true, CUDA is started first, if torch can start it. The caller needs this, because
    `reset_peak_memory_stats` raises an error before CUDA has started.
    """
    torch = sys.modules.get("torch")
    if torch is None or not name.startswith("cuda"):
        return None
    cuda = torch.cuda
    if start and not cuda.is_initialized() and cuda.is_available():
        with contextlib.suppress(RuntimeError):  # this process is a fork of one that used CUDA
            cuda.init()
    return cuda if cuda.is_initialized() and counts_bytes(cuda) else None


def lease_memory(
    session: Session,
    size: str | int | None,
    purpose: str,
    importance: str | int,
    timeout: str | float | None,
) -> Held:
    """A `with` block in which the caller's own code has `size` bytes of leased memory.

    If `size` is None, the block leases nothing and only measures. `timeout` limits the wait for the
    memory; None means no limit.

    Raises BadSize and BadSetting at once. Entering the block raises DoesNotFit and Busy.
    """
    wanted_bytes = 0 if size is None else parse_room(size)
    rank = parse_importance(importance)
    seconds = None if timeout is None else parse_seconds(timeout)
    program = os.path.basename(session.owner.notebook or sys.argv[0]) or "python"
    name = f"{purpose or printable(program, LONGEST_NAME)}#{session.blocks.new_number()}"
    return _Block(session, name, (wanted_bytes, rank, seconds))


def room_for_process(session: Session, pid: int, device: str, size: int, seconds: float) -> Held:
    """A `with` block that reserves `size` bytes on `device` for the process `pid`. It yields the lease.

    The process should take the bytes within `seconds` of the grant. Until then the bytes count as
    not yet measured.
    """
    name = f"return of pid {pid}#{session.blocks.new_number()}"
    return _Block(session, name, (size, NORMAL, None, (device,), seconds), runs_here=False)


class _Block(Held):
    """The `with` block of `lease_memory`. It yields a LeasedBlock, which outlives the block."""

    __slots__ = ("_session", "_name", "_wanted", "_runs_here", "_running")

    def __init__(
        self, session: Session, name: str, wanted: tuple[Any, ...], runs_here: bool = True
    ) -> None:
        """`wanted` are the arguments of `_lease_block` from `size` on. See `room_for_process`."""
        super().__init__()
        self._session, self._name, self._wanted = session, name, wanted
        self._runs_here = runs_here
        self._running: list[LeasedBlock] = []

    def _typed(self) -> tuple[str, str]:
        size = self._wanted[0]
        return f"rt.lease({(show_bytes(size) if size else None)!r})", "block"

    @outside_modes
    def _start(self, anchor: AnchorRef) -> LeasedBlock | Lease:
        session = self._session
        session.start_monitor()
        with in_one_line(session):
            lease = _lease_block(session, self._name, anchor, *self._wanted)
        if not self._runs_here:
            return lease
        id = lease.shares[0].device
        device = next(device for device in session.probe.devices if device.id == id)
        self._running.append(LeasedBlock(lease, device, session.probe.place(id).torch))
        return self._running[0]

    @outside_modes
    def _finish(self, error: BaseException | None) -> None:
        for block in self._running:
            block.end()
        _end_block(self._session, self._name)
        failures.finish_block(self._session, error)


def _lease_block(
    session: Session,
    name: str,
    anchor: AnchorRef,
    size: int,
    importance: int,
    timeout: float | None,
    devices: tuple[str, ...] = (),
    unseen_seconds: float = 0.0,
) -> Lease:
    """Claims `size` bytes until the block of code ends, on one of `devices` if given.

    `anchor` refers weakly to an object that lives as long as the block. During the first
    `unseen_seconds` the driver may still report the bytes as free. So the bytes count as not yet
    measured, and no other request gets them.
    """
    wanted = Lease(session.me, name, kind="block", importance=importance, movable=False)
    rules = PlacementRules(devices, policy=session.settings.gpu_placement)
    granted = False  # whether the request was granted: a grant removes our ticket from the book

    def is_here() -> bool:
        return name in session.blocks

    key = session.new_key(f"lease {name}")
    try:
        granted_steps = grants(session, key, wanted, Footprint.of(size), rules, timeout, is_here)
        for verdict in granted_steps:
            lease = settled(verdict.lease, session.clock() + unseen_seconds)
            session.blocks[name] = (lease, anchor)
            session.blocks.leased_bytes += lease.bytes
            granted = True
            return lease
        return session.blocks[name][0]
    finally:
        session.done_with(key.note)  # the key is released first, as in `acquire.obtain`
        if not granted:
            session.withdraw(key)


def settled(lease: Lease, at: float) -> Lease:
    """The granted `lease` of a block of code, settled at the time `at`, since no load settles it.

    The monitor or the end of the block publishes it.
    """
    return replace(
        lease, shares=lease.target, target=(), phase=Phase.SETTLED, key="", settled_at=at
    )


def _end_block(session: Session, name: str) -> None:
    lease, _ = session.blocks.pop(name, (None, None))
    for share in lease.shares if lease else ():
        session.forget_torch_limit(share.device)  # the block has lifted the cap
    # A closed session, or the session of a forked child, no longer owns the lease.
    if not session.closed:
        session.publish_quietly()
