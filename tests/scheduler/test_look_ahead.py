"""A look-ahead spends free memory, and idle models of its process that are used later or never."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.facts import CellModels, Drop, Grant, Load, Move, Phase, Wait, overdrafts
from gpu_runtime.ledgers.invariants import refuse_unlawful
from gpu_runtime.scheduler.plan import load_ahead, next_uses, with_next_uses
from gpu_runtime.scheduler.policies import lru
from gpu_runtime.scheduler.transitions import after_step
from gpu_runtime.scheduler.victims import eviction_order
from tests.scheduler.test_laws import B, leases
from tests.worlds import at, book, lease, owner, request, size, ticket, world

NAMES = [f"m{n}" for n in range(8)]
CELL = "cell 7"
BECAUSE = f"loaded ahead: {CELL} uses it"


def cells(*uses, running=()):
    """The running cell, which uses the models `running`, and one waiting cell for each model of `uses`."""
    first = CellModels("cell 1", tuple(running), tuple(running), True)
    return (first, *(CellModels(f"cell {n}", (name,), (name,)) for n, name in enumerate(uses, 2)))


def guess(them, name, *uses, gib=10, running=(), room=None, **settings):
    """The decision to load `name` ahead, while waiting cells use the models `uses` in this order."""
    order = next_uses(cells(*uses, running=running))
    there = world(**{"sim0": 24, "grace_seconds": 5.0, **(room or {}), **settings})
    return load_ahead(them, request(name, gib), there, lru, order, running, CELL)


def test_the_policy_evicts_what_is_used_next_last():
    assert next_uses(cells("b", "a", "b", "c", running=["a"])) == {"a": 0, "b": 1, "c": 2}
    # Only the models of this process are ordered so. Others have their policy's rank.
    rank = with_next_uses(lru, owner().id, {"soon": 0, "later": 1})
    them = [
        lease("soon", sim0=1, last_used=1.0),
        lease("later", sim0=1, last_used=2.0),
        lease("never", sim0=1, last_used=900.0),
        lease("soon", by=2, sim0=1, last_used=3.0),
    ]
    order = [one.id for one in eviction_order(them, world(sim0=4), rank)]
    assert order == [at(2, "soon"), at(1, "never"), at(1, "later"), at(1, "soon")]
    assert with_next_uses(lru, owner().id, {}) is lru


def test_free_memory_is_spent_and_the_reason_is_in_the_book():
    after, verdict = guess(book(lease("a", sim0=10, pins=1)), "b", "b", running=["a"])
    assert isinstance(verdict, Grant) and isinstance(verdict.steps[0], Load)
    assert after.lease(owner().id, "b").phase is Phase.ARRIVING
    assert [(e.action, e.because) for e in after.events] == [("granted", f"{BECAUSE}.")]
    assert verdict.steps[0].because == f"{BECAUSE}."


def test_an_own_idle_model_that_is_used_later_or_never_leaves():
    """The caller does the steps and decides again, with the room free."""
    them = book(lease("a", sim0=10, pins=1), lease("old", sim0=10), lease("c", sim0=4))
    after, verdict = guess(them, "b", "b", "c", running=["a"])
    assert isinstance(verdict, Wait) and [step.lease for step in verdict.steps] == [at(1, "old")]
    assert not after.tickets and after.lease(owner().id, "old").phase is Phase.LEAVING
    assert verdict.steps[0].because == "room for b: cell 7 uses it, and no cell before uses old."
    for step in verdict.steps:
        after = after_step(after, step, world(sim0=24))
    _, verdict = guess(after, "b", "b", "c", running=["a"])
    assert isinstance(verdict, Grant)


def test_what_is_used_sooner_or_by_running_code_stays():
    """Otherwise the very next cell would need it again."""
    them = book(lease("a", sim0=10), lease("b", sim0=10))
    assert guess(them, "c", "a", "b", "c")[1].steps == ()
    after, verdict = guess(them, "c", "a", "c", "b")
    assert [step.lease for step in verdict.steps] == [at(1, "b")] and after is not them
    them = book(lease("a", sim0=10), lease("b", sim0=10))
    verdict = guess(them, "c", "c", "b", running=["a", "b"])[1]
    assert isinstance(verdict, Wait) and not verdict.steps
    them = book(lease("notebook", sim0=20, kind="kernel", droppable=False))
    after, verdict = guess(them, "b", "b")
    assert after is them and isinstance(verdict, Wait) and not verdict.steps


def test_a_guess_takes_nothing_of_another_process():
    them = book(lease("theirs", by=2, sim0=20))
    after, verdict = guess(them, "b", "b")
    assert isinstance(verdict, Wait) and (verdict.steps, verdict.asked) == ((), ())
    assert after is them, "nothing is written, not even a ticket"
    them = book(owners=(1, 2), tickets=[ticket("theirs", by=2, sim0=1)])
    after, verdict = guess(them, "b", "b")
    assert after is them and verdict == Wait("a request waits, and comes first")
    them = book()
    after, verdict = guess(them, "b", "b", gib=99)
    assert after is them and isinstance(verdict, Wait) and "99" in verdict.because
    # The guess may not offload a model if the host would have to drop another process's model for
    # it.
    precious = lease("mine", sim0=20, droppable=False)
    them = book(precious, lease("warm", by=2, host=10))
    after, verdict = guess(them, "b", "b", room={"host": 20})
    assert after is them and isinstance(verdict, Wait) and not verdict.steps


@pytest.mark.parametrize("holder", [1, 2])
def test_no_copy_in_host_memory_is_freed_for_a_guess(holder):
    """The model with the copy was marked as leaving its card, although the running cell used it."""
    them = book(
        lease("mine", sim0=8, droppable=False),
        lease("used", by=holder, sim0=4, shadow_bytes=size(4)),
        lease("idle", sim0=8),
    )
    after, verdict = guess(them, "b", "b", gib=12, running=["used"], room={"sim0": 20, "host": 8})
    assert after is them and isinstance(verdict, Wait) and not verdict.steps
    assert verdict.because == ("RAM has too little free room for the models that would leave")


@given(
    them=leases(),
    others_wait=st.booleans(),
    order=st.lists(st.sampled_from(NAMES), max_size=8),
    spared=st.sets(st.sampled_from(NAMES)),
    gib=st.integers(1, 12),
    rooms=st.lists(st.integers(0, 20), min_size=4, max_size=4),
)
def test_a_guess_spends_only_what_it_may(them, others_wait, order, spared, gib, rooms):
    """None of another process, of the running cell or used sooner. No ticket, and only free bytes."""
    by_id = {one.id: one for one in them}  # no two of one name
    waiting = [ticket("x", by=2, sim0=B)] if others_wait else []
    before = book(*by_id.values(), owners=(1, 2, 3), tickets=waiting)
    room = dict(zip(("sim0", "sim1", "sim2", "host"), (size * B for size in rooms), strict=True))
    there = world(**room, grace_seconds=0.0)
    uses = next_uses(cells(*order, "new"))
    wanted = request("new", gib * B)
    after, verdict = load_ahead(before, wanted, there, lru, uses, spared, CELL)

    me = owner().id
    assert isinstance(verdict, (Grant, Wait)) and after.tickets == before.tickets
    assert {id: s for id, s in after.sections.items() if id != me} == {
        id: s for id, s in before.sections.items() if id != me
    }
    if isinstance(verdict, Grant):
        assert not others_wait and not overdrafts(before, after)
        assert {one.id for one in after.leases()} == {*by_id, at(1, "new")}
        return
    assert verdict.asked == ()
    if not verdict.steps:
        assert after is before
    for step in verdict.steps:
        assert isinstance(step, (Move, Drop)) and not others_wait
        left = by_id[step.lease]
        assert left.owner == me and not left.pins and left.name not in spared
        assert left.name not in uses or uses[left.name] > uses["new"]
    refuse_unlawful(before, after, me, lambda book: frozenset())
