"""Offers: what it takes to use a model on each host, and which host is the best."""

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.facts import Drain, HostRoom, Offer, Plan, PlanLevel
from gpu_runtime.fleet.controller import MOST_PLANNED
from gpu_runtime.scheduler.offers import largest_first, likeliest_first, offer_of, ranked, room_of
from gpu_runtime.scheduler.plan import plan
from gpu_runtime.scheduler.policies import lru
from gpu_runtime.units import GIB
from tests.bench import bench_fleet
from tests.worlds import Book, book, lease, owner, request, world

ME = owner(1).id
HOSTS = [f"box{n}" for n in range(1, 7)]


def level(page: Book, gib: float = 14, **devices: float) -> Plan:
    return plan(page, request("qwen", gib), world(**(devices or {"sim0": 20})), lru)


# -- one host --------------------------------------------------------------------------------------
def test_a_plan_says_how_much_effort_it_takes():
    """The levels of effort, from a model that is on its device already to a model that never fits."""
    old = lease("old", sim0=14)
    assert level(book(lease("qwen", sim0=14))).level is PlanLevel.HERE
    assert level(book(lease("qwen", host=14))).level is PlanLevel.RESTORE
    assert level(book()).level is PlanLevel.ROOM
    assert level(book(old, lease("qwen", host=14))).level is PlanLevel.RESTORE_EVICTING
    assert level(book(old)).level is PlanLevel.EVICT
    assert level(book(lease("busy", sim0=14, pins=1))).level is PlanLevel.WAIT
    assert level(book(), gib=24).level is PlanLevel.NEVER
    # A host without the engine refuses, however much room it has.
    free = level(book())
    offer = offer_of(Plan(True, (), (), free.because, obstacle="vllm is not installed"), "box1")
    assert (offer.level, offer.because) == (PlanLevel.NEVER, "vllm is not installed")


def test_a_plan_names_its_victims_and_how_much_stays_free():
    wished = dict(importance=20, wished=1)
    page = book(lease("a", sim0=10, **wished), lease("b", by=2, sim0=10, importance=15))
    told = level(page)
    assert [id.partition("/")[2] for id in told.victims] == ["a", "b"]
    assert (told.victims_importance, told.victims_wished) == (15, 1)
    assert level(book(), sim0=20).left_bytes == 6 * GIB
    halves = request("qwen", 14, layout="balanced", rules={"margin_bytes": 0, "least_cards": 2})
    told = plan(book(lease("a", sim1=5, pins=1)), halves, world(sim0=20, sim1=20), lru)
    assert told.left_bytes == 8 * GIB, "on the fullest card"


def test_measured_seconds_are_used_and_marked():
    """For a model that was loaded on the host before. Other seconds are estimated."""
    known = lease("qwen", host=14, reload_seconds=30.0, restore_seconds=2.5)
    told = level(book(known))
    assert (told.seconds, told.measured) == (2.5, True)
    guessed = level(book())
    assert guessed.seconds > 1 and not guessed.measured
    assert not level(book(known, lease("old", sim0=14))).measured, "the offload is estimated"
    parts = lease("qwen", sim0=7, host=7, piece_bytes=GIB, restore_seconds=2.0)
    assert level(book(parts)).seconds == 1.0, "of the half that returns"
    alone, after_old = level(book()), level(book(lease("old", sim0=14)))
    assert after_old.seconds > alone.seconds


# -- several hosts ---------------------------------------------------------------------------------
def offer(host: str, what: str = "room", **fields: object) -> Offer:
    return Offer(host, "qwen", PlanLevel(what), "because", **fields)  # type: ignore[arg-type]


def best(*offers: Offer) -> str:
    return ranked(offers)[0].host


def test_less_effort_is_better_then_fewer_users_then_less_important_victims():
    order = ["here", "restore", "room", "restore-evicting", "evict", "wait", "never"]
    found = ranked(offer(f"box{n}", what, seconds=9.0 - n) for n, what in enumerate(order))
    assert [one.level for one in found] == order
    assert best(offer("a", "here", users=2), offer("b", "here", users=1)) == "b"
    # Fewer users of the model on the host count more.
    urgent = offer("a", "evict", victims=("x",), victims_importance=5)
    batch = offer("b", "evict", victims=("y",), victims_importance=30, seconds=60.0)
    assert best(urgent, batch) == "b"
    assert best(urgent, replace(batch, users=1)) == "a"
    assert (
        best(urgent, offer("b", "evict", victims=("y",), victims_importance=5, victims_wished=1))
        == "a"
    )
    assert best(offer("a", seconds=9.0), offer("b", seconds=2.0)) == "b"
    assert best(offer("a", left_bytes=40), offer("b", left_bytes=10)) == "b"
    assert best(offer("b"), offer("a")) == "a"


@pytest.mark.parametrize("seconds", [(3.49, 3.51), (2.99, 3.01), (0.1, 0.55), (60.0, 65.0)])
def test_seconds_that_hardly_differ_do_not_decide(seconds):
    """Then the better fit decides, whichever load was measured as the faster one."""
    for one, other in (seconds, seconds[::-1]):
        first, second = offer("a", seconds=one, left_bytes=40), offer("b", seconds=other)
        assert best(first, second) == "b"


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 3)), min_size=1, max_size=6))
def test_the_best_host_is_close_to_the_fastest_and_fits_best_of_those(times):
    """Close is 0.5 s or 10 % more, whichever is larger. Slower hosts follow, each once."""
    offers = [offer(f"box{n}", seconds=s, left_bytes=left) for n, (s, left) in enumerate(times)]
    fastest = min(seconds for seconds, _ in times)
    close = [one for one in offers if one.seconds <= fastest + max(0.5, fastest * 0.1)]
    found = ranked(offers)
    assert found[0].left_bytes == min(one.left_bytes for one in close)
    assert set(found[: len(close)]) == set(close) and len(set(found)) == len(offers)


OFFERS = st.lists(
    st.builds(
        Offer,
        st.sampled_from(HOSTS),
        st.just("qwen"),
        st.sampled_from(PlanLevel),
        st.just(""),
        seconds=st.sampled_from([0.0, 1.0, 1.02, 30.0]),
        victims=st.sampled_from([(), ("x",), ("x", "y")]),
        victims_importance=st.sampled_from([1, 10, 30]),
        left_bytes=st.integers(0, 3),
        users=st.integers(0, 2),
    ),
    max_size=6,
    unique_by=lambda one: one.host,
)


@given(OFFERS, st.randoms())
def test_the_order_depends_only_on_the_offers(offers, random):
    """The order contains no random choice. So two controllers, and two clients, choose the same host."""
    before = ranked(offers)
    random.shuffle(offers)
    assert ranked(offers) == before
    levels = [one.level.order for one in before]
    assert levels == sorted(levels)


@given(OFFERS, OFFERS)
def test_a_host_that_joins_does_not_change_the_order_of_the_others(offers, more):
    """The seconds here are close to each other or far apart, so no host lies in between."""
    known = {one.host for one in offers}
    joined = [*offers, *(one for one in more if one.host not in known)]
    assert [one for one in ranked(joined) if one.host in known] == list(ranked(offers))


# -- which hosts are asked -------------------------------------------------------------------------

ROOMS = st.lists(
    st.builds(
        HostRoom,
        st.sampled_from([f"box{n}" for n in range(40)]),
        here=st.booleans(),
        warm=st.booleans(),
        drained=st.booleans(),
        need_bytes=st.just(50),
        may_split=st.booleans(),
        free_bytes=st.tuples(st.integers(0, 80), st.integers(0, 80)),
        budget_bytes=st.just((80, 80)),
        idle_bytes=st.dictionaries(
            st.tuples(st.sampled_from([10, 20]), st.integers(0, 2)),
            st.tuples(st.integers(0, 40), st.integers(0, 40)),
        ),
    ),
    max_size=30,
    unique_by=lambda one: one.host,
)


@given(ROOMS, st.randoms())
def test_a_host_that_has_the_model_is_always_asked(rooms, random):
    chosen = likeliest_first(rooms)[:MOST_PLANNED]
    assert len(chosen) == min(8, len(rooms)) == len(set(chosen))
    here = [room.host for room in rooms if room.here]
    assert len(here) > 8 or set(here) <= set(chosen)
    random.shuffle(rooms)
    assert likeliest_first(rooms)[:MOST_PLANNED] == chosen


def host(name: str, *free: int, need: int = 50, budget: int = 80, **fields: Any) -> HostRoom:
    budgets = tuple(budget for _ in free)
    return HostRoom(name, need_bytes=need, free_bytes=free, budget_bytes=budgets, **fields)


def test_the_best_fit_is_asked_before_hosts_that_would_evict():
    rooms = [
        host("busy", 10),
        host("normal", 10, idle_bytes={(30, 0): (10,), (10, 0): (60,)}),
        host("batch", 0, idle_bytes={(10, 0): (60,), (30, 0): (60,)}),
        host("empty", 80, 80),
        host("tight", 55, 80),
        host("small", 40, budget=40),
        host("two", 40, 35, budget=40, may_split=True),
        host("drained", 80, drained=True),
    ]
    assert likeliest_first(rooms) == (
        "tight", "two", "empty", "batch", "normal", "busy", "drained", "small",
    )  # fmt: skip


def test_the_room_of_a_host_shows_its_own_copy_of_the_model():
    """Of another owner it is a model like any other. A host is drained if all its cards are."""
    there = world(sim0=20, sim1=20)

    def seen(*leases, drained=()):
        marks = {card: Drain("ann", 0.0) for card in drained}
        page = book(*leases, owners=(1, 2), drained=marks)
        return room_of("box", page, there, need_bytes=1, may_split=False, name="m", owner=ME)

    parts = {"sim0": 4, "host": 4, "piece_bytes": GIB}
    for by, words, shown in ((1, {"sim0": 8}, (True, False)), (1, parts, (False, True))):
        assert (seen(lease("m", by=by, **words)).here, seen(lease("m", **words)).warm) == shown
    theirs = seen(lease("m", by=2, sim0=8))
    assert (theirs.here, theirs.idle_bytes) == (False, {(10, 0): (8 * GIB, 0)})
    assert not seen(drained=["sim:0"]).drained and seen(drained=["sim:0", "sim:1"]).drained


GIBS = st.integers(1, 20)


@given(
    st.lists(
        st.tuples(GIBS, st.lists(st.tuples(GIBS, st.sampled_from([10, 20, 30])), max_size=3)),
        min_size=9,
        max_size=14,
    ),
    GIBS,
)
def test_the_best_eight_have_the_best_level_of_all(boxes, need):
    """A plan of every host would find no host with less effort, and no less important victims."""
    wanted = request("qwen", need, wait=False)
    offers, rooms = {}, []
    for number, (gib, models) in enumerate(boxes):
        there = world(sim0=gib)
        kept, left = [], gib
        for n, (size, importance) in enumerate(models):
            if size <= left:
                kept.append(lease(f"m{n}", by=2, sim0=size, importance=importance))
                left -= size
        page, name = book(*kept), f"box{number:02}"
        offers[name] = offer_of(plan(page, wanted, there, lru), name)
        rooms.append(
            room_of(
                name, page, there, need_bytes=need << 30, may_split=False, name="qwen", owner=ME
            )
        )
    best = ranked(offers.values())[0]
    best_of_eight = ranked(offers[name] for name in likeliest_first(rooms)[:MOST_PLANNED])[0]
    assert best_of_eight.level == best.level
    assert best_of_eight.victims_importance == best.victims_importance
    if best.level is PlanLevel.ROOM:
        assert best_of_eight.left_bytes == best.left_bytes


@pytest.mark.parametrize("gib", [4, 20, 40, 70])
def test_the_best_of_eight_plans_is_the_best_of_all(gib):
    """The rooms of all hosts are enough to choose the eight that make a plan."""
    there, wanted = bench_fleet.hosts(Random(gib), 30), request("new", gib)
    best, best_of_all, _ = bench_fleet.decide(there, wanted)
    assert best == best_of_all


def test_the_best_of_eight_plans_is_the_best_of_all_where_every_host_must_evict():
    there, wanted = bench_fleet.hosts(Random(1), 40), request("new", 76)
    full = {
        name: host
        for name, host in there.items()
        if bench_fleet.offer(name, host, wanted).level is PlanLevel.EVICT
    }
    assert len(full) > MOST_PLANNED
    best, best_of_all, _ = bench_fleet.decide(full, wanted)
    assert best.host == best_of_all.host
    assert largest_first([("small", 4), ("big", 70), ("also", 4)]) == ("big", "also", "small")
