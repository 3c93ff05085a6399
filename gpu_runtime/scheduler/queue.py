"""The order in which waiting requests are served.

Pure. The queue is ordered by importance, then by arrival. Waiting moves a request forward in the
queue; it never changes which leases the request may evict.
"""

from __future__ import annotations

from bisect import bisect_left

from ..facts import IMPORTANCE, Book, Request, Ticket, World

_CLASSES = sorted(IMPORTANCE.values())


def aged(
    importance: int,
    waited_seconds: float,
    world: World,
) -> int:
    """The importance that a request has in the queue: one class higher for each 30 s waited.

    `importance` is the request's own; lower is more important. `waited_seconds` is the time since
    it arrived.

    >>> from gpu_runtime.facts import Rules
    >>> aged(20, 65.0, World(0, 0, (), {}, rules=Rules()))
    5
    """
    steps = int(waited_seconds // world.rules.ageing_seconds)
    if steps <= 0:
        return importance
    position = bisect_left(_CLASSES, importance)
    raised = _CLASSES[max(0, position - steps)]
    return min(importance, raised)


def queue(book: Book, world: World) -> tuple[Ticket, ...]:
    """The waiting requests of the `book`, the next to be served first; aged at `world.now`."""
    waiting = [ticket for ticket in book.tickets if ticket.verb == "use"]
    waiting.sort(key=lambda ticket: _ticket_position(ticket, world))
    return tuple(waiting)


def elders(
    book: Book,
    request: Request,
    world: World,
) -> tuple[Ticket, ...]:
    """The tickets ahead of this `request` in the queue.

    A ticket that was not refreshed lately is skipped, since its process is stopped.
    """
    if not book.tickets:
        return ()
    own_position = _position(request.lease.importance, request.arrived, request.key, world)
    found = []
    for ticket in book.tickets:
        if ticket.verb != "use" or ticket.key == request.key:
            continue
        if awake(ticket, world) and _ticket_position(ticket, world) < own_position:
            found.append(ticket)
    return tuple(found)


def _ticket_position(ticket: Ticket, world: World) -> tuple[int, float, str]:
    return _position(ticket.importance, ticket.arrived, ticket.key, world)


def _position(
    importance: int,
    arrived: float,
    key: str,
    world: World,
) -> tuple[int, float, str]:
    """The sort key of a request: a lower one is served earlier."""
    waited_seconds = world.now - arrived
    return aged(importance, waited_seconds, world), arrived, key


def awake(ticket: Ticket, world: World) -> bool:
    """Whether the process still refreshes this `ticket`, so that it would take freed room."""
    return world.now - ticket.refreshed <= world.rules.refresh_seconds


def may_pass(
    book: Book,
    elder: Ticket,
    request: Request,
    world: World,
) -> bool:
    """Whether the `request` may take room before this `elder`.

    The `request` may do so in two cases, because the elder cannot use the room now. A model in use
    blocks the elder (for the first 30 s only), or the requesting thread itself holds the leases
    that block the elder.
    """
    blocked_since = elder.blocked_since
    if blocked_since and world.now - blocked_since < world.rules.passing_seconds:
        return True
    if not request.held:
        return False
    needed_devices = {share.device for share in elder.need}
    for lease_id in request.held:
        lease = book.find(lease_id)
        if lease and any(share.device in needed_devices for share in lease.shares):
            return True
    return False
