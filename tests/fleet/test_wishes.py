"""The wishes of the fleet: pure values, and the only state that the controller has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime import UnknownModel
from gpu_runtime.fleet.wishes import (
    Slot,
    Wish,
    Wishes,
    applied,
    bodies_on,
    dump,
    load,
    marks,
    with_drain,
    with_slot,
    without,
    without_slot,
)

NAMES = st.sampled_from(["a", "b", "c", "d"])
WISHES = st.lists(
    st.builds(
        Wish,
        NAMES,
        st.fixed_dictionaries({"x": st.integers(0, 2)}),
        st.integers(0, 2),
        st.booleans(),
    ),
    max_size=4,
    unique_by=lambda wish: wish.name,
)


def wish(name: str, **fields: object) -> Wish:
    return Wish(name, {}, **fields)  # type: ignore[arg-type]


def test_the_dedicated_set_is_replaced_whole():
    """A model that is no longer dedicated is no longer wished. Other wishes stay."""
    before = applied(Wishes(), [wish("own")], dedicated=False)
    before = applied(before, [wish("a", dedicated=True), wish("b", dedicated=True)], dedicated=True)
    after = applied(before, [wish("b", dedicated=True), wish("c", dedicated=True)], dedicated=True)
    assert after.names == ("b", "c", "own")


def test_a_repeated_change_changes_nothing():
    """Ray repeats a call after the controller was restarted, so a repeated change must have no effect."""
    once = applied(Wishes(), [wish("a")], dedicated=False)
    assert applied(once, [wish("a")], dedicated=False) is once
    drained = with_drain(once, "box1", undo=False)
    assert with_drain(drained, "box1", undo=False) is drained
    assert with_drain(drained, "box1", undo=True).drained == ()


def test_an_unknown_wish_cannot_be_removed():
    with pytest.raises(UnknownModel, match="'b'"):
        without(Wishes(models=(wish("a"),)), "b")


@given(WISHES, WISHES, st.booleans())
def test_every_change_raises_the_revision_and_survives_a_restart(first, second, dedicated):
    before = applied(Wishes(), first, dedicated=False)
    after = applied(before, second, dedicated=dedicated)
    assert (after.revision > before.revision) == (after.models != before.models)
    assert load(dump(after)) == after
    assert list(after.names) == sorted(after.names)
    assert {one.name for one in second} <= set(after.names)
    assert load(None) == Wishes()


def test_a_slot_names_the_cards_on_its_host_only():
    wishes = applied(Wishes(), [Wish("a", {"spec": {"memory": 1}})], dedicated=False)
    there = with_slot(wishes, Slot("a", "box1", ("cuda:1",)))
    assert bodies_on(there, "box1") == ({"spec": {"memory": 1, "gpus": ["cuda:1"]}},)
    assert bodies_on(there, "box2") == ({"spec": {"memory": 1}},)
    moved = with_slot(there, Slot("a", "box1", ("cuda:0",)))
    assert [slot.devices for slot in moved.slots] == [("cuda:0",)]
    assert with_slot(moved, moved.slots[0]) is moved and load(dump(moved)) == moved
    assert without_slot(moved, "a@box1").slots == () == without(moved, "a").slots
    assert without_slot(moved, "a@box2") is moved
    with pytest.raises(UnknownModel):
        with_slot(wishes, Slot("b", "box1", ("cuda:0",)))


def test_a_host_knows_how_much_each_model_is_wished_there():
    all_wishes = applied(Wishes(), [wish("a"), wish("b"), wish("c", copies=0)], dedicated=False)
    all_wishes = applied(all_wishes, [wish("d", dedicated=True)], dedicated=True)
    all_wishes = with_slot(all_wishes, Slot("b", "box1", ("sim:0",)))
    assert marks(all_wishes, "box1") == {"a": 1, "b": 2, "d": 2}
    assert marks(all_wishes, "box2") == {"a": 1, "b": 1, "d": 2}
