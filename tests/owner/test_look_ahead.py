"""Look-ahead loads the models of waiting cells while the running cell still runs."""

import threading
from unittest.mock import Mock

import pytest

from gpu_runtime import threads
from gpu_runtime.facts import CellModels, ModelSpec
from gpu_runtime.notebook import upcoming
from gpu_runtime.owner.look_ahead import stage_files
from tests.clock import PATIENCE, until
from tests.owner.conftest import fakes, where

GIB = 2**30


@pytest.fixture
def notebook():
    """Sets the cells: with `notebook("a", "b c")` the running cell uses a, and the next one b and c."""
    current: list[tuple[CellModels, ...]] = [()]
    upcoming.read_by(lambda known, governed: current[0])

    def show(*cells, mentions=""):
        current[0] = tuple(
            CellModels(
                f"cell {n}",
                tuple(uses.split()),
                tuple(sorted({*uses.split(), *(mentions.split() if n == 1 else ())})),
                n == 1,
            )
            for n, uses in enumerate(cells, 1)
        )
        return current[0]

    yield show
    upcoming.read_by(None)


def step(rt, cells):
    """Runs one step of look-ahead in the calling thread."""
    ahead = rt._session.look_ahead
    ahead.follow(cells)
    return ahead.load_next(cells)


def test_the_next_model_is_loaded_into_free_memory_and_why_says_so(runtime, notebook):
    rt = fakes(runtime(devices="sim:24GiB,host:64GiB"), a="10GiB", b="10GiB")
    cells = notebook("a", "", "b")
    with rt.use("a"):
        assert step(rt, cells)
        assert where(rt) == {"a": "sim:0", "b": "sim:0"}
    [loaded, granted] = rt.why("b")
    assert (loaded.action, granted.action) == ("loaded", "granted")
    assert loaded.because == granted.because == "loaded ahead: cell 3 uses it."
    assert not step(rt, cells), "nothing is left to load"


def test_models_that_are_used_never_or_later_leave_and_sooner_ones_stay(runtime, notebook):
    rt = fakes(runtime(devices="sim:24GiB,host:64GiB"), a="10GiB", b="10GiB", c="10GiB")
    for name in "ab":
        rt.preload(name)
    assert step(rt, notebook("", "b", "c")) and where(rt)["a"] != "sim:0"
    assert where(rt)["b"] == where(rt)["c"] == "sim:0"
    assert not step(rt, notebook("", "b", "c", "a")), "a would take the place of b or c"
    assert where(rt)["b"] == where(rt)["c"] == "sim:0"
    assert step(rt, notebook("", "a", "b", "c")) and where(rt)["c"] != "sim:0"


def test_what_the_running_cell_names_stays_and_its_own_models_come_first(runtime, notebook):
    rt = fakes(runtime(devices="sim:12GiB,host:64GiB"), a="10GiB", b="10GiB")
    rt.preload("a")
    assert not step(rt, notebook("", "b", mentions="a")) and where(rt)["a"] == "sim:0"
    rt.evict("a")
    cells = notebook("a", "b")
    assert not step(rt, cells) and where(rt)["b"] != "sim:0", "the running cell needs the room"
    [_, b] = rt.schedule().models
    assert b.because == "the running cell uses a, which comes first"


def test_a_real_request_may_have_the_room_of_a_guess_at_once(runtime, notebook, shared_book):
    """A model that was loaded ahead has no grace time, so a request of another process evicts it at once."""
    rt, other = (runtime(ledger=shared_book, eviction_grace_seconds=600) for _ in range(2))
    fakes(rt, b="20GiB")
    fakes(other, theirs="20GiB")
    assert step(rt, notebook("", "b"))
    with other.use("theirs", timeout=PATIENCE):
        assert where(rt)["b"] != "sim:0"


def test_guesses_that_come_to_nothing_are_counted(runtime, notebook):
    rt = fakes(runtime(devices="sim:48GiB,host:64GiB"), a="10GiB", b="10GiB", c="10GiB")
    cells = notebook("", "a", "b", "c")
    for _ in "abc":
        assert step(rt, cells)
    found = rt.schedule()
    assert (found.loaded_ahead, found.used, found.unused) == (3, 0, 0)
    assert [model.ahead for model in found.models] == [True] * 3
    with rt.use("a"):
        pass
    rt.evict("b")
    found = rt.schedule()
    assert (found.loaded_ahead, found.used, found.unused) == (3, 1, 1)
    notebook()  # an error: nothing waits any more
    found = rt.schedule()
    assert (found.loaded_ahead, found.used, found.unused) == (3, 1, 2)


def test_a_guess_before_a_preload_was_right(runtime, notebook):
    rt = fakes(runtime(), b="10GiB")
    assert step(rt, notebook("", "b"))
    rt.preload("b")
    notebook("")
    found = rt.schedule()
    assert (found.loaded_ahead, found.used, found.unused) == (1, 1, 0)


def test_a_model_that_fails_to_load_is_tried_once_and_disturbs_nothing(runtime, notebook):
    rt = runtime()
    tried = []

    def fail(what):
        tried.append(what)
        raise RuntimeError("the file is damaged")

    rt.register("bad", fail, backend="fake", size="1GiB")
    rt.register("b", backend="fake", size="1GiB")
    cells = notebook("", "bad", "b")
    assert step(rt, cells) and step(rt, cells) and not step(rt, cells)
    assert tried == ["load"] and where(rt) == {"bad": "disk", "b": "sim:0"}
    assert "RuntimeError" in rt.schedule().models[0].because
    assert not [lease for lease in rt.status().leases() if lease.name == "bad"]


def test_the_policy_follows_the_schedule(runtime, notebook):
    """A real request evicts the model that the schedule needs last, even if another model was used longer ago."""
    rt = fakes(runtime(devices="sim:24GiB,host:64GiB"), a="10GiB", b="10GiB", c="10GiB")
    rt.preload("a")
    rt.preload("b")
    rt._session.look_ahead.follow(notebook("c", "a"))
    rt.preload("c")
    assert where(rt)["a"] == "sim:0" and where(rt)["b"] != "sim:0"


def test_a_change_of_the_cells_wakes_the_thread(runtime, notebook):
    rt = runtime(gpu_prefetch="auto")  # the notebooks of the same run set another one
    loaded = threading.Event()
    rt.register("b", lambda what: loaded.set(), backend="fake", size="1GiB")
    notebook("", "b")
    for _ in range(int(PATIENCE)):
        upcoming.changed()
        if loaded.wait(1.0):
            break
    assert loaded.is_set(), (vars(rt._session.look_ahead), rt.schedule())


def test_the_thread_is_started_again_after_it_ended_with_any_exception(
    runtime, notebook, monkeypatch
):
    """A user's factory may raise SystemExit, or the system may refuse to start a thread."""
    rt = fakes(runtime(gpu_prefetch="auto"), b="1GiB")
    ahead, started = rt._session.look_ahead, []

    def start(work):
        if not started:
            started.append(None)
            raise RuntimeError("can't start new thread")
        started.append(work)

    monkeypatch.setattr(threads, "start", start)
    monkeypatch.setattr(ahead, "load_next", Mock(side_effect=SystemExit))
    with pytest.raises(RuntimeError):
        notebook("", "b")
        ahead.wake()
    for count in (2, 3):
        ahead.wake()
        assert len(started) == count
        with pytest.raises(SystemExit):
            started[-1]()


def test_never_loads_nothing(runtime, notebook):
    rt = fakes(runtime(gpu_prefetch="never"), b="1GiB")
    notebook("", "b")
    upcoming.changed()
    assert not rt._session.look_ahead._works and rt.schedule().mode == "never"
    assert where(rt)["b"] == "disk"


def test_preload_without_wait_returns_at_once(runtime):
    rt = runtime()
    go, done = threading.Event(), threading.Event()
    rt.register("b", lambda what: (go.wait(PATIENCE), done.set()), backend="fake", size="1GiB")
    outcome = rt.preload("b", wait=False)
    assert not outcome.done and outcome.because == "b is loaded in the background"
    go.set()
    assert done.wait(PATIENCE)
    with rt.use("b", timeout=PATIENCE):
        assert where(rt)["b"] == "sim:0"
    assert rt.preload("b", wait=False).done


def test_a_preload_without_wait_gives_up_after_its_time(runtime, caplog):
    rt = fakes(runtime(), a="14GiB", b="14GiB")
    with rt.use("a"):
        rt.preload("b", wait=False, timeout=0)
        until(lambda: "b was not preloaded" in caplog.text)
    assert not rt.status().tickets


def test_files_are_read_up_to_the_budget_and_other_files_are_not(tmp_path):
    for name, size in (("1.safetensors", 5), ("2.safetensors", 7), ("readme.md", 100)):
        (tmp_path / name).write_bytes(b"x" * size)
    spec = ModelSpec("m", "transformers", source=str(tmp_path))
    assert stage_files(spec, 100, lambda: False) == 12
    assert stage_files(spec, 11, lambda: False) == 5
    (tmp_path / "3.safetensors").write_bytes(b"x" * 6)
    assert stage_files(spec, 11, lambda: False) == 11, "only the second file is too large"
    (tmp_path / "3.safetensors").unlink()
    assert stage_files(spec, 100, lambda: True) == 0
    for source in ("", "no/where", str(tmp_path / "readme.md")):
        assert stage_files(ModelSpec("m", "transformers", source=source), 100, lambda: False) == 0
