"""Finds waiting requests that can never be served.

Pure. In the simplest deadlock, two threads each use a model, and each thread waits for the memory
of the model that the other thread uses. Without this module, both threads would wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..facts import Book, Ticket, World
from .capacity import limit_of


def deadlocked(book: Book, world: World) -> tuple[Ticket, ...]:
    """The waiting requests that can never be served, because their threads block each other.

    `book` holds the tickets (the waiting requests) and the leases; `world` holds the devices and
    their limits. The result is empty if there is no deadlock. A request can often be served in
    several ways, so a cycle in the wait-for graph proves nothing. The test is a reduction instead:

    1. A thread that waits for nothing will finish and release its leases.
    2. Grant every request that fits into the released memory. The thread of each granted request
       will finish too. Repeat this step.
    3. The remaining requests are deadlocked. A request is left out if its thread holds nothing that
       another request could use.

    Source: Holt 1972, Some Deadlock Properties of Computer Systems, ACM Computing Surveys 4(3).
    """
    waiting = [ticket for ticket in book.tickets if ticket.verb == "use"]
    if not any(ticket.held for ticket in waiting):
        return ()
    limits = _card_limits(book, world)
    while waiting:
        held = _bytes_that_stay(book, waiting)
        remaining = [ticket for ticket in waiting if not _fits(ticket, limits, held)]
        if len(remaining) == len(waiting):
            return _blocking_others(book, remaining, limits)
        waiting = remaining
    return ()


def _card_limits(book: Book, world: World) -> dict[str, int]:
    limits = {}
    for device in world.devices:
        if not device.is_host:
            limits[device.id] = limit_of(book, world, device.id)
    return limits


def _bytes_that_stay(book: Book, waiting: Iterable[Ticket]) -> dict[str, int]:
    """Bytes on each device of leases marked `keep`, and of leases that a waiting thread pins."""
    held: set[str] = set()
    for ticket in waiting:
        held.update(ticket.held)
    stays: dict[str, int] = {}
    for lease in book.leases():
        if lease.keep or lease.id in held:
            for share in lease.shares:
                stays[share.device] = stays.get(share.device, 0) + share.bytes
    return stays


def _fits(
    ticket: Ticket,
    limits: dict[str, int],
    stays: dict[str, int],
) -> bool:
    """Whether the `ticket` fits on its allowed cards, beside the bytes that stay on the cards.

    A ticket records neither the safety margin nor the pieces of the model. So the answer may be too
    optimistic for a model on several cards. A too optimistic answer has one effect: the request
    waits although it could be refused.
    """
    size = sum(share.bytes for share in ticket.need)
    cards = _allowed_cards(ticket, limits)
    free = []
    for card in cards:
        left = limits[card] - stays.get(card, 0)
        free.append(max(0, left))
    if len(ticket.need) < 2 or not free:
        return size <= max(free, default=0)
    if ticket.layout == "whole":
        empty = [card for card in cards if not stays.get(card, 0)]
        free = [limits[card] for card in empty]
    if ticket.layout == "balanced":
        return _fits_in_equal_shares(size, free)
    return size <= sum(free)


def _fits_in_equal_shares(size: int, free: list[int]) -> bool:
    """Whether `size` bytes, divided equally over some of the cards, fit into their free bytes."""
    largest_first = sorted(free, reverse=True)
    for count, smallest in enumerate(largest_first, start=1):
        if size <= count * smallest:
            return True
    return False


def _allowed_cards(ticket: Ticket, limits: Iterable[str]) -> list[str]:
    return [card for card in limits if not ticket.places or card in ticket.places]


def _blocking_others(
    book: Book,
    stuck: list[Ticket],
    limits: dict[str, int],
) -> tuple[Ticket, ...]:
    """The requests in `stuck` whose threads block another request in `stuck`.

    A thread blocks another request if it holds bytes on a card that the request could use.
    """
    while True:
        blocking = [ticket for ticket in stuck if _blocks_another(book, ticket, stuck, limits)]
        if len(blocking) == len(stuck):
            return tuple(stuck)
        stuck = blocking


def _blocks_another(
    book: Book,
    ticket: Ticket,
    stuck: list[Ticket],
    limits: dict[str, int],
) -> bool:
    wanted: set[str] = set()
    for other in stuck:
        if other is not ticket:
            wanted.update(_allowed_cards(other, limits))
    for lease_id in ticket.held:
        lease = book.find(lease_id)
        if lease and any(share.device in wanted for share in lease.shares):
            return True
    return False
