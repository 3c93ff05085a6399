"""Each runbook runs twice: for a user with nothing of their own, and for a user who has models and a ledger.

The user of the second run has a catalogue of two models. Another process of theirs holds a model in their ledger.
Both users have the tests' isolated state directory, also under a bare `pytest --nbval`. They have the settings that
everybody has, with one exception: the line of a slow load depends on how fast the machine is, so it is not shown.
"""

import atexit
import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from nbval.plugin import IPyNbFile

from tests import isolation
from tests.clock import SLOWNESS, pytest_timeout_set_timer  # noqa: F401 - a hook

# The drill with many hosts needs Ray, which only the extra `fleet` installs.
collect_ignore = [] if importlib.util.find_spec("ray") else ["15_many_hosts.ipynb"]
ALL = {"GPU_PROGRESS_SECONDS": "1h"}
HOLDS = """
from gpu_runtime import Runtime
rt = Runtime()
rt.register("theirs", backend="fake", size="1GiB")
rt.preload("theirs")
print("ready", flush=True)
input()
"""
MODELS = """
models:
  mine: {path: mine.gguf, type: llm}
  ours: {path: ours.gguf, type: llm, importance: high}
"""


@functools.cache
def user(runbook: str, has_models: bool) -> dict[str, str]:
    """The environment of the user who runs the file `runbook`. No other runbook has run there.

    With `has_models` it is the second user, whose other process runs until the end of the tests.
    """
    home = Path(tempfile.mkdtemp(prefix="", dir=isolation.HOME))
    environment = {"XDG_STATE_HOME": f"{home}/state", "XDG_CONFIG_HOME": f"{home}/config"}
    if not has_models:
        return environment
    catalogue = home / "state/gpu-console/catalog"
    catalogue.mkdir(parents=True)
    (catalogue / "models.yaml").write_text(MODELS)
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDS],
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    atexit.register(other.kill)
    assert other.stdout.readline() == b"ready\n"
    return environment


def pytest_configure(config):
    if hasattr(config.option, "nbval_kernel_startup_timeout"):
        config.option.nbval_kernel_startup_timeout *= SLOWNESS


def pytest_collect_file(file_path, parent):
    """Collects each runbook once more, beside nbval's own hook."""
    if parent.config.option.nbval and file_path.suffix == ".ipynb":
        name = f"{file_path.name}[with models]"
        return IPyNbFile.from_parent(
            parent, path=file_path, name=name, nodeid=f"{parent.nodeid}/{name}"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Ray gives its processes 15 s to start, so its runbook runs alone, in `make soak`."""
    for item in items:
        if item.path.name == "15_many_hosts.ipynb":
            item.add_marker("soak")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """Sets the environment of the user while a cell runs, and so of the kernel, which the first cell starts.

    pytest calls this hook for the tests of all folders.
    """
    if item.path.suffix != ".ipynb":
        yield
        return
    before = dict(os.environ)
    os.environ.update(ALL | user(item.path.name, item.parent.name.endswith("]")))
    yield
    os.environ.clear()
    os.environ.update(before)
