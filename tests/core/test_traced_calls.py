"""The traced calls in docs/architecture.md are the ways that calls really take."""

import asyncio
import re
import sys
from contextlib import closing

import pytest

from gpu_runtime import DoesNotFit, Runtime, threads
from tests.bench.journeys import ROOT, Journey
from tests.clock import until
from tests.serving.harness import harness
from tests.stories.notebooks import places
from tests.stories.test_parking import DEVICES, Notebook

ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
# What the test of a call from the gateway on leaves out: the gate, the server and the routes; and what is stored later.
OUTSIDE = ("gpu_runtime/web/", "gpu_runtime/serving/api/", "gpu_runtime/serving/server.py")
OUTSIDE += ("gpu_runtime/access_keys.py", "gpu_runtime/serving/store.py")


# What the test of a parked notebook leaves out: the thread that moves the bytes, where a test that watched it would be
# an obstacle to the move; a full card or RAM; an idle notebook; and what a real card needs.
NOT_IN_CELLS = {
    *(f"gpu_runtime/owner/{name}.py" for name in ("release", "out_of_memory", "disk")),
    *(
        f"gpu_runtime/backends/pytorch/{name}.py"
        for name in ("storages", "streams", "shadows", "park_file")
    ),
    *("kernel_ext/gpu/obstacles.py", "gpu_runtime/scheduler/relief.py"),
}
# Run in a notebook: notes the files that its cells cross.
TRACE = """
from tests.bench.journeys import Journey
_handlers, _journey = get_ipython().kernel.shell_handlers, Journey()
_handler = _handlers["execute_request"]
async def _traced(*message):
    with _journey:
        await _handler(*message)
_handlers["execute_request"] = _traced
"""


def files_between(start: str, end: str) -> set[str]:
    """The files that the tables between two lines of the page name."""
    part = ARCHITECTURE[ARCHITECTURE.index(start) : ARCHITECTURE.index(end)]
    return set(re.findall(r"`((?:gpu_runtime|kernel_ext)/[\w/]+\.py)`", part))


def crossed(journey: Journey, *folders: str) -> set[str]:
    names = {file.removeprefix(f"{ROOT}/") for file in journey.files}
    return {name for name in names if name.startswith(folders)}


@pytest.fixture
def in_threads(monkeypatch):
    """A journey through the threads that the package starts."""
    journey, run = Journey(), threads.Running.run

    def watched(running: threads.Running) -> None:
        sys.setprofile(journey._seen)
        run(running)

    monkeypatch.setattr(threads.Running, "run", watched)
    return journey


@pytest.mark.processes
def test_a_use_that_evicts_crosses_the_files_of_its_table(tmp_path, in_threads):
    """Two owners in this process: each of them uses, waits, evicts its own model and that of the other."""
    options = dict(ledger=f"keeper://{tmp_path}/ledger", devices="sim:10GiB,host:64GiB")
    options |= dict(eviction_grace_seconds=0)
    with Runtime(**options) as one, Runtime(**options) as two:
        uses = [(one, "first"), (one, "second"), (two, "third"), (one, "large")]
        for rt, name in uses:
            rt.register(name, backend="fake", size="80GiB" if name == "large" else "8GiB")
        with Journey() as own:
            for rt, name in uses[:-1]:
                with rt.use(name):
                    pass
            with pytest.raises(DoesNotFit):
                one.use("large", timeout=9).__enter__()
            with pytest.raises(ZeroDivisionError), one.use("second"):
                raise ZeroDivisionError
    named = files_between("## One `rt.use`, traced", "**What a notebook's own code holds**")
    assert len(named) > 25
    assert named - crossed(in_threads, "") - crossed(own, "") == set()
    decided = crossed(own, "gpu_runtime/owner/", "gpu_runtime/scheduler/")
    assert decided - named == set()


@pytest.mark.processes
def test_a_notebook_that_is_parked_crosses_the_files_of_its_table(tmp_path):
    """Its cells in a real kernel: one that parks it by hand, and one that brings its memory back."""
    url = f"keeper://{tmp_path}/ledger"
    with (
        closing(Notebook("one.ipynb", url)) as notebook,
        Runtime(devices=DEVICES, ledger=url) as rt,
    ):
        notebook.run(TRACE)
        for code in ("import torch\nx = torch.ones(3_000_000)", "%gpu park", "x.sum()"):
            notebook.run(code)
            until(lambda: places(rt) == {"host" if "park" in code else "sim:0"}, code)  # noqa: B023
        files = eval(notebook.run("print(list(_journey.files))"))
    names = {file.removeprefix(f"{ROOT}/") for file in files}
    named = files_between("**What a notebook's own code holds**", "**A process dies**")
    assert len(named) > 20 and named - names <= NOT_IN_CELLS
    assert {name for name in names if name.startswith("kernel_ext/")} - named == set()


def test_a_chat_crosses_the_files_of_its_table():
    async def answered() -> Journey:
        async with harness(qwen=4) as served:
            await served.chat("qwen")  # the first one imports
            with Journey() as journey:
                await served.chat("qwen")
            return journey

    start, end = "## One HTTP call, traced", "If the client leaves"
    page = ARCHITECTURE[ARCHITECTURE.index(start) : ARCHITECTURE.index(end)]
    beside = {f"gpu_runtime/serving/{name}" for name in re.findall(r"`(\w+\.py)`", page)}
    named = files_between(start, end) | beside
    named = {name for name in named if not name.startswith(OUTSIDE)}
    journey = asyncio.run(answered())
    assert len(named) > 6
    assert named - crossed(journey, "") == set()
    assert crossed(journey, "gpu_runtime/serving/") - named == set()
