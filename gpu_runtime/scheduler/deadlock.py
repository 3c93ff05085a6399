"""Whether those who wait can ever be served.

Pure. Threads that each hold a model in use, and wait for room that the other's model takes, would wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..facts import Book, Ticket, World
from .capacity import limit_of


def deadlocked(book: Book, world: World) -> tuple[Ticket, ...]:
    """The waiting requests that can never be served, because their threads hold what each other needs.

    By reduction (cycles in a wait-for graph are not enough where a need may be met in several ways): threads that wait
    for nothing will finish and give back; grant whatever then fits; its thread finishes too; repeat. What remains is
    deadlocked, less those who merely wait behind it and hold nothing that anybody there could use.

    Source: Holt 1972, Some Deadlock Properties of Computer Systems, ACM Computing Surveys 4(3).
    """
    waiting = [ticket for ticket in book.tickets if ticket.verb == "use"]
    if not any(ticket.held for ticket in waiting):
        return ()
    limits = {
        device.id: limit_of(book, world, device.id)
        for device in world.devices
        if not device.is_host
    }
    while waiting:
        stays = _bytes_that_stay(book, waiting)
        remain = [t for t in waiting if not _fits(t, limits, stays)]
        if len(remain) == len(waiting):
            return _who_holds_others_up(book, remain, limits)
        waiting = remain
    return ()


def _bytes_that_stay(book: Book, waiting: Iterable[Ticket]) -> dict[str, int]:
    """Bytes on each device that are kept for good, or held by a thread that itself waits."""
    held = {id for ticket in waiting for id in ticket.held}
    stays: dict[str, int] = {}
    for lease in book.leases():
        if lease.keep or lease.id in held:
            for share in lease.shares:
                stays[share.device] = stays.get(share.device, 0) + share.bytes
    return stays


def _fits(ticket: Ticket, limits: dict[str, int], stays: dict[str, int]) -> bool:
    """Whether the need fits beside what stays, on any cards that would do.

    A ticket knows neither margin nor pieces, so of a divided need this may be a little too hopeful: then it waits.
    """
    size = sum(share.bytes for share in ticket.need)
    left = [max(0, limits[card] - stays.get(card, 0)) for card in _places(ticket, limits)]
    if len(ticket.need) < 2 or not left:
        return size <= max(left, default=0)
    if ticket.layout == "whole":
        left = [limits[card] if not stays.get(card, 0) else 0 for card in _places(ticket, limits)]
    if ticket.layout == "balanced":
        left.sort(reverse=True)
        return any(size <= count * most for count, most in enumerate(left, 1))
    return size <= sum(left)


def _places(ticket: Ticket, limits: Iterable[str]) -> list[str]:
    return [card for card in limits if not ticket.places or card in ticket.places]


def _who_holds_others_up(
    book: Book, stuck: list[Ticket], limits: dict[str, int]
) -> tuple[Ticket, ...]:
    """Those among the stuck who hold bytes on a card that another of the stuck could use."""
    while True:
        guilty = []
        for ticket in stuck:
            wanted = {
                card for other in stuck if other is not ticket for card in _places(other, limits)
            }
            held = (book.find(id) for id in ticket.held)
            if any(share.device in wanted for lease in held if lease for share in lease.shares):
                guilty.append(ticket)
        if len(guilty) == len(stuck):
            return tuple(stuck)
        stuck = guilty
