"""Who may leave a device, and how.

Pure. A lease leaves to the host while the host has room, and for good where its source can bring it back; weights
that exist nowhere else never leave for good.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from ..facts import HOST, Book, Drop, Lease, Move, Phase, Policy, Share, World
from .eviction_policy import victims

MOST_TRIED = 12  # leases of which every combination is tried; beyond it the largest are taken first


def reason_to_stay(lease: Lease, world: World, *, asker: str, importance: int) -> str:
    """Why this lease may not be asked to leave now; empty where it may. The in-use rule knows no exception."""
    if lease.pins:
        return "in use"
    if lease.kind == "block":
        return "a block of code"
    if lease.phase is not Phase.SETTLED:
        return lease.phase.value
    if lease.keep:
        return "kept"
    if lease.importance < importance:
        return "more important"
    now = world.now
    used = (
        lease.last_used if lease.last_used < now else now
    )  # a use may be stamped just after the world was looked at
    if lease.keep_alive and now < used + lease.keep_alive and importance >= lease.importance:
        return "kept alive"
    if lease.owner != asker and now < used + world.rules.grace_seconds:
        return "just used"
    return ""


def eviction_step(
    lease: Lease,
    host_room: int,
    world: World,
    *,
    drop: bool = False,
    because: str = "",
    reason: str = "request",
) -> Move | Drop | None:
    """How this lease leaves its device: to the host where it has room, else for good where its source has it.

    None where neither is possible: weights that exist nowhere else are never dropped.
    """
    size = lease.own_bytes
    moves = can_move(lease, world) and size <= host_room and not lease.on_host
    if lease.droppable and (drop or not moves):
        return Drop(lease.id, lease.shares, because, reason)
    if moves:
        return Move(lease.id, lease.shares, (Share(HOST, size),), because, reason)
    return None


def can_move(lease: Lease, world: World) -> bool:
    """Whether it can lie in host memory at all, were there room; not from a card that has no other memory than that."""
    return lease.movable and world.rules.offload and not _lies_in_host_memory(lease, world)


def _lies_in_host_memory(lease: Lease, world: World) -> bool:
    """Whether it lies on a card whose memory is the host's: moved there it would free nothing."""
    for device in world.devices:
        if device.unified:  # a plain loop: every decision asks this of every lease
            return any(share.device == device.id for share in lease.shares)
    return False


def permanent_reason_to_stay(lease: Lease, world: World, *, held: Sequence[str] = ()) -> str:
    """Why this lease will not make room, however long one waits; empty where it may."""
    if lease.id in held:
        return "is held by the block that asks"
    if lease.kind == "block":
        return ""  # it ends with its cell
    if lease.keep:
        return "is kept on the device (unpin it to let it go)"
    if not lease.droppable and not (
        can_move(lease, world) and lease.own_bytes <= world.limits.get(HOST, 0)
    ):
        if _lies_in_host_memory(lease, world):
            return "exists nowhere else, and lies in the host's memory already"
        return "exists nowhere else, and the host has no room for it"
    return ""


def mark_leaving(book: Book, step: Move | Drop, key: str) -> Book:
    """The book with the step's lease on its way out; its bytes count, on both devices, until that is done."""
    lease = book.find(step.lease)
    assert lease is not None, f"{step.lease} is to leave, but is not in the book"
    target = step.shares if isinstance(step, Move) else ()
    return book.with_lease(replace(lease, phase=Phase.LEAVING, target=target, key=key))


def unfinished_steps(book: Book, owner: str, key: str) -> tuple[Move | Drop, ...]:
    """Steps that were decided under this key and not reported done: the answer may never have been heard."""
    section = book.sections.get(owner)
    again = "This was decided before."
    return tuple(
        Move(lease.id, lease.shares, lease.target, again)
        if lease.target
        else Drop(lease.id, lease.shares, again)
        for lease in (section.leases if section else ())
        if lease.phase is Phase.LEAVING and lease.key == key
    )


# -- the warm pool ------------------------------------------------------------------------------------------------


def warm(book: Book, world: World, *, asker: str, importance: int, owner: str = "") -> list[Lease]:
    """Leases in host memory that may go for good; those of one owner, where one is named."""
    return [
        lease
        for lease in book.leases()
        if lease.on_host
        and lease.droppable
        and (not owner or lease.owner == owner)
        and not reason_to_stay(lease, world, asker=asker, importance=importance)
    ]


def warm_pool_victims(
    book: Book,
    shortage: int,
    world: World,
    rank: Policy,
    *,
    asker: str,
    importance: int,
    owner: str = "",
) -> tuple[Lease, ...] | None:
    """Whom the warm pool gives up so that the host has `shortage` bytes more; None where that is not enough."""
    if shortage <= 0:
        return ()
    return victims(
        {HOST: shortage},
        warm(book, world, asker=asker, importance=importance, owner=owner),
        world,
        rank,
    )


def largest_fitting_set(leases: Iterable[Lease], host_bytes: int) -> tuple[Lease, ...]:
    """Those of them that together fill the host best without passing `host_bytes`."""
    small = sorted(
        (lease for lease in leases if lease.own_bytes <= host_bytes),
        key=lambda lease: -lease.own_bytes,
    )
    if sum(lease.own_bytes for lease in small) <= host_bytes:
        return tuple(small)
    fillings: dict[int, tuple[Lease, ...]] = {0: ()}
    for place, lease in enumerate(small):
        own = lease.own_bytes
        with_it = {
            size + own: (*chosen, lease)
            for size, chosen in fillings.items()
            if size + own <= host_bytes
        }
        if place < MOST_TRIED:
            fillings = {**with_it, **fillings}
        elif max(with_it, default=0) > max(fillings):
            fillings = {max(with_it): with_it[max(with_it)]}
    return fillings[max(fillings)]
