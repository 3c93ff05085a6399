"""Makes the verdict on a request for which leases are evicted.

Pure. The verdict has the requester's own steps, the recalls of other owners' leases, and sentences.
A recall is a request to another owner to evict its lease. Bytes are free only after the evicted
lease has left. So a request that makes room waits, and its ticket keeps its place in the queue.
`evictable` decides which leases may be evicted. A shadow is an unchanged copy in host memory of a
model that is on a card.
"""

from __future__ import annotations

from functools import partial

from ..facts import (
    HOST,
    Book,
    Candidate,
    Drop,
    Lease,
    Move,
    Policy,
    Step,
    Wait,
    lease_title,
    where,
)
from ..units import show_bytes, show_seconds
from . import shadows
from .context import Context
from .evictable import copied_bytes, eviction_step, leaves_in_words, mark_leaving, warm, worth_less
from .eviction import Way

LOOK_AGAIN_SECONDS = 0.1  # until the next try, if a driver is about to free a dead process's memory
MEASURE_AGAIN_SECONDS = 1.0  # until the next try, if only a new sample shows the freed bytes


def make_room(context: Context, rank: Policy, way: Way) -> tuple[Book, Wait]:
    """The book with the requester's own victims marked as leaving, and a Wait with steps and recalls.

    `way` is the result of `cheapest_way`, which was called with the same `context` and `rank`.
    Other owners see the recall on the ticket of the request.
    """
    book, request, shares = context.book, context.request, way.candidate.shares
    cards = [share.device for share in shares]
    free = sum(max(0, context.room_now[card]) for card in cards)
    has = "has" if len(cards) == 1 else "have"
    size = show_bytes(request.footprint.bytes)
    name = lease_title(request.lease, book.owner(request.lease.owner))
    head = f"{name} needs {size}; {where(shares)} {has} {show_bytes(free)} free."
    if not way.leaving:
        return book, _wait_for_what_left(context, cards, head)
    eviction = _Eviction(context, rank, where(shares), way)
    for lease in way.shadows:
        eviction.free_shadow(lease)
    for lease in way.warm:
        eviction.unload_from_warm_pool(lease)
    # Leases that need host memory leave first, then leases of which only a part leaves.
    for lease in sorted(way.leaving, key=lambda lease: (lease.droppable, not lease.target)):
        if lease.id not in eviction.unloaded:
            eviction.evict(lease)
    return eviction.book, Wait(
        " ".join([head, *eviction.sentences]),
        tuple(eviction.steps),
        tuple(eviction.recalled),
        tuple(eviction.recalled_bytes) if any(eviction.recalled_bytes) else (),
        considered=tuple([_with_cost(one) for one in (way, *way.others)]),
        silent=tuple(id for id in eviction.recalled if id in context.silent),
        shadows=tuple(eviction.recalled_shadows),
    )


def _wait_for_what_left(context: Context, cards: list[str], head: str) -> Wait:
    """The Wait of a request whose missing bytes become free without a further eviction.

    The bytes become free for one of three reasons. Leases are leaving, or the driver has not yet
    freed the memory of a dead process, or the bytes are free and not yet measured.
    """
    book, world = context.book, context.world
    for card in cards:
        if (lease := context.leaving.get(card)) is not None:
            title = lease_title(lease, book.owner(lease.owner))
            return Wait(f"{head} {title} {leaves_in_words(book, lease)}.")
    for ghost in book.ghosts:
        if ghost.device in cards:
            return Wait(
                f"{head} The driver has not yet freed the memory of pid {ghost.pid}, which has ended.",
                retry_at=world.now + LOOK_AGAIN_SECONDS,
            )
    return Wait(
        f"{head} The next measurement will show what was just freed.",
        retry_at=world.now + MEASURE_AGAIN_SECONDS,
    )


class _Eviction:
    """The evictions of one decision: book, steps, recalled leases and sentences."""

    def __init__(self, context: Context, rank: Policy, at: str, way: Way) -> None:
        self.book, self.request = context.book, context.request
        self.world, self.rank, self.context = context.world, rank, context
        self.at = at  # the cards on which room is made, as text
        self.host_room = context.room_now.get(HOST, 0)
        self.steps: list[Step] = []
        self.recalled: list[str] = []  # lease ids of other owners
        self.recalled_bytes: list[int] = []  # of each recalled lease; 0: all
        self.recalled_shadows: list[str] = []
        # Ids of leases that leave host memory. The bytes of such a lease on the cards are freed too.
        self.unloaded: set[str] = set()
        # Ids of leases whose shadows cannot be freed. There are three reasons: the shadow is freed
        # already, the lease leaves its card and needs the shadow, or its owner does not answer.
        needed = [one for one in way.leaving if one.shadow_bytes and shadows.keeps_own(one)]
        self.spared = {lease.id for lease in needed}
        self.spared |= context.silent_shadows
        self.freed_soon = 0  # bytes of shadows that are freed, and that no lease has taken yet
        self.sentences: list[str] = []

    def free_shadow(self, lease: Lease) -> None:
        """Frees the shadow of `lease`; recalls the shadow if the requester does not own `lease`."""
        self.spared.add(lease.id)
        self.freed_soon += lease.shadow_bytes
        copy = f"the copy of {lease.name} in host memory"
        if lease.owner != self.request.lease.owner:
            self.recalled_shadows.append(lease.id)
            self.sentences.append(f"{self._owner(lease)} is asked to free {copy}.")
            return
        because = f"{self.request.lease.name} needs room on {self.at}."
        self.steps.append(shadows.shed(lease, because))
        self.sentences.append(f"{copy[0].upper()}{copy[1:]} is freed.")

    def _title(self, lease: Lease) -> str:
        """The name of `lease` for people; the notebook's name for a kernel's own memory."""
        return lease_title(lease, self.book.owner(lease.owner))

    def unload_from_warm_pool(self, lease: Lease) -> None:
        """Drops `lease` from host memory; recalls it if the requester does not own it."""
        self.unloaded.add(lease.id)
        if lease.owner != self.request.lease.owner:
            self.recalled.append(lease.id)
            self.recalled_bytes.append(0)
            self.sentences.append(
                f"{self._owner(lease)} is asked to unload {self._title(lease)} from the warm pool."
            )
            return
        name = self._title(self.request.lease)
        if lease.id == self.request.lease.id:
            because = f"Host memory has no room for {name} beside the models that leave {self.at}."
            done = "is unloaded from the warm pool, and loaded again then"
        else:
            because = f"The warm pool is full; {name} needs room on {self.at}."
            done = "is unloaded from the warm pool"
        self._leave(Drop(lease.id, lease.shares, because))
        self.sentences.append(f"{self._title(lease)} {done}.")

    def evict(self, lease: Lease) -> None:
        """Moves or drops `lease`, which is on a card; recalls it if the requester does not own it.

        If host memory is too full for `lease`, and room can be made there, this call only makes
        that room. A later decision evicts `lease`.
        """
        name, title = self._title(self.request.lease), self._title(lease)
        size = show_bytes(self.request.footprint.bytes)
        idle = show_seconds(lease.idle_seconds(self.world.now))
        because = f"{name} needs {size} on {self.at}; {title} was idle for {idle}."
        # A process that does not answer may use the lease: it cannot publish that.
        state = "" if lease.id in self.context.silent else f", idle {idle}"
        described = f"{title} ({show_bytes(lease.bytes)}{state})"
        part = lease.leaving_bytes if lease.target else 0
        if part:
            described = f"{show_bytes(part)} of {described}"
        step = eviction_step(lease, self.host_room, self.world, part=part, because=because)
        if isinstance(step, Move):
            self.host_room -= copied_bytes(lease, step)
        elif self._free_host_memory(lease):
            self.sentences.append(f"{described} is moved to the host in their place.")
            return
        if lease.owner != self.request.lease.owner:
            self._recall(lease, described)
        elif step is None:
            self.sentences.append(f"{title} is evicted once the host has room.")
        else:
            self._leave(step)
            done = "offloaded to host" if isinstance(step, Move) else "unloaded"
            self.sentences.append(f"{described} is {done}.")

    def _free_host_memory(self, lease: Lease) -> bool:
        """Makes room for this `lease` in host memory. Returns whether that is possible.

        Frees shadows first, then unloads leases that are worth less in host memory than this
        `lease`. If that is not enough, nothing is freed.
        """
        reach = self.host_room + self.freed_soon
        part = lease.leaving_bytes if lease.target else 0
        if isinstance(eviction_step(lease, reach, self.world, part=part), Move):
            self._take(lease.offload_bytes)
            return True
        found = shadows.room_for(
            self.book,
            lease,
            reach,
            self.world,
            self.rank,
            spared=self.spared,
            renewed=partial(self._worth_less, lease),
        )
        if found is None:
            return False
        for other in found[0]:
            self.free_shadow(other)
        for other in found[1]:
            self.unload_from_warm_pool(other)
        self._take(lease.offload_bytes - sum([other.bytes for other in found[1]]))
        return True

    def _take(self, size: int) -> None:
        """Reserves `size` bytes of host memory for a lease: first the bytes that shadows free."""
        freed = min(max(0, size), self.freed_soon)
        self.freed_soon -= freed
        self.host_room -= max(0, size) - freed

    def _worth_less(self, lease: Lease, host_room: int) -> tuple[Lease, ...]:
        """The leases to unload from host memory for this `lease`, each worth less than `lease`.

        The result is empty if the leases that are worth less are too few, or if one of their owners
        does not answer.
        """
        wanted = self.request.lease
        if (
            lease.owner != wanted.owner
        ):  # the owner that is recalled chooses what it unloads for its lease
            return ()
        pool = warm(
            self.book,
            self.world,
            asker=wanted.owner,
            importance=wanted.importance,
            wanted=wanted.id,
        )
        less = worth_less(pool, lease, host_room, self.world, self.rank)
        return () if any([other.id in self.context.silent for other in less]) else less

    def _recall(self, lease: Lease, described: str) -> None:
        self.recalled.append(lease.id)
        self.recalled_bytes.append(lease.leaving_bytes if lease.target else 0)
        owner, evict = self._owner(lease), f"evict {described}"
        if lease.kind == "kernel":  # its title is the name of its owner
            evict = f"move its memory{described.removeprefix(self._title(lease))} to RAM"
        if lease.id in self.context.silent:
            ticket = self.book.ticket(self.request.key)
            since = show_seconds(self.world.now - ticket.recalled_since) if ticket else ""
            self.sentences.append(
                f"{owner} was asked to {evict}, and has not answered for {since}."
            )
        else:
            self.sentences.append(f"{owner} is asked to {evict}.")

    def _leave(self, step: Move | Drop) -> None:
        self.book = mark_leaving(self.book, step, self.request.key)
        self.steps.append(step)

    def _owner(self, lease: Lease) -> str:
        owner = self.book.owner(lease.owner)
        return owner.label if owner else lease.owner


def _with_cost(way: Way) -> Candidate:
    candidate = way.candidate
    return Candidate(
        candidate.shares,
        candidate.fits,
        candidate.because,
        tuple([lease.id for lease in way.leaving]),
        way.seconds,
        candidate.filled,
        way.worth,
    )
