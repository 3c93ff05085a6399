"""The tab Timeline, without a browser."""

from __future__ import annotations

from gpu_panels.tabs.timeline import TimelineTab

from gpu_runtime.facts import History

from . import pasts, samples
from .polling import opened, refresh


def test_another_window_is_fetched_and_shown_whole():
    fetched = []
    tab = opened(
        TimelineTab,
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
    tab = opened(
        TimelineTab, samples.busy, history=lambda seconds, points: History((), (), seconds)
    )
    assert tab._note.html.startswith("No history of sim:0 is recorded yet")
    assert (tab._chart.time.end, tab._chart.time.end - tab._chart.time.start) == (
        samples.WALL * 1e3,
        900_000,
    )
    assert tab._chart.height.end > 24
