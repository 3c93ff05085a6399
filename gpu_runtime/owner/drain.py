"""`drain`, as it is typed: the fact goes into the book, each owner moves its own, and what stays is told with its
reason."""

from __future__ import annotations

from ..attribution import attributed, speaking_for
from ..errors import NotAllowed, UnknownDevice
from ..facts import Book, Device, Lease, Outcome, World
from ..scheduler import drain as drains
from ..units import show_bytes, show_seconds
from .session import Keeper

LOOK_SECONDS = 0.1


def drain(keeper: Keeper, name: str, *, undo: bool = False, timeout: float) -> Outcome:
    """Drains a card, or lets it take leases again. Waits at most `timeout` seconds for what is idle there to leave.

    Raises UnknownDevice, NotAllowed, LedgerUnavailable.
    """
    book = keeper.look()
    device = _card(name, book, keeper.world())
    if because := keeper.may_drain(book):
        raise NotAllowed(f"{because}.", name=device.id, because=because, user=keeper.owner.user)
    user, world = attributed(speaking_for(), keeper.owner.user), keeper.world()
    before = device.key in book.drained
    act = drains.undrain if undo else drains.drain
    keeper.decide(lambda book, world: (act(book, device, user, world), None))
    if undo:
        told = "takes leases again" if before else "was not drained"
        return Outcome("drain --undo", device.id, True, f"{device.id} {told}", where=device.id)
    there = {lease.id: lease for lease, _ in drains.staying(book, device.id, world)}
    keeper.ledger.ring({lease.owner for lease in there.values()} - {keeper.me})
    left = _until_left(keeper, device, timeout)
    freed = sum(
        _on(lease, device)
        for id, lease in there.items()
        if id not in {lease.id for lease, _ in left}
    )
    said = "is drained already" if before else "is drained: it takes no new leases"
    return Outcome(
        "drain",
        device.id,
        True,
        ". ".join([f"{device.id} {said}", *_told(keeper, left)]),
        freed,
        device.id,
    )


def _card(name: str, book: Book, world: World) -> Device:
    """By its id or its UUID, a card of this process or of anybody's."""
    known = {device.id: device for device in (*book.devices, *world.devices) if not device.is_host}
    for device in known.values():
        if name in (device.id, device.uuid):
            return device
    raise UnknownDevice(name, tuple(known))


def _until_left(keeper: Keeper, device: Device, timeout: float) -> list[tuple[Lease, str]]:
    """What is still there, once all that is free to leave has left or the time is up."""
    deadline = keeper.clock() + timeout
    while True:
        keeper.vacate()
        left = drains.staying(keeper.ledger.read(), device.id, keeper.world())
        if all(why for _, why in left) or keeper.clock() >= deadline:
            return left
        keeper.ledger.wait(LOOK_SECONDS)


def _told(keeper: Keeper, left: list[tuple[Lease, str]]) -> list[str]:
    book, now = keeper.ledger.read(), keeper.clock()
    sentences = []
    for lease, why in left:
        owner = book.owner(lease.owner)
        whose = f" of {owner.label}" if owner and lease.owner != keeper.me else ""
        what = f"{lease.name} ({show_bytes(lease.bytes)}){whose}"
        sentences.append(
            {
                "": f"{what} is leaving",
                "in use": f"{what} is in use{_since(lease, now)} and leaves when it is idle",
                "a block of code": f"{what} is held by running code and goes when that ends",
                "kept": f"{what} is pinned and stays until it is unpinned",
                "arriving": f"{what} was on its way and leaves when it is idle",
            }.get(why, f"{what} stays: it {why}")
        )
    return sentences


def _since(lease: Lease, now: float) -> str:
    return f" for {show_seconds(now - lease.pinned_since)}" if lease.pinned_since else ""


def _on(lease: Lease, device: Device) -> int:
    return sum(share.bytes for share in lease.shares if share.device == device.id)
