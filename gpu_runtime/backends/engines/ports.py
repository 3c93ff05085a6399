"""Ports for engine servers: each server claims one from a range, and no claim outlives its server.

A port is claimed by a socket in Linux's abstract namespace. The kernel lets only one process hold a name,
in the same network namespace in which ports are counted, and frees it when the last holder is gone. The
engine's guard inherits the socket, so the claim lasts as long as the engine.
"""

from __future__ import annotations

import errno
import socket

from ...errors import BadSetting, LoadFailed

_NAME = "\0gpu-console-port-{}"


class Port:
    """A claimed port."""

    def __init__(self, number: int, claim: socket.socket) -> None:
        """The port `number`, held by the socket `claim`."""
        self.number, self._claim = number, claim

    def fileno(self) -> int:
        """The file descriptor of the claim, for a child process to inherit."""
        return self._claim.fileno()

    def close(self) -> None:
        """Gives up this process's claim. A child that inherited it still holds the port."""
        self._claim.close()


def ports(text: str) -> range:
    """The range of ports that the setting `text` names. Raises BadSetting.

    >>> ports("8300-8302")
    range(8300, 8303)
    """
    first, _, last = text.replace(" ", "").partition("-")
    numbers = [int(word) for word in (first, last or first) if word.isdigit()]
    if len(numbers) != 2 or not 1024 <= numbers[0] <= numbers[1] <= 65535:
        raise BadSetting(
            "GPU_ENGINE_PORTS", text, "a range of ports from 1024 to 65535, such as 8300-8399"
        )
    return range(numbers[0], numbers[1] + 1)


def claim(among: range, name: str, but: frozenset[int] = frozenset()) -> Port:
    """The first port `among` these that no engine has claimed and no process listens on.

    Ports in `but` are skipped. Raises LoadFailed for the model `name` if no port is left.
    """
    for number in among:
        if number in but:
            continue
        held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            held.bind(_NAME.format(number))
            if not _listened_on(number):
                return Port(number, held)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                held.close()
                raise
        held.close()
    raise LoadFailed(
        f"{name} cannot be started: all ports from {among.start} to {among.stop - 1} are taken.\n"
        f"  Give engines more:  GPU_ENGINE_PORTS={among.start}-{among.stop + 99}",
        name=name,
        source="",
    )


def _listened_on(number: int) -> bool:
    """Whether a process that makes no claims already uses the port."""
    with socket.socket() as trial:
        # As servers do: without it, connections that linger after a close would count as a user.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", number))
        except OSError:
            return True
    return False
