"""`gpu uninstall` removes what gpu-console wrote for a user, and nothing else."""

import os
import sys
from pathlib import Path

import pytest

from gpu_runtime import GpuError, Runtime, access_keys, box, cli
from gpu_runtime.autoload import AUTOLOAD_FILE, write_autoload
from gpu_runtime.ledgers.liveness import boot_id
from gpu_runtime.uninstall import uninstall
from tests.stories.kernels import Kernel


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The home of a user, with an environment in it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("GPU_LEDGER", "GPU_CATALOG", "GPU_SERVE_KEYS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def files(home: Path) -> set[str]:
    return {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()}


def use_it(home: Path) -> None:
    """Lets a runtime, a catalogue, keys and `gpu autoload` write their files."""
    with Runtime(devices="sim:1GiB,host:1GiB") as rt:
        rt.register("one", backend="fake", size="8 MiB")
        rt.preload("one")
        document = home / "models.yaml"
        document.write_text("models: {two: {backend: fake, memory: 8MB}}")
        rt.apply(str(document))
        document.unlink()
    key = access_keys.AccessKey("0" * 64)
    access_keys.add(access_keys.default_file(), "bot", key)
    write_autoload(prefix=str(home / "venv"))


@pytest.mark.processes
def test_what_was_written_is_listed_and_then_removed(home):
    use_it(home)
    before = files(home)
    assert len(before) > 5
    listed = uninstall(prefix=str(home / "venv"))
    for words in ("/ledger  (", "/catalog  (", "keys.json  (", f"{AUTOLOAD_FILE}  ("):
        assert words in listed
    assert files(home) == before  # nothing is removed without a yes
    done = uninstall(yes=True, prefix=str(home / "venv"))
    assert done.done and "pip uninstall gpu-console" in done.because
    assert files(home) == set()
    assert not (home / "state/gpu-console").exists() and not (home / "config/gpu-console").exists()
    assert "nothing of gpu-console is here" in uninstall(prefix=str(home / "venv")).because


@pytest.mark.processes
def test_what_a_person_wrote_stays_and_is_named(home):
    own = {
        "config/gpu-console/tasks.yaml",
        "state/gpu-console/catalog/mine.yaml",
        f"venv/etc/ipython/{AUTOLOAD_FILE}",
    }
    for name in own:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("# mine\n")
    use_it(home)
    because = uninstall(yes=True, prefix=str(home / "venv")).because
    assert files(home) == own
    assert all((home / name).read_text() == "# mine\n" for name in own)
    assert "tasks.yaml" in because and "mine.yaml" in because


@pytest.mark.processes
def test_a_ledger_in_use_is_not_removed(home):
    """The other process is named. A ledger elsewhere is no obstacle."""
    url = f"keeper://{home}/state/gpu-console/ledger/mine"
    with Kernel(url) as kernel:
        with pytest.raises(GpuError, match=f"in use by pid {kernel.process.pid}"):
            uninstall(yes=True, prefix=str(home / "venv"))
        assert any("ledger" in name for name in files(home))


def test_the_note_of_a_process_that_the_driver_has_parked_is_not_removed(home):
    """Without the note, nobody could bring the process back."""
    note = home / f"state/gpu-console/parked/{boot_id()}/{os.getpid()}-1.json"
    note.parent.mkdir(parents=True)
    note.write_text("{}")
    with pytest.raises(GpuError, match=f"gpu unpark --checkpoint {os.getpid()}"):
        uninstall(yes=True, prefix=str(home / "venv"))
    assert note.exists()


def test_a_directory_of_another_user_is_left_alone(home, monkeypatch):
    """Another user can make the fallback directory in /var/tmp first."""
    monkeypatch.setattr("gpu_runtime.files.FALLBACK", home)
    theirs = home / f"gpu-console-{os.geteuid()}"
    theirs.symlink_to(home / "elsewhere", target_is_directory=True)
    (home / "elsewhere").mkdir()
    (home / "elsewhere" / "precious").write_text("x")
    assert "nothing of gpu-console is here" in uninstall(prefix=str(home / "venv")).because
    assert (home / "elsewhere" / "precious").exists()


def test_a_state_directory_that_is_a_link_is_emptied(home):
    (home / "disk/ledger").mkdir(parents=True)
    (home / "disk/ledger/journal.db").write_text("x")
    (home / "state").mkdir()
    (home / "state/gpu-console").symlink_to(home / "disk")
    assert uninstall(yes=True, prefix=str(home / "venv")).done
    assert files(home) == set() and (home / "state/gpu-console").is_symlink()


def test_the_block_of_gpu_box_stays(home):
    path = home / f"venv/etc/ipython/{AUTOLOAD_FILE}"
    path.parent.mkdir(parents=True)
    path.write_text(box.BLOCK)
    assert "nothing of gpu-console is here" in uninstall(prefix=str(home / "venv")).because
    assert path.read_text() == box.BLOCK


def ends(prompt):
    """Ctrl-D instead of an answer."""
    raise EOFError


@pytest.mark.parametrize(
    ("answer", "stays"), [(lambda prompt: "yes", False), (lambda prompt: "no", True), (ends, True)]
)
def test_a_terminal_is_asked(home, monkeypatch, capsys, answer, stays):
    keys = access_keys.default_file()
    access_keys.add(keys, "bot", access_keys.AccessKey("0" * 64))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", answer)
    assert cli.main(["uninstall", "--prefix", str(home / "venv")]) == 0
    assert "keys.json" in capsys.readouterr().out
    assert keys.exists() == stays


@pytest.mark.parametrize("stream", ["stdin", "stdout"])
def test_a_closed_stream_is_no_terminal(home, monkeypatch, stream):
    """Python has None in place of a stream that is closed when a program starts, as by `<&-`."""
    keys = access_keys.default_file()
    access_keys.add(keys, "bot", access_keys.AccessKey("0" * 64))
    monkeypatch.setattr(sys, stream, None)
    assert cli.main(["uninstall", "--prefix", str(home / "venv")]) == 0 and keys.exists()
    assert cli.main(["top"]) == cli.FAILED
