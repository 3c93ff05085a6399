"""Room in host memory for leases that leave a card: which shadows are freed, which models unloaded.

Pure. `eviction` chooses the leases that leave. A shadow is an unchanged copy in host memory of a
model on a card. The warm pool is the models in host memory that may be unloaded for a request.
"""

from __future__ import annotations

from ..facts import HOST, Book, Lease, Policy, Request, World
from . import shadows
from .evictable import warm, warm_pool_victims
from .stuck import host_bytes_to_be_had
from .victims import precious_bytes


def may_be_loaded_again(book: Book, request: Request) -> bool:
    """Whether the requested model has bytes in host memory that its source has too."""
    lease = book.lease(request.lease.owner, request.lease.name)
    return lease is not None and lease.droppable and bool(lease.bytes_on(HOST))


def lacks_room(
    book: Book,
    request: Request,
    world: World,
    leaving: tuple[Lease, ...],
) -> bool:
    """Whether the host never has room for the requested model and the leases `leaving` for it."""
    lease = book.lease(request.lease.owner, request.lease.name)
    stays = lease.bytes_on(HOST) if lease else 0
    most = host_bytes_to_be_had(book, world)
    return precious_bytes(leaving) + stays > most


def warm_pool_bytes(
    book: Book,
    request: Request,
    world: World,
    wanted: str,
) -> int:
    """The bytes in host memory of the models that may be unloaded from there for the `request`.

    The lease with the id `wanted` stays.
    """
    pool = warm(
        book,
        world,
        asker=request.lease.owner,
        importance=request.lease.importance,
        wanted=wanted,
    )
    return sum([lease.bytes_on(HOST) for lease in pool])


def leaving_the_host(
    book: Book,
    request: Request,
    world: World,
    rank: Policy,
    leaving: tuple[Lease, ...],
    shadowed: list[Lease],
    host_room: int,
    wanted: str,
) -> tuple[tuple[Lease, ...], tuple[Lease, ...]] | None:
    """The leases that make room in host memory for the leases `leaving` a card.

    Returns two tuples: leases whose shadows are freed, chosen from `shadowed`, and leases that are
    unloaded from host memory. Returns None if they cannot make the room. Host memory has
    `host_room` free bytes. The lease with the id `wanted` stays there.
    """
    kept = {lease.id for lease in leaving if lease.shadow_bytes and shadows.keeps_own(lease)}
    able = [lease for lease in shadowed if lease.id not in kept]
    shortage = precious_bytes(leaving) - host_room
    freed = shadows.enough(able, shortage, world, rank)
    shortage -= shadows.total(freed)

    def unload(shortage: int) -> tuple[Lease, ...] | None:
        """The leases to unload for `shortage` bytes of host memory; None if they are too few."""
        return warm_pool_victims(
            book,
            shortage,
            world,
            rank,
            asker=request.lease.owner,
            importance=request.lease.importance,
            wanted=wanted,
        )

    unloaded = unload(shortage)
    if unloaded is None:
        # A later decision may unload a lease in `leaving` whose shadow becomes its share.
        later = shadows.total([lease for lease in leaving if lease.droppable])
        if not later or unload(shortage - later) is None:
            return None
    return tuple(freed), unloaded or ()
