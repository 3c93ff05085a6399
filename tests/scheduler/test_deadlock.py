"""Requests that can never be served, found by reduction; then which request may pass another, for how long."""

import itertools
from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.facts import Grant, Refuse, Wait
from gpu_runtime.scheduler.feasibility import deadlocked
from gpu_runtime.scheduler.queue import aged, queue
from tests.worlds import NOW, at, book, decide, lease, request, ticket, world

HELD = lease("a", sim0=10, pins=1), lease("b", by=2, sim0=10, pins=1)
WAITS = ticket("x", sim0=10, held=(at(1, "a"),)), ticket("y", by=2, sim0=10, held=(at(2, "b"),))


def test_of_two_threads_that_wait_for_each_others_model_the_youngest_is_refused():
    """It has waited least. The other thread continues once the refused thread's block has ended."""
    page = book(*HELD, tickets=[replace(WAITS[0], arrived=NOW - 5)])
    young = request("y", 10, by=2, key="young", held=(at(2, "b"),))
    after, verdict = decide(page, young, world(sim0=20))
    assert isinstance(verdict, Refuse)
    assert (verdict.kind, verdict.need_bytes) == ("deadlock", 10 * 2**30)
    assert "x waits while its thread holds a, y waits while its thread holds b" in verdict.because
    assert after.tickets == page.tickets and list(after.leases()) == list(page.leases())
    page = book(*HELD, tickets=[replace(WAITS[1], arrived=NOW - 1)])
    _, verdict = decide(page, request("x", 10, held=(at(1, "a"),), arrived=NOW - 5), world(sim0=20))
    assert isinstance(verdict, Wait)


def test_a_need_that_another_card_can_meet_is_no_deadlock():
    """The cycle is over sim:0, but the thread that uses sim:2 will finish, and then one fits."""
    b, c = lease("b", by=2, sim1=10, pins=1), lease("c", by=3, sim2=10, pins=1)
    there = world(sim0=10, sim1=10, sim2=10)
    assert deadlocked(book(HELD[0], b, c, tickets=WAITS), there) == ()
    bound = tuple(replace(one, places=("sim:0", "sim:1")) for one in WAITS)
    assert deadlocked(book(HELD[0], b, c, tickets=bound), there) == bound
    page = book(*HELD, tickets=WAITS, limits={"sim:0": 20 * 2**30})
    assert len(deadlocked(page, world(sim0=40))) == 2


def test_a_request_that_holds_nothing_others_could_use_is_not_deadlocked():
    """It waits behind deadlocked threads, and its refusal would help no other request."""
    third = ticket("z", by=3, sim0=5, held=(at(3, "c"),))
    bound = [replace(one, places=("sim:0",)) for one in (*WAITS, third)]
    page = book(*HELD, lease("c", by=3, sim1=1, pins=1), tickets=bound)
    assert [t.name for t in deadlocked(page, world(sim0=20, sim1=20))] == ["x", "y"]


@pytest.mark.parametrize(
    ("layout", "gib", "fits"),
    [
        ("", (10,), True),
        ("", (11,), False),
        ("balanced", (4, 4), True),
        ("balanced", (6, 6), False),
        ("proportional", (7, 7), True),
        ("proportional", (8, 7), False),
        ("whole", (1, 1), False),
    ],
)
def test_whether_a_request_will_fit_depends_on_its_layout(layout, gib, fits):
    """10 and 4 GiB are free beside what stays. No card is empty. If it fits, the other one is no deadlock."""
    a, b = lease("a", sim0=4, pins=1), lease("b", by=2, sim1=2, pins=1)
    kept, other = lease("kept", by=3, sim1=3, keep=True), ticket("x", held=(a.id,), sim0=11)
    need = {f"sim{n}": amount for n, amount in enumerate(gib)}
    wants = ticket("y", by=2, held=(b.id,), layout=layout, **need)
    page = book(a, b, kept, tickets=[other, wants])
    assert (deadlocked(page, world(sim0=14, sim1=9)) == ()) == fits


# An oracle: try every order in which threads might finish.


@cache
def can_all_finish(
    held: tuple[tuple[str, int], ...],
    needs: tuple[tuple[int, frozenset[str]] | None, ...],
    limits: tuple[tuple[str, int], ...],
) -> frozenset[int]:
    """The threads that can finish, in the best order of finishing. One without a need finishes by itself."""
    best: frozenset[int] = frozenset()
    todo, seen = [best], set()
    while todo:
        done = todo.pop()
        if done in seen:
            continue
        seen.add(done)
        best = max(best, done, key=len)
        used = {
            device: sum(size for n, (on, size) in enumerate(held) if on == device and n not in done)
            for device, _ in limits
        }
        for n, need in enumerate(needs):
            if n in done:
                continue
            if need is None or any(
                need[0] <= limit - used[device] for device, limit in limits if device in need[1]
            ):
                todo.append(done | {n})
    return best


threads = st.lists(
    st.tuples(
        st.sampled_from(["sim:0", "sim:1"]),
        st.integers(1, 6),
        st.none() | st.tuples(st.integers(1, 10), st.sampled_from([(), ("sim:0",), ("sim:1",)])),
    ),
    min_size=2,
    max_size=5,
)


@given(threads)
@example([("sim:0", 6, (6, ())), ("sim:0", 4, (5, ())), ("sim:1", 6, None)])
@example([("sim:0", 3, (4, ("sim:0",)))] * 3)  # any two alone are not deadlocked
@example([("sim:0", 5, (6, ("sim:0",)))] * 2 + [("sim:1", 4, (5, ("sim:1",)))])  # one can finish
def test_reduction_agrees_with_every_order_of_finishing(threads_):
    """One that can finish is never deadlocked; one that cannot is found if it holds what others could use."""
    there = world(sim0=10, sim1=10)
    leases, tickets, held, needs = [], [], [], []
    for n, (device, gib, need) in enumerate(threads_, start=1):
        leases.append(lease("m", by=n, pins=1, **{device.replace(":", ""): gib}))
        held.append((device, gib))
        if need:
            size, places = need
            wanted = {(places or ("sim:0",))[0].replace(":", ""): size}
            tickets.append(ticket("x", by=n, held=(at(n, "m"),), places=places, **wanted))
        needs.append((need[0], frozenset(need[1] or ("sim:0", "sim:1"))) if need else None)
    finish = can_all_finish(tuple(held), tuple(needs), (("sim:0", 10), ("sim:1", 10)))
    found = deadlocked(book(*leases, tickets=tickets), there)
    named = {int(one.owner.split(".")[0]) - 1 for one in found}
    stuck = set(range(len(threads_))) - finish
    assert named <= stuck
    if any(
        held[a][0] in needs[b][1] and held[b][0] in needs[a][1]
        for a, b in itertools.combinations(stuck, 2)
    ):
        assert named


# -- the queue -------------------------------------------------------------------------------------
def test_importance_then_arrival():
    tickets = [ticket("late", arrived=NOW - 1), ticket("early", arrived=NOW - 2)]
    tickets.append(ticket("urgent", arrived=NOW, importance="urgent"))
    tickets.append(ticket("asked", verb="evict", arrived=0))
    assert [t.name for t in queue(book(tickets=tickets), world(sim0=20))] == [
        "urgent",
        "early",
        "late",
    ]


def test_waiting_thirty_seconds_is_worth_one_class():
    """A waiting request becomes more important with time, so every request is served in the end."""
    by_wait = {0: 30, 29.9: 30, 30: 20, 65: 10, 95: 5, 500: 1}
    assert {waited: aged(30, waited) for waited in by_wait} == by_wait
    others = {(15, 31): 10, (0, 500): 0, (40, 31): 30, (10, -5): 10}
    assert {pair: aged(*pair) for pair in others} == others


def test_importance_and_time_decide_who_waits():
    page = book(tickets=[ticket("old", by=2, importance="batch", arrived=NOW - 130, sim0=20)])
    _, verdict = decide(page, request("new", 4, importance="high"), world(sim0=20))
    assert isinstance(verdict, Wait) and verdict.ahead == 1
    page = book(tickets=[ticket("old", by=2, sim0=20)])
    assert isinstance(decide(page, request("new", 4, importance="high"), world(sim0=20))[1], Grant)


def test_a_stopped_process_is_skipped_not_deleted():
    """Its ticket was not refreshed for 2 s, so it would not take the room. The ticket stays in the book."""
    page = book(tickets=[ticket("big", by=2, sim0=20, refreshed=NOW - 2.1)])
    after, verdict = decide(page, request("small", 4), world(sim0=20))
    assert isinstance(verdict, Grant) and after.tickets == page.tickets
    page = book(tickets=[ticket("big", by=2, sim0=20, refreshed=NOW - 2)])
    assert isinstance(decide(page, request("small", 4), world(sim0=20))[1], Wait)


def test_an_elder_blocked_by_a_model_in_use_may_be_passed_for_thirty_seconds():
    """The request ahead cannot use the room yet, but passing requests must not delay it for ever."""
    busy = lease("busy", by=3, sim0=10, pins=1)

    def passes(seconds):
        first = ticket("big", by=2, sim0=18, blocked_since=NOW - seconds)
        page = book(busy, tickets=[first])
        return isinstance(decide(page, request("small", 4), world(sim0=20))[1], Grant)

    assert [passes(seconds) for seconds in (1, 29.9, 30, 100)] == [True, True, False, False]


def test_a_thread_that_holds_the_model_an_elder_waits_for_may_pass():
    """The request ahead needs that model's bytes, so each would wait for the other."""
    mine = lease("mine", sim0=4, pins=1)
    page = book(mine, tickets=[ticket("big", by=2, sim0=18)])
    assert isinstance(decide(page, request("more", 4, held=(mine.id,)), world(sim0=20))[1], Grant)
    assert isinstance(decide(page, request("more", 4), world(sim0=20))[1], Wait)
    elsewhere = lease("mine", sim1=4, pins=1)
    page = book(elsewhere, tickets=[ticket("big", by=2, sim0=18, places=("sim:0",))])
    there, bound = world(sim0=20, sim1=4), dict(devices=("sim:0",))
    more = request("more", 4, held=(elsewhere.id,), **bound)
    assert isinstance(decide(page, more, there)[1], Wait)
