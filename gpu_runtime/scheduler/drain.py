"""Cards that an operator has drained: no new leases there, and what is idle leaves.

Pure. That a card is drained is a fact of the book, and not of whoever wrote it: it outlives the terminal in which it
was typed. It goes by the card's UUID. Who may write it, the runtime asks; that tensors leave, each owner sees to
itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from ..facts import HOST, Book, Device, Drain, Lease, Move, Phase, Refuse, Request, Step, World
from ..units import show_bytes, show_seconds
from .capacity import room
from .eligibility import eviction_step, mark_leaving, reason_to_stay
from .recall import PERSON
from .transitions import note


def drain(book: Book, device: Device, by: str, world: World) -> Book:
    """The book in which that card is drained; the same book where it is already."""
    if device.key in book.drained:
        return book
    return _told(
        replace(book, drained={**book.drained, device.key: Drain(by, world.wall)}),
        device,
        "drained",
        f"{by} drained {device.id}: it takes no new leases, and what is idle there leaves.",
        world,
        by,
    )


def undrain(book: Book, device: Device, by: str, world: World) -> Book:
    """The book in which that card takes leases again; the same book where it does already."""
    if device.key not in book.drained:
        return book
    left = {key: drained for key, drained in book.drained.items() if key != device.key}
    return _told(
        replace(book, drained=left),
        device,
        "undrained",
        f"{by} lets {device.id} take leases again.",
        world,
        by,
    )


def _told(book: Book, device: Device, action: str, because: str, world: World, by: str) -> Book:
    return note(
        book, world, Lease("", device.id), action, "drain", because, device=device.id, by=by
    )


def drained(book: Book, world: World) -> dict[str, str]:
    """The drained cards, and of each a sentence that says by whom and since when."""
    if not book.drained:
        return {}
    return {
        device.id: f"{device.id} was drained by {found.by} {show_seconds(max(0.0, world.wall - found.wall))} ago"
        for device in world.devices
        if (found := book.drained.get(device.key))
    }


def refusals(request: Request, world: World, sentences: Mapping[str, str]) -> dict[str, Refuse]:
    """Cards on which nothing new is granted because they are drained."""
    size = request.footprint.bytes
    because = (
        f"{request.lease.name} needs {show_bytes(size)}; {', '.join(sentences.values())}, and "
        f"take{'s' if len(sentences) == 1 else ''} no new leases"
    )
    return {
        card: Refuse(
            because,
            kind="drained",
            need_bytes=size,
            budget_bytes=world.limits.get(card, 0),
            device=card,
        )
        for card in sentences
    }


def vacate(book: Book, owner: str, world: World, key: str) -> tuple[Book, tuple[Step, ...]]:
    """What this owner moves off drained cards now: what is idle. What is in use leaves when it is idle, and what is
    kept once it is unpinned."""
    section = book.sections.get(owner)
    cards = drained(book, world)
    if section is None or not cards:
        return book, ()
    steps: list[Step] = []
    host_room = room(book, world).get(HOST, 0)
    for lease in sorted(
        _on(section.leases, cards), key=lambda lease: lease.droppable
    ):  # first what needs host memory
        if reason_to_stay(lease, world, asker=owner, importance=PERSON):
            continue
        card = next(share.device for share in lease.shares if share.device in cards)
        step = eviction_step(lease, host_room, world, because=f"{cards[card]}.", reason="drain")
        if step is None:
            continue
        if isinstance(step, Move):
            host_room -= lease.own_bytes
        book = mark_leaving(book, step, key)
        steps.append(step)
    return book, tuple(steps)


def lies_on(book: Book, owner: str, world: World) -> bool:
    """Whether anything of this owner lies on a drained card."""
    section = book.sections.get(owner)
    return (
        bool(book.drained)
        and section is not None
        and bool(_on(section.leases, drained(book, world)))
    )


def staying(book: Book, card: str, world: World) -> list[tuple[Lease, str]]:
    """What still lies on that card, and why; no reason for what is about to leave."""
    host_room = room(book, world).get(HOST, 0)
    told = []
    for lease in _on(book.leases(), {card: ""}):
        why = reason_to_stay(lease, world, asker=lease.owner, importance=PERSON)
        if why == Phase.LEAVING:
            why = ""
        elif (
            not why
            and lease.phase is Phase.SETTLED
            and eviction_step(lease, host_room, world) is None
        ):
            why = "exists nowhere else, and the host has no room for it"
        told.append((lease, why))
    return told


def _on(leases: Iterable[Lease], cards: Mapping[str, str]) -> list[Lease]:
    return [lease for lease in leases if any(share.device in cards for share in lease.claims())]
