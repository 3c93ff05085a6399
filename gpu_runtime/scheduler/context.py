"""The inputs of one decision, computed once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..facts import HOST, Book, Lease, Phase, Request, Ticket, World
from . import quotas
from .capacity import freed_since, on_cards, room_and_blind
from .queue import elders, may_pass


class Context(NamedTuple):
    """What one decision stands on, computed once."""

    leases: tuple[Lease, ...]
    now: Mapping[str, int]  # room as it is
    later: Mapping[str, int]  # room once elders have what they need, and what is leaving has left
    leaving: Mapping[str, str]  # device -> name of somebody on the way out of it
    blind: Mapping[str, str]  # device -> why no grant can be made on it
    elders: tuple[Ticket, ...]
    stands: tuple[Ticket, ...]  # those elders that must not be passed
    promised: frozenset[str]  # lease ids that they have asked for
    mine: int | None  # bytes left under this owner's own limit
    mine_later: int | None
    silent: frozenset[
        str
    ]  # lease ids that were asked to leave, could, and have not: their owners do not answer
    allowed: Mapping[
        str, int
    ]  # bytes left under the operator's cap on this user; empty: there is none
    allowed_later: Mapping[str, int]
    ours: frozenset[str]  # ids of all processes that this cap counts together

    @classmethod
    def of(cls, book: Book, request: Request, world: World) -> Context:
        leases = tuple(book.leases())
        now, blind = room_and_blind(book, world)
        before = elders(book, request, world)
        stands = tuple(t for t in before if not may_pass(book, t, request, world))
        promised = frozenset(id for t in stands for id in t.recalls)
        later, leaving = dict(now), {}
        for ticket in stands:
            for share in ticket.need:
                later[share.device] = later.get(share.device, 0) - share.bytes
        for device, size in freed_since(book, world).items():
            later[device] = later.get(device, 0) + size
        for lease in leases:
            if lease.phase is Phase.LEAVING or (promised and lease.id in promised):
                for share in lease.shares:
                    later[share.device] = later.get(share.device, 0) + share.bytes
                    leaving[share.device] = lease.name
        mine = mine_later = None
        limit, owner = world.rules.limit_bytes, request.lease.owner
        if limit is not None and request.lease.kind == "model":
            mine, mine_later = (
                limit - on_cards(book, owner),
                limit - on_cards(book, owner, leaving=False),
            )
        return cls(
            leases,
            now,
            later,
            leaving,
            blind,
            before,
            stands,
            promised,
            mine,
            mine_later,
            _silent(book.ticket(request.key), leases, world),
            quotas.left(book, world),
            quotas.left(book, world, leaving=False),
            quotas.owners_of(book, world.rules.cap.user) if world.rules.cap else frozenset(),
        )

    def free(self) -> dict[str, int]:
        """What the request may take now on each card without taking what an elder was promised."""
        free = {id: min(size, self.later[id]) for id, size in self.now.items() if id != HOST}
        if self.allowed:
            free = {id: min(size, self.allowed.get(id, size)) for id, size in free.items()}
        return (
            free if self.mine is None else {id: min(size, self.mine) for id, size in free.items()}
        )


def _silent(ticket: Ticket | None, leases: tuple[Lease, ...], world: World) -> frozenset[str]:
    if (
        ticket is None
        or not ticket.recalls
        or world.now - ticket.recalled_since < world.rules.answer_seconds
    ):
        return frozenset()
    return frozenset(
        lease.id
        for lease in leases
        if lease.id in ticket.recalls and lease.phase is Phase.SETTLED and not lease.pins
    )
