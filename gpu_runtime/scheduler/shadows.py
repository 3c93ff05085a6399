"""Shadows: unchanged copies in host memory of models that are on a card.

Pure. The eviction of a model with a shadow copies nothing. A shadow never displaces a lease. When
host memory is short, shadows are freed before any lease is unloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from msgspec.structs import replace

from ..facts import HOST, Book, Lease, Phase, Policy, Share, Shed, World
from .capacity import room
from .evictable import can_move
from .transitions import shadow_freed
from .victims import worth

Renewed = Callable[[int], tuple[Lease, ...]]  # host room in bytes -> leases to unload from there


def held(book: Book, *, owner: str = "", spared: Collection[str] = ()) -> list[Lease]:
    """The leases of the `book` whose shadows may be freed now.

    If `owner` is given, only leases of this owner are returned. A shadow may also be freed while
    its model is in use. The leases with the ids `spared` are left out.
    """
    found = []
    for lease in book.leases():
        if not lease.shadow_bytes or lease.phase is not Phase.SETTLED or lease.id in spared:
            continue
        if not owner or lease.owner == owner:
            found.append(lease)
    return found


def keeps_own(leaving: Lease) -> bool:
    """Whether the shadow of the lease `leaving` must stay, because it becomes the lease's share.

    If only a part of the lease leaves, a shadow of some bytes may lack this part. It is not used
    then, and may be freed for this part.
    """
    return not leaving.target or leaving.offload_bytes < leaving.leaving_bytes


def total(leases: Iterable[Lease]) -> int:
    """The bytes of the shadows of all `leases` together."""
    return sum([lease.shadow_bytes for lease in leases])


def enough(leases: Iterable[Lease], shortage: int, world: World, rank: Policy) -> list[Lease]:
    """The leases whose shadows are freed to get `shortage` bytes; all leases if they are too few.

    The shadows of leases in use are freed first. Of the idle leases, the lease that would leave its
    card last loses its shadow first. So a lease that leaves early keeps its shadow, which saves the
    copy to host memory.
    """

    def key(lease: Lease) -> tuple[bool, int, int, float, str]:
        importance, wished, ranked = worth(lease, world, rank)
        return (not lease.pins, -importance, -wished, -ranked, lease.id)

    chosen: list[Lease] = []
    missing = shortage
    for lease in sorted(leases, key=key):
        if missing <= 0:
            break
        chosen.append(lease)
        missing -= lease.shadow_bytes
    for lease in chosen[:-1]:  # the last shadows may have made the first ones unnecessary
        if missing + lease.shadow_bytes <= 0:
            chosen.remove(lease)
            missing += lease.shadow_bytes
    return chosen


def room_for(
    book: Book,
    lease: Lease,
    host_room: int,
    world: World,
    rank: Policy,
    *,
    owner: str = "",
    spared: Collection[str] = (),
    renewed: Renewed = lambda host_room: (),
) -> tuple[list[Lease], tuple[Lease, ...]] | None:
    """Leases whose shadows are freed, and leases to unload, so that `lease` fits into host memory.

    The result is None if `lease` fits as it is, or if the room cannot be made. `host_room` is the
    host's free bytes. The function `renewed` is called if the shadows are too few. Its parameter is
    the number of bytes that are free once all shadows are freed. It returns the leases to unload.
    All other parameters are as in `held` and `enough`.
    """
    shortage = lease.offload_bytes - host_room
    fits_alone = lease.leaving_bytes <= world.limits.get(HOST, 0)
    if shortage <= 0 or not fits_alone or lease.on_host or not can_move(lease, world):
        return None
    able = held(book, owner=owner, spared={lease.id, *spared} if keeps_own(lease) else spared)
    short = shortage - total(able)
    unloaded = renewed(host_room + total(able)) if short > 0 else ()
    if short > 0 and not unloaded:
        return None
    freed = sum([other.bytes_on(HOST) for other in unloaded])
    return enough(able, shortage - freed, world, rank), unloaded


def shed(lease: Lease, because: str, reason: str = "request", by: str = "") -> Shed:
    """The step that frees the shadow of `lease`. All other arguments are fields of the step."""
    return Shed(lease.id, (Share(HOST, lease.shadow_bytes),), because, reason, by)


def steps_for(
    book: Book,
    lease: Lease,
    host_room: int,
    world: World,
    rank: Policy,
    because: str,
    reason: str,
) -> tuple[Shed, ...]:
    """The steps that free shadows of the lease's owner so that `lease` fits into host memory.

    The result is empty if no shadow needs to be freed, or if freeing all shadows is not enough.
    `because` and `reason` are put into the steps.
    """
    found = room_for(book, lease, host_room, world, rank, owner=lease.owner)
    return tuple([shed(other, because, reason) for other in found[0]]) if found else ()


# -- how a shadow begins and ends ------------------------------------------------------------------


def reserve(
    book: Book, owner: str, name: str, size: int, world: World, copy: str = "", shared: int = 0
) -> tuple[Book, bool]:
    """Reserves `size` bytes of host memory for the shadow of a lease that is arriving.

    Returns the new book and True. Returns the same book and False if the lease is not arriving or
    cannot be offloaded, if the host has no room, or if a request waits for host memory.

    If `copy`, the id of shared pages, is given, the shadow will be in these pages. `shared` bytes
    of the pages exist and are counted already, by other leases that share the pages.
    """
    lease = book.lease(owner, name)
    if lease is None or lease.phase is not Phase.ARRIVING or lease.shares or size <= 0:
        return book, False
    if not (lease.movable and world.rules.offload) or any(one.unified for one in world.devices):
        return book, False
    if any(ticket.shadows for ticket in book.tickets):
        return book, False
    reserved = replace(
        lease,
        shadow_bytes=size,
        copy=copy,
        copy_bytes=shared,
        copied_bytes=shared,
    )
    after = book.with_lease(reserved)
    extra = size - shared + max(0, shared - _largest(book, copy))
    if room(book, world).get(HOST, 0) < extra:
        return book, False
    return after, True


def _largest(book: Book, copy: str) -> int:
    """The bytes that the book counts for the shared pages with the id `copy`."""
    sizes = [lease.shared_bytes for lease in book.leases() if copy and lease.copy == copy]
    return max(sizes, default=0)


def kept(book: Book, owner: str, name: str, world: World) -> tuple[Book, bool]:
    """Returns the book, and whether the settled lease `name` of `owner` keeps its shadow.

    If the host has no room, the lease in the returned book has no shadow.
    """
    lease = book.lease(owner, name)
    if lease is None or not lease.shadow_bytes:
        return book, False
    if room(book, world).get(HOST, 0) >= 0:
        return book, True
    return shadow_freed(book, lease.id), False
