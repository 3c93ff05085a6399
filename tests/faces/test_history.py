"""The chart of a device's history. It shows every byte of every moment, in as few rectangles as
possible.
"""

from __future__ import annotations

import pytest
from gpu_panels.charts.history_chart import HistoryChart
from gpu_panels.data import history
from gpu_panels.data.history import OTHERS, UNLEASED, Band, HeldInterval, device_history
from gpu_panels.palette import Palette
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.facts import Event, Level, Moment, Share
from gpu_runtime.units import GIB

from . import pasts, samples


def moment(wall, measured=None, level=Level.LOW, limit=20, **gib):
    return Moment(
        wall,
        "sim:0",
        24 * GIB,
        limit * GIB,
        None if measured is None else int(measured * GIB),
        level,
        claims={f"{name}@1": int(size * GIB) for name, size in gib.items()},
    )


def evicted(
    wall, model="llama", action="offloaded", device="sim:0", because="qwen needs room", **more
):
    return Event(1, wall, model, action, "request", because, 8 * GIB, device, "1.1.0", **more)


def history_of(*moments, events=(), start=0.0, end=None):
    """The history of sim:0 with these moments, as the chart draws it."""
    return device_history(
        moments, events, "sim:0", start, moments[-1].wall + 10 if end is None else end
    )


def test_memory_held_without_a_change_is_one_rectangle():
    """The number of rectangles does not depend on the number of recorded moments."""
    drawn = history_of(*(moment(wall, qwen=8) for wall in range(0, 100, 10)))
    assert drawn.intervals == (HeldInterval("qwen@1", 0, 100, 0, 8 * GIB),)


def test_a_lease_is_stacked_on_those_that_held_more_over_time():
    drawn = history_of(moment(0, qwen=8), moment(10, qwen=8, llama=4), moment(20, llama=4))
    assert drawn.intervals == (
        HeldInterval("qwen@1", 0, 20, 0, 8 * GIB),
        HeldInterval("llama@1", 10, 20, 8 * GIB, 12 * GIB),
        HeldInterval("llama@1", 20, 30, 0, 4 * GIB),
    )


CLAIMS = st.dictionaries(
    st.sampled_from([f"m{n}@1" for n in range(20)]), st.integers(1, 8 * GIB), max_size=20
)


@given(
    st.lists(
        st.tuples(CLAIMS, st.one_of(st.none(), st.integers(0, 80 * GIB))), min_size=1, max_size=30
    )
)
def test_at_each_moment_the_stack_is_what_was_claimed_and_measured(drawn):
    """No byte is lost, added or drawn twice, even if many leases are gathered."""
    moments = [
        Moment(10.0 * n, "sim:0", 80 * GIB, 72 * GIB, measured, Level.LOW, claims=claims)
        for n, (claims, measured) in enumerate(drawn)
    ]
    runs = history_of(*moments).intervals
    for one in moments:
        now = sorted(
            (run for run in runs if run.start <= one.wall < run.end), key=lambda run: run.low
        )
        assert [run.low for run in now] == [0, *(run.high for run in now)][: len(now)]
        assert sum(run.bytes for run in now if run.label != UNLEASED) == one.claimed_bytes
        assert sum(run.bytes for run in now) == max(one.claimed_bytes, one.measured_bytes or 0)
        assert len(now) <= history.MOST_LEASES + 1


def test_the_leases_that_held_least_are_gathered():
    """There are many kernels in a day, but a chart can show only about a dozen leases apart."""
    drawn = history_of(moment(0, **{f"m{n}": 0.1 + n / 10 for n in range(20)}))
    assert len(drawn.labels) == history.MOST_LEASES - 1 and drawn.labels[0] == "m19@1"
    assert drawn.intervals[-1].label == OTHERS


def test_unleased_memory_is_on_top_of_the_stack():
    assert history_of(moment(0, measured=9.5, qwen=8)).intervals[-1] == HeldInterval(
        UNLEASED, 0, 10, 8 * GIB, int(9.5 * GIB)
    )


def test_an_unknown_measurement_is_not_zero():
    """Without a measurement only the claims are drawn. The rest is unknown."""
    assert [run.label for run in history_of(moment(0, measured=None, qwen=8)).intervals] == [
        "qwen@1"
    ]


def test_a_gap_in_the_record_stays_a_gap():
    """If nothing was sampled for an hour, the use in that hour is unknown and is not drawn."""
    drawn = history_of(
        moment(0, qwen=8),
        moment(10, qwen=8),
        moment(20, qwen=8),
        moment(3600, qwen=8),
        moment(3610, qwen=8),
    )
    assert [(run.start, run.end) for run in drawn.intervals] == [(0, 30), (3600, 3620)]


def test_a_band_of_pressure_is_as_long_as_the_pressure_lasted():
    drawn = history_of(
        moment(0),
        moment(10, level=Level.HIGH),
        moment(20, level=Level.HIGH),
        moment(30, level=Level.CRITICAL),
    )
    assert drawn.bands == (Band(Level.HIGH, 10, 30), Band(Level.CRITICAL, 30, 40))
    assert history.band_columns(drawn)["tooltip"] == ["◕ HIGH pressure", "● CRITICAL pressure"]


def test_the_budget_is_a_line_in_steps():
    assert history_of(moment(0), moment(10), moment(20, limit=10)).limits == (
        (0, 20 * GIB),
        (20, 10 * GIB),
        (30, 10 * GIB),
    )


def test_an_eviction_is_a_mark_with_its_reason():
    columns = history.mark_columns(history_of(moment(0), moment(60), events=(evicted(30),)))
    assert columns["x"] == [30_000] and columns["title"] == ["llama offloaded"]
    assert columns["tooltip"] == ["was offloaded from sim:0, freeing 8.0 GiB: qwen needs room."]
    assert columns["y"][0] > 24, "above the device's top"


def test_only_evictions_of_this_device_and_time_are_marked():
    shares = (Share("sim:1", GIB), Share("sim:0", GIB))
    drawn = history_of(
        moment(0),
        moment(60),
        events=(
            evicted(-5),
            evicted(30, device="sim:1"),
            evicted(30, action="loaded"),
            evicted(31, device="sim:1", shares=shares),
        ),
    )
    assert [event.wall for event in drawn.events] == [31]


def test_marks_that_are_too_close_become_one_with_their_number():
    """Ten thousand events in a day are drawn as a few hundred marks."""
    drawn = history_of(
        moment(0), moment(86_390), events=[evicted(float(n)) for n in range(0, 86_400, 10)]
    )
    columns = history.mark_columns(drawn)
    assert len(columns["x"]) <= history.MOST_MARKS + 1
    assert columns["title"][0] == "36 × offloaded" and columns["tooltip"][0].endswith(
        "\nand 33 more"
    )


def test_a_lease_is_named_by_its_notebook_where_that_is_known():
    """A lease is named by its notebook. If its process has ended, only the pid is known."""
    assert history.lease_titles(["qwen@4000", "qwen@9"], samples.busy) == {
        "qwen@4000": "qwen · train.ipynb",
        "qwen@9": "qwen · pid 9",
    }


def test_an_empty_chart_shows_why_it_is_empty():
    assert "No history of sim:0 is recorded yet" in history.empty_note(
        device_history((), (), "sim:0", 0, 900)
    )
    assert (
        history.empty_note(history_of(moment(0), moment(10)))
        == "No process held memory on sim:0 in this period."
    )
    assert history.empty_note(history_of(moment(0, qwen=1))) == ""


def test_a_day_of_600_moments_is_a_few_hundred_rectangles():
    """The browser draws all rectangles again at each zoom."""
    day = pasts.day()
    assert (
        100
        < len(
            device_history(
                day.moments, day.events, "sim:0", samples.WALL - 86400, samples.WALL
            ).intervals
        )
        < 2000
    )


# -- the figure ------------------------------------------------------------------------------------


def drawn_at(end, shown=None, home=False):
    shown = shown or HistoryChart()
    drawn = device_history(
        [moment(wall, qwen=8) for wall in range(0, int(end), 10)], (), "sim:0", end - 900, end
    )
    shown.show(history.history_columns(drawn, Palette().styles(drawn.labels), {}), home=home)
    return shown


def window(shown):
    return shown.time.start / 1e3, shown.time.end / 1e3


def test_the_window_moves_on_with_the_time():
    shown = drawn_at(1000)
    assert window(shown) == (100, 1000)
    assert window(drawn_at(1010, shown)) == (110, 1010)


def test_a_zoomed_window_stays_until_it_is_reset():
    """A window that a person has zoomed does not follow the time. Otherwise the chart would move
    away while it is read.
    """
    shown = drawn_at(1000)
    shown.time.update(start=500_000, end=600_000)
    assert window(drawn_at(1010, shown)) == (500, 600)
    assert (shown.time.reset_start, shown.time.reset_end) == (110_000, 1010_000), (
        "the reset button shows the whole window"
    )
    assert window(drawn_at(1020, shown, home=True)) == (120, 1020)
    assert window(drawn_at(1030, shown)) == (130, 1030)


def test_unchanged_data_is_not_sent():
    shown = drawn_at(1000)
    drawn = device_history(
        [moment(wall, qwen=8) for wall in range(0, 1000, 10)], (), "sim:0", 100, 1000
    )
    assert not shown.show(history.history_columns(drawn, Palette().styles(drawn.labels), {}))


@pytest.mark.parametrize(("gib", "unit"), [(24, "%d GiB"), (0.5, "%d MiB")])
def test_heights_are_in_a_unit_that_fits_the_device(gib, unit):
    shown = HistoryChart()
    drawn = device_history(
        [Moment(0, "sim:0", int(gib * GIB), int(gib * GIB), 0, Level.LOW)], (), "sim:0", 0, 900
    )
    shown.show(history.history_columns(drawn, {}, {}))
    assert shown.figure.yaxis[0].formatter.format == unit
