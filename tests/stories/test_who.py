"""A notebook that never calls the runtime: `%gpu who` lists what holds its memory, `%gpu free` releases it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from jupyter_client.manager import start_new_kernel

from tests.clock import PATIENCE, until

from .test_parking import Notebook

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


@pytest.fixture
def cell(tmp_path):
    """A function that runs a cell in a kernel. It returns what the cell prints and shows, as text."""
    paths = (str(ROOT), str(ROOT / "kernel_ext"), os.environ.get("PYTHONPATH", ""))
    manager, client = start_new_kernel(
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "GPU_LEDGER": f"keeper://{tmp_path}/ledger",
            "GPU_DEVICES": "sim:24GiB,host:64GiB",
        }
    )

    def run(code: str) -> str:
        shown: list[str] = []

        def hook(message):
            content = message["content"]
            shown.append(content.get("text") or content.get("data", {}).get("text/plain", ""))

        client.execute_interactive(code, output_hook=hook, timeout=PATIENCE)
        return "".join(shown)

    try:
        run("%load_ext gpu")
        yield run
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def held(cell):
    """Maps each name to the MiB that it reaches and the MiB that it alone would free."""
    rows = json.loads(cell("print(rt.who().to_json(orient='records'))"))
    return {row["name"]: (row["bytes"] // MIB, row["alone_bytes"] // MIB) for row in rows}


def becomes(cell, expected) -> bool:
    """Whether the table is as `expected`, at the fifth attempt at the latest: a search over 3 s is partial."""
    return any(held(cell) == expected for _ in range(5))


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
    assert becomes(cell, {"data": (8, 8), "w": (2, 0), "loss": (4, 2)})
    assert cell("%gpu free loss").startswith("free loss: 2.0 MiB came free; w still refers")
    assert becomes(cell, {"data": (8, 8), "w": (2, 2)})


def test_another_notebooks_variables_are_listed_while_it_is_idle_or_parked(tmp_path):
    """No cell runs and no parked memory returns. A stopped notebook gives an error that names it."""
    url = f"keeper://{tmp_path}/ledger"
    train, other = Notebook("train.ipynb", url), Notebook("other.ipynb", url)
    try:
        train.run("import torch\nweights = torch.ones(8 * 2**18)")
        until(lambda: "weights" in other.run("%gpu who train.ipynb"))
        pid = train.manager.provisioner.pid
        assert "weights" in other.run(f"%gpu who {pid}")
        assert "In [" in other.run("%gpu who train.ipynb"), "with the cell that made it"
        counted = train.run("get_ipython().execution_count")
        other.run("%gpu park train.ipynb")
        parked = other.run("%gpu who train.ipynb")
        assert "weights" in parked and "8.0 MiB is parked in RAM" in parked, parked
        assert "host" in other.run("%gpu leases")
        news, count = train.run("get_ipython().execution_count").splitlines()
        assert "came back from RAM" in news and int(count) == int(counted) + 1
        os.kill(pid, signal.SIGSTOP)
        assert "is stopped, so it cannot answer" in other.run("%gpu who train.ipynb")
        os.kill(pid, signal.SIGCONT)
        assert "no process 'x.ipynb'" in other.run("%gpu who x.ipynb")
    finally:
        train.close()
        other.close()
