"""Which devices a model may be placed on, and in which order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.errors import BadSetting
from gpu_runtime.facts import Candidate, Footprint, PlacementRules, Share
from gpu_runtime.scheduler.placement import check_policy, place
from gpu_runtime.units import GIB


def placed(gib, room, **rules):
    return [
        c.shares[0].device
        for c in place(
            Footprint.of(gib * GIB), {d: r * GIB for d, r in room.items()}, PlacementRules(**rules)
        )
    ]


def test_best_fit_takes_the_fullest_card_that_still_has_room():
    """`best-fit` fills the fuller card first. So the emptier cards keep their large free areas for large models."""
    assert placed(4, {"a": 20, "b": 5, "c": 10}) == ["b", "c", "a"]


def test_most_free_spreads():
    assert placed(4, {"a": 20, "b": 5, "c": 10}, policy="most-free") == ["a", "c", "b"]


@pytest.mark.parametrize("policy", ["best-fit", "most-free"])
def test_those_that_do_not_fit_come_last_the_nearest_first(policy):
    assert placed(8, {"a": 2, "b": 9, "c": 6}, policy=policy) == ["b", "c", "a"]


def test_only_the_devices_that_are_allowed():
    assert placed(4, {"a": 20, "b": 20}, devices=("b", "z")) == ["b"]


def test_equal_rooms_are_taken_in_the_order_of_devices():
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


def test_exact_fit_fits():
    assert place(Footprint.of(5), {"a": 5}, PlacementRules())[0].fits
    assert not place(Footprint.of(6), {"a": 5}, PlacementRules())[0].fits


def test_a_placement_of_no_such_name_is_a_bad_setting():
    assert check_policy("best-fit") == "best-fit"
    with pytest.raises(BadSetting, match="GPU_PLACEMENT"):
        check_policy("worst-fit")


@given(
    st.integers(0, 30),
    st.dictionaries(st.sampled_from("abcdef"), st.integers(-5, 40)),
    st.sampled_from(["best-fit", "most-free"]),
)
def test_one_candidate_a_device_and_those_that_fit_first(gib, room, policy):
    candidates = place(Footprint.of(gib), room, PlacementRules(policy=policy))
    assert sorted(c.shares[0].device for c in candidates) == sorted(room)
    assert [c.fits for c in candidates] == sorted((c.fits for c in candidates), reverse=True)
    assert all(c.fits == (room[c.shares[0].device] >= gib) and c.because for c in candidates)
