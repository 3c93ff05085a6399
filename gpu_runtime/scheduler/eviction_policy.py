"""Who leaves first when room is needed.

Pure: values in, values out. A policy gives each idle lease a number, and the lowest leaves first; importance always
comes before it. Who *may* leave at all is the planner's to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from ..errors import BadSetting
from ..facts import HOST, Lease, Policy, World
from ..units import GIB

MOST_TRIED = 12  # leases that might be spared, of which every set is tried
MOST_LOOKS = 5_000  # steps of a search for the fewest


def lru(lease: Lease, world: World) -> float:
    """The least recently used leaves first."""
    return lease.last_used


def cost_aware(lease: Lease, world: World) -> float:
    """What frees most bytes for the fewest seconds of waiting later leaves first.

    The score is the seconds that bringing it back would cost, for each GiB it frees, discounted by how long it has
    been idle: a model unused for an hour is unlikely to be wanted in the next minute.

    Source: GreedyDual-Size-Frequency, Cherkasova 1998 (HPL-98-69R1), with idle time in the place of frequency.
    """
    seconds = lease.restore_seconds or lease.reload_seconds or 1.0
    gib = max(lease.bytes / GIB, 1e-3)
    return seconds / gib / (1.0 + lease.idle_seconds(world.now))


POLICIES: Mapping[str, Policy] = {"lru": lru, "cost_aware": cost_aware}


def policy(name: str) -> Policy:
    """The policy of that name. Raises BadSetting."""
    try:
        return POLICIES[name]
    except KeyError:
        raise BadSetting("GPU_POLICY", name, f"one of {', '.join(POLICIES)}") from None


def victims(
    need: Mapping[str, int], idle: Iterable[Lease], world: World, rank: Policy
) -> tuple[Lease, ...] | None:
    """Who leaves so that `need` bytes come free on each device; None where all of them together are not enough.

    The least important first, then the lowest rank; then pruned until no member of the set can be spared. A key
    `owner:ID` in `need` stands for all the cards that this owner's leases lie on.
    """
    return first_enough(need, in_order(idle, world, rank))


def in_order(idle: Iterable[Lease], world: World, rank: Policy) -> list[Lease]:
    """Those who leave first come first."""
    return sorted(
        idle, key=lambda lease: (-lease.importance, rank(lease, world), lease.owner, lease.name)
    )


def first_enough(need: Mapping[str, int], ordered: Iterable[Lease]) -> tuple[Lease, ...] | None:
    """`victims`, of leases that stand in order already.

    Nobody is displaced while those before it would do; and of these as much as possible is spared, counted in seconds
    of loading again, then in bytes.
    """
    left = {place: size for place, size in need.items() if size > 0}
    if not left:
        return ()
    owners = frozenset([place[6:] for place in left if place.startswith("owner:")])
    chosen: list[tuple[Lease, dict[str, int]]] = []
    for lease in ordered:
        gain = _gain(lease, left, owners)
        if not any(gain.values()) or (
            len(left) > 1 and not any([left[place] > 0 for place in gain])
        ):
            continue
        chosen.append((lease, gain))
        for place, size in gain.items():
            left[place] -= size
        if max(left.values()) <= 0:
            break
    else:
        return None
    if len(chosen) == 1:
        return (chosen[0][0],)
    spared = _spared(chosen, {place: -size for place, size in left.items()})
    return tuple([lease for place, (lease, _) in enumerate(chosen) if place not in spared])


def _spared(chosen: Sequence[tuple[Lease, Mapping[str, int]]], surplus: dict[str, int]) -> set[int]:
    """Places of those that need not leave, together worth the most; of equals the most precious, who come last."""
    if len(surplus) == 1:  # nearly always
        [(on, most)] = surplus.items()
        able = [place for place in range(len(chosen) - 1, -1, -1) if chosen[place][1][on] <= most]
    else:
        able = [
            place
            for place in range(len(chosen) - 1, -1, -1)
            if all([size <= surplus[on] for on, size in chosen[place][1].items()])
        ]
    if len(able) > MOST_TRIED or len(able) < 2:  # too many to try every set, or nothing to choose
        return _spare_in_turn(chosen, surplus, able)
    best: tuple[tuple[float, int], tuple[int, ...]] = ((0.0, 0), ())

    def try_from(start: int, worth: tuple[float, int], kept: tuple[int, ...]) -> None:
        nonlocal best
        if worth > best[0]:
            best = worth, kept
        for index in range(start, len(able)):
            lease, gain = chosen[able[index]]
            if all([size <= surplus[on] for on, size in gain.items()]):
                for on, size in gain.items():
                    surplus[on] -= size
                try_from(
                    index + 1,
                    (
                        worth[0] + (lease.restore_seconds or lease.reload_seconds),
                        worth[1] + lease.bytes,
                    ),
                    (*kept, able[index]),
                )
                for on, size in gain.items():
                    surplus[on] += size

    try_from(0, (0.0, 0), ())
    return set(best[1])


def _spare_in_turn(
    chosen: Sequence[tuple[Lease, Mapping[str, int]]], surplus: dict[str, int], able: Iterable[int]
) -> set[int]:
    spared = set()
    for place in able:
        gain = chosen[place][1]
        if all([size <= surplus[on] for on, size in gain.items()]):
            spared.add(place)
            for on, size in gain.items():
                surplus[on] -= size
    return spared


def fewest_enough(need: Mapping[str, int], ordered: Iterable[Lease]) -> tuple[Lease, ...] | None:
    """As few as can make the room, and of such sets the one that frees the fewest bytes; None where all are too few.

    Nobody more important is displaced while less important ones would do. Leases come in order; recency decides among
    equals only.
    """
    left = {place: size for place, size in need.items() if size > 0}
    if not left:
        return ()
    owners = frozenset([place[6:] for place in left if place.startswith("owner:")])
    able: list[tuple[Lease, dict[str, int]]] = []
    missing, importance = dict(left), None
    for lease in ordered:
        if lease.importance != importance and max(missing.values()) <= 0:
            break
        importance = lease.importance
        gain = _gain(lease, left, owners)
        if any(gain.values()):
            able.append((lease, gain))
            for place, size in gain.items():
                missing[place] -= size
    if max(missing.values()) > 0:
        return None
    able.sort(key=lambda one: -sum(one[1].values()))
    return _smallest(able, left)


def _smallest(
    able: Sequence[tuple[Lease, Mapping[str, int]]], need: Mapping[str, int]
) -> tuple[Lease, ...]:
    """The set of fewest members that meets the need, and of those the one with the fewest bytes.

    Sets of one are tried first, then of two, and so on; those who free most come first, and a branch ends where even
    the largest of the rest would not do. Exact, unless that takes more than MOST_LOOKS steps.
    """
    sums = {
        place: list(accumulate((gain.get(place, 0) for _, gain in able), initial=0))
        for place in need
    }
    looks = 0
    best: tuple[int, tuple[Lease, ...]] | None = None

    def beyond_reach(start: int, count: int, left: Mapping[str, int]) -> bool:
        if len(need) == 1:  # in order of their gain, the next ones are the largest
            return any(
                [
                    missing > sums[place][start + count] - sums[place][start]
                    for place, missing in left.items()
                ]
            )
        return any(
            [missing > sums[place][-1] - sums[place][start] for place, missing in left.items()]
        )

    def try_from(
        start: int, count: int, left: Mapping[str, int], size: int, taken: tuple[Lease, ...]
    ) -> None:
        nonlocal best, looks
        looks += 1
        if looks > MOST_LOOKS:
            return
        if count == 1:
            last = [
                lease
                for lease, gain in able[start:]
                if all([gain.get(place, 0) >= missing for place, missing in left.items()])
            ]
            if last:
                least = min(last, key=lambda lease: lease.bytes)
                if best is None or size + least.bytes < best[0]:
                    best = size + least.bytes, (*taken, least)
            return
        for index in range(start, len(able) - count + 1):
            if beyond_reach(index, count, left):
                return
            lease, gain = able[index]
            after = {place: missing - gain.get(place, 0) for place, missing in left.items()}
            try_from(index + 1, count - 1, after, size + lease.bytes, (*taken, lease))

    for count in range(1, len(able) + 1):
        try_from(0, count, need, 0, ())
        if best is not None:
            return best[1]
        if looks > MOST_LOOKS:
            break
    return (
        first_enough(need, [lease for lease, _ in able]) or ()
    )  # the largest first, and none that can be spared


def _gain(lease: Lease, missing: Mapping[str, int], owners: frozenset[str]) -> dict[str, int]:
    """What this lease would free of what is missing."""
    gain: dict[str, int] = {}
    for share in lease.shares:
        device = share.device
        if device in missing:
            gain[device] = gain.get(device, 0) + share.bytes
        if owners and lease.owner in owners and device != HOST:
            mine = f"owner:{lease.owner}"
            gain[mine] = gain.get(mine, 0) + share.bytes
    return gain
