"""The order in which waiting requests are served. A ticket is the book's entry of such a request.

Pure. The queue is ordered by importance. Among requests of equal importance, the load that serves
most waiting users per second is first. Requests that have waited for long (`Rules.most_wait`) are
before these loads, in order of arrival. A long wait moves a request forward in the queue. The wait never changes which
leases the request may evict.
"""

from __future__ import annotations

from bisect import bisect_left

from msgspec.structs import replace

from ..facts import HOST, IMPORTANCE, Book, Request, Ticket, World
from .eviction_policy import LEAST_SECONDS, seconds_to_load, seconds_to_restore

# A position in the queue; a lower position is served earlier. Its fields:
# - the importance
# - 0 after `Rules.most_wait` seconds of waiting, else 1
# - the number of waiting users, divided by the seconds of the load, with a minus sign
# - the time of arrival, and the key
_Position = tuple[int, int, float, float, str]
_CLASSES = sorted(IMPORTANCE.values())


def aged(
    importance: int,
    waited_seconds: float,
    world: World,
) -> int:
    """The importance that a request has in the queue: one class higher for each 30 s of waiting.

    `importance` is the request's own importance; lower numbers are more important. `waited_seconds`
    is the time since the request arrived.

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
    """The waiting requests of the `book`, in the order in which they are served at `world.now`."""
    waiting = [ticket for ticket in book.tickets if ticket.verb == "use"]
    users = book.users_waiting()
    waiting.sort(key=lambda ticket: _ticket_position(ticket, users, world))
    return tuple(waiting)


def elders(
    book: Book,
    request: Request,
    world: World,
) -> tuple[Ticket, ...]:
    """The tickets ahead of this `request` in the queue.

    A ticket that was not refreshed lately is skipped, because its process is stopped.
    """
    if not book.tickets:
        return ()
    users, wanted = book.users_waiting(), request.lease
    model = (wanted.owner, wanted.name)
    if book.ticket(request.key) is None:
        users = {**users, model: users.get(model, 0) + request.users}
    seconds = load_seconds(book, request)
    own = _position(
        wanted.importance,
        request.arrived,
        request.key,
        users[model],
        seconds,
        world,
    )
    own_importance = own[0]
    now, rules = world.now, world.rules
    found = []
    for ticket in book.tickets:
        if ticket.verb != "use" or ticket.key == request.key:
            continue
        if now - ticket.refreshed > rules.refresh_seconds:  # as `awake`, without a call
            continue
        # The rest of the position is computed only if the importance is equal, which is seldom.
        importance = ticket.importance
        if importance >= own_importance:
            waited_seconds = now - ticket.arrived
            if waited_seconds >= rules.ageing_seconds:
                importance = aged(importance, waited_seconds, world)
            if importance > own_importance:
                continue
        if importance < own_importance or _ticket_position(ticket, users, world) < own:
            found.append(ticket)
    return tuple(found)


def without_grace(world: World, arrived: float, seconds: float) -> World:
    """The `world` for a request of the time `arrived`, whose load takes `seconds`.

    Once the request has waited for `Rules.most_wait` seconds, no grace period protects leases from it.
    Otherwise a process that uses its model every second would keep it for ever.
    """
    rules = world.rules
    if world.now - arrived < rules.most_wait(seconds):
        return world
    return replace(world, rules=replace(rules, grace_seconds=0.0))


def load_seconds(book: Book, request: Request) -> float:
    """Seconds that the load or restore of the requested lease will take; 0 for a block of code.

    The `book` shows whether the lease is in host memory.
    """
    wanted = request.lease
    if wanted.kind == "block":
        return 0.0
    lease = book.lease(wanted.owner, wanted.name) or wanted
    size = request.footprint.bytes
    if lease.in_parts:
        missing = lease.bytes_on(HOST) / lease.bytes
        return round(seconds_to_restore(lease, size) * missing, 1)
    seconds = seconds_to_restore if lease.on_host else seconds_to_load
    return round(seconds(lease, size), 1)


def _ticket_position(ticket: Ticket, users: dict[tuple[str, str], int], world: World) -> _Position:
    return _position(
        ticket.importance,
        ticket.arrived,
        ticket.key,
        users[ticket.owner, ticket.name],
        ticket.seconds,
        world,
    )


def _position(
    importance: int,
    arrived: float,
    key: str,
    users: int,
    seconds: float,
    world: World,
) -> _Position:
    """The sort key of a request; requests with lower keys are served earlier.

    Requests of one importance are ordered by `users` / `seconds`: how many waiting users each
    second of the load serves. The largest number is first. Requests that have waited for
    `Rules.most_wait` seconds are before all other requests of their importance.
    """
    waited_seconds = world.now - arrived
    if waited_seconds >= world.rules.ageing_seconds:
        importance = aged(importance, waited_seconds, world)
    if waited_seconds >= world.rules.most_wait(seconds):
        return importance, 0, 0.0, arrived, key
    if seconds < LEAST_SECONDS:
        seconds = LEAST_SECONDS
    return importance, 1, -users / seconds, arrived, key


def awake(ticket: Ticket, world: World) -> bool:
    """Whether the requesting process still refreshes this `ticket`, and so would use freed room."""
    return world.now - ticket.refreshed <= world.rules.refresh_seconds


def may_pass(
    book: Book,
    elder: Ticket,
    request: Request,
    world: World,
) -> bool:
    """Whether the `request` may take room before this `elder`, a request ahead in the queue.

    In two cases the elder cannot use the room now, so the request may take it. In the first case, a
    model in use blocks the elder. After 30 s in this state, no request may pass the elder any more.
    In the second case, the requesting thread itself holds leases on a card that the elder needs.
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
