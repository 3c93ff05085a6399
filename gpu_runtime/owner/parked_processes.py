"""Notes on the processes that the driver parked: the bytes of each process on each card.

A process is parked if the driver has moved its device memory to RAM. The driver does not report how
much memory a parked process needs for its return. So each parked process has a file in a directory
of this user. The file is valid until the machine boots again.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..errors import GpuError
from ..facts import Value
from ..ledgers.access import local_state
from ..ledgers.liveness import boot_id
from ..private_paths import make_directory, replace_file, weak_step

MOST_BYTES = 1 << 16


class ParkedProcess(Value):
    """A process that was parked, and the bytes that it held."""

    pid: int
    started: int  # clock ticks after the boot: a pid is used again
    cards: dict[str, int]  # UUID -> bytes


def note(process: ParkedProcess) -> None:
    """Stores the note on `process`. Raises GpuError on failure: unparking needs the note."""
    path = _path(process.pid, process.started)
    try:
        make_directory(path.parent)
        if weak := weak_step(path.parent):
            raise GpuError(f"the notes on parked processes are not private: {weak}.")
        replace_file(path, msgspec.json.encode(process))
    except OSError as error:
        raise GpuError(f"{path} cannot be written ({error.strerror}).") from None


def noted(pid: int, started: int) -> ParkedProcess | None:
    """The note on the process `pid` that began at `started`. None if this user has no such note."""
    path = _path(pid, started)
    try:
        if weak_step(path.parent) or path.stat().st_size > MOST_BYTES:
            return None
        return msgspec.json.decode(path.read_bytes(), type=ParkedProcess)
    except (OSError, msgspec.MsgspecError):  # there is no note, or it cannot be read
        return None


def forget(pid: int, started: int) -> None:
    """Removes the note on the process `pid` that began at `started`, if there is a note."""
    _path(pid, started).unlink(missing_ok=True)


def _path(pid: int, started: int) -> Path:
    return local_state() / "parked" / boot_id() / f"{pid}-{started}.json"
