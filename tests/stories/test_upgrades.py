"""gpu-console is upgraded or removed under a running kernel, or its libraries do not suit: one sentence each."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from gpu_runtime import Runtime
from tests.clock import PATIENCE, finished

from .kernels import ROOT
from .notebooks import DEVICES, Notebook, rest

pytestmark = pytest.mark.processes
LATER = ("leases", "evictions", "who", "why", "fragmentation --map", "doctor", "config", "catalog")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A copy of the packages, which the kernels of the test import."""
    copy = tmp_path / "site"
    for package in ("gpu_runtime", "kernel_ext/gpu"):
        shutil.copytree(
            ROOT / package, copy / Path(package).name, ignore=shutil.ignore_patterns("__pycache__")
        )
    monkeypatch.setattr("tests.stories.notebooks.ROOT", copy)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return copy


def upgrade(copy: Path) -> None:
    """Each module needs a name now that the modules in memory have not."""
    for path in copy.rglob("*.py"):
        text = path.read_text().replace(
            "from __future__ import annotations\n",
            "from __future__ import annotations\nfrom gpu_runtime.facts import NewInThisVersion\n",
            1,
        )
        path.unlink()
        path.write_text(text)


@pytest.mark.parametrize("change", [upgrade, shutil.rmtree])
def test_after_an_upgrade_under_a_kernel_each_verb_says_so_and_nothing_is_lost(
    installed, keeper, change
):
    with Notebook("one.ipynb", keeper) as notebook, Runtime(devices=DEVICES, ledger=keeper) as rt:
        notebook.run("import torch\nx = torch.ones(3_000_000)")
        rest(rt)
        with rt.lease("40MiB", purpose="a colleague's", timeout=PATIENCE):  # the notebook is parked
            change(installed)
        shown = [notebook.run(f"%gpu {verb}") for verb in LATER]
        told = [text for text in shown if "while this process runs" in text]
        assert told, shown
        for text in shown:
            assert "ImportError" not in text and "ModuleNotFoundError" not in text, text
            assert "Traceback" not in text and "Error in callback" not in text, text
        assert "restart the kernel" in told[0]
        assert notebook.run("print(float(x.sum()))").strip().endswith("3000000.0")
        assert notebook.run("y = x + 1\nprint(1)").strip().endswith("1")


def gpu(verb: str, folder, keeper: str, lacks: str):
    """The command `gpu VERB` in an environment whose Python runs the line `lacks` first."""
    (folder / "sitecustomize.py").write_text(f"import sys, types\n{lacks}\n")
    environment = {"PYTHONPATH": f"{folder}:{ROOT}", "GPU_LEDGER": keeper}
    code = "import sys; from gpu_runtime.cli import main; sys.exit(main())"
    return finished([sys.executable, "-c", code, verb], env=os.environ | environment)


def test_a_library_that_is_missing_is_named_with_what_to_install(tmp_path, keeper):
    done = gpu("status", tmp_path, keeper, "sys.modules['psutil'] = None")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("gpu: gpu-console needs psutil>=")
    assert "pip install '" in done.stderr


@pytest.mark.parametrize("verb", ["status", "leases", "models", "config", "doctor"])
def test_an_old_pydantic_and_a_missing_pandas_disturb_no_verb(tmp_path, keeper, verb):
    """They are the user's: gpu-console does not import the one, and does without the other."""
    lacks = (
        "sys.modules['pydantic'] = types.ModuleType('pydantic')\n"  # like 1.10: without the names of 2
        "sys.modules.update(dict.fromkeys(['pandas', 'numpy', 'yaml', 'filelock']))"
    )
    done = gpu(verb, tmp_path, keeper, lacks)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout


LIMITED = """
import os, resource, signal, sys, _thread
from gpu_runtime import Runtime, GpuError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

def limit():
    {limit}

if {before}:
    limit()
try:
    rt = Runtime(devices="sim:1GiB,host:1GiB", ledger="keeper://{ledger}")
    rt.register("m", backend="fake", size="10MiB")
except GpuError as error:
    print("told", str(error).splitlines()[0])
    sys.exit()
if not {before}:
    limit()

def use():
    with rt.use("m"):
        pass

def lease():
    with rt.lease("1MiB", purpose="p"):
        pass

acts = [rt.status, use, lease, lambda: rt.preload("m"), lambda: rt.evict("m"), lambda: rt.pin("m")]
acts += [rt.models, rt.leases, rt.events, rt.health, rt.doctor, rt.who, rt.defrag, lambda: rt.why("m")]
acts += [lambda: rt.restore("m"), lambda: rt.forget("m"), rt.close]
for act in acts:
    try:
        act()
    except GpuError as error:
        print("told", str(error).splitlines()[0])
    except BaseException as error:
        print("RAW", act, repr(error))
"""
FILES = "resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}))"
OPEN = "used = len(os.listdir('/proc/self/fd')); resource.setrlimit(resource.RLIMIT_NOFILE, (used + {0},) * 2)"


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    "limit",
    [FILES.format(size) for size in (0, 4096, 70_000)]
    + [OPEN.format(more) for more in (0, 1, 3, 5, 8, 12)],
)
def test_a_limit_of_the_process_is_one_sentence(tmp_path, limit, before):
    code = LIMITED.format(limit=limit, before=before, ledger=tmp_path / "ledger")
    environment = {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path)}
    done = finished([sys.executable, "-c", code], env=os.environ | environment)
    assert "RAW" not in done.stdout and "Traceback" not in done.stderr, done.stdout + done.stderr
