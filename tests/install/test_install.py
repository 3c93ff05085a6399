"""The package can be installed as a wheel and editable, and works from a directory outside the repository.

Each installation has an environment of its own. That environment sees the libraries of the current environment, but
not its gpu-console. So the test imports exactly the package that was installed.
"""

from pathlib import Path

import pytest

from .conftest import ROOT, pip, run

pytestmark = pytest.mark.install


def install(environment: Path, *what: str | Path, cwd: Path) -> None:
    python = environment / "bin" / "python"
    pip("install", "-q", "--no-deps", "--no-build-isolation", *what, cwd=cwd, python=python)


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


def test_a_wheel_works_outside_the_repository(environment, wheel, tmp_path):
    """The wheel contains all packages completely, under their import names, and nothing else."""
    assert wheel.name.endswith("-py3-none-any.whl"), "it is pure Python"
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
