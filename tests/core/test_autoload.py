"""`gpu autoload` adds one block to the environment's IPython configuration. Undoing it removes only this block."""

import importlib.util
import os
import stat
import sys
from types import SimpleNamespace

import pytest

from gpu_runtime import GpuError
from gpu_runtime.autoload import AUTOLOAD_FILE, END, write_autoload
from tests.clock import finished


def test_it_is_written_once_and_removed_without_a_trace(tmp_path):
    path = tmp_path / "etc" / "ipython" / AUTOLOAD_FILE
    for _ in range(2):
        assert write_autoload(prefix=str(tmp_path)).done
    assert path.read_text().count('append("gpu")') == 1
    write_autoload(remove=True, prefix=str(tmp_path))
    write_autoload(remove=True, prefix=str(tmp_path))
    assert not path.exists()


@pytest.mark.parametrize(("installed", "loaded"), [(True, ["gpu"]), (False, [])])
def test_after_the_package_was_removed_the_file_does_nothing(
    tmp_path, monkeypatch, installed, loaded
):
    """IPython would show a traceback in every new kernel."""
    write_autoload(prefix=str(tmp_path))
    text = (tmp_path / "etc" / "ipython" / AUTOLOAD_FILE).read_text()
    app = SimpleNamespace(InteractiveShellApp=SimpleNamespace(extensions=[]))
    if not installed:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    exec(text, {"get_config": lambda: app})
    assert app.InteractiveShellApp.extensions == loaded


@pytest.mark.parametrize("own", ["c = get_config()\n", "c = get_config()  # no newline"])
def test_what_the_operator_wrote_stays(tmp_path, own):
    path = tmp_path / "etc" / "ipython" / AUTOLOAD_FILE
    path.parent.mkdir(parents=True)
    path.write_text(own)
    write_autoload(prefix=str(tmp_path))
    assert path.read_text().startswith(own)
    write_autoload(remove=True, prefix=str(tmp_path))
    assert path.read_text().rstrip("\n") == own.rstrip("\n")


def test_every_byte_the_mode_and_a_link_of_the_operators_file_stay(tmp_path):
    path, target = tmp_path / "etc" / "ipython" / AUTOLOAD_FILE, tmp_path / "shared.py"
    path.parent.mkdir(parents=True)
    own = "# caf\xe9, in Latin 1\n".encode("latin-1")
    target.write_bytes(own)
    target.chmod(0o664)
    path.symlink_to(target)
    write_autoload(prefix=str(tmp_path))
    assert path.is_symlink() and target.read_bytes().startswith(own)
    assert stat.S_IMODE(target.stat().st_mode) == 0o664
    write_autoload(remove=True, prefix=str(tmp_path))
    assert target.read_bytes() == own


def test_every_user_can_read_what_an_operator_with_a_closed_umask_writes(tmp_path):
    """IPython ignores a file that a kernel may not read, so the extension would not load."""
    umask = os.umask(0o077)
    try:
        write_autoload(prefix=str(tmp_path))
    finally:
        os.umask(umask)
    path = tmp_path / "etc" / "ipython" / AUTOLOAD_FILE
    modes = [stat.S_IMODE(one.stat().st_mode) for one in (path, path.parent, path.parent.parent)]
    assert modes == [0o644, 0o755, 0o755]


def test_nothing_is_deleted_if_the_end_of_the_block_is_missing(tmp_path):
    """The lines that follow may be the operator's."""
    path = tmp_path / "etc" / "ipython" / AUTOLOAD_FILE
    write_autoload(prefix=str(tmp_path))
    edited = path.read_text().replace(END, "") + "c = get_config()\n"
    path.write_text(edited)
    for remove in (True, False):
        with pytest.raises(GpuError, match="Delete the lines"):
            write_autoload(remove=remove, prefix=str(tmp_path))
    assert path.read_text() == edited


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "etc").write_text("no directory")
    with pytest.raises(
        GpuError, match=r"(?s)ipython_kernel_config.py cannot be written.*%load_ext gpu"
    ):
        write_autoload(prefix=str(tmp_path))


@pytest.mark.processes
def test_a_kernel_finds_the_extension_and_imports_no_torch(tmp_path):
    """The test starts IPython as a kernel does: it reads the configuration, and then loads the
    extensions named there.
    """
    write_autoload(prefix=str(tmp_path))
    code = (
        "import sys\n"
        "from ipykernel.kernelapp import IPKernelApp\n"
        f"IPKernelApp.config_file_paths = [{str(tmp_path / 'etc' / 'ipython')!r}]\n"
        "app = IPKernelApp()\n"
        "app.load_config_file()\n"
        "value = app.config.InteractiveShellApp.extensions\n"
        "print(getattr(value, 'get_value', lambda initial: value)([]), 'torch' in sys.modules)\n"
    )
    environment = {**os.environ, "IPYTHONDIR": str(tmp_path / "ipython")}
    done = finished([sys.executable, "-c", code], env=environment)
    assert done.stdout.strip() == "['gpu'] False", done.stderr
