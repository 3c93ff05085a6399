"""Which devices a model may be placed on, and in which order."""

from math import ceil

from hypothesis import example, given
from hypothesis import strategies as st

from gpu_runtime.facts import Candidate, Footprint, Part, PlacementRules, Share
from gpu_runtime.scheduler.placement import place
from gpu_runtime.units import GIB


def placed(gib, room, **rules):
    return [
        c.shares[0].device
        for c in place(
            Footprint.of(gib * GIB), {d: r * GIB for d, r in room.items()}, PlacementRules(**rules)
        )
    ]


def test_only_the_devices_that_are_allowed_in_their_order():
    assert placed(4, {"a": 20, "b": 20}, devices=("b", "z")) == ["b"]
    assert placed(4, {"b": 9, "a": 9}) == ["b", "a"]


def test_every_candidate_says_why():
    footprint, room = Footprint.of(6 * GIB), {"a": 8 * GIB, "b": 2 * GIB, "c": -3 * GIB}
    assert place(footprint, room, PlacementRules()) == (
        Candidate((Share("a", 6 * GIB),), True, "a has 8.0 GiB free and would keep 2.0 GiB"),
        Candidate((Share("b", 6 * GIB),), False, "b has 2.0 GiB free, 4.0 GiB too little"),
        Candidate((Share("c", 6 * GIB),), False, "c has 0 B free, 6.0 GiB too little"),
    )
    assert (
        place(footprint, room, PlacementRules(policy="most-free"))[0].because
        == "a has the most free: 8.0 GiB"
    )


@given(
    st.integers(0, 30),
    st.integers(0, 10),
    st.dictionaries(st.sampled_from("abcdef"), st.integers(-5, 40)),
    st.sampled_from(["best-fit", "most-free"]),
    st.none() | st.dictionaries(st.sampled_from("abc"), st.integers(0, 40), min_size=1),
    st.sampled_from([0.0, 0.5, 1.5]),
)
@example(2, 1, {"a": 20, "b": 30}, "most-free", None, 1.5)
@example(3, 0, {"a": 20, "d": 20}, "best-fit", {"a": 10}, 0.0)
@example(32, 0, {"a": 40}, "best-fit", None, 1.0)
@example(2, 10, {"a": 20, "b": 13}, "best-fit", None, 1.5)
def test_one_candidate_a_device_and_those_that_fit_first(
    weights, cache, room, policy, most, factor
):
    """A claim that fills a card exactly fits. It may be more than the model, and never more than allowed."""
    size, limit = weights + cache, 40
    footprint = Footprint((Part("weights", weights, "x"), Part("kv_cache", cache, "x")))
    rules = PlacementRules(policy=policy, card_bytes=most or {}, factor=factor)
    claimed = max(size, ceil((weights or size) * factor))
    if factor and claimed >= 0.8 * limit:
        claimed = max(size, limit)
    free = {card: min(left, most.get(card, 0)) if most else left for card, left in room.items()}
    found = place(footprint, room, rules, dict.fromkeys(room, limit))
    assert sorted(one.shares[0].device for one in found) == sorted(room)
    sign = -1 if policy == "most-free" else 1
    order = [free[one.shares[0].device] for one in found if one.fits]
    others = [free[one.shares[0].device] for one in found if not one.fits]
    if not most:  # the tightest, or the emptiest; then the nearest of those that do not fit
        assert order == sorted(order, key=lambda left: sign * left)
        assert others == sorted(others, reverse=True)
    assert [one.fits for one in found] == sorted((one.fits for one in found), reverse=True)
    for one in found:
        assert one.shares[0].bytes == claimed and one.because
        assert one.fits == (free[one.shares[0].device] >= claimed)
        assert sum(share.bytes for share in one.filled or one.shares) == size
