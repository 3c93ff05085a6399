"""Verbs on whole cards: `drain` closes a card, and `defrag` frees the allocators' unused memory.

A drain is a mark in the book, at which every owner moves its idle models off the card.
"""

from __future__ import annotations

import os

from ..attribution import attributed, speaking_for
from ..errors import GpuError, NotAllowed, UnknownDevice
from ..facts import Book, Device, Lease, LeaseId, Outcome, Owner, World, of_notebook
from ..scheduler import relief
from ..scheduler.victims import MOVE_FAILED
from ..units import parse_seconds, show_bytes, show_seconds
from . import operations, registry, release, requests
from .session import Session

LOOK_SECONDS = 0.1  # the pause between two checks which leases are still on the card


def drain(
    session: Session, name: str, *, undo: bool = False, timeout: str | float | None
) -> Outcome:
    """Drains the card `name`. With `undo`, the card takes leases again.

    Waits at most `timeout` seconds for idle models to leave; None means no wait. Raises
    UnknownDevice, NotAllowed, LedgerUnavailable.
    """
    seconds = 0.0 if timeout is None else parse_seconds(timeout)
    book = session.read_book()
    device = _card(name, book, session.world())
    mine = session.owner.user
    if because := requests.refusal_of_drain(session, book):
        raise NotAllowed(f"{because}.", name=device.id, because=because, user=mine)
    user = attributed(speaking_for(), mine)
    world = session.world()
    was_drained = device.key in book.drained
    act = relief.undrain if undo else relief.drain
    session.decide(lambda book, world: (act(book, device, user, world), None))
    if undo:
        said = "takes leases again" if was_drained else "was not drained"
        return Outcome(
            verb="drain --undo",
            name=device.id,
            done=True,
            because=f"{device.id} {said}",
            where=device.id,
        )
    before = [lease for lease, _ in relief.staying(book, device.id, world)]
    session.ledger.ring({lease.owner for lease in before} - {session.me})
    staying = _wait_until_left(session, device, seconds)
    still_there = {lease.id for lease, _ in staying}
    left = [lease for lease in before if lease.id not in still_there]
    freed = sum(lease.bytes_on(device.id) for lease in left)
    said = "is drained already" if was_drained else "is drained: it takes no new leases"
    sentences = [f"{device.id} {said}", *_reasons(session, staying)]
    return Outcome(
        verb="drain",
        name=device.id,
        done=True,
        because=". ".join(sentences),
        bytes=freed,
        where=device.id,
    )


def _card(name: str, book: Book, world: World) -> Device:
    """The card with the id or UUID `name`, which this process or another owner uses."""
    every = (*book.devices, *world.devices)
    known = {device.id: device for device in every if not device.is_host}
    for device in known.values():
        if name in (device.id, device.uuid):
            return device
    raise UnknownDevice(name, tuple(known))


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
    key = session.new_key("drain")
    try:
        steps = session.decide(lambda book, world: relief.vacate(book, session.me, world, key.text))
        for step in steps:
            release.step_aside(session, step, key)
    finally:
        session.done_with(key.note)


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


# -- defrag


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
        owner = book.sections[id].owner if id != me else None
        if owner is None:
            continue
        if not process and requests.refusal_of_request(session, "defrag", owner, ""):
            continue
        left = None if seconds is None else max(0.0, deadline - session.clock())
        answer = operations.ask_owner(
            session, "defrag", LeaseId(id, ""), left, wait=left != 0.0, must=bool(process)
        )
        freed += answer.bytes
        done = done and (answer.done or not process)
        sentences.append(_sentence(owner, answer))
    return Outcome(
        verb="defrag",
        name=process,
        done=done,
        because="; ".join(sentences),
        bytes=freed,
    )


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
    owners = []
    for id, section in book.sections.items():
        if section.leases or id in names:
            owners.append(id)
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
        labels = sorted(owner.label for owner in known)
        raise GpuError(
            f"no process {number} shares this ledger's memory. Those that do: "
            f"{', '.join(labels) or 'none'}.\n"
            f"  Ask all of them:  %gpu defrag",
            process=number,
        )
    return owners or [session.me]
