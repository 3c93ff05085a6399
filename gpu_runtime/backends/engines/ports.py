"""Ports for engines: one a server, from a range, never two servers on one, and none that stays taken when all has
ended.

A port is claimed by a socket in Linux's abstract namespace: the kernel lets only one process have that name, in the
same network namespace in which ports are counted, and frees it when the last holder is gone. The engine's guard
inherits it, so the claim lasts as long as the engine.
"""

from __future__ import annotations

import errno
import socket

from ...errors import BadSetting, LoadFailed

_NAME = "\0gpu-console-port-{}"


class Port:
    """A claimed port. `close` gives it back, as far as this process is concerned."""

    def __init__(self, number: int, claim: socket.socket) -> None:
        self.number, self._claim = number, claim

    def fileno(self) -> int:
        return self._claim.fileno()

    def close(self) -> None:
        self._claim.close()


def ports(text: str) -> range:
    """The range that a setting names.

    >>> ports("8300-8302")
    range(8300, 8303)

    Raises BadSetting.
    """
    first, _, last = text.replace(" ", "").partition("-")
    numbers = [int(word) for word in (first, last or first) if word.isdigit()]
    if len(numbers) != 2 or not 1024 <= numbers[0] <= numbers[1] <= 65535:
        raise BadSetting(
            "GPU_ENGINE_PORTS", text, "a range of ports from 1024 to 65535, such as 8300-8399"
        )
    return range(numbers[0], numbers[1] + 1)


def claim(among: range, name: str, but: frozenset[int] = frozenset()) -> Port:
    """The first port of the range that no engine has claimed and nobody listens on. Raises LoadFailed: none is left."""
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
    """Whether somebody who asked nobody has the port already."""
    with socket.socket() as trial:
        trial.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as servers do: what lingers does not count
        try:
            trial.bind(("127.0.0.1", number))
        except OSError:
            return True
    return False
