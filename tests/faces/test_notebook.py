"""A real kernel runs a notebook. The tests check the outputs that the notebook keeps, and the
errors of failing cells.
"""

import os
import re

import nbformat
import pytest
from nbclient import NotebookClient

from tests.clock import PATIENCE, scaled

from .conftest import FOUND_BY_CHILDREN

INTERRUPTED = """\
import os, signal, threading
held, done = threading.Event(), threading.Event()
def hold():
    with rt.use("qwen"):
        held.set()
        done.wait()
threading.Thread(target=hold).start()
held.wait()
rt.tell_waits(lambda name, wait: wait and os.kill(os.getpid(), signal.SIGINT))
try:
    with rt.lease("14GiB"):
        pass
finally:
    done.set()"""
# A load that takes longer has a line. A quick one takes less, also on a busy machine.
SHOWN_SECONDS = scaled(2)
SLOW = f"""\
import time
rt.register("slow", lambda step: time.sleep({SHOWN_SECONDS + 0.5}), backend="fake", size="1GiB")
with rt.use("slow"): pass"""
CELLS = {
    "extension": "%load_ext gpu",
    "load": "%gpu load qwen --backend fake --size 14GiB",
    "user's error": "%%gpu 1GiB\ndef f():\n    1 / 0\nf()",
    "typo": "%gpu evcit",
    "refusal": "%gpu load huge --backend fake --size 100GiB",
    "bad syntax": "%gpu pin",
    "interrupt": "%%gpu 1GiB\nraise KeyboardInterrupt",
    "function": "def step(model, number):\n    return rt.plan('giant')",
    "error": "model = None\n\nc = step(model, 3)",
    "every frame": "%tb",
    "slow": SLOW,
    "wait": INTERRUPTED,
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """The outputs of each cell. The notebook runs once for all tests of this module."""
    environment = {"GPU_DEVICES": "sim:24GiB,host:64GiB", "GPU_LEDGER": "memory:", "TZ": "UTC"}
    environment["GPU_PROGRESS_SECONDS"] = f"{SHOWN_SECONDS}s"
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS.values()]
    notebook = nbformat.v4.new_notebook(cells=cells)
    place = {"metadata": {"path": str(tmp_path_factory.mktemp("notebook"))}}
    options = {"kernel_name": "python3", "allow_errors": True, "resources": place}
    client = NotebookClient(notebook, timeout=PATIENCE, **options)
    client.execute(env={**os.environ, "PYTHONPATH": FOUND_BY_CHILDREN, **environment})
    return dict(zip(CELLS, (cell.outputs for cell in notebook.cells), strict=True))


def test_the_extension_shows_nothing_and_a_quick_load_its_outcome_alone(outputs):
    """A line about each load of some milliseconds would be noise."""
    assert outputs["extension"] == []
    (outcome,) = outputs["load"]
    assert outcome.data["text/plain"].startswith("load qwen: qwen is on sim:0 (14.0 GiB")


def test_the_lines_of_a_slow_load_an_interrupted_wait_and_bad_syntax_stay(outputs):
    """A browser shows the progress meanwhile. Bad syntax is no failure for nbval, as in IPython."""
    (line,) = outputs["slow"]
    assert re.fullmatch(r"slow: loaded in [\d.]+ m?s \([\d.]+ .B/s\)", line.data["text/plain"])
    assert len(line.data["text/html"]) < 100  # without the style sheet of the bar
    (interrupt,) = outputs["wait"]
    assert interrupt.ename == "KeyboardInterrupt" and len(interrupt.traceback) == 1
    assert interrupt.traceback[0].startswith("Interrupted after ")
    assert interrupt.traceback[0].endswith("; nothing is held.")
    usage = "".join(output.get("text", "") for output in outputs["bad syntax"])
    assert "Usage: %gpu pin NAME" in usage


@pytest.mark.parametrize(("cell", "kind"), [
    ("user's error", "ZeroDivisionError"), ("typo", "UnknownVerb"), ("refusal", "DoesNotFit"),
    ("interrupt", "KeyboardInterrupt"),
])  # fmt: skip
def test_a_failing_cell_has_one_error_output(outputs, cell, kind):
    errors = [output for output in outputs[cell] if output.output_type == "error"]
    assert [error.ename for error in errors] == [kind]
    shown = "\n".join(errors[0].traceback)
    assert "magics.py" not in shown and "interactiveshell.py" not in shown


def test_an_error_is_its_report_and_the_users_lines(outputs):
    """Frames of this package are folded. `%tb` shows them."""
    report, *places = outputs["typo"][0].traceback
    assert "Did you mean evict?" in report
    assert places == ["", "Cell In[4], line 1: %gpu evcit", "More:  %gpu help UnknownVerb"]
    report, *places = outputs["error"][0].traceback
    assert report.startswith("UnknownModel: no model is called 'giant'")
    assert places == [
        "",
        "Cell In[9], line 3: c = step(model, 3)",
        "Cell In[8], line 2, in step: return rt.plan('giant')",
        "More:  %gpu help UnknownModel",
    ]
    every_frame = "\n".join(outputs["every frame"][0].traceback)
    assert "runtime.py" in every_frame and "registry.py" in every_frame
