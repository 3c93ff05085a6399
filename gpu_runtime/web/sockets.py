"""A Unix socket that only its owner can reach, and a TCP port that is really ours.

A socket is as private as the directories above it: whoever may rename one of them may put a socket of their own there.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

from gpu_runtime.errors import GpuError

LONGEST = 107  # bytes of a Unix socket's address, on Linux


def prepare(path: str) -> Path:
    """The path, free to be bound: its directory is this user's alone, and no server listens there.

    A directory that is missing is made, with mode 0700. A socket that a server left behind is removed. Raises GpuError.
    """
    place = Path(os.path.abspath(path))
    if len(os.fsencode(place)) > LONGEST:
        raise GpuError(
            f"{place} is too long for a socket: {len(os.fsencode(place))} bytes; {LONGEST} are the most."
        )
    try:
        place.parent.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise GpuError(f"{place.parent} cannot be made ({error.strerror}).") from None
    _check_directories(place.parent)
    _make_room(place)
    return place


def free_port(host: str, port: int, tries: int) -> int:
    """The first port that can be listened on, from that one. Raises GpuError where none of so many can."""
    last: OSError | None = None
    for candidate in range(port, port + tries):
        try:
            family, kind, _, _, address = socket.getaddrinfo(
                host, candidate, type=socket.SOCK_STREAM
            )[0]
            with socket.socket(family, kind) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind(address)
            return candidate
        except OSError as error:
            last = error
            if error.errno != errno.EADDRINUSE:
                break
    assert last is not None
    if last.errno == errno.EADDRINUSE:
        raise GpuError(f"port {port} of {host} is in use. Take another:  gpu console --port N")
    raise GpuError(f"nothing can listen on {host}, port {port} ({last.strerror}).")


def _check_directories(directory: Path) -> None:
    """As OpenSSH looks at the way to a key: each step is root's or ours, and nobody else may change what lies in it."""
    real = Path(os.path.realpath(directory))
    for step in (real, *real.parents):
        about = os.stat(step)
        shared = about.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not about.st_mode & stat.S_ISVTX
        if about.st_uid not in (0, os.getuid()) or (shared and step != real):
            raise GpuError(
                f"a socket in {directory} could be replaced by others: {step} is not yours alone to change."
            )
    about = os.stat(real)
    if about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise GpuError(
            f"a socket needs a directory that is yours alone (mode 0700), and {directory} is not. "
            f"Make one:  mkdir -m 700 DIR      then:  gpu console --socket DIR/console"
        )


def _make_room(place: Path) -> None:
    try:
        about = os.lstat(place)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(about.st_mode):
        raise GpuError(f"{place} exists and is no socket; it is left as it is.")
    with socket.socket(socket.AF_UNIX) as trial:
        trial.settimeout(1.0)
        try:
            trial.connect(os.fspath(place))
        except (ConnectionRefusedError, FileNotFoundError):
            place.unlink(missing_ok=True)  # whoever listened there is gone
            return
        except OSError:
            pass  # somebody listens, and is busy
    raise GpuError(f"a server listens on {place} already.")
