"""Models in host memory are ranked, too: the least valuable one leaves for a victim's place."""

import pytest

from gpu_runtime.facts import Drop, Move, Phase, Wait
from gpu_runtime.scheduler.admission import admit
from gpu_runtime.scheduler.recall import obey
from tests.worlds import (
    NOW,
    ask_until,
    at,
    book,
    decide,
    lease,
    owner,
    request,
    size,
    ticket,
    world,
)

THERE = world(sim0=20, host=10)


def places(page):
    return {lease.name: lease.where for lease in page.leases()}


@pytest.mark.parametrize("holder", [1, 2])
def test_a_stale_model_leaves_host_memory_for_a_victim(holder):
    """If the stale model stayed in host memory, every later victim would be dropped and loaded from disk again."""
    stale = lease("stale", by=holder, host=8, last_used=NOW - 900)
    page = book(stale, lease("victim", sim0=9, last_used=NOW - 60), owners=(1, 2))
    page, _ = ask_until(page, request("qwen", 14), THERE)
    assert places(page) == {"victim": "host", "qwen": "arriving"}


def test_what_is_worth_more_stays_in_host_memory_and_what_would_not_help():
    page = book(lease("warm", host=8, last_used=NOW - 9), lease("old", sim0=9, last_used=NOW - 60))
    page, _ = ask_until(page, request("qwen", 14), THERE)
    assert places(page) == {"warm": "host", "qwen": "arriving"}
    warm = lease("warm", host=8, last_used=NOW - 900, importance="high")
    page = book(warm, lease("victim", sim0=9, last_used=NOW - 60))
    page, _ = ask_until(page, request("qwen", 14, importance="high"), THERE)
    assert places(page) == {"warm": "host", "qwen": "arriving"}
    page = book(
        lease("stale", host=2, last_used=NOW - 900),
        lease("fresh", host=5, last_used=NOW),
        lease("victim", sim0=9, last_used=NOW - 60),
    )
    page, _ = ask_until(page, request("qwen", 14), THERE)
    assert places(page) == {"stale": "host", "fresh": "host", "qwen": "arriving"}
    # Its bytes there blocked the warm pool for ever: each other model was loaded from disk.
    parts = lease("parts", sim0=1, host=9, piece_bytes=size(1), last_used=NOW - 900)
    victim = lease("victim", sim0=8, last_used=NOW - 60)
    page, _ = ask_until(book(parts, victim), request("wanted", 8), world(sim0=9, host=10))
    assert places(page) == {"victim": "host", "wanted": "arriving"}


def test_the_model_that_is_about_to_return_stays_where_others_can_make_room():
    """Used longest ago, its place would be just large enough for the victim. It still stays."""
    wanted = lease("wanted", host=9, last_used=NOW - 900)
    victim = lease("victim", sim0=14, last_used=NOW - 60)
    page, heard = ask_until(book(wanted, victim), request("wanted", 9), world(sim0=20, host=14))
    assert page.find(at(1, "wanted")) is not None
    assert "unloaded from RAM" not in " ".join(verdict.because for verdict in heard)
    # Another process has just used its model. Once that model may be unloaded, the room is enough.
    wanted, victim = lease("wanted", host=2), lease("victim", sim0=9, droppable=False)
    fresh = lease("fresh", by=2, host=9, last_used=NOW - 1)
    page, wait = decide(book(wanted, victim, fresh), request("wanted", 2), world(sim0=9, host=11))
    assert isinstance(wait, Wait) and not wait.steps
    assert page.find(at(1, "wanted")).phase is Phase.SETTLED


@pytest.mark.parametrize("holder", [1, 2])
def test_the_model_that_is_about_to_return_is_unloaded_if_a_victim_has_no_other_place(holder):
    """The victim's weights exist nowhere else, so the requested model is loaded again and does not wait."""
    wanted = lease("wanted", host=9)
    victim = lease("victim", by=holder, sim0=14, droppable=False)
    there = world(sim0=20, host=14)
    page, heard = ask_until(book(wanted, victim, owners=(1, 2)), request("wanted", 9), there)
    assert places(page) == {"wanted": "arriving", "victim": "host"}
    assert heard[0].steps == (
        Drop(
            at(1, "wanted"),
            wanted.shares,
            "RAM has no room for wanted beside the models that leave sim:0.",
        ),
    )
    assert "wanted is unloaded from RAM, and loaded again then." in heard[0].because


def test_an_owner_that_does_not_answer_does_not_keep_the_victim_on_the_card():
    """A model in host memory should leave for it; after two seconds the victim is dropped."""
    stale = lease("stale", by=2, host=8, last_used=NOW - 900)
    page = book(stale, lease("victim", sim0=9, last_used=NOW - 60), owners=(1, 2))
    page, first = decide(page, request("qwen", 14), THERE)
    assert isinstance(first, Wait) and (first.asked, first.steps) == ((at(2, "stale"),), ())
    later = world(sim0=20, host=10, now=NOW + 3)
    _, verdict = decide(page, request("qwen", 14), later)
    assert [type(step) for step in verdict.steps] == [Drop]


def test_nothing_leaves_beside_a_lease_in_parts_that_frees_the_card_as_it_leaves_host_memory():
    """Its bytes on the card are enough, and `last` was unloaded too. Day 7051 of tests/simulation found it."""

    def rank(one, world):
        return {"first": 1, "last": 2, "parts": 0 if one.on_host else 3}[one.name]

    parts = lease("parts", sim0=7, host=3, piece_bytes=size(1))
    page = book(parts, lease("first", sim0=3), lease("last", sim0=2))
    _, verdict = admit(page, request("qwen", 5), world(sim0=12, host=3), rank)
    assert [(type(step), step.lease) for step in verdict.steps] == [(Drop, parts.id)]


def test_an_owner_renews_its_own_part_of_the_warm_pool_for_a_recalled_model():
    recall = ticket("qwen", by=2, sim0=14, recalls={at(1, "victim"): 0})
    page = book(
        lease("stale", host=8, last_used=NOW - 900),
        lease("victim", sim0=9, last_used=NOW - 60),
        owners=(1, 2),
        tickets=[recall],
    )
    after, steps, _ = obey(page, owner(1).id, THERE, "k")
    assert [(type(step), step.lease) for step in steps] == [(Drop, at(1, "stale"))]
    _, [step], _ = obey(after.without_lease(owner(1).id, "stale"), owner(1).id, THERE, "k")
    assert isinstance(step, Move) and step.lease == at(1, "victim")


@pytest.mark.parametrize(("needed_on", "step_type"), [("sim1", Drop), ("sim0", Move)])
def test_a_lease_in_parts_that_is_recalled_for_host_memory_leaves_both(needed_on, step_type):
    """Its rest would be dropped in the next decision. A request for its own card leaves the bytes in RAM."""
    parts = lease("parts", sim0=4, host=5, piece_bytes=size(1), last_used=NOW - 900)
    recall = ticket("qwen", by=2, recalls={parts.id: 0}, **{needed_on: 6})
    there = world(sim0=20, sim1=20, host=10)
    page = book(parts, owners=(1, 2), tickets=[recall])
    _, [step], _ = obey(page, owner(1).id, there, "k")
    assert isinstance(step, step_type) and step.lease == parts.id
