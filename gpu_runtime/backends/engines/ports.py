"""Ports for engine servers.

Each server claims a port from a range. Its claim ends with the server.

A claim is a lock on a file in a directory that only this user can enter, so no other user can hold
the claim. A guard process starts each engine. The guard inherits the open file, so the lock lasts
as long as the engine. Engines of two users may choose the same port at the same moment. One of
these engines then cannot listen on the port, and is started again on the next port.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import IO

from ...errors import BadSetting, LoadFailed
from ...ledgers.access import local_state
from ...private_paths import make_directory, weak_step


class Port:
    """A claimed port."""

    def __init__(self, number: int, claim: IO[bytes]) -> None:
        """The port `number`, held by the lock on the file `claim`."""
        self.number, self._claim = number, claim
        self._bound: socket.socket | None = None

    def fileno(self) -> int:
        """The descriptor of the locked file. A child process that inherits it keeps the lock."""
        return self._claim.fileno()

    def bind(self) -> int:
        """The descriptor of a socket bound to the port, which the engine can inherit and listen on.

        No other process can listen on the port any more. Raises OSError if the port is in use.
        """
        # SO_REUSEADDR is not set. If two processes set it, both could bind the port, and the other
        # process could listen first.
        self._bound = socket.socket()
        self._bound.bind(("127.0.0.1", self.number))
        return self._bound.fileno()

    def release_socket(self) -> None:
        """Closes this process's copy of the bound socket, once the engine has inherited it."""
        if self._bound is not None:
            self._bound.close()
            self._bound = None

    def close(self) -> None:
        """Releases this process's claim. A child that inherited the claim still holds the port."""
        self.release_socket()
        self._claim.close()


def ports(text: str) -> range:
    """The range of ports that the setting `text` names. Raises BadSetting.

    >>> ports("8300-8302")
    range(8300, 8303)
    """
    first, _, last = text.replace(" ", "").partition("-")
    numbers = [int(word) for word in (first, last or first) if word.isdigit()]
    if len(numbers) != 2 or not 1024 <= numbers[0] <= numbers[1] <= 65535:
        expected = "a range of ports from 1024 to 65535, such as 8300-8399"
        raise BadSetting("GPU_ENGINE_PORTS", text, expected)
    return range(numbers[0], numbers[1] + 1)


def claim(among: range, name: str, but: frozenset[int] = frozenset()) -> Port:
    """The first port of `among` that no engine of this user has claimed and no process listens on.

    Ports in `but` are skipped. `name` is the model, for error messages. Raises LoadFailed if no
    port is left, or if other users can change the directory of the claims.
    """
    directory = _claims_directory(name)
    for number in among:
        if number in but:
            continue
        held = _lock(directory / f"{number}.lock")
        if held is None:
            continue
        if not _listened_on(number):
            return Port(number, held)
        held.close()
    raise LoadFailed(
        f"{name} cannot be started: all ports from {among.start} to {among.stop - 1} are taken.\n"
        f"  Give engines more:  GPU_ENGINE_PORTS={among.start}-{among.stop + 99}",
        name=name,
        source="",
    )


def _claims_directory(name: str) -> Path:
    """The directory of the claims, made with mode 0700. Raises LoadFailed as `claim` does."""
    directory = local_state() / "ports"
    try:
        make_directory(directory)
        weak = weak_step(directory)
    except OSError as error:
        weak = f"{directory} cannot be made ({error.strerror})"
    if weak:
        raise LoadFailed(
            f"{name} cannot be started: ports are claimed in {directory}, and {weak}.\n"
            f"  Name another directory:  XDG_STATE_HOME=DIR",
            name=name,
            source="",
        )
    return directory


def _lock(path: Path) -> IO[bytes] | None:
    """The open file `path` with a lock on it, or None if it is locked already."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    file = open(os.open(path, flags, 0o600), "r+b", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # another process has this port
        file.close()
        return None
    return file


def _listened_on(number: int) -> bool:
    """Whether a process uses the port `number`, with or without a claim."""
    with socket.socket() as trial:
        # Without this option, a port seems to be in use while an old connection of it is closing.
        # Servers set the option too.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", number))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return True
    return False
