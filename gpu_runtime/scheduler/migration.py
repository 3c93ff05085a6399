"""Moves a model from its cards to other cards on request, without a stay in host memory.

Pure. A move spends only free bytes; nothing is evicted for a move. Until the move is done, the
bytes on the old cards and the bytes reserved on the new cards both count in full. On a card that is
both old and new, the model's bytes therefore count twice.
"""

from __future__ import annotations

from msgspec.structs import replace

from ..facts import (
    Book,
    Footprint,
    Lease,
    Move,
    PlacementRules,
    Refuse,
    Request,
    Share,
    Shares,
    World,
    where,
)
from ..units import show_bytes
from .asks import PERSON
from .context import Context
from .drain import drained
from .evictable import mark_leaving, reason_to_stay
from .placement import place

_NO_CAP = 1 << 62


def move(
    book: Book,
    owner: str,
    name: str,
    footprint: Footprint,
    rules: PlacementRules,
    world: World,
    key: str,
    because: str,
) -> tuple[Book, Move | Refuse | None]:
    """The book with the lease moving to the cards of `rules`, and the step for the move.

    `owner` and `name` identify the lease. `footprint` is the size of the model. `key` identifies
    this decision and is stored in the lease. `because` is the end of the step's sentence.

    The step is None if the lease is on exactly these cards already. A Refuse leaves the book
    unchanged. A Refuse has one of these reasons:

    - The lease is not entirely on cards, is arriving or leaving, or is a block of code.
    - The lease is in use or kept, its last move failed just now, or its backend cannot move it.
    - A card has no room, is drained, capped, or cannot be measured.
    - The model cannot be divided over exactly these cards.
    """
    lease = book.lease(owner, name)
    if lease is None or not lease.all_on_device:
        return book, Refuse(f"{name} is on no card", kind="away")
    if {share.device for share in lease.shares} == set(rules.devices):
        return book, None
    stays = reason_to_stay(lease, world, asker=owner, importance=PERSON)
    if stays:
        kind = "in use" if stays in ("in use", "kept") else "busy"
        return book, Refuse(stays, kind=kind, holders=(lease.id,))
    if not lease.movable:
        fixed = f"{name} cannot be moved: its backend {lease.backend} can only load it again"
        return book, Refuse(fixed, kind="fixed")
    found = _shares(book, lease, footprint, rules, world)
    if isinstance(found, str):
        return book, Refuse(
            f"{name} needs {show_bytes(footprint.bytes)}; {found}",
            need_bytes=footprint.bytes,
            device=rules.devices[0],
            holders=_holders(book, rules.devices),
        )
    step = Move(
        lease.id,
        source=lease.shares,
        shares=found,
        because=f"{name} moved from {lease.where} to {where(found)}, {because}.",
        reason="move",
    )
    return mark_leaving(book, step, key), step


def _shares(
    book: Book,
    lease: Lease,
    footprint: Footprint,
    rules: PlacementRules,
    world: World,
) -> Shares | str:
    """The model's bytes on each card of `rules`, or the reason why these cards cannot hold it."""
    request = Request(
        "",
        replace(lease, target=()),
        footprint,
        world.now,
        rules,
        wait=False,
    )
    context = Context.of(book, request, world)
    blocked = {**drained(book, world), **context.blind}
    for card in rules.devices:
        if card in blocked:
            return blocked[card]
    free = {card: _free_bytes(card, context) for card in rules.devices}
    limits = {card: book.limits.get(card, world.limits.get(card, 0)) for card in rules.devices}
    on_all_cards = [
        candidate
        for candidate in place(footprint, free, rules, limits)
        if {share.device for share in candidate.shares} == set(free)
    ]
    for candidate in on_all_cards:
        if candidate.fits:
            return candidate.shares
    if on_all_cards:
        return on_all_cards[0].because
    cards = where(tuple(Share(card, 1) for card in rules.devices))
    return f"it cannot be divided over {cards}"


def _free_bytes(card: str, context: Context) -> int:
    """Bytes that a move may use on this card: free, within the cap, and not reserved for elders.

    An elder is a request ahead in the queue.
    """
    return min(
        context.room_now.get(card, 0),
        context.room_later.get(card, 0),
        context.cap_left.get(card, _NO_CAP),
    )


def _holders(book: Book, cards: tuple[str, ...]) -> tuple[str, ...]:
    """Ids of the leases on these cards, the largest first."""
    there = []
    for lease in book.leases():
        if any(share.device in cards for share in lease.claims()):
            there.append(lease)
    there.sort(key=lambda lease: -lease.bytes)
    return tuple(lease.id for lease in there)


def parse_cards(text: str) -> tuple[str, ...]:
    """The cards in `text`, separated by commas. A bare number has the kind of the card before it.

    >>> parse_cards("cuda:1"), parse_cards("cuda:0,1"), parse_cards("sim:0, sim:2")
    (('cuda:1',), ('cuda:0', 'cuda:1'), ('sim:0', 'sim:2'))
    """
    cards: list[str] = []
    for part in text.split(","):
        word = part.strip()
        if not word:
            continue
        kind = cards[-1].rpartition(":")[0] if cards and word.isdigit() else ""
        cards.append(f"{kind}:{word}" if kind else word)
    return tuple(dict.fromkeys(cards))
