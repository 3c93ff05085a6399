"""The figure of a bar. Its data are sent to the browser only where they differ."""

from __future__ import annotations

from copy import deepcopy

import pytest
from bokeh.models import ColumnDataSource
from gpu_panels.charts.bar_chart import BarChart
from gpu_panels.charts.data_sources import bring
from gpu_panels.data import bar_columns, bars
from gpu_panels.palette import Palette
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from . import samples


def shown(snapshot, device=0, dark=False):
    chart = BarChart()
    chart.show(drawn(snapshot, device, dark))
    return chart


def drawn(snapshot, device=0, dark=False):
    bar = bars.bars(snapshot)[device]
    return bar_columns.bar_columns(bar, Palette().styles(bar_columns.labels([bar])), dark)


def test_the_figure_shows_every_stretch_and_mark():
    chart = shown(samples.busy)
    assert chart.source.data["title"] == ["qwen", "reranker"]
    assert (chart.source.data["left"], chart.source.data["right"]) == ([0, 14], [14, 18])
    assert chart.range.end == 24 and chart.figure.below[0].formatter.format == "%d GiB"
    assert [pytest.approx(21.6)] == [
        x
        for x, kind in zip(chart.marks.data["x"], chart.marks.data["kind"], strict=True)
        if kind == "budget"
    ]


def test_unchanged_data_is_not_sent_and_five_seconds_send_one_column(monkeypatch):
    """Twenty sessions update every second, so the server must send little."""
    chart = shown(samples.busy)
    sent = []
    chart.source.on_change("data", lambda attr, old, new: sent.append(new))
    for seconds in (0, 1):
        assert not chart.show(drawn(replace(samples.busy, now=samples.busy.now + seconds)))
    older = replace(samples.busy, now=samples.busy.now + 5)
    patched = []
    monkeypatch.setattr(ColumnDataSource, "patch", lambda source, cells: patched.append(cells))
    assert chart.show(drawn(older))
    assert sent == [] and list(patched[0]) == ["tooltip"]


def test_text_on_a_translucent_stretch_has_the_colour_of_the_pages_text():
    """The text on a lease's own colour depends on that colour only, in both themes."""
    light, dark = shown(samples.waiting), shown(samples.waiting, dark=True)
    assert light.source.data["ink"][1] == "#000000" and dark.source.data["ink"][1] == "#ffffff"
    assert light.source.data["ink"][0] == dark.source.data["ink"][0]


ROWS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc")), max_size=6)


@given(ROWS, ROWS)
def test_an_updated_source_holds_the_new_columns(before, after):
    """The source is updated by patches or as a whole.

    The function returns whether the data differed. The given lists are not changed.
    """
    first, second = (
        {"n": [n for n, _ in rows], "s": [s for _, s in rows]} for rows in (before, after)
    )
    given, source = deepcopy(first), ColumnDataSource({"n": [], "s": []})
    assert bring(source, first) == bool(before)
    assert bring(source, second) == (first != second)
    assert dict(source.data) == second and first == given
    assert not bring(source, second)
