"""Which leases are evicted first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.errors import BadSetting
from gpu_runtime.facts import HOST, MOST_USES, Share, Wait, decode_uses, encode_uses, merged_uses
from gpu_runtime.scheduler.admission import admit
from gpu_runtime.scheduler.policies import (
    POLICIES,
    cost_aware,
    keep_score,
    lru,
    policy,
    with_uses_of_equal_models,
)
from gpu_runtime.scheduler.victims import victims
from tests.bench.bench_placement import excess
from tests.worlds import NOW, WALL, book, lease, request, size, world

THERE = world(sim0=100, sim1=100)


def gib(**need):
    return {f"sim:{key[-1]}": size(value) for key, value in need.items()}


def test_cost_aware_evicts_the_lease_that_frees_most_for_the_fewest_seconds():
    """The score is the seconds to load the lease again for each GiB that it frees. Idle time lowers the score."""
    quick = lease("quick", sim0=10, restore_seconds=1, reload_seconds=30, last_used=NOW - 99)
    slow = lease("slow", sim0=1, reload_seconds=30, last_used=NOW - 99)
    fresh = lease("fresh", sim0=10, restore_seconds=1, last_used=NOW)
    assert cost_aware(quick, THERE) == pytest.approx(0.001)
    assert cost_aware(slow, THERE) == pytest.approx(0.3)
    assert cost_aware(fresh, THERE) == pytest.approx(0.1)


def test_keep_score_is_the_waiting_that_is_saved_for_each_gb():
    """2 GB used now and 80 s ago count 1/20 + 1/100; loading takes 12 s, restoring 3."""
    roomy, bare = world(sim0=100, host=100), world(sim0=100, host=1)
    model = lease(
        "a",
        sim0="2 GB",
        recent_uses=encode_uses([THERE.wall, THERE.wall - 80]),
        reload_seconds=12,
        restore_seconds=3,
    )
    assert keep_score(model, bare) == pytest.approx((1 / 20 + 1 / 100) * 12 / 2)
    assert keep_score(model, roomy) == pytest.approx((1 / 20 + 1 / 100) * 3 / 2)
    never = replace(roomy, rules=replace(roomy.rules, offload=False))
    assert keep_score(model, never) == keep_score(model, bare), "nothing is offloaded"
    slow = replace(model, restore_seconds=99)
    assert keep_score(slow, roomy) == keep_score(model, bare), "a restore is no longer than a load"
    warm = replace(model, shares=(Share(HOST, 2 * 10**9),))
    assert keep_score(warm, roomy) == pytest.approx((1 / 20 + 1 / 100) * (12 - 3) / 2)
    own = (Share("sim:0", 2 * 10**9),)
    engine = replace(model, shares=(Share("sim:0", 8 * 10**9),), filled=own)
    assert keep_score(engine, roomy) == pytest.approx(keep_score(model, roomy) / 4), (
        "it copies 2 GB and frees 8"
    )
    unknown = lease("a", sim0="4 GB", last_used=NOW - 80)
    assert keep_score(unknown, world(sim0=9, host=1)) == pytest.approx(4 / 4 / 100)
    assert keep_score(unknown, world(sim0=9, host=9)) == pytest.approx(0.4 / 4 / 100)


@given(st.lists(st.integers(0, 10**6), max_size=40), st.lists(st.integers(0, 10**6), max_size=40))
def test_uses_are_merged_without_counting_one_twice(mine, others):
    now = 10.0**6
    text, other = encode_uses(mine), encode_uses(others)
    both = merged_uses([text, other], now)
    assert decode_uses(both, now) == tuple(sorted({*mine, *others}))[-MOST_USES:] or (
        len(set(mine)) > MOST_USES or len(set(others)) > MOST_USES
    )
    assert merged_uses([both, text, other, both], now) == both and len(both) <= 160


def test_a_time_just_after_now_and_one_of_weeks_ago_are_both_known():
    now = 2.0**25
    assert decode_uses(encode_uses([now - 10**6, now + 2]), now) == (int(now) - 10**6, int(now) + 2)


def test_a_use_of_an_equal_model_of_another_process_counts():
    mine = lease("a", sim0=1, recent_uses=encode_uses([THERE.wall - 50]), source="x")
    theirs = lease("b", by=2, sim1=1, recent_uses=encode_uses([THERE.wall - 10]), source="x")
    other = lease("c", by=2, sim1=1, recent_uses=encode_uses([THERE.wall - 10]), source="y")
    rank = with_uses_of_equal_models(keep_score, [mine, theirs, other])
    alone = keep_score(mine, THERE)
    assert rank(mine, THERE) == pytest.approx(alone + keep_score(theirs, THERE))
    assert rank(other, THERE) == keep_score(other, THERE)
    assert with_uses_of_equal_models(keep_score, [mine, other]) is keep_score
    unknown = [replace(one, source="") for one in (mine, theirs)]
    assert with_uses_of_equal_models(keep_score, unknown) is keep_score, "not known to be equal"


def test_a_policy_of_no_such_name_is_a_bad_setting():
    assert policy("lru") is lru
    with pytest.raises(BadSetting, match="GPU_POLICY"):
        policy("mru")


def test_the_most_precious_of_the_chosen_is_spared_first():
    a, b, c = (
        lease(name, sim0=gib_, last_used=used)
        for name, gib_, used in (("a", 4, 1), ("b", 4, 2), ("c", 4, 3))
    )
    assert victims(gib(sim0=8), [c, b, a], THERE, lru) == (a, b)
    big = lease("big", sim0=8, last_used=2.5)
    assert victims(gib(sim0=10), [a, b, big], THERE, lru) == (a, big)


def test_equal_ranks_are_ordered_by_last_use_and_then_by_name():
    """With equal ranks the order does not depend on the machine: the same page gives the same victims."""
    one, two = lease("one", sim0=4), lease("two", sim0=4)
    assert victims(gib(sim0=4), [two, one], THERE, lru) == (one,)
    # A constant policy ranks all alike. A model that was used a moment ago stays.
    new, old = lease("a", sim0=4, last_used=9), lease("b", sim0=4, last_used=1)
    assert victims(gib(sim0=4), [new, old], THERE, lambda lease, world: 0.0) == (old,)


leases = st.lists(
    st.builds(
        lambda n, a, b, importance, used: lease(
            f"m{n}", sim0=a, sim1=b, importance=importance, last_used=used
        ),
        st.integers(0, 10**6),
        st.integers(0, 9),
        st.integers(0, 9),
        st.sampled_from([1, 5, 10, 20, 30]),
        st.integers(0, 5),
    ),
    max_size=8,
    unique_by=lambda lease: lease.name,
)
needs = st.fixed_dictionaries({"sim:0": st.integers(-3, 20), "sim:1": st.integers(-3, 20)}).map(
    lambda need: {device: gib_ * 2**30 for device, gib_ in need.items()}
)


def freed(chosen, device):
    return sum(share.bytes for lease in chosen for share in lease.shares if share.device == device)


def enough(chosen, need):
    return all(freed(chosen, device) >= size for device, size in need.items())


@given(leases, needs)
def test_victims_are_enough_and_none_can_be_spared(idle, need):
    """Law 8. None only if no set of leases is enough."""
    chosen = victims(need, idle, THERE, lru)
    if chosen is None:
        assert not enough(idle, need)
        return
    assert enough(chosen, need)
    for lease_ in chosen:
        assert not enough([other for other in chosen if other is not lease_], need)


@given(leases, needs)
def test_importance_comes_before_the_policy(idle, need):
    """If less important leases are enough, no more important lease leaves (law 8)."""
    chosen = victims(need, idle, THERE, lru)
    if not chosen:
        return
    most = min(lease.importance for lease in chosen)
    humbler = [lease for lease in idle if lease.importance > most]
    assert not enough(humbler, need)


@given(leases, needs, st.randoms())
def test_the_order_in_which_leases_are_listed_does_not_matter(idle, need, random):
    shuffled = list(idle)
    random.shuffle(shuffled)
    assert victims(need, shuffled, THERE, lru) == victims(need, idle, THERE, lru)


# -- room is made on the card whose models are worth least -----------------------------------------
@pytest.mark.parametrize("policy", POLICIES)
def test_the_model_that_was_idle_for_an_hour_leaves_although_the_other_loads_faster(policy):
    """By the seconds of loading, a small model used every minute would leave each time."""
    stale = lease("stale", sim0=18, last_used=NOW - 3600, reload_seconds=60, recent_uses=uses(3600))
    hot = lease("hot", sim1=18, last_used=NOW - 30, reload_seconds=20, recent_uses=uses(30, 60, 90))
    there = world(sim0=20, sim1=20)
    _, verdict = admit(book(stale, hot), request("qwen", 10), there, POLICIES[policy])
    assert isinstance(verdict, Wait)
    assert [step.lease for step in verdict.steps] == [stale.id] or verdict.asked == (stale.id,)
    [chosen, other] = verdict.considered
    assert (chosen.victims, other.victims) == ((stale.id,), (hot.id,))
    assert other.worth > chosen.worth


def uses(*ages: float) -> str:
    return encode_uses([WALL - age for age in ages])


# -- the victims beside an exact optimum; the figures are in tests/bench ---------------------------
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
