"""The directories and files that are made for this user, whatever the umask of the process is."""

import itertools
import json
import os
import stat
import subprocess
import sys
from types import SimpleNamespace

import pytest

from gpu_runtime import files, notebook
from gpu_runtime.files import (
    BadFile,
    count_fault,
    json_object,
    make_directory,
    read_limited,
    weak_step,
)
from gpu_runtime.web import http_server
from tests.clock import PATIENCE


@pytest.fixture(params=[0o000, 0o022, 0o077], ids="umask {:03o}".format)
def umask(request):
    old = os.umask(request.param)
    yield request.param
    os.umask(old)


def test_a_new_directory_has_its_mode_and_those_above_are_writable_for_this_user_only(
    tmp_path, umask
):
    place = tmp_path / "state" / "gpu-console" / "ledger"
    for _ in "twice":
        make_directory(place)
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    above = stat.S_IMODE(place.parent.stat().st_mode)
    assert above == 0o755 & ~umask
    make_directory(tmp_path / "etc" / "gpu-console", 0o755)
    assert stat.S_IMODE((tmp_path / "etc" / "gpu-console").stat().st_mode) == 0o755


def test_a_directory_that_exists_keeps_its_mode(tmp_path):
    (tmp_path / "mine").mkdir(mode=0o750)
    make_directory(tmp_path / "mine")
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o750


def test_a_file_in_its_place_is_an_error(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(OSError):
        make_directory(tmp_path / "mine")
    with pytest.raises(OSError):
        make_directory(tmp_path / "mine" / "below")


CODE = """
import os, sys
from gpu_runtime import Runtime, autoload, samples
rt = Runtime(devices="sim:1x1GiB")
rt.register("m", backend="fake", size="1MiB")
with rt.use("m"):
    rt.tick()
open("models.yaml", "w").write("models: {c: {backend: fake, memory: 1MiB}}")
os.chmod("models.yaml", 0o600)
rt.apply("models.yaml")
autoload.write_autoload(prefix=os.path.abspath("environment"))
rt.close()
"""


@pytest.mark.processes
def test_with_a_umask_of_000_nothing_of_ours_can_be_changed_by_others(tmp_path):
    """`gpu apply` made ~/.local with mode 777, and the next command refused its own directory."""
    environment = {**os.environ, "HOME": str(tmp_path)}
    for name in (
        "XDG_STATE_HOME",
        "XDG_CONFIG_HOME",
        "XDG_RUNTIME_DIR",
        "GPU_LEDGER",
        "IPYTHONDIR",
    ):
        environment.pop(name, None)
    for _ in "twice":
        command = f"import os; os.umask(0)\n{CODE}"
        subprocess.run(
            [sys.executable, "-c", command],
            env=environment,
            cwd=tmp_path,
            check=True,
            timeout=PATIENCE,
        )
    made = [path for path in tmp_path.rglob("*") if not path.is_symlink()]
    open_to_all = [path for path in made if path.stat().st_mode & (stat.S_IWOTH | stat.S_IWGRP)]
    assert len(made) > 10 and not open_to_all
    assert not weak_step(tmp_path / ".local/state/gpu-console")


def test_machines_with_one_home_have_files_of_their_own(tmp_path, monkeypatch):
    """Process numbers are equal on two machines, and in two containers. The later one emptied the other's log."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    here = {files.new_log("m"), http_server.printable_address("http://h?token=t")[1]}
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename="two"))
    monkeypatch.setattr(files, "_numbers", itertools.count(1))
    there = {files.new_log("m"), http_server.printable_address("http://h?token=t")[1]}
    assert here.isdisjoint(there) and all(path.exists() for path in (*here, *there))


# -- files that anybody may have written are read up to their limits -------------------------------
def nested(depth: int) -> bytes:
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def test_a_file_of_exactly_the_limits_is_read(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    path.write_bytes(b"12345")
    assert read_limited(path, 5) == b"12345"
    with pytest.raises(BadFile, match="5 B, and at most 4 B"):
        read_limited(path, 4)
    monkeypatch.setattr(files, "DEEPEST", 3)
    path = tmp_path / "config.json"
    for depth in (2, 3):
        path.write_bytes(nested(depth))
        assert json_object(path) == json.loads(nested(depth))
    path.write_bytes(nested(4))
    with pytest.raises(BadFile, match="levels deep"):
        json_object(path)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("num_hidden_layers", 10_000),
        ("depths", 10_000),
        ("num_experts", 1_000_000),
        ("num_attention_heads", 1_000_000),
        ("vocab_size", 10**12),
    ],
)
def test_a_config_has_counts_up_to_their_limit_wherever_they_are(name, most):
    """Other numbers are no counts of parts, so they have no limit here."""
    for config in (lambda value: {name: value}, lambda value: {"x": {"y": {name: [1, value]}}}):
        assert count_fault(config(most)) == ""
        fault = count_fault(config(most + 1))
        assert fault.startswith(f"its {name} is ") if most < 10**12 else fault == ""


def test_what_cells_took_is_read_only_from_a_plain_file_of_this_user(tmp_path, monkeypatch):
    """The file may be in /var/tmp, where another user can put a pipe, for which each cell would wait."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    known = tmp_path / "known"
    known.write_text('{"cell_bytes": {"key": {}}}')
    place = tmp_path / "gpu-console" / notebook.FILE
    place.parent.mkdir()
    place.symlink_to(known)
    assert not notebook.is_remembered("key")
    known.replace(place)
    assert notebook.is_remembered("key") and not notebook.is_remembered("other")
    monkeypatch.setattr(os, "geteuid", lambda: place.stat().st_uid + 1)
    assert not notebook.is_remembered("key")
