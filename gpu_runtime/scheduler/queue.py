"""The order of waiting requests, and the inputs of one decision: a request and the room left to it.

Pure. A ticket is the book's entry of a waiting request. The queue is ordered by importance. Among
requests of equal importance, with GPU_FAIRNESS the user is first who has had fewer card-hours; else
the load that serves most waiting users per second. Requests that have waited for long
(`Rules.most_wait`) are before these loads, in order of arrival. A long wait moves a request forward
in the queue. Neither the wait nor the card-hours change which leases the request may evict.

A `Context` only holds the inputs; `admission`, `eviction` and `relief` decide. A recall is a request
to an owner to evict its lease. A shadow is an unchanged copy in host memory of a model on a card.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from msgspec.structs import replace

from ..facts import (
    AGEING_SECONDS,
    CLASSES,
    HOST,
    LEAST_LOAD_SECONDS,
    Book,
    Lease,
    Phase,
    Request,
    Share,
    Shares,
    Ticket,
    World,
    aged_class,
)
from . import caps
from .capacity import freed_since, room_and_blind

# A position in the queue; a lower position is served earlier. Its fields:
# - the importance
# - with GPU_FAIRNESS the user's recent card-hours; 0 without it, and after FAIR_SECONDS of waiting
# - 0 after `Rules.most_wait` seconds of waiting, else 1
# - the number of waiting users, divided by the seconds of the load, with a minus sign
# - the time of arrival, and the key
_Position = tuple[int, float, int, float, float, str]
# After so long a request has aged to the highest class, whatever it began with. Then the past use of
# its user counts no more, and nobody waits for ever for users who have had less.
FAIR_SECONDS = len(CLASSES) * AGEING_SECONDS


def aged(importance: int, waited_seconds: float) -> int:
    """The importance that a request has in the queue: one class higher for each 30 s of waiting.

    `importance` is the request's own importance; lower numbers are more important. `waited_seconds`
    is the time since the request arrived.

    >>> aged(20, 65.0), aged(20, 9.0)
    (5, 20)
    """
    if waited_seconds < AGEING_SECONDS:
        return importance
    return min(importance, CLASSES[max(0, aged_class(importance, waited_seconds))])


def queue(book: Book, world: World) -> tuple[Ticket, ...]:
    """The waiting requests of the `book`, in the order in which they are served at `world.now`."""
    waiting = [ticket for ticket in book.tickets if ticket.verb == "use"]
    users, fair = book.users_waiting(), shares_by_past_use(book)

    def position(ticket: Ticket) -> _Position:
        importance = aged(ticket.importance, world.now - ticket.arrived)
        return _position(ticket, importance, users, fair, world)

    return tuple(sorted(waiting, key=position))


def shares_by_past_use(book: Book) -> bool:
    """Whether all waiting requests state the card-hours of their users.

    Else none is compared by them: with requests that are compared in two ways, each of three could be
    behind another. So a process without GPU_FAIRNESS neither gains nor loses by it.
    """
    return all(ticket.past_use is not None for ticket in book.tickets if ticket.verb == "use")


def requests_ahead(book: Book, request: Request, world: World) -> tuple[Ticket, ...]:
    """The tickets ahead of this `request` in the queue.

    A ticket that was not refreshed lately is skipped, because its process is stopped.
    """
    if not book.tickets:
        return ()
    users, wanted = book.users_waiting(), request.lease
    model = (wanted.owner, wanted.name)
    if book.ticket(request.key) is None:
        users = {**users, model: users.get(model, 0) + request.users}
    past_use = past_use_of(book, request, world)
    fair = past_use is not None
    waiting = Ticket(
        request.key,
        wanted.owner,
        "use",
        wanted.name,
        request.arrived,
        world.now,
        wanted.importance,
        load_seconds(book, request),
        past_use=past_use,
    )
    own_importance = aged(wanted.importance, world.now - request.arrived)
    own = _position(waiting, own_importance, users, fair, world)
    found = []
    for ticket in book.tickets:
        if ticket.verb != "use" or ticket.key == request.key:
            continue
        importance = aged(ticket.importance, world.now - ticket.arrived)
        if importance > own_importance or not world.rules.awake(ticket, world.now):
            continue
        # The rest of the position is computed only if the importance is equal, which is seldom.
        if importance < own_importance or (_position(ticket, importance, users, fair, world) < own):
            found.append(ticket)
    return tuple(found)


def past_use_of(book: Book, request: Request, world: World) -> float | None:
    """The card-hours of the user of `request`, as its ticket states them; None: requests are not compared by them."""
    if world.rules.past_use is None or not shares_by_past_use(book):
        return None
    mine = book.ticket(request.key)
    return mine.past_use if mine else world.rules.past_use


def first_by_past_use(context: Context) -> tuple[Ticket, float] | None:
    """A request ahead whose user has had fewer card-hours, and the hours of the requesting user; or None."""
    request, world = context.request, context.world
    own = past_use_of(context.book, request, world)
    if own is None or world.now - request.arrived >= FAIR_SECONDS:
        return None
    importance = aged(request.lease.importance, world.now - request.arrived)
    for ticket in context.ahead:
        fewer = ticket.past_use is not None and ticket.past_use < own
        if fewer and aged(ticket.importance, world.now - ticket.arrived) == importance:
            return ticket, own
    return None


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
        return round(lease.seconds_to_restore(size) * missing, 1)
    seconds = lease.seconds_to_restore if lease.on_host else lease.seconds_to_load
    return round(seconds(size), 1)


def _position(
    ticket: Ticket, importance: int, users: Mapping[tuple[str, str], int], fair: bool, world: World
) -> _Position:
    """The sort key of the waiting request `ticket`; requests with lower keys are served earlier.

    `importance` is that of the ticket, `aged`. Requests of one importance are ordered by past use if
    `fair`, and then by `users` / seconds: how many waiting users each second of the load serves. The
    largest number is first. Requests that have waited for `Rules.most_wait` seconds are before these.
    """
    waited_seconds = world.now - ticket.arrived
    past_use = ticket.past_use if fair and waited_seconds < FAIR_SECONDS else None
    if waited_seconds >= world.rules.most_wait(ticket.seconds):
        return importance, past_use or 0.0, 0, 0.0, ticket.arrived, ticket.key
    served = users[ticket.owner, ticket.name] / max(ticket.seconds, LEAST_LOAD_SECONDS)
    return importance, past_use or 0.0, 1, -served, ticket.arrived, ticket.key


def may_pass(book: Book, ahead: Ticket, request: Request, world: World) -> bool:
    """Whether the `request` may take room before the request `ahead` of it in the queue.

    In two cases the one ahead cannot use the room now, so the request may take it. In the first
    case, a model in use blocks it. After 30 s in this state, no request may pass it any more. In
    the second case, the requesting thread itself holds leases on a card that it needs.
    """
    blocked_since = ahead.blocked_since
    if blocked_since and world.now - blocked_since < world.rules.passing_seconds:
        return True
    needed = {share.device for share in ahead.need}
    held = book.find_all(request.held)
    return any(share.device in needed for lease in held for share in lease.shares)


# -- the inputs of one decision --------------------------------------------------------------------


Bytes = Mapping[str, int]  # by device id


class Context:
    """The inputs of one decision: book, request, world, free bytes, requests ahead, and limits.

    A lease is in parts if some of its bytes are on a card and the rest in host memory.
    """

    def __init__(
        self, book: Book, request: Request, world: World, never: Container[str] = ()
    ) -> None:
        """The inputs for a decision about this `request`, from the `book` and the `world`.

        `never` has the cards that can never hold the request alone.
        """
        self.book, self.request, self.world = book, request, world
        self.leases = tuple(book.leases())
        self.room_now, self.blind = room_and_blind(book, world)
        self.ahead = requests_ahead(book, request, world)
        self.blocking = self.ahead  # those of them that this request must not pass
        if request.held or any([ticket.blocked_since for ticket in self.ahead]):
            must_not = [other for other in self.ahead if not may_pass(book, other, request, world)]
            self.blocking = tuple(must_not)
        # Maps a card to the bytes that the requested lease has on this card, if the lease is in parts
        # and may return to the card. These bytes need no free room.
        self.held = held_bytes(book, request, never)
        # The leases that the blocking requests have recalled, as in `Ticket.recalls`, and owner and name
        # of those that they wait for.
        self.recalled: dict[str, int] = {}
        self.returning: set[tuple[str, str]] = set()
        # Free bytes once the blocking requests are served, and all leaving and recalled leases have
        # left. Bytes that were freed after the last sample count as free.
        self.room_later = later = dict(self.room_now)
        for ticket in self.blocking:
            self.recalled |= ticket.recalls
            self.returning.add((ticket.owner, ticket.name))
            for share in ticket.need:
                later[share.device] = later.get(share.device, 0) - share.bytes
        for device, size in freed_since(book, world).items():
            later[device] = later.get(device, 0) + size
        soon = self.recalled
        if self.held:  # the requested lease does not count as free, if one ahead recalls it
            soon = {id: size for id, size in soon.items() if id != request.lease.id}
        self.leaving: dict[str, Lease] = {}  # device -> a lease that is leaving it
        for lease in self.leases:
            for share in lease.freed_soon(soon):
                later[share.device] = later.get(share.device, 0) + share.bytes
                self.leaving[share.device] = lease
        # Bytes left under this owner's own limit, and once its leaving models have left; None: no limit
        self.own_left, self.own_left_later = _left_of_own_limit(book, request, world)
        # Ids of recalled idle leases, and of those with recalled shadows, whose owners do not answer
        self.silent, self.silent_shadows = _silent(book.ticket(request.key), self.leases, world)
        # Bytes left under the operator's cap on this user; empty: no cap
        self.cap_left = caps.left(book, world)
        self.cap_left_later = caps.left(book, world, leaving=False)

    @property
    def old(self) -> Lease | None:
        """The lease of the requested model in the book; None if there is none."""
        return self.book.lease(self.request.lease.owner, self.request.lease.name)

    @property
    def is_twin(self) -> bool:
        """Whether an earlier request of the same process makes the room for this model already."""
        return (self.request.lease.owner, self.request.lease.name) in self.returning

    def free(self) -> dict[str, int]:
        """Bytes that the request may use on each card, without the bytes promised to requests ahead.

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


def _left_of_own_limit(book: Book, request: Request, world: World) -> tuple[int | None, int | None]:
    """Bytes left under INFERENCE_MEMORY_LIMIT_GB: now, and once the leaving models have left.

    Both are None if no limit is set, or if the request is not for a model.
    """
    limit = world.rules.limit_bytes
    if limit is None or request.lease.kind != "model":
        return None, None
    section = book.sections.get(request.lease.owner)
    now = later = limit
    for lease in section.leases if section else ():
        size = sum([share.bytes for share in lease.claims() if share.device != HOST])
        if lease.kind == "model":
            now -= size
            later -= 0 if lease.phase is Phase.LEAVING else size
    return now, later


def _silent(
    ticket: Ticket | None, leases: Iterable[Lease], world: World
) -> tuple[frozenset[str], frozenset[str]]:
    """Ids of the idle leases that have not left, and of those that have not given back host memory.

    This `ticket` recalled them, or their shadows. Both are empty until the owner has had
    `answer_seconds` to do it, or to begin to move bytes to a disk.
    """
    if ticket is None or not (ticket.recalls or ticket.shadows):
        return frozenset(), frozenset()
    if world.now - ticket.recalled_since < world.rules.answer_seconds:
        return frozenset(), frozenset()
    here, shadowed = [], []
    for lease in leases:
        id = lease.id
        if id in ticket.shadows and lease.shed_bytes and not lease.stowing:
            shadowed.append(id)
        has_left = lease.away_since > ticket.recalled_since  # the lease, or a part of it
        if (
            id in ticket.recalls
            and lease.phase is Phase.SETTLED
            and not lease.pins
            and not has_left
        ):
            here.append(id)
    return frozenset(here), frozenset(shadowed)
