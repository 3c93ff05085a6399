"""The tables of verbs show units for people. Their columns keep the raw numbers for code."""

import os
import pickle
import sys

import pandas
import pytest

from gpu_runtime.facts import Event, Lease
from gpu_runtime.owner import status
from gpu_runtime.rendering import answers, render
from gpu_runtime.tables import Table, table
from gpu_runtime.units import GIB


@pytest.fixture
def models(rt):
    rt.register("qwen", backend="fake", size="14 GiB", importance="high", keep=True)
    rt.register("phi", backend="fake", size="2 GiB", importance=7)
    rt.preload("qwen")
    return rt


def cells(frame):
    """The words of each line of the shown table."""
    return [line.split() for line in repr(frame).splitlines()]


def test_people_see_sizes_and_importance_by_name_and_code_sees_numbers(models):
    frame = render.with_titles("models", models.models(), models)
    head, qwen, phi = cells(frame)
    assert head == list(models.models().columns)
    assert qwen[:5] == ["qwen", "fake", "sim:0", "14.0", "GiB"] and "high" in qwen and "yes" in qwen
    assert phi[:5] == ["phi", "fake", "disk", "2.0", "GiB"] and "7" in phi
    assert list(frame.bytes) == [14 * GIB, 2 * GIB] and list(frame.importance) == [5, 7]
    assert isinstance(frame, pandas.DataFrame) and list(frame.columns) == head
    assert "14.0 GiB" in frame._repr_html_() and len(frame._repr_html_()) < 1200
    frame = render.with_titles("models", models.models(), models)
    assert type(frame[frame.bytes > 3 * GIB]) is pandas.DataFrame


def test_times_are_local_to_the_second_and_owners_are_short(models):
    frame = render.with_titles("evictions", models.events(), models)
    moment = frame.time[0].floor("s").to_pydatetime()
    row = repr(frame).splitlines()[1]
    assert row.startswith(moment.astimezone().strftime("%Y-%m-%d %H:%M:%S  "))
    assert row.endswith(f"pid {os.getpid()}") and frame.time.dt.tz is not None


def test_a_terminal_names_the_owners_that_a_notebook_names(models):
    """The column OWNER of `gpu evictions` had pids only. An ended notebook is named by its events."""
    event = Event(1, 0.0, "kernel", "offloaded", "x", "y", owner="77.1.0", notebook="/w/old.ipynb")
    frame = answers.showing(status.events([event]), answers.for_people)
    for shown in (repr(frame), render.frame_text(frame)):
        assert "old.ipynb (pid 77), ended" in shown and "kernel" not in shown


def test_unknown_values_are_no_numbers_and_an_empty_table_says_so():
    frame = answers.showing(
        pandas.DataFrame({"bytes": [None], "idle_seconds": [None], "name": [None]}).astype(
            {"bytes": "Int64", "idle_seconds": "float64"}
        ),
        answers.for_people,
    )
    assert cells(frame)[1] == ["unknown"]
    assert repr(answers.showing(pandas.DataFrame({"name": []}), answers.for_people)) == "(no rows)"


def test_the_middle_of_a_long_table_is_counted(models):
    frame = answers.showing(
        pandas.DataFrame({"name": [f"<m{n}>" for n in range(100)]}), answers.for_people
    )
    shown = repr(frame).splitlines()
    assert len(shown) == 1 + answers.MOST_SHOWN + 1 and "… 40 more rows …" in shown
    assert shown[1] == "<m0>" and shown[-1] == "<m99>"
    page = frame._repr_html_()
    assert "… 40 more rows …" in page and "<m0>" not in page and "&lt;m0&gt;" in page


TABLES = (
    "models",
    "leases",
    "events",
    "evictions",
    "fragmentation",
    "who",
    "catalog",
    "backtest",
    "report",
)


@pytest.mark.parametrize("verb", TABLES)
def test_a_table_looks_the_same_without_pandas(models, monkeypatch, verb):
    """pandas is not installed by gpu-console. The text, the HTML and the JSON are those of a DataFrame."""
    models.register("gemma", backend="fake", size="3 GiB")
    models.preload("gemma")
    models.evict("gemma", drop=True)
    monkeypatch.setattr(Lease, "idle_seconds", lambda *_: 3.0)
    with_pandas = getattr(models, verb)()
    monkeypatch.setitem(sys.modules, "pandas", None)
    without = getattr(models, verb)()
    assert type(with_pandas) is pandas.DataFrame and type(without) is Table
    assert without.columns == list(with_pandas.columns) and len(without) == len(with_pandas)
    for one in (without, with_pandas):  # the duration of the search of `who`
        one.attrs.update({"seconds": 0.0} if "seconds" in one.attrs else {})
    assert without.attrs == with_pandas.attrs
    assert render.as_json(without) == render.as_json(with_pandas)
    assert render.frame_text(without) == render.frame_text(with_pandas)
    monkeypatch.undo()
    shown, as_before = (render.with_titles(verb, one, models) for one in (without, with_pandas))
    assert repr(shown) == repr(as_before) and shown._repr_html_() == as_before._repr_html_()
    assert isinstance(shown, Table) and shown.columns == without.columns


def test_a_plain_table_has_rows_and_columns():
    """A broken pandas counts as none: a NumPy of another version is no ImportError."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(pandas, "DataFrame")
        plain = table([["qwen\x1b", 14], ["<phi>", None]], ["name", "bytes"])
    assert [row["name"] for row in plain] == plain["name"] == ["qwen�", "<phi>"]
    assert plain[0] == {"name": "qwen�", "bytes": 14} and len(plain[:1]) == 1
    assert (
        repr(plain).splitlines()[1].split() == ["qwen�", "14"]
        and "&lt;phi&gt;" in plain._repr_html_()
    )
    copied = pickle.loads(pickle.dumps(plain))
    assert copied == plain and copied.columns == ["name", "bytes"]
