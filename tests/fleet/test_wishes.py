"""The wishes of the fleet: pure values, and the only state that the controller has."""

import msgspec
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


@given(WISHES, WISHES, st.booleans())
def test_every_change_raises_the_revision_and_survives_a_restart(first, second, dedicated):
    before = applied(Wishes(), first, dedicated=False)
    after = applied(before, second, dedicated=dedicated)
    assert (after.revision > before.revision) == (after.models != before.models)
    assert load(msgspec.json.encode(after)) == after
    assert list(after.names) == sorted(after.names)
    assert {one.name for one in second} <= set(after.names)
    assert load(None) == Wishes()


HOSTS = st.sampled_from(["box1", "box2"])
CHANGES = st.one_of(
    st.tuples(st.just("slot"), NAMES, HOSTS, st.sampled_from([("cuda:0",), ("cuda:1",)])),
    st.tuples(st.just("no slot"), NAMES, HOSTS),
    st.tuples(st.just("no model"), NAMES),
    st.tuples(st.just("dedicated"), NAMES),
    st.tuples(st.just("drain"), HOSTS, st.booleans()),
)


@given(st.lists(CHANGES, max_size=12))
def test_slots_and_drains_are_what_was_last_wished_of_models_that_are_wished(changes):
    """A slot belongs to one model on one host. It ends with the wish for its model."""
    every = [wish(name, dedicated=name > "b") for name in "abcd"]
    wishes = applied(Wishes(), every, dedicated=False)
    models, slots, drained = set("abcd"), {}, set()
    for kind, *of in changes:
        before = wishes, sorted(models), dict(slots), set(drained)
        if kind == "dedicated":
            wishes = applied(wishes, [wish(of[0], dedicated=True)], dedicated=True)
            dedicated = {one.name for one in before[0].models if one.dedicated}
            models = models - dedicated | {of[0]}
        elif kind == "drain":
            wishes = with_drain(wishes, of[0], undo=of[1])
            drained = drained - {of[0]} if of[1] else drained | {of[0]}
        elif kind == "no slot":
            wishes = without_slot(wishes, f"{of[0]}@{of[1]}")
            slots.pop((of[0], of[1]), None)
        elif kind == "slot" and of[0] not in models:
            with pytest.raises(UnknownModel):
                with_slot(wishes, Slot(*of))
        elif kind == "slot":
            wishes = with_slot(wishes, Slot(*of))
            slots[of[0], of[1]] = of[2]
        else:
            wishes = without(wishes, of[0])
            models.discard(of[0])
        slots = {key: cards for key, cards in slots.items() if key[0] in models}
        assert [*wishes.names] == sorted(models) and [*wishes.drained] == sorted(drained)
        assert [(one.model, one.host, one.devices) for one in wishes.slots] == [
            (*key, cards) for key, cards in sorted(slots.items())
        ]
        same = (sorted(models), slots, drained) == before[1:]
        assert wishes.revision == before[0].revision + (not same) or kind == "dedicated"


def test_a_slot_names_the_cards_on_its_host_only():
    wishes = applied(Wishes(), [Wish("a", {"spec": {"memory": 1}})], dedicated=False)
    there = with_slot(wishes, Slot("a", "box1", ("cuda:1",)))
    assert bodies_on(there, "box1") == ({"spec": {"memory": 1, "gpus": ["cuda:1"]}},)
    assert bodies_on(there, "box2") == ({"spec": {"memory": 1}},)
    assert with_slot(there, there.slots[0]) is there is without_slot(there, "a@box2")
    assert load(msgspec.json.encode(there)) == there


def test_a_host_knows_how_much_each_model_is_wished_there():
    all_wishes = applied(Wishes(), [wish("a"), wish("b"), wish("c", copies=0)], dedicated=False)
    all_wishes = applied(all_wishes, [wish("d", dedicated=True)], dedicated=True)
    all_wishes = with_slot(all_wishes, Slot("b", "box1", ("sim:0",)))
    assert marks(all_wishes, "box1") == {"a": 1, "b": 2, "d": 2}
    assert marks(all_wishes, "box2") == {"a": 1, "b": 1, "d": 2}
