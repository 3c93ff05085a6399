"""A crowd works while its keeper and the keeper's directory are attacked: no lease lost, no byte granted twice."""

from __future__ import annotations

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
from tests.stories.crowd import Report, Warden, crowd


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
        with contextlib.suppress(
            OSError
        ):  # the keeper is being replaced: tried again a moment later
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


def strike(
    directory: Path, *, kernels: int, seconds: float, seed: int, calm: float
) -> tuple[Report, Counter[str]]:
    (directory / "slots").mkdir()
    with crowd(
        f"keeper://{directory}/ledger",
        directory / "slots",
        kernels=kernels,
        seed=seed,
        calm=calm,
        kind=Vandal,
    ) as vandal:
        report = vandal.run(seconds)
    for opened in vandal.idle:
        opened.close()
    print(report, dict(vandal.struck))
    assert not report.wrong, "\n".join(report.wrong)
    return report, vandal.struck


def test_a_crowd_outlives_attacks_on_its_keeper(tmp_path):
    report, struck = strike(tmp_path, kernels=6, seconds=8, seed=1, calm=0.05)
    assert len(struck) == 7 and struck.total() > 10
    assert report.served > 50 and report.looks > 100


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(20, 24))
def test_a_crowd_outlives_a_thousand_faults(tmp_path, seed):
    report, struck = strike(
        tmp_path, kernels=(4, 8, 16, 32)[seed % 4], seconds=60, seed=seed, calm=0.08
    )
    soak.add("keeper", attacks=struck.total(), blocks_served_under_attack=report.served)
    assert struck.total() > 250 and report.served > 50
