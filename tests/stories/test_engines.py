"""Real kernels with real engines: after any of them dies, no process runs on and no memory stays claimed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import psutil
import pytest

from gpu_runtime import EngineDied, Runtime
from gpu_runtime.owner import registry
from tests import tiny_models
from tests.backends.test_engine_server import alive
from tests.clock import PATIENCE, until
from tests.owner.conftest import claims

pytest.importorskip(
    "llama_cpp", reason="llama-cpp-python is not installed: pip install 'gpu-console[llama]'"
)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The file of a slow model: some milliseconds for each token, so it can be killed during a generation."""
    return tiny_models.gguf_lm(tmp_path_factory.mktemp("gguf") / "slow.gguf", size="24 MiB")


class Kernel:
    """A process that has the model loaded. It runs commands line by line and prints their results."""

    def __init__(self, ledger: str, file: Path) -> None:
        program = textwrap.dedent(f"""
            import signal, sys, threading
            # A shell that starts the tests in the background lets them ignore the stop button.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            from gpu_runtime import Runtime
            from gpu_runtime.owner import registry
            rt = Runtime(devices="sim:256MiB,host:256MiB", ledger={ledger!r})
            rt.register("phi", {str(file)!r})
            loading = threading.Thread(target=rt.preload, args=("phi",))
            loading.start()
            loading.join()
            phi = registry.find(rt._session, "phi").value
            print(phi.pid, flush=True)
            while line := sys.stdin.readline():
                try:
                    exec(line, globals())
                    print("done", flush=True)
                except BaseException as error:
                    print(type(error).__name__, flush=True)
        """)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.worker = int(self.hear())

    def hear(self) -> str:
        return self.process.stdout.readline().strip()

    def say(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()


@pytest.fixture
def ledger(tmp_path):
    return f"keeper://{tmp_path}/ledger"


@pytest.fixture
def kernel(ledger, file):
    made = Kernel(ledger, file)
    yield made
    made.process.kill()
    made.process.wait(PATIENCE)


def test_a_kernel_that_is_killed_takes_its_worker_along_and_its_lease_goes(kernel, ledger):
    """The kernel is killed with SIGKILL during a generation. Its socket closes, and the system signals the worker."""
    kernel.say("phi.create_completion('hello', max_tokens=400)")
    os.kill(kernel.process.pid, signal.SIGKILL)
    until(lambda: not alive(kernel.worker))
    kernel.process.wait(PATIENCE)
    with Runtime(devices="sim:256MiB,host:256MiB", ledger=ledger) as rt:
        rt.register("drill", backend="fake", size="200MiB")
        with rt.use("drill", timeout=PATIENCE):
            assert list(claims(rt)) == ["sim:0"]


def test_a_kernel_that_ends_in_order_leaves_no_worker(kernel):
    kernel.process.stdin.close()
    assert kernel.process.wait(PATIENCE) == 0
    until(lambda: not alive(kernel.worker))


def test_the_stop_button_ends_the_call_and_not_the_worker(kernel):
    """Jupyter signals the kernel's process group, which the worker is not in."""
    kernel.say("while True: phi.create_completion('hello', max_tokens=480)")
    until(lambda: psutil.Process(kernel.worker).cpu_percent(0.1) > 20)
    os.killpg(kernel.process.pid, signal.SIGINT)
    assert kernel.hear() == "KeyboardInterrupt"
    kernel.say("assert phi.n_ctx() == 512")
    assert kernel.hear() == "done" and alive(kernel.worker)


def test_the_worker_outlives_the_thread_that_loaded_it(kernel):
    """The system signals a parent's death when the thread that forked ends, so that thread must stay alive."""
    kernel.say("assert not loading.is_alive() and phi.create_completion('hello', max_tokens=2)")
    assert kernel.hear() == "done" and alive(kernel.worker)


def test_a_worker_that_kills_itself_with_others_waiting_fails_each_of_them_once(ledger, file):
    with Runtime(devices="sim:256MiB,host:256MiB", ledger=ledger) as rt:
        rt.register("phi", str(file))
        rt.preload("phi")
        phi, errors = registry.find(rt._session, "phi").value, []

        def call():
            try:
                phi.create_completion("hello", max_tokens=300)
            except EngineDied as error:
                errors.append(error)

        callers = [threading.Thread(target=call) for _ in range(4)]
        for caller in callers:
            caller.start()
        until(lambda: len(registry.find(rt._session, "phi").pins) == 4)
        os.kill(phi.pid, signal.SIGKILL)
        for caller in callers:
            caller.join(PATIENCE)
        assert len(errors) == 4 and claims(rt) == {}


def _killing_at_random(rt: Runtime, names: list[str], kills: int, seed: int) -> dict[str, int]:
    """Two threads use all models while a third thread kills their processes. Returns the counts."""
    chance, ended, went = random.Random(seed), threading.Event(), {"answered": 0, "died": 0}

    def use(of: int) -> None:
        mine = random.Random(of)
        while not ended.is_set():
            try:
                with rt.use(mine.choice(names), timeout=PATIENCE) as model:
                    model.create_completion("hello", max_tokens=mine.choice((2, 60)))
                went["answered"] += 1
            except EngineDied:
                went["died"] += 1

    users = [threading.Thread(target=use, args=(of,)) for of in range(2)]
    for user in users:
        user.start()
    for _ in range(kills):
        before = went["answered"]
        pids = [pid for name in names for pid in registry.find(rt._session, name).engines]
        if pids:
            try:
                os.kill(chance.choice(pids), signal.SIGKILL)
            except ProcessLookupError:
                pass
        until(lambda before=before: went["answered"] > before)
    ended.set()
    for user in users:
        user.join(PATIENCE)
        assert not user.is_alive()
    return went


@pytest.mark.parametrize("kills", [6, pytest.param(150, marks=pytest.mark.soak)])
def test_killed_at_random_every_lease_comes_back_and_no_process_and_no_memory_stays(
    ledger, tmp_path, kills
):
    """Only one of the two models fits at a time. So drops, loads and kills happen at the same time."""
    me = psutil.Process()
    with Runtime(devices="sim:10MiB,host:64MiB", ledger=ledger, gpu_memory_max_percent=1.0) as rt:
        names = ["phi", "mini"]
        for name in names:
            rt.register(name, str(tiny_models.gguf_lm(tmp_path / f"{name}.gguf")))
        # first run: everything that is loaded once is loaded now
        _killing_at_random(rt, names, 2, seed=1)
        before, files = me.memory_info().rss, me.num_fds()
        went = _killing_at_random(rt, names, kills, seed=2)
        assert went["answered"] >= kills
        for name in names:
            rt.evict(name)
        until(lambda: claims(rt) == {}) and rt.probe.used()["sim:0"] == 0
        workers = lambda: [
            one
            for one in me.children(recursive=True)
            if "llama_cpp/worker" in " ".join(_words(one))
        ]
        until(lambda: not workers())
        assert me.num_fds() <= files + 4 and me.memory_info().rss < before + 64 * 2**20


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
