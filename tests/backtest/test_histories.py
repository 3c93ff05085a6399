"""Histories are read from CSV files and from the journal."""

import pytest

from gpu_runtime.backtest import USE_SECONDS, HistoryModel, journal_history, read_history
from gpu_runtime.errors import BadSetting
from gpu_runtime.facts import Event, encode_uses
from tests.worlds import WALL, lease

MODELS = "model,size_gb,load_s,restore_s,offload_s\na,1.5,3,0.5,0.2\nb,2,4,1,1\n"
REQUESTS = "t_s,model,service_s,importance\n2.5,b,1,high\n0,a,2.5,normal\n"


@pytest.fixture
def files(tmp_path):
    def write(requests=REQUESTS, models=MODELS):
        (tmp_path / "r.csv").write_text(requests, errors="surrogateescape")
        (tmp_path / "m.csv").write_text(models)
        return tmp_path / "r.csv", tmp_path / "m.csv"

    return write


def test_two_files_are_a_history(files):
    history = read_history(*files())
    assert history.models["a"] == HistoryModel("a", 1_500_000_000, 3.0, 0.5, 0.2)
    assert [(one.seconds, one.model, one.importance) for one in history.requests] == [
        (0.0, "a", 10),
        (2.5, "b", 5),
    ]
    assert (history.bytes, history.largest) == (3_500_000_000, 2_000_000_000)


def test_a_history_may_have_engines_and_notebooks(files):
    head, *rows = MODELS.split()
    models = "\n".join([f"{head},kind", f"{rows[0]},notebook", f"{rows[1]},", ""])
    history = read_history(*files(models=models))
    assert {name: model.kind for name, model in history.models.items()} == {
        "a": "notebook",
        "b": "model",
    }
    with pytest.raises(BadSetting, match="line 2, kind='kernel' .*one of model, engine, notebook"):
        read_history(*files(models=models.replace("notebook", "kernel")))


@pytest.mark.parametrize(
    ("requests", "models", "message"),
    [
        ("t_s,model\n", MODELS, r"(?s)first line of .*r.csv.*service_s"),
        (REQUESTS.replace("2.5,b", "soon,b"), MODELS, r"r.csv, line 2"),
        (REQUESTS.replace("2.5,b", "-1,b"), MODELS, r"r.csv, line 2"),
        (REQUESTS.replace("2.5,b", "nan,b"), MODELS, r"r.csv, line 2"),
        (REQUESTS.replace("high", "huge"), MODELS, r"r.csv, line 2"),
        (REQUESTS.replace(",b,", ",c,"), MODELS, r"r.csv, line 2.*'c'.*m.csv describes"),
        (REQUESTS, MODELS.replace("1.5", "0"), r"m.csv, line 2"),
        (
            REQUESTS,
            MODELS.replace("1.5", ""),
            r"m.csv, line 2.* must be a number from 0, not empty",
        ),
        (REQUESTS, MODELS + "a,9,1,1,1\n", r"m.csv='a' .*described once, and it is there twice"),
        (REQUESTS, MODELS + "c,1\n", r"m.csv, line 4.*must be 5 values"),
        (
            REQUESTS.replace("high", "huge"),
            MODELS,
            r"line 2, importance='huge' cannot .*one of urgent",
        ),
        (REQUESTS + "9,\udcff,1,high\n", MODELS, r"r.csv' cannot be used: .* a CSV file in UTF-8"),
    ],
)
def test_a_mistake_is_one_sentence_with_its_file_and_line(files, requests, models, message):
    with pytest.raises(BadSetting, match=message):
        read_history(*files(requests, models))


def test_a_file_of_a_spreadsheet_with_a_mark_of_its_encoding_is_read(files):
    assert read_history(*files("\ufeff" + REQUESTS)) == read_history(*files())


def test_a_file_that_is_not_there_is_named(files, tmp_path):
    with pytest.raises(BadSetting, match="nowhere.csv"):
        read_history(tmp_path / "nowhere.csv", files()[1])


def event(model, action, wall, **fields):
    return Event(1, wall, model, action, "request", "", **fields)


def test_the_journal_shows_uses_sizes_and_seconds():
    events = [
        event("a", "loaded", WALL - 100, bytes=4, seconds=8.0, source="x"),
        event("a", "restored", WALL - 50, bytes=4, seconds=1.0, source="x"),
        event("a", "offloaded", WALL - 20, uses=encode_uses([WALL - 90, WALL - 40]), source="x"),
        event("a", "refused", WALL - 10),
        event("other name", "released", WALL - 9, uses=encode_uses([WALL - 15]), source="x"),
    ]
    still_here = lease("a", by=2, sim0=1, recent_uses=encode_uses([WALL - 5]), source="x")
    history = journal_history(events, [still_here], WALL)
    [model] = history.models.values()
    assert (model.name, model.load_seconds, model.restore_seconds) == ("a", 8.0, 1.0)
    assert model.bytes == 2**30, "the lease is larger than what was loaded"
    assert [one.seconds for one in history.requests] == [0.0, 10.0, 50.0, 60.0, 85.0, 95.0]
    assert {one.service_seconds for one in history.requests} == {USE_SECONDS}


def test_the_newest_measured_duration_counts_and_only_models_do():
    """A load whose duration is not known leaves the last one. Other leases are no use of a model."""
    events = [
        event("a", action, WALL - 100 + 10 * n, bytes=4 * 10**9, seconds=seconds)
        for n, (action, seconds) in enumerate(
            [("loaded", 9.0), ("loaded", 7.0), ("restored", 3.0), ("restored", 2.0), ("loaded", 0)]
        )
    ]
    block = lease("work", sim0=1, kind="block", recent_uses=encode_uses([WALL - 5]))
    [model] = journal_history(events, [block], WALL).models.values()
    assert (model.load_seconds, model.restore_seconds, model.offload_seconds) == (7.0, 2.0, 0.4)
    [unmeasured] = journal_history(events[-1:], [], WALL).models.values()
    assert (unmeasured.load_seconds, unmeasured.restore_seconds) == (4.0, 0.4)


def test_two_models_of_one_name_stay_two():
    events = [
        event("a", "loaded", WALL - 9, bytes=4, source="x"),
        event("a", "loaded", WALL - 8, bytes=6, source="y"),
    ]
    assert sorted(model.bytes for model in journal_history(events, [], WALL).models.values()) == [
        4,
        6,
    ]


def test_an_empty_journal_is_an_empty_history():
    assert journal_history([], [], WALL).requests == ()
