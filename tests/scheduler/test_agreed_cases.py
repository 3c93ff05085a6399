"""The cases from the requirements, unchanged. Sizes are in GiB. A model is idle unless the case says otherwise."""

import pytest
from msgspec.structs import replace

from gpu_runtime.facts import HOST, Grant, Load, Phase, Refuse, Share, Snapshot, Wait
from gpu_runtime.rendering.views import remarks
from gpu_runtime.scheduler.admission import admit
from gpu_runtime.scheduler.capacity import room, views
from gpu_runtime.scheduler.plan import plan
from gpu_runtime.scheduler.policies import lru
from tests.worlds import GIB, NOW, ask_until, at, book, decide, lease, owner, request, size, world

TWO = dict(sim0=80, sim1=80, host=400)
THREE = dict(sim0=80, sim1=80, sim2=80, host=400)
SPLITS = ["auto", "balanced", "proportional"]


def on(**gib):
    """The shares with the given GiB on each card."""
    return tuple(Share(f"sim:{card[-1]}", size(amount)) for card, amount in gib.items())


def settled(verdict, name):
    """The lease `name` once its load is done and the model is idle."""
    shares = {f"sim{share.device[-1]}": share.bytes / GIB for share in verdict.lease.target}
    return lease(name, **shares)


# -- two cards of 80 -------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["single", *SPLITS])
def test_15_on_two_80s_takes_one_card(layout):
    _, verdict = decide(book(), request("small", 15, layout=layout), world(**TWO))
    assert verdict.lease.target == on(sim0=15)


@pytest.mark.parametrize(
    "policy, card", [("best-fit", "sim:0"), ("fewest-evictions", "sim:0"), ("most-free", "sim:1")]
)
def test_a_second_15_is_placed_by_policy(policy, card):
    """`most-free` spreads models over the cards. The other policies keep the second card empty."""
    _, verdict = decide(
        book(lease("first", sim0=15)), request("second", 15, policy=policy), world(**TWO)
    )
    assert [share.device for share in verdict.lease.target] == [card]


@pytest.mark.parametrize("layout", SPLITS)
def test_70_and_70_and_then_200_is_refused_with_the_reason_and_nothing_evicted(layout):
    page = book()
    for name in ("a", "b"):
        _, verdict = decide(page, request(name, 70, layout=layout), world(**TWO))
        page = page.with_lease(settled(verdict, name))
    assert [lease.where for lease in page.leases()] == ["sim:0", "sim:1"]
    after, verdict = decide(page, request("big", 200, layout=layout), world(**TWO))
    assert isinstance(verdict, Refuse) and verdict.kind == "hopeless"
    assert "big needs 200 GiB" in verdict.because
    assert "sim:0,1 are 80.0 GiB + 80.0 GiB" in verdict.because
    assert list(after.leases()) == list(page.leases()) and after.tickets == ()


@pytest.mark.parametrize("layout", ["single", *SPLITS])
def test_70_stale_on_each_and_a_request_of_45_is_one_eviction_and_one_card(layout):
    page = book(
        lease("a", sim0=70, last_used=1, reload_seconds=20),
        lease("b", sim1=70, last_used=2, reload_seconds=20),
    )
    page, heard = ask_until(page, request("c", 45, layout=layout), world(**TWO))
    assert [step.lease for step in heard[0].steps] == [at(1, "a")]
    assert isinstance(heard[-1], Grant) and heard[-1].lease.target == on(sim0=45)
    assert page.find(at(1, "b")).shares == on(sim1=70)


@pytest.mark.parametrize("layout", SPLITS)
def test_140_on_two_free_80s_is_70_and_70(layout):
    _, verdict = decide(book(), request("big", 140, layout=layout), world(**TWO))
    assert verdict.lease.target == on(sim0=70, sim1=70)
    assert [step.shares for step in verdict.steps] == [on(sim0=70, sim1=70)]


# -- three cards -----------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", SPLITS)
def test_three_cards_the_first_full_and_busy_and_140_takes_the_other_two(layout):
    """A card that cannot take its part is skipped, and the search continues with the other cards."""
    page = book(lease("busy", by=2, sim0=80, pins=1))
    _, verdict = decide(page, request("big", 140, layout=layout), world(**THREE))
    assert verdict.lease.target == on(sim1=70, sim2=70)


# -- evictable leases ------------------------------------------------------------------------------
def test_stale_30_on_the_first_and_stale_60_over_both_make_60_and_30_evictable():
    """When a lease over two cards leaves, each card gets back the bytes that it gave."""
    page = book(lease("one", sim0=30), lease("two", sim0=30, sim1=30))
    there = world(sim0=80, sim1=80, host=400)
    before = room(page, there)
    for first, second, fits in ((80, 0, True), (0, 80, True)):
        card, gib = ("sim:0", first) if first else ("sim:1", second)
        emptied, heard = ask_until(page, request("q", gib, devices=(card,)), there)
        assert isinstance(heard[-1], Grant) is fits
        freed = {
            card: share - before[card]
            for card, share in room(emptied.without_lease("1.1.0", "q"), there).items()
        }
        assert (freed["sim:0"], freed["sim:1"]) == (
            (60 * GIB, 30 * GIB) if first else (30 * GIB, 30 * GIB)
        )


def test_occupants_10_15_and_70_of_100_and_a_need_of_60_only_the_70_leaves():
    page = book(
        lease("ten", sim0=10, last_used=1),
        lease("fifteen", sim0=15, last_used=2),
        lease("seventy", sim0=70, last_used=3),
    )
    for policy in ("best-fit", "most-free", "fewest-evictions"):
        _, verdict = decide(page, request("new", 60, policy=policy), world(sim0=100, host=500))
        assert [step.lease for step in verdict.steps] == [at(1, "seventy")]


def test_a_dedicated_30_on_the_only_80_and_a_request_for_a_whole_card_is_refused():
    """The card has the bytes for both models, but the request is for a whole card."""
    dedicated = lease("dedicated", sim0=30, keep=True)
    after, verdict = decide(book(dedicated), request("alone", 40, layout="whole"), world(sim0=80))
    assert verdict == Refuse(
        "alone needs 80.0 GiB; sim:0 has 80.0 GiB, and dedicated (30.0 GiB) is pinned (unpin it to let it go)",
        kind="kept",
        need_bytes=80 * GIB,
        budget_bytes=80 * GIB,
        device="sim:0",
        holders=(at(1, "dedicated"),),
    )
    assert list(after.leases()) == [dedicated]
    assert isinstance(decide(book(dedicated), request("beside", 40), world(sim0=80))[1], Grant)


def test_three_of_8_race_for_20_and_two_get_in():
    page, verdicts = book(owners=(1, 2, 3)), []
    for pid in (1, 2, 3):
        page, verdict = decide(page, request("m", 8, by=pid), world(sim0=20))
        verdicts.append(verdict)
    assert [type(verdict) for verdict in verdicts] == [Grant, Grant, Wait]
    assert "m (8.0 GiB on sim:0) is being loaded by pid 1" in verdicts[-1].because
    assert verdicts[-1].blockers == (at(1, "m"), at(2, "m"))
    assert room(page, world(sim0=20))["sim:0"] == 4 * GIB


@pytest.mark.parametrize("layout", ["single", "whole", *SPLITS])
def test_500_on_any_of_it_is_refused_at_once(layout):
    for there in (world(sim0=80), world(**TWO), world(**THREE)):
        page = book(lease("idle", sim0=60))
        after, verdict = decide(page, request("huge", 500, layout=layout), there)
        assert isinstance(verdict, Refuse) and "huge needs 500 GiB" in verdict.because
        assert list(after.leases()) == list(page.leases()) and after.tickets == ()


def test_a_card_allocated_over_its_total_in_a_foreign_book_is_clamped_and_reported():
    """Facts are accepted even if they are wrong. Nothing is granted on that card, and the overdraft is shown."""
    page = book(lease("liar", by=2, sim0=120, pins=1), limits={"sim:0": 80 * GIB})
    _, verdict = decide(page, request("q", 10), world(sim0=80))
    assert isinstance(verdict, Wait)
    assert verdict.considered[0].because == "sim:0 has 0 B free, 10.0 GiB too little"
    [card, _] = views(page, world(sim0=80))
    assert (card.claimed_bytes, card.limit_bytes, card.level) == (120 * GIB, 80 * GIB, "CRITICAL")
    seen = Snapshot(NOW, NOW, owner(), (card,), page.sections, (), (), (), simulated=True)
    assert "over its budget by 40.0 GiB" in remarks(seen, card)


# -- shares in proportion --------------------------------------------------------------------------

MIB_FREE = dict(sim0="24000 MiB", sim1="12000 MiB", host=100)


def test_30000_on_24000_and_12000_free_is_about_20146_and_9854_and_35000_is_refused():
    """Each share is in proportion to the free bytes of its card, less a margin of 512 MiB."""
    _, verdict = decide(
        book(), request("big", "30000 MiB", layout="proportional"), world(**MIB_FREE)
    )
    assert [share.bytes / 2**20 for share in verdict.lease.target] == pytest.approx(
        [20146.4, 9853.6], abs=0.1
    )
    assert sum(share.bytes for share in verdict.lease.target) == size("30000 MiB")
    # Both cards together have 36,000 MiB free. With a margin of 512 MiB on each, only 34,976 MiB
    # can be granted.
    _, verdict = decide(
        book(), request("big", "35000 MiB", layout="proportional"), world(**MIB_FREE)
    )
    assert isinstance(verdict, Refuse)
    exactly = request("big", "34976 MiB", layout="proportional")
    assert isinstance(decide(book(), exactly, world(**MIB_FREE))[1], Grant), "an exact fit fits"


# -- a lease on several cards behaves like any other -----------------------------------------------
def test_a_restore_may_go_to_other_cards_than_before():
    """The model was offloaded from cards 0 and 1. Card 0 is busy now, so it is restored to 1 and 2."""
    page = book(lease("big", host=140), lease("busy", by=2, sim0=80, pins=1))
    _, verdict = decide(page, request("big", 140, layout="balanced"), world(**THREE))
    [step] = verdict.steps
    assert (step.source, step.shares) == ((Share(HOST, 140 * GIB),), on(sim1=70, sim2=70))
    assert verdict.lease.shares == (Share(HOST, 140 * GIB),)
    assert verdict.lease.phase is Phase.ARRIVING


def test_a_ticket_for_several_cards_keeps_its_place_on_each():
    """A request waits for room on two cards. A later small request gets none of that room."""
    page = book(lease("one", by=2, sim0=70, pins=1), lease("two", by=2, sim1=70, pins=1))
    page, verdict = decide(page, request("big", 140, layout="balanced", key="k"), world(**TWO))
    assert isinstance(verdict, Wait) and page.ticket("k").need == on(sim0=70, sim1=70)
    assert verdict.blockers == (at(2, "one"), at(2, "two"))
    page = page.with_ticket(replace(page.ticket("k"), seconds=1.0))  # it loads sooner than `small`
    there = world(**TWO, passing_seconds=0.0)
    _, verdict = decide(page, request("small", 10, by=3, arrived=NOW + 1), there)
    assert isinstance(verdict, Wait) and verdict.ahead == 1


def test_a_split_that_evicts_nothing_beats_one_card_that_must_be_emptied():
    """By the seconds of the victims' reloads, then by the cards. `auto` never splits what one card could hold."""
    page = book(lease("a", sim0=50, reload_seconds=9), lease("b", sim1=50, reload_seconds=9))
    _, verdict = decide(page, request("c", 50, layout="balanced"), world(**TWO))
    assert verdict.lease.target == on(sim0=25, sim1=25)
    _, verdict = decide(page, request("c", 50, layout="auto"), world(**TWO))
    assert isinstance(verdict, Wait) and len(verdict.steps) == 1


def test_room_is_made_on_several_cards_at_once_and_no_lease_leaves_needlessly():
    page = book(
        lease("a", sim0=60, last_used=1),
        lease("b", sim0=5, last_used=2),
        lease("c", by=2, sim1=60),
        lease("d", sim2=80, pins=1),
    )
    page, heard = ask_until(page, request("big", 140, layout="balanced"), world(**THREE))
    assert ([step.lease for step in heard[0].steps], heard[0].asked) == (
        [at(1, "a")],
        (at(2, "c"),),
    )
    assert isinstance(heard[-1], Grant) and heard[-1].lease.target == on(sim0=70, sim1=70)
    assert page.find(at(1, "b")).where == "sim:0"


def test_a_plan_over_several_cards_lists_every_step_and_the_other_candidates():
    page = book(lease("a", sim0=60), lease("b", by=2, sim1=60))
    told = plan(page, request("big", 140, layout="balanced"), world(**TWO), lru)
    assert told.granted and told.shares == on(sim0=70, sim1=70) and told.asked == (at(2, "b"),)
    assert [type(step).__name__ for step in told.steps] == ["Move", "Move", "Load"]
    assert told.steps[-1] == Load(at(1, "big"), on(sim0=70, sim1=70), told.steps[-1].because)


def test_larger_than_any_card_is_hopeless_only_where_it_may_not_be_split():
    _, verdict = decide(book(), request("big", 140, layout="single"), world(**TWO))
    assert isinstance(verdict, Refuse) and "on one device" in verdict.because
    assert isinstance(
        admit(book(), request("big", 140, layout="auto"), world(**TWO), lru)[1], Grant
    )
