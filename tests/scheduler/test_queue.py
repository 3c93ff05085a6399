"""The order in which waiting requests are served."""

from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.facts import Rules
from gpu_runtime.scheduler.queue import aged, load_seconds, queue, requests_ahead
from tests.worlds import NOW, book, decide, lease, owner, request, ticket, world

THERE = world(sim0=20, host=20)
# Name, owner, seconds since the arrival, seconds of the load, importance.
WAITING = st.tuples(
    st.sampled_from("ab"),
    st.sampled_from([1, 2]),
    st.sampled_from([0.0, 5.0, 29.0, 30.0, 31.0, 95.0, 120.0]),
    st.sampled_from([1.0, 2.0, 40.0]),
    st.sampled_from([1, 5, 10, 20]),
)


def order(*tickets, now=NOW):
    page = book(owners=(1, 2, 3), tickets=[replace(ticket, refreshed=now) for ticket in tickets])
    return [ticket.key for ticket in queue(page, world(sim0=20, now=now))]


def test_the_load_that_serves_most_users_of_one_process_for_each_second_is_first():
    slow = ticket("slow", seconds=30.0, arrived=NOW - 9)
    quick = ticket("quick", seconds=10.0, arrived=NOW - 5)
    popular = [ticket("popular", key=f"p{n}", seconds=20.0, arrived=NOW - n) for n in (1, 2, 3)]
    assert order(slow, quick, *popular) == ["p3", "p2", "p1", "1:quick", "1:slow"]
    one = ticket("same", by=1, seconds=10.0, arrived=NOW - 2)
    two = ticket("same", by=2, seconds=10.0, arrived=NOW - 3)
    first = ticket("other", seconds=10.0, arrived=NOW - 4)
    assert order(one, two, first) == ["1:other", "2:same", "1:same"]
    assert order(ticket("quick", seconds=0.1), ticket("slow", seconds=90.0, importance="high")) == [
        "1:slow",
        "1:quick",
    ]
    slow = ticket("slow", seconds=2.0, arrived=NOW - 10)
    popular = [ticket("popular", key=f"p{n}", seconds=2.0, arrived=NOW - n) for n in (1, 2, 3)]
    assert order(slow, *popular)[0] == "1:slow"
    assert order(slow, *popular, now=NOW - 1)[-1] == "1:slow"


def test_a_request_stands_where_its_ticket_would():
    """Both requests are for the model b. A request without a ticket counts among the users of its model, too."""
    first = ticket("a", seconds=10.0, arrived=NOW - 9)
    page = book(owners=(1, 2), tickets=[first])
    assert requests_ahead(page, request("b", 8, arrived=NOW), THERE) == ()
    assert requests_ahead(page, request("b", 12, arrived=NOW), THERE) == (first,)
    waiting = ticket("b", key="first", seconds=12.0, arrived=NOW - 1)
    both = book(owners=(1, 2), tickets=[first, waiting])
    assert requests_ahead(both, request("b", 12, arrived=NOW), THERE) == (waiting,)


def test_a_restore_takes_less_than_a_load():
    measured = dict(reload_seconds=40.0, restore_seconds=2.0)
    assert load_seconds(book(lease("q", host=9, **measured)), request("q", 9)) == 2.0
    assert load_seconds(book(lease("q", host=9)), request("q", 9)) == 1.0
    assert load_seconds(book(), request("q", 9)) == 9.7
    parts = lease("q", sim0=6, host=3, piece_bytes=1, **measured)
    assert load_seconds(book(parts), request("q", 9)) == 0.7, "a third of it returns"
    assert load_seconds(book(), request("code#1", 9, kind="block")) == 0.0


@example([("a", 2, 30.0, 1.0, 20)], ("b", 1, 0.0, 1.0, 10), False, 0.0)  # it has just risen
@given(
    st.lists(WAITING, max_size=12), WAITING, st.booleans(), st.sampled_from([0.0, 1.0, 30.0, 190.0])
)
def test_the_requests_ahead_are_those_of_the_queue(waiting, ours, has_ticket, later):
    """`requests_ahead` compares each ticket with the request, the queue sorts all: the same order."""
    tickets = [
        ticket(name, by=by, key=f"t{n}", arrived=NOW - age, seconds=seconds, importance=importance)
        for n, (name, by, age, seconds, importance) in enumerate(waiting)
    ]
    name, by, age, seconds, importance = ours
    own = ticket(name, by=by, key="ours", arrived=NOW - age, seconds=seconds, importance=importance)
    page = book(
        lease(name, by=by, host=9, restore_seconds=seconds, reload_seconds=seconds),
        owners=(1, 2),
        tickets=[*tickets, own] if has_ticket else tickets,
    )
    wanted = request(name, 9, by=by, key="ours", arrived=NOW - age, importance=importance)
    there = replace(world(sim0=20, now=NOW + later), rules=replace(Rules(), refresh_seconds=1e9))
    order = queue(page if has_ticket else page.with_ticket(own), there)
    ahead = order[: order.index(own)]
    assert {one.key for one in requests_ahead(page, wanted, there)} == {one.key for one in ahead}


# -- GPU_FAIRNESS: fewer card-hours first


def fair(past_use, now=NOW):
    """The world of a process whose user has had `past_use` card-hours; None: its GPU_FAIRNESS is off."""
    return replace(world(sim0=20, now=now), rules=Rules(past_use=past_use, refresh_seconds=1e9))


def test_of_equals_the_user_with_fewer_card_hours_is_first_and_why_says_so():
    """Without the setting the earlier request is first. The sentence has both figures and both users."""
    page = book(lease("busy", by=3, sim0=20, pins=1), owners=(1, 2, 3))
    for number, user in enumerate(("ann", "bob"), 1):
        section = page.sections[owner(number).id]
        page = page.with_section(replace(section, owner=replace(section.owner, user=user)))
    for number, past_use in ((1, 9.3), (2, 0.4)):
        wanted = request("m", 8, by=number, key=f"k{number}", arrived=NOW - 9 + number)
        page, _ = decide(page, wanted, fair(past_use))
    assert [one.key for one in queue(page, fair(None))] == ["k2", "k1"]
    page, verdict = decide(page, request("m", 8, by=1, key="k1", arrived=NOW - 8), fair(9.3))
    assert verdict.ahead == 1 and verdict.because.startswith("bob is first, with 0.4 card-hours")
    assert page.events[-1].because == verdict.because, "also where bob has come later"
    assert "ann has had 9.3 (GPU_FAIRNESS=day)" in verdict.because
    _, verdict = decide(page, request("m", 8, by=2, key="k2", arrived=NOW - 7), fair(0.4))
    assert verdict.ahead == 0 and "FAIRNESS" not in verdict.because


HOURS = st.sampled_from([0.0, 0.4, 9.3, 80.0])
FAIR = st.lists(st.tuples(WAITING, HOURS), min_size=1, max_size=10)


def tickets_of(drawn, with_hours=True):
    return [
        ticket(
            name, by=by, key=f"t{n}", arrived=NOW - age, seconds=seconds, importance=importance,
            past_use=past_use if with_hours else None,
        )
        for n, ((name, by, age, seconds, importance), past_use) in enumerate(drawn)
    ]  # fmt: skip


@given(FAIR, st.sampled_from([0.0, 31.0, 190.0]))
def test_importance_decides_first_and_then_the_card_hours_until_ageing_has_raised_a_request_to_the_top(
    drawn, later
):
    there = fair(0.0, NOW + later)
    order = queue(book(owners=(1, 2), tickets=tickets_of(drawn)), there)
    places = []
    for one in order:
        waited = there.now - one.arrived
        hours = one.past_use if waited < 150 else 0.0
        places.append((aged(one.importance, waited), hours))
    assert places == sorted(places)
    oldest = [one.arrived for one, place in zip(order, places, strict=True) if place == (1, 0.0)]
    waited = [arrived for arrived in oldest if there.now - arrived >= 200]
    assert waited == sorted(waited), "by arrival: nobody is passed for ever"


@given(FAIR, st.tuples(WAITING, HOURS), st.booleans())
def test_the_requests_ahead_are_those_of_the_queue_and_without_the_setting_those_without_card_hours(
    drawn, ours, stated
):
    """A process without the setting neither gains nor loses, whatever others state; nor does one with it among such."""
    (name, by, age, _, importance), past_use = ours
    wanted = request(name, 9, by=by, key="ours", arrived=NOW - age, importance=importance)
    plain = book(owners=(1, 2), tickets=tickets_of(drawn, with_hours=False))
    with_hours = book(owners=(1, 2), tickets=tickets_of(drawn))
    keys = lambda page, there: {one.key for one in requests_ahead(page, wanted, there)}
    before = keys(plain, fair(None))
    assert keys(with_hours, fair(None)) == before
    assert keys(plain, fair(past_use)) == before
    page, _ = decide(with_hours, wanted, fair(past_use))
    own = page.ticket("ours")
    if stated and own is not None:
        order = queue(page, fair(past_use))
        ahead = {one.key for one in order[: order.index(own)]}
        assert keys(with_hours, fair(past_use)) == ahead


@given(st.lists(st.tuples(WAITING, st.none() | HOURS), min_size=1, max_size=6), HOURS)
def test_all_processes_see_one_order_whichever_of_them_have_the_setting(drawn, read_since):
    """Nobody waits in a circle, also after a process has read a new account of hours."""
    tickets = [
        replace(one, past_use=past_use, seconds=load_seconds(book(), request("m", 9)))
        for one, (_, past_use) in zip(tickets_of([(w, 0.0) for w, _ in drawn]), drawn, strict=True)
    ]
    page = book(owners=(1, 2), tickets=tickets)
    order = [one.key for one in queue(page, fair(None))]
    for one in tickets:
        wanted = request(
            one.name, 9, by=1 if one.owner == owner(1).id else 2, key=one.key,
            arrived=one.arrived, importance=one.importance,
        )  # fmt: skip
        there = fair(None if one.past_use is None else read_since)
        ahead = {other.key for other in requests_ahead(page, wanted, there)}
        assert ahead == {*order[: order.index(one.key)]}


@given(
    st.lists(st.tuples(st.sampled_from([1, 5, 10, 20]), st.integers(1, 9), st.booleans()), max_size=5),
    st.sampled_from([1, 10, 20]), HOURS,
)  # fmt: skip
def test_card_hours_never_change_what_may_be_displaced(held, importance, past_use):
    leases = [
        lease(f"m{n}", by=2, sim0=size, importance=of, pins=int(pinned))
        for n, (of, size, pinned) in enumerate(held)
    ]
    wanted = request("new", 9, importance=importance)
    page = book(*leases, owners=(1, 2))
    one, other = (decide(page, wanted, fair(hours))[1] for hours in (None, past_use))
    assert one == other
