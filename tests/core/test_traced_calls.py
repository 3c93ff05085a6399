"""The traced calls in docs/architecture.md are the ways that calls really take."""

import asyncio
import re
import sys

import pytest

from gpu_runtime import DoesNotFit, Runtime, threads
from tests.bench.journeys import ROOT, Journey
from tests.serving.harness import harness

ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
# What the test of a call from the gateway on leaves out: the gate, the server and the routes.
OUTSIDE = ("gpu_runtime/web/", "gpu_runtime/serving/api/", "gpu_runtime/serving/server.py")


def files_between(start: str, end: str) -> set[str]:
    """The files that the tables between two lines of the page name."""
    part = ARCHITECTURE[ARCHITECTURE.index(start) : ARCHITECTURE.index(end)]
    return set(re.findall(r"`(gpu_runtime/[\w/]+\.py)`", part)) | {
        f"gpu_runtime/serving/{name}" for name in re.findall(r"`(\w+\.py)`", part)
    }


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


def test_a_chat_crosses_the_files_of_its_table():
    async def answered() -> Journey:
        async with harness(qwen=4) as served:
            await served.chat("qwen")  # the first one imports
            with Journey() as journey:
                await served.chat("qwen")
            return journey

    named = files_between("## One HTTP call, traced", "## The book and its files")
    named = {name for name in named if not name.startswith(OUTSIDE)}
    journey = asyncio.run(answered())
    assert len(named) > 6
    assert named - crossed(journey, "") == set()
    assert crossed(journey, "gpu_runtime/serving/") - named == set()
