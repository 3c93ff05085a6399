"""`gpu box install` serves the kernels of every environment of a machine, and `gpu box remove` leaves no trace.

The paths are below a directory, and the kernels' environments have a link to its `etc/ipython`. One test
installs at the real paths, in a mount namespace whose root is a copy on write.
"""

import contextlib
import fcntl
import glob
import grp
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from gpu_runtime import GpuError, box, cli
from gpu_runtime.errors import BadSetting, NotAllowed
from gpu_runtime.ledgers import setup
from tests.clock import finished, scaled, until
from tests.next_version import NEXT

from .boxes import (
    OF_KERNELS,
    PYTHON,
    BoxKernel,
    as_version,
    environment,
    listing,
    made_quickly,
)
from .conftest import ROOT

pytestmark = [
    pytest.mark.install,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can install for all users"),
]
GROUP = grp.getgrgid(os.getegid()).gr_name
OPERATORS_LINE = "c = get_config()  # the operator's\n"
OPERATORS_CAP = "[users.ann]\nkeep = false\n"


@pytest.fixture(scope="module")
def core(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheels that kernels need, so that pip loads each of them once."""
    folder = tmp_path_factory.mktemp("core")
    shutil.copy(wheel, folder)
    words = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    needs = box.core_of(wheel, PYTHON)
    done = finished([*words, *needs], timeout=scaled(120))
    if done.returncode:
        pytest.skip(f"pip cannot load {', '.join(needs)}: {done.stderr.strip()[-200:]}")
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has only ipykernel."""
    return environment(tmp_path_factory.mktemp("plain") / "env", ["ipykernel"])


class Box:
    """An installation below a directory."""

    def __init__(self, root: Path, source: Path) -> None:
        self.root, self.source = root, source
        self.prefix = root / "opt/gpu-console"

    def install(self, source: Path | None = None, **options: object) -> str:
        done = box.install(
            root=str(self.root),
            group=GROUP,
            pythons=PYTHON,
            source=str(source or self.source),
            **options,  # type: ignore[arg-type]
        )
        return done if isinstance(done, str) else done.because

    def remove(self) -> tuple[bool, str]:
        done = box.remove(root=str(self.root))
        assert not isinstance(done, str)
        return done.done, done.because

    def versions(self) -> list[str]:
        return [path.name for path in box.places(root=str(self.root)).versions()]

    @property
    def current(self) -> Path:
        return (self.prefix / "current").resolve()


@pytest.fixture
def machine(core: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Box]:
    """A machine with some files of the operator, and no installation."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    made_quickly(monkeypatch, core)
    root = Path(tempfile.mkdtemp(prefix="box-", dir="/tmp"))
    root.chmod(0o755)
    for folder in ("etc/gpu-console", "etc/ipython", "usr/local/bin", "etc/cron.d"):
        (root / folder).mkdir(parents=True, mode=0o755)
    (root / "etc/ipython/ipython_kernel_config.py").write_text(OPERATORS_LINE)
    (root / "etc/gpu-console/config.toml").write_text(OPERATORS_CAP)
    made = Box(root, core)
    yield made
    setup.end_service(root / "var/lib/gpu-console/ledger", root)
    shutil.rmtree(root, ignore_errors=True)
    for log in Path("/tmp").glob(f"{root.name}-*"):
        shutil.rmtree(log) if log.is_dir() else log.unlink()


def has_ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


# Installing and removing


def test_install_and_remove_leave_the_machine_as_it_was(machine):
    """Lines of the operator in the same files stay. A second install and a second remove change nothing."""
    before = listing(machine.root)
    text = machine.install()
    assert f"serves the kernels of Python {PYTHON}" in text
    installed = listing(machine.root)
    assert installed["etc/ipython/ipython_kernel_config.py"][1].startswith(OPERATORS_LINE.encode())
    assert installed["etc/gpu-console/config.toml"][1].endswith(OPERATORS_CAP.encode())
    machine.install()
    again = listing(machine.root)
    assert {path for path in again if again[path] != installed.get(path)} == set()
    assert f"Python {PYTHON}" in box.status(root=str(machine.root))
    assert machine.remove()[0] and listing(machine.root) == before
    done, because = machine.remove()
    assert done and "nothing is installed" in because


@pytest.mark.parametrize("made", [True, False], ids=["of the box", "from before"])
def test_it_is_removed_although_its_ledger_is_gone(machine, made):
    before = listing(machine.root)
    ledger = machine.root / "var/lib/gpu-console/ledger"
    if not made:
        ledger.parent.mkdir(parents=True)
        setup.init(str(ledger), GROUP, str(machine.root / "etc/gpu-console/config.toml"))
    machine.install()
    shutil.rmtree(ledger)
    done, because = machine.remove()
    assert done and "stays" not in because
    assert not made or listing(machine.root) == before


@pytest.mark.parametrize("link", ["opt", "var/lib", "usr/local", "etc/ipython"])
def test_a_directory_of_the_machine_may_be_a_link(machine, monkeypatch, tmp_path, link):
    """As /opt is on some systems. The processes' maps have the real paths."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(machine.source))
    real = machine.root / "data" / link
    real.parent.mkdir(parents=True)
    if (place := machine.root / link).exists():
        place.rename(real)
    else:
        real.mkdir()
        place.parent.mkdir(exist_ok=True)
    place.symlink_to(real)
    before = listing(machine.root)
    machine.install()
    old = machine.current
    assert machine.versions() == [old.name]
    with open(old / "in_use", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        newer = as_version(next(machine.source.glob("gpu_console-*.whl")), "9.9.9", tmp_path)
        assert f"{old} stays while it is used" in machine.install(newer)
    machine.install(newer)
    assert machine.versions() == ["9.9.9"]
    assert machine.remove()[0] and listing(machine.root) == before


def test_the_words_of_a_command_that_fails_may_be_any_bytes():
    program = "import os; os.write(2, b'ERROR: caf\\xe9'); raise SystemExit(1)"
    with pytest.raises(GpuError, match="ERROR: caf\ufffd"):
        box._run(sys.executable, "-c", program)


def test_a_dry_run_writes_nothing_and_lists_every_path(machine):
    before = listing(machine.root)
    plan = machine.install(dry_run=True)
    assert listing(machine.root) == before
    planned = {Path(line.split()[0]) for line in plan.splitlines()[1:]}
    machine.install()
    new = {machine.root / path for path in listing(machine.root)} - {
        machine.root / path for path in before
    }
    above = {parent for path in planned for parent in path.parents}
    below = {path for path in new if not planned.isdisjoint((path, *path.parents))}
    assert new - below - above == set()
    assert all(path.exists() or path.is_symlink() for path in planned)
    removal = box.remove(root=str(machine.root), dry_run=True)
    assert str(machine.prefix / "current") in removal and machine.versions()


@pytest.mark.parametrize("minor", range(10, 16))
def test_kernels_load_what_the_wheel_requires_for_their_python(wheel, minor):
    """psutil comes with every ipykernel. pip would judge the markers for its own Python."""
    named = [Requirement(one) for one in requires("gpu-console") or ()]
    here = {"python_version": f"3.{minor}", "extra": ""}
    due = {one.name for one in named if one.marker is None or one.marker.evaluate(here)}
    found = [Requirement(one).name for one in box.core_of(wheel, f"3.{minor}")]
    assert {*found, "psutil"} == due and {"msgspec", "pyyaml"} <= due


def test_the_command_has_the_verb(machine, capsys):
    words = ["--root", str(machine.root), "--group", GROUP, "--pythons", PYTHON]
    assert cli.main(["box", "install", *words, "--from", str(machine.source)]) == 0
    shown = capsys.readouterr()
    assert "box: gpu-console" in shown.out
    steps = [line.partition(" ")[2].split()[0] for line in shown.err.splitlines()]
    assert steps == ["makes", "makes", "starts"], shown.err
    command = machine.root / "usr/local/bin/gpu"
    done = finished([str(command), "box", "--root", str(machine.root)], env=_plain_environment())
    assert f"used by no process that is seen\nkernels   {machine.root}" in done.stdout
    done = finished(
        [str(command), "box", "remove", "--root", str(machine.root)], env=_plain_environment()
    )
    assert done.stdout.startswith("box: gpu-console is removed"), done.stderr
    assert not machine.prefix.exists()


def _plain_environment() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}


# What is refused, with nothing changed


def refused(machine: Box, **options: object) -> str:
    before = listing(machine.root)
    with pytest.raises(GpuError) as error:
        machine.install(**options)  # type: ignore[arg-type]
    assert listing(machine.root) == before
    return str(error.value)


def test_an_installation_that_fails_half_way_is_undone(machine, monkeypatch):
    def fails(*_: object) -> str:
        raise GpuError("the keeper does not start")

    monkeypatch.setattr(setup, "serve", fails)
    assert refused(machine) == "the keeper does not start"


def test_an_upgrade_that_fails_half_way_is_undone(machine, monkeypatch, tmp_path):
    machine.install()
    newer = as_version(next(machine.source.glob("gpu_console-*.whl")), "9.9.9", tmp_path)

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device", "/etc/ipython")

    with monkeypatch.context() as patch:
        patch.setattr(box.autoload, "write_block", fails)
        patch.setenv("PIP_FIND_LINKS", str(machine.source))
        before = listing(machine.root)
        with pytest.raises(GpuError, match="/etc/ipython cannot be written: .*No space left"):
            machine.install(newer, newest=True)
    after = listing(machine.root)
    changed = {path for path in {*before, *after} if before.get(path) != after.get(path)}
    assert {path for path in changed if "/ledger/" not in path} == set()


def test_two_commands_at_once_do_not_remove_what_the_other_one_makes(machine):
    """A directory without installed.json was taken for what an interrupted run had left."""
    machine.prefix.mkdir(parents=True)
    directory = os.open(machine.prefix, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        assert f"another  gpu box  changes {machine.prefix} now" in refused(machine)
    finally:
        os.close(directory)
    machine.install()
    assert machine.remove()[0]


def test_what_stands_in_the_way_is_named(machine, monkeypatch):
    assert "GPUs.\n  Make it, and add people:  groupadd nobodys" in _with_group(machine, "nobodys")
    assert "--from='/none' cannot be used" in refused(machine, source=Path("/none"))
    command = machine.root / "usr/local/bin/gpu"
    command.write_text("another program")
    assert f"{command} exists and is not of this installation" in refused(machine)
    command.unlink()
    with pytest.raises(BadSetting, match="--pythons='2.7' cannot be used"):
        box.install(root=str(machine.root), pythons="2.7")
    machine.root.chmod(0o777)
    assert "can be changed by other users" in refused(machine)
    machine.root.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NotAllowed, match="As root:  gpu box install"):
        box.install()
    with pytest.raises(NotAllowed, match="As root:  gpu box remove"):
        box.remove()


def _with_group(machine: Box, group: str) -> str:
    with pytest.raises(GpuError) as error:
        box.install(root=str(machine.root), group=group, source=str(machine.source))
    return str(error.value)


def test_a_read_only_etc_is_one_sentence(machine):
    before = listing(machine.root)
    words = f"box install --root {machine.root} --group {GROUP} --from {machine.source}"
    etc = machine.root / "etc"
    done = finished(
        ["unshare", "-m", "sh", "-c", f"mount --bind {etc} {etc}; mount -o remount,bind,ro {etc}; exec \"$@\""]
        + ["sh", sys.executable, "-m", "gpu_runtime.cli", *words.split()],
    )  # fmt: skip
    if "mount" in done.stderr:
        pytest.skip(f"no mount namespace can be made here: {done.stderr.strip()}")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert f"{etc / 'ipython'} is read-only. Nothing was changed" in done.stderr
    assert listing(machine.root) == before


# Kernels


def test_every_kernel_has_gpu_and_nothing_else_of_the_box(machine, plain):
    machine.install()
    with BoxKernel(plain, machine.root) as kernel:
        assert "healthy" in kernel.run("%gpu health")
        assert kernel.run("%load_ext gpu") == ""
        assert kernel.run("%load_ext gpu") == ""
        assert str(machine.current / OF_KERNELS) in kernel.run(
            "import gpu_runtime; gpu_runtime.__file__"
        )
        kernel.run(f"%%writefile m.yaml\n{CATALOGUE}")
        assert "1 new" in (said := kernel.run("%gpu apply -f m.yaml")), said
        assert "is no request of a model" in kernel.run(OWN_PROCESS)
        for hidden in ("yaml", "filelock", "pandas", "pydantic", "torch"):
            assert "ModuleNotFoundError" in kernel.run(f"import {hidden}"), hidden
        assert (
            kernel.run(f"import sys; print([p for p in sys.path if {str(machine.root)!r} in p])")
            == "[]\n"
        )
        assert "Or in a terminal:  gpu console" in kernel.run("%gpu console")
        assert kernel.run("%unload_ext gpu") == "" and "not found" in kernel.run("%gpu")
        assert kernel.log == []
        assert f"pid {kernel.pid} (root)" in box.status(root=str(machine.root))
    with BoxKernel(plain, machine.root, GPU_AUTOLOAD="0") as kernel:
        assert "not found" in kernel.run("%gpu")
        assert "ModuleNotFoundError" in kernel.run("import gpu")
        assert kernel.log == []


def test_a_list_of_extensions_of_the_users_own_stays(machine, plain):
    """In IPython's configuration a list in the user's file replaces the machine's."""
    machine.install()
    name = "own.ipynb"
    profile = Path(f"{machine.root}-{name}.log.ipython") / "profile_default"
    profile.mkdir(parents=True)
    (profile / "ipython_kernel_config.py").write_text(
        "c.InteractiveShellApp.extensions = ['autoreload']\n"
    )
    with BoxKernel(plain, machine.root, name) as kernel:
        assert "healthy" in kernel.run("%gpu health")
        assert "not found" not in kernel.run("%autoreload 0")


def test_the_users_own_package_comes_first(machine, core, tmp_path):
    machine.install()
    python = environment(tmp_path / "env", ["ipykernel", "msgspec"])
    with BoxKernel(python, machine.root) as kernel:
        assert str(tmp_path) in kernel.run("import msgspec; msgspec.__file__")
        assert "healthy" in kernel.run("%gpu health")


OWN_PROCESS = """
from pathlib import Path
from gpu_runtime.backends.processes.model_processes import Program
Program(Path("program.log"), None).request("no such request")
"""
CATALOGUE = "models: {c: {backend: fake, memory: 1MiB}}"
BROKEN = {
    "msgspec": ("raise SystemExit('broken')", "SystemExit: broken"),
    "gpu": ("", "is another package of this name"),
    "old msgspec": ("__version__ = '0.18.6'", "this environment has msgspec 0.18.6"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_failure_is_one_line_in_the_log_of_a_plain_kernel(machine, what, tmp_path):
    machine.install()
    python = environment(tmp_path / "env", ["ipykernel"])
    site = next((tmp_path / "env").glob("lib/python3*/site-packages"))
    code, line = BROKEN[what]
    place = machine.current / OF_KERNELS if what == "msgspec" else site
    package = place / what.split()[-1]
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir()
    (package / "__init__.py").write_text(code)
    with BoxKernel(python, machine.root) as kernel:
        assert kernel.run("print(1 + 1)") == "2\n"
        assert "not found" in kernel.run("%gpu")
        assert len(kernel.log) == 1 and line in kernel.log[0]
        assert "not loaded in this kernel" in kernel.log[0]
        assert kernel.run("import sys; print('gpu_runtime' in sys.modules)") == "False\n"


@pytest.mark.parametrize(
    "gone", ["current", f"current/{OF_KERNELS}", "current/kernel.py", "current/in_use"]
)
def test_a_kernel_starts_if_files_of_the_box_are_gone(machine, plain, gone):
    machine.install()
    path = machine.prefix / gone
    path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)
    with BoxKernel(plain, machine.root) as kernel:
        assert kernel.run("print(1 + 1)") == "2\n"
        assert len(kernel.log) == 1 and "not loaded in this kernel" in kernel.log[0]


def test_a_user_outside_the_group_is_told_once_what_to_ask_for(machine, plain):
    machine.install()
    # The capability only lets the kernel read the interpreter, which may be in a closed directory.
    caps = "--inh-caps=+dac_read_search --ambient-caps=+dac_read_search"
    words = f"setpriv --reuid=65534 --regid=65534 --clear-groups {caps}"
    program = machine.root / "as-nobody"
    program.write_text(f'#!/bin/sh\nexec {words} {plain} "$@"\n')
    program.chmod(0o755)
    home = machine.root / "home"
    home.mkdir()
    os.chown(home, 65534, 65534)
    own = {"HOME": str(home), "IPYTHONDIR": str(home / "ipython")}
    with BoxKernel(plain, machine.root, program=program, user=65534, **own) as kernel:
        fails = "raise MemoryError('out of memory')"
        first, second = kernel.run(fails), kernel.run(fails)
        assert f"The operator can add you: usermod -aG {GROUP} nobody" in first
        assert "usermod" not in second
        assert "usermod -aG" in kernel.run("%gpu")


# The umask is 077, /tmp is empty but for what the kernel itself needs, and nothing can be written into the home.
HARD = """#!/bin/sh
umask 077
exec unshare --mount sh -c '
places="{root} {environment} {linked} $KERNEL_PLACE"
mount -t tmpfs tmpfs /mnt || exit 77
for place in $places; do mkdir -p /mnt/$place; mount --bind $place /mnt/$place || exit 77; done
mount -t tmpfs tmpfs /tmp || exit 77
for place in $places; do mkdir -p $place; mount --bind /mnt/$place $place || exit 77; done
{home} || exit 77
exec "$@"' sh {python} "$@"
"""
HOMES = {
    "read-only": "mount --bind $HOME $HOME && mount -o remount,bind,ro $HOME",
    "full": "mount -t tmpfs -o size=64k tmpfs $HOME && ! cat /dev/zero > $HOME/filler",
}


@pytest.mark.parametrize("home", HOMES)
def test_a_kernel_in_a_closed_place_takes_part(machine, plain, home):
    machine.install()
    folder, program = machine.root / "home", machine.root / "hard"
    folder.mkdir()
    text = HARD.format(
        root=machine.root,
        environment=plain.parents[1],
        linked=sys.prefix,  # it has links to the packages of this one, which may be below /tmp
        home=HOMES[home],
        python=plain,
    )
    program.write_text(text)
    program.chmod(0o755)
    if subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "t", "/mnt"]).returncode:
        pytest.skip("no mount namespace can be made here")
    load = "rt.register('{0}', backend='fake', size='40MiB'); rt.preload('{0}')"
    with BoxKernel(plain, machine.root, program=program, HOME=str(folder)) as kernel:
        assert "a is on sim:0" in (said := kernel.run(load.format("a"))), said
        assert "OSError" in kernel.run(f"open('{folder}/new', 'w').write('x' * 100_000)")
        with BoxKernel(plain, machine.root, "two.ipynb") as other:
            assert "b is on sim:0" in (said := other.run(load.format("b"))), said
            assert "one.ipynb" in other.run("%gpu leases")
        assert "RAM" in kernel.run("%gpu models") and kernel.log == []


# Versions


def test_an_upgrade_leaves_a_running_kernel_its_version(machine, plain, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_FIND_LINKS", str(machine.source))
    machine.install()
    old = machine.current
    newer = as_version(next(machine.source.glob("gpu_console-*.whl")), "9.9.9", tmp_path)
    with BoxKernel(plain, machine.root) as kernel:
        text = machine.install(newer, newest=True)
        assert "gpu-console 9.9.9 serves" in text
        assert f"{old} stays while it is used, by pid {kernel.pid} (root)" in text
        assert "healthy" in kernel.run("%gpu health")
        # a module that was not imported yet, and one of the new version in a new kernel
        assert kernel.run(
            "from gpu_runtime import estimation; print(estimation.__file__)"
        ).startswith(str(old))
        with BoxKernel(plain, machine.root, "two.ipynb") as other:
            assert "9.9.9" in other.run("from gpu_runtime.version import VERSION; print(VERSION)")
            assert "healthy" in other.run("%gpu health")
        assert "older; used by pid" in box.status(root=str(machine.root))
        pid = kernel.pid
    until(lambda: has_ended(pid))
    until(lambda: not any(box.users(box.places(root=str(machine.root)))[old]))
    machine.install(newer, newest=True)
    assert machine.versions() == ["9.9.9"] and not old.exists()


def test_without_a_wheel_the_version_comes_from_pips_own_index(machine, monkeypatch, tmp_path):
    """The version of the command that was typed; for an upgrade the newest."""
    wheel = next(machine.source.glob("gpu_console-*.whl"))
    place = tmp_path / "simple/gpu-console"
    place.mkdir(parents=True)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"file://{tmp_path}/simple")
    (place / "index.html").write_text("")
    where = {"root": str(machine.root), "group": GROUP, "pythons": PYTHON}
    with pytest.raises(GpuError, match="pip cannot find gpu-console==.*\n.*install --from FILE"):
        box.install(**where)
    shutil.copy(wheel, place)
    names = [wheel.name, as_version(wheel, "9.9.9", place).name]
    (place / "index.html").write_text("".join(f'<a href="{name}">{name}</a>' for name in names))
    box.install(**where)
    assert machine.current.name == box.VERSION
    box.install(**where, newest=True)
    assert machine.versions() == ["9.9.9"]


def test_another_wheel_of_the_same_version_gets_its_own_directory(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_FIND_LINKS", str(machine.source))
    machine.install()
    name = machine.current.name
    first = next(machine.source.glob("gpu_console-*.whl"))
    other = as_version(first, name, tmp_path)  # other bytes, since nothing is compressed
    machine.install(other)
    assert machine.versions() == [f"{name}-2"]
    with pytest.raises(BadSetting, match="where it is installed; first type  gpu box remove"):
        machine.install(prefix="/srv/elsewhere")


def test_remove_waits_for_running_kernels(machine, plain):
    before = listing(machine.root)
    machine.install()
    with BoxKernel(plain, machine.root) as kernel:
        assert "healthy" in kernel.run("%gpu health")
        done, because = machine.remove()
        assert not done and f"pid {kernel.pid} (root)" in because
        assert "Once they have ended, type again:  gpu box remove" in because
        assert "healthy" in kernel.run("%gpu health")
        assert "sim:0" in kernel.run("from gpu_runtime import samples\n%gpu")
        with BoxKernel(plain, machine.root, "two.ipynb") as other:
            assert "not found" in other.run("%gpu") and other.log == []
        pid = kernel.pid
    until(lambda: has_ended(pid))
    until(lambda: machine.remove()[0], "it is removed")
    assert listing(machine.root) == before


# The keeper


def test_the_next_versions_keeper_goes_on_with_the_book(machine, plain, monkeypatch, tmp_path):
    """Without systemd, cron has the line of the present version, and its keeper replaces the older one."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(machine.source))
    machine.install()
    ledger = machine.root / "var/lib/gpu-console/ledger"
    cron = machine.root / "etc/cron.d/gpu-console"
    assert f"@reboot root {machine.current}/venv/bin/python -m" in cron.read_text()
    [first, *_] = setup.keepers(ledger)
    with BoxKernel(plain, machine.root) as kernel:
        kernel.run("rt.register('m', backend='fake', size='1MiB'); rt.preload('m')")
        machine.install(
            as_version(next(machine.source.glob("gpu_console-*.whl")), "9.9.9", tmp_path)
        )
        assert "9.9.9" in cron.read_text() and not first.is_running()
        assert "m" in kernel.run("%gpu models")


TWELVE = 12
COUNT = 5 << 20  # values of 4 bytes: three notebooks fit on the card
TENSOR = f"import torch; w = torch.arange({COUNT}, dtype=torch.int32)"
A_LONG_CELL = """
import os, time
while not os.path.exists({flag!r}):
    w += 0
    time.sleep(0.01)
"""


@pytest.mark.timeout(900)
def test_an_upgrade_and_a_downgrade_disturb_none_of_twelve_notebooks(
    machine, monkeypatch, tmp_path
):
    """Six notebooks of each version park for one another, and one runs a cell all the while."""
    pytest.importorskip("torch")
    monkeypatch.setenv("PIP_FIND_LINKS", str(machine.source))
    python = environment(tmp_path / "env", ["ipykernel", "torch", "numpy"])
    old = next(machine.source.glob("gpu_console-*.whl"))
    new, flag = as_version(old, NEXT, tmp_path), machine.root / "flag"
    kernels: list[BoxKernel] = []
    with contextlib.ExitStack() as ends:
        for wheel in (old, new):
            machine.install(wheel)
            for _ in range(TWELVE // 2):
                name = f"{len(kernels)}.ipynb"
                kernel = BoxKernel(python, machine.root, name, EVICTION_GRACE_SECONDS="0")
                kernels.append(ends.enter_context(kernel))
                assert "Error" not in (said := kernel.run(TENSOR)), said
        busy, *others = kernels
        running = busy.client.execute(A_LONG_CELL.format(flag=str(flag)))
        for number, wheel in enumerate((old, new), 1):
            machine.install(wheel)
            for kernel in others:
                *said, total = kernel.run("w += 1\nprint(w.sum().item())", stays=True).splitlines()
                assert int(total) == COUNT * (COUNT - 1) // 2 + number * COUNT
                assert len(said) <= 1, said
        flag.touch()
        assert busy.reply(running)["status"] == "ok"
        assert busy.run("print(w.sum().item())").splitlines()[-1] == f"{COUNT * (COUNT - 1) // 2}"
        places = busy.run("print(sorted(one.where for one in rt.status().leases()))")
        assert places.count("'host'") >= TWELVE - 3 and places.count("'") == 2 * TWELVE, places
        assert f"{NEXT} in 10.ipynb (pid {kernels[10].pid}); 11.ipynb" in busy.run("%gpu")
        assert [kernel.log for kernel in kernels] == [[]] * TWELVE


SYSTEMCTL = """#!/bin/sh
echo "$@" >> {root}/told
[ "$1" != restart ] || setsid $(sed -n s/^ExecStart=//p {root}/etc/systemd/system/$2) >/dev/null 2>&1 &
"""


def test_where_there_is_systemd_the_keeper_is_a_service_in_a_sandbox(machine, monkeypatch):
    """A script stands in for `systemctl`: it runs the command of the unit."""
    root = machine.root
    for folder in ("run/systemd/system", "etc/systemd/system", "bin"):
        (root / folder).mkdir(parents=True)
    (root / "bin/systemctl").write_text(SYSTEMCTL.format(root=root))
    (root / "bin/systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{root}/bin:{os.environ['PATH']}")
    machine.install()
    ledger = root / "var/lib/gpu-console/ledger"
    name = setup.unit_name(ledger)
    unit = root / "etc/systemd/system" / name
    opened = unit.with_suffix(".socket")
    until(lambda: setup.answers(ledger / setup.boot_id()))
    machine.install()
    told = (root / "told").read_text()
    assert told == f"daemon-reload\nenable {opened.name} {name}\nrestart {name}\n"
    assert f"ExecStart={machine.current}/venv/bin/python -m" in unit.read_text()
    if verify := shutil.which("systemd-analyze"):
        done = finished([verify, "verify", "--man=no", str(unit), str(opened)])
        assert "Unknown" not in done.stderr and "Failed to parse" not in done.stderr
    (root / "told").unlink()
    assert machine.remove()[0] and not unit.exists() and not ledger.exists()
    told = (root / "told").read_text()
    assert told == f"disable --now {opened.name} {name}\ndaemon-reload\n" and not opened.exists()


# The real paths


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """An environment with only ipykernel, of the oldest other version of Python; none if there is no other."""
    patterns = ("/usr/bin", "/usr/local/bin", str(Path.home() / ".pyenv/versions/*/bin"))
    found = [one for pattern in patterns for one in glob.glob(f"{pattern}/python3.1[0-9]")]
    for python in sorted(found, key=lambda path: path.rpartition("python")[2]):
        folder = tmp_path_factory.mktemp("other")
        pip = [str(folder / "bin/python"), "-m", "pip", "install", "-q", "ipykernel"]
        if python.endswith(PYTHON) or subprocess.run([python, "-m", "venv", folder]).returncode:
            continue
        if subprocess.run(pip, capture_output=True, timeout=scaled(120)).returncode == 0:
            return [pip[0]]
    return []


IN_PLACE = """
mount -t tmpfs tree {tree} && mkdir {tree}/upper {tree}/work {tree}/root || exit 77
mount -t overlay overlay -o lowerdir=/,upperdir={tree}/upper,workdir={tree}/work {tree}/root || exit 77
mount -t proc proc {tree}/root/proc && mount --rbind /dev {tree}/root/dev || exit 77
exec chroot {tree}/root "$@"
"""


@pytest.mark.timeout(600)
def test_at_its_real_paths_it_serves_two_pythons_and_leaves_no_trace(core, plain, others, tmp_path):
    """The root of the processes is a copy on write of this machine's, and ends with them."""
    tree = tmp_path / "tree"
    tree.mkdir()
    words = [sys.executable, "-m", "tests.install.box_in_place", str(core), str(plain), *others]
    paths = [str(ROOT), str(ROOT / "kernel_ext"), str(ROOT / "panels")]
    unshare = "unshare --mount --pid --fork --kill-child sh -c".split()
    done = finished(
        [*unshare, IN_PLACE.format(tree=tree), "sh", "env", f"--chdir={ROOT}", *words],
        env=_plain_environment() | {"PYTHONPATH": os.pathsep.join(paths)},
        timeout=scaled(500),
    )
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip(f"no tree of its own can be made here: {done.stderr.strip()}")
    if "pip cannot install" in done.stderr:
        pytest.skip(done.stderr.strip()[-300:])
    assert done.stdout.endswith("all is as before\n"), f"{done.stdout}\n{done.stderr}"
