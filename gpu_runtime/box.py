"""One installation for every kernel of the machine: `gpu box install`, `status`, `upgrade` and `remove`.

    PREFIX/VERSION/cp311 …        the packages that a kernel of each Python loads, and nothing more
    PREFIX/VERSION/kernel.py      what runs at the start of a kernel (box_kernel.py)
    PREFIX/VERSION/in_use         mapped by every kernel that uses the version
    PREFIX/VERSION/venv           the command, the console and the keeper, with all they need
    PREFIX/VERSION/installed.json written last: without it the directory is what an interrupted run left
    PREFIX/current                a link to the version that new kernels load
    PREFIX/box.json               what was made, for `remove`
    /etc/ipython/ipython_kernel_config.py   a marked block, which kernels of every environment run
    /usr/local/bin/gpu            a link to the command
    /var/lib/gpu-console/ledger   the group's ledger, named in /etc/gpu-console/config.toml
    the keeper's service, or without systemd a line for cron (ledgers/setup.py)

No file of a version ever changes, except that packages for one more Python may be added. So a kernel
keeps the files that it began with. A version that a process still uses is deleted by a later `upgrade`
or `remove`.
"""

from __future__ import annotations

import contextlib
import glob
import grp
import hashlib
import importlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from email import message_from_bytes
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import psutil

from . import autoload, box_kernel
from .autoload import AUTOLOAD_FILE, BEGIN, END
from .errors import BadSetting, GpuError, NotAllowed
from .facts import Outcome, Value
from .files import lock_within, make_directory, replace_file, weak_step
from .ledgers import host_config, setup
from .ledgers.access import group_name
from .ledgers.keeper.ledger import KeeperPeek, answers
from .ledgers.liveness import boot_id
from .version import VERSION

T = TypeVar("T")
PREFIX, GROUP, PYTHONS = "/opt/gpu-console", "gpu", "3.10-3.14"
LEDGER = Path("/var/lib/gpu-console/ledger")
COMMAND = Path("/usr/local/bin/gpu")
EXTRAS = "console,serve"  # of the environment of the command
IN_IPYKERNEL = "psutil"  # the only package that the core requires and every ipykernel has
HIDDEN = ("yaml", "tomli")  # in a kernel our own code alone finds them, as gpu_runtime.box_…
BLOCK = f"""{BEGIN}: written by `gpu box install`, removed by `gpu box remove`. Off: GPU_AUTOLOAD=0
try:
    import importlib.util as _util, os as _os, sys as _sys
    if _os.environ.get("GPU_AUTOLOAD", "").lower() not in ("0", "false", "no", "off"):
        _version = _os.path.realpath({{current!r}})
        _spec = _util.spec_from_file_location("{box_kernel.NAME}", _version + "/kernel.py")
        _kernel = _sys.modules[_spec.name] = _util.module_from_spec(_spec)
        _spec.loader.exec_module(_kernel)
        _kernel.start(_version)
except Exception as _error:
    __import__("sys").stderr.write("gpu-console is not loaded in this kernel: %s\\n" % _error)
{END}
"""
_CURRENT = re.compile(r"realpath\('(.*)/current'\)")
_TO_COMMAND = Path("current/venv/bin/gpu")  # in the prefix
_PYTHON = re.compile(r"3\.(\d{1,2})")
_WHEEL = re.compile(r"gpu_console-([^-]+)-.*\.whl")
_BEFORE = re.compile(r"python_version < ['\"]3\.(\d+)['\"]")  # the one marker of the core


class Installed(Value):
    """A complete version, as its installed.json has it."""

    version: str
    sha256: str  # of the wheel


class Made(Value):
    """What an installation has made beside its versions, as box.json has it."""

    ledger: str = ""  # the keeper's ledger; empty if the machine's ledger has none, such as a Redis
    made_ledger: bool = False  # else the operator had made it before
    directories: tuple[str, ...] = ()  # that did not exist before, the outermost first


class _Work(NamedTuple):
    """What the steps of an installation have in common."""

    where: Places
    wheel: Path
    links: str  # a directory with more wheels; empty without
    ledger: Path | None
    group: str
    undo: contextlib.ExitStack  # what a failure takes back
    say: Callable[[str], None]  # tells the operator of each step that takes long


class Places(NamedTuple):
    """Where everything is: below `root`, which is / except in a test."""

    root: Path
    prefix: Path

    @property
    def block(self) -> Path:
        return setup.below(self.root, Path("/etc/ipython") / AUTOLOAD_FILE)

    @property
    def command(self) -> Path:
        return setup.below(self.root, COMMAND)

    @property
    def config(self) -> Path:
        return setup.below(self.root, Path(host_config.CONFIG_FILE))

    @property
    def current(self) -> Path:
        return self.prefix / "current"

    @property
    def made(self) -> Path:
        return self.prefix / "box.json"

    def versions(self) -> list[Path]:
        """The directories of the versions that are complete."""
        found = [path.parent for path in self.prefix.glob("*/installed.json")]
        return sorted(path for path in found if not path.is_symlink())

    def now(self) -> Path | None:
        """The version that new kernels load; None if nothing is installed."""
        return self.current.resolve() if (self.current / "installed.json").exists() else None


def places(prefix: str | None = None, root: str | None = None) -> Places:
    """The places of the present installation, else of one at `prefix`. Raises BadSetting if it is at another prefix."""
    base = Path(root or "/").absolute()
    if prefix is not None and not Path(prefix).is_absolute():
        raise BadSetting("--prefix", prefix, f"an absolute path, such as {PREFIX}")
    asked = setup.below(base, Path(prefix or PREFIX)).resolve()  # as the maps of processes have it
    found = _present_prefix(Places(base, asked)) or asked
    if prefix is not None and found != asked:
        raise BadSetting(
            "--prefix", prefix, f"{found}, where it is installed; first type  gpu box remove"
        )
    return Places(base, found)


def _present_prefix(where: Places) -> Path | None:
    """The prefix that the block or the link to the command names; None without an installation."""
    found = _CURRENT.search(autoload.parts(where.block)[1])
    return Path(found[1]).resolve() if found else _prefix_of(where.command)


def _prefix_of(command: Path) -> Path | None:
    """The prefix of the installation to which the link `command` leads; None for anything else."""
    target = Path(os.readlink(command)) if command.is_symlink() else Path()
    if target.is_absolute() and target.parts[-4:] == _TO_COMMAND.parts:
        return target.parents[3].resolve()
    return None


# -- install and upgrade ---------------------------------------------------------------------------


def install(
    *,
    prefix: str | None = None,
    group: str | None = None,
    pythons: str | None = None,
    source: str | None = None,
    dry_run: bool = False,
    root: str | None = None,
    newest: bool = False,
    say: Callable[[str], None] = lambda step: None,
) -> Outcome | str:
    """Installs a version for every kernel, and makes it the current one.

    The version is in the wheel `source`, or in a directory `source` of wheels, else it is that of the
    running command, or with `newest` the newest of the package index. `pythons` are versions such as
    `3.11,3.12` or `3.10-3.14`. With `dry_run` nothing is written, and the text lists all paths. `say` is
    called with a sentence before each step that takes long.

    Raises NotAllowed, BadSetting, GpuError. Then nothing has changed.
    """
    where = places(prefix, root)
    if not root and os.geteuid() != 0:
        raise _not_root("upgrade" if newest else "install")
    if newest and where.now() is None:
        raise GpuError("nothing is installed that could be upgraded.\n  First:  gpu box install")
    wanted = versions_in(pythons or PYTHONS)
    wheel = _wheel_in(source) if source else None
    ledger, group = _ledger_of(where, group)
    targets = _targets(where, ledger)
    _require_possible(where, targets, ledger, group)
    if dry_run:
        return _plan(where, wheel, wanted, targets, newest)
    old_umask = os.umask(0o022)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="gpu-box-") as downloads,
            contextlib.ExitStack() as alone,
        ):
            if wheel is None:
                name = "gpu-console" if newest else f"gpu-console=={VERSION}"
                say(f"loads {name} from pip's index")
                wheel = _download(name, downloads)
            links = str(wheel.parent) if source and Path(source).is_dir() else ""
            with contextlib.ExitStack() as undo:
                made = _make_directories(targets, undo)
                alone.enter_context(_alone(where))
                work = _Work(where, wheel, links, ledger, group, undo, say)
                version, missing = _build(work, wanted, strict=bool(pythons))
                _switch(work, version, made)
                undo.pop_all()
            done = _installed(work, version, missing, sweep(where))
    except OSError as error:
        raise GpuError(f"{error.filename or where.prefix} cannot be written: {error}") from error
    finally:
        os.umask(old_umask)
    return Outcome("box", "", True, done)


@contextlib.contextmanager
def _alone(where: Places) -> Iterator[None]:
    """A block in which no other command changes the installation. Raises GpuError, OSError.

    The directory itself is locked, so no file remains.
    """
    with contextlib.ExitStack() as opened:
        try:
            directory = os.open(where.prefix, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, directory)
            lock_within(directory, 0.0)
        except BlockingIOError:
            raise GpuError(
                f"another  gpu box  changes {where.prefix} now; type it again when it has ended"
            ) from None
        except OSError:  # it was deleted by hand, or is on a network
            pass
        yield


def versions_in(text: str) -> tuple[str, ...]:
    """The versions of Python in `text`, in order. Raises BadSetting.

    >>> versions_in("3.11,3.13-3.14")
    ('3.11', '3.13', '3.14')
    """
    minors: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        found = _PYTHON.fullmatch(first), _PYTHON.fullmatch(last if dash else first)
        if not (found[0] and found[1]) or int(found[0][1]) > int(found[1][1]):
            raise BadSetting("--pythons", text, "versions such as 3.11,3.12 or 3.10-3.14")
        minors |= set(range(int(found[0][1]), int(found[1][1]) + 1))
    return tuple(f"3.{minor}" for minor in sorted(minors))


def _not_root(action: str) -> NotAllowed:
    return NotAllowed(
        f"only root can change what every kernel of the machine loads.\n"
        f"  As root:  gpu box {action}",
        name="box",
        user=str(os.geteuid()),
        because="not root",
    )


def _wheel_in(source: str) -> Path:
    """The wheel of this package that `source` is, or the newest one in a directory. Raises BadSetting."""
    path = Path(source).absolute()
    wheels = path.glob("gpu_console-*.whl")
    found = [path] if path.is_file() else sorted(wheels, key=os.path.getmtime)
    if not found or not _WHEEL.fullmatch(found[-1].name):
        raise BadSetting("--from", source, "a wheel gpu_console-….whl, or a directory that has one")
    return found[-1]


def _ledger_of(where: Places, group: str | None) -> tuple[Path | None, str]:
    """The directory of the machine's ledger, and the group that shares it.

    The directory is None if the configuration names a ledger without a keeper of the machine.
    Raises BadSetting.
    """
    known = host_config.read(str(where.config)).ledger
    if not known:
        return setup.below(where.root, LEDGER), group or GROUP
    scheme, _, path = known.partition("://")
    if scheme not in ("keeper", "sqlite"):
        return None, ""
    place = Path(path)
    shared = (place / setup.MARK).exists()
    return place, group or (group_name(place) if shared else GROUP)


def _targets(where: Places, ledger: Path | None) -> list[Path]:
    """The files and directories that are written, beside the version."""
    targets = [where.current, where.made, where.command, where.block]
    if ledger is not None:
        has_systemd = setup.below(where.root, setup.SYSTEMD).is_dir()
        cron = setup.cron_file(where.root)
        targets += [where.config, ledger]
        if has_systemd:
            targets += setup.unit_files(ledger, where.root)
        elif cron.parent.is_dir():
            targets.append(cron)
    return targets


def _require_possible(where: Places, targets: list[Path], ledger: Path | None, group: str) -> None:
    """Raises GpuError, BadSetting if the installation could not be completed. Writes nothing."""
    for target in targets:
        above = target.parent
        while not above.exists():
            above = above.parent
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise GpuError(f"{target} cannot be written: {above} is read-only. Nothing was changed")
    setup.require_plain("--prefix", where.prefix)
    if weak := weak_step(where.prefix):
        raise GpuError(f"every kernel would run what is in {where.prefix}, and {weak}")
    command = where.command
    if os.path.lexists(command) and _prefix_of(command) != where.prefix:
        raise GpuError(f"{command} exists and is not of this installation; move it away first")
    autoload.parts(where.block)
    if ledger is not None:
        new_parent = not ledger.parent.exists()
        try:
            if new_parent:  # `setup` requires a parent, which is made later
                setup.group_id(group)
            else:
                setup.require_suitable(ledger, group, str(where.config))
        except BadSetting as error:
            if error.setting != "--group":
                raise
            raise GpuError(
                f"there is no group {group}, whose members share the GPUs.\n"
                f"  Make it, and add people:  groupadd {group}; usermod -aG {group} USER"
            ) from None


def _make_directories(targets: list[Path], undo: contextlib.ExitStack) -> tuple[str, ...]:
    """Makes the directories above the `targets`. Returns those that were missing."""
    made = []
    for target in targets:
        for above in reversed(target.parents):
            if not above.exists():
                make_directory(above, 0o755)
                made.append(str(above))
                undo.callback(_remove_empty, above)
    return tuple(made)


def _remove_empty(directory: str | Path) -> None:
    with contextlib.suppress(OSError):  # it is gone, or something else is in it
        os.rmdir(directory)


# -- the directory of a version --------------------------------------------------------------------


def _build(work: _Work, wanted: tuple[str, ...], *, strict: bool) -> tuple[Path, list[str]]:
    """The directory with the version of the wheel, which is made or completed for the `wanted` Pythons.

    Returns the Pythons without packages too. If `strict`, they are an error. Raises GpuError, OSError.
    """
    wheel, links, undo = work.wheel, work.links, work.undo
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    version = _directory_for(work.where, wheel, digest)
    if not (version / "installed.json").exists():
        shutil.rmtree(version, ignore_errors=True)  # what an interrupted run left
        undo.callback(shutil.rmtree, version, ignore_errors=True)
        version.mkdir()
        work.say(
            "makes the environment of the command, the console and the keeper: a minute or more"
        )
        _make_environment(version / "venv", wheel, links)
        package = next((version / "venv").glob("lib/python3*/site-packages/gpu_runtime"))
        shutil.copyfile(package / "box_kernel.py", version / "kernel.py")
        (version / "in_use").write_bytes(b"Kernels that use this version map this file.\n")
    missing = []
    for python in wanted:
        directory = version / f"cp{python.replace('.', '')}"
        if directory.exists():
            continue
        work.say(f"makes what kernels of Python {python} load")
        try:
            _add_core(directory, python, version / "venv", wheel, links)
            undo.callback(shutil.rmtree, directory, ignore_errors=True)
        except _PipFailed as error:
            if strict:
                raise GpuError(f"Python {python} cannot be served: {error}") from error
            missing.append(python)
    if not list(version.glob("cp3*")):
        raise GpuError(f"pip finds no packages for Python {', '.join(wanted)}")
    if not (version / "installed.json").exists():
        _write_json(version / "installed.json", Installed(_version_of(wheel), digest))
    return version, missing


def _directory_for(where: Places, wheel: Path, digest: str) -> Path:
    """Where the version in the `wheel` is, or will be: for another wheel of one version such as 0.3.0-2."""
    name = _version_of(wheel)
    for number in itertools.count(1):
        directory = where.prefix / (name if number == 1 else f"{name}-{number}")
        record = directory / "installed.json"
        if not record.exists() or _read_json(record, Installed).sha256 == digest:
            return directory
    raise AssertionError  # `count` does not end


def _version_of(wheel: Path) -> str:
    found = _WHEEL.fullmatch(wheel.name)
    assert found is not None  # `_wheel_in` has checked it
    return found[1]


class _PipFailed(GpuError):
    """pip's last words."""


def _run(*words: str | Path) -> None:
    """Runs a command of Python without the operator's own paths. Raises _PipFailed."""
    hidden = {"PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER"}
    environment = {name: text for name, text in os.environ.items() if name not in hidden}
    ran = subprocess.run(
        [*map(str, words)],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        errors="replace",
    )
    if ran.returncode:
        lines = [line for line in f"{ran.stdout}\n{ran.stderr}".splitlines() if line.strip()]
        errors = [line for line in lines if "ERROR" in line or "Error" in line]
        raise _PipFailed((errors or lines or ["it failed"])[-1].strip())


def _pip(python: Path, links: str, *words: str | Path) -> None:
    more = ["--find-links", links] if links else []
    _run(python, "-m", "pip", "--quiet", "--disable-pip-version-check", *words, *more)


def _make_environment(folder: Path, wheel: Path, links: str) -> None:
    """Makes the environment of the command. Raises GpuError."""
    try:
        _run(_python_for_everybody(), "-m", "venv", folder)
    except _PipFailed as error:
        raise GpuError(
            f"no environment can be made in {folder}: {error}.\n"
            f"  On Debian and Ubuntu first type:  apt install python3-venv"
        ) from error
    extras = f"[{EXTRAS}]" if EXTRAS else ""
    try:
        _pip(folder / "bin" / "python", links, "install", f"{wheel}{extras}")
    except _PipFailed as error:
        raise GpuError(f"pip cannot install {wheel.name}: {error}") from error


def _python_for_everybody() -> Path:
    """The Python of the command's environment, which every user must be able to run. Raises GpuError."""
    candidates = [Path(getattr(sys, "_base_executable", sys.executable)), Path("/usr/bin/python3")]
    for candidate in candidates:
        real = candidate.resolve()
        if real.exists() and all(above.stat().st_mode & 0o001 for above in real.parents):
            return candidate
    raise GpuError(
        f"other users cannot run {candidates[0]}.\n"
        f"  Type the command with a Python that all can run, such as /usr/bin/python3"
    )


def _add_core(directory: Path, python: str, venv: Path, wheel: Path, links: str) -> None:
    """Makes the `directory` with what a kernel of this `python` loads. Raises _PipFailed."""
    draft = directory.with_name(f".{directory.name}")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        _pip(
            venv / "bin" / "python",
            links,
            "install",
            "--no-deps",  # the core has none
            "--no-compile",  # this pip would compile for its own Python
            "--only-binary=:all:",
            f"--python-version={python}",
            f"--target={draft}",
            wheel,
            *core_of(wheel, python),
        )
        for extra in ("bin", "share", "etc"):
            shutil.rmtree(draft / extra, ignore_errors=True)
        for name in HIDDEN:  # see catalog/documents.py, compat.py
            if (draft / name).exists():
                (draft / name).rename(draft / "gpu_runtime" / f"box_{name}")
        if interpreter := _interpreter(python):
            with contextlib.suppress(_PipFailed):  # then kernels compile it at each start
                _run(interpreter, "-m", "compileall", "-q", draft)
        draft.rename(directory)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def core_of(wheel: Path, python: str) -> list[str]:
    """What the `wheel` requires in a kernel of this `python`, beside what every ipykernel has.

    The wheel may be of another version than this command. pip would judge a marker for its own Python.
    """
    with zipfile.ZipFile(wheel) as opened:
        [name] = [file for file in opened.namelist() if file.endswith(".dist-info/METADATA")]
        needs = message_from_bytes(opened.read(name)).get_all("Requires-Dist", [])
    found = []
    for need, _, marker in (line.partition(";") for line in needs):
        before = _BEFORE.fullmatch(marker.strip())
        is_of_core = not marker or (before and int(python[2:]) < int(before[1]))
        if is_of_core and not need.startswith(IN_IPYKERNEL):
            found.append(need.strip())
    return found


def _interpreter(python: str) -> str:
    """An interpreter of this version that only root can have changed, since root runs it; or ""."""
    patterns = ("/usr/bin", "/usr/local/bin", "/opt/*/bin", "/opt/*/envs/*/bin", "/opt/*/*/bin")
    found = [path for folder in patterns for path in glob.glob(f"{folder}/python{python}")]
    if sys.version_info[:2] == tuple(map(int, python.split("."))):
        found.insert(0, getattr(sys, "_base_executable", sys.executable))
    return next((path for path in found if not weak_step(Path(path))), "")


def _download(requirement: str, folder: str) -> Path:
    """The wheel that the package index has for `requirement`. Raises GpuError."""
    try:
        _pip(Path(sys.executable), "", "download", "--no-deps", "--dest", folder, requirement)
        return _wheel_in(folder)
    except (_PipFailed, BadSetting) as error:
        raise GpuError(
            f"pip cannot find {requirement}: {error}.\n  Name a wheel:  gpu box install --from FILE"
        ) from error


# -- from one version to the next ------------------------------------------------------------------


def _switch(work: _Work, version: Path, directories: tuple[str, ...]) -> None:
    """Makes `version` the current one. `directories` were made for it. Raises GpuError, OSError."""
    where, ledger, undo = work.where, work.ledger, work.undo
    old = read_made(where)
    if ledger is not None:
        is_new = _make_ledger(where, ledger, work.group, undo)
        work.say(f"starts the keeper of {ledger}")
        if before := where.now():
            undo.callback(setup.serve, ledger, _python_in(before), where.root)
        setup.serve(ledger, _python_in(version), where.root)
    else:
        is_new = False
    made = Made(
        ledger=str(ledger or ""),
        made_ledger=is_new or old.made_ledger,
        directories=tuple(dict.fromkeys((*old.directories, *directories))),
    )
    if not where.made.exists():
        undo.callback(where.made.unlink, missing_ok=True)
    _write_json(where.made, made)
    _link(where.current, Path(version.name), undo)
    _link(where.command, where.prefix / _TO_COMMAND, undo)
    autoload.write_block(where.block, BLOCK.format(current=str(where.current)))


def _python_in(version: Path) -> str:
    return str(version / "venv" / "bin" / "python")


def _make_ledger(where: Places, ledger: Path, group: str, undo: contextlib.ExitStack) -> bool:
    """Makes the ledger of the `group`, if it is missing. Returns whether it was."""
    setup.require_suitable(ledger, group, str(where.config))
    before = where.config.read_bytes() if where.config.exists() else None
    if not ledger.exists():
        undo.callback(shutil.rmtree, ledger, ignore_errors=True)
        undo.callback(_restore, where.config, before)
        undo.callback(setup.end_service, ledger, where.root)
    return setup.make(ledger, group, str(where.config))


def _restore(path: Path, content: bytes | None) -> None:
    """Gives the file `path` its earlier `content`; None if it did not exist."""
    if content is None:
        path.unlink(missing_ok=True)
    else:
        mode = path.stat().st_mode & 0o777
        replace_file(path, content, lambda draft: draft.chmod(mode))


def _link(link: Path, target: Path, undo: contextlib.ExitStack) -> None:
    """Lets `link` lead to `target`, at once for all readers."""
    before = os.readlink(link) if link.is_symlink() else None
    if before == str(target):
        return
    draft = link.with_name(f".{link.name}-{os.getpid()}")
    draft.unlink(missing_ok=True)
    draft.symlink_to(target)
    os.replace(draft, link)
    if before is None:
        undo.callback(link.unlink, missing_ok=True)
    else:
        undo.callback(_link, link, Path(before), contextlib.ExitStack())


def _write_json(path: Path, content: Value) -> None:
    replace_file(path, msgspec.json.encode(content), lambda draft: draft.chmod(0o644))


def _read_json(path: Path, kind: type[T]) -> T:
    """The value in the file `path`. Raises GpuError if the file was damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.MsgspecError as error:
        raise GpuError(f"{path} cannot be read: {error}") from error


def read_made(where: Places) -> Made:
    """What the installation has made; an empty one if nothing is installed."""
    return _read_json(where.made, Made) if where.made.exists() else Made()


def _installed(work: _Work, version: Path, missing: list[str], kept: dict[Path, list[str]]) -> str:
    """The sentence about an installation."""
    parts = [
        f"gpu-console {version.name} serves the kernels of Python {', '.join(_pythons_of(version))} "
        f"in every environment, from their next start; the command is {work.where.command}"
    ]
    if work.ledger is not None:
        parts.append(f"members of the group {work.group} share {work.ledger}, whose keeper runs")
    if missing:
        parts.append(f"pip has no packages for Python {', '.join(missing)}")
    parts += [f"{path} stays while it is used, by {', '.join(who)}" for path, who in kept.items()]
    return "; ".join(parts)


def _plan(
    where: Places, wheel: Path | None, wanted: tuple[str, ...], targets: list[Path], newest: bool
) -> str:
    """The paths that an installation would write."""
    if wheel is not None:
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        version = _directory_for(where, wheel, digest)
    else:
        version = where.prefix / ("NEWEST" if newest else VERSION)
    inside = [f"cp{python.replace('.', '')}" for python in wanted]
    inside += ["in_use", "installed.json", "kernel.py", "venv"]
    paths = [*(version / name for name in inside), *targets]
    lines = [f"  {path}{'' if path.exists() else '  (new)'}" for path in paths]
    return "\n".join(["Nothing was written. These paths would be:", *lines])


def _pythons_of(version: Path) -> list[str]:
    minors = sorted(int(path.name.removeprefix("cp3")) for path in version.glob("cp3*"))
    return [f"3.{minor}" for minor in minors]


# -- which process uses which version --------------------------------------------------------------


class Process(NamedTuple):
    """A running process, and its user."""

    pid: int
    user: str

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.user})"


def users(where: Places) -> dict[Path, list[Process]]:
    """The processes that use each version, without this one.

    A process uses a version if it has mapped a file of it. Other users' processes are seen by root only.
    """
    found: dict[Path, list[Process]] = {version: [] for version in where.versions()}
    for process in psutil.process_iter(["username"]):
        if process.pid == os.getpid():
            continue
        maps = _maps(process.pid)
        for version, processes in found.items():
            if f" {version}/" in maps:
                processes.append(Process(process.pid, process.info["username"] or "?"))
    return found


def _maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:  # it has ended, or is another user's
        return ""


def sweep(where: Places) -> dict[Path, list[str]]:
    """Deletes the older versions that no process uses. Returns those that stay, with their processes."""
    kept = {}
    now, used = where.now(), users(where)
    own = _maps(os.getpid())
    for version in where.versions():
        if version == now:
            continue
        who = [str(process) for process in used[version]]
        who += ["this command"] if f" {version}/" in own else []
        if who:
            kept[version] = who
        else:
            _delete(version)
    return kept


def _delete(version: Path) -> None:
    # Without this file the rest is not a version any more, also if the deletion is interrupted.
    (version / "installed.json").unlink(missing_ok=True)
    shutil.rmtree(version, ignore_errors=True)


# -- status and remove -----------------------------------------------------------------------------


def status(*, prefix: str | None = None, root: str | None = None) -> str:
    """What is installed, which process uses it, and how the keeper runs."""
    where = places(prefix, root)
    now = where.now()
    if now is None:
        return f"Nothing is installed in {where.prefix}.  Install:  gpu box install"
    return "\n".join(f"{name:10}{text}" for name, text in _rows(where, now))


def _rows(where: Places, now: Path) -> Iterator[tuple[str, str]]:
    used, made = users(where), read_made(where)
    for version in sorted(where.versions(), key=lambda path: path != now):
        who = used[version]
        by = f"used by {', '.join(map(str, who))}" if who else "used by no process that is seen"
        of = f", Python {', '.join(_pythons_of(version))}" if version == now else ", older"
        yield "version", f"{version.name}{of}; {by}"
    is_loaded = bool(autoload.parts(where.block)[1])
    yield (
        "kernels",
        f"{where.block} {'loads it' if is_loaded else 'does not load it:  gpu box install'}",
    )
    is_linked = _prefix_of(where.command) == where.prefix
    yield "command", f"{where.command}{'' if is_linked else ' is missing:  gpu box install'}"
    if not made.ledger:
        yield "ledger", f"the one in {where.config}, which has no keeper here"
        return
    ledger = Path(made.ledger)
    runs = "its keeper runs" if answers(ledger / boot_id()) else "its keeper does not answer"
    try:
        group = group_name(ledger)
        members = ", ".join(grp.getgrnam(group).gr_mem) or "nobody yet"
    except (OSError, KeyError):  # closed to this user, or a group without a name
        yield "ledger", f"{ledger}; {runs}"
        return
    yield "ledger", f"{ledger}; {runs}; group {group}: {members}"


def remove(
    *, prefix: str | None = None, root: str | None = None, dry_run: bool = False
) -> Outcome | str:
    """Removes the installation. What a running process uses stays until the next one. Raises NotAllowed, GpuError."""
    where = places(prefix, root)
    if not root and os.geteuid() != 0:
        raise _not_root("remove")
    made = read_made(where)
    if not where.made.exists() and not autoload.parts(where.block)[1]:
        return Outcome("box", "", True, f"nothing is installed in {where.prefix}")
    if dry_run:
        return _removal(where, made)
    # It shows the Outcome, and this command may be a part of what is deleted.
    importlib.import_module("gpu_runtime.rendering.render")
    try:
        with _alone(where):
            autoload.write_block(where.block, "")
            still = _still_used(where, made)
            if still:
                sweep(where)
                return Outcome(
                    "box",
                    "",
                    False,
                    f"new kernels do not load gpu-console any more, and its files stay for those that "
                    f"run: {', '.join(map(str, still))}. Once they have ended, type again:  gpu box remove",
                )
            left = _remove_rest(where, made)
    except OSError as error:
        raise GpuError(f"{error.filename or where.prefix} cannot be removed: {error}") from error
    return Outcome("box", "", True, f"gpu-console is removed from {where.prefix}{left}")


def _still_used(where: Places, made: Made) -> list[Process]:
    """The processes that use the installation or its ledger, except its keeper and this process."""
    found = {process for processes in users(where).values() for process in processes}
    if made.ledger:
        ledger = Path(made.ledger)
        keepers = {process.pid for process in setup.keepers(ledger)}
        found = {process for process in found if process.pid not in keepers}
    if made.made_ledger:
        peek = KeeperPeek(ledger / boot_id())
        living, book = set(peek.living()), peek.look()
        owners = [section.owner for section in book.sections.values()] if book else []
        found |= {Process(owner.pid, owner.user) for owner in owners if owner.id in living}
    return sorted(process for process in found if process.pid != os.getpid())


def _remove_rest(where: Places, made: Made) -> str:
    """Removes all that is left of an installation. Returns what stays, as the end of a sentence."""
    left = ""
    ledger = Path(made.ledger) if made.ledger else None
    if ledger is not None:
        setup.end_service(ledger, where.root)
        if made.made_ledger:
            setup.forget(ledger, str(where.config))
            if ledger.exists():
                shutil.rmtree(ledger)
        elif (ledger / setup.MARK).exists():
            group = group_name(ledger)
            left = (
                f"; {ledger} was there before and stays, without its keeper.\n"
                f"  Start it:  gpu ledger init --group {group} {ledger}"
            )
    if _prefix_of(where.command) == where.prefix:
        where.command.unlink()
    where.current.unlink(missing_ok=True)
    for version in where.versions():
        _delete(version)
    where.made.unlink(missing_ok=True)
    for directory in reversed(made.directories):
        _remove_empty(directory)
    return left


def _removal(where: Places, made: Made) -> str:
    """The paths that `remove` would delete."""
    paths = [where.block, where.command, *where.versions(), where.current, where.made]
    if made.ledger:
        ledger = Path(made.ledger)
        paths += [*setup.unit_files(ledger, where.root), setup.cron_file(where.root)]
        paths += [where.config, ledger] if made.made_ledger else []
    lines = [f"  {path}" for path in paths if os.path.lexists(path)]
    return "\n".join(["Nothing was removed. These paths would be, or our lines in them:", *lines])
