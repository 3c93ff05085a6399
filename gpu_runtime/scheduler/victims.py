"""Finds the leases to evict when room is needed: the cheapest set that is enough.

Pure. Leases are ordered by importance, then by the wishes of a fleet, then by the rank that a
policy of `eviction_policy` gives.
`evictable` decides which leases may be evicted at all. A lease with a target leaves only in part:
the target has the pieces of the model that leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from msgspec.structs import replace

from ..facts import HOST, Lease, Policy, Share, World

MOST_TRIED = 12  # up to this many leases that might be spared, every set of them is tried
MOST_FIRST = 8  # ways to cut leases that are tried
MOST_LOOKS = 5_000  # steps of a search for the smallest set
OWNER = (
    "owner:"  # prefix of a place in `need` that stands for all cards on which an owner has leases
)

Gain = dict[str, int]  # place -> bytes that one lease frees there
Gains = Sequence[tuple[Lease, Gain]]


def victims(
    need: Mapping[str, int],
    idle: Iterable[Lease],
    world: World,
    rank: Policy,
) -> tuple[Lease, ...] | None:
    """The leases to evict to free `need` bytes on each device; None if all together are not enough.

    The `idle` leases with the lowest `worth` in this `world` are chosen first. Finally, every lease that is not needed
    is removed from the set. A key `owner:ID` in `need` stands for all cards on which this owner has
    leases.
    """
    return victims_in_order(need, eviction_order(idle, world, rank))


def eviction_order(
    idle: Iterable[Lease],
    world: World,
    rank: Policy,
) -> list[Lease]:
    """The `idle` leases in order: by `worth` in this `world`, then by name."""
    return sorted(idle, key=lambda lease: (worth(lease, world, rank), lease.owner, lease.name))


def worth(lease: Lease, world: World, rank: Policy) -> tuple[int, int, float]:
    """How much the `lease` is worth; the lease with the lowest worth leaves first.

    Compared are its importance, then how much a fleet wishes it, then its `rank` in this `world`.
    """
    return (-lease.importance, lease.wished, rank(lease, world))


# -- the shortest prefix of the order that is enough -----------------------------------------------


def victims_in_order(
    need: Mapping[str, int], ordered: Iterable[Lease], host: PartsRoom | None = None
) -> tuple[Lease, ...] | None:
    """The same as `victims`, for leases that are already in order.

    Leases are taken in order until they are enough. Of the taken leases, those that are not needed
    stay. If several sets could stay, the set stays that takes longest to load again; if the times
    are equal, the set with the most bytes. `need` is bytes by device, or by `owner:ID`. `ordered`
    is the result of `eviction_order`.

    If `host` is given, a lease may leave in part, and `host` is the host memory for such parts; see
    `_without_needless_pieces`.
    """
    missing = _missing(need)
    if not missing:
        return ()
    chosen = _first_enough(missing, ordered)
    if chosen is None:
        return None
    surplus = {place: -size for place, size in missing.items()}
    if host is not None and any([lease.piece_bytes for lease, _ in chosen]):
        leaving = _without_needless_pieces(chosen, dict(surplus), host)
        if any([lease.target for lease in leaving]):
            return leaving
    if len(chosen) == 1:
        return (chosen[0][0],)
    spared = _spared(chosen, surplus)
    return tuple([lease for index, (lease, _) in enumerate(chosen) if index not in spared])


def _first_enough(missing: Gain, ordered: Iterable[Lease]) -> list[tuple[Lease, Gain]] | None:
    """The first leases that free all missing bytes; None if all leases are not enough.

    The bytes of the returned leases are subtracted from `missing`. A negative number in `missing`
    is the surplus.
    """
    owners = _owners(missing)
    chosen: list[tuple[Lease, Gain]] = []
    for lease in ordered:
        gain = _gain(lease, missing, owners)
        if not any(gain.values()):
            continue
        if len(missing) > 1 and not any([missing[place] > 0 for place in gain]):
            continue
        chosen.append((lease, gain))
        for place, size in gain.items():
            missing[place] -= size
        if max(missing.values()) <= 0:
            return chosen
    return None


def _missing(need: Mapping[str, int]) -> dict[str, int]:
    return {place: size for place, size in need.items() if size > 0}


def _owners(places: Iterable[str]) -> frozenset[str]:
    """The ids of the owners in `places`, which has ids of devices and entries `owner:ID`."""
    return frozenset([place[len(OWNER) :] for place in places if place.startswith(OWNER)])


def _fits_in(gain: Gain, surplus: Gain) -> bool:
    """Whether the need is still met if the lease with this `gain` stays."""
    for place, size in gain.items():
        if size > surplus[place]:
            return False
    return True


def _spared(chosen: Gains, surplus: Gain) -> set[int]:
    """Indices of the `chosen` leases that need not leave.

    Of all sets that `surplus` allows to stay, the set that takes longest to load again is returned.
    If the times are equal, the set with the most bytes is returned, then the set with the later
    leases, which are worth more. If more than MOST_TRIED leases might stay, leases are spared one
    by one instead, the last first.
    """
    last_first = range(len(chosen) - 1, -1, -1)
    if len(surplus) == 1:  # one device, which is the usual case
        [(place, most)] = surplus.items()
        able = [index for index in last_first if chosen[index][1][place] <= most]
    else:
        able = [index for index in last_first if _fits_in(chosen[index][1], surplus)]
    if 2 <= len(able) <= MOST_TRIED:
        return _most_precious_set(chosen, surplus, able)
    return _spare_in_turn(chosen, surplus, able)  # too many to try every set, or no choice


def _most_precious_set(chosen: Gains, surplus: Gain, able: Sequence[int]) -> set[int]:
    """The set of `able` indices that fits into the surplus and costs most to load again."""
    best: tuple[tuple[float, int], tuple[int, ...]] = ((0.0, 0), ())

    def try_from(start: int, seconds: float, size: int, kept: tuple[int, ...]) -> None:
        """Compares the set `kept` with the best set. Then tries `kept` with each further index."""
        nonlocal best
        if (seconds, size) > best[0]:
            best = (seconds, size), kept
        for position in range(start, len(able)):
            index = able[position]
            lease, gain = chosen[index]
            if not _fits_in(gain, surplus):
                continue
            for place, freed in gain.items():
                surplus[place] -= freed
            more = lease.restore_seconds or lease.reload_seconds
            try_from(position + 1, seconds + more, size + lease.bytes, (*kept, index))
            for place, freed in gain.items():
                surplus[place] += freed

    try_from(0, 0.0, 0, ())
    return set(best[1])


def _spare_in_turn(
    chosen: Gains,
    surplus: Gain,
    able: Iterable[int],
) -> set[int]:
    spared = set()
    for index in able:
        gain = chosen[index][1]
        if _fits_in(gain, surplus):
            spared.add(index)
            for place, size in gain.items():
                surplus[place] -= size
    return spared


# -- leases that leave in part ---------------------------------------------------------------------


class PartsRoom(NamedTuple):
    """The bytes of host memory that parts of leases may take."""

    free: int
    # The room for weights that exist nowhere else: `free`, and the bytes that shadows and unloaded
    # leases give up for such weights.
    most: int


def _without_needless_pieces(chosen: Gains, surplus: Gain, host: PartsRoom) -> tuple[Lease, ...]:
    """The `chosen` leases that must leave, each with only the pieces that must leave.

    The last leases are worth most, so the last leases are spared first. If only some pieces of a
    lease leave, the lease's `target` has the bytes of these pieces. A lease leaves as a whole if
    host memory cannot take the pieces.
    """
    precious = sum([lease.offload_bytes for lease, _ in chosen if not lease.droppable])
    free, most = host.free - precious, host.most - precious
    leaving: list[Lease] = []
    for lease, gain in reversed(chosen):
        on_card = max(gain.values())
        reserved = 0 if lease.droppable else lease.offload_bytes
        if _fits_in(gain, surplus):
            stays, taken = on_card, 0
        else:
            stays, taken = 0, reserved
            spare = min(surplus.values()) if len(gain) == len(surplus) else _least(gain, surplus)
            part = part_of(lease, on_card - spare)
            if part is not lease:
                size = part.offload_bytes if lease.shadow_bytes else part.target[0].bytes
                if size <= (free if lease.droppable else most + reserved):
                    stays, taken = lease.card_bytes - part.target[0].bytes, size
                    lease = part
            leaving.append(lease)
        free += reserved - taken
        if reserved:
            most += reserved - taken
        for place in gain:
            surplus[place] -= stays
    leaving.reverse()
    return tuple(leaving)


def _least(gain: Gain, surplus: Gain) -> int:
    return min([surplus[place] for place in gain])


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


# -- the smallest set that is enough ---------------------------------------------------------------


def fewest_victims(
    need: Mapping[str, int], ordered: Iterable[Lease], host: PartsRoom | None = None
) -> tuple[Lease, ...] | None:
    """The smallest set of leases that makes the room; None if all leases are not enough.

    If several sets have the same size, the set with the fewest bytes is returned. No important
    lease is evicted if less important leases are enough. `need` is bytes by device, or by
    `owner:ID`. The order of `ordered` only decides between sets that are equal in size and bytes.
    If `host` is given, a lease of the set may leave in part, and `host` is the host memory for such
    parts.
    """
    missing = _missing(need)
    if not missing:
        return ()
    able = _least_important_that_do(missing, ordered)
    if able is None:
        return None
    able.sort(key=lambda one: -sum(one[1].values()))
    found = _SmallestSet(able, missing).find()
    if host is None or not any([lease.piece_bytes for lease in found]):
        return found
    return victims_in_order(need, found, host)


def _least_important_that_do(
    need: Gain, ordered: Iterable[Lease]
) -> list[tuple[Lease, Gain]] | None:
    """The leases of the least important classes that together meet the need; None if too few."""
    owners = _owners(need)
    able: list[tuple[Lease, Gain]] = []
    missing = dict(need)
    importance = None
    for lease in ordered:
        if lease.importance != importance and max(missing.values()) <= 0:
            break
        importance = lease.importance
        gain = _gain(lease, need, owners)
        if any(gain.values()):
            able.append((lease, gain))
            for place, size in gain.items():
                missing[place] -= size
    return able if max(missing.values()) <= 0 else None


class _SmallestSet:
    """A search for the smallest set of leases that meets a need.

    Of sets with equally many leases, the search finds the set with the fewest bytes. The search
    goes through all sets of one lease, then through all sets of two leases, and so on. A set is
    built from the lease that frees most to the lease that frees least. So a branch of the search
    ends as soon as the largest remaining leases would not be enough. The result is exact, unless
    the search takes more than MOST_LOOKS steps.
    """

    def __init__(self, able: Gains, need: Gain) -> None:
        self.able, self.need = able, need
        self.looks = 0
        self.best: tuple[int, tuple[Lease, ...]] | None = None
        self.sums = {}  # place -> bytes that the first 0, 1, 2, … leases free there
        for place in need:
            freed = (gain.get(place, 0) for _, gain in able)
            self.sums[place] = list(accumulate(freed, initial=0))

    def find(self) -> tuple[Lease, ...]:
        """The smallest set. If the search takes too long, the largest leases that are enough."""
        for count in range(1, len(self.able) + 1):
            self._try_from(0, count, self.need, 0, ())
            if self.best is not None:
                return self.best[1]
            if self.looks > MOST_LOOKS:
                break
        largest_first = [lease for lease, _ in self.able]
        return victims_in_order(self.need, largest_first) or ()

    def _try_from(
        self,
        start: int,
        count: int,
        left: Mapping[str, int],
        size: int,
        taken: tuple[Lease, ...],
    ) -> None:
        """Tries all sets that consist of the leases `taken` and `count` further leases.

        The further leases have the index `start` or a higher one. `left` is the need that remains.
        `size` is the bytes of the taken leases.
        """
        self.looks += 1
        if self.looks > MOST_LOOKS:
            return
        if count == 1:
            self._try_last(start, left, size, taken)
            return
        for index in range(start, len(self.able) - count + 1):
            if self._beyond_reach(index, count, left):
                return
            lease, gain = self.able[index]
            after = {place: missing - gain.get(place, 0) for place, missing in left.items()}
            self._try_from(index + 1, count - 1, after, size + lease.bytes, (*taken, lease))

    def _try_last(
        self,
        start: int,
        left: Mapping[str, int],
        size: int,
        taken: tuple[Lease, ...],
    ) -> None:
        """Completes the set `taken` with the smallest lease that frees all of `left`, if possible."""
        enough = []
        for lease, gain in self.able[start:]:
            if all([gain.get(place, 0) >= missing for place, missing in left.items()]):
                enough.append(lease)
        if not enough:
            return
        smallest = min(enough, key=lambda lease: lease.bytes)
        total = size + smallest.bytes
        if self.best is None or total < self.best[0]:
            self.best = total, (*taken, smallest)

    def _beyond_reach(
        self,
        start: int,
        count: int,
        left: Mapping[str, int],
    ) -> bool:
        """Whether even the best `count` leases from the index `start` on free too few bytes."""
        # With one place, the leases are sorted by the bytes that they free there, the largest
        # first.
        one_place = len(self.need) == 1
        for place, missing in left.items():
            sums = self.sums[place]
            until = sums[start + count] if one_place else sums[-1]
            if missing > until - sums[start]:
                return True
        return False


def _gain(
    lease: Lease,
    missing: Mapping[str, int],
    owners: frozenset[str],
) -> Gain:
    """Bytes that `lease` would free in each place of `missing`."""
    gain: Gain = {}
    for share in lease.shares:
        device = share.device
        if device in missing:
            gain[device] = gain.get(device, 0) + share.bytes
        if owners and lease.owner in owners and device != HOST:
            place = f"{OWNER}{lease.owner}"
            gain[place] = gain.get(place, 0) + share.bytes
    return gain
