"""Each terminal line of each runbook runs in a shell, on a machine with the notebook and the model that it names."""

import json
import os
import re
import shutil
import sys
from contextlib import closing
from pathlib import Path

import pytest

from gpu_runtime import Runtime
from gpu_runtime.units import MIB
from tests.clock import finished, until

from .notebooks import ROOT, Notebook, rest

DEVICES = "sim:2x24GiB,host:64GiB"
BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)


def lines() -> dict[str, list[str]]:
    """The lines of each runbook, with their prompts, without their comments."""
    found = {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        prose = "\n\n".join(
            "".join(one["source"]) for one in cells if one["cell_type"] == "markdown"
        )
        block = "".join(BLOCK.findall(prose))
        found[path.name] = [re.split(r"\s{2,}#", line)[0] for line in block.splitlines()]
    return found


LINES = lines()
SHELL = sorted({line[2:] for of_one in LINES.values() for line in of_one if line[0] == "$"})
ROOTS = [line[2:] for of_one in LINES.values() for line in of_one if line[0] == "#"]


def test_each_runbook_for_an_operator_has_the_three_lines_that_a_person_on_ssh_types():
    """Lessons that start with something of one's own, and the index, have cells instead."""
    lessons = {"00", "01", "02", "08", "10", "15"}
    assert {name[:2] for name, typed in LINES.items() if len(typed) < 3} == lessons


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """The environment of a terminal on a machine where `train.ipynb` holds tensors and the idle model `qwen`."""
    home = tmp_path_factory.mktemp("machine")
    ours = {
        "GPU_DEVICES": DEVICES,
        "GPU_LEDGER": f"keeper://{home}/ledger",
        "XDG_STATE_HOME": f"{home}/state",
        "XDG_CONFIG_HOME": f"{home}/config",
    }
    more = {name: value for name, value in ours.items() if name != "GPU_LEDGER"}
    with Notebook("train.ipynb", ours["GPU_LEDGER"], **more) as notebook:
        notebook.run("import torch\nweights = torch.ones(2_000_000)")
        notebook.run("rt.register('qwen', backend='fake', size='4 GiB'); rt.preload('qwen')")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        yield {**os.environ, **ours, "PATH": path}, notebook


@pytest.mark.parametrize("line", SHELL)
def test_a_line_does_what_it_is_typed_for(machine, line):
    """4121 stands for the pid of a notebook."""
    environment, notebook = machine
    notebook.run("rt.preload('qwen')")  # where it was before an earlier line
    typed = line.replace("4121", str(notebook.pid))
    done = finished(["bash", "-c", typed], env=environment)
    assert done.returncode in (0, 1) if typed == "gpu health" else done.returncode == 0, done.stderr
    assert done.stdout or typed.startswith("kill"), "it says something"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
@pytest.mark.parametrize("line", ROOTS)
def test_a_line_of_root_is_accepted(line, tmp_path):
    """In a mount namespace with a copy of /etc, which has the user and the group that the line names."""
    shutil.copytree("/etc", tmp_path / "etc", symlinks=True, ignore_dangling_symlinks=True)
    first = f"mount --bind {tmp_path}/etc /etc; groupadd gpu; useradd ann; usermod -aG gpu ann"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}:/usr/sbin"
    words = ["unshare", "-m", "bash", "-c", f"{first}\n{line}"]
    done = finished(words, env={**os.environ, "PATH": path})
    assert done.returncode == 0, done.stderr


def _fits(rt) -> bool:
    card = rt.status().devices[0]
    return card.claimed_bytes <= card.limit_bytes


def test_the_two_notebooks_of_the_demo_do_not_fit_together(tmp_path):
    """`make demo` sets the size of the card. With the sizes of a machine without settings, both would fit."""
    words = re.search(r"(GPU_DEVICES=.*?);", (ROOT / "Makefile").read_text())[1].split()
    settings = dict(word.split("=", 1) for word in words if "ledger" not in word)
    cells = {
        name: [
            "".join(cell["source"])
            for cell in json.loads((ROOT / f"notebooks/demo/{name}").read_text())["cells"]
            if cell["cell_type"] == "code"
        ][:3]
        for name in ("train.ipynb", "tune.ipynb")
    }
    shown = {name: "" for name in cells}
    url = f"keeper://{tmp_path}/ledger"
    with (
        closing(Runtime(devices=settings["GPU_DEVICES"], ledger=url, monitor=False)) as rt,
        Notebook("train.ipynb", url, **settings) as train,
        Notebook("tune.ipynb", url, **settings) as tune,
    ):
        for mib, *pair in zip((32, 128, 128), *cells.values(), strict=True):
            for notebook, code in zip((train, tune), pair, strict=True):
                shown[notebook.name] += notebook.run(code)
                # Else the next cell begins before this one is counted, and before a notebook has left.
                rest(rt, notebook.name, mib * MIB)
                until(lambda: _fits(rt))
    assert all("came back from RAM" in text and "Error" not in text for text in shown.values()), (
        shown
    )
