"""An installation changes no package that a user has, and the core alone is enough for a notebook and the command.

pip decides with stand-ins: packages without code that have the names, versions and requirements of real ones. The index
offers the newest versions of everything that is installed here, so pip could replace the user's.
"""

import json
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import parse_email
from packaging.requirements import Requirement

from .conftest import (
    CORE,
    OURS,
    empty_environment,
    link_libraries,
    metadata,
    needed,
    pip,
    run,
    stand_in,
)

pytestmark = pytest.mark.install
EXTRAS = ("torch", "notebook")
USERS = ("torch", "numpy", "pandas", "pydantic")
NEEDS = {  # of the packages that a user has, in the version that begins so
    "torch": ("filelock", "typing-extensions>=4.8.0", "sympy", "networkx", "jinja2", "fsspec"),
    "pandas 2": ("numpy>=1.22.4", "python-dateutil>=2.8.2", "pytz>=2020.1", "tzdata>=2022.7"),
    "pandas 3": ("numpy>=1.26.0", "python-dateutil>=2.8.2"),
    "pydantic 1": ("typing-extensions>=4.2.0",),
    "pydantic 2": ("annotated-types>=0.4.0", "pydantic-core", "typing-extensions>=4.6.1"),
}
ENVIRONMENTS = [
    ("2.4.1", "1.26.4", "2.2.3", "1.10.18"),
    ("2.6.0", "1.26.4", "3.0.1", "2.7.4"),
    ("2.8.0", "2.2.6", "2.3.3", "newest"),
    ("newest", "2.2.6", "newest", "1.10.18"),
]


@pytest.fixture(scope="module")
def index(tmp_path_factory, wheel) -> Path:
    """A folder of stand-ins: all that our extras need, and the newest of a user's packages."""
    folder = tmp_path_factory.mktemp("index")
    wanted = requirements(wheel, *EXTRAS)
    for name in needed([*(f"{one.name}[{','.join(one.extras)}]" for one in wanted), *USERS]):
        if name != OURS:
            stand_in(folder, name)
    (folder / wheel.name).symlink_to(wheel)
    return folder


def requirements(wheel: Path, *extras: str) -> list[Requirement]:
    """The requirements in the `wheel`, those of its `extras` included."""
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [one for one in opened.namelist() if one.endswith(".dist-info/METADATA")]
        lines = parse_email(opened.read(name))[0]["requires_dist"]
    every = [Requirement(line) for line in lines]
    return [
        one
        for one in every
        if not one.marker or any(one.marker.evaluate({"extra": extra}) for extra in extras)
    ]


def installed_by(what: str, folder: Path, index: Path) -> dict[str, str]:
    """What `pip install WHAT` would install into the environment `folder`: name -> version."""
    words = ("install", "-q", "--dry-run", "--report", "-", "--find-links", index, what)
    report = json.loads(pip(*words, cwd=folder, python=folder / "bin" / "python"))
    return {
        one["metadata"]["name"].lower().replace("_", "-"): one["metadata"]["version"]
        for one in report["install"]
    }


def newest(index: Path, name: str) -> str:
    (found,) = index.glob(f"{name}-*.whl")
    return found.name.split("-")[1]


def test_the_base_installs_four_small_packages(index, tmp_path):
    """None of them needs another one."""
    empty_environment(tmp_path)
    found = installed_by(OURS, tmp_path, index)
    assert found.keys() == {OURS} | CORE


@pytest.mark.parametrize("versions", ENVIRONMENTS, ids=" ".join)
def test_an_installation_changes_no_package_of_the_user(index, tmp_path, versions):
    """With pandas among our requirements, numpy 1.26 became 2.4; with pydantic, 1.10 became 2."""
    site = empty_environment(tmp_path)
    had = {}
    for name, version in zip(USERS, versions, strict=True):
        had[name] = version = newest(index, name) if version == "newest" else version
        needs = NEEDS.get(name) or NEEDS.get(f"{name} {version[0]}", ())
        place = site / f"{name}-{version}.dist-info"
        place.mkdir()
        (place / "METADATA").write_text(metadata(name, version, needs))
    for extra in ("", *EXTRAS):
        found = installed_by(f"{OURS}[{extra}]" if extra else OURS, tmp_path, index)
        changed = found.keys() & had.keys()
        assert OURS in found and not changed, extra


NOTEBOOK = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "gpu")
rt = shell.user_ns["rt"]
rt.register("m", backend="fake", size="1 GiB")
with open("models.yaml", "w") as file:
    file.write("models: {hub: {source: org/name}, drill: {runtime: fake, memory: 1GiB}}")
assert shell.run_line_magic("gpu", "apply -f models.yaml").added == ("hub", "drill")
with rt.use("m"):
    print(shell.run_line_magic("gpu", ""))
    for verb in ("models", "leases", "evictions --all", "catalog", "health", "plan 2GiB", "config", "doctor"):
        print(shell.run_line_magic("gpu", verb))
    print(*shell.run_line_magic("gpu", "models")["name"], rt.leases()[0]["device"])
assert [row["bytes"] for row in rt.catalog()] == [2**30, None]
try:
    rt.plan("hub")
except Exception as error:
    print(error)
absent = [name for name in ("pandas", "numpy", "pydantic", "torch", "filelock") if name in sys.modules]
assert not absent, absent
"""


def test_the_core_alone_is_enough_for_a_notebook_and_the_command(wheel, tmp_path, monkeypatch):
    """Without pandas, pydantic and torch: `%load_ext gpu`, the verbs, and `gpu` in a terminal."""
    monkeypatch.setenv("GPU_DEVICES", "sim:2x24GiB,host:64GiB")
    monkeypatch.setenv("GPU_LEDGER", "memory:")
    monkeypatch.setenv("GPU_CATALOG", f"{tmp_path}/catalogue")
    folder = tmp_path / "environment"
    site = empty_environment(folder)
    libraries = link_libraries(folder, site, needed([*CORE, "ipython"]))
    python = folder / "bin" / "python"
    pip("install", "-q", "--no-deps", wheel, cwd=tmp_path, python=python)
    shown = run(python, "-c", NOTEBOOK, cwd=tmp_path)
    assert "\nm drill hub sim:0\n" in shown and "1.0 GiB" in shown
    assert shown.splitlines()[-1].startswith("  Install it:  pip install 'torch>=")

    (libraries / "IPython").unlink()  # a terminal does without it
    assert "sim:1" in run(folder / "bin" / "gpu", cwd=tmp_path)
    assert "org/name" in run(folder / "bin" / "gpu", "catalog", cwd=tmp_path)
