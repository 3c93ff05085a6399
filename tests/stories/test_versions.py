"""Notebooks of this version and of the next minor one share a card, and nobody has to restart anything."""

import os

import psutil
import pytest

from gpu_runtime import Runtime
from gpu_runtime.facts import HOST
from gpu_runtime.version import VERSION
from tests.clock import until
from tests.next_version import NEXT, copy_of_next_version

from .notebooks import DEVICES, Notebook, paths, places

pytestmark = pytest.mark.processes
# What the next version alone has written into facts of all owners: a field of each card, the owners that have
# come, and a field of an event.
FACTS = """
book = rt._session.ledger.read()
loads = [(e.owner == rt._session.me, bool(e.origin)) for e in book.events if e.action == "loaded"]
print(book.devices[0].bus, len(book.visitors), sorted(loads))
"""
KEEPER = "rt._session.ledger._ask_again(core.Fetch(0, 'maps')); rt._session.ledger._wire.keeper_pid"


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The PYTHONPATH of a kernel of each version."""
    folder = copy_of_next_version(tmp_path_factory.mktemp("next"))
    return {
        VERSION: paths(),
        NEXT: os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
    }


def keeper_of(notebook: Notebook) -> psutil.Process:
    return psutil.Process(int(notebook.run(KEEPER).splitlines()[-1]))


def told(output: str) -> list[str]:
    """The lines of a cell's `output` but for those of a wait, which are many on a busy machine, and of a return."""
    quiet = ("You have waited", "Waited", "restoring this notebook")
    lines = [line for line in output.splitlines() if line and not line.startswith(quiet)]
    returns = [line for line in lines if "came back" in line]
    assert len(returns) < 2
    return [line for line in lines if line not in returns]


@pytest.mark.parametrize("first", [VERSION, NEXT])
def test_two_versions_share_a_card(first, keeper, path_of):
    """They park, wait and evict one another. The keeper of each goes on with the book of the other's."""
    second = NEXT if first == VERSION else VERSION
    with (
        Notebook("one.ipynb", keeper, PYTHONPATH=path_of[first]) as one,
        Notebook("two.ipynb", keeper, PYTHONPATH=path_of[second]) as two,
        Runtime(devices=DEVICES, ledger=keeper, monitor=False) as rt,
    ):
        both, later = {one: two, two: one}, one if first == NEXT else two
        for notebook in both:
            notebook.run("from gpu_runtime.ledgers.keeper import core")
            assert told(notebook.run("import torch; x = torch.ones(8_000_000)")) == []
        for turn in range(4):
            if turn == 2:
                keeper_of(one).kill()
            for notebook in both:
                said = notebook.run("x += 1; print(int(x.sum()))")
                assert told(said) == [str(8_000_000 * (turn + 2))]
        until(lambda: HOST in places(rt, "one.ipynb") | places(rt, "two.ipynb"))
        for notebook in both:
            notebook.run("del x")
            notebook.run("rt.register('m', backend='fake', size='40MiB')")
        for notebook, other in both.items():
            assert "m is on sim:0" in notebook.run("rt.preload('m')")
            assert "RAM" in (said := other.run(f"%gpu evict m@{notebook.pid}")), said
            assert "m is on sim:0" in other.run("rt.preload('m')")
        shown = later.run("%gpu status")
        assert f"Versions: {VERSION} in {both[later].name} (pid" in shown
        assert f"{NEXT} in this process" in shown
        bus = 7 if first == NEXT else ""  # whoever comes first describes the cards
        assert later.run(FACTS) == f"{bus} 1 [(False, False), (True, True)]\n"
