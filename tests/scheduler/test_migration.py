"""A person moves a model to other cards: with free bytes only, which count on both until it is done."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.facts import (
    Asker,
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
from gpu_runtime.scheduler.asks import Ask, ask
from gpu_runtime.scheduler.drain import drain
from gpu_runtime.scheduler.migration import move, parse_cards
from gpu_runtime.scheduler.recall import Order, obey
from gpu_runtime.scheduler.transitions import abandon, left
from tests.worlds import NOW, at, block, book, lease, owner, replayed, size, ticket, world

FOUR = world(sim0=8, sim1=8, sim2=8, sim3=8)


def moving(page, *cards, name="qwen", there=FOUR, pieces=(), **rules):
    lying = page.find(at(1, name))
    footprint = replace(Footprint.of(lying.bytes if lying else 0, "measured"), pieces=pieces)
    many = (
        {"layout": "balanced", "least_cards": len(cards), "most_cards": len(cards)}
        if len(cards) > 1
        else {}
    )
    wanted = PlacementRules(devices=cards, **{**many, **rules})
    return replayed(
        lambda book: move(book, owner(1).id, name, footprint, wanted, there, "k", "by hand"), page
    )


def test_room_is_reserved_on_the_new_card_before_anything_leaves_the_old():
    """Both places count in full (law 1). Then only the new one does, and the event has the reason."""
    qwen = lease("qwen", sim0=6)
    page, step = moving(book(qwen), "sim:1")
    shares = (Share("sim:1", size(6)),)
    assert step == Move(
        qwen.id, qwen.shares, shares, "qwen moved from sim:0 to sim:1, by hand.", "move"
    )
    assert page.find(qwen.id).phase is Phase.LEAVING
    assert page.claims() == {"sim:0": size(6), "sim:1": size(6)}
    after = left(page, step, shares, FOUR)
    assert after.claims() == {"sim:1": size(6)} and after.find(qwen.id).away_since == 0.0
    assert [(e.action, e.because, e.bytes) for e in after.events] == [
        ("moved", step.because, size(6))
    ]
    assert abandon(page, owner(1).id, "qwen", "k", FOUR).find(qwen.id) == replace(qwen, key="")


def test_a_model_moves_to_several_cards_in_equal_shares_and_back_to_one():
    page, step = moving(book(lease("qwen", sim0=6)), "sim:2", "sim:3")
    assert step.shares == (Share("sim:2", size(3)), Share("sim:3", size(3)))
    page = left(page, step, step.shares, FOUR)
    page, back = moving(page, "sim:0")
    assert back.shares == (Share("sim:0", size(6)),)


def test_shares_keep_to_the_pieces_of_the_model():
    _, step = moving(
        book(lease("qwen", sim0=6)), "sim:2", "sim:3", pieces=(size(1), size(1), size(4))
    )
    assert {share.bytes for share in step.shares} == {size(2), size(4)}


def test_a_move_to_where_the_model_is_already_does_nothing():
    page = book(lease("qwen", sim0=6))
    assert moving(page, "sim:0") == (page, None)


@pytest.mark.parametrize(
    "page, there, kind, told",
    [
        (book(lease("qwen", sim0=6, pins=1)), FOUR, "in use", "in use"),
        (book(lease("qwen", sim0=6, keep=True)), FOUR, "in use", "kept"),
        (book(block("qwen", sim0=6)), FOUR, "busy", "a block of code"),
        (book(lease("qwen", host=6)), FOUR, "away", "on no card"),
        (book(), FOUR, "away", "on no card"),
        (book(lease("qwen", sim0=6, movable=False)), FOUR, "fixed", "cannot be moved"),
        (
            book(lease("qwen", sim0=6), lease("idle", by=2, sim1=3), owners=(1, 2)),
            FOUR,
            "hopeless",
            "qwen needs 6.0 GiB; sim:1 has 5.0 GiB free",
        ),
        (
            book(lease("qwen", sim0=6), tickets=[ticket("elder", sim1=3)]),
            FOUR,
            "hopeless",
            "sim:1 has 5.0 GiB free",
        ),
        (
            drain(book(lease("qwen", sim0=6)), FOUR.device("sim:1"), "ann", FOUR),
            FOUR,
            "hopeless",
            "sim:1 was drained by ann",
        ),
    ],
    ids=[
        "in use",
        "kept",
        "block",
        "on the host",
        "not held",
        "not movable",
        "no room",
        "an elder's room",
        "drained",
    ],
)
def test_a_model_that_cannot_move_is_refused_and_nothing_changes(page, there, kind, told):
    after, refusal = moving(page, "sim:1", there=there)
    assert after is page
    assert isinstance(refusal, Refuse) and refusal.kind == kind and told in refusal.because


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 8)), min_size=1, max_size=6),
    st.integers(1, 6),
    st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True),
)
def test_no_move_ever_takes_a_card_over_its_budget(others, own, cards):
    """Any content of the cards, any division of the model. No byte is lost, also after a refusal."""
    page = book(
        lease("qwen", sim0=own),
        *(lease(f"m{i}", **{f"sim{card}": gib}) for i, (card, gib) in enumerate(others)),
    )
    page = replace(page, limits=FOUR.limits)
    after, step = moving(page, *(f"sim:{card}" for card in cards))
    assert overdrafts(page, after) == {}
    if isinstance(step, Move):
        assert sum(share.bytes for share in step.shares) == size(own)
        assert {share.device for share in step.shares} == {f"sim:{card}" for card in cards}


# -- asked of another process ----------------------------------------------------------------------
def asked(page, *cards, there=FOUR):
    wanted = Ask("2:move", owner(2).id, "move", at(1, "qwen"), NOW, by="ann", places=cards)
    return replayed(lambda book: ask(book, wanted, there), page)


def test_a_move_request_names_the_cards_for_the_owner():
    page, verdict = asked(book(lease("qwen", sim0=6), owners=(1, 2)), "sim:1", "sim:2")
    assert verdict == Wait(
        "pid 1 was asked to move qwen", asked=(at(1, "qwen"),), silent=(at(1, "qwen"),)
    )
    _, steps, orders = replayed(
        lambda book: obey(book, owner(1).id, FOUR, "k", {"2:move": Asker("ann", at_home=True)}),
        page,
    )
    assert steps == () and orders == (
        Order("2:move", "move", "qwen", "ann", "", ("sim:1", "sim:2"), "ann, pid 2", "2.1.0"),
    )


def test_another_users_model_is_moved_for_an_operator_only():
    page, _ = asked(book(lease("qwen", sim0=6), owners=(1, 2)), "sim:1")

    def refused(asker):
        return replayed(lambda book: obey(book, owner(1).id, FOUR, "k", {"2:move": asker}), page)[
            2
        ][0].refused

    assert "ann may not move qwen" in refused(Asker("ann"))
    assert refused(Asker("ann", operator=True)) == ""


def test_a_move_to_the_current_card_is_done_and_one_of_a_model_in_use_is_refused():
    _, verdict = asked(book(lease("qwen", sim1=6), owners=(1, 2)), "sim:1")
    assert isinstance(verdict, Grant)
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
