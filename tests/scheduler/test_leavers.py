"""What may leave for a request is shown in the scheduler's own order, with the costs that it compares."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.facts import Drop, Load, Move, Phase, Share
from gpu_runtime.rendering import answers
from gpu_runtime.scheduler.plan import plan
from gpu_runtime.scheduler.policies import POLICIES, gigabytes, keep_score
from gpu_runtime.units import GIB
from tests.faces import samples
from tests.worlds import NOW, at, book, decide, lease, request, world

THERE = world(sim0=24, host=10, grace_seconds=0)


def kernel(by, **fields):
    fields = {"last_used": NOW - 60, "kind": "kernel", "droppable": False, **fields}
    return lease("kernel", by=by, **fields)


ALL = book(
    lease("copied", sim0=1, pins=1, shadow_bytes=GIB),
    lease("warm", host=2, reload_seconds=4, restore_seconds=1),
    lease("slept", by=2, host=1, backend="vllm", reload_seconds=40, restore_seconds=1),
    kernel(3, host=3, disk_room=9 * GIB, disk_seconds=1.5),
    kernel(4, sim0=4),
    lease("served", by=5, sim0=6, backend="vllm", restore_seconds=2),
    lease("idle", sim0=8, restore_seconds=0.4, importance=20),
    limits=THERE.limits,
)


def rows(found):
    return [
        (one.lease.split("/")[1], one.what, round(one.seconds, 6), one.measured) for one in found
    ]


def test_candidates_of_every_kind_stand_in_one_list():
    """RAM has no room for all that may leave the card, so what gives RAM back comes first."""
    found = plan(ALL, request("big", 20), THERE, keep_score).leavers
    gb = GIB / 1e9
    assert rows(found) == [
        ("copied", "copy", 0, True),
        ("warm", "in RAM", 4 - 1, True),
        ("slept", "asleep", 40 - 1, True),
        ("kernel", "to disk", 1.5, True),
        ("idle", "model", 0.4, True),
        ("served", "engine", 2, True),
        ("kernel", "notebook", round(0.4 * gb, 6), False),
    ], "idle is less important"
    assert [one.lease for one in found if one.leaves] == [
        at(1, "copied"), at(1, "idle"), at(5, "served"), at(4, "kernel")
    ]  # fmt: skip
    assert found[3].frees == (Share("host", 3 * GIB),) and found[0].frees == (Share("host", GIB),)
    costs = [one.per_gb * gigabytes(ALL.find(one.lease)) for one in found]
    assert [round(cost, 9) for cost in costs] == [round(one.seconds, 9) for one in found]
    roomy = replace(THERE, limits={**THERE.limits, "host": 64 * GIB})
    whats = [
        one.what
        for one in plan(
            replace(ALL, limits=roomy.limits), request("big", 20), roomy, keep_score
        ).leavers
    ]
    assert whats == ["model", "engine", "notebook"], "RAM has room for all of them"
    for fits in (5, 99):
        assert not plan(ALL, request("big", fits), THERE, keep_score).leavers, (
            "nothing helps, or need"
        )


@given(
    st.lists(
        st.tuples(st.floats(0.1, 9), st.integers(0, 900), st.sampled_from([5, 10, 20])),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 8),
    st.sampled_from(sorted(POLICIES)),
)
def test_the_first_of_the_list_are_those_that_leave(models, count, policy):
    """With models of one size, a request for so many of them takes exactly the first ones."""
    count = min(count, len(models))
    page = book(*[
        lease(f"m{n}", sim0=2, restore_seconds=seconds, last_used=float(used), importance=rank)
        for n, (seconds, used, rank) in enumerate(models)
    ])  # fmt: skip
    there = world(sim0=2 * len(models), host=64, grace_seconds=0)
    wanted = request("big", 2 * count, importance=5)
    found = plan(page, wanted, there, POLICIES[policy])
    assert len(found.leavers) == len(models)
    assert {one.lease for one in found.leavers[:count]} == set(found.victims)
    assert [one.leaves for one in found.leavers] == [True] * count + [False] * (len(models) - count)


def test_what_may_not_leave_is_not_listed():
    """What is in use, kept, more important, or on a card that the request may not use stays."""
    page = book(
        lease("used", sim0=4, pins=1),
        lease("kept", sim0=4, keep=True),
        lease("high", sim0=4, importance=1),
        lease("there", sim1=8),
        lease("idle", sim0=2),
    )
    there = world(sim0=14, sim1=8, host=64, grace_seconds=0)
    wanted = request("big", 6, devices=("sim:0",))
    found = plan(page, wanted, there, keep_score)
    assert not found.granted and [one.lease for one in found.leavers] == [at(1, "idle")]
    _, verdict = decide(page, wanted, there)
    assert not verdict.recalls and not found.leavers[0].leaves, "it alone is not enough"


def test_what_a_sleeping_engine_keeps_on_the_card_is_freed_only_if_the_rest_is_not_enough():
    """Its end costs the difference of load and wake, and frees few bytes."""
    kept = Share("sim:0", 2 * GIB)
    slept = lease(
        "slept", by=2, host=1, backend="vllm", reload_seconds=40, restore_seconds=1, residue=(kept,)
    )
    assert slept.freed_by(()) == (*slept.shares, kept)
    assert replace(slept, shares=(kept,)).freed_by(()) == (kept,), "it counts once"
    idle = lease("idle", by=2, sim0=6, restore_seconds=0.4)
    there = world(sim0=10, host=64, grace_seconds=0)

    def page(*leases):
        return book(*leases, limits=there.limits, residue={2: {"sim:0": 2 * GIB}})

    for need, victims in ((7, ["idle"]), (9, ["idle", "slept"]), (11, [])):
        found = plan(page(slept, idle), request("big", need), there, keep_score)
        assert sorted(name.split("/")[1] for name in found.victims) == victims
        _, verdict = decide(page(slept, idle), request("big", need), there)
        assert {at(2, name) for name in victims} == {*getattr(verdict, "recalls", ())}
    found = plan(page(slept, idle), request("big", 9), there, keep_score)
    assert rows(found.leavers) == [("idle", "model", 0.4, True), ("slept", "asleep", 40 - 1, True)]
    assert found.leavers[1].frees == (kept,)
    mine = replace(slept, owner=at(1, "")[:-1])
    own = book(mine, limits=there.limits, residue={1: {"sim:0": 2 * GIB}})
    after, verdict = decide(own, request("big", 9), there)
    assert [(type(step), step.source) for step in verdict.steps] == [(Drop, (kept,))]
    assert after.find(mine.id).phase is Phase.LEAVING
    _, again = decide(after, request("other", 9, key="later"), there)
    assert not again.steps, "its bytes are free soon"
    mine = replace(mine, shares=(Share("host", 2 * GIB),))
    used = lease("used", sim0=7, pins=1)
    own = book(mine, used, limits=there.limits, residue={1: {"sim:0": 2 * GIB}})
    after, verdict = decide(own, request("slept", 2), there)
    assert not verdict.steps and after.find(mine.id) == mine, "it does not end itself to wake"


def test_an_engine_that_has_slept_before_ends_if_its_sleep_would_not_free_enough():
    """Awake it claims 6 GiB. Its sleep frees them and leaves 2 GiB that only its end frees."""
    kept = Share("sim:0", 2 * GIB)
    there = world(sim0=10, host=64, grace_seconds=0)
    for by in (1, 2):
        awake = lease("awake", by=by, sim0=6, backend="vllm", reload_seconds=40, residue=(kept,))
        page = book(awake, limits=there.limits, residue={by: {"sim:0": 2 * GIB}})
        for need, steps in (
            (8, [Move, Load]),
            (9, [Drop, Load] if by == 1 else [Move, Drop, Load]),
        ):
            found = plan(page, request("big", need), there, keep_score)
            assert [type(step) for step in found.steps] == steps and found.victims == (awake.id,)
        _, verdict = decide(page, request("big", 9), there)
        assert [step.source for step in verdict.steps] == ([awake.freed_by(())] if by == 1 else [])
        assert [one.what for one in found.leavers] == ["engine"]


def test_the_list_is_short_and_fits_80_columns():
    """The first six are shown, and the number of the others."""
    around = replace(samples.busy, sections=ALL.sections, now=NOW)
    found = plan(ALL, request("big", 20), THERE, keep_score)
    lines = answers.plan(found, around).text.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("May leave"))
    assert lines[first + 8] == "  and 1 more"
    assert max(map(len, lines[first : first + 9])) <= 80
    assert lines[first + 3].split() == [
        "warm",
        "in",
        "RAM",
        "2.0",
        "GiB",
        "RAM",
        "3.0",
        "s",
        "1.4",
        "s",
        "17",
        "min",
    ]
    assert lines[first + 5].split()[:4] == ["pid", "3", "to", "disk"], "its notebook has no name"
