"""An out-of-memory error tells its story: what was held, who steps aside, which number fits, and what to type.

The card is the simulated accelerator: it is really full, and raises its own errors.
"""

import gc
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpu_runtime import GpuError
from gpu_runtime.backends.pytorch import streams
from gpu_runtime.names import Namespace, registered
from gpu_runtime.owner import cell_room
from gpu_runtime.owner.cell_room import Fit, Runs, numbers_in
from gpu_runtime.rendering import answers
from gpu_runtime.units import MIB
from tests import simgpu

from .conftest import loaded
from .kernels import FLOATS, cell

CARD = "simgpu:0"


class Notebook(Namespace):
    """A notebook's variables, in a dict of the test."""

    def __init__(self) -> None:
        self.values: dict[str, object] = {}

    @property
    def _variables(self):
        return self.values


@pytest.fixture
def notebook(monkeypatch):
    mine = Notebook()
    monkeypatch.setattr(registered, "current", mine)
    monkeypatch.setattr(cell_room, "variables", lambda: mine.values)
    yield mine.values
    mine.values.clear()
    gc.collect()


@pytest.fixture
def card(started, guards):
    """A runtime and its kernel on a card of 64 MiB."""
    settings = {"gpu_memory_max_percent": 1.0, "cpu_memory_max_percent": 1.0}
    return started(probe=simgpu.SimProbe(), eviction_grace_seconds=0.0, **settings)


def on(mib: int) -> torch.Tensor:
    return torch.zeros(mib * FLOATS, device=CARD)


def run(kernel, code: str, values: dict[str, object]):
    """Runs the cell `code`. Returns its story if it ran out of memory, else None."""

    def body() -> None:
        exec(compile(code, "<cell>", "exec"), values)

    try:
        cell(kernel, body, code)
    except torch.OutOfMemoryError as error:
        caught = error
    else:
        return None
    sys.last_value = caught
    try:
        return kernel.cell_failed(caught)
    finally:
        del caught
        sys.last_value = None


def row(story, label: str, full: bool = False) -> str:
    return "; ".join(words for name, words in story.rows(full) if name == label)


def test_the_story_says_what_was_held_and_by_what(card, notebook):
    """The weights are 4 MiB, and so are their gradient and each of Adam's two averages. The graph keeps 24 MiB more."""
    _, kernel = card
    notebook.update(on=on)
    notebook["layer"] = layer = nn.Linear(1024, 1024, bias=False, device=CARD)
    notebook["adam"] = adam = torch.optim.Adam([layer.weight], foreach=False)
    layer(on(4).view(1024, 1024)).sum().backward()
    adam.step()
    x = on(8).view(2048, 1024)
    notebook["out"] = layer(x).relu().square()
    del layer, adam, x
    story = run(kernel, "def grow():\n    more = on(8)\n    on(40)\ngrow()", notebook)
    held = {one.name: one.bytes // MIB for one in story.held.holders}
    assert held["more in grow()"] == 8 and held["layer"] == 8 and held["adam"] >= 16
    assert story.held.optimizer_bytes // MIB == 8
    assert story.held.graph_bytes // MIB == 16
    assert story.wanted_bytes == 40 * MIB and story.device == CARD
    assert story.free_bytes == 64 * MIB - story.held.held_bytes + story.held.cached_bytes


def test_the_locals_of_a_failed_function_are_free_after_the_story(card, notebook):
    _, kernel = card
    notebook.update(on=on)
    for _ in range(2):
        assert (
            run(kernel, "def grow():\n    more = on(30)\n    on(40)\ngrow()", notebook) is not None
        )
        assert simgpu.used_bytes(0) == 0


def test_others_step_aside_or_stay_with_the_reason(card, notebook, runtime):
    rt, kernel = card
    rt.register("idle", backend="fake", size="20MiB", devices=(CARD,))
    rt.register("kept", backend="fake", size="10MiB", devices=(CARD,))
    rt.preload("idle")
    rt.pin("kept")
    notebook.update(on=on)
    error = torch.OutOfMemoryError(f"{CARD} out of memory. Tried to allocate 20 MiB.")
    cell(kernel)
    story = kernel.cell_failed(error)
    assert row(story, "others").startswith("idle stepped aside")
    assert story.advice == "run the cell again"
    assert rt.why(oom=True) is story


def test_who_stays_is_named_with_the_reason_and_the_command(started, runtime, shared_book):
    settings = {"devices": "sim:1GiB,host:4GiB", "ledger": shared_book}
    _, kernel = started(**settings)
    other = loaded(runtime(**settings), busy="700MiB")
    cell(kernel)
    with other.use("busy"):
        other._session.publish()  # as its monitor does
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 400.00 MiB. GPU 0")
        story = kernel.cell_failed(error)
    assert row(story, "others") == "busy (700 MiB) stays: in use"
    assert story.advice.startswith("%gpu ")


@pytest.mark.parametrize("code", ["x = on({})", "on({})", "batch = {}\nfor _ in [1]: on(batch)"])
def test_two_runs_give_the_largest_number_that_fits(card, notebook, code):
    """The card has 64 MiB, of which 10 are taken. The variable's old value is there until the new one is made."""
    _, kernel = card
    notebook.update(on=on, kept=on(10))
    cell(kernel)
    assert run(kernel, code.format(8), notebook) is None
    assert run(kernel, code.format(12), notebook) is None
    story = run(kernel, code.format(60), notebook)
    most = 42 if code.startswith("x") else 54
    assert str(most) in row(story, "would fit") and str(most) in story.advice
    assert run(kernel, code.format(most), notebook) is None
    notebook.pop("x", None)


def test_a_variable_that_the_cell_reads_is_a_number_too(card, notebook):
    _, kernel = card
    notebook.update(on=on, batch=4)
    cell(kernel)
    for batch in (4, 8):
        notebook["batch"] = batch
        assert run(kernel, "on(batch); on(1)", notebook) is None
    notebook["batch"] = 70
    assert run(kernel, "on(batch); on(1)", notebook).advice.startswith("batch = 64")


def test_runs_that_differ_in_two_numbers_give_no_slope(card, notebook):
    _, kernel = card
    notebook.update(on=on)
    cell(kernel)
    for code in ("on(4); on(5)", "on(8); on(6)"):
        assert run(kernel, code, notebook) is None
    assert row(run(kernel, "on(50); on(70)", notebook), "would fit") == ""


@given(
    slope=st.integers(1, 10 * MIB),
    fixed=st.integers(0, 100 * MIB),
    numbers=st.sets(st.integers(1, 10_000), min_size=2, max_size=2),
    free=st.integers(0, 1 << 40),
)
def test_of_a_linear_cell_the_number_is_exact(slope, fixed, numbers, free):
    """Law: the number fits, and the next one does not."""
    runs = Runs(sees_peaks=True)
    for number in sorted(numbers):
        runs.begin(f"batch = {number}", {})
        took = {CARD: fixed + slope * number}
        runs.end(f"batch = {number}", {}, took, {})
    runs.begin("batch = 1_000_000_000_000", {CARD: 7})
    fit = runs.fit(CARD, free + 7)
    most = (free - fixed) // slope
    assert (fit.most if fit else 0) == max(0, most)


def test_on_a_simulated_card_a_run_replaces_what_the_run_before_made():
    """There the bytes after a cell are known, and no peak. A change by another cell ends the comparison."""
    runs = Runs(sees_peaks=False)
    for before, number in ((0, 8), (8, 12)):
        runs.begin(f"x = f({number})", {"sim:0": before})
        runs.end(f"x = f({number})", {"sim:0": before}, {"sim:0": number}, {"sim:0": number})
    runs.begin("x = f(60)", {"sim:0": 12})
    assert runs.fit("sim:0", 40) == Fit("in line 1", 60, 40, ((8, 8), (12, 12)))
    runs.begin("x = f(60)", {"sim:0": 20})
    assert runs.fit("sim:0", 40).most == 20


def test_code_that_is_no_python_has_no_numbers(notebook):
    assert numbers_in("!ls 3") == numbers_in("") and numbers_in("x = = 3") == ("", {})
    assert numbers_in("%%gpu --retry\nf(batch=3, n=True)")[1] == {"batch": 3}
    notebook.update(size=5, name="a", flag=True)
    assert numbers_in("f(size, name, flag)")[1] == {"size": 5}


def test_a_story_has_at_most_ten_lines_and_why_oom_has_the_rest(card, notebook):
    rt, kernel = card
    notebook.update({f"x{number}": on(1) for number in range(12)}, on=on)
    cell(kernel)
    with pytest.raises(GpuError, match="has run out of memory yet"):
        rt.why(oom=True)
    run(kernel, "on(8)", notebook)
    run(kernel, "on(9)", notebook)
    story = run(kernel, "on(100)", notebook)
    assert len(answers.story(story, full=False).text.splitlines()) <= 10
    assert "9 more" in row(story, "this notebook") and "x11" in row(story, "this notebook", True)
    assert "%gpu why --oom" in answers.story(story, full=False).html
    assert "<b>Out of memory on simgpu:0" in answers.story(story).html


def test_memory_of_the_host_that_ran_out_tells_no_story_of_a_card(card):
    _, kernel = card
    assert kernel.cell_failed(MemoryError("Unable to allocate 100 GiB for an array")) == ""
    assert kernel.story is None


# -- torch's memory history, which only a card has: its format is that of torch/cuda/_memory_viz.py -----------------
def frames(*lines: tuple[str, int, str]) -> list[dict[str, object]]:
    return [{"filename": path, "line": line, "name": name} for path, line, name in lines]


@pytest.fixture
def cuda(monkeypatch):
    """Stands in for torch's calls on a card. `on` says whether the record runs."""
    torch_file = torch.nn.functional.__file__
    block = {"size": 3 * MIB, "state": "active_allocated"}
    step = frames((torch_file, 5, "linear"), ("/home/ann/train.py", 7, "step"))
    blocks = [
        {**block, "frames": step},
        {**block, "frames": step},
        {**block, "size": MIB},
        {**block, "state": "inactive"},
    ]
    failed = frames((torch_file, 5, "relu"), ("/home/ann/train.py", 9, "step"))
    snapshot = {
        "segments": [{"device": 1, "blocks": blocks}, {"device": 0, "blocks": blocks[:1]}],
        "device_traces": [[], [{"action": "oom", "frames": failed}, {"action": "alloc"}]],
    }
    card = SimpleNamespace(on=False, asked=[])

    def record(**options):
        card.on = True
        card.asked.append(options)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: card.on, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: snapshot)
    return card


def test_torchs_record_begins_once_and_names_the_users_lines(cuda):
    card = torch.device("cuda:1")
    assert streams.recorded_lines(card) == ((), ()) and not cuda.asked
    streams.record_lines(torch.device("cpu"))
    assert not cuda.asked
    streams.record_lines(card)
    streams.record_lines(card)
    assert cuda.asked == [{"stacks": "python", "max_entries": streams.MOST_ENTRIES}]
    stack, allocated = streams.recorded_lines(card)
    assert stack == ("File /home/ann/train.py, line 9, in step",)
    assert allocated == (
        "6.0 MiB  File /home/ann/train.py, line 7, in step",
        "1.0 MiB  before the record began",
    )


def test_a_failing_record_is_no_error_of_the_users(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **_: 1 / 0)
    streams.record_lines(torch.device("cuda:1"))
    assert streams.recorded_lines(torch.device("cuda:1")) == ((), ())
