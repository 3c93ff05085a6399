"""Which processes do not answer requests, and since when."""

import pytest

from gpu_runtime.facts import Phase, Snapshot
from gpu_runtime.scheduler.recall import unanswered
from tests.worlds import GIB, NOW, at, book, decide, lease, owner, request, ticket, world


def seen(*leases, tickets, now=NOW):
    page = book(*leases, owners=(1, 2, 3), tickets=tickets)
    return Snapshot(now, 0.0, owner(9), (), page.sections, page.tickets, (), (), True)


def silent(*leases, tickets, now=NOW):
    """Maps the pid of each silent process to the time since which it has not answered."""
    return {one.owner.pid: one.since for one in unanswered(seen(*leases, tickets=tickets, now=now))}


def asks(verb, ago, name="qwen"):
    """A ticket with which process 2 requests something of process 1."""
    return ticket(
        at(1, name),
        by=2,
        verb=verb,
        arrived=NOW - ago,
        recalls={at(1, name): 0} if verb == "evict" else {},
    )


@pytest.mark.parametrize(
    "verb, there",
    [
        ("evict", dict(sim0=8)),
        ("move", dict(sim0=8)),
        ("pin", dict(sim0=8)),
        ("unpin", dict(sim0=8, keep=True)),
        ("preload", dict(host=8)),
        ("defrag", dict(sim0=8)),
        ("hibernate", dict(host=8)),
        ("shed", dict(sim0=8, pins=1, shadow_bytes=8)),
        ("shed", dict(host=8, disk_room=8 * GIB)),
    ],
)
def test_an_owner_is_silent_since_the_unanswered_request(verb, there):
    assert silent(lease("qwen", **there), tickets=[asks(verb, 40)]) == {1: NOW - 40}


def test_an_owner_that_waits_for_room_has_answered_and_has_two_seconds():
    """An owner counts as silent only after two seconds, since its monitor may be busy for that long."""
    assert silent(lease("qwen", sim0=8), tickets=[asks("evict", 2)]) == {}
    assert silent(lease("qwen", sim0=8), tickets=[asks("evict", 2.1)]) == {1: NOW - 2.1}
    waits = ticket("qwen", by=1, sim0=8)
    assert silent(tickets=[asks("preload", 40), waits]) == {}
    assert silent(tickets=[asks("preload", 40)]) == {1: NOW - 40}
    tickets = [asks("evict", 10), ticket(at(3, "x"), by=2, key="3", verb="pin", arrived=NOW - 50)]
    assert list(silent(lease("qwen", sim0=8), lease("x", by=3, sim0=1), tickets=tickets)) == [3, 1]


@pytest.mark.parametrize(
    "verb, there",
    [
        ("evict", dict(sim0=8, pins=1)),
        ("evict", dict(sim0=8, phase=Phase.LEAVING)),
        ("evict", dict(host=8)),
        ("preload", dict(host=8, phase=Phase.ARRIVING)),
        ("preload", dict(sim0=8)),
        ("pin", dict(sim0=8, keep=True)),
        ("hibernate", dict(host=8, stowing=True)),
        ("shed", dict(sim0=8)),
        ("shed", dict(host=8, stowing=True)),
    ],
)
def test_an_owner_that_acts_or_declines_has_answered(verb, there):
    assert silent(lease("qwen", **there), tickets=[asks(verb, 40)]) == {}


def test_a_wait_for_a_silent_owner_says_since_when_it_does_not_answer():
    """The wait line showed a notebook as idle that computed for 29 s without answering."""
    page = book(
        lease("kernel", by=2, sim0=14, kind="kernel", droppable=False, last_used=NOW - 35),
        tickets=[ticket("qwen", recalls={at(2, "kernel"): 0}, recalled_since=NOW - 29)],
    )
    _, wait = decide(page, request("qwen", 14), world(sim0=20))
    assert wait.silent == (at(2, "kernel"),)
    assert wait.because.endswith(
        "was asked to move its memory (14.0 GiB) to RAM, and has not answered for 29 s."
    )


def test_each_of_several_that_a_request_recalls_answers_for_itself():
    """An owner counts as silent since the recall of its leases, which may be later than the request itself."""
    request = ticket(
        "big",
        by=3,
        arrived=NOW - 90,
        recalls={at(1, "a"): 0, at(1, "b"): 0, at(2, "c"): 0},
        recalled_since=NOW - 30,
    )
    there = (lease("a", sim0=4), lease("b", sim0=4), lease("c", by=2, sim0=4, phase=Phase.LEAVING))
    assert silent(*there, tickets=[request]) == {1: NOW - 30}
    request = ticket(
        "big", by=3, refreshed=NOW - 10, recalls={at(1, "a"): 0}, recalled_since=NOW - 30
    )
    assert silent(lease("a", sim0=4), tickets=[request]) == {}
    assert (
        silent(
            lease("a", sim0=4),
            tickets=[
                ticket("big", by=1, recalls={at(1, "a"): 0}, recalled_since=NOW - 30),
                ticket("other", by=2, sim0=8),
            ],
        )
        == {}
    )
    page = seen(tickets=[asks("evict", 40)])
    without = {id: section for id, section in page.sections.items() if id != owner(1).id}
    assert unanswered(Snapshot(NOW, 0.0, owner(9), (), without, page.tickets, (), (), True)) == ()
