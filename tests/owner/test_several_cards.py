"""A model over several cards, from the plan to the bytes on each card. The models are fake."""

import pytest

from gpu_runtime import DoesNotFit
from gpu_runtime.units import GIB

from .conftest import claims, fakes, loaded, where

FOUR = dict(devices="sim:4x80GiB,host:800GiB", gpu_memory_max_percent=1.0, monitor=False)


def test_one_that_no_card_holds_is_divided_and_gives_back_to_each_what_it_took(runtime):
    rt = loaded(runtime(**FOUR), a="60GiB", big="140GiB")
    assert where(rt) == {"a": "sim:0", "big": "sim:1,2"}
    assert claims(rt) == {"sim:0": 60 * GIB, "sim:1": 70 * GIB, "sim:2": 70 * GIB}
    rt.evict("big")
    assert claims(rt) == {"sim:0": 60 * GIB, "host": 140 * GIB}
    events = [one for one in rt.events().to_dict("records") if one["model"] == "big"]
    assert [(one["action"], one["bytes"] // GIB, one["device"]) for one in events] == [
        (action, 140, "sim:1,2") for action in ("granted", "loaded", "offloaded")
    ]


def test_where_only_the_margin_is_in_the_way_it_is_named(runtime):
    """Two cards of 128 MiB could hold 180 MiB, without the margin of half a GiB for the driver on each."""
    rt = runtime(devices="sim:2x128MiB,host:1GiB", gpu_memory_max_percent=1.0, monitor=False)
    rt.register("big", backend="fake", size="180MiB", layout="proportional")
    with pytest.raises(
        DoesNotFit, match="512 MiB of each stay free for its driver \\(GPU_SPLIT_MARGIN_MB\\)"
    ):
        rt.preload("big")


def test_a_restore_chooses_other_cards_where_the_old_ones_are_taken(runtime):
    """The model was on cards 0 and 1. It is restored to 2 and 3, again with equal shares."""
    rt = runtime(**FOUR)
    rt.register("big", backend="fake", size="140GiB", layout="balanced")
    rt.register("pinned", backend="fake", size="80GiB", devices=("sim:0",), keep=True)
    rt.preload("big")
    assert where(rt)["big"] == "sim:0,1"
    rt.evict("big")
    rt.preload("pinned")
    rt.register("other", backend="fake", size="80GiB", devices=("sim:1",), keep=True)
    rt.preload("other")
    rt.preload("big")
    sizes = {"sim:0": 80, "sim:1": 80, "sim:2": 70, "sim:3": 70}
    assert claims(rt) == {card: gib * GIB for card, gib in sizes.items()}


def test_a_whole_card_stays_whole_and_only_its_model_moves(runtime):
    """40 of its 80 GiB are in use, but no other model is placed there. On the host it takes 40."""
    rt = runtime(devices="sim:80GiB,host:100GiB", gpu_memory_max_percent=1.0, monitor=False)
    rt.register("alone", backend="fake", size="40GiB", layout="whole", keep=True)
    fakes(rt, small="10GiB")
    rt.preload("alone")
    rt.tick()
    assert claims(rt) == {"sim:0": 80 * GIB}
    with pytest.raises(DoesNotFit, match="alone"):
        rt.preload("small")
    rt.unpin("alone")
    rt.preload("small")
    assert claims(rt) == {"sim:0": 10 * GIB, "host": 40 * GIB}


def test_a_plan_shows_the_cards_and_why_the_others_lost(runtime):
    rt = runtime(**FOUR)
    for card, size in enumerate((60, 50, 70, 40)):
        rt.register(f"m{card}", backend="fake", size=f"{size}GiB", devices=(f"sim:{card}",))
        rt.preload(f"m{card}")
    rt.register("big", backend="fake", size="140GiB", layout="balanced")
    told = rt.plan("big")
    assert told.cards.startswith("GPUs: ") and len(told.shares) == 2
    chosen, *others = told.considered
    assert chosen.shares == told.shares and len(others) == 6  # five other pairs, and all four
    assert all("would be evicted" in option.because for option in others)
    [small] = [rt.plan("5GiB")]
    said = "has {}.0 GiB free and would keep {}.0 GiB, more than sim:2".format
    others = [option.because for option in small.considered[1:]]
    assert others == [said(20, 15), said(30, 25), said(40, 35)]
