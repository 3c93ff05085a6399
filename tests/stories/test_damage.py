"""A crowd works while its keeper and the keeper's directory are attacked: no lease lost, no byte granted twice."""

import contextlib
import os
import shutil
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_runtime.errors import LedgerUnavailable
from gpu_runtime.ledgers.keeper.ledger import KeeperPeek
from gpu_runtime.ledgers.keeper.wire import SOCKET, socket_path
from gpu_runtime.ledgers.liveness import boot_id
from tests import soak

from .crowd import Warden, crowd


class Vandal(Warden):
    """Attacks the keeper at the moments at which the Warden class would kill a process."""

    forgives = (LedgerUnavailable,)
    STOPS = (0.01, 0.1, 0.5)

    def __init__(self, url: str, directory: Path, kernels: int, seed: int, calm: float) -> None:
        super().__init__(url, directory, kernels, seed, calm)
        self.home = Path(url.removeprefix("keeper://")) / boot_id()
        self.struck: Counter[str] = Counter()
        self.idle: list[socket.socket] = []
        self.next: list[Callable[[], object]] = []

    def disturb(self) -> None:
        if not self.next:
            self.next = [
                self.keeper_killed,
                self.keeper_stopped,
                self.socket_removed,
                self.socket_replaced,
                self.directory_removed,
                self.garbage_sent,
                self.half_a_frame_sent,
            ]
            self.dice.shuffle(self.next)
        # The keeper may be being replaced: tried again a moment later.
        with contextlib.suppress(OSError):
            self.next[-1]()
            self.struck[self.next.pop().__name__] += 1

    def keeper(self) -> int:
        """The process that keeps the book now. Raises OSError."""
        peek = KeeperPeek(self.home)
        if peek.look() is None:
            raise OSError("no keeper answers")
        return peek._wire.keeper_pid

    def keeper_killed(self) -> None:
        os.kill(self.keeper(), signal.SIGKILL)

    def keeper_stopped(self) -> None:
        pid = self.keeper()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self.dice.choice(self.STOPS))
        os.kill(pid, signal.SIGCONT)

    def socket_removed(self) -> None:
        (self.home / SOCKET).unlink()

    def socket_replaced(self) -> None:
        (self.home / SOCKET).unlink()
        (self.home / SOCKET).write_text("no socket")

    def directory_removed(self) -> None:
        shutil.rmtree(self.home)

    def garbage_sent(self) -> None:
        with contextlib.closing(self.connected()) as opened:
            opened.sendall(self.dice.randbytes(self.dice.randrange(1, 4000)))

    def half_a_frame_sent(self) -> None:
        self.idle.append(self.connected())
        self.idle[-1].sendall(b"\x00\x10\x00\x00half")
        if len(self.idle) > 20:
            self.idle.pop(0).close()

    def connected(self) -> socket.socket:
        opened = socket.socket(socket.AF_UNIX)
        with socket_path(self.home, SOCKET) as path:
            opened.connect(path)
        return opened

    def end(self) -> None:
        super().end()
        for opened in self.idle:
            opened.close()


def test_a_crowd_outlives_attacks_on_its_keeper(keeper, tmp_path):
    def enough(vandal):
        struck = vandal.struck
        return (
            len(struck) == 7 and struck.total() > 10 and vandal.served > 50 and vandal.looks > 100
        )

    given = {"kernels": 6, "seconds": 8, "seed": 1, "calm": 0.05}
    crowd(keeper, tmp_path, enough, kind=Vandal, **given)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(20, 24))
def test_a_crowd_outlives_a_thousand_faults(keeper, tmp_path, seed):
    def enough(vandal):
        return vandal.struck.total() > 250 and vandal.served > 50

    given = {"kernels": (4, 8, 16, 32)[seed % 4], "seconds": 60, "seed": seed, "calm": 0.08}
    vandal = crowd(keeper, tmp_path, enough, kind=Vandal, **given)
    soak.add("keeper", attacks=vandal.struck.total(), blocks_served_under_attack=vandal.served)
