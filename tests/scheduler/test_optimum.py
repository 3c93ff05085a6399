"""The choice of victims against an exact optimum: only the bounds. Figures are in tests/bench."""

import pytest

from gpu_runtime.scheduler.admission import admit
from gpu_runtime.scheduler.policies import lru
from tests.bench.bench_placement import excess
from tests.worlds import book, lease, request, world


@pytest.mark.parametrize(
    "policy, bound", [("best-fit", 1.05), ("most-free", 1.05), ("fewest-evictions", 1.1)]
)
def test_few_more_bytes_are_freed_than_by_an_exact_optimum(policy, bound):
    """Every set of leases in two hundred small worlds. `fewest-evictions` never evicts more often."""
    found = excess(policy, worlds=200, seed=7)
    assert found["bytes"] <= bound
    assert policy != "fewest-evictions" or found["leases"] == 1.0


def test_with_the_fewest_evictions_too_a_humble_model_leaves_before_an_important_one():
    """The important model alone would be enough, and frees fewer bytes."""
    humble, large = lease("humble", sim0=9, importance=20), lease("large", sim0=9, importance=20)
    page = book(humble, large, lease("dear", sim0=5))
    wanted = request("new", 5, policy="fewest-evictions")
    _, verdict = admit(page, wanted, world(sim0=23), lru)
    [victim] = verdict.considered[0].victims
    assert victim in (humble.id, large.id)
