"""The package can be installed as a wheel and editable, and works from a directory outside the repository.

Each installation has an environment of its own. That environment sees the libraries of the current environment, but
not its gpu-console. So the test imports exactly the package that was installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.clock import scaled

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.install


def run(*command: str | Path, cwd: Path) -> str:
    """Runs the `command` in `cwd`, and returns its output. If the command fails, the test fails with all output."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=scaled(120),
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A new environment whose Python finds the current environment's libraries, except gpu-console."""
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False, symlinks=True)
    libraries = (
        tmp_path / "libraries"
    )  # this environment's, link by link; .pth files are not followed from here
    libraries.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "gpu_console" not in entry.name:
            (libraries / entry.name).symlink_to(entry)
    site = next(folder.glob("lib/python3*/site-packages"))
    (site / "libraries.pth").write_text(f"{libraries}\n")
    return folder


def install(environment: Path, *what: str | Path, cwd: Path) -> None:
    run(
        sys.executable,
        "-m",
        "pip",
        f"--python={environment}/bin/python",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        *what,
        cwd=cwd,
    )


def imported_from(environment: Path, cwd: Path) -> list[Path]:
    """The folders from which `gpu_runtime` and `gpu` are imported."""
    program = "import gpu_runtime, gpu; print(gpu_runtime.__path__[0]); print(gpu.__path__[0])"
    return [
        Path(line)
        for line in run(environment / "bin" / "python", "-c", program, cwd=cwd).splitlines()
    ]


def files_in(folder: Path) -> set[Path]:
    return {
        path.relative_to(folder)
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def check_command(environment: Path, cwd: Path) -> None:
    """Checks that the command `gpu` runs, and that JupyterLab finds the console's tile and its icon."""
    assert "status" in run(environment / "bin" / "gpu", "--help", cwd=cwd)
    program = (
        "from importlib.metadata import distribution; from pathlib import Path;"
        "tile, = [one for one in distribution('gpu-console').entry_points if one.group == "
        "'jupyter_serverproxy_servers']; print(Path(tile.load()()['launcher_entry']['icon_path']).is_file())"
    )
    assert run(environment / "bin" / "python", "-c", program, cwd=cwd).strip() == "True"


def check_lab_extension(environment: Path, cwd: Path) -> None:
    """Checks that JupyterLab and Jupyter Server find the extension without any configuration."""
    program = (
        "from jupyterlab_server.config import get_federated_extensions;"
        "from jupyter_core.paths import jupyter_config_path, jupyter_path;"
        "from jupyter_server.extension.config import ExtensionConfigManager;"
        "found = get_federated_extensions(jupyter_path('labextensions'))['gpu-console'];"
        "print(found['ext_path']);"
        "print(ExtensionConfigManager(read_config_path=jupyter_config_path())"
        ".get_jpserver_extensions()['gpu_panels.lab']);"
        "from gpu_panels import lab; print(*lab._jupyter_server_extension_points()[0].values())"
    )
    path, is_on, module = run(environment / "bin" / "python", "-c", program, cwd=cwd).splitlines()
    assert Path(path) == environment / "share/jupyter/labextensions/gpu-console"
    assert files_in(Path(path)) == files_in(ROOT / "panels/gpu_panels/lab/browser")
    assert (is_on, module) == ("True", "gpu_panels.lab")


def test_a_wheel_works_outside_the_repository(environment, tmp_path):
    """The wheel contains all packages completely, under their import names, and nothing else."""
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        tmp_path,
        ROOT,
        cwd=tmp_path,
    )
    (wheel,) = tmp_path.glob("gpu_console-*.whl")
    install(environment, wheel, cwd=tmp_path)

    site = next(environment.glob("lib/python3*/site-packages"))
    assert imported_from(environment, tmp_path) == [site / "gpu_runtime", site / "gpu"]
    ours = {
        entry.name for entry in site.iterdir() if not entry.name.endswith((".dist-info", ".pth"))
    }
    assert ours - {"__pycache__"} == {"gpu_runtime", "gpu", "gpu_panels"}
    for package in (
        ROOT / "gpu_runtime",
        ROOT / "kernel_ext" / "gpu",
        ROOT / "panels" / "gpu_panels",
    ):
        assert files_in(site / package.name) == files_in(package)
    check_command(environment, tmp_path)
    check_lab_extension(environment, tmp_path)


def test_an_editable_install_works_outside_the_repository(environment, tmp_path):
    """With an editable install, the packages are imported from the repository itself."""
    install(environment, "-e", ROOT, cwd=tmp_path)

    assert imported_from(environment, tmp_path) == [
        ROOT / "gpu_runtime",
        ROOT / "kernel_ext" / "gpu",
    ]
    check_command(environment, tmp_path)
    check_lab_extension(environment, tmp_path)
