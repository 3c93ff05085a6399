"""Room in host memory for leases that leave a card: which shadows are freed, which models unloaded.

Pure. `eviction` chooses the leases that leave. A shadow is an unchanged copy in host memory of a
model on a card. The warm pool is the models in host memory that may be unloaded for a request.
"""

from __future__ import annotations

from ..facts import HOST, Lease, Policy
from . import shadows
from .context import Context
from .evictable import warm
from .stuck import host_bytes_to_be_had
from .victims import precious_bytes, victims


def may_be_loaded_again(context: Context) -> bool:
    """Whether the requested model has bytes in host memory that its source has too."""
    lease = context.old
    return lease is not None and lease.droppable and bool(lease.bytes_on(HOST))


def lacks_room(context: Context, leaving: tuple[Lease, ...]) -> bool:
    """Whether the host never has room for the requested model and the leases `leaving` for it."""
    stays = context.old.bytes_on(HOST) if context.old else 0
    most = host_bytes_to_be_had(context.book, context.world)
    return precious_bytes(leaving) + stays > most


def warm_pool_bytes(context: Context, wanted: str) -> int:
    """The bytes in host memory of the models that may be unloaded from there for the request.

    The lease with the id `wanted` stays.
    """
    return sum([lease.bytes_on(HOST) for lease in _warm(context, wanted)])


def _warm(context: Context, wanted: str) -> list[Lease]:
    lease, book, world = context.request.lease, context.book, context.world
    return warm(book, world, asker=lease.owner, importance=lease.importance, wanted=wanted)


def leaving_the_host(
    context: Context,
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
    freed = shadows.enough(able, shortage, context.world, rank)
    shortage -= shadows.total(freed)

    def unload(shortage: int) -> tuple[Lease, ...] | None:
        """The leases to unload for `shortage` bytes of host memory; None if they are too few."""
        return victims({HOST: shortage}, _warm(context, wanted), context.world, rank)

    unloaded = unload(shortage)
    if unloaded is None:
        # A later decision may unload a lease in `leaving` whose shadow becomes its share.
        later = shadows.total([lease for lease in leaving if lease.droppable])
        if not later or unload(shortage - later) is None:
            return None
    return tuple(freed), unloaded or ()
