"""Who leaves first when room is needed.

Pure: values in, values out. A policy gives each idle lease a number, and the lowest leaves first; importance always
comes before it. Who *may* leave at all is the planner's to say.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping

from .errors import BadSetting
from .facts import HOST, Lease, Policy, World
from .units import GIB


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


def victims(need: Mapping[str, int], idle: Iterable[Lease], world: World, rank: Policy) -> tuple[Lease, ...] | None:
    """Who leaves so that `need` bytes come free on each device; None where all of them together are not enough.

    The least important first, then the lowest rank; then pruned, the most precious first, until no member of the set
    can be spared. A key `owner:ID` in `need` stands for all the cards that this owner's leases lie on.
    """
    return first_enough(need, in_order(idle, world, rank))


def in_order(idle: Iterable[Lease], world: World, rank: Policy) -> list[Lease]:
    """Those who leave first come first."""
    return sorted(idle, key=lambda lease: (-lease.importance, rank(lease, world), lease.owner, lease.name))


def first_enough(need: Mapping[str, int], ordered: Iterable[Lease]) -> tuple[Lease, ...] | None:
    """`victims`, of leases that stand in order already."""
    left = {place: size for place, size in need.items() if size > 0}
    if not left:
        return ()
    owners = frozenset([place[6:] for place in left if place.startswith("owner:")])
    chosen: list[tuple[Lease, dict[str, int]]] = []
    for lease in ordered:
        gain = _gain(lease, left, owners)
        if not gain or (len(left) > 1 and not any([left[place] > 0 for place in gain])):
            continue
        chosen.append((lease, gain))
        for place, size in gain.items():
            left[place] -= size
        if max(left.values()) <= 0:
            break
    else:
        return None
    for spared in range(len(chosen) - 1, -1, -1):
        gain = chosen[spared][1]
        if all([left[place] + size <= 0 for place, size in gain.items()]):
            del chosen[spared]
            for place, size in gain.items():
                left[place] += size
    return tuple([lease for lease, _ in chosen])


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
