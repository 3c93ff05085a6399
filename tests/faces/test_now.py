"""The tab Now, without a browser: what it shows, and that its figures are made only once."""

from __future__ import annotations

import re

from gpu_panels.data.bars import bars
from gpu_panels.tabs import now
from gpu_panels.tabs.now import NowTab
from msgspec.structs import replace

from gpu_runtime.facts import History

from . import pasts, samples
from .polling import opened, refresh


def words(html):
    """The text of a piece of HTML, without its tags."""
    return " ".join(re.sub("<[^>]*>", " ", html).split())


def heading(snapshot, device=0):
    """The heading that the tab shows for a device."""
    return now.heading(snapshot, snapshot.devices[device], bars(snapshot)[device])


def test_the_heading_shows_free_memory_and_use_and_no_level():
    """A card full of idle models is no problem, so it has no alarming word."""
    assert words(heading(samples.busy)).startswith(
        "sim:0 3.6 GiB free 18.0 of 21.6 GiB leased · 4.0 GiB idle"
    )


def test_the_heading_has_the_bar_in_words():
    """A screen reader reads the words of the bar."""
    assert 'role="img">sim:0: qwen of train.ipynb 14.0 GiB' in heading(samples.busy)


def test_names_are_escaped():
    assert "<img" not in heading(samples.hostile) and "&lt;img" in heading(samples.hostile)


def test_a_machine_without_leases_shows_what_to_do():
    assert "%gpu load NAME PATH" in now.notices_html(samples.empty)
    assert now.notices_html(samples.busy) == ""


def test_a_governor_that_is_off_is_noted():
    text = now.notices_html(replace(samples.busy, governed=False))
    assert "The governor is off" in text


def test_every_device_has_a_card_and_the_first_ones_history_is_shown():
    tab = opened(
        NowTab,
        samples.eight,
        history=lambda seconds, points: pasts.day(seconds=seconds, cards=1, gib=80),
    )
    assert len(tab._grid) == 9 and tab._device.value == "cuda:0"
    assert [card.chart.source.data["title"] for card in tab._cards.values()][1] == [
        "meta-llama/Llama-3.1-8B-Instruct"
    ]
    assert tab._note.html.startswith("No history of cuda:0"), "the history is of sim:0"


def test_figures_are_made_once():
    """Each second brings new data for the same figures."""
    tab = opened(NowTab, samples.busy, history=lambda seconds, points: pasts.day(seconds=seconds))
    made = [card.chart.figure for card in tab._cards.values()] + [tab._chart.figure]
    tab.poller.rt.snapshot = samples.waiting
    refresh(tab)
    assert made == [card.chart.figure for card in tab._cards.values()] + [tab._chart.figure]
    assert tab._cards["sim:0"].chart.source.data["kind"] == ["settled", "leaving"]


def test_another_window_is_fetched_and_shown_whole():
    fetched = []
    tab = opened(
        NowTab,
        samples.busy,
        history=lambda seconds, points: fetched.append(seconds) or pasts.day(seconds=seconds),
    )
    tab._chart.time.update(start=1, end=2)
    tab._window.value = "24 h"
    refresh(tab)
    assert fetched == [900, 86_400]
    assert tab._chart.time.end - tab._chart.time.start == 86_400_000


def test_an_empty_history_is_noted_above_a_chart_with_axes():
    """The axes show the last 15 minutes and the device's size. Without data, Bokeh would begin at 1
    January 1970.
    """
    tab = opened(NowTab, samples.busy, history=lambda seconds, points: History((), (), seconds))
    assert tab._note.html.startswith("No history of sim:0 is recorded yet")
    assert (tab._chart.time.end, tab._chart.time.end - tab._chart.time.start) == (
        samples.WALL * 1e3,
        900_000,
    )
    assert tab._chart.height.end > 24


def test_the_card_of_a_removed_device_is_removed():
    tab = opened(NowTab, samples.drained)
    tab.poller.rt.snapshot = samples.unmeasured
    refresh(tab)
    assert list(tab._cards) == ["cuda:0", "host"] and tab._device.options == ["cuda:0", "host"]
