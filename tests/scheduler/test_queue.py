"""The order in which waiting requests are served."""

from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.facts import Rules
from gpu_runtime.scheduler.queue import elders, load_seconds, queue
from tests.worlds import NOW, book, lease, request, ticket, world

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
    elder = ticket("a", seconds=10.0, arrived=NOW - 9)
    page = book(owners=(1, 2), tickets=[elder])
    assert elders(page, request("b", 8, arrived=NOW), THERE) == ()
    assert elders(page, request("b", 12, arrived=NOW), THERE) == (elder,)
    waiting = ticket("b", key="first", seconds=12.0, arrived=NOW - 1)
    both = book(owners=(1, 2), tickets=[elder, waiting])
    assert elders(both, request("b", 12, arrived=NOW), THERE) == (waiting,)


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
def test_the_elders_are_the_tickets_ahead_in_the_queue(waiting, ours, has_ticket, later):
    """`elders` compares each ticket with the request, the queue sorts all: the same order."""
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
    assert {one.key for one in elders(page, wanted, there)} == {one.key for one in ahead}
