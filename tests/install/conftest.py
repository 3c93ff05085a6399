"""New environments, the built wheel, and stand-ins of packages that have the names, versions and needs of real ones."""

import os
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.clock import finished, scaled

ROOT = Path(__file__).parents[2]
OURS = "gpu-console"
CORE = {"msgspec", "nvidia-ml-py", "psutil", "pyyaml"}  # all that the base installs
if sys.version_info < (3, 11):
    CORE.add("tomli")


def run(*command: str | Path, cwd: Path) -> str:
    """Runs the `command` in `cwd`, and returns its output. If the command fails, the test fails with all output.

    It gets no settings of pip, such as a machine's constraints.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV") and not name.startswith("PIP_")
    }
    done = finished(
        [str(part) for part in command],
        cwd=cwd,
        env=environment | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"},
        timeout=scaled(120),
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def pip(*words: str | Path, cwd: Path, python: Path | None = None) -> str:
    """What this environment's pip prints when it runs for the environment of `python`."""
    there = [f"--python={python}"] if python else []
    return run(sys.executable, "-m", "pip", *there, *words, cwd=cwd)


def empty_environment(folder: Path) -> Path:
    """A new environment without any package. Returns its folder of packages."""
    venv.create(folder, with_pip=False, symlinks=True)
    return next(folder.glob("lib/python3*/site-packages"))


def needed(wanted: Iterable[str]) -> set[str]:
    """The names of the `wanted` packages and of all that they need, as far as they are installed here."""
    found: set[str] = set()
    waiting = [Requirement(one) for one in wanted]
    seen: set[str] = set()
    while waiting:
        one = waiting.pop()
        if str(one) in seen:
            continue
        seen.add(str(one))
        try:
            lines = distribution(one.name).requires or ()
        except PackageNotFoundError:  # of another system
            continue
        found.add(canonicalize_name(one.name))
        for need in map(Requirement, lines):
            extras = one.extras or {""}
            if need.marker is None or any(need.marker.evaluate({"extra": x}) for x in extras):
                waiting.append(need)
    return found


def link_libraries(environment: Path, site: Path, names: set[str] | None = None) -> Path:
    """Lets `environment` find the packages `names` of the current environment; by default all but ours.

    They are linked one by one, because .pth files must not be followed. Returns the folder of links.
    """
    libraries = environment / "libraries"
    libraries.mkdir()
    here = Path(sysconfig.get_path("purelib"))
    entries = {path.name for path in here.iterdir() if "gpu_console" not in path.name}
    if names is not None:
        files = [file for name in names for file in distribution(name).files or ()]
        entries &= {file.parts[0] for file in files}
    for entry in entries:
        (libraries / entry).symlink_to(here / entry)
    (site / "libraries.pth").write_text(f"{libraries}\n")
    return libraries


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A new environment whose Python finds the current environment's libraries, except gpu-console."""
    folder = tmp_path / "environment"
    link_libraries(folder, empty_environment(folder))
    return folder


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this repository."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT, cwd=folder)
    (wheel,) = folder.glob("gpu_console-*.whl")
    return wheel


# -- stand-ins -------------------------------------------------------------------------------------


def metadata(name: str, version: str, needs: Iterable[str] = ()) -> str:
    """The metadata of a package. `needs` are the lines of its requirements."""
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    return "\n".join([*lines, *(f"Requires-Dist: {need}" for need in needs)]) + "\n"


def stand_in(folder: Path, name: str) -> None:
    """Writes a wheel without code into `folder`, with the version and the needs of the installed `name`."""
    found = distribution(name)
    version = found.version.partition("+")[0]
    stem = f"{canonicalize_name(name).replace('-', '_')}-{version}"
    extras = [f"Provides-Extra: {one}\n" for one in found.metadata.get_all("Provides-Extra") or ()]
    text = metadata(name, version, found.requires or ()) + "".join(extras)
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as made:
        made.writestr(f"{stem}.dist-info/METADATA", text)
        made.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        made.writestr(f"{stem}.dist-info/RECORD", "")
