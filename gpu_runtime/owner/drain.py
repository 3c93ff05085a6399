"""Closes a card: no new lease is put there, and idle models leave it. A drain is a mark in the book.

Every owner moves its own idle models off a marked card, at the tick of its monitor.
"""

from __future__ import annotations

from ..attribution import attributed, speaking_for
from ..errors import NotAllowed, UnknownDevice
from ..facts import Book, Device, Lease, Outcome, World
from ..scheduler import relief
from ..scheduler.victims import MOVE_FAILED
from ..units import parse_seconds, show_bytes, show_seconds
from . import release, requests
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
        said = "can be used again" if was_drained else "was not drained"
        return Outcome("drain --undo", device.id, True, f"{device.id} {said}", where=device.id)
    before = [lease for lease, _ in relief.staying(book, device.id, world)]
    session.ledger.ring({lease.owner for lease in before} - {session.me})
    staying = _wait_until_left(session, device, seconds)
    still_there = {lease.id for lease, _ in staying}
    left = [lease for lease in before if lease.id not in still_there]
    freed = sum(lease.bytes_on(device.id) for lease in left)
    said = "is drained already" if was_drained else "is drained: it takes no new lease"
    sentences = [f"{device.id} {said}", *_reasons(session, staying)]
    return Outcome("drain", device.id, True, ". ".join(sentences), freed, device.id)


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
    release.decided(
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
