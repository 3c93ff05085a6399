"""How much of a card torch may take in one process: everything that other processes have not leased."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.facts import Phase, Share
from gpu_runtime.scheduler.capacity import torch_bounds
from gpu_runtime.units import GIB
from tests.worlds import block, book, lease, owner, size, world

REAL = world(cuda0=10, cuda1=10)


def bound(*leases, context=0, open_cards=(), **fields):
    page = book(*leases, owners=(1, 2), **fields)
    return {
        card: round(fraction, 6)
        for card, fraction in torch_bounds(
            page, owner(1).id, REAL, {"cuda:0": context}, open_cards
        ).items()
    }


def test_torch_may_use_all_but_the_leases_of_others_until_its_own_last_lease_ends():
    """Activations may use free memory, but not the memory of another process's weights."""
    total = REAL.device("cuda:0").total_bytes
    mine, theirs = lease("mine", cuda0=3), lease("theirs", by=2, cuda0=2)
    assert bound(mine, theirs) == {"cuda:0": round((total - size(2)) / total, 6)}
    assert bound(mine, theirs, context=GIB) == {"cuda:0": round((total - size(3)) / total, 6)}
    assert bound(lease("mine", cuda0=3)) == {"cuda:0": 0.99}
    assert bound(lease("mine", cuda0="1 KiB"), lease("theirs", by=2, cuda0=10)) == {"cuda:0": 0.01}
    assert bound(lease("mine", host=3)) == bound(lease("theirs", by=2, cuda0=3)) == {}
    assert bound(lease("wide", cuda0=3, cuda1=3), lease("mine", cuda0=1)) == {}
    assert bound(lease("mine", cuda0=3), block(cuda0=1), open_cards=("cuda:0",)) == {}
    moving = replace(
        lease("mine", cuda0=3), target=(Share("cuda:1", size(3)),), phase=Phase.LEAVING
    )
    assert bound(moving) == {"cuda:0": 0.99, "cuda:1": 0.99}


@given(st.integers(1, 10), st.integers(0, 12), st.integers(0, 3))
def test_our_own_leases_always_fit_and_no_simulated_card_is_bounded(mine, theirs, context):
    leases = [lease("mine", cuda0=mine), lease("theirs", by=2, cuda0=theirs)]
    [fraction] = bound(*leases, context=context * GIB).values()
    assert 0.01 <= fraction <= 0.99
    assert fraction >= min(0.99, size(mine) / REAL.device("cuda:0").total_bytes) - 1e-6
    assert torch_bounds(book(lease("s", sim0=1)), owner(1).id, world(sim0=10), {}) == {}
