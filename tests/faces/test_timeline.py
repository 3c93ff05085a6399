"""The tab Timeline: what is drawn of the record, and which time is shown."""

import itertools
import json

import pytest
from gpu_panels.data.timeline import FOLDED_PART, KINDS, Range, arrows, lease_titles, timeline
from gpu_panels.palette import COLOURS
from gpu_panels.tabs import TimelineTab
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.facts import HOST, Event, History, Level, Moment
from gpu_runtime.rendering import views
from gpu_runtime.units import GIB

from . import pasts, samples
from .polling import opened, refresh


def moment(wall, device="sim:0", busy=None, celsius=None, watts=None, **gib):
    claims = {f"{name}@1": int(size * GIB) for name, size in gib.items()}
    figures = (24 * GIB, 20 * GIB, None, Level.LOW, busy, celsius, watts)
    return Moment(wall, device, *figures, claims=claims)


def evicted(wall, model="llama", because="qwen needs 8.0 GiB on sim:0; llama was idle", **more):
    more.setdefault("device", "sim:0")
    return Event(1, wall, model, "offloaded", "request", because, 8 * GIB, owner="1.1.0", **more)


def drawn(*moments, events=(), start=0.0, end=100.0):
    """What is drawn of the record between the two times."""
    return timeline(History(moments, events, end - start), samples.busy, Range(start, end))


def bars(drawing):
    """Start, end and device of every bar, by the key of its row."""
    return {row.key: [(one.start, one.end, one.device) for one in row.bars] for row in drawing.rows}


def test_a_model_that_leaves_for_ram_continues_there():
    """The host has no colour of its own. The words for screen readers name both places."""
    on_card = [moment(wall, qwen=8) if wall < 50 else moment(wall) for wall in range(0, 100, 10)]
    leased = lambda wall: {"qwen": 8} if wall >= 50 else {}
    in_ram = [moment(wall, HOST, **leased(wall)) for wall in range(0, 100, 10)]
    found = drawn(*on_card, *in_ram)
    assert bars(found) == {"qwen@1": [(0, 500, "sim:0"), (500, 1000, HOST)]}
    assert found.rows[0].words == "qwen · pid 1: 50 s on sim:0, 50 s in RAM"
    assert found.cards == ("sim:0",) and found.rows[0].colour in COLOURS


def test_a_gap_in_the_record_stays_a_gap():
    """If nothing was sampled for an hour, the use in that hour is unknown and is not drawn."""
    moments = [moment(wall, qwen=8, busy=50) for wall in (0, 10, 20, 3600, 3610)]
    found = drawn(*moments, end=4000)
    assert bars(found) == {"qwen@1": [(0, 7.5, "sim:0"), (900, 905, "sim:0")]}
    assert found.gaps == ((7.5, 900), (905, 1000))
    assert [len(piece) for piece in found.figures[0].lines["%"]] == [3, 2]
    short = drawn(*(moment(wall, qwen=8) for wall in (0, 1, 2, 32)), end=33)
    assert bars(short) == {"qwen@1": [(0, 1000, "sim:0")]}, "half a minute is no gap"
    assert short.rows[0].bars[0].hint == "8.0 GiB on sim:0 for 33 s"
    late = (moment(0), moment(50), moment(0, HOST), moment(1, HOST))
    assert drawn(*late).gaps == (), "the card was recorded the whole time"


CLAIMS = st.lists(st.booleans(), min_size=1, max_size=30)


@given(CLAIMS)
def test_bars_cover_exactly_the_moments_in_which_the_model_was_there(there):
    """Bars of one device never overlap and never touch."""
    moments = [moment(10.0 * n, **({"qwen": 8} if here else {})) for n, here in enumerate(there)]
    end = 10.0 * len(there)
    found = bars(drawn(*moments, end=end)).get("qwen@1", [])
    for n, here in enumerate(there):
        middle = 1000 * (n + 0.5) / len(there)
        assert any(start <= middle < stop for start, stop, _ in found) == here
    assert all(one[1] < other[0] for one, other in zip(found, found[1:], strict=False))


def test_evictions_for_another_model_are_one_arrow_from_the_victim():
    found = drawn(moment(0, qwen=8, llama=8), events=(evicted(50),))
    (arrow,) = found.arrows
    assert (arrow.at, arrow.victim, arrow.heir, arrow.label) == (500, "llama@1", "qwen@1", "")
    assert "llama offloaded: qwen needs 8.0 GiB" in arrow.hint
    events = [evicted(1000 + 24 * n) for n in range(6)]
    (arrow,) = arrows(events, {"qwen@1", "llama@1"}, Range(0, 3600))
    assert arrow.label == "6× in 2 min"


@pytest.mark.parametrize(("by", "because", "heir"), [
    ("", "qwen needs 8.0 GiB on sim:0; llama was idle", "qwen@1"),
    ("eval.ipynb (pid 9)", "eval.ipynb (pid 9) needs room for qwen.", "qwen@9"),
    ("ann, pid 9", "pid 9 needs room for qwen2.5:7b.", "qwen2.5:7b@9"),
    ("ann, pid 7", "pid 7 needs room for qwen.", None),
    ("ann, pid 7", "pid 7 needs room for qwen2.5:7b.", None),  # only process 9 has a row of it
    ("pid 9, console (ann, pid 1)", "pid 9, console (pid 1) needs room for qwen.", "qwen@1"),
    ("ann", "another process needs room for qwen.", None),
    ("eval.ipynb (pid 9)", "eval.ipynb (pid 9) needs room for its own memory.", "kernel@9"),
])  # fmt: skip
def test_the_arrow_leads_to_the_process_that_requested_the_room(by, because, heir):
    """Two processes have a model of this name. The requester is in the event."""
    labels = {"llama@1", "qwen@1", "qwen@9", "qwen2.5:7b@9", "kernel@9"}
    found = arrows([evicted(50, because=because, by=by)], labels, Range(0, 100))
    assert [arrow.heir for arrow in found] == ([heir] if heir else [])


@pytest.mark.parametrize("event", [
    evicted(50, because="llama was evicted by hand."),
    evicted(50, because="nobody needs 8.0 GiB on sim:0"),
    evicted(50, because="RAM is full; qwen needs room on sim:0.", device=HOST),
    evicted(150), evicted(50, model="unknown"),
])  # fmt: skip
def test_no_arrow_is_drawn_without_a_row_at_both_ends(event):
    assert drawn(moment(0, qwen=8, llama=8), events=(event,)).arrows == ()


@given(st.lists(st.floats(0, 100), max_size=20))
def test_repeated_arrows_are_folded_and_none_is_lost(walls):
    events = [evicted(wall) for wall in sorted(walls)]
    found = arrows(events, {"qwen@1", "llama@1"}, Range(0, 100))
    numbers = [int(one.label.partition("×")[0]) if one.label else 1 for one in found]
    assert sum(numbers) == len(walls)
    gaps = [after - before for before, after in itertools.pairwise(sorted(walls))]
    assert len(found) == bool(walls) + sum(gap > 100 * FOLDED_PART for gap in gaps)


def test_what_the_driver_measured_is_drawn_and_the_rest_is_left_out():
    """An unknown temperature is not drawn as 0."""
    found = drawn(moment(0, busy=10, watts=100), moment(50, busy=30.4, watts=250))
    (figures,) = found.figures
    assert figures.lines["%"] == (((0, 10), (500, 30)),) and figures.lines["°C"] == ()
    assert (figures.now, figures.highest_watts) == ("30 % · 250 W", 250)


def test_the_models_that_held_least_have_no_row_and_a_note_says_so():
    found = drawn(moment(0, **{f"m{n}": 0.1 + n / 10 for n in range(40)}))
    assert len(found.rows) == 30 and found.note == "10 more held less, and have no row."
    assert "m39@1" in bars(found) and "m0@1" not in bars(found)
    for_long = moment(0, **{f"m{n}": 0.5 for n in range(30)})
    assert "brief@1" not in bars(drawn(for_long, moment(99, brief=1)))
    assert drawn(moment(0)).note == "No process held memory in this time."
    assert drawn().note.startswith("No history is recorded in this time.")


def test_a_lease_is_named_by_its_notebook_where_that_or_an_event_is_known():
    """A notebook's own code has the notebook's name alone."""
    titles = lease_titles(["qwen@4000", "kernel@4000", "old@77"], samples.busy)
    assert list(titles.values()) == ["qwen · train.ipynb", "train.ipynb", "old · pid 77"]
    parked = replace(evicted(50, model="kernel"), owner="77.1.0", notebook="/work/old.ipynb")
    titles = lease_titles(["kernel@77", "qwen@77", "x@78"], samples.busy, [parked])
    assert list(titles.values()) == ["old.ipynb", "qwen · old.ipynb", "x · pid 78"]


def with_record(fetched):
    """The tab over a record of the wished length. The wishes are in `fetched`."""
    history = lambda seconds, points: fetched.append(seconds) or pasts.day(seconds=seconds)
    return opened(TimelineTab, samples.busy, history=history)


def test_the_range_is_that_of_the_whole_tab():
    """The record of a custom range is read from its start on. Events after its end are not shown."""
    tab = with_record(fetched := [])
    tab.window.value = "2 h"
    refresh(tab)
    assert fetched == [900, 7200]
    drawing, lines = json.loads(tab.chart.drawing), json.loads(tab.chart.lines)
    assert drawing["end"] - drawing["start"] == 7200
    assert all(drawing["start"] <= line["wall"] <= drawing["end"] for line in lines)
    assert lines[0]["wall"] == max(line["wall"] for line in lines)
    tab = with_record(fetched := [])
    start = samples.WALL - 7200
    tab.chart._handle_msg({"start": start, "end": start + 600})
    refresh(tab)
    drawing, lines = json.loads(tab.chart.drawing), json.loads(tab.chart.lines)
    assert tab.window.value == "Custom" and fetched[-1] == 7200
    assert (drawing["start"], drawing["end"]) == (start, start + 600)
    assert all(line["wall"] <= start + 600 for line in lines)


@pytest.mark.parametrize("message", [
    "x", {"start": "1", "end": 2}, {"start": 5, "end": 5}, {"start": 0, "end": 1e12}, {"end": None},
])  # fmt: skip
def test_a_range_that_no_person_can_choose_is_ignored(message):
    """A browser may send anything."""
    tab = opened(TimelineTab, samples.busy)
    tab.chart._handle_msg(message)
    assert tab.window.value == "15 min"


@pytest.mark.parametrize("span", ["", "1-2", "a-b", "99999999999-999999999999"])
def test_an_unusable_custom_range_in_the_url_shows_the_last_minutes(span):
    tab = opened(TimelineTab, samples.busy)
    tab.span.value = span
    tab.window.value = "Custom"
    shown = tab.shown(samples.busy)
    assert shown == Range(samples.WALL - 900, samples.WALL)


def test_the_saved_file_has_the_events_of_the_range():
    past = pasts.day(seconds=900, busy=3)
    tab = opened(TimelineTab, samples.busy, history=lambda seconds, points: past)
    lines = tab._file().read().decode().splitlines()
    assert len(lines) == 1 + len(json.loads(tab.chart.lines)) > 5


def test_each_event_that_has_words_has_a_kind():
    """Five were in no kind of the filter, such as memory that moved to a disk."""
    shown = {action for _, actions in KINDS.values() for action in actions}
    assert views._EVENT_PHRASES.keys() - shown == {"failed", "asleep", "on disk"}
