"""A card that shares the machine's memory with the host. Both spend one budget, and offloading frees nothing."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.facts import HOST, Drop, Grant, Phase, Refuse, Share, Wait, overdrafts
from gpu_runtime.scheduler.capacity import room
from gpu_runtime.scheduler.plan import plan
from gpu_runtime.scheduler.policies import lru
from gpu_runtime.scheduler.victims import eviction_step
from gpu_runtime.units import GIB
from tests.worlds import ask_until, at, book, decide, lease, owner, request, size, world


def unified(card=90, host=50, total=100, free=100.0, **words):
    """A machine of 100 GiB. Its GPU may use 90 GiB, and models in host memory may use 50 GiB."""
    there = world(
        cuda0=card, host=host, total={"cuda:0": total, HOST: total}, free={"cuda:0": free}, **words
    )
    devices = tuple(
        replace(d, unified=not d.is_host, total_bytes=size(total), simulated=False)
        for d in there.devices
    )
    sample = there.samples["cuda:0"]
    return replace(
        there, devices=devices, samples={"cuda:0": sample, HOST: replace(sample, device=HOST)}
    )


def test_card_and_host_spend_one_memory():
    """The warm model takes 50 of the card's 90 GiB, so 40 are left. The host's budget of 50 is full."""
    page = book(lease("warm", host=50, movable=True))
    assert room(page, unified(free=50.0)) == {"cuda:0": 40 * GIB, HOST: 0}
    _, verdict = decide(page, request("big", 41, importance="batch"), unified(free=50.0))
    assert not isinstance(verdict, Grant)
    # Other programs of the machine use 70 GiB, so 30 GiB are left for the card and the host.
    there = unified(free=30.0)
    assert room(book(), there) == {"cuda:0": 30 * GIB, HOST: 30 * GIB}
    newer = replace(there.samples[HOST], free_bytes=20 * GIB)
    there = replace(there, samples={**there.samples, HOST: newer})
    assert room(book(), there) == {"cuda:0": 20 * GIB, HOST: 20 * GIB}, "the lower measurement"
    # They may arrive at any moment, and no sample has them yet.
    page = book(lease("coming", target=(Share("cuda:0", 20 * GIB),), phase=Phase.ARRIVING, pins=1))
    assert room(page, unified(free=30.0)) == {"cuda:0": 10 * GIB, HOST: 10 * GIB}
    page, there = book(lease("old", cuda0=60)), world(cuda0=90, host=50, free={"cuda:0": 30})
    assert room(page, there) == {"cuda:0": 30 * GIB, HOST: 50 * GIB}
    # Each claim alone would fit: 60 of 90 on the card, and 40 of 50 on the host.
    there = unified()
    before = book(lease("a", cuda0=60), devices=there.devices, limits=dict(there.limits))
    after = before.with_lease(
        replace(lease("b"), target=(Share(HOST, 40 * GIB),), phase=Phase.ARRIVING, pins=1)
    )
    assert overdrafts(before, after) == {"cuda:0+host": 10 * GIB}
    apart = replace(after, devices=tuple(replace(d, unified=False) for d in there.devices))
    assert overdrafts(before, apart) == {}


def test_an_idle_model_is_dropped_if_a_move_would_free_nothing_and_precious_weights_stay():
    page, there = book(lease("old", cuda0=60)), unified(free=40.0)
    assert eviction_step(page.find(at(1, "old")), 50 * GIB, there) == Drop(
        at(1, "old"), (Share("cuda:0", 60 * GIB),)
    )
    _, verdict = decide(page, request("new", 50), there)
    assert isinstance(verdict, Wait) and [type(step) for step in verdict.steps] == [Drop]
    assert plan(page, request("new", 50), there, lru).granted
    page, there = book(lease("mine", cuda0=60, droppable=False)), unified(free=40.0)
    _, verdict = decide(page, request("new", 50), there)
    assert isinstance(verdict, Refuse)
    assert "mine (60.0 GiB) exists nowhere else, and is in RAM already" in verdict.because


@given(
    st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=6),
    st.integers(0, 50),
)
def test_no_series_of_grants_exceeds_the_shared_budget(wanted, warm):
    """Card and host together stay within the budget (law 1). Unmeasured, only the book limits it."""
    there = unified(free=100.0)
    page = book(lease("warm", host=warm), devices=there.devices, limits=dict(there.limits))
    for number, (gib, droppable) in enumerate(wanted):
        page, heard = ask_until(page, request(f"m{number}", gib), there, rounds=6)
        if isinstance(heard[-1], Grant):
            arrived = page.lease(owner(1).id, f"m{number}")
            page = page.with_lease(
                replace(
                    arrived,
                    shares=arrived.target or arrived.shares,
                    target=(),
                    phase=Phase.SETTLED,
                    key="",
                    pins=0,
                    droppable=droppable,
                    settled_at=there.now - 10,
                    last_used=0.0,
                )
            )
        claims = page.claims()
        assert sum(claims.values()) <= 90 * GIB
