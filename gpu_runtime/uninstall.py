"""What gpu-console has written for this user and this environment, and its removal: `gpu uninstall`.

The user's own files stay, also those beside ours: tasks, and models of the catalogue that a person
wrote. What root has set up for all users is removed by `gpu box remove`.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from . import autoload
from .catalog.files import OURS
from .errors import GpuError
from .facts import Outcome
from .files import config_home, fallback_home, state_home
from .ledgers import host_config, reader
from .ledgers.keeper.ledger import answers
from .ledgers.keeper.server import LINGER_SECONDS
from .ledgers.liveness import boot_id
from .units import show_bytes

CONTENTS = {
    "ledger": "ledgers, with their history and journal",
    "catalog": "the catalogue",
    "engines": "logs of engines",
    "cells.json": "what cells took the last time",
    "serving.sqlite": "usage and jobs of gpu serve",
}


class Written(NamedTuple):
    """A file or a directory that gpu-console wrote."""

    path: Path
    what: str

    @property
    def bytes(self) -> int:
        """The bytes of its files."""
        files = [self.path, *self.path.rglob("*")] if self.path.is_dir() else [self.path]
        return sum(file.lstat().st_size for file in files if not file.is_dir())


def uninstall(yes: bool = False, prefix: str = "") -> Outcome | str:
    """Lists what gpu-console wrote for this user. If `yes` is true, removes it, and returns the outcome.

    The block of `gpu autoload` is that of the environment at `prefix`, by default this one. Another
    one may have lost the package already.

    Raises GpuError if a process of this user still uses a ledger, or if a file cannot be removed.
    """
    environment = Path(prefix or sys.prefix) / "etc" / "ipython" / autoload.AUTOLOAD_FILE
    found = list(written())
    if "gpu autoload" in autoload.parts(environment)[1]:  # that of gpu box stays
        found.append(Written(environment, "the lines of gpu autoload in it"))
    if not found:
        return _outcome(f"nothing of gpu-console is here. {_rest()}")
    if not yes:
        lines = [f"  {entry.path}  ({entry.what}, {show_bytes(entry.bytes)})" for entry in found]
        return "\n".join(["This is removed by  gpu uninstall --yes", *lines, _rest()])
    _require_unused()
    try:
        for entry in found:
            _remove(entry.path)
        for directory in (*_states(), config_home()):
            if directory.is_dir() and not directory.is_symlink() and not any(directory.iterdir()):
                directory.rmdir()
    except OSError as error:
        raise GpuError(f"{error.filename} cannot be removed: {error.strerror}") from error
    return _outcome(f"{', '.join(str(entry.path) for entry in found)}: removed. {_rest()}")


def _outcome(because: str) -> Outcome:
    return Outcome(verb="uninstall", name="", done=True, because=because, bytes=0)


def _remove(path: Path) -> None:
    if path.name == autoload.AUTOLOAD_FILE:
        autoload.write_block(path, "")
    elif path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def written() -> Iterator[Written]:
    """What gpu-console wrote for this user. Files beside it that a person wrote are left out."""
    for directory in _states():
        for path in sorted(directory.iterdir()):
            inside = sorted(path.iterdir()) if path.name == "catalog" and path.is_dir() else []
            own = [file for file in inside if file.stem == Path(OURS).stem]
            for entry in own if len(own) < len(inside) else [path]:
                yield Written(entry, CONTENTS.get(path.name, "state"))
    for name in ("keys.json", ".keys.json.lock"):
        if (config_home() / name).exists():
            yield Written(config_home() / name, "keys of programs")


def _states() -> list[Path]:
    """The state directories that exist, and that this user has made."""
    fallback = fallback_home()
    found = []
    for directory in dict.fromkeys((state_home(), fallback)):  # without a home they are one
        try:
            # Another user could have made the fallback, also as a link. A link in the home is the user's.
            status = directory.lstat() if directory == fallback else directory.stat()
        except OSError:  # it does not exist, or is closed to this user
            continue
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
            found.append(directory)
    return found


def _rest() -> str:
    """What stays, and the command that removes the package."""
    ours = {entry.path for entry in written()}
    own = [path for place in (state_home() / "catalog", config_home()) for path in place.glob("*")]
    kept = ", ".join(sorted(str(path) for path in own if not {path, path.parent} & ours))
    stays = f"What you wrote stays: {kept}. " if kept else ""
    if Path(host_config.CONFIG_FILE).exists():
        stays += f"{host_config.CONFIG_FILE} is for all users: as root, gpu box remove. "
    return f"{stays}The package:  pip uninstall gpu-console"


def _require_unused() -> None:
    """Waits until the keepers of this user's ledgers have ended.

    Raises GpuError if one is in use, or if the driver has parked a process (`gpu park --checkpoint`).
    """
    notes = [note for state in _states() for note in state.glob(f"parked/{boot_id()}/*.json")]
    for pid in (note.stem.partition("-")[0] for note in notes):
        if psutil.pid_exists(int(pid)):
            raise GpuError(
                f"the memory of process {pid} is parked by the driver, and its note is here.\n"
                f"  Bring it back first:  gpu unpark --checkpoint {pid}"
            )
    names = sorted(_users())
    if names:
        raise GpuError(
            f"gpu-console is in use by {', '.join(names)}.\n"
            f"  Shut these notebooks and programs down, and type it again."
        )
    ledgers = [path for state in _states() for path in state.glob(f"ledger/**/{boot_id()}")]
    end = time.monotonic() + 4 * LINGER_SECONDS  # a keeper ends some seconds after its last owner
    while any(map(answers, ledgers)):
        if time.monotonic() > end:
            raise GpuError("the process that keeps the ledger does not end: type it again")
        time.sleep(0.1)


def _users() -> Iterator[str]:
    """This user's other processes that have a ledger open, as `train.ipynb (pid 4121)`."""
    for ledger, pids in reader.of_processes(reader.processes_of_this_user()).items():
        if not any(ledger.directory.is_relative_to(state) for state in _states()):
            continue
        book = reader.book_of(ledger)
        owners = [section.owner for section in book.sections.values()] if book else []
        labels = {owner.pid: owner.label for owner in owners}
        yield from {labels.get(pid, f"pid {pid}") for pid in pids}
