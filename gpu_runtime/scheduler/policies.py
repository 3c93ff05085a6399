"""The eviction policies. A policy gives each lease a number; the lowest number leaves first.

Pure. The importance of leases is always compared before the policy's number.

To add a policy, write a function in this module and add it to POLICIES. The setting GPU_POLICY and
backtests read the names there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from ..errors import BadSetting
from ..facts import HOST, LEAST_LOAD_SECONDS, Lease, Policy, World, expected_use, merged_uses
from ..units import GIB

GB = 10**9
# This number is added to the age of each use. Without it, a use a moment ago would outweigh all
# others.
YOUNGEST_SECONDS = 20.0


def lru(lease: Lease, world: World) -> float:
    """The time of the last use of `lease`, so that the least recently used lease leaves first.

    `world` is not read.
    """
    return lease.last_used


def cost_aware(lease: Lease, world: World) -> float:
    """The cost of evicting this `lease`; the lease with the lowest cost leaves first.

    The cost is the seconds of the last restore (else of the last load, else 1 s), divided by the
    lease's GiB. The cost is also divided by 1 + the seconds of idle time at `world.now`: a model
    that was idle for an hour is unlikely to be used in the next minute.

    Source: GreedyDual-Size-Frequency, Cherkasova 1998 (HPL-98-69R1), with idle time instead of
    frequency.
    """
    seconds = lease.restore_seconds or lease.reload_seconds or 1.0
    gib = max(lease.bytes / GIB, 1e-3)
    return seconds / gib / (1.0 + lease.idle_seconds(world.now))


def keep_score(lease: Lease, world: World) -> float:
    """The waiting time that keeping this `lease` saves for each GB.

    The lease with the lowest number leaves first. The sum of 1 / (age + 20 s) over the lease's last
    32 uses estimates how soon the lease is used again. The sum is multiplied by the seconds that an
    eviction adds to the next use, and divided by the GB that it frees: also those of working memory.

    After an eviction from a card, the next use needs a restore if host memory could hold the lease,
    else a load. After an eviction from host memory, the next use needs a load instead of a restore.
    `world` holds the time, the offload setting and the limit of host memory.

    Source: hyperbolic caching, Blankstein et al. 2017 (USENIX ATC), with the cost and size of
    GreedyDual-Size, Cao and Irani 1997.
    """
    expected = expected_use(lease.recent_uses, int(world.wall), YOUNGEST_SECONDS)
    if not expected:
        expected = 1.0 / (lease.idle_seconds(world.now) + YOUNGEST_SECONDS)
    return expected * cost_of_leaving(lease, world) / gigabytes(lease)


def cost_of_leaving(lease: Lease, world: World) -> float:
    """The seconds that an eviction of this `lease` adds to its next use; see `keep_score`."""
    size = lease.own_bytes
    if would_go_to_host(lease, world):
        return lease.seconds_to_restore(size)
    lost = lease.seconds_to_load(size)
    return max(lost - lease.seconds_to_restore(size), LEAST_LOAD_SECONDS) if lease.on_host else lost


def would_go_to_host(lease: Lease, world: World) -> bool:
    """Whether host memory could hold the `lease` after an eviction from its card."""
    if lease.on_device and lease.movable and world.rules.offload:
        return lease.own_bytes <= world.limits.get(HOST, 0)
    return False


def gigabytes(lease: Lease) -> float:
    """The GB of the `lease` by which a cost is divided, at least 1 MB."""
    return max(lease.bytes / GB, 1e-3)


def with_uses_of_equal_models(rank: Policy, leases: Iterable[Lease]) -> Policy:
    """The policy `rank`, changed so that it sees the uses of a model in all notebooks.

    Models are equal if their sources have equal content. A use of a model counts for each of the
    `leases` with an equal model.
    """
    uses: dict[str, list[str]] = {}
    for lease in leases:
        if lease.source and lease.recent_uses:
            uses.setdefault(lease.source, []).append(lease.recent_uses)
    shared = {source: texts for source, texts in uses.items() if len(texts) > 1}
    if not shared:
        return rank

    def ranked(lease: Lease, world: World) -> float:
        if lease.source not in shared:
            return rank(lease, world)
        every_use = merged_uses(shared[lease.source], world.wall)
        return rank(replace(lease, recent_uses=every_use), world)

    return ranked


POLICIES: Mapping[str, Policy] = {"lru": lru, "cost_aware": cost_aware, "keep_score": keep_score}


def policy(name: str) -> Policy:
    """The policy with that `name`. Raises BadSetting if the name is unknown."""
    try:
        return POLICIES[name]
    except KeyError:
        raise BadSetting("GPU_POLICY", name, f"one of {', '.join(POLICIES)}") from None
