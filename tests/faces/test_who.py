"""%gpu who and %gpu free in a real shell. They list variables, outputs, errors and threads, and
what becomes free without them.
"""

import asyncio
import gc
import json
import os
import re
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pandas
import pytest
import torch
from IPython.utils.capture import capture_output

import gpu_runtime
from gpu_runtime import errors, names
from gpu_runtime.names import registered
from gpu_runtime.rendering import answers
from gpu_runtime.units import MIB
from tests.clock import PATIENCE, finished
from tests.owner.kernels import Quiet

pytestmark = pytest.mark.filterwarnings("ignore")
SETUP = "import torch\ndef mib(n): return torch.ones(n * 2**18)"


def run(shell, cell):
    """Runs a cell with a number, as a notebook does. Returns its value, and raises its error."""
    with capture_output(display=False):
        outcome = shell.run_cell(cell, store_history=True)
    outcome.raise_error()
    return outcome.result


def fails(shell, cell):
    with capture_output(display=False):
        shell.run_cell(cell, store_history=True)


@pytest.fixture
def notebook(shell):
    """A shell without outputs and errors of other tests."""
    registered.current.release(registered.current.names())
    mode = shell.InteractiveTB.mode
    shell.InteractiveTB.set_mode("Minimal")  # else IPython looks for sources in every module
    fails(shell, "raise ValueError('the last error of this fixture')")
    run(shell, SETUP)
    gc.collect()
    gc.disable()  # else garbage may be gone before a test looks
    yield shell
    gc.enable()
    shell.InteractiveTB.set_mode(mode)
    registered.current.release(registered.current.names())


def table(rt):
    """Maps each name to the MiB that it reaches and the MiB that it alone would free."""
    frame = rt.who()
    rows = zip(frame["name"], frame["bytes"], frame["alone_bytes"], strict=True)
    return {name: (reached // MIB, alone // MIB) for name, reached, alone in rows}


def test_a_variable_is_listed_with_its_bytes_and_its_cell(notebook, rt):
    """On simulated cards only storages of at least 1 MiB count as device memory."""
    run(notebook, "x = mib(3); small = torch.ones(1000)")
    count = notebook.execution_count - 1
    run(notebook, "pass")
    (row,) = rt.who().to_dict("records")
    same = {"name": "x", "kind": "variable", "device": "sim:0", "what": "Tensor"}
    sizes = {"bytes": 3 * MIB, "alone_bytes": 3 * MIB, "stays": "", "stays_bytes": 0}
    assert row == same | sizes | {"cell": f"In [{count}]"}


def test_the_class_of_a_variable_is_named_without_its_own_code(notebook, rt):
    """A class may define how it is called. The whole table ended in its error."""
    run(notebook, "class Meta(type):\n    __name__ = property(lambda self: 1 / 0)")
    run(notebook, "x = Meta('Model', (), {})()\nx.weight = mib(3)")
    assert [row["what"] for row in rt.who().to_dict("records")] == ["Model"]


def test_a_name_that_is_no_text_is_no_variable(notebook, rt):
    """The whole table ended in its error."""
    run(notebook, "x = mib(3); globals()[1] = 2")
    assert list(table(rt)) == ["x"]
    run(notebook, "del globals()[1]")


def test_an_output_counts_once_with_all_its_names_until_it_is_freed(notebook, rt):
    """IPython keeps an output in Out, as `_7`, as `_`, among its hidden names, and as the last result."""
    run(notebook, "mib(3)")
    number = notebook.execution_count - 1
    run(notebook, "pass")
    assert table(rt) == {f"Out[{number}], _": (3, 3)}
    run(notebook, f"del Out[{number}]")
    assert table(rt) == {f"_{number}, _": (3, 3)}
    run(notebook, f"del _{number}, _")
    assert table(rt) == {"a deleted output": (3, 3)}
    assert rt.free().bytes == 3 * MIB
    assert table(rt) == {}


ERRORS = {
    "closure": "def step():\n    big = mib(3)\n    def inner():\n        return big.typo\n    inner()\nstep()",
    "kept": "def step():\n    big = mib(3)\n    try:\n        1 / 0\n    except ZeroDivisionError as error:\n"
    "        kept = error\n    raise kept\nstep()",
    "chained": "def step():\n    try:\n        first = mib(2)\n        1 / 0\n    except ZeroDivisionError as error:\n"
    "        big = mib(1)\n        raise ValueError from error\nstep()",
    "generator": "def step():\n    big = mib(3)\n    yield 1\n    1 / 0\nlist(step())",
    "typing mistake": "x = mib(3)\nx.typo",
    "argument": "x = mib(3)\nraise ValueError('bad', x)",
}


@pytest.mark.parametrize("kind", ERRORS)
def test_what_an_error_frees_is_what_free_frees(notebook, rt, kind):
    """FREES was 0 B, or `free` kept the variables of an inner function. The error also keeps a deleted `x`."""
    fails(notebook, ERRORS[kind])
    run(notebook, "x = None; del x")
    (row,) = rt.who().to_dict("records")
    assert (row["name"], row["bytes"], row["alone_bytes"]) == ("the last error", 3 * MIB, 3 * MIB)
    assert row["what"].startswith("in step") or "step" not in ERRORS[kind]
    assert rt.free().bytes == 3 * MIB and table(rt) == {}


def test_a_closure_that_lives_on_keeps_its_variables(notebook, rt):
    run(notebook, "def make(big):\n    def step():\n        big.typo\n    return step")
    run(notebook, "step = make(mib(3))")
    fails(notebook, "step()")
    assert table(rt)["step"][0] == 3
    assert rt.free().bytes == 0 and table(rt) == {"step": (3, 3)}


def test_a_background_thread_is_listed(notebook, rt):
    stop, ready = threading.Event(), threading.Event()

    def work():
        local = torch.ones(3 * 2**18)
        ready.set()
        stop.wait(PATIENCE)
        assert local is not None

    thread = threading.Thread(target=work, name="loader")
    thread.start()
    try:
        assert ready.wait(PATIENCE)
        assert table(rt) == {"thread loader": (3, 3)}
    finally:
        stop.set()
        thread.join()
    assert table(rt) == {}


def test_threads_that_wait_in_a_library_are_not_listed():
    """A kernel has such threads. From them every variable can be reached, so `%gpu free` named them."""

    def listed() -> set[str]:
        return {name.name for name in names.frame_names() if name.kind == names.THREAD}

    before = listed()  # threads of other tests
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="IOPub")
    thread.start()
    with ThreadPoolExecutor(1, thread_name_prefix="pool") as pool:
        pool.submit(int).result()
        try:
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()
            assert listed() <= before
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
    loop.close()


def test_a_running_function_is_listed(notebook, rt):
    def train():
        batch = torch.ones(3 * 2**18)
        return table(rt), batch.sum()

    assert train()[0] == {"train()": (3, 3)}


def test_a_function_that_is_debugged_keeps_its_variables(notebook, rt):
    """After each step, Python writes its copy of a frame's variables back. The search must not spoil it."""

    def train():
        batch = torch.ones(3 * 2**18)
        step = 1
        return batch.numel() + step

    def debugger(frame, event, argument):
        if event == "line" and frame.f_code is train.__code__:
            rt.who()
        return debugger if frame.f_code is train.__code__ else None

    before = sys.gettrace()
    sys.settrace(debugger)
    try:
        assert train() == 3 * 2**18 + 1
    finally:
        sys.settrace(before)


def test_tensors_on_several_cards_are_listed_by_card(notebook):
    from tests import simgpu

    with gpu_runtime.Runtime(probe=simgpu.SimProbe(), ledger="memory:", monitor=False) as cards:
        run(notebook, "import tests.simgpu\none = torch.ones(2**18, device='simgpu:1')")
        run(notebook, "both = [one, torch.ones(2**18, device='simgpu:0')]; on_cpu = mib(3)")
        frame = cards.who()
        rows = sorted(zip(frame["name"], frame["device"], frame["bytes"], strict=True))
        assert rows == [("both", "simgpu:0,1", 2 * MIB), ("one", "simgpu:1", MIB)]
        assert "simgpu:0,1" in repr(answers.showing(frame, answers.who))
        assert simgpu.used_bytes(0) == MIB
        assert cards.free("both").because == "1.0 MiB came free; one still refers to its memory"
        assert simgpu.used_bytes(0) == 0


def test_garbage_and_modules_are_listed_as_elsewhere(notebook, rt):
    run(notebook, "a = [mib(3)]; a.append(a); del a")
    run(notebook, "import types, sys\nm = types.ModuleType('helpers_of_test'); m.store = mib(2)")
    run(notebook, "sys.modules['helpers_of_test'] = m; del m")
    try:
        frame = rt.who()
        assert dict(zip(frame["name"], frame["kind"], strict=True)) == {
            "garbage in a reference cycle": "elsewhere",
            "module helpers_of_test": "elsewhere",
        }
    finally:
        del sys.modules["helpers_of_test"]


def test_a_governed_model_is_listed_and_its_variable_frees_nothing(notebook, rt):
    """The runtime holds the model as well. Once it is away, its storages are in host memory."""
    run(notebook, "net = torch.nn.Linear(512, 1024, bias=False).eval()")
    rt.register("governed", notebook.user_ns["net"])
    rt.register("fake", backend="fake", size="5MiB")
    rt.preload("governed")
    rt.preload("fake")
    frame = rt.who()
    rows = sorted(zip(frame["name"], frame["kind"], frame["alone_bytes"], strict=True))
    assert rows == [
        ("fake", "model", 5 * MIB), ("governed", "model", 2 * MIB), ("net", "variable", 0),
    ]  # fmt: skip
    assert frame.attrs["explained_bytes"] == 7 * MIB
    rt.evict("governed")
    assert table(rt) == {"fake": (5, 5)}
    rt.preload("governed")
    assert rt.free("net").because == "0 B came free; the model governed still refers to its memory"


def test_graphs_are_told_apart_in_the_sums(notebook, rt):
    run(notebook, "w = mib(1).requires_grad_(); loss = (w * 2).exp().sum()")
    sums = rt.who().attrs
    assert sums["explained_bytes"] == MIB
    assert sums["graph_bytes"] >= MIB
    assert sums["held_bytes"] == sums["explained_bytes"] + sums["graph_bytes"]


def test_a_search_without_time_is_partial_and_says_so(notebook, rt, monkeypatch):
    from gpu_runtime.owner import holdings

    monkeypatch.setattr(holdings.search_here, "__defaults__", (0.0, None))
    run(notebook, "x = mib(3)")
    shown = run(notebook, "%gpu who")
    assert not shown.attrs["whole"]
    assert re.search(r"The search stopped after \d+ s: the figures are partial\.$", repr(shown))
    assert "Nothing was found in the time allowed." in repr(shown)


def test_who_shows_sizes_for_people_escapes_names_and_is_a_frame(notebook, rt):
    run(notebook, "x = mib(3)")
    count = notebook.execution_count - 1
    shown = run(notebook, "%gpu who")
    cells = [re.split(r"  +", line.strip()) for line in repr(shown).splitlines()]
    assert cells == [
        ["NAME", "KIND", "HOLDS", "FREES", "CELL", "WHAT"],
        ["x", "variable", "3.0 MiB", "3.0 MiB", f"In [{count}]", "Tensor"],
        [""],
        ["explained 3.0 MiB of 3.0 MiB."],
    ]
    assert "<td" in shown._repr_html_() and "3.0 MiB" in shown._repr_html_()
    assert isinstance(shown, pandas.DataFrame)
    assert type(shown[shown["bytes"] > 0]) is pandas.DataFrame
    run(notebook, "globals()['<b>'] = mib(3)")
    assert "&lt;b&gt;" in run(notebook, "%gpu who")._repr_html_()
    run(notebook, "del globals()['<b>']")


def test_nothing_is_said_to_be_explained_if_all_of_it_is_parked():
    """The two lines were "explained 0 B of 0 B." and "600 MiB of it is parked in RAM"."""
    words = "held explained graph cached unknown unseen".split()
    sums = {f"{word}_bytes": 0 for word in words} | dict.fromkeys(("process", "stays", "note"), "")
    sums |= {"left_out": 0, "whole": True, "parked_bytes": 600 * MIB, "staying": ()}
    assert answers.sentences(sums) == ["600 MiB is parked in RAM, until a cell needs it."]
    sums |= {"held_bytes": MIB, "explained_bytes": MIB}
    assert answers.sentences(sums)[0] == "explained 1.0 MiB of 1.0 MiB."


def test_who_as_json_has_rows_sums_and_what_stays(notebook):
    run(notebook, "x = mib(3)")
    value = json.loads(run(notebook, "%gpu who --json"))
    assert value["rows"][0]["name"] == "x" and value["staying"] == []
    assert value["held_bytes"] == value["explained_bytes"] == 3 * MIB
    run(notebook, "import numpy; x = torch.from_numpy(numpy.zeros(1 << 20, dtype='uint8'))")
    value = json.loads(run(notebook, "%gpu who --json"))
    [one] = value["staying"]
    assert (one["device"], one["bytes"]) == ("sim:0", MIB) and "NumPy" in one["why"]
    assert value["rows"][0]["stays"] == one["why"]


def test_free_releases_outputs_errors_and_garbage_but_no_variable(notebook, rt):
    """An output that holds no device memory stays as well."""
    run(notebook, "x = mib(1)")
    run(notebook, "'a text'")
    run(notebook, "mib(2)")
    number = notebook.execution_count - 1
    run(notebook, "a = [mib(4)]; a.append(a); del a")
    fails(notebook, "def step():\n    big = mib(8)\n    1 / 0\nstep()")
    done = rt.free()
    assert done.bytes == 14 * MIB
    assert done.because == (
        f"14.0 MiB came free; released Out[{number}], _ (10.0 MiB); "
        "cleared the variables of the last error (%debug shows them no more); "
        "4.0 MiB was garbage or unused cache"
    )
    assert table(rt) == {"x": (1, 1)}
    assert run(notebook, f"str(_), Out[{number - 1}]") == ("", "a text")


def test_free_of_a_variable_deletes_it_and_its_output_and_counts_no_old_garbage(notebook, rt):
    run(notebook, "x = mib(3)\nx")
    run(notebook, "a = [mib(4)]; a.append(a); del a")
    done = run(notebook, "%gpu free x")
    assert (done.bytes, done.because) == (3 * MIB, "3.0 MiB came free")
    assert "x" not in notebook.user_ns
    assert "x" not in table(rt)


def test_free_of_a_variable_names_everything_that_still_refers_to_it(notebook, rt):
    run(notebook, "x = mib(3)\nv = x[:10]\nkept = {'k': x}")
    done = rt.free("x")
    assert (done.bytes, done.because) == (0, "0 B came free; v and kept still refer to its memory")
    assert table(rt) == {"v": (3, 0), "kept": (3, 0)}


def test_free_of_a_variable_does_not_count_cached_memory(notebook, rt):
    """A larger account of the simulated card lies in another segment. The old segment is an account, and no memory."""
    kernel = rt.attach_kernel(Quiet())
    run(notebook, "x = mib(3)")
    kernel.count()
    run(notebook, "y = mib(24); z = mib(2)")
    kernel.count()
    sums = rt.who().attrs
    assert (sums["held_bytes"], sums["cached_bytes"]) == (29 * MIB, 0)
    assert rt.free("z").bytes == 2 * MIB


@pytest.mark.parametrize("free", ["rt.free('x')", "rt.free()"])
def test_after_free_the_freed_memory_is_not_cached(notebook, rt, free):
    """A simulated card learns of freed tensors only when they are counted."""
    kernel = rt.attach_kernel(Quiet())
    run(notebook, "x = mib(24)" if "x" in free else "mib(24)")
    kernel.count()
    assert eval(free).bytes == 24 * MIB
    kernel.count()  # as at the end of the cell
    assert rt.who().attrs["cached_bytes"] == 0


def test_free_of_an_unknown_name_suggests_the_nearest_as_tab_does(notebook, rt):
    run(notebook, "model = mib(1)")
    with pytest.raises(errors.GpuError, match="no variable is called 'modle'. Did you mean model?"):
        rt.free("modle")
    rt.register("qwen", backend="fake", size="1MiB")
    with pytest.raises(errors.GpuError, match="It is a model:  %gpu evict qwen"):
        rt.free("qwen")
    assert table(rt) == {"model": (1, 1)}
    run(notebook, "training_batch = mib(1)")
    from gpu.magics import candidates

    assert "training_batch" in candidates(["free"], "tr", False, lambda: None)


SCRIPT = "rt = gpu_runtime.Runtime(devices='sim:1GiB', ledger='memory:', monitor=False)\n"
WITHOUT_TORCH = f"""import sys, gpu_runtime
{SCRIPT}rt.register('m', backend='fake', size='5MiB'); rt.preload('m')
print(rt.who().to_dict('records')[0]['name'], rt.free().because, 'torch' in sys.modules)"""
WITHOUT_A_SHELL = f"""import gpu_runtime, torch
{SCRIPT}x = torch.ones(2**20)
def inner():
    big = torch.ones(2**19); return list(rt.who()['name'])
print(sorted(inner()), rt.free('x').because)"""


@pytest.mark.processes
@pytest.mark.parametrize(("code", "shown"), [
    (WITHOUT_TORCH, "m 0 B came free False\n"),
    (WITHOUT_A_SHELL, "['inner()', 'x'] 4.0 MiB came free\n"),
])  # fmt: skip
def test_who_answers_without_torch_and_does_not_import_it_and_without_a_shell(code, shown):
    done = finished([sys.executable, "-c", code], env=dict(os.environ))
    assert done.stdout == shown, done.stderr


def test_the_variables_of_a_frame_that_a_debugger_has_shown_are_released():
    """`%debug` reads `f_locals`. Python keeps that dict, with the tensors, after the frame is cleared."""
    held = []

    def f():
        tensor = torch.zeros(1)
        held.append(weakref.ref(tensor))
        return tensor.nope

    with pytest.raises(AttributeError) as caught:
        f()
    frame = caught.traceback[-1].frame.raw
    assert "tensor" in frame.f_locals and held[0]() is not None
    assert frame in names.frames_of([caught.value])
    names.clear([caught.value])
    assert held[0]() is None


class Odd(Exception):
    exceptions = args = "not of Python"  # type: ignore[assignment]


@pytest.mark.parametrize("group", [False, True])
def test_an_error_of_the_users_may_have_any_attributes(group):
    """Each `%gpu who` after such an error failed, and so did the story of an out-of-memory error."""
    kept = ["an object"]
    error: BaseException = Odd(kept)
    if group:
        if names._GROUP is None:
            pytest.skip("Python 3.10 has no groups")
        error = names._GROUP("two", [error, ValueError()])
    assert kept in names.objects_of([error])
    names.clear([error])
    assert kept not in names.objects_of([error])
