"""Cards that an operator has drained: they take no new leases, and their idle models leave.

Pure. The mark of a drained card is stored in the book (all leases and requests of a host) under the
card's UUID. The mark belongs to no owner. So the drain continues after the terminal in which the
operator typed the command is closed. `owner/drain.py` checks whether a user may drain a card. Each
owner moves its own tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from ..facts import (
    HOST,
    Book,
    Device,
    Drain,
    Lease,
    Move,
    Phase,
    Refuse,
    Request,
    Step,
    World,
)
from ..units import show_bytes, show_seconds
from . import shadows
from .asks import PERSON
from .capacity import room
from .evictable import (
    copied_bytes,
    eviction_step,
    mark_leaving,
    needs_host_room,
    reason_to_stay,
)
from .eviction_policy import lru
from .transitions import note


def drain(book: Book, device: Device, by: str, world: World) -> Book:
    """The book with `device` marked as drained; the same book if `device` is drained already.

    `by` is the user who drains the device.
    """
    if device.key in book.drained:
        return book
    marks = {**book.drained, device.key: Drain(by, world.wall)}
    because = f"{by} drained {device.id}: it takes no new leases, and its idle models leave."
    return _noted(
        replace(book, drained=marks),
        world,
        device,
        "drained",
        because,
        by,
    )


def undrain(book: Book, device: Device, by: str, world: World) -> Book:
    """The book without the mark that `device` is drained; the same book if there is no mark.

    `by` is the user who ends the drain.
    """
    if device.key not in book.drained:
        return book
    marks = {key: mark for key, mark in book.drained.items() if key != device.key}
    because = f"{by} ended the drain of {device.id}: it takes leases again."
    return _noted(
        replace(book, drained=marks),
        world,
        device,
        "undrained",
        because,
        by,
    )


def _noted(book: Book, world: World, device: Device, action: str, because: str, by: str) -> Book:
    lease = Lease("", device.id)
    return note(
        book,
        world,
        lease,
        action,
        "drain",
        because,
        device=device.id,
        by=by,
    )


def drained(book: Book, world: World) -> dict[str, str]:
    """Maps each drained card of `world` to a sentence: who drained the card, and when."""
    sentences = {}
    for device in world.devices if book.drained else ():
        mark = book.drained.get(device.key)
        if mark is None:
            continue
        ago = show_seconds(max(0.0, world.wall - mark.wall))
        sentences[device.id] = f"{device.id} was drained by {mark.by} {ago} ago"
    return sentences


def refusals(
    request: Request,
    world: World,
    sentences: Mapping[str, str],
) -> dict[str, Refuse]:
    """The refusal of `request` on each drained card. `sentences` is the result of `drained`."""
    size = request.footprint.bytes
    take = "takes" if len(sentences) == 1 else "take"
    because = (
        f"{request.lease.name} needs {show_bytes(size)}; {', '.join(sentences.values())}, "
        f"and {take} no new leases"
    )
    found = {}
    for card in sentences:
        found[card] = Refuse(
            because,
            kind="drained",
            need_bytes=size,
            budget_bytes=world.limits.get(card, 0),
            device=card,
        )
    return found


def vacate(
    book: Book,
    owner: str,
    world: World,
    key: str,
) -> tuple[Book, tuple[Step, ...]]:
    """The book in which idle models of `owner` leave drained cards, and the steps to carry out.

    A model in use leaves at a later call, once it is idle. A model marked `keep` leaves once the
    mark is removed. If host memory is too full for a model, the steps may free shadows (copies in
    host memory of models on a card). The model then leaves at a later call. `key` identifies this
    decision and is stored in the leaving leases.
    """
    cards = drained(book, world)
    section = book.sections.get(owner)
    if section is None or not cards:
        return book, ()
    steps: list[Step] = []
    host_room = room(book, world).get(HOST, 0)
    for lease in _those_that_need_the_host_first(_on(section.leases, cards)):
        if reason_to_stay(lease, world, asker=owner, importance=PERSON):
            continue
        card = next(share.device for share in lease.shares if share.device in cards)
        step = eviction_step(
            lease,
            host_room,
            world,
            because=f"{cards[card]}.",
            reason="drain",
        )
        copies: tuple[Step, ...] = ()
        if not isinstance(step, Move):  # if shadows are freed, this lease leaves at a later call
            copies = shadows.steps_for(
                book, lease, host_room, world, lru, f"{cards[card]}.", "drain"
            )
            steps += copies
        if step is None or copies:
            continue
        host_room -= copied_bytes(lease, step)
        book = mark_leaving(book, step, key)
        steps.append(step)
    return book, tuple(steps)


def has_leases_on_drained(book: Book, owner: str, world: World) -> bool:
    """Whether `owner` has a lease on a drained card."""
    section = book.sections.get(owner)
    if section is None or not book.drained:
        return False
    return bool(_on(section.leases, drained(book, world)))


def staying(book: Book, card: str, world: World) -> list[tuple[Lease, str]]:
    """The leases still on `card`, each with the reason why it stays.

    The reason is empty for a lease that can leave.
    """
    host_room = room(book, world).get(HOST, 0)
    found = []
    for lease in _on(book.leases(), {card: ""}):
        found.append((lease, _why_it_stays(lease, host_room, world)))
    return found


def _why_it_stays(lease: Lease, host_room: int, world: World) -> str:
    why = reason_to_stay(lease, world, asker=lease.owner, importance=PERSON)
    if why == Phase.LEAVING:
        return ""
    if why or lease.phase is not Phase.SETTLED:
        return why
    if eviction_step(lease, host_room, world) is None:
        return needs_host_room(lease)
    return ""


def _those_that_need_the_host_first(leases: Iterable[Lease]) -> list[Lease]:
    """The `leases`; those that cannot be dropped are first, because they need host memory."""
    return sorted(leases, key=lambda lease: lease.droppable)


def _on(leases: Iterable[Lease], cards: Mapping[str, str]) -> list[Lease]:
    """The leases that claim memory on any of the cards; `cards` has the ids of cards as keys."""
    return [lease for lease in leases if any(share.device in cards for share in lease.claims())]
