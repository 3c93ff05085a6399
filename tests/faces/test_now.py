"""The tab NowTab, without a browser: what it shows, and that what it made stays made."""

from __future__ import annotations

import re

from gpu_panels.data.bars import bars
from gpu_panels.tabs import now
from gpu_panels.tabs.now import NowTab
from msgspec.structs import replace

from gpu_runtime.facts import History, Level

from . import pasts, samples
from .polling import looked_at, refresh


def words(html):
    return " ".join(re.sub("<[^>]*>", " ", html).split())


def heading(snapshot, device=0):
    return now.heading(snapshot, snapshot.devices[device], bars(snapshot)[device])


def test_the_heading_tells_level_room_and_use():
    assert words(heading(samples.busy)).startswith(
        "sim:0 ◕ HIGH 3.6 GiB free 18.0 of 21.6 GiB leased · 4.0 GiB idle"
    )


def test_the_bar_can_be_heard():
    """By who cannot see it."""
    assert 'role="img">sim:0: qwen of train.ipynb 14.0 GiB' in heading(samples.busy)


def test_names_are_text_never_markup():
    assert "<img" not in heading(samples.hostile) and "&lt;img" in heading(samples.hostile)


def test_a_machine_where_nothing_is_held_says_what_to_do():
    assert "%gpu load NAME PATH" in now.notices_html(samples.empty)
    assert now.notices_html(samples.busy) == ""


def test_what_the_monitor_cannot_see_is_said_first():
    assert "The monitor cannot see: cuda:0 did not answer 5 times" in now.notices_html(
        samples.overdraft
    )


def test_a_card_for_every_device_and_the_first_ones_history():
    tab = looked_at(
        NowTab,
        samples.eight,
        history=lambda seconds, points: pasts.day(seconds=seconds, cards=1, gib=80),
    )
    assert len(tab._grid) == 9 and tab._device.value == "cuda:0"
    assert [card.chart.source.data["title"] for card in tab._cards.values()][1] == [
        "meta-llama/Llama-3.1-8B-Instruct"
    ]
    assert tab._note.html.startswith("No history of cuda:0"), "the past is of sim:0"


def test_figures_are_made_once():
    """Each second brings new data, never a new figure."""
    tab = looked_at(
        NowTab, samples.busy, history=lambda seconds, points: pasts.day(seconds=seconds)
    )
    made = [card.chart.figure for card in tab._cards.values()] + [tab._chart.figure]
    tab.poller.rt.snapshot = replace(
        samples.waiting,
        devices=tuple(replace(view, level=Level.CRITICAL) for view in samples.waiting.devices),
    )
    refresh(tab)
    assert made == [card.chart.figure for card in tab._cards.values()] + [tab._chart.figure]
    assert "● CRITICAL" in tab._cards["sim:0"].head.html
    assert tab._cards["sim:0"].chart.source.data["kind"] == ["settled", "leaving"]


def test_another_window_is_asked_for_and_shown_whole():
    asked = []
    tab = looked_at(
        NowTab,
        samples.busy,
        history=lambda seconds, points: asked.append(seconds) or pasts.day(seconds=seconds),
    )
    tab._chart.time.update(start=1, end=2)
    tab._window.value = "24 h"
    refresh(tab)
    assert asked == [900, 86_400]
    assert tab._chart.time.end - tab._chart.time.start == 86_400_000


def test_nothing_recorded_says_so_above_a_chart_that_has_its_axes():
    """The last quarter of an hour, up to the device's size: not the first of January 1970."""
    tab = looked_at(NowTab, samples.busy, history=lambda seconds, points: History((), (), seconds))
    assert tab._note.html.startswith("No history of sim:0 is recorded yet")
    assert (tab._chart.time.end, tab._chart.time.end - tab._chart.time.start) == (
        samples.WALL * 1e3,
        900_000,
    )
    assert tab._chart.height.end > 24


def test_a_device_that_goes_takes_its_card_with_it():
    tab = looked_at(NowTab, samples.drained)
    tab.poller.rt.snapshot = samples.unmeasured
    refresh(tab)
    assert list(tab._cards) == ["cuda:0", "host"] and tab._device.options == ["cuda:0", "host"]
