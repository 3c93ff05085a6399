"""A model goes from its cards to others at somebody's word, without leaving them in between.

Pure. Only free bytes are spent: nobody steps aside for a move. What is reserved on the new cards, and what lies on the
old ones, both count in full until it is done, also where the same card is among both.
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
    World,
    where,
)
from ..units import show_bytes
from .context import Context
from .drain import drained
from .eligibility import mark_leaving, reason_to_stay
from .placement import place
from .recall import PERSON


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
    """The book with the lease on its way to the cards that the rules name, and the step to take.

    None where it lies on just these cards already. Refused, nothing touched: in use, kept, a block of code; no room
    there, or a card that is drained, capped, or cannot be seen; a model that cannot be cut so.
    """
    lease = book.lease(owner, name)
    if lease is None or not lease.on_device:
        return book, Refuse(f"{name} is on no card", kind="away")
    if {share.device for share in lease.shares} == set(rules.devices):
        return book, None
    if why := reason_to_stay(lease, world, asker=owner, importance=PERSON):
        return book, Refuse(
            why, kind="in use" if why in ("in use", "kept") else "busy", holders=(lease.id,)
        )
    if not lease.movable:
        return book, Refuse(
            f"{name} cannot be moved: its backend {lease.backend} can only load it again",
            kind="fixed",
        )
    shares, why = _shares(book, lease, footprint, rules, world)
    if why:
        return book, Refuse(
            f"{name} needs {show_bytes(footprint.bytes)}; {why}",
            need_bytes=footprint.bytes,
            device=rules.devices[0],
            holders=_holders(book, rules.devices),
        )
    step = Move(
        lease.id,
        lease.shares,
        shares,
        f"{name} went from {lease.where} to {where(shares)}, {because}.",
        "move",
    )
    return mark_leaving(book, step, key), step


def _shares(
    book: Book, lease: Lease, footprint: Footprint, rules: PlacementRules, world: World
) -> tuple[tuple[Share, ...], str]:
    """What it would take of each of these cards; or why it cannot."""
    request = Request("", replace(lease, target=()), footprint, world.now, rules, wait=False)
    ground = Context.of(book, request, world)
    blocked = {**drained(book, world), **ground.blind}
    if why := next((blocked[card] for card in rules.devices if card in blocked), ""):
        return (), why
    free = {
        card: min(
            ground.now.get(card, 0), ground.later.get(card, 0), ground.allowed.get(card, 1 << 62)
        )
        for card in rules.devices
    }
    limits = {card: book.limits.get(card, world.limits.get(card, 0)) for card in rules.devices}
    whole = [
        c
        for c in place(footprint, free, rules, limits)
        if {share.device for share in c.shares} == set(free)
    ]
    if any(candidate.fits for candidate in whole):
        return next(candidate.shares for candidate in whole if candidate.fits), ""
    if whole:
        return (), whole[0].because
    return (), f"it cannot be divided over {where(tuple(Share(card, 1) for card in rules.devices))}"


def _holders(book: Book, cards: tuple[str, ...]) -> tuple[str, ...]:
    """Ids of the leases there, the largest first."""
    there = [
        lease for lease in book.leases() if any(share.device in cards for share in lease.claims())
    ]
    return tuple(lease.id for lease in sorted(there, key=lambda lease: -lease.bytes))


def asked_for(text: str) -> tuple[str, ...]:
    """The cards that somebody named: one, or several of a kind.

    >>> asked_for("cuda:1"), asked_for("cuda:0,1"), asked_for("sim:0, sim:2")
    (('cuda:1',), ('cuda:0', 'cuda:1'), ('sim:0', 'sim:2'))
    """
    cards: list[str] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        kind = cards[-1].rpartition(":")[0] if cards and word.isdigit() else ""
        cards.append(f"{kind}:{word}" if kind else word)
    return tuple(dict.fromkeys(cards))
