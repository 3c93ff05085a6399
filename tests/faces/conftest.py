"""Fixtures of the faces: an IPython shell with the extension loaded, a runtime of its own, and clocks that read UTC."""

import builtins
import os
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = [str(ROOT / folder) for folder in ("kernel_ext", "panels")]
sys.path[:0] = OURS  # this checkout's `gpu` and `gpu_panels`, installed or not
FOUND_BY_CHILDREN = os.pathsep.join(filter(None, (str(ROOT), *OURS, os.environ.get("PYTHONPATH"))))

import gpu_runtime  # noqa: E402
from gpu_runtime import watching  # noqa: E402


@pytest.fixture(autouse=True)
def utc(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture(autouse=True)
def no_other_ledgers(monkeypatch):
    """A console or a command in a test does not follow the ledger of another test's processes."""
    monkeypatch.setattr(watching.reader, "processes_of_this_user", lambda: [])


@pytest.fixture
def rt(monkeypatch, tmp_path):
    """The runtime that every face in the test uses. Its simulated card has 24 GiB, of which 21.6 are usable."""
    monkeypatch.setenv("GPU_CATALOG", str(tmp_path / "catalog"))
    runtime = gpu_runtime.Runtime(devices="sim:24GiB,host:64GiB", ledger="memory:", monitor=False)
    monkeypatch.setattr(gpu_runtime, "runtime", lambda: runtime)
    yield runtime
    runtime.close()


@pytest.fixture
def models(rt, monkeypatch, tmp_path):
    """Two models that do not fit together. qwen is on the card, llama is in RAM, and two are in the catalogue."""
    for name, size in (("llama", "9GiB"), ("qwen", "14GiB")):
        rt.register(name, backend="fake", size=size)
        rt.preload(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.yaml").write_text(
        "models: {phi:4b: {backend: fake, memory: 4GiB}, org/far: {runtime: tgi, memory: 4GiB}}"
    )
    rt.apply("models.yaml")
    return rt


@pytest.fixture(scope="session")
def bare_shell():
    """The only IPython shell of this process."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    return InteractiveShell.instance(
        config=Config({"HistoryManager": {"enabled": False}}), colors="nocolor"
    )


@pytest.fixture
def fresh_shell(bare_shell):
    """An IPython shell without the variables of other tests."""
    assert "_" not in vars(builtins), "with a `_` of another test there IPython sets no `_`"
    before = set(bare_shell.user_ns)
    yield bare_shell
    # Not `shell.reset`: it collects garbage, which takes half a second.
    for name in set(bare_shell.user_ns) - before:
        del bare_shell.user_ns[name]


@pytest.fixture
def shell(fresh_shell, rt):
    """An IPython shell after `%load_ext gpu`."""
    import gpu

    gpu.load_ipython_extension(fresh_shell)
    yield fresh_shell
    gpu.unload_ipython_extension(fresh_shell)


@pytest.fixture
def child_environment(tmp_path):
    """The environment for child processes. They have a ledger of their own and import this checkout."""
    return {
        **os.environ,
        "PYTHONPATH": FOUND_BY_CHILDREN,
        "GPU_DEVICES": "sim:24GiB,host:64GiB",
        "GPU_LEDGER": f"keeper://{tmp_path}/ledger",
        "TZ": "UTC",
    }
