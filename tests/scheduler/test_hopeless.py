"""Requests beside weights that exist nowhere else, against every set of leases that the host has room for."""

from collections.abc import Iterable
from itertools import chain, combinations

from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.facts import Lease, PlacementRules, Refuse
from gpu_runtime.scheduler.admission import admit
from gpu_runtime.scheduler.policies import lru
from gpu_runtime.scheduler.victims import largest_fitting_set
from tests.worlds import GIB, book, lease, request, world


def sets_within(leases: list[Lease], host: int) -> Iterable[tuple[Lease, ...]]:
    every = chain.from_iterable(combinations(leases, count) for count in range(len(leases) + 1))
    return (some for some in every if sum(one.bytes for one in some) <= host * GIB)


def fits(need: int, room: dict[str, int], layout: str) -> bool:
    """Whether some cards can hold `need` bytes: in equal parts, or in any parts for proportional."""
    if max(room.values()) >= need:
        return True
    for count in range(2, len(room) + 1):
        most = sorted(room.values())[-count:]
        if most[0] <= 0:
            return False
        if most[0] >= -(-need // count) if layout == "balanced" else sum(most) >= need:
            return True
    return False


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(4, 9)), min_size=9, max_size=12),
    st.integers(0, 11),
    st.sampled_from(["balanced", "proportional"]),
    st.integers(1, 60),
)
@example([0, 0], [(0, 9)] * 5 + [(1, 9)] * 5, 11, "balanced", 10)
@example([0, 0], [(0, 5)] * 6 + [(1, 5)] * 6, 11, "balanced", 11)
def test_a_request_is_refused_if_no_set_that_the_host_can_take_makes_the_room(
    spare, placed, host, layout, gib
):
    """Otherwise it waits for its timeout. First: the host takes one of 9 GiB, and each card must lose one."""
    placed = [(card % len(spare), size) for card, size in placed]
    leases = [
        lease(f"m{n}", droppable=False, last_used=n, **{f"sim{card}": size})
        for n, (card, size) in enumerate(placed)
    ]
    limits = {
        card: more + sum(size for place, size in placed if place == card)
        for card, more in enumerate(spare)
    }
    if 0 in limits.values():
        return
    need = gib * GIB

    def room(leaving: tuple[Lease, ...]) -> dict[str, int]:
        staying = [one for one in leases if one not in leaving]
        return {
            f"sim:{card}": total * GIB - sum(one.bytes_on(f"sim:{card}") for one in staying)
            for card, total in limits.items()
        }

    possible = any(fits(need, room(some), layout) for some in sets_within(leases, host))
    asked = request("new", gib)
    footprint = replace(asked.footprint, heads=6)
    rules = PlacementRules(layout=layout, margin_bytes=0)
    asked = replace(asked, footprint=footprint, placement=rules)
    there = world(**{f"sim{card}": total for card, total in limits.items()}, host=host)
    _, verdict = admit(book(*leases), asked, there, lru)
    assert isinstance(verdict, Refuse) == (not possible)


@given(st.lists(st.integers(5, 17), min_size=13, max_size=16), st.integers(0, 40))
@example([15, 17, 17, 10, 11, 16, 15, 15, 16, 12, 10, 12, 12, 9, 13, 11], 19)
def test_of_many_leases_the_set_that_fills_little_host_memory_best_is_found(sizes, host):
    """Otherwise a request is refused, although a set of small leases could make the room."""
    leases = [lease(f"m{n}", droppable=False, sim0=size) for n, size in enumerate(sizes)]
    best = {0}
    for size in sizes:
        best |= {total + size for total in best if total + size <= host}
    found = largest_fitting_set(leases, host * GIB)
    assert sum(one.bytes for one in found) == max(best) * GIB


def test_of_many_different_leases_the_chosen_set_fills_host_memory_almost():
    """Not every sum of their bytes is compared. The largest sums leave the least of the host free."""
    leases = [lease(f"m{n}", droppable=False, sim0=1 + n / 37) for n in range(60)]
    for host in (20, 60, 100):
        found = largest_fitting_set(leases, host * GIB)
        assert 0.999 * host * GIB <= sum(one.bytes for one in found) <= host * GIB
