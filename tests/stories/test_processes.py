"""A real kernel is killed, stopped or restarted; its memory, and the next holder's. The keeper and Redis."""

import os
import signal
import sys

from gpu_runtime.units import GIB
from tests.clock import PATIENCE, finished, until
from tests.owner.conftest import alongside, claims, fakes, where

from .kernels import DEVICES, LET_GO, LOADED, USED, refused_until


def test_a_killed_kernel_leaves_nothing_behind(other, here):
    other.do(LOADED, USED)
    assert claims(here)["sim:0"] == 14 * GIB
    other.end()
    fakes(here, llama="14GiB")
    with here.use("llama", timeout=PATIENCE):
        assert claims(here) == {"sim:0": 14 * GIB}
    assert here.why("qwen")[0].action == "reaped"


def test_a_restarted_kernel_finds_the_card_empty(other, here):
    other.do(LOADED)
    other.process.stdin.close()  # an ordinary end of the process
    other.process.wait(PATIENCE)
    assert claims(here) == {}


def test_an_idle_model_of_another_kernel_makes_room_and_comes_back(other, here):
    other.do(LOADED)
    fakes(here, llama="14GiB")
    with here.use("llama", timeout=PATIENCE):
        assert where(here) == {"llama": "sim:0", "qwen": "host"}
    other.do(f"rt.preload('qwen', timeout={PATIENCE})")
    assert where(here) == {"llama": "host", "qwen": "sim:0"}


def test_a_model_in_use_in_another_kernel_is_waited_for(other, here):
    other.do(LOADED, USED)
    fakes(here, llama="14GiB")
    refused_until(here, "llama", f"qwen .* is in use by pid {other.process.pid}")
    other.do(LET_GO)
    with here.use("llama", timeout=PATIENCE):
        assert where(here)["qwen"] == "host"


def test_a_stopped_kernel_is_not_dead(other, here):
    """It does not answer and keeps its memory, until the operating system confirms a death."""
    other.do(LOADED)
    other.signal(signal.SIGSTOP)
    fakes(here, llama="14GiB")
    told = [""]
    here._session.on_wait = lambda name, wait: told.append(wait.because if wait else "")
    with alongside(lambda: here.preload("llama", timeout=PATIENCE)):
        until(
            lambda: "has not answered for" in told[-1] and f"-CONT {other.process.pid}" in told[-1]
        )
        assert claims(here)["sim:0"] == 14 * GIB
        other.signal(signal.SIGCONT)
    assert where(here) == {"llama": "sim:0", "qwen": "host"}


def test_a_kernel_killed_in_the_middle_of_a_load_gives_its_reservation_back(other, here):
    dies = "lambda verb: os.kill(os.getpid(), 9)"
    other.do("import os", f"rt.register('qwen', {dies}, backend='fake', size='14GiB')")
    other.send("rt.preload('qwen')")
    other.process.wait(PATIENCE)
    fakes(here, llama="20GiB")
    with here.use("llama", timeout=PATIENCE):
        assert claims(here) == {"sim:0": 20 * GIB}


def test_the_command_line_sees_and_steers_what_kernels_hold(other, here, ledger):
    other.do(LOADED)

    def gpu(code: int, *words: str) -> str:
        command = [sys.executable, "-m", "gpu_runtime.cli", *words]
        done = finished(command, env=os.environ | {"GPU_LEDGER": ledger, "GPU_DEVICES": DEVICES})
        assert done.returncode == code and "Traceback" not in done.stderr, done
        return done.stdout + done.stderr

    shown = gpu(0, "status")
    assert "qwen" in shown and str(other.process.pid) in shown
    gpu(0, "evict", f"qwen@{other.process.pid}")
    assert where(here) == {"qwen": "host"}
    gpu(0, "preload", "qwen")
    assert where(here) == {"qwen": "sim:0"}
    assert "nobody" in gpu(1, "evict", "nobody")
