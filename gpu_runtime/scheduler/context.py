"""The inputs of one decision, computed once.

Pure. A `Context` only holds the inputs; `admission`, `eviction` and `migration` decide. A ticket is
the entry of a waiting request. A recall is a request to an owner to evict its lease. A shadow is an
unchanged copy in host memory of a model on a card.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple

from ..facts import HOST, Book, Lease, Phase, Request, Share, Shares, Ticket, World
from . import quotas
from .capacity import freed_since, on_cards, room_and_blind
from .queue import elders, may_pass

Bytes = Mapping[str, int]  # by device id


class Context(NamedTuple):
    """The inputs of one decision: book, request, world, free bytes, requests ahead, and limits.

    An elder is a request ahead in the queue. A lease is in parts if some of its bytes are on a card
    and the rest in host memory.
    """

    book: Book
    request: Request
    world: World
    leases: tuple[Lease, ...]
    room_now: Bytes
    # Free bytes once the blocking elders are served, and all leaving and recalled leases have left.
    # Bytes that were freed after the last sample count as free.
    room_later: Bytes
    leaving: Mapping[str, Lease]  # device -> a lease that is leaving it
    blind: Mapping[str, str]  # device -> why no grant can be made on it
    elders: tuple[Ticket, ...]  # requests ahead in the queue
    blocking_elders: tuple[Ticket, ...]  # the elders that this request must not pass
    twin: Ticket | None  # the blocking elder of the same process for the same model, if any
    recalled: frozenset[str]  # ids of the leases that the blocking elders have recalled
    own_left: int | None  # bytes left under this owner's own limit; None: no limit
    own_left_later: int | None  # the same once its leaving models have left
    silent: frozenset[str]  # ids of recalled idle leases whose owner does not answer
    silent_shadows: frozenset[str]  # ids of leases whose owners do not free the recalled shadows
    cap_left: Bytes  # bytes left under the operator's cap on this user; empty: no cap
    cap_left_later: Bytes
    cap_owners: frozenset[str]  # ids of all processes that this cap counts together
    # Maps a card to the bytes that the requested lease has on this card, if the lease is in parts
    # and may return to the card. These bytes need no free room.
    held: Bytes = {}

    @classmethod
    def of(cls, book: Book, request: Request, world: World, never: Container[str] = ()) -> Context:
        """The inputs for a decision about this `request`, from the `book` and the `world`.

        `never` has the cards that can never hold the request alone.
        """
        leases = tuple(book.leases())
        room_now, blind = room_and_blind(book, world)
        ahead = elders(book, request, world)
        blocking = ahead
        if request.held or any([ticket.blocked_since for ticket in ahead]):
            blocking = tuple([t for t in ahead if not may_pass(book, t, request, world)])
        recalled = frozenset(id for ticket in blocking for id in ticket.recalls)
        held = held_bytes(book, request, never)
        room_later, leaving = _later(
            room_now,
            blocking,
            leases,
            freed_since(book, world),
            request.lease.id if held else "",
        )
        own_left, own_left_later = _left_of_own_limit(book, request, world)
        return cls(
            book=book,
            request=request,
            world=world,
            leases=leases,
            room_now=room_now,
            room_later=room_later,
            leaving=leaving,
            blind=blind,
            elders=ahead,
            blocking_elders=blocking,
            twin=_twin(blocking, request),
            recalled=recalled,
            own_left=own_left,
            own_left_later=own_left_later,
            silent=_silent(book.ticket(request.key), leases, world),
            silent_shadows=_silent_shadows(book.ticket(request.key), leases, world),
            cap_left=quotas.left(book, world),
            cap_left_later=quotas.left(book, world, leaving=False),
            cap_owners=_cap_owners(book, world),
            held=held,
        )

    @property
    def old(self) -> Lease | None:
        """The lease of the requested model in the book; None if there is none."""
        return self.book.lease(self.request.lease.owner, self.request.lease.name)

    def free(self) -> dict[str, int]:
        """Bytes that the request may use on each card, without the bytes promised to elders.

        Bytes that the requested lease has on a card already are part of the result.
        """
        free = {}
        for id, size in self.room_now.items():
            if id == HOST:
                continue
            size = min(size, self.room_later[id])
            if self.cap_left:
                size = min(size, self.cap_left.get(id, size))
            if self.own_left is not None:
                size = min(size, self.own_left)
            free[id] = size + self.held.get(id, 0)
        return free

    def missing(self, shares: Shares) -> Shares:
        """The bytes that the requested lease still needs on each card to be placed as `shares`."""
        if not self.held or len(shares) != 1 or shares[0].device not in self.held:
            return shares
        [share] = shares
        return (Share(share.device, max(0, share.bytes - self.held[share.device])),)


def _twin(ahead: Iterable[Ticket], request: Request) -> Ticket | None:
    """The earlier ticket of the same process for the same model as `request`, or None.

    The earlier request makes the room for the model, so the later request makes none.
    """
    wanted = request.lease
    for ticket in ahead:
        if ticket.name == wanted.name and ticket.owner == wanted.owner:
            return ticket
    return None


def _later(
    room_now: Bytes,
    blocking: Iterable[Ticket],
    leases: Iterable[Lease],
    freed: Bytes,
    returning: str = "",
) -> tuple[dict[str, int], dict[str, Lease]]:
    """Two dictionaries by device: the free bytes after all decided steps, and a lease that leaves.

    `blocking` are the tickets of the elders. `freed` is the result of `freed_since`. `returning` is
    the id of the requested lease if the lease is in parts. If an elder has recalled this lease, the
    bytes of the lease do not count as free.
    """
    room = dict(room_now)
    leaving: dict[str, Lease] = {}
    recalled: dict[str, int] = {}  # lease id -> bytes that should leave; 0: all
    for ticket in blocking:
        for id in ticket.recalls:
            recalled[id] = ticket.bytes_recalled(id)
        for share in ticket.need:
            room[share.device] = room.get(share.device, 0) - share.bytes
    for device, size in freed.items():
        room[device] = room.get(device, 0) + size
    for lease in leases:
        if lease.phase is Phase.LEAVING:
            freed_shares = lease.freed_by(lease.target)
        elif recalled and lease.id in recalled and lease.id != returning:
            part = recalled[lease.id]
            freed_shares = lease.freed_by((Share(HOST, part),)) if part else lease.shares
        else:
            continue
        for share in freed_shares:
            room[share.device] = room.get(share.device, 0) + share.bytes
            leaving[share.device] = lease
    return room, leaving


def held_bytes(book: Book, request: Request, never: Container[str]) -> dict[str, int]:
    """Maps the card to the bytes that the requested lease has on it, if the lease is in parts.

    The result is empty if the lease cannot return to this card: the card is in `never`, the cards
    that can never hold the request alone, or the request is for several cards.
    """
    lease = book.lease(request.lease.owner, request.lease.name)
    rules = request.placement
    if lease is None or not lease.in_parts or rules.layout != "single" or rules.factor:
        return {}
    held = {share.device: share.bytes for share in lease.shares if share.device != HOST}
    return {} if any(card in never for card in held) else held


def _left_of_own_limit(
    book: Book,
    request: Request,
    world: World,
) -> tuple[int | None, int | None]:
    """Bytes left under INFERENCE_MEMORY_LIMIT_GB: now, and once the leaving models have left.

    Both are None if no limit is set, or if the request is not for a model.
    """
    limit = world.rules.limit_bytes
    if limit is None or request.lease.kind != "model":
        return None, None
    owner = request.lease.owner
    now = limit - on_cards(book, owner)
    later = limit - on_cards(book, owner, leaving=False)
    return now, later


def _cap_owners(book: Book, world: World) -> frozenset[str]:
    cap = world.rules.cap
    return quotas.owners_of(book, cap.user) if cap else frozenset()


def _silent(
    ticket: Ticket | None,
    leases: Iterable[Lease],
    world: World,
) -> frozenset[str]:
    """Ids of the idle leases that have not left although this `ticket` recalled them.

    The result is empty until the owner has had `answer_seconds` to answer.
    """
    if ticket is None or not ticket.recalls or not _answers_are_late(ticket, world):
        return frozenset()
    silent = []
    for lease in leases:
        if lease.away_since > ticket.recalled_since:
            continue  # the lease, or a part of it, has left
        if lease.id in ticket.recalls and lease.phase is Phase.SETTLED and not lease.pins:
            silent.append(lease.id)
    return frozenset(silent)


def _silent_shadows(
    ticket: Ticket | None,
    leases: Iterable[Lease],
    world: World,
) -> frozenset[str]:
    """Ids of the leases that still have a shadow although this `ticket` recalled the shadow.

    The owner has had `answer_seconds` to free the shadow.
    """
    if ticket is None or not ticket.shadows or not _answers_are_late(ticket, world):
        return frozenset()
    late = [lease.id for lease in leases if lease.shadow_bytes and lease.id in ticket.shadows]
    return frozenset(late)


def _answers_are_late(ticket: Ticket, world: World) -> bool:
    return world.now - ticket.recalled_since >= world.rules.answer_seconds
