"""The verbs on models, cards, notebooks and processes: preload, move, evict, pin, drain, cancel, defrag; and signals.

A verb on a model of another owner becomes a request to the model's owner.
"""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterable
from functools import partial

from msgspec.structs import replace

from .. import threads
from ..attribution import attributed, speaking_for
from ..backends.base import Progress
from ..backends.formats import sources
from ..errors import (
    AmbiguousName,
    BadSetting,
    Busy,
    DoesNotFit,
    GpuError,
    NotAllowed,
    NotResident,
    StillInUse,
    UnknownDevice,
    first_line,
)
from ..facts import (
    DISK,
    EVICTED,
    HOST,
    KERNEL,
    THIS_PROCESS,
    Book,
    Device,
    Evidence,
    Grant,
    Lease,
    LeaseId,
    Outcome,
    Owner,
    PlacementRules,
    Refuse,
    Section,
    Ticket,
    Wait,
    World,
    away_word,
    held_on_cards,
    is_engine,
    lease_title,
    notebook_has_name,
    of_notebook,
    where,
)
from ..ledgers.liveness import Sight, end_of
from ..safe_text import listed, nearest, quoted
from ..scheduler import recall, refusals, relief
from ..scheduler import transitions as books
from ..scheduler.recall import Order
from ..scheduler.victims import MOVE_FAILED, PERSON, reason_to_stay
from ..units import parse_seconds, show_bytes, show_seconds
from . import acquire, registry, release, requests
from .resident import Place, Resident
from .session import Session, log

ASK_SECONDS = 30.0  # default time-out for a request to another owner


def preload(
    session: Session,
    name: str | LeaseId,
    *,
    progress: Progress | None = None,
    timeout: str | float | None = None,
    wait: bool = True,
) -> Outcome:
    """Brings a model onto its device; see Runtime.preload."""
    if not isinstance(name, LeaseId) and not session.guest:
        if registry.by_key(session, name) is None and session.catalogue.spec(name):
            # A model of the catalogue counts as registered in this process.
            name = registry.find(session, name).spec.name
    target = registry.resolve(session, name, loadable=True)
    if target.owner != session.me:
        return ask_owner(session, "preload", target, timeout, wait)
    resident = registry.find(session, target.name)
    began = session.clock()
    already = resident.place is Place.HERE
    if not (wait or already):
        return _preload_later(session, resident, timeout)
    if already:
        session.look_ahead.requested(target.name)
    else:
        acquire.obtain(session, resident, None, timeout=timeout, progress=progress, with_load=True)
    lease = resident.lease
    title = lease_title(lease, session.owner)
    because = f"{title} is on {lease.where}" + (" already" if already else "")
    loaded_bytes = 0 if already else lease.bytes
    requests.note_action(session, "preload", target.name, because, loaded_bytes)
    seconds = session.clock() - began
    return Outcome("preload", title, True, because, loaded_bytes, lease.where, seconds)


def load_wished(session: Session, name: str, timeout: float) -> str:
    """Loads a model that the fleet wishes on this host, and returns the model's devices.

    Models that are wished as much stay. `timeout` (seconds) limits the wait for room; the load may
    take longer. Raises the errors of `use`.
    """
    resident = registry.find(session, name)
    if resident.place is not Place.HERE:
        acquire.obtain(session, resident, None, timeout=timeout, for_wish=True)
    return resident.lease.where


def source_facts(session: Session, name: str) -> tuple[Evidence, str]:
    """What the source of a model shows about it, and its chat template; see Runtime._source_facts."""
    resident = registry.find(session, name)
    spec = resident.spec
    template = ""
    if spec.source:
        template = sources.template(spec.source, spec.name, spec.options.get("revision")) or ""
    try:
        return resident.backend.evidence(spec, resident.origin), template
    except (GpuError, OSError) as error:  # a load reports it
        return Evidence(why_unknown=str(error)), template


def move(
    session: Session,
    name: str | LeaseId,
    device: str | Iterable[str],
    *,
    timeout: str | float | None,
) -> Outcome:
    """Moves an idle model to other cards; see Runtime.move."""
    target = registry.resolve(session, name)
    registry.require_model(session, "move", name, target)
    cards = cards_named(session, target.name, device)
    if target.owner != session.me:
        return ask_owner(session, "move", target, timeout, places=cards)
    resident = registry.find(session, target.name)
    return move_own(session, resident, cards, by=requests.person(session))


def _preload_later(session: Session, resident: Resident, timeout: str | float | None) -> Outcome:
    name = resident.spec.name

    def load() -> None:
        """Loads the model. No caller waits for the result, so an error is logged."""
        try:
            acquire.obtain(session, resident, None, timeout=timeout, with_load=True)
        except GpuError as error:
            log.warning("%s was not preloaded: %s", name, error)

    threads.start(load)
    return Outcome("preload", name, False, f"{name} is loaded in the background")


def evict_lease(
    session: Session,
    name: str | LeaseId,
    *,
    timeout: str | float | None,
    wait: bool = True,
    drop: bool = False,
) -> Outcome:
    """Evicts a model; see Runtime.evict."""
    target = registry.resolve_model(session, name)
    if target.owner != session.me:
        places = (DISK,) if drop else ()
        return ask_owner(session, "evict", target, timeout, wait, places=places)
    resident = registry.find(session, target.name)
    began = session.clock()
    title = lease_title(resident.lease, session.owner)
    because = f"{title} was evicted by hand."
    with resident.training.waived():
        drops = drop and resident.lease.droppable
        step = release.evict(session, resident, because, drop=drops, by=requests.person(session))
    if step is None:
        place = away_word(resident.lease).replace("parked", "in RAM") or "not loaded"
        where = resident.lease.where if resident.place is Place.AWAY else "disk"
        return Outcome("evict", title, True, f"{title} is {place}", where=where)
    freed = sum(share.bytes for share in step.source)
    where, moved = "disk", "was unloaded"
    if resident.handle is not None:  # else it was unloaded, or is an engine that did not sleep
        where = HOST
        moved = "sleeps" if is_engine(resident.lease) else "was offloaded to RAM"
    if resident.lease.kind == KERNEL and resident.lease.on_host:
        freed = resident.lease.bytes  # it may have taken more since it was counted
    because = f"{title} {moved}; {show_bytes(freed)} came free"
    return Outcome("evict", title, True, because, freed, where, session.clock() - began)


def set_keep(session: Session, name: str | LeaseId, verb: str) -> Outcome:
    """Keeps a model on its device if `verb` is "pin"; allows its eviction if `verb` is "unpin"."""
    target = registry.resolve(session, name, loadable=True)
    registry.require_model(session, verb, name, target)
    if target.owner != session.me:
        return ask_owner(session, verb, target, ASK_SECONDS)
    resident = registry.find(session, target.name)
    keep = verb == "pin"
    requests.require_within_cap(session, target.name, resident.spec.importance, keep)
    before = resident.spec
    resident.spec = replace(before, keep=keep)
    try:
        session.publish()
    except BaseException:  # the caller is told that it was not done
        resident.spec = before
        raise
    because = _keep_sentence(resident, keep)
    requests.note_action(session, verb, target.name, because)
    where = resident.lease.where if resident.handle is not None else "disk"
    return Outcome(verb=verb, name=target.name, done=True, because=because, bytes=0, where=where)


def _keep_sentence(resident: Resident, keep: bool) -> str:
    name = resident.spec.name
    if not keep:
        return f"{name} may be evicted again"
    if resident.place is Place.HERE:
        return f"{name} is pinned to its device"
    return f"{name} is pinned to its device once it is there; it is {resident.place.value} now"


def ask_owner(
    session: Session,
    verb: str,
    target: LeaseId,
    timeout: str | float | None,
    wait: bool = True,
    must: bool = True,
    places: tuple[str, ...] = (),
) -> Outcome:
    """Requests `verb` from the owner of `target`, and returns the outcome.

    `places` are the cards for a move. For an eviction, the place DISK means that the bytes are
    dropped. If `wait` is false, the function does not wait for the owner's answer.

    If `must` is true, a refusal or a time-out raises NotAllowed, StillInUse, Busy or GpuError. If
    `must` is false, the function returns an Outcome that is not done. A request that this user may
    not make always raises NotAllowed.
    """
    book = session.ledger.read()
    owner = book.owner(target.owner)
    if because := requests.refusal_of_request(session, verb, owner, target.name):
        requests.decline(session, verb, target, because)
        raise NotAllowed(f"{because}.", name=target.name, because=because, user=session.owner.user)
    session.start_monitor()
    before = book.lease(target.owner, target.name)
    title = lease_title(before, owner) if before else target.name
    seconds = None if timeout is None else parse_seconds(timeout)
    with acquire.in_one_line(session, lambda: "the request was withdrawn"):
        verdict = requests.request(session, verb, target, timeout=seconds, wait=wait, places=places)
    if isinstance(verdict, Grant):
        where = verdict.lease.where if verdict.lease.shares else ""
        return Outcome(
            verb, title, True, verdict.because, _moved_bytes(verb, before, verdict), where
        )
    if must and isinstance(verdict, Refuse):
        raise _refused(session, target, verdict)
    if must and wait and isinstance(verdict, Wait):
        raise _unanswered(target, verdict, seconds)
    return Outcome(verb=verb, name=title, done=False, because=verdict.because)


def _moved_bytes(verb: str, before: Lease | None, done: Grant) -> int:
    """The bytes that the request `verb` has moved, of a lease that was as `before`.

    `done` has bytes only if the owner answered the request. It may also follow from the state of
    the lease: the model is where the request wants it.
    """
    if verb not in ("preload", "move", "evict"):
        return done.bytes
    if before is not None and before.shares == done.lease.shares:
        return 0
    if verb == "evict":
        return before.bytes if before else done.bytes
    return done.bytes or done.lease.bytes


def _refused(session: Session, target: LeaseId, verdict: Refuse) -> GpuError:
    because = verdict.because.rstrip(".") + "."
    owner = session.ledger.read().owner(target.owner)
    if verdict.kind == "kept" and owner is not None:
        address = shlex.quote(f"{target.name}@{owner.pid}")
        because += f"\n  Unpin it:  %gpu unpin {address}"
    if verdict.kind in ("in use", "kept"):
        because += hint_if_stopped(session, target.owner)
        return StillInUse(because, name=target.name, lease=str(target), owner=target.owner)
    return GpuError(because, name=target.name)


def _unanswered(target: LeaseId, verdict: Wait, seconds: float | None) -> Busy:
    facts = {"name": target.name, "waited_seconds": seconds, "because": verdict.because}
    if not verdict.silent:  # the owner has begun, and says what it waits for
        because = f"not done within {show_seconds(seconds or 0)}: {verdict.because.rstrip('.')}"
        return Busy(f"{because}.\n  Watch:  %gpu status", **facts)
    # The sentences after the first one describe the process, for example that it is stopped.
    asked, dot, rest = verdict.because.partition(". ")
    about = f" {rest.rstrip('.')}." if dot else ""
    advice = "It answers once its kernel runs again."
    # This is no silence yet: a healthy process may need so long.
    if not dot and (seconds or 0) < requests.OWNER_SECONDS:
        advice = f"An answer may take up to {requests.OWNER_SECONDS:.0f} s."
    return Busy(
        f"{asked}, and has not answered for {show_seconds(seconds or 0)}.{about}\n"
        f"  {advice} Watch:  %gpu status",
        **facts,
    )


# -- evict, by the name of a model or a notebook, or `*` for all idle models

ALL_IDLE = "*"  # in place of a name: every idle model


def evict(
    session: Session,
    name: str | LeaseId,
    *,
    timeout: str | float | None,
    wait: bool = True,
    drop: bool = False,
) -> Outcome:
    """Evicts a model, all leases of a notebook, or all idle models; see Runtime.evict."""
    evict_one = partial(evict_lease, session, timeout=timeout, wait=wait, drop=drop)
    if name == ALL_IDLE:
        targets = _idle(session, drop)
    elif registry.is_notebook(session, name):
        targets = held_on_cards(sections_of_notebook(session, str(name)))
    else:
        return evict_one(name)
    if not targets and name != ALL_IDLE:
        return registry.in_ram_already(session, "evict", str(name), _in_ram(session, str(name)))
    freed, left, later, stays = 0, [], "", []
    for id in targets:
        is_own_code = id.name == KERNEL
        try:
            if is_own_code and id.owner == session.me and session.kernel is not None:
                done = session.kernel.park()  # at the end of the running cell, if there is one
            else:
                done = evict_one(id)
        except GpuError as error:
            stays.append(error)
            continue
        freed += done.bytes
        if is_own_code and not done.bytes:
            later = f". {done.because}"
        else:
            left.append("its own memory" if is_own_code else id.name)
    if stays and not (left or later):
        raise stays.pop(0)
    because = f"{', '.join(left) or 'nothing'} left; {show_bytes(freed)} came free{later}"
    for reason in stays:
        because += f". {first_line(reason).rstrip('.')}"
    return Outcome("evict", str(name), not stays, because, freed)


def _idle(session: Session, drop: bool) -> list[LeaseId]:
    """The idle models on cards, if they may be evicted. `drop` adds the models in host memory."""
    book, world = session.look()
    found = []
    for lease in book.leases():
        stays = reason_to_stay(lease, world, asker=lease.owner, importance=PERSON)
        if lease.kind == "model" and not stays and (lease.on_device or drop):
            found.append(LeaseId(lease.owner, lease.name))
    return found


def _in_ram(session: Session, notebook: str) -> list[Lease]:
    """The leases of the `notebook` in host memory."""
    sections = of_notebook(session.ledger.read().sections.values(), notebook)
    leases = [lease for section in sections for lease in section.leases]
    return [lease for lease in leases if lease.kind in EVICTED and lease.on_host]


def sections_of_notebook(session: Session, notebook: str) -> list[Section]:
    """The sections of the notebook with the file name or path `notebook`: one for each of its kernels.

    Raises GpuError if no notebook of this name holds memory; the message lists the notebooks that
    do. Raises AmbiguousName if several notebooks have the name.
    """
    sections = session.ledger.read().sections.values()
    found = of_notebook(sections, notebook)
    if not found:
        names = {section.owner.file for section in sections} - {""}
        those = f"{nearest(notebook, names)}Notebooks that hold memory: {listed(names) or 'none'}."
        raise GpuError(
            f"no notebook {quoted(notebook)} holds memory. {those}\n  All holders:  %gpu leases",
            name=notebook,
        )
    return found


# -- move: reserves room on other cards, and moves an idle model of this process there


def cards_named(session: Session, name: str, wanted: str | Iterable[str]) -> tuple[str, ...]:
    """The ids in the book of the cards that `wanted` names by id or UUID.

    `name` is the model to move, for the messages. Raises UnknownDevice, BadSetting.
    """
    found: list[str] = []
    words = wanted if isinstance(wanted, str) else ",".join(wanted)
    for word in relief.parse_cards(words) or (str(wanted),):
        if word == HOST:
            hint = f"a card;  %gpu evict {shlex.quote(name)}  moves it to RAM"
            raise BadSetting("device", word, hint)
        found.append(_card(session, word).id)
    return tuple(dict.fromkeys(found))


def _card(session: Session, name: str) -> Device:
    """The card with the id or UUID `name`, which this process or another owner uses. Raises UnknownDevice."""
    every = (*session.read_book().devices, *session.world().devices)
    known = {device.id: device for device in every if not device.is_host}
    for device in known.values():
        if name and name in (device.id, device.uuid):
            return device
    raise UnknownDevice(name, tuple(known))


def _move_rules(session: Session, resident: Resident, wanted: tuple[str, ...]) -> PlacementRules:
    """Placement rules that allow exactly the cards `wanted`.

    Raises DoesNotFit if the model cannot be split, or may not be placed on the cards `wanted`.
    """
    name, own = resident.spec.name, acquire.placement(session, resident)
    size = resident.lease.bytes
    if len(wanted) > 1 and own.layout == "single":
        raise DoesNotFit(
            f"{name} stays on one card: it cannot be split, or was registered with "
            f"layout='single'.",
            name=name,
            need_bytes=size,
            device=wanted[0],
        )
    outside = [card for card in wanted if own.devices and card not in own.devices]
    if outside:
        raise DoesNotFit(
            f"{name} may not go to {', '.join(outside)}: it was registered for "
            f"{', '.join(own.devices)}.",
            name=name,
            need_bytes=size,
            device=outside[0],
        )
    if len(wanted) == 1:
        layout = "single"
    else:
        layout = "auto" if own.layout == "whole" else own.layout
    count = len(wanted)
    return replace(own, devices=wanted, layout=layout, least_cards=count, most_cards=count)


def move_own(
    session: Session, resident: Resident, wanted: tuple[str, ...], *, by: str = ""
) -> Outcome:
    """Moves a model of this process to the cards `wanted`.

    `by` is the person who requested the move, or empty for this process's user. Raises NotResident,
    StillInUse, and DoesNotFit if the cards have no room. After an error, the model is where it was.
    """
    name, began = resident.spec.name, session.clock()
    rules = _move_rules(session, resident, wanted)
    because = f"as {by} requested" if by else "by hand"

    def reserve(key: str, kept: frozenset[str], book: Book, world: World) -> release.NextStep:
        """Returns the book with the model marked as moving, and the step to perform.

        The step is None if the model is on these cards. If the move is refused, returns the
        unchanged book and an error.
        """
        if resident.place not in (Place.HERE, Place.MOVING):
            where = resident.place.value
            return book, NotResident(
                f"{name} is {where}, so there is nothing to move.\n"
                f"  Load it first:  %gpu preload {shlex.quote(name)}",
                name=name,
                where=where,
            )
        size = resident.footprint()
        after, step = relief.move(book, session.me, name, size, rules, world, key, because)
        if isinstance(step, Refuse):
            return book, _move_refused(book, session.me, resident, step, world)
        return after, step

    step = release.perform_step(session, resident, "move", reserve, by=by, fresh=True)
    there = resident.lease.where
    if step is None:
        return Outcome("move", name, True, f"{name} is on {there} already", where=there)
    because = f"{name} moved from {where(step.source)} to {there}"
    size, seconds = resident.lease.bytes, session.clock() - began
    return Outcome("move", name, True, because, size, there, seconds)


def _move_refused(
    book: Book, me: str, resident: Resident, refusal: Refuse, world: World
) -> GpuError:
    lease = book.lease(me, resident.spec.name) or resident.lease
    if refusal.kind in ("in use", "busy"):
        return refusals.still_here(book, me, lease, refusal.because, world)
    if refusal.kind == "away":
        return StillInUse(f"{lease.name} is being moved; try again.", name=lease.name)
    return DoesNotFit(
        f"{refusal.because}.{_suggest_eviction(book, me, refusal)}",
        name=lease.name,
        need_bytes=refusal.need_bytes,
        device=refusal.device,
        holders=refusal.holders,
    )


def _suggest_eviction(book: Book, me: str, refusal: Refuse) -> str:
    """What to type to make room: the command that evicts an idle lease in the way; may be empty."""
    found = book.find_all(refusal.holders)
    models = [lease for lease in found if lease.kind == "model" and lease.on_device]
    idle = [lease for lease in models if not lease.pins and not lease.keep]
    if not idle:
        return ""
    lease = idle[0]
    owner = book.owner(lease.owner)
    at = f"@{owner.pid}" if owner and owner.id != me else ""
    size, address = show_bytes(lease.bytes), shlex.quote(f"{lease.name}{at}")
    return f"\n  Make room first:  %gpu evict {address}      ({size}, idle)"


# -- drain: closes a card. No new lease is put there, and idle models leave it
#
# A drain is a mark in the book. Every owner moves its own idle models off a marked card, at the tick
# of its monitor.

LOOK_SECONDS = 0.1  # the pause between two checks which leases are still on the card


def drain(
    session: Session, name: str, *, undo: bool = False, timeout: str | float | None
) -> Outcome:
    """Drains the card `name`. With `undo`, the card takes leases again.

    Waits at most `timeout` seconds for idle models to leave; None means no wait. Raises
    UnknownDevice, NotAllowed, LedgerUnavailable.
    """
    seconds = 0.0 if timeout is None else parse_seconds(timeout)
    book, device = session.read_book(), _card(session, name)
    mine = session.owner.user
    if because := requests.refusal_of_drain(session, book):
        raise NotAllowed(f"{because}.", name=device.id, because=because, user=mine)
    user, world = attributed(speaking_for(), mine), session.world()
    was_drained = device.key in book.drained
    act = relief.undrain if undo else relief.drain
    session.transact(lambda book, world: (act(book, device, user, world), None))
    if undo:
        said = "can be used again" if was_drained else "was not drained"
        return Outcome("drain --undo", device.id, True, f"{device.id} {said}", where=device.id)
    before = [lease for lease, _ in relief.staying(book, device.id, world)]
    session.ledger.ring({lease.owner for lease in before} - {session.me})
    staying = _wait_until_left(session, device, seconds)
    still_there = {lease.id for lease, _ in staying}
    left = [lease for lease in before if lease.id not in still_there]
    freed = sum(lease.bytes_on(device.id) for lease in left)
    said = "is drained already" if was_drained else "is drained: it takes no new lease"
    gone = [f"{show_bytes(freed)} left it"] if freed else []
    sentences = [f"{device.id} {said}", *gone, *_reasons(session, staying)]
    return Outcome("drain", device.id, True, ". ".join(sentences), freed, device.id)


def _wait_until_left(session: Session, device: Device, timeout: float) -> list[tuple[Lease, str]]:
    """Waits at most `timeout` seconds until all leases that may leave have left the device.

    Returns the leases that are still on the device, each with the reason why it stays. The reason
    is empty for a lease that may leave and has not left yet.
    """
    deadline = session.clock() + timeout
    while True:
        vacate(session)
        staying = relief.staying(session.ledger.read(), device.id, session.world())
        if all(why for _, why in staying) or session.clock() >= deadline:
            return staying
        session.ledger.wait(LOOK_SECONDS)


def vacate(session: Session) -> None:
    """Moves idle models off cards that are drained."""
    book = session.ledger.read()
    if not book.drained or not relief.has_leases_on_drained(book, session.me, session.world()):
        return
    release.perform_steps(
        session, "drain", lambda book, world, key: relief.vacate(book, session.me, world, key)
    )


def _reasons(session: Session, staying: list[tuple[Lease, str]]) -> list[str]:
    """One sentence for each lease that is still on the card."""
    book = session.ledger.read()
    now = session.clock()
    sentences = []
    for lease, why in staying:
        owner = book.owner(lease.owner)
        what = f"{lease.name} ({show_bytes(lease.bytes)})"
        if owner and lease.owner != session.me:
            what += f" of {owner.label}"
        pinned = ""
        if lease.pinned_since:
            pinned = f" for {show_seconds(now - lease.pinned_since)}"
        known = {
            "": f"{what} is leaving",
            "in use": f"{what} is in use{pinned} and leaves when it is idle",
            "a block of code": f"{what} is held by running code and leaves when that ends",
            "kept": f"{what} is pinned and stays until it is unpinned",
            "arriving": f"{what} is being loaded and leaves when it is idle",
            MOVE_FAILED: f"{what} could not be moved; its process tries again",
        }
        sentences.append(known.get(why, f"{what} stays: it {why}"))
    return sentences


# -- cancel
#
# A thread whose wait was ended raises WaitEnded when it decides next, and withdraws its own ticket.


def cancel(session: Session, name: str | LeaseId, timeout: str | float | None) -> Outcome:
    """Ends the waits for `name`; see Runtime.cancel."""
    target = _find_wait(session, name)
    if target.owner != session.me:
        return ask_owner(session, "cancel", target, timeout)
    outcome = end_waits(session, target.name, requests.person(session) or THIS_PROCESS)
    requests.note_action(session, "cancel", target.name, outcome.because)
    return outcome


def obey_cancel(session: Session, order: Order) -> Outcome:
    """Ends the waits that another owner's `order` names, if the waits began before the order."""
    ticket = session.ledger.read().ticket(order.key)
    if ticket is None:
        raise GpuError("the request was withdrawn", name=order.name)
    return end_waits(session, order.name, order.who, ticket.arrived)


def end_waits(session: Session, name: str, by: str, before: float | None = None) -> Outcome:
    """Ends this process's waits for `name`; if `before` is given, only those begun by that time.

    `by` is the person or the process that ends the waits. The waiting threads raise WaitEnded. This
    function raises GpuError if there is no such wait.
    """
    ended = 0
    for ticket in _waiting_uses(session, session.me):
        if ticket.name == name and (before is None or ticket.arrived <= before):
            ended += session.keys.end(ticket.key, by)
    if not ended:
        raise GpuError(f"nothing waits for {name} any more", name=name)
    session.ledger.ring([session.me])
    return Outcome("cancel", name, True, f"the wait for {name} was ended")


def _waiting_uses(session: Session, owner: str = "") -> list[Ticket]:
    """The requests that wait for memory, of the owner with the id `owner` or of all owners."""
    tickets = session.ledger.read().tickets
    found = [ticket for ticket in tickets if ticket.verb == "use"]
    return [ticket for ticket in found if not owner or ticket.owner == owner]


def _find_wait(session: Session, name: str | LeaseId) -> LeaseId:
    """Finds the wait for `name`. Returns the waiting owner's id and the name of the wanted model.

    Raises GpuError, AmbiguousName.
    """
    if isinstance(name, LeaseId):
        return name
    bare, process = registry.split_address(name)
    book = session.ledger.read()
    waiting: dict[str, LeaseId] = {}  # by the address, such as qwen@4121
    found: dict[str, LeaseId] = {}
    for ticket in _waiting_uses(session):
        owner = book.owner(ticket.owner)
        if owner is None:
            continue
        address = f"{ticket.name}@{owner.pid}"
        id = LeaseId(owner.id, ticket.name)
        waiting[address] = id
        names = (ticket.name, ticket.name.partition("#")[0])  # a block's name ends with a number
        is_named = bare in names and (not process or process in owner.names)
        if is_named or notebook_has_name(owner.notebook, name):
            found[address] = id
    if len(found) > 1:
        raise AmbiguousName(name, tuple(sorted(found)))
    for id in found.values():
        return id
    these = f"These wait: {', '.join(sorted(waiting))}." if waiting else "No request waits."
    raise GpuError(f"nothing waits for {quoted(name)}. {these}", name=name)


# -- resume, interrupt: signals to a process
#
# A stopped process keeps its memory and answers no request. SIGTERM ends it only after SIGCONT.


def is_stopped(session: Session, book: Book, id: str) -> bool:
    """Whether the process with the owner's `id` in `book` is stopped."""
    return session.ledger.sights(book, [id]).get(id) is Sight.STOPPED


def hint_if_stopped(session: Session, id: str) -> str:
    """Lines with what to type, if the process with the owner's `id` is stopped; else empty."""
    book = session.ledger.read()
    if not is_stopped(session, book, id):
        return ""
    owner = book.sections[id].owner
    return (
        f"\n  {owner.label} is stopped.\n"
        f"  Let it continue:  kill -CONT {owner.pid}      or end it:  kill -9 {owner.pid}"
    )


def resume(session: Session, process: str) -> Outcome:
    """Sends SIGCONT to the stopped `process`, which then runs on from where it was stopped.

    `process` is an owner's id, a pid, or a notebook's file name. For a process that is not stopped,
    nothing is done.

    Raises GpuError if no process of the ledger or more than one has this name, or if a debugger
    keeps the process stopped. Raises NotAllowed if the operating system forbids the signal.
    """
    book = session.ledger.read()
    owner = owner_named(book, process)
    if not is_stopped(session, book, owner.id):
        return Outcome("resume", process, done=True, because=f"{owner.label} is not stopped")
    _send(owner, signal.SIGCONT, "continue")
    if is_stopped(session, book, owner.id):
        raise GpuError(
            f"{owner.label} is still stopped: a debugger keeps it so. Detach the debugger.",
            process=owner.label,
        )
    because = f"{owner.label} runs again"
    by = requests.person(session)
    session.note(Lease(session.me, ""), "resume", "resume", because, by=by)
    return Outcome("resume", process, done=True, because=because)


def interrupt(session: Session, process: str, end: bool) -> Outcome:
    """Sends SIGINT to `process`, which ends its running cell as the stop button does; with `end`, SIGTERM.

    `process` is an owner's id, a pid, or a notebook's file name. Raises GpuError if no process of the
    ledger or more than one has this name, and NotAllowed if the operating system forbids the signal.
    """
    owner = owner_named(session.ledger.read(), process)
    verb, number = ("end", signal.SIGTERM) if end else ("interrupt", signal.SIGINT)
    _send(owner, number, verb)
    because = f"{owner.label} got {number.name}: {'it ends' if end else 'its running cell ends'}"
    session.note(Lease(session.me, ""), "interrupt", verb, because, by=requests.person(session))
    return Outcome("interrupt", process, done=True, because=because)


def _send(owner: Owner, number: signal.Signals, verb: str) -> None:
    """Sends the signal to the process of `owner`, and to no later process with the same pid.

    `verb` is what it does, for the error of a user who may not.
    """
    process = end_of(owner)
    if process is None:
        raise GpuError(f"{owner.label} has ended, or is in another container.", process=owner.label)
    with process:
        try:
            signal.pidfd_send_signal(process.fileno(), number)
        except ProcessLookupError:
            pass  # it has ended just now
        except PermissionError:
            because = f"only {owner.user} and root may {verb} {owner.label}"
            raise NotAllowed(
                f"{because}.\n  As that user or root:  kill -{number.name[3:]} {owner.pid}",
                name="",
                user=owner.user,
                because=because,
            ) from None


def owner_named(book: Book, process: str) -> Owner:
    """The owner in `book` with the id, the pid or the notebook `process`.

    Raises GpuError if no owner has this name, and AmbiguousName if several owners have it.
    """
    owners = [section.owner for section in book.sections.values()]
    found = [owner for owner in owners if process.removeprefix("@") in owner.names]
    if len(found) == 1:
        return found[0]
    if found:
        raise registry.ambiguous_owner(process, found)
    those = registry.instead(process, "Those that do", owners)
    raise GpuError(f"no process {process!r} shares this ledger. {those}", process=process)


# -- evict --lost: owners that are neither proven alive nor proven dead
#
# An owner is unproven if its lock file is missing or was replaced, and its process runs in another
# container or is hidden. No process removes such an owner automatically, because its memory may be
# in use. Messages call its process lost. A person who knows that it has ended can remove it. Owners
# that are proven dead are removed by `maintenance.reap_neighbours` with `scheduler/transitions.reap`.


def evict_lost(session: Session, process: str, *, force: bool) -> Outcome:
    """Lists what the lost process holds. With `force`, ends its leases and reports the freed bytes.

    `process` is the pid of the lost process, as text; a leading `@` is ignored.

    Raises GpuError if no lost process has this pid. With `force`, raises NotAllowed if this user
    neither runs the lost process nor is an operator.
    """
    book = session.ledger.read()
    lost = _lost(session, book, process)
    freed = sum(lease.bytes for section in lost for lease in section.leases)
    holds = "; ".join(_what_it_holds(section) for section in lost)
    if not force:
        because = (
            f"nothing proves that it has ended, or that it lives. {holds}. "
            f"If you know that it has ended:  %gpu evict {process} --lost --force"
        )
        return Outcome(verb="evict", name=process, done=False, because=because)
    for owner in (section.owner for section in lost):
        because = recall.foreign(session.owner.user, "end the leases", "", owner)
        requests.require_allowed(session, owner.user, str(owner.pid), because)
    ids = [section.owner.id for section in lost]
    session.ledger.declare_dead(ids)
    said_by = requests.person(session) or session.owner.user

    def end(book: Book, world: World) -> tuple[Book, None]:
        """The book without these owners. One that by now is proven alive stays in the book."""
        dead = session.ledger.dead(book).intersection(ids)
        return books.reap(book, dead, world, said_by), None

    session.transact(end)
    because = f"its memory counts as free; {show_bytes(freed)} came free. {holds}"
    return Outcome(verb="evict", name=process, done=True, because=because, bytes=freed)


def _lost(session: Session, book: Book, process: str) -> list[Section]:
    """The sections of the lost process with the pid `process`. Raises GpuError if there is none."""
    unknown = session.ledger.unknown(book)
    sections = [section for id, section in book.sections.items() if id in unknown]
    pid = process.removeprefix("@")
    found = [section for section in sections if str(section.owner.pid) == pid]
    if found:
        return found
    known = ", ".join(sorted(section.owner.label for section in sections)) or "none"
    raise GpuError(
        f"process {process} is not lost: it is proven alive or dead, or holds nothing. "
        f"Lost processes: {known}.\n"
        f"  See who holds what:  %gpu status",
        process=process,
    )


def _what_it_holds(section: Section) -> str:
    leases = section.leases
    held = [f"{lease.name} ({show_bytes(lease.bytes)} on {lease.where})" for lease in leases]
    return f"{section.owner.label} holds {', '.join(held) or 'no lease'}"


# -- defrag: frees the allocators' unused memory


def defrag(session: Session, process: str, timeout: str | float | None) -> Outcome:
    """Frees cached memory in `process`, or in all processes to which this user may send requests.

    `timeout` is the limit in seconds for all processes together; None means no limit. A process
    that has not answered within `timeout` frees its cache once its kernel runs again. Raises the
    errors of Runtime.defrag.
    """
    book = session.ledger.read()
    me = session.me
    seconds = None if timeout is None else parse_seconds(timeout)
    owners = _named(session, process, book) if process else _all_owners(session, book)
    sentences = []
    freed = 0
    done = True
    if me in owners:
        freed = empty_cache(session)
        sentences.append(f"{show_bytes(freed)} came free here")
        requests.note_action(session, "defrag", "", sentences[0], freed)
    deadline = session.clock() + (seconds or 0.0)
    for id in dict.fromkeys(owners):
        if id == me:
            continue
        owner = book.sections[id].owner
        if not process and requests.refusal_of_request(session, "defrag", owner, ""):
            continue
        left = None if seconds is None else max(0.0, deadline - session.clock())
        answer = ask_owner(
            session, "defrag", LeaseId(id, ""), left, wait=left != 0.0, must=bool(process)
        )
        freed += answer.bytes
        done = done and (answer.done or not process)
        sentences.append(_sentence(owner, answer))
    return Outcome("defrag", process, done, "; ".join(sentences), freed)


def _sentence(owner: Owner, answer: Outcome) -> str:
    """What `owner` freed, or why its process has not answered."""
    if answer.done:
        return f"{show_bytes(answer.bytes)} came free in {owner.label}"
    # The first sentence of `because` says that the process has not answered. The next sentences
    # describe the process, for example that it is stopped.
    _, _, about = answer.because.partition(". ")
    return about.rstrip(".") or f"{owner.label} has not answered yet"


def empty_cache(session: Session) -> int:
    """Frees the allocator cache of this process and publishes its maps. Returns the freed bytes."""
    freed = session.probe.empty_cache()
    session.maps.publish(at_once=True)
    return freed


def _all_owners(session: Session, book: Book) -> list[str]:
    names = session.ledger.names()
    owners = [id for id, section in book.sections.items() if section.leases or id in names]
    return [*owners, session.me]


def _named(session: Session, process: str, book: Book) -> list[str]:
    """The ids of the owners that `process` names.

    `process` is an owner's id, a pid (also as `@4121`), a notebook, or the name of a model, which
    stands for the model's owner. Raises GpuError, and the errors of `registry.resolve_model`.
    """
    if process in book.sections:
        return [process]
    if notebook := of_notebook(book.sections.values(), process):
        return [section.owner.id for section in notebook]
    number = process.removeprefix("@")
    if not (number.isdigit() or registry.is_notebook(session, process)):
        return [registry.resolve_model(session, process, loadable=True).owner]
    known = [section.owner for section in book.sections.values()]
    owners = [owner.id for owner in known if str(owner.pid) == number]
    if not owners and number != str(os.getpid()):
        those = registry.instead(number, "Those that do", known)
        raise GpuError(
            f"no process {number} shares this ledger's memory. {those}\n  Ask all of them:  %gpu defrag",
            process=number,
        )
    return owners or [session.me]
