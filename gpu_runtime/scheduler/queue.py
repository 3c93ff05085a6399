"""Who comes first among those who wait.

Pure. The queue goes by importance, then arrival; waiting raises a request's place in it, never whom it may displace.
"""

from __future__ import annotations

from bisect import bisect_left

from ..facts import IMPORTANCE, Book, Request, Ticket, World

_CLASSES = sorted(IMPORTANCE.values())


def aged(importance: int, waited_seconds: float, world: World) -> int:
    """The importance that a request stands in the queue with: one class more for each 30 s waited.

    >>> from gpu_runtime.facts import Rules
    >>> aged(20, 65.0, World(0, 0, (), {}, rules=Rules()))
    5
    """
    steps = int(waited_seconds // world.rules.ageing_seconds)
    if steps <= 0:
        return importance
    place = bisect_left(_CLASSES, importance)
    return min(importance, _CLASSES[max(0, place - steps)])


def queue(book: Book, world: World) -> tuple[Ticket, ...]:
    """Waiting requests, the first to be served first."""
    waiting = [ticket for ticket in book.tickets if ticket.verb == "use"]
    return tuple(sorted(waiting, key=lambda t: _place(t.importance, t.arrived, t.key, world)))


def elders(book: Book, request: Request, world: World) -> tuple[Ticket, ...]:
    """The tickets that stand before this request. One not refreshed lately (a stopped process) is skipped."""
    if not book.tickets:
        return ()
    mine = _place(request.lease.importance, request.arrived, request.key, world)
    return tuple(
        t
        for t in book.tickets
        if t.verb == "use"
        and t.key != request.key
        and awake(t, world)
        and _place(t.importance, t.arrived, t.key, world) < mine
    )


def _place(importance: int, arrived: float, key: str, world: World) -> tuple[int, float, str]:
    return aged(importance, world.now - arrived, world), arrived, key


def awake(ticket: Ticket, world: World) -> bool:
    """Whether somebody still asks with this ticket, so that room given up for it would be taken."""
    return world.now - ticket.refreshed <= world.rules.refresh_seconds


def may_pass(book: Book, elder: Ticket, request: Request, world: World) -> bool:
    """Whether the request may take room before this elder.

    It may while the elder could not use the room anyway: a model in use stands in its way (for 30 s, then no longer),
    or what stands in its way is held by the very thread that asks.
    """
    if elder.blocked_since and world.now - elder.blocked_since < world.rules.passing_seconds:
        return True
    if not request.held:
        return False
    places = {share.device for share in elder.need}
    held = (book.find(id) for id in request.held)
    return any(share.device in places for lease in held if lease for share in lease.shares)
