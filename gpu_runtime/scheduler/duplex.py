"""Overlaps a model's return from host memory with the departures that make room for the model.

Pure. A departure copies bytes from a card to host memory, and a return copies bytes from host
memory to a card. The bus does both at once. So a large model leaves in stages: after each stage,
the book shows the bytes of that stage as free. A waiting model returns in parts. No part is larger
than the bytes that are free now.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ..facts import (
    HOST,
    Book,
    Grant,
    Lease,
    Move,
    Phase,
    Request,
    Share,
    Shares,
    Value,
    World,
)
from ..units import show_bytes
from .context import Context

MOST_STAGES = 8  # of one departure or return; each stage costs a transaction


def stage_bytes(size: int, piece_bytes: int, least_bytes: int) -> int:
    """The bytes of one stage, if `size` bytes are copied in at most MOST_STAGES stages.

    A stage has at least `least_bytes`. It also has at least `piece_bytes`, because the largest
    piece must fit into one stage.

    >>> stage_bytes(4000, 100, 50), stage_bytes(4000, 700, 50), stage_bytes(4000, 100, 900)
    (500, 700, 900)
    """
    return max(least_bytes, piece_bytes, -(-size // MOST_STAGES))


def departure_stages(lease: Lease, target: Shares, least_bytes: int) -> int:
    """The bytes of one stage when `lease` leaves its card for `target`; 0 if it leaves all at once.

    A lease leaves in stages only if its pieces are copied to host memory. It leaves at once if host
    memory has a copy already, if there would be only one stage, or if `least_bytes` is 0.
    `least_bytes` is the least bytes of a stage.
    """
    size = sum([share.bytes for share in target])
    copied = not (lease.shadow_bytes or lease.copy)
    if not copied or not lease.piece_bytes or lease.kind == "kernel":
        return 0
    if not least_bytes:
        return 0
    if any([share.device != HOST for share in target]):
        return 0
    stage = stage_bytes(size, lease.piece_bytes, least_bytes)
    return stage if size >= 2 * stage else 0


def part_left(book: Book, step: Move, shares: Shares, world: World) -> Book:
    """The book after the first bytes of a leaving lease have left; the rest is still leaving.

    `step` is the whole departure. `shares` are the places of the lease's own bytes now. Waiting
    requests may use the freed bytes at once. The book gets an event only when the last bytes have
    left.
    """
    lease = book.find(step.lease)
    if lease is None or lease.phase is not Phase.LEAVING:
        return book
    in_host = sum([share.bytes for share in shares if share.device == HOST])
    moved = in_host - lease.bytes_on(HOST)
    rest = lease.leaving_bytes - moved
    leaving = replace(
        lease.holding(shares),
        target=(Share(HOST, rest),),
        phase=Phase.LEAVING,
        settled_at=world.now,
        away_since=world.now,
    )
    return book.with_lease(leaving)


def returning_part(context: Context, need: Shares) -> int:
    """The bytes of the requested model that may return now; 0 if no part may return.

    `need` is the room that is being made. At least one piece stays in host memory: the last pieces
    return with the grant of the whole model, which also reserves the working memory.
    """
    lease, request = context.old, context.request
    if not request.stage_bytes or not request.wait:
        return 0
    if lease is None or lease.phase is not Phase.SETTLED or lease.kind == "kernel":
        return 0
    if not lease.piece_bytes or len(need) != 1:
        return 0
    card = need[0].device
    here = lease.bytes_on(card)
    if lease.on_device and here != context.held.get(card):
        return 0  # the other part of the model is on another card
    in_host = lease.bytes_on(HOST)
    free = context.free()[card] - context.held.get(card, 0)
    least = stage_bytes(lease.own_bytes, lease.piece_bytes, request.stage_bytes)
    part = min(free, in_host - lease.piece_bytes)
    return part if part >= least else 0


class Turn(Value):
    """The next step of an exchange in pieces: bytes of the card that another lease gives or that the lease takes."""

    giver: Lease | None  # None: the returning lease takes the bytes
    bytes: int


def exchange(lease: Lease, givers: Sequence[Lease], free: int, host_free: int) -> Turn | None:
    """The next step by which `lease` returns to a card from which `givers` leave, piece by piece.

    Two leases may fill a card and host memory so far that neither has room for a whole copy of the
    other. `free` and `host_free` are the free bytes of the card and of host memory. What one lease
    frees, the other one takes. The result is None if the lease cannot return as a whole like that:
    then no piece moves at all.
    """
    missing = lease.bytes_on(HOST) - free
    if missing <= 0:
        return Turn(None, lease.bytes_on(HOST))
    able = [one for one in givers if one.piece_bytes]
    if sum([one.card_bytes for one in able]) < missing:
        return None
    # With a spare piece of each, one of them always has room for its next piece.
    giver = max(able, key=lambda one: one.card_bytes)
    piece = max([one.piece_bytes for one in able])
    if host_free < missing + piece and free + host_free < lease.piece_bytes + piece:
        return None
    if host_free >= giver.piece_bytes:
        return Turn(giver, min(host_free, missing + giver.piece_bytes - 1, giver.card_bytes))
    return Turn(None, free)


def is_part(lease: Lease) -> bool:
    """Whether only a part of this arriving `lease` returns, and the rest stays in host memory."""
    if not lease.target:
        return False
    shares = lease.filled or lease.target
    coming = sum([share.bytes for share in shares])
    return coming < lease.bytes_on(HOST)


def without(need: Shares, part: int) -> Shares:
    """The room `need`, less the bytes of the `part` of the model that returns now."""
    if not part:
        return need
    [share] = need
    return (Share(share.device, share.bytes - part),)


def grant_part(
    book: Book, request: Request, world: World, need: Shares, part: int, because: str
) -> tuple[Book, Grant]:
    """Grants the return of `part` bytes. The request's ticket stays and waits for the rest.

    `need` is the room that the request still needs, on one card. `because` is the reason of the
    request's Wait, in sentences.
    """
    lease = book.lease(request.lease.owner, request.lease.name)
    assert lease is not None  # a part returns only from host memory
    target = (Share(need[0].device, part),)
    arriving = replace(
        lease,
        key=request.key,
        target=target,
        filled=(),
        phase=Phase.ARRIVING,
        pins=1,
        pinned_since=world.now,
        last_used=world.now,
        importance=request.lease.importance,
    )
    because = f"{because} {show_bytes(part)} of {lease.name} return meanwhile."
    step = Move(lease.id, (Share(HOST, part),), target, because)
    return book.with_lease(arriving), Grant(arriving, (step,), because)
