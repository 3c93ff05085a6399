"""The activity: events as lines that open, and as a CSV file."""

import csv
import io

import pytest
from gpu_panels.data.timeline import MOST, csv_of, lines, merged
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.facts import Event
from gpu_runtime.safe_text import clean

from . import samples

GIB, WALL = samples.GIB, samples.WALL


def event(seq, action="offloaded", model="llama", ago=60.0, owner=samples.ME.id, **more):
    because = more.pop("because", "qwen needs room")
    return Event(
        seq, WALL - ago, model, action, "request", because, 8 * GIB, "sim:0", owner, **more
    )


def line(*arguments, **more):
    (found,) = lines([event(1, *arguments, **more)], samples.busy)
    return found


def test_a_line_shows_what_happened_to_which_model_and_by_whom():
    """An open line has the reason. Markup in a name stays as it is: the browser shows names as text."""
    found = line()
    assert (found.mark, found.model, found.kinds) == ("▼", "llama", ("evict",))
    assert found.words == "was offloaded from sim:0, freeing 8.0 GiB"
    assert found.process == "train.ipynb (pid 4000), ann" and found.wall == WALL - 60
    found = line(owner="77.1.0", by="ann, console")
    assert found.process == "pid 77, ended" and "Requested by ann, console." in found.details
    assert "\x1b" not in line(model="a\x1b[31m").model and line(model="<b>").model == "<b>"
    found = line("restored", seconds=1.25, by="bob", runners_up=("sim:1: too full",))
    assert found.details == (
        "qwen needs room",
        "Requested by bob.",
        "It took 1.2 s.",
        "Also considered: sim:1: too full",
    )
    assert found.kinds == ("grant", "operator"), "a person requested it"


@pytest.mark.parametrize(("action", "kind"), [
    ("granted", "grant"), ("loaded", "grant"), ("waiting", "wait"), ("refused", "wait"),
    ("unloaded", "evict"), ("reaped", "ended"), ("released", "ended"), ("pin", "operator"),
    ("drained", "operator"), ("lost", "ended"), ("failed", ""),
])  # fmt: skip
def test_each_event_has_the_kind_by_which_it_is_found(action, kind):
    assert line(action).kinds == tuple(filter(None, [kind]))
    assert line(action).is_problem == (action in ("refused", "lost", "failed"))


def test_an_ended_notebook_is_named_where_an_event_names_it():
    """Events of its models have no name of their own."""
    code = event(1, model="kernel", owner="77.1.0", notebook="/work/old.ipynb")
    qwen = event(2, model="qwen", owner="77.1.0")
    found = lines([code, qwen], samples.busy)
    assert [(one.model, one.process) for one in found] == [
        ("old.ipynb", "old.ipynb (pid 77), ended"),
        ("qwen", "old.ipynb (pid 77), ended"),
    ]
    assert [row["model"] for row in read(csv_of([code, qwen], samples.busy))] == [
        "old.ipynb",
        "qwen",
    ]


@given(st.lists(st.integers(0, 20)), st.lists(st.integers(0, 20)))
def test_journal_and_snapshot_are_merged_without_duplicates_newest_first(past, recent):
    found = merged([event(n, ago=100 - n) for n in past], [event(n, ago=100 - n) for n in recent])
    assert [one.seq for one in found] == sorted({*past, *recent}, reverse=True)


def test_the_event_of_the_journal_is_taken_since_it_has_the_other_places():
    full = event(1, runners_up=("sim:1: too full",))
    assert merged([full], [event(1)]) == (full,)


def read(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_the_file_has_all_events_with_times_in_utc():
    """Of many events, the newest lines are shown."""
    (row,) = read(csv_of([event(3, "restored", ago=40, seconds=1.25)], samples.busy))
    assert row == {
        "time": "2025-11-20T12:02:24.000+00:00", "model": "llama", "action": "restored",
        "reason": "request", "because": "qwen needs room", "bytes": str(8 * GIB), "device": "sim:0",
        "owner": "train.ipynb (pid 4000)", "asked_by": "", "seconds": "1.25",
    }  # fmt: skip
    many = [event(n, ago=n) for n in range(MOST + 5)]
    assert [one.wall for one in lines(many, samples.busy)] == [one.wall for one in many[:MOST]]
    assert len(read(csv_of(many, samples.busy))) == len(many)


@pytest.mark.parametrize("begin", ["=", "+", "-", "@", "|", "%", " =", "\t-", "a"])
@given(st.text(max_size=12))
def test_no_cell_is_a_formula(begin, more):
    """A spreadsheet runs a cell that begins like a formula. Names and reasons may be any text."""
    said = begin + more
    of_user = ("model", "action", "because", "by", "device")
    one = replace(event(1), **dict.fromkeys(of_user, said), reason=said)
    (row,) = read(csv_of([one], samples.busy))
    for name in ("model", "action", "reason", "because", "device", "asked_by"):
        assert not row[name].lstrip().startswith(("=", "+", "-", "@", "|", "%")), name
        assert row[name].removeprefix("'") == clean(said).removeprefix("'")
