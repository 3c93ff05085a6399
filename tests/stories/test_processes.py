"""A real kernel is killed, stopped or restarted; its memory, and the next holder's. The keeper and Redis."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpu_runtime import Busy, Runtime
from gpu_runtime.units import GIB
from tests import forked
from tests.clock import PATIENCE, finished, scaled
from tests.owner.conftest import claims, fakes, where
from tests.redis_server import RedisServer, redis_server

DEVICES = "sim:24GiB,host:64GiB"


class Kernel:
    """Another process with a runtime. It runs commands line by line."""

    def __init__(self, ledger: str, devices: str = DEVICES) -> None:
        program = textwrap.dedent(f"""
            import sys
            from gpu_runtime import Runtime
            rt = Runtime(devices={devices!r}, ledger={ledger!r}, eviction_grace_seconds=0)
            print("ready", flush=True)
            for line in sys.stdin:
                try:
                    exec(line, globals())
                    print("done", flush=True)
                except BaseException as error:
                    print(f"{{type(error).__name__}}: {{error}}".splitlines()[0], flush=True)
        """)
        self.process = forked.RUNTIME.start(program)
        assert self._answer() == "ready"

    def _answer(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def tell(self, line: str) -> str:
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._answer()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)


@pytest.fixture(scope="session")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(params=["keeper", "redis"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return (
        request.getfixturevalue("redis").fresh()
        if request.param == "redis"
        else f"keeper://{tmp_path}/ledger"
    )


@pytest.fixture
def kernel(ledger: str) -> Iterator[Callable[[], Kernel]]:
    made: list[Kernel] = []

    def make() -> Kernel:
        made.append(Kernel(ledger))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture
def here(ledger: str) -> Iterator[Runtime]:
    rt = Runtime(devices=DEVICES, ledger=ledger, eviction_grace_seconds=0)
    yield rt
    rt.close()


def test_a_killed_kernel_leaves_nothing_behind(kernel, here):
    other = kernel()
    assert (
        other.tell(
            "rt.register('qwen', backend='fake', size='14GiB'); u = rt.use('qwen'); u.__enter__()"
        )
        == "done"
    )
    assert claims(here)["sim:0"] == 14 * GIB
    other.signal(signal.SIGKILL)
    other.process.wait(PATIENCE)
    fakes(here, llama="14GiB")
    with here.use("llama", timeout=PATIENCE):
        assert claims(here) == {"sim:0": 14 * GIB}
    assert here.why("qwen")[0].action == "reaped"


def test_a_restarted_kernel_finds_the_card_empty(kernel, here):
    other = kernel()
    assert (
        other.tell("rt.register('qwen', backend='fake', size='14GiB'); rt.preload('qwen')")
        == "done"
    )
    other.process.stdin.close()  # an ordinary end of the process
    other.process.wait(PATIENCE)
    assert claims(here) == {}


def test_an_idle_model_of_another_kernel_makes_room_and_comes_back(kernel, here):
    other = kernel()
    assert (
        other.tell("rt.register('qwen', backend='fake', size='14GiB'); rt.preload('qwen')")
        == "done"
    )
    fakes(here, llama="14GiB")
    with here.use("llama", timeout=PATIENCE):
        assert where(here) == {"llama": "sim:0", "qwen": "host"}
    assert other.tell(f"rt.preload('qwen', timeout={PATIENCE})") == "done"
    assert where(here) == {"llama": "host", "qwen": "sim:0"}


def test_a_model_in_use_in_another_kernel_is_waited_for(kernel, here):
    other = kernel()
    assert (
        other.tell(
            "rt.register('qwen', backend='fake', size='14GiB'); u = rt.use('qwen'); u.__enter__()"
        )
        == "done"
    )
    fakes(here, llama="14GiB")
    with (
        pytest.raises(Busy, match=f"qwen .* is in use by pid {other.process.pid}"),
        here.use("llama", timeout=scaled(1.5)),
    ):
        pass
    assert other.tell("type(u).__exit__(u, None, None, None)") == "done"
    with here.use("llama", timeout=PATIENCE):
        assert where(here)["qwen"] == "host"


def test_a_stopped_kernel_is_not_dead(kernel, here):
    """It does not answer and keeps its memory, until the operating system confirms a death."""
    other = kernel()
    assert (
        other.tell("rt.register('qwen', backend='fake', size='14GiB'); rt.preload('qwen')")
        == "done"
    )
    other.signal(signal.SIGSTOP)
    fakes(here, llama="14GiB")
    with (
        pytest.raises(Busy, match=f"(?s)has not answered for.*kill -CONT {other.process.pid}"),
        here.use("llama", timeout=scaled(3)),
    ):
        pass
    assert claims(here)["sim:0"] == 14 * GIB
    other.signal(signal.SIGCONT)
    with here.use("llama", timeout=PATIENCE):
        assert where(here)["qwen"] == "host"


def test_a_kernel_killed_in_the_middle_of_a_load_gives_its_reservation_back(kernel, here):
    other = kernel()
    other.process.stdin.write(
        "rt.register('qwen', lambda verb: __import__('os').kill(__import__('os').getpid(), 9), "
        "backend='fake', size='14GiB'); rt.preload('qwen')\n"
    )
    other.process.stdin.flush()
    other.process.wait(PATIENCE)
    fakes(here, llama="20GiB")
    with here.use("llama", timeout=PATIENCE):
        assert claims(here) == {"sim:0": 20 * GIB}


def test_the_command_line_sees_and_steers_what_kernels_hold(kernel, here, ledger):
    other = kernel()
    assert (
        other.tell("rt.register('qwen', backend='fake', size='14GiB'); rt.preload('qwen')")
        == "done"
    )

    def gpu(*words: str) -> subprocess.CompletedProcess[str]:
        return finished(
            [sys.executable, "-m", "gpu_runtime.cli", *words],
            env={**os.environ, "GPU_LEDGER": ledger, "GPU_DEVICES": DEVICES},
        )

    shown = gpu("status")
    assert (
        shown.returncode == 0 and "qwen" in shown.stdout and str(other.process.pid) in shown.stdout
    ), shown
    assert gpu("evict", f"qwen@{other.process.pid}").returncode == 0
    assert where(here) == {"qwen": "host"}
    assert gpu("preload", "qwen").returncode == 0
    assert where(here) == {"qwen": "sim:0"}
    unknown = gpu("evict", "nobody")
    assert (
        unknown.returncode == 1 and "nobody" in unknown.stderr and "Traceback" not in unknown.stderr
    )
