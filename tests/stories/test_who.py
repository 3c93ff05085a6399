"""A notebook that never calls the runtime: `%gpu who` lists what holds its memory, `%gpu free` releases it."""

import json
import os
import signal

import pytest

from gpu_runtime.units import MIB
from tests.clock import until

from .notebooks import Notebook


@pytest.fixture
def cell(keeper):
    """A function that runs a cell in a kernel. It returns what the cell prints and shows, as text."""
    with Notebook("one.ipynb", keeper, GPU_DEVICES="sim:24GiB,host:64GiB") as notebook:
        # A search is partial after 3 s, which it takes on a busy machine.
        notebook.run(
            "from gpu_runtime.owner import holdings; holdings.SECONDS = 3600\n"
            "holdings.search_here.__defaults__ = (3600, None); del holdings"
        )
        yield notebook.run


def held(cell):
    """Maps each name to the MiB that it reaches and the MiB that it alone would free."""
    rows = json.loads(cell("print(rt.who().to_json(orient='records'))"))
    return {row["name"]: (row["bytes"] // MIB, row["alone_bytes"] // MIB) for row in rows}


def test_a_training_notebook_finds_what_keeps_its_card_full(cell):
    """Four names: two outputs, one of which was deleted, a loss with its graph, and the error of a cell."""
    assert "No variable or output holds memory" in cell("%gpu who")
    assert cell("import sys; print('torch' in sys.modules)") == "False\n"
    cell("import torch\ndef mib(n): return torch.ones(n * 2**18)")
    cell("data = mib(8)")
    cell("w = mib(2).requires_grad_()\nloss = (w * 2).exp().sum()")
    cell("mib(3)")
    cell("[mib(4)]")
    cell("del Out[max(Out)]")
    cell("def step():\n    batch = mib(5)\n    raise ValueError('no')\nstep()")
    table = held(cell)
    assert (table["data"], table["the last error"]) == ((8, 8), (5, 5))
    outputs = [sizes for name, sizes in table.items() if name.startswith(("Out[", "_"))]
    assert sorted(outputs) == [(3, 3), (4, 4)]
    assert cell("%gpu free").startswith("free: 12.0 MiB came free; released ")
    until(lambda: held(cell) == {"data": (8, 8), "w": (2, 0), "loss": (4, 2)})
    assert cell("%gpu free loss").startswith("free loss: 2.0 MiB came free; w still refers")
    until(lambda: held(cell) == {"data": (8, 8), "w": (2, 2)})


def test_another_notebooks_variables_are_listed_while_it_is_idle_or_parked(keeper):
    """No cell runs and no parked memory returns. A stopped notebook gives an error that names it."""
    with Notebook("train.ipynb", keeper) as train, Notebook("other.ipynb", keeper) as other:
        train.run("import torch\nweights = torch.ones(8 * 2**18)")
        until(lambda: "weights" in other.run("%gpu who train.ipynb"))
        assert "weights" in other.run(f"%gpu who {train.pid}")
        assert "In [" in other.run("%gpu who train.ipynb"), "with the cell that made it"
        counted = train.run("get_ipython().execution_count")
        until(lambda: "RAM" in other.run("%gpu park train.ipynb"))
        parked = other.run("%gpu who train.ipynb")
        assert "weights" in parked and "8.0 MiB is parked in RAM" in parked, parked
        assert "RAM" in other.run("%gpu leases")
        *news, count = train.run("get_ipython().execution_count").splitlines()
        assert "came back from RAM" in news[-1] and int(count) == int(counted) + 1
        os.kill(train.pid, signal.SIGSTOP)
        until(lambda: "is stopped, so it cannot answer" in other.run("%gpu who train.ipynb"))
        os.kill(train.pid, signal.SIGCONT)
        assert "no process 'x.ipynb'" in other.run("%gpu who x.ipynb")
