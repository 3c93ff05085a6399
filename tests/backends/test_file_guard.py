"""Another process truncates a model's file during its load, which fails in one sentence; the notebook survives."""

import fcntl
import os
import sys
import threading
from unittest.mock import Mock

import pytest

from gpu_runtime.backends.pytorch.transformers_backend import untouched
from gpu_runtime.errors import LoadFailed
from tests import tiny_models
from tests.clock import PATIENCE, finished, scaled, until

CONTENT = b"w" * 10_000


def grants_leases(directory) -> bool:
    """Whether the operating system grants leases on files in `directory`. Some file systems do not."""
    path = directory / "probe"
    path.write_bytes(b"")
    with path.open("rb") as file:
        try:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError:
            return False
    return True


@pytest.fixture
def file(tmp_path):
    if not grants_leases(tmp_path):
        pytest.skip("this file system grants no leases")
    path = tmp_path / "model.safetensors"
    path.write_bytes(CONTENT)
    return path


def raises(check) -> bool:
    try:
        check()
    except LoadFailed:
        return True
    return False


WRITERS = {
    "truncate": lambda path: os.truncate(path, 10),
    "save": lambda path: path.write_bytes(b"new"),
    "append": lambda path: path.open("ab").close(),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_writer_waits_until_the_load_is_over(file, write):
    """The load notices the writer at its next step. So it can stop before the system lets the writer continue."""
    writer = threading.Thread(target=write, args=[file], daemon=True)
    with untouched([str(file)], "qwen") as check:
        check()
        writer.start()
        until(lambda: raises(check))
        with pytest.raises(LoadFailed, match="another process started to write") as error:
            check()
        assert str(file) in str(error.value) and "Load it again" in str(error.value)
        assert file.stat().st_size == len(CONTENT) and writer.is_alive()
    writer.join(PATIENCE)
    assert not writer.is_alive()


def test_readers_are_not_held_up_and_nothing_stays_open(file):
    with untouched([str(file)], "qwen") as check, untouched([str(file)], "twin") as other:
        assert file.read_bytes() == CONTENT
        check()
        other()
    before = os.listdir("/proc/self/fd")
    with untouched([str(file)], "qwen"):
        pass
    assert os.listdir("/proc/self/fd") == before
    os.truncate(file, 1)


def test_without_a_lease_the_load_goes_on(file, monkeypatch):
    """A network file system, or another user's file, has none. The load is then not guarded."""

    monkeypatch.setattr(fcntl, "fcntl", Mock(side_effect=PermissionError))
    with untouched([str(file), "/no/such"], "qwen") as check:
        check()


TRUNCATES = """
import os, sys, threading
import gpu_runtime
from gpu_runtime import GpuError

directory, weights = sys.argv[1], sys.argv[1] + "/model.safetensors"
rt = gpu_runtime.Runtime(devices="sim:1GiB", ledger="memory:", monitor=False)
rt.register("m", directory)
writer = threading.Thread(target=os.truncate, args=(weights, 4096), daemon=True)

def blocked_or_done():
    return not writer.is_alive() or "BREAKING" in open("/proc/locks").read()

def progress(done, total):
    if writer.ident is None:
        writer.start()
        while not blocked_or_done():
            os.sched_yield()

try:
    rt.preload("m", progress=progress)
    print("loaded")
except GpuError as error:
    print(type(error).__name__, error)
writer.join()
print(os.stat(weights).st_size, rt.status().sections)
"""


def test_a_notebook_survives_a_truncation_during_its_load(file, tmp_path):
    """SIGBUS killed the process: the weights are mapped, and the copy read beyond the end of the file."""
    directory = tiny_models.causal_lm(tmp_path / "m", hidden=256)
    run = finished([sys.executable, "-c", TRUNCATES, str(directory)], timeout=scaled(120))
    assert run.returncode == 0, (run.returncode, run.stderr[-500:])
    assert run.stdout.startswith("LoadFailed m cannot be loaded: another process started to write")
    assert "4096" in run.stdout.splitlines()[-1]
