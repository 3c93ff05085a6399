"""A person moves a model to other cards: with free bytes only, which count on both until it is done."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.facts import (
    Asker,
    Cap,
    Footprint,
    Grant,
    Move,
    Phase,
    PlacementRules,
    Refuse,
    Share,
    Wait,
    overdrafts,
)
from gpu_runtime.scheduler.recall import Order, ask, new_order, obey
from gpu_runtime.scheduler.relief import drain, move, parse_cards
from gpu_runtime.scheduler.transitions import abandon, left
from tests.worlds import NOW, at, block, book, lease, owner, replayed, size, ticket, world

FOUR = world(sim0=8, sim1=8, sim2=8, sim3=8)


def moving(page, *cards, name="qwen", there=FOUR, pieces=(), **rules):
    lying = page.find(at(1, name))
    footprint = replace(Footprint.of(lying.bytes if lying else 0, "measured"), pieces=pieces)
    if len(cards) > 1:
        rules = {"layout": "balanced", "least_cards": len(cards), "most_cards": len(cards)} | rules
    wanted, me = PlacementRules(devices=cards, **rules), owner(1).id
    by_hand = lambda book: move(book, me, name, footprint, wanted, there, "k", "by hand")
    return replayed(by_hand, page)


def test_room_is_reserved_on_the_new_card_before_anything_leaves_the_old():
    """Both places count in full (law 1). Then only the new one does, and the event has the reason."""
    qwen = lease("qwen", sim0=6)
    page, step = moving(book(qwen), "sim:1")
    shares = (Share("sim:1", size(6)),)
    because = "qwen moved from sim:0 to sim:1, by hand."
    assert step == Move(qwen.id, qwen.shares, shares, because, "move")
    assert page.find(qwen.id).phase is Phase.LEAVING
    assert page.claims() == {"sim:0": size(6), "sim:1": size(6)}
    after = left(page, step, shares, FOUR)
    assert after.claims() == {"sim:1": size(6)} and after.find(qwen.id).away_since == 0.0
    [event] = after.events
    assert (event.action, event.because, event.bytes) == ("moved", step.because, size(6))
    assert abandon(page, owner(1).id, "qwen", "k", FOUR).find(qwen.id) == replace(qwen, key="")


def test_a_model_moves_to_several_cards_by_its_pieces_and_back_to_one():
    page, step = moving(book(lease("qwen", sim0=6)), "sim:2", "sim:3")
    assert step.shares == (Share("sim:2", size(3)), Share("sim:3", size(3)))
    page = left(page, step, step.shares, FOUR)
    page, back = moving(page, "sim:0")
    assert back.shares == (Share("sim:0", size(6)),)
    pieces = (size(1), size(1), size(4))
    _, step = moving(book(lease("qwen", sim0=6)), "sim:2", "sim:3", pieces=pieces)
    assert {share.bytes for share in step.shares} == {size(2), size(4)}
    page = book(lease("qwen", sim0=6))
    assert moving(page, "sim:0") == (page, None)
    wider = moving(book(lease("qwen", sim0=4)), "sim:0", "sim:1")[1]
    assert isinstance(wider, Move), "one card more is another place"


def of_ann(page):
    """The page, whose first process is ann's."""
    section = page.sections[owner(1).id]
    return page.with_section(replace(section, owner=replace(section.owner, user="ann")))


QWEN = lease("qwen", sim0=6)
DRAINED = drain(book(QWEN), FOUR.device("sim:1"), "ann", FOUR)
STAYS = {
    "in use": (book(replace(QWEN, pins=1)), "in use", "in use"),
    "kept": (book(replace(QWEN, keep=True)), "in use", "kept"),
    "block": (book(block("qwen", sim0=6)), "busy", "a block of code"),
    "on the host": (book(lease("qwen", host=6)), "away", "on no card"),
    "not held": (book(), "away", "on no card"),
    "not movable": (book(replace(QWEN, movable=False)), "fixed", "cannot be moved"),
    "no room": (
        book(QWEN, lease("idle", by=2, sim1=3), owners=(1, 2)),
        "hopeless",
        "qwen needs 6.0 GiB; sim:1 has 5.0 GiB free",
    ),
    "the room of a request ahead": (
        book(QWEN, tickets=[ticket("first", sim1=3)]),
        "hopeless",
        "sim:1 has 5.0 GiB free",
    ),
    "drained": (DRAINED, "hopeless", "sim:1 was drained by ann"),
    "above the cap": (of_ann(book(QWEN)), "hopeless", "sim:1 has 4.0 GiB free"),
    "not measured": (book(QWEN), "hopeless", "sim:1 has not been measured yet"),
}


@pytest.mark.parametrize("page, kind, told", STAYS.values(), ids=STAYS)
def test_a_model_that_cannot_move_is_refused_and_nothing_changes(page, kind, told):
    there = FOUR
    if "measured" in told:
        real = tuple(replace(one, simulated=one.id != "sim:1") for one in FOUR.devices)
        there = replace(FOUR, devices=real)
    elif "4.0 GiB" in told:
        cap = Cap("ann", "file", bytes_per_device=size(4))
        there = replace(FOUR, rules=replace(FOUR.rules, cap=cap))
    after, refusal = moving(page, "sim:1", there=there)
    assert after is page
    assert isinstance(refusal, Refuse) and refusal.kind == kind and told in refusal.because


def test_a_refused_move_names_what_is_on_the_card_the_largest_first():
    coming = lease(
        "coming", sim0=2, target=(Share("sim:1", size(2)),), phase=Phase.LEAVING, key="x"
    )
    small, large = lease("small", by=2, sim1=1), lease("large", by=2, sim1=4)
    _, refusal = moving(book(QWEN, small, large, coming), "sim:1")
    assert refusal.holders == (large.id, coming.id, small.id)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 8)), min_size=1, max_size=6),
    st.integers(1, 6),
    st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True),
)
def test_no_move_ever_takes_a_card_over_its_budget(others, own, cards):
    """Any content of the cards, any division of the model. No byte is lost, also after a refusal."""
    there = [lease(f"m{i}", **{f"sim{card}": gib}) for i, (card, gib) in enumerate(others)]
    page = book(lease("qwen", sim0=own), *there, limits=FOUR.limits)
    after, step = moving(page, *(f"sim:{card}" for card in cards))
    assert overdrafts(page, after) == {}
    if isinstance(step, Move):
        assert sum(share.bytes for share in step.shares) == size(own)
        assert {share.device for share in step.shares} == {f"sim:{card}" for card in cards}


# -- asked of another process ----------------------------------------------------------------------
def asked(page, *cards, there=FOUR):
    wanted = new_order(
        "2:move", owner(2).id, "move", at(1, "qwen"), NOW, because="ann", places=cards
    )
    return replayed(lambda book: ask(book, wanted, there), page)


def obeyed(page, asker):
    """The steps and orders with which the owner obeys `asker`."""
    return replayed(lambda book: obey(book, owner(1).id, FOUR, "k", {"2:move": asker}), page)[1:]


def test_a_move_request_names_the_cards_for_the_owner_who_moves_for_an_operator_only():
    page, verdict = asked(book(lease("qwen", sim0=6), owners=(1, 2)), "sim:1", "sim:2")
    owned = (at(1, "qwen"),)
    assert verdict == Wait("pid 1 was asked to move qwen", recalls={owned[0]: 0}, silent=owned)
    steps, [order] = obeyed(page, Asker("ann", at_home=True))
    places = ("sim:1", "sim:2")
    assert order == Order("2:move", "move", "qwen", "ann", "", places, "ann, pid 2", "2.1.0")
    assert steps == ()
    page, _ = asked(book(lease("qwen", sim0=6), owners=(1, 2)), "sim:1")
    assert "ann may not move qwen" in obeyed(page, Asker("ann"))[1][0].refused
    assert obeyed(page, Asker("ann", operator=True))[1][0].refused == ""


def test_a_move_to_the_current_card_is_done_and_one_of_a_model_in_use_is_refused():
    _, verdict = asked(book(lease("qwen", sim1=6), owners=(1, 2)), "sim:1")
    assert isinstance(verdict, Grant)
    _, verdict = asked(book(lease("qwen", sim0=3, sim1=3), owners=(1, 2)), "sim:1")
    assert isinstance(verdict, Wait), "half of it is elsewhere"
    _, verdict = asked(book(lease("qwen", sim0=6, pins=1), owners=(1, 2)), "sim:1")
    assert isinstance(verdict, Refuse) and verdict.kind == "in use"


@pytest.mark.parametrize(
    "text, cards",
    [
        ("cuda:1", ("cuda:1",)),
        ("cuda:0,1", ("cuda:0", "cuda:1")),
        ("sim:0, sim:2,", ("sim:0", "sim:2")),
        ("sim:1,1", ("sim:1",)),
        ("GPU-1234", ("GPU-1234",)),
        ("", ()),
    ],
)
def test_cards_are_named_one_by_one_or_by_their_numbers(text, cards):
    assert parse_cards(text) == cards
