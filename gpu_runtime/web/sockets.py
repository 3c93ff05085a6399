"""A Unix socket that only its owner can reach, and a free TCP port.

A socket is only as private as the directories above it: a user who may rename one of these
directories can replace the socket.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

from ..errors import GpuError
from ..private_paths import weak_step

MAX_PATH_BYTES = 107  # the longest path of a Unix socket on Linux


def prepare(path: str) -> Path:
    """Prepares the place for a socket, and returns the absolute `path`.

    A missing directory is made with mode 0700, and the socket of a server that has ended is
    removed. Raises GpuError if another user can enter the directory, or if `path` is the socket of
    a running server or no socket.
    """
    place = Path(os.path.abspath(path))
    length = len(os.fsencode(place))
    if length > MAX_PATH_BYTES:
        raise GpuError(
            f"{place} is too long for a socket: it has {length} bytes; {MAX_PATH_BYTES} are the most."
        )
    try:
        place.parent.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise GpuError(f"{place.parent} cannot be made ({error.strerror}).") from None
    _check_directories(place.parent)
    _remove_old_socket(place)
    return place


def free_port(host: str, port: int, tries: int, command: str = "gpu console") -> int:
    """The first free port of `host` among `tries` ports, beginning with `port`. If `port` is 0, any
    free port of `host`.

    Raises GpuError if none of these ports is free, or if this process cannot listen on `host`. The error advises the
    user to type `command` with another port.
    """
    last_error: OSError | None = None
    for candidate in range(port, port + tries):
        try:
            return _try_to_bind(host, candidate)
        except OSError as error:
            last_error = error
            if error.errno != errno.EADDRINUSE:
                break
    assert last_error is not None
    if last_error.errno == errno.EADDRINUSE:
        raise GpuError(f"port {port} of {host} is in use. Take another:  {command} --port N")
    raise GpuError(f"nothing can listen on {host}, port {port} ({last_error.strerror}).")


def _try_to_bind(host: str, port: int) -> int:
    """Binds `port` and releases it. Returns the port; if `port` is 0, the system chooses one.
    Raises OSError.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        trial.bind(address)
        return int(trial.getsockname()[1])


def _check_directories(directory: Path) -> None:
    """Raises GpuError if another user can enter `directory`, or can replace a directory above it."""
    about = os.stat(directory)
    if about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise GpuError(
            f"a socket needs a directory that is yours alone (mode 0700), and {directory} is not. "
            f"Make one:  mkdir -m 700 DIR      then:  --socket DIR/socket"
        )
    weak = weak_step(directory)
    if weak:
        raise GpuError(f"a socket in {directory} could be replaced by others: {weak}.")


def _remove_old_socket(place: Path) -> None:
    """Removes the socket at `place`. Raises GpuError if a server listens on it, or if `place` is no
    socket.
    """
    try:
        about = os.lstat(place)
    except FileNotFoundError:  # nothing to remove
        return
    if not stat.S_ISSOCK(about.st_mode):
        raise GpuError(f"{place} exists and is no socket; it is left as it is.")
    if _server_listens(place):
        raise GpuError(f"a server listens on {place} already.")
    place.unlink(missing_ok=True)


def _server_listens(place: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as trial:
        trial.settimeout(1.0)
        try:
            trial.connect(os.fspath(place))
        except (ConnectionRefusedError, FileNotFoundError):  # its server has ended
            return False
        except OSError:
            pass  # a server listens and is busy
    return True
