"""Shadows: unchanged copies in host memory of models that are on a card.

Pure. A model with a shadow is evicted without a copy. A shadow never displaces a lease, and shadows
are the first memory of the host to be freed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from msgspec.structs import replace

from ..facts import HOST, Book, Lease, Phase, Policy, Share, Shed, World
from .capacity import room
from .evictable import can_move
from .transitions import shadow_freed

Renewed = Callable[[int], tuple[Lease, ...]]  # host room in bytes -> leases to unload from there


def held(book: Book, *, owner: str = "", spared: Collection[str] = ()) -> list[Lease]:
    """The leases of the `book` whose shadows may be freed now; only those of `owner` if given.

    A shadow may also be freed while its model is in use. The leases with the ids `spared` are left
    out.
    """
    found = []
    for lease in book.leases():
        if not lease.shadow_bytes or lease.phase is not Phase.SETTLED or lease.id in spared:
            continue
        if not owner or lease.owner == owner:
            found.append(lease)
    return found


def total(leases: Iterable[Lease]) -> int:
    """The bytes of the shadows of all `leases` together."""
    return sum([lease.shadow_bytes for lease in leases])


def enough(leases: Iterable[Lease], shortage: int, world: World, rank: Policy) -> list[Lease]:
    """The leases whose shadows are freed to get `shortage` bytes; all `leases` if all are too few.

    The shadows of leases in use are freed first. Then follow the other leases in the reverse of the
    order in which they would leave their cards, by importance and `rank`. A lease that leaves early
    keeps its shadow, because the shadow saves the copy to host memory.
    """

    def key(lease: Lease) -> tuple[bool, int, float, str]:
        return (not lease.pins, lease.importance, -rank(lease, world), lease.id)

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
    """The leases whose shadows are freed, and those that are unloaded, so that `lease` fits on the host.

    The result is None if `lease` fits as it is, or does not fit even afterwards. `host_room` is in
    bytes. `renewed` gives the leases to unload if the shadows are too few. The other parameters are
    those of `held` and `enough`.
    """
    shortage = lease.offload_bytes - host_room
    fits_alone = lease.leaving_bytes <= world.limits.get(HOST, 0)
    if shortage <= 0 or not fits_alone or lease.on_host or not can_move(lease, world):
        return None
    able = held(book, owner=owner, spared={lease.id, *spared})
    short = shortage - total(able)
    unloaded = renewed(host_room + total(able)) if short > 0 else ()
    if short > 0 and not unloaded:
        return None
    freed = sum([other.bytes for other in unloaded])
    return enough(able, shortage - freed, world, rank), unloaded


def shed(lease: Lease, because: str, reason: str = "request", by: str = "") -> Shed:
    """The step that frees the shadow of `lease`. The other arguments are those of the step."""
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
    """The steps by which the owner of `lease` frees its own shadows so that `lease` fits on the host.

    The result is empty if freeing them is not needed, or not enough. `because` and `reason` are put
    into the steps.
    """
    found = room_for(book, lease, host_room, world, rank, owner=lease.owner)
    return tuple([shed(other, because, reason) for other in found[0]]) if found else ()


# -- how a shadow begins and ends ------------------------------------------------------------------


def reserve(
    book: Book, owner: str, name: str, size: int, world: World, copy: str = "", shared: int = 0
) -> tuple[Book, bool]:
    """The book with `size` bytes of the host reserved for the shadow of a lease that is arriving.

    The shadow will be in the shared pages `copy` if they are given. `shared` bytes of these pages
    exist; they are counted already, by the other leases on them. Returns False, and the same book,
    if the host has no room or if a request waits for its memory.
    """
    lease = book.lease(owner, name)
    if lease is None or lease.phase is not Phase.ARRIVING or lease.shares or size <= 0:
        return book, False
    if not (lease.movable and world.rules.offload) or any(one.unified for one in world.devices):
        return book, False
    if any(ticket.shadows for ticket in book.tickets):
        return book, False
    reserved = replace(lease, shadow_bytes=size, copy=copy, copy_bytes=shared, copied_bytes=shared)
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
    """The book with the settled lease and its shadow; without the shadow if the host has no room.

    Also returns whether the lease has a shadow now.
    """
    lease = book.lease(owner, name)
    if lease is None or not lease.shadow_bytes:
        return book, False
    if room(book, world).get(HOST, 0) >= 0:
        return book, True
    return shadow_freed(book, lease.id), False
