"""The tab Evictions: filters, counters, chart, and a CSV file that is safe in a spreadsheet."""

from __future__ import annotations

import csv
import io
import warnings

import pytest
from gpu_panels.data import evictions
from gpu_panels.data.evictions import ANY, BINS, Filter, binned, csv_of, matching, merged
from gpu_panels.tabs.evictions import NO_MATCH, EvictionsTab, counters_html
from hypothesis import given
from hypothesis import strategies as st
from msgspec.json import decode
from msgspec.structs import replace

from gpu_runtime.facts import Event, History, Share

from . import pasts, samples
from .polling import opened, refresh
from .test_now import words

GIB, WALL = samples.GIB, samples.WALL


def event(seq, action="offloaded", model="llama", ago=60.0, reason="memory_pressure", **more):
    return Event(
        seq,
        WALL - ago,
        model,
        action,
        reason,
        "qwen needs room",
        8 * GIB,
        "sim:0",
        samples.ME.id,
        **more,
    )


OFF, DROP, BACK = (
    event(1),
    event(2, "unloaded", "Qwen/big", 50, "request"),
    event(3, "restored", ago=40, seconds=1.25),
)
PAST = (OFF, DROP, BACK)


def texts(row):
    return [cell.text for cell in row.cells]


# -- filters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (Filter(), [OFF, DROP]),
        (Filter(action="restored"), [BACK]),
        (Filter(action="unloaded"), [DROP]),
        (Filter(model="qwen"), [DROP]),
        (Filter(model=" LLA "), [OFF]),
        (Filter(reason="request"), [DROP]),
        (Filter(reason=ANY, since=WALL - 55), [DROP]),
        (Filter(model="nobody"), []),
    ],
)
def test_a_filter_selects_by_model_reason_action_and_time(wanted, found):
    """Without a filter, all evictions are shown."""
    assert list(matching(PAST, wanted)) == found


def test_the_choices_of_reasons_are_those_that_occurred():
    assert evictions.reasons((*PAST, event(4, "granted", reason="cap"))) == [
        ANY,
        "memory_pressure",
        "request",
    ]


@given(st.lists(st.integers(0, 20)), st.lists(st.integers(0, 20)))
def test_journal_and_snapshot_are_merged_without_duplicates_newest_first(past, recent):
    """The snapshot has the newest events and the journal has older ones. Some events are in both."""
    found = merged([event(n, ago=100 - n) for n in past], [event(n, ago=100 - n) for n in recent])
    assert [one.seq for one in found] == sorted({*past, *recent}, reverse=True)


def test_a_row_shows_model_action_place_reason_process_and_duration():
    off, _, back = evictions.rows(PAST, samples.busy)
    assert texts(off)[1:] == [
        "llama",
        "▼ offloaded",
        "8.0 GiB",
        "sim:0",
        "memory pressure",
        "qwen needs room",
        "train.ipynb (pid 4000), ann",
        "–",
    ]
    assert texts(back)[-1] == "1.2 s" and texts(back)[2] == "▲ restored"


def test_a_split_model_names_all_its_devices():
    split = event(1, shares=(Share("sim:0", GIB), Share("sim:1", GIB)))
    assert texts(evictions.rows([split], samples.busy)[0])[4] == "sim:0, sim:1"


# -- counted ---------------------------------------------------------------------------------------


def test_evictions_are_shown_as_offloads_plus_unloads():
    """The page shows law 10 of docs/architecture.md."""
    assert words(counters_html(samples.busy)).startswith(
        "3 evictions = 2 offloads + 1 unload 2 restored 4 loads 0 refusals"
    )


def test_the_counters_of_a_real_runtime_add_up(rt):
    rt.register("a", backend="fake", size="14GiB")
    rt.register("b", backend="fake", size="14GiB")
    for name in "abab":
        rt.preload(name)
    (_, total, _), (_, offloads, _), (_, unloads, _), (_, restored, _), *_ = evictions.counters(
        rt.status()
    )
    assert total == offloads + unloads == 3 and restored == 2
    shown = merged((), rt.status().events)
    assert len(matching(shown, Filter())) == 3
    returns = matching(shown, Filter(action="restored"))
    assert len(returns) == 2 and all(event.seconds >= 0 for event in returns)


# -- over time -------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["offloaded", "unloaded", "restored", "loaded", "granted"]),
            st.floats(0, 4000),
            st.integers(0, 9),
        ),
        max_size=60,
    )
)
def test_every_event_of_the_period_is_counted_once(drawn):
    events = [
        event(n, action, ago=ago, seconds=float(took))
        for n, (action, ago, took) in enumerate(drawn)
    ]
    bins = binned(events, WALL - 3600, WALL)
    inside = [one for one in events if one.wall >= WALL - 3600]
    for action in ("offloaded", "unloaded", "restored"):
        assert sum(getattr(bins, action)) == sum(one.action == action for one in inside)
    assert sum(bins.seconds) == sum(
        one.seconds for one in inside if one.action in ("loaded", "restored")
    )
    columns = evictions.eviction_columns(bins)
    assert sum(
        top - bottom for top, bottom in zip(columns["top"], columns["bottom"], strict=True)
    ) == sum(one.action in evictions.STYLES for one in inside)
    assert max(columns["top"], default=0) <= evictions.top(bins)


def test_a_bin_stacks_offloads_and_unloads_and_has_restores_beside_them():
    columns = evictions.eviction_columns(binned(PAST, WALL - 4800, WALL))
    assert [
        (found, bottom, top)
        for found, bottom, top in zip(
            columns["tooltip"], columns["bottom"], columns["top"], strict=True
        )
    ] == [("1 offloaded", 0, 1), ("1 unloaded", 1, 2), ("1 restored", 0, 1)]
    assert columns["left"][0] == columns["left"][1] and columns["left"][2] == pytest.approx(
        columns["right"][0]
    )


# -- as a file -------------------------------------------------------------------------------------


def read(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_the_file_has_the_filtered_events_with_times_in_utc():
    (row,) = read(csv_of(matching(PAST, Filter(action="restored")), samples.busy))
    assert row == {
        "time": "2025-11-20T12:02:24.000+00:00",
        "model": "llama",
        "action": "restored",
        "reason": "memory_pressure",
        "because": "qwen needs room",
        "bytes": str(8 * GIB),
        "device": "sim:0",
        "owner": "train.ipynb (pid 4000)",
        "asked_by": "",
        "seconds": "1.25",
    }


@given(st.text(max_size=12))
def test_no_cell_is_a_formula(name):
    """A spreadsheet runs a cell that begins like a formula, and a model may have any name. Names
    that are no formula are not changed.
    """
    (row,) = read(csv_of([event(1, model=name)], samples.busy))
    assert not row["model"].lstrip().startswith(("=", "+", "-", "@", "|", "%"))
    assert row["model"].removeprefix("'") == evictions.clean(name).removeprefix("'")


# -- the tab ---------------------------------------------------------------------------------------


def shown(tab):
    return [row[1][1][0] for row in decode(tab.table.rows)]


def tab_of(*events, snapshot=samples.busy, **answers):
    page = replace(snapshot, events=())
    return opened(
        EvictionsTab, page, history=lambda seconds, points: History((), events, seconds), **answers
    )


def test_the_tab_uses_no_deprecated_argument():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tab_of().save.variant == "outlined"


def test_the_tab_shows_the_evictions_and_follows_its_filters():
    tab = tab_of(*PAST)
    assert shown(tab) == ["Qwen/big", "llama"] and tab.reason.options == [
        ANY,
        "memory_pressure",
        "request",
    ]
    tab.reason.value = "request"
    assert shown(tab) == ["Qwen/big"]
    tab.action.value = "restored"
    assert shown(tab) == [] and tab.table.empty == NO_MATCH
    tab.reason.value = ANY
    assert shown(tab) == ["llama"]
    tab.model.value_input = "nobody"
    assert shown(tab) == []


def test_the_saved_file_has_the_events_that_are_shown():
    tab = tab_of(*PAST)
    tab.model.value_input = "big"
    assert [row["model"] for row in read(tab._file().read().decode())] == ["Qwen/big"]


def test_the_newest_event_is_shown_before_the_journal_is_read_again():
    tab = tab_of()
    tab.poller.rt.snapshot = replace(samples.busy, events=(OFF,))
    refresh(tab)
    assert shown(tab) == ["llama"]


def test_the_axis_of_seconds_is_visible_only_if_seconds_were_measured():
    assert not any(part.visible for part in tab_of(OFF).chart._timed)
    assert all(part.visible for part in tab_of(*PAST).chart._timed)


def test_a_day_of_evictions_fits_in_the_chart():
    day = pasts.day()
    tab = tab_of(*day.events)
    assert len(tab.chart.spent.data["x"]) == BINS
    assert tab.chart.height.end >= max(tab.chart.source.data["top"])
    assert (
        tab.chart.time.start <= (samples.WALL - 84_600) * 1e3
        and samples.WALL * 1e3 <= tab.chart.time.end
    )


def test_the_bins_stay_the_same_until_the_next_one_begins():
    """The bins of the chart move only when the next one begins. Otherwise every bar would be drawn
    again each second.
    """
    ends = {evictions.window(86_400, WALL + second)[1] for second in range(1800)}
    assert len(ends) == 2 and all(0 <= end - WALL < 3600 for end in ends)


def test_an_empty_table_shows_that_nothing_was_evicted():
    tab = tab_of()
    assert shown(tab) == [] and tab.table.empty.startswith("No evictions in this period")
