"""The monitor's tick: publishes, removes dead owners, obeys other owners, relieves pressure.

The monitor is a thread of each runtime; a tick is one round of the monitor. A ticket is the entry
of a request in the book. A section is one owner's part of the book.
"""

from __future__ import annotations

import logging
import time
from functools import partial

from msgspec.structs import replace

from .. import threads
from ..errors import GpuError, NotAllowed, ProbeFailed, UnknownModel, first_line
from ..facts import HOST, KERNEL, Book, Drop, LeaseId, Level, Move, Outcome, Shed, World
from ..ledgers.base import TICKS_A_SECOND
from ..scheduler import caps, recall, relief
from ..scheduler import transitions as books
from ..scheduler.capacity import views
from ..scheduler.recall import Order
from ..units import show_bytes
from . import disk, holdings, kernel, operations, release, requests
from .operations import ASK_SECONDS
from .resident import Place, Resident
from .session import POLL_SECONDS, Session

log = logging.getLogger("gpu_runtime")

GIVE_BACK_SECONDS = 60.0  # unused pages of host memory are kept for so long
DOZE_SECONDS = 12.0  # longest sleep with many kernels; unnotified changes are noticed this late
# After so long without any change here, longer than all pauses of a tick's work, a process sleeps longer.
CALM_SECONDS = 90.0
CALM_DOZE_SECONDS = 60.0
RECORD_AFTER_SECONDS = 5.0  # a runtime on simulated cards must live this long to get a helper


def tick(session: Session, notebook: str = "") -> float:
    """Runs one round of the monitor. Returns the seconds until the next round is due.

    `notebook` is the path of this process's notebook. It is empty until the front end publishes it.
    """
    session.notebook = notebook or session.notebook
    keep_helpers_alive(session)
    try:
        book = session.ledger.read()
    except GpuError:
        pause_uses(session, Book())  # models on their device are used while the ledger is away
        raise
    # An order is a request of another owner. It stays in `session.orders` while its ticket is in the
    # book, so that it is not carried out twice.
    for key in session.orders.keys() - {ticket.key for ticket in book.tickets}:
        session.orders.pop(key, None)
    pause_uses(session, book)
    if book.tickets:  # first: another process waits
        _start_orders(session)
    reap_neighbours(session, book)
    session.limit_torch(book, session.world())  # the leases of other owners may have changed
    remeasure(session)
    log_overstays(session)
    requests.follow_up(session)
    session.journal.flush()
    operations.vacate(session)
    kernel.look_after(session)
    disk.look_after(session)
    give_back(session)
    if session.activity.running:
        session.ledger.give_sign()  # a cell that blocks the interpreter ends these signs
    maps_changed = session.maps.publish()
    session.publish_names()
    release.read_uses_in_book(session, book)
    nothing_to_write = quiet(session, book)
    if not (nothing_to_write or book.tickets):
        _start_orders(session)
    now = session.clock()
    due = now - session.checked_at >= session.settings.pressure_check_interval_seconds
    if due and session.breaker.allows(now):
        session.checked_at = now
        _check_devices(session, now)
    idle = nothing_to_write and not session.in_use()
    if maps_changed or not idle:
        session.changed_at = now
    return _doze(session, book, now) if idle else POLL_SECONDS


def keep_helpers_alive(session: Session) -> None:
    """Restarts the host's helper process if it has ended.

    On simulated cards, only a runtime that has run for RECORD_AFTER_SECONDS restarts the helper.
    """
    session.probe.look_after()
    lived = time.monotonic() - session.opened_at
    if session.recording and lived > RECORD_AFTER_SECONDS:
        session.recording.look_after()


# -- sleeping


def rest(session: Session, seconds: float) -> None:
    """Sleeps until the next tick is due, or until a notification comes.

    If another owner waits for a device, the sleep also ends when a use of a model ends there.
    """
    until = time.monotonic() + seconds
    needed = _needed_by_others(session)
    requests.wait_for_change(session, needed, lambda: until - time.monotonic())


def _needed_by_others(session: Session) -> list[Resident]:
    """The models of this process that are in use on devices for which another owner waits.

    The monitor publishes the end of such a use at once.
    """
    used = [resident for resident in list(session.residents.values()) if resident.pins]
    if not used:
        return []
    needed: set[str] = set()
    for ticket in session.ledger.read().tickets:
        if ticket.verb == "use" and ticket.owner != session.me:
            needed.update(share.device for share in ticket.need)
    return [
        resident
        for resident in used
        if any(share.device in needed for share in resident.lease.shares)
    ]


def pause_uses(session: Session, book: Book) -> None:
    """Sets which models of this process take no new uses now; see `recall.must_pause`."""
    foreign = any(ticket.verb == "use" and ticket.owner != session.me for ticket in book.tickets)
    world = session.world() if foreign else None
    for name, resident in list(session.residents.items()):
        lease = book.lease(session.me, name) if world else None
        resident.pauses = bool(world and lease and recall.must_pause(book, lease, world))


def _doze(session: Session, book: Book, now: float) -> float:
    """The seconds to sleep while no owner requests anything. With many owners, the sleep is longer.

    A long sleep is harmless: a use, a cell or a notification ends it, and others look too. A calm process
    also wakes those that should relieve pressure, and all calm ones together look about once a second.
    """
    owners = len(book.sections)
    seconds = min(DOZE_SECONDS, max(POLL_SECONDS, owners / TICKS_A_SECOND))
    if _is_calm(session, now):
        if pressed := relief.pressed(book, session.world(), session.rank) - {session.me}:
            session.ledger.ring(pressed)
        seconds = _until_own_look(session, book, now)
    session.dozing = seconds > POLL_SECONDS
    # Both are checked again after the flag is set. A use that began after the first check has either
    # seen the flag, or is found by this check; also if it has ended, with its pin still in the book.
    if session.dozing and (session.in_use() or not quiet(session, session.ledger.read())):
        session.dozing = False
        return POLL_SECONDS
    return seconds


def _is_calm(session: Session, now: float) -> bool:
    """Whether this process has nothing to do until it is used or notified.

    Somebody must notify it of a death. A notebook that is to be parked when it is idle, and bytes that may
    go to a disk, need a look every few seconds.
    """
    settings = session.settings
    parks = settings.gpu_park == "idle" and session.kernel is not None and not session.kernel.away
    looks = parks or settings.gpu_park_dir is not None or not session.ledger.names_the_dead
    return not looks and now - session.changed_at >= CALM_SECONDS


def _until_own_look(session: Session, book: Book, now: float) -> float:
    """The seconds until the next look of this owner. The owners of `book` look one after another.

    If they slept equally long, all that were woken together would look together ever after.
    """
    owners = sorted(book.sections)
    period = min(CALM_DOZE_SECONDS, max(POLL_SECONDS, float(len(owners))))
    offset = period * owners.index(session.me) / len(owners)
    seconds = period - (now - offset) % period
    return seconds if seconds >= POLL_SECONDS else seconds + period


# -- the book


def quiet(session: Session, book: Book) -> bool:
    """Whether no ticket is open and this owner's section of the book is up to date."""
    if book.tickets or book.ghosts or session.me not in book.sections:
        return False
    world = session.world()
    if book.drained and relief.has_leases_on_drained(book, session.me, world):
        return False
    return books.publish(book, session.truth(), world) is book


def give_back(session: Session) -> None:
    """Returns pages of host memory to the system that were unused for GIVE_BACK_SECONDS.

    After a return from host memory its pages are kept for the next park, because a copy into used
    pages is faster. Without an end, a notebook held its bytes twice: on the card, and in idle pages.
    """
    host, now = session.probe.place(HOST), session.clock()
    pulse = host.pulse()
    if session.host_pulse is None or pulse != session.host_pulse[0]:
        session.host_pulse = (pulse, now)
    elif now - session.host_pulse[1] >= GIVE_BACK_SECONDS:
        host.empty_cache()
        session.host_pulse = (host.pulse(), now)


def log_overstays(session: Session) -> None:
    """Logs each leased block of this process that lasts longer than the operator's cap allows.

    Each block is logged once.
    """
    cap = session.rules.cap
    if not session.blocks or cap is None or cap.longest_lease_seconds is None:
        return
    book, world = session.ledger.read(), session.world()
    for lease in caps.overstaying(book, world):
        if lease.owner == session.me and lease.name not in session.overstayed:
            session.overstayed.add(lease.name)
            because = caps.overstay(book, lease, world)
            log.warning("%s", because)
            session.note(lease, "overstayed", "cap", because, size=lease.bytes)


# -- measuring


def remeasure(session: Session) -> None:
    """Measures again the models that were used since the last tick.

    A use can change a model's size: for example, training adds gradients and optimizer state. And
    while the result of a use keeps a graph, the model cannot be dropped.
    """
    residents = [r for r in session.residents.values() if r.lease.kind == "model"]
    used = [r for r in residents if r.uses != r.uses_counted and r.place is Place.HERE]
    for resident in residents:
        if resident.lease.droppable or resident.in_use() or not resident.work.acquire(False):
            continue
        try:
            resident.note_droppable()
        finally:
            resident.work.release()
    for resident in used:
        if resident.postpones_measuring() or not resident.work.acquire(False):
            continue
        try:
            if not resident.pins:  # a pinned model may still grow: measure it again next time
                resident.uses_counted = resident.uses
            resident.remeasure()
            session.sizing.saw(resident, alone=len(used) == 1)
        finally:
            resident.work.release()
    session.sizing.saw_contexts(
        r.lease for r in residents if r.handle is not None and not r.engines
    )


def _check_devices(session: Session, now: float) -> None:
    """Measures the devices, then relieves pressure. If a driver does not answer, only notes this."""
    try:
        session.probe.check(now, session.rules.stale_seconds)
    except ProbeFailed as error:
        session.breaker.failed(now, first_line(error))
        return
    session.breaker.succeeded()
    relieve(session)


def relieve(session: Session) -> None:
    """Evicts idle models of this process, as the table of pressure levels requires."""
    me, rank = session.me, session.rank
    book, world = session.look()
    is_known = books.measure(book, world) is book
    if is_known and not relief.relieve(book, me, world, rank, "")[1]:
        return
    release.perform_steps(
        session,
        "relieve",
        lambda book, world, key: relief.relieve(book, me, world, rank, key),
        begins=lambda: _log_pressure(session),
    )


def _log_pressure(session: Session) -> None:
    """Logs pressure with the exact lines of the Semantik governor; see `session.log_event`."""
    for view in views(session.ledger.read(), session.world()):
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


# -- what other owners request


def obey(session: Session) -> tuple[Order, ...]:
    """Evicts models that other owners have recalled.

    Returns the orders: the requests of other owners for work other than an eviction.
    """

    def decision(
        book: Book, world: World
    ) -> tuple[Book, tuple[tuple[Move | Drop | Shed, ...], tuple[Order, ...]]]:
        askers = requests.askers(session, book)
        rank = session.rank
        after, steps, orders = recall.obey(book, session.me, world, key.text, askers, rank)
        return after, (steps, orders)

    key = session.new_key("obey")
    try:
        before: tuple[Move | Drop | Shed, ...] = ()
        while True:
            steps, orders = session.transact(decision)
            for step in steps:
                release.step_aside(session, step, key, by=step.by)
            if steps == before or not any(map(_frees_host_memory, steps)):
                return orders
            before = steps  # a lease on a card may now leave for the host
    finally:
        session.done_with(key.note)


def _frees_host_memory(step: Move | Drop | Shed) -> bool:
    return isinstance(step, Shed) or (
        isinstance(step, Drop) and any(share.device == HOST for share in step.source)
    )


def _start_orders(session: Session) -> None:
    """Starts a thread for each new order, so that a long load does not hold up the monitor.

    An answer is an event, and the book keeps the newest only. If the answer has left the book before
    the requester has read it, it is given again: else the requester would wait for ever.
    """
    for order in obey(session):
        if order.key not in session.orders:
            session.orders[order.key] = None
            try:
                threads.start(partial(carry_out_order, session, order))
            except RuntimeError as error:  # the system starts no more threads
                del session.orders[order.key]  # the next tick begins it
                log.warning("%s was not begun: %s", order.key, error)
        elif said := session.orders[order.key]:
            if all(event.answers != order.key for event in session.ledger.read().events):
                _answer(session, order, *said)


def carry_out_order(session: Session, order: Order) -> None:
    """Does what another owner requested in `order`, and writes the answer into the book."""
    if session.closed:
        return
    try:
        outcome = _perform(session, order)
        action, because, size = order.verb, outcome.because, outcome.bytes
    except Exception as error:  # every error is answered, else the requester waits for ever
        action, because, size = "failed", first_line(error), 0
    try:
        _answer(session, order, action, because, size)
        session.orders[order.key] = action, because, size
    except GpuError as error:
        session.orders.pop(order.key, None)  # there is no answer yet, so the order must run again
        log.warning("%s", error)


def _answer(session: Session, order: Order, action: str, because: str, size: int) -> None:
    session.transact(
        lambda book, world: (
            recall.answer(book, world, session.me, order, action, because, size),
            None,
        )
    )


def _perform(session: Session, order: Order) -> Outcome:
    if order.refused:
        raise NotAllowed(order.refused, name=order.name, user=order.by, because=order.refused)
    if order.verb == "cancel":
        return operations.obey_cancel(session, order)
    if order.name and order.name not in session.residents:
        # The name comes from another process. It may select a model of this process, but never load
        # another.
        raise UnknownModel(order.name, tuple(set(session.residents) - {KERNEL}))
    if order.verb == "who":
        return holdings.answer(session, order)
    if order.verb == "defrag":
        freed = operations.empty_cache(session)
        return Outcome("defrag", "", True, f"{show_bytes(freed)} came free", freed)
    if order.verb == "hibernate" and session.kernel is not None:
        return session.kernel.hibernate(by=order.who or order.by or order.asker)
    target = LeaseId(session.me, order.name)
    if order.verb == "preload":
        return operations.preload(session, target, timeout=ASK_SECONDS)
    if order.verb == "move":
        resident = session.residents[order.name]
        return operations.move_own(session, resident, order.places, by=order.who)
    return operations.set_keep(session, target, order.verb)


def reap_neighbours(session: Session, book: Book) -> int:
    """Removes dead owners from the book. Returns the number of removed owners.

    A keeper says who has died, and wakes one owner, which removes them. With other ledgers, this process
    looks itself. Each call checks two owners: the next owner in the sorted list of owners, and a second
    owner that changes from call to call. So at every tick, each owner is checked by its predecessor in
    the list. (When each of 64 owners checked all others, the checks used 7 % of a core.)
    """
    if session.ledger.names_the_dead:
        return session.reap()
    waiting = {ticket.owner for ticket in book.tickets}
    owners = sorted(book.sections.keys() | waiting | {session.me})
    session.reap_calls += 1
    next_place = owners.index(session.me) + 1
    far_place = next_place + session.reap_calls
    checked = {owners[place % len(owners)] for place in (next_place, far_place)}
    sections = {id: section for id, section in book.sections.items() if id in checked}
    tickets = tuple([ticket for ticket in book.tickets if ticket.owner in checked])
    dead = session.ledger.dead(replace(book, sections=sections, tickets=tickets))
    return session.reap() if dead else 0
