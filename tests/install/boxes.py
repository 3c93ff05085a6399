"""Installations of a box below a directory: wheels of versions, environments without a download, and kernels."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from jupyter_client.manager import KernelManager

from gpu_runtime import box
from tests.clock import PATIENCE
from tests.next_version import NEXT, next_version
from tests.stories.notebooks import Notebook

from .conftest import CORE, empty_environment, link_libraries, needed

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
OF_KERNELS = f"cp{PYTHON.replace('.', '')}"


def as_version(wheel: Path, version: str, folder: Path) -> Path:
    """The `wheel` with the number of another version, in `folder`. The NEXT one has its code too."""
    _, old, rest = wheel.name.split("-", 2)
    made = folder / f"gpu_console-{version}-{rest}"
    with zipfile.ZipFile(wheel) as before, zipfile.ZipFile(made, "w") as after:
        for name in before.namelist():
            content = before.read(name)
            if name.endswith(("METADATA", "version.py")):
                content = content.replace(old.encode(), version.encode())
            elif version == NEXT and name.endswith(".py"):
                content = next_version(name, content.decode()).encode()
            after.writestr(name.replace(f"gpu_console-{old}.", f"gpu_console-{version}."), content)
    return made


def environment(folder: Path, names: Iterable[str]) -> Path:
    """A new environment that has these distributions of the present one, as links. Returns its Python."""
    link_libraries(folder, empty_environment(folder), needed(names))
    return folder / "bin" / "python"


def made_quickly(monkeypatch: Any, cache: Path) -> None:
    """The command's environment is made without pip, and what kernels load is made once, in `cache`."""
    add_core = box._add_core

    def make_environment(folder: Path, wheel: Path, links: str) -> None:
        python = environment(folder, CORE)
        with zipfile.ZipFile(wheel) as content:
            content.extractall(next(folder.glob("lib/python3*/site-packages")))
        command = folder / "bin" / "gpu"
        program = "import sys; from gpu_runtime.cli import main; sys.exit(main())"
        command.write_text(f"#!{python}\n{program}\n")
        command.chmod(0o755)

    def add_quickly(directory: Path, python: str, venv: Path, wheel: Path, links: str) -> None:
        made = cache / "made" / wheel.name / directory.name
        if not made.exists():
            made.parent.mkdir(parents=True, exist_ok=True)
            monkeypatch.setattr(box, "_pip", partial(_pip_here, box._pip))
            add_core(made, python, venv, wheel, str(cache))
        shutil.copytree(made, directory)

    monkeypatch.setattr(box, "_make_environment", make_environment)
    monkeypatch.setattr(box, "_add_core", add_quickly)


def _pip_here(pip: Any, python: Path, links: str, *words: str | Path) -> None:
    pip(Path(sys.executable), links, *words)


def listing(root: Path) -> dict[str, Any]:
    """Every path below `root`: its mode, and its content or target."""
    found: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        known = path.lstat()
        if path.is_symlink():
            content: Any = os.readlink(path)
        else:
            content = path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(root))] = (known.st_mode, content)
    return found


class BoxKernel(Notebook):
    """A kernel of `python`, whose environment reads the configuration of the box below `root`.

    IPython also reads `etc/ipython` of the environment, which is a link to that of `root`.
    """

    def __init__(
        self,
        python: Path,
        root: Path,
        name: str = "one.ipynb",
        program: Path | None = None,
        user: int = 0,
        **settings: str,
    ) -> None:
        """`program` runs the `python` for the `user`, if it is given."""
        self.log_file = Path("/tmp") / f"{root.name or 'box'}-{name}.log"
        own = python.parent.parent / "etc" / "ipython"
        own.parent.mkdir(exist_ok=True)
        own.unlink(missing_ok=True)
        if root.name:
            own.symlink_to(root / "etc" / "ipython")
        hidden = "PYTHONPATH", "GPU_LEDGER"
        variables = {one: text for one, text in os.environ.items() if one not in hidden}
        config = box.places(root=str(root)).config
        variables |= {"IPYTHONDIR": f"{self.log_file}.ipython", "GPU_CONFIG_FILE": str(config)}
        variables |= {"GPU_DEVICES": "sim:64MiB,host:1GiB", "JPY_SESSION_NAME": f"/work/{name}"}
        self._place = tempfile.TemporaryDirectory(prefix="kernel-")
        os.chown(self._place.name, user, -1)
        variables["KERNEL_PLACE"] = self._place.name  # for a `program` that makes /tmp private
        self.manager = KernelManager(
            transport="ipc",
            ip=f"{self._place.name}/ipc",
            connection_file=f"{self._place.name}/kernel.json",
        )
        assert self.manager.kernel_spec is not None
        self.manager.kernel_spec.argv[0] = str(program or python)
        with open(self.log_file, "w") as log:
            self.manager.start_kernel(
                env=variables | settings, cwd=str(root), stdout=log, stderr=log
            )
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)

    @property
    def log(self) -> list[str]:
        """The lines of the kernel's log that are about gpu-console."""
        return [line for line in self.log_file.read_text().splitlines() if "gpu-console" in line]
