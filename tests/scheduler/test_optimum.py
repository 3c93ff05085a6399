"""The choice of victims compared with an exact optimum.

The figures are in tests/bench. These tests check only the bounds.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.scheduler.victims import fewest_victims
from tests.bench.bench_placement import excess, freed_bytes, lawful, small_worlds, ways_out
from tests.worlds import book, lease, request, size, world


@pytest.mark.parametrize(
    "policy, bound", [("best-fit", 1.05), ("most-free", 1.05), ("fewest-evictions", 1.05)]
)
def test_no_more_bytes_are_freed_than_a_twentieth_beyond_an_exact_optimum(policy, bound):
    """The test tries every set of leases in two hundred small worlds."""
    found = excess(policy, worlds=200, seed=7)
    assert found["bytes"] <= bound
    assert policy != "fewest-evictions" or found["leases"] == 1.0


def test_the_optimum_is_found_when_a_greedy_choice_misses_it():
    """The request needs 10, and the leases have 9, 6 and 4. A greedy choice evicts 9 and 6. The
    leases 6 and 4 are as few, and free fewer bytes.
    """
    page = book(lease("nine", sim0=9), lease("six", sim0=6), lease("four", sim0=4))
    wanted, there = request("new", 10), world(sim0=19)
    assert min(len(way) for way in ways_out(page, wanted, there)) == 2
    found = fewest_victims({"sim:0": size(10)}, list(page.leases()))
    assert {one.name for one in found} == {"six", "four"}


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from([5, 10, 20])),
        min_size=1,
        max_size=7,
    ),
    st.integers(1, 20),
    st.integers(0, 20),
)
def test_the_fewest_are_the_fewest_on_two_cards_at_once(models, first, second):
    """The test compares the choice with every set of leases. No important lease leaves if less
    important ones are enough.
    """
    from itertools import combinations

    idle = sorted(
        (lease(f"m{n}", sim0=a, sim1=b, importance=rank) for n, (a, b, rank) in enumerate(models)),
        key=lambda one: -one.importance,
    )
    need = {"sim:0": size(first), "sim:1": size(second)}

    def enough(some):
        return all(
            sum(share.bytes for one in some for share in one.shares if share.device == card)
            >= wanted
            for card, wanted in need.items()
        )

    found = fewest_victims(need, idle)
    assert (found is not None) == enough(idle)
    if found is None:
        return
    for rank in (20, 10, 5):
        allowed = [one for one in idle if one.importance >= rank]
        if enough(allowed):
            least = min(
                count
                for count in range(len(allowed) + 1)
                if any(enough(some) for some in combinations(allowed, count))
            )
            assert enough(found) and len(found) == least and all(one in allowed for one in found)
            break


def test_the_measure_itself_sees_waste():
    """The best plan that keeps the order of last use never frees fewer bytes than the best plan of
    all. In some world it frees more.
    """
    pairs = [
        (min(map(freed_bytes, lawful(*one))), min(map(freed_bytes, ways_out(*one))))
        for one in small_worlds(60)
    ]
    assert all(bound >= free for bound, free in pairs) and any(
        bound > free for bound, free in pairs
    )
