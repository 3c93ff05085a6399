"""The console's colours. Every viewer can tell them apart, in both themes, and each process keeps its colour."""

import itertools

import numpy as np
import pytest
from gpu_panels.palette import COLOURS, EDGE, KEPT, SLOTS, Palette, assign_slots
from hypothesis import given
from hypothesis import strategies as st

from .sight import SIGHT, ciede2000, contrast, distance

PAGES = {"light": "#ffffff", "dark": "#121212"}
LABELS = st.lists(st.from_regex(r"[a-e]{1,3}@[1-9]", fullmatch=True), max_size=30)


@pytest.mark.parametrize("sight", SIGHT)
def test_any_two_colours_can_be_told_apart(sight):
    """By ten times the just noticeable difference, for every kind of colour blindness."""
    nearest = min(distance(one, other, sight) for one, other in itertools.combinations(COLOURS, 2))
    assert nearest >= 10


@pytest.mark.parametrize("page", PAGES)
def test_the_edge_of_every_stretch_stands_out_from_the_page(page):
    """The fill alone does not stand out: yellow on white has a contrast of 1.3."""
    assert contrast(EDGE, PAGES[page]) >= 3


def test_text_on_a_colour_is_legible():
    """The text is black; see devices.css."""
    assert min(contrast(colour, "#000000") for colour in COLOURS) >= 4.5


def test_the_leases_of_a_process_have_its_neutral_colour():
    """Only problems have a saturated colour. Theirs is the orange #d55e00."""
    styles = Palette().styles(["qwen@4121", "llama@4121", "qwen@4000"])
    assert styles["qwen@4121"] == styles["llama@4121"] != styles["qwen@4000"]
    assert max(map(saturation, COLOURS)) < saturation("#d55e00") / 2


def saturation(colour):
    """The range of red, green and blue in `#rrggbb`, 0 to 255."""
    parts = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return max(parts) - min(parts)


def test_a_lease_keeps_its_style_while_others_change():
    palette = Palette()
    before = palette.styles(["qwen@1", "llama@2"])
    palette.styles([f"model@{n}" for n in range(3, 43)])
    assert palette.styles(["llama@2", "new@9", "qwen@1"]) | before == palette.styles(
        ["llama@2", "new@9", "qwen@1"]
    )


@given(LABELS)
def test_leases_differ_as_long_as_there_are_free_styles(labels):
    """The first seven have different colours."""
    chosen = assign_slots({}, labels)
    few = dict(list(chosen.items())[:SLOTS])
    assert len(set(few.values())) == len(few)
    colours = [slot % len(COLOURS) for slot in list(chosen.values())[: len(COLOURS)]]
    assert len(set(colours)) == len(colours)


@given(LABELS, LABELS)
def test_assigned_styles_stay_and_new_leases_avoid_recent_styles(first, then):
    kept = assign_slots({}, first)
    again = assign_slots(kept, then)
    assert {one: again[one] for one in again if one in kept} == {
        one: kept[one] for one in again if one in kept
    }
    new = [one for one in again if one not in kept]
    if len(set(first) | set(then)) <= SLOTS:
        assert not {again[one] for one in new} & set(kept.values())


def test_memory_is_bounded():
    """Over a month, kernels have many labels. The palette forgets the oldest ones."""
    palette = Palette()
    for pid in range(KEPT + 200):
        palette.styles([f"qwen@{pid}"])
    assert len(palette._kept) == KEPT


@pytest.mark.parametrize(("one", "other", "expected"), [
    ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
    ((50, 2.5, 0), (73, 25, -18), 27.1492),
    ((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514), 0.9082),
])  # fmt: skip
def test_the_colour_distance_is_the_published_one(one, other, expected):
    """The pairs are from the table in Sharma, Wu & Dalal 2005."""
    assert ciede2000(np.array(one), np.array(other)) == pytest.approx(expected, abs=1e-4)
