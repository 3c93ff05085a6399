"""Plain code takes memory without a request to the ledger. Idle kernels then leave a card that holds too much."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.facts import HOST, Phase, Share
from gpu_runtime.scheduler.policies import lru
from gpu_runtime.scheduler.relief import overfull, park_kernels
from tests.worlds import NOW, book, lease, owner, size, world


def kernel(by: int, gib: int, idle: float = 60.0, **fields):
    held = lease("kernel", by=by, sim0=gib, last_used=NOW - idle, **fields)
    return replace(held, kind="kernel", droppable=False)


def parked(held, by: int) -> list[str]:
    _, steps = park_kernels(held, owner(by).id, world(sim0=20), lru, "key")
    return [step.lease for step in steps]


def test_the_kernel_that_was_used_longest_ago_leaves_and_no_other():
    held = book(kernel(1, 12, idle=60), kernel(2, 12, idle=600), owners=(1, 2))
    assert parked(held, 1) == [] and parked(held, 2) == [f"{owner(2).id}/kernel"]
    held = book(kernel(1, 8), kernel(2, 8), owners=(1, 2))
    assert parked(held, 1) == parked(held, 2) == []
    held = book(kernel(1, 12), kernel(2, 12, idle=600), owners=(1, 2))
    leaving, steps = park_kernels(held, owner(2).id, world(sim0=20), lru, "key")
    assert len(steps) == 1 and parked(leaving, 1) == []
    # Or whose last cell ended less than a second ago.
    for idle in (5, 1, 0.9):
        held = book(kernel(1, 12, pins=1), kernel(2, 12, idle=idle), owners=(1, 2))
        assert parked(held, 1) == [] and len(parked(held, 2)) == (idle >= 1)


@given(own=st.integers(0, 25), others=st.integers(0, 25), leaves=st.booleans())
def test_a_card_is_overfull_by_others_if_theirs_is_part_of_what_exceeds_its_limit(
    own, others, leaves
):
    """A kernel makes room for others, and never for itself alone. Bytes that leave count as gone."""
    away = {"phase": Phase.LEAVING, "target": (Share(HOST, size(others)),)} if leaves else {}
    held = book(
        lease("mine", sim0=own),
        lease("theirs", by=2, sim0=others, **away),
        limits={"sim:0": size(20)},
    )
    stays = 0 if leaves else others
    assert overfull(held, owner(1).id, ["sim:0"]) == (own + stays > 20 and stays > 0)
