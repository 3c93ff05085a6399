"""Programs that only watch open the ledger that this user's processes use."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import gpu_runtime
from gpu_runtime import cli, watching
from gpu_runtime.settings import Settings
from tests.clock import PATIENCE

OWNER = """
import sys, gpu_runtime
rt = gpu_runtime.Runtime(ledger=sys.argv[1], devices="sim:24GiB,host:64GiB")
rt.register("qwen", backend="fake", size="4GiB")
rt.preload("qwen")
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def default(monkeypatch, tmp_path):
    """The default runtime of this process, in a private ledger that nobody else uses."""
    ledger = f"keeper://{tmp_path}/default"
    runtime = gpu_runtime.Runtime(devices="sim:24GiB,host:64GiB", ledger=ledger, monitor=False)
    runtime.settings = Settings()
    monkeypatch.setattr(gpu_runtime, "runtime", lambda: runtime)
    yield runtime
    runtime.close()


@pytest.fixture
def owner(tmp_path, child_environment, monkeypatch):
    """Another process with a model in a ledger of its own. The tests look at no other process."""
    url = f"keeper://{tmp_path}/used"
    command = [sys.executable, "-c", OWNER, url]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(command, env=child_environment, text=True, **pipes)
    assert process.stdout.readline().strip() == "ready"
    monkeypatch.setattr(watching.reader, "processes_of_this_user", lambda: [process.pid])
    yield url
    process.communicate("\n", timeout=PATIENCE)


@pytest.mark.processes
def test_the_ledger_that_a_process_uses_is_followed(default, owner):
    """A JupyterLab may not have the environment of the notebooks."""
    [active] = watching.active_ledgers()
    assert active.ledger.url == owner
    rt = watching.followed()
    try:
        assert rt.guest and [lease.name for lease in rt.status().leases()] == ["qwen"]
        assert watching.followed() is rt, "one runtime for each ledger"
    finally:
        watching.close(rt)
    assert rt._closed


@pytest.mark.processes
def test_a_ledger_that_is_set_is_never_replaced(default, owner):
    default.settings = Settings(gpu_ledger="keeper:///somewhere")
    assert watching.followed() is default


def test_the_default_ledger_stays_if_nobody_uses_another(default, monkeypatch):
    monkeypatch.setattr(watching.reader, "processes_of_this_user", lambda: [])
    assert watching.followed() is default and default.guest


@pytest.mark.processes
def test_a_process_that_only_watches_is_no_use(default, owner, monkeypatch):
    """Consoles and commands hold no memory in the ledger that they open."""
    [active] = watching.active_ledgers()
    rt = watching.guest(active.ledger)
    try:
        directory = Path(active.ledger.directory)
        assert watching._last_use(active.ledger, frozenset({2**22 + 1})) is None
        assert watching.directory_of(rt) == directory
    finally:
        watching.close(rt)


@pytest.mark.processes
def test_a_command_shows_the_ledger_in_use_and_names_it(default, owner, capsys):
    assert cli.main(["status"]) == 0
    shown = capsys.readouterr()
    assert re.search(r"qwen +4\.0 GiB", shown.out)
    assert shown.err.startswith(f"gpu: this is the ledger in use, {owner}. ")
    assert default._closed
