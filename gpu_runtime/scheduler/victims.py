"""Finds the leases to evict when room is needed: one search, then one look for what may stay.

Pure. Leases are ordered by importance, then by the wishes of a fleet, then by the rank that a
policy of `eviction_policy` gives, then by their last use. They are taken in this order until the
room is enough; then each lease, or piece of a lease, that is not needed stays, the last one first.
`evictable` decides which leases may be evicted at all. A lease with a target leaves only in part:
the target has the pieces of the model that leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from ..facts import HOST, Lease, Policy, Share, World

MOST_FIRST = 8  # ways to cut leases that are tried

Bytes = Mapping[str, int]  # by device id


def victims(
    need: Bytes,
    idle: Iterable[Lease],
    world: World,
    rank: Policy,
) -> tuple[Lease, ...] | None:
    """The leases to evict to free `need` bytes on each device; None if all together are not enough.

    The `idle` leases with the lowest `worth` in this `world` are chosen first.
    """
    return first_enough(eviction_order(idle, world, rank), Room.that_lacks(need))


def eviction_order(
    idle: Iterable[Lease],
    world: World,
    rank: Policy,
) -> list[Lease]:
    """The `idle` leases in order: by `worth` in this `world`, then by last use, then by name."""

    def key(lease: Lease) -> tuple[tuple[int, int, float], float, str, str]:
        return (worth(lease, world, rank), lease.last_used, lease.owner, lease.name)

    return sorted(idle, key=key)


def worth(lease: Lease, world: World, rank: Policy) -> tuple[int, int, float]:
    """How much the `lease` is worth; the lease with the lowest worth leaves first.

    Compared are its importance, then how much a fleet wishes it, then its `rank` in this `world`.
    """
    return (-lease.importance, lease.wished, rank(lease, world))


# -- the search -----------------------------------------------------------------------------------


class Room:
    """The bytes that are free on each device, while leases are tentatively evicted."""

    def __init__(
        self,
        free: Bytes,
        *,
        cap_left: Bytes | None = None,
        cap_owners: frozenset[str] = frozenset(),
        owner: str | None = None,
        own_left: int = 0,
    ) -> None:
        self.free = dict(free)
        self.missing = -sum(self.free.values())  # above 0: the devices together have too few bytes
        self.holds: Callable[[Bytes], bool] = _all_are_free  # whether these bytes are enough
        self.cap_left = dict(cap_left or {})  # bytes left under the operator's cap; empty: no cap
        self.cap_owners = cap_owners  # the owners whose bytes count under this cap
        self.owner = owner  # the owner that has a limit of its own, if the requester has one
        self.own_left = own_left  # bytes left under this limit
        self.own_need = 0  # bytes that the new model claims of `own_left`
        self.limited = bool(self.cap_left) or owner is not None

    @classmethod
    def that_lacks(cls, need: Bytes) -> Room:
        """A room that is enough once `need` bytes more are free on each device."""
        return cls({device: -size for device, size in need.items() if size > 0})

    def usable(self) -> Bytes:
        """The usable bytes of each card, within the operator's cap. Do not change the result."""
        if not self.cap_left:
            return self.free
        return {card: min(size, self.cap_left[card]) for card, size in self.free.items()}

    def enough(self) -> bool:
        """Whether the model fits now. One plan calls this function some hundred times."""
        if self.missing > 0:
            return False
        if not self.limited:
            return self.holds(self.free)
        return not self.above_own_limit and self.holds(self.usable())

    @property
    def above_own_limit(self) -> bool:
        """Whether the new model would exceed the memory limit of its owner."""
        return self.owner is not None and self.own_left < self.own_need

    def gains(self, lease: Lease) -> bool:
        """Whether evicting this `lease` helps."""
        if self.above_own_limit and lease.owner == self.owner:
            return True
        for share in lease.shares:  # a plain loop: it runs for every set of cards and every lease
            if share.device in self.free:
                return True
        return False

    def let_go(self, lease: Lease, times: int = 1) -> int:
        """Counts the `lease` as evicted, and returns the bytes that the cards gain.

        If `times` is -1, the lease is counted as back on its cards. If the lease has a target, only
        the bytes in the target are evicted.
        """
        free, gained = self.free, 0
        for share in lease.freed_by(lease.target) if lease.target else lease.shares:
            device = share.device
            if device in free:
                size = times * share.bytes
                free[device] += size
                gained += size
        self.missing -= gained
        if self.limited:
            self._raise_limits(lease, times)
        return gained

    def _raise_limits(self, lease: Lease, times: int) -> None:
        """Adds the bytes of the evicted `lease` to the limits under which the lease counts.

        `cap_left` grows if the operator's cap counts the lease's owner; `own_left` grows if the
        requester owns the lease.
        """
        if self.cap_left and lease.owner in self.cap_owners:
            for share in lease.freed_by(lease.target) if lease.target else lease.shares:
                if share.device in self.free:
                    self.cap_left[share.device] += times * share.bytes
        if lease.owner == self.owner:
            self.own_left += times * freed_bytes(lease)

    def gain(self, lease: Lease) -> int:
        """The bytes that this `lease` has on the devices of this room."""
        return sum([share.bytes for share in lease.shares if share.device in self.free])

    def all_go(self, leases: Iterable[Lease], times: int = 1) -> None:
        """Counts all these `leases` as evicted. If `times` is -1, they are back on their cards."""
        for lease in leases:
            self.let_go(lease, times)


def _all_are_free(free: Bytes) -> bool:
    return min(free.values(), default=0) >= 0


def first_enough(
    order: Iterable[Lease], room: Room, host: PartsRoom | None = None
) -> tuple[Lease, ...] | None:
    """The first leases of `order` that make the `room` enough, without those that need not leave.

    If `host` is given, a lease may leave in part, and `host` is the host memory for such parts.
    After the call, the returned leases have left the room. The result is None if all leases
    together are too few; then all of them have left the room.
    """
    taken: list[tuple[Lease, int]] = []
    for lease in order:
        if room.missing <= 0 and room.enough():
            break
        freed = room.let_go(lease)
        if freed or lease.owner == room.owner:
            taken.append((lease, freed))
    else:  # all have left
        if not room.enough():
            return None
    return _without_needless(taken, room, host or PartsRoom(0, 0), may_cut=host is not None)


def _without_needless(
    taken: Sequence[tuple[Lease, int]], room: Room, host: PartsRoom, *, may_cut: bool
) -> tuple[Lease, ...]:
    """The leases that must leave, each with only the pieces that must leave.

    `taken` has the leases that have left the `room`, and the bytes that each of them freed. The
    last leases are worth most, so they are put back first. A lease leaves as a whole if host memory
    cannot take its pieces.
    """
    precious = precious_bytes([lease for lease, _ in taken]) if may_cut else 0
    free, most = host.free - precious, host.most - precious
    leaving: list[Lease] = []
    for lease, freed in reversed(taken):
        reserved = used = 0 if lease.droppable else lease.offload_bytes
        stays = False
        if room.missing + freed <= 0:  # else the devices together would have too few bytes
            room.let_go(lease, times=-1)
            stays = room.enough()
            if not stays:
                room.let_go(lease)
        if stays:
            used = 0
        elif may_cut and lease.piece_bytes:
            part = _smallest_part(lease, room)
            if part.target:
                size = part.offload_bytes
                if size <= (free if lease.droppable else most + reserved):
                    room.let_go(lease, times=-1)
                    room.let_go(part)
                    lease, used = part, size
        if not stays:
            leaving.append(lease)
        free += reserved - used
        if reserved:
            most += reserved - used
    leaving.reverse()
    return tuple(leaving)


def _smallest_part(lease: Lease, room: Room) -> Lease:
    """The `lease` with a target: the fewest pieces that make the `room`, which it has left, enough."""
    room.let_go(lease, times=-1)
    piece = lease.piece_bytes
    working = sum([share.bytes for share in lease.shares]) - lease.card_bytes if lease.filled else 0
    low = max(1, -(-(room.missing - working) // piece))
    high = -(-lease.leaving_bytes // piece)  # pieces that are always enough
    middle = low  # usually enough, because only the bytes of one card are missing
    while low < high:
        part = part_of(lease, working + middle * piece)
        room.let_go(part)
        found = room.enough()
        room.let_go(part, times=-1)
        if found:
            high = middle
        else:
            low = middle + 1
        middle = (low + high) // 2
    room.let_go(lease)
    return part_of(lease, working + high * piece)


# -- leases that leave in part ---------------------------------------------------------------------


class PartsRoom(NamedTuple):
    """The bytes of host memory that parts of leases may take."""

    free: int
    # The room for weights that exist nowhere else: `free`, and the bytes that shadows and unloaded
    # leases give up for such weights.
    most: int


def precious_bytes(leases: Iterable[Lease]) -> int:
    """Bytes of the `leases` that exist nowhere else, and that therefore need room in host memory."""
    return sum([lease.offload_bytes for lease in leases if not lease.droppable])


def freed_bytes(leaving: Lease) -> int:
    """How many bytes become free on cards when the lease `leaving` leaves.

    If the lease has a target, only the bytes in the target leave; else all its bytes.
    """
    freed = leaving.freed_by(leaving.target)
    return sum([share.bytes for share in freed if share.device != HOST])


def part_of(lease: Lease, need: int) -> Lease:
    """The `lease` with a `target`: the fewest pieces that free `need` bytes of its card.

    Returns `lease` itself if it cannot be cut, or if all its pieces must leave. Even if its working
    memory alone is enough, one piece leaves: a model that is whole on its card keeps its working
    memory there.
    """
    piece = lease.piece_bytes
    if not piece or lease.kind == "kernel" or not _on_one_card(lease):
        return lease
    own = lease.card_bytes
    if lease.filled:  # its working memory is freed without a copy
        need -= sum([share.bytes for share in lease.shares]) - own
    size = max(1, -(-need // piece)) * piece
    if size >= own:
        return lease
    return replace(lease, target=(Share(HOST, size),))


def _on_one_card(lease: Lease) -> bool:
    return sum([share.device != HOST for share in lease.shares]) == 1


def parts_within(leases: Sequence[Lease], host_bytes: int) -> Iterator[list[Lease]]:
    """Yields ways in which pieces of the `leases` fit into `host_bytes` of host memory.

    Each result has the leases of which pieces leave, with the pieces' bytes as `target`. Each lease
    that can be cut is the first one once, up to MOST_FIRST leases: as many of its pieces leave as
    fit.
    """
    able = [
        one
        for one in leases
        if 0 < one.piece_bytes <= host_bytes and one.kind != "kernel" and _on_one_card(one)
    ]
    for first in able[:MOST_FIRST]:
        left, parts = host_bytes, []
        for lease in (first, *[other for other in able if other is not first]):
            size = min(left, lease.card_bytes) // lease.piece_bytes * lease.piece_bytes
            if size:
                parts.append(replace(lease, target=(Share(HOST, size),)))
                left -= size
        yield parts
