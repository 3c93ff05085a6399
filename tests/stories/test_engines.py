"""Real kernels with real engines: after any of them dies, no process runs on and no memory stays claimed."""

import contextlib
import os
import random
import signal
import threading

import psutil
import pytest

from gpu_runtime import EngineDied, Runtime
from gpu_runtime.owner import registry
from tests import tiny_models
from tests.backends.test_engine_server import alive
from tests.clock import PATIENCE, until
from tests.owner.conftest import alongside, claims

from .kernels import Kernel

pytest.importorskip(
    "llama_cpp", reason="llama-cpp-python is not installed: pip install 'gpu-console[llama]'"
)
DEVICES = "sim:256MiB,host:256MiB"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The file of a slow model: some milliseconds for each token, so it can be killed during a generation."""
    return tiny_models.gguf_lm(tmp_path_factory.mktemp("gguf") / "slow.gguf", size="24 MiB")


LOADS = """
import signal, threading
from gpu_runtime.owner import registry
# A shell that starts the tests in the background lets them ignore the stop button.
signal.signal(signal.SIGINT, signal.default_int_handler)
rt.register("phi", {file!r})
loading = threading.Thread(target=rt.preload, args=("phi",))
loading.start()
loading.join()
phi = registry.find(rt._session, "phi").value
"""


@pytest.fixture
def kernel(keeper, file):
    """Another process that has loaded the model."""
    with Kernel(keeper, DEVICES) as made:
        made.do(f"exec({LOADS.format(file=str(file))!r}, globals())")
        yield made


@pytest.fixture
def worker(kernel):
    """The process of its model."""
    found = int(kernel.run("print(phi.pid, flush=True)"))
    assert kernel.answer() == "done"
    return found


def test_a_kernel_that_is_killed_takes_its_worker_along_and_its_lease_goes(kernel, worker, keeper):
    """The kernel is killed with SIGKILL during a generation. Its socket closes, and the system signals the worker."""
    kernel.send("phi.create_completion('hello', max_tokens=400)")
    kernel.end()
    until(lambda: not alive(worker))
    with Runtime(devices=DEVICES, ledger=keeper) as rt:
        rt.register("drill", backend="fake", size="200MiB")
        with rt.use("drill", timeout=PATIENCE):
            assert list(claims(rt)) == ["sim:0"]


def test_a_kernel_that_ends_in_order_leaves_no_worker(kernel, worker):
    kernel.process.stdin.close()
    assert kernel.process.wait(PATIENCE) == 0
    until(lambda: not alive(worker))


def test_the_stop_button_ends_the_call_and_not_the_worker(kernel, worker):
    """Jupyter signals the kernel's process group, which the worker is not in."""
    process = psutil.Process(worker)
    idle_seconds = process.cpu_times().user
    kernel.send("exec(\"while True: phi.create_completion('hello', max_tokens=480)\")")
    until(lambda: process.cpu_times().user > idle_seconds + 0.05)
    os.killpg(kernel.process.pid, signal.SIGINT)
    assert kernel.answer().startswith("KeyboardInterrupt")
    kernel.do("assert phi.n_ctx() == 512")
    assert alive(worker)


def test_the_worker_outlives_the_thread_that_loaded_it(kernel, worker):
    """The system signals a parent's death when the thread that forked ends, so that thread must stay alive."""
    kernel.do("assert not loading.is_alive() and phi.create_completion('hello', max_tokens=2)")
    assert alive(worker)


def test_a_worker_that_kills_itself_with_others_waiting_fails_each_of_them_once(keeper, file):
    with Runtime(devices=DEVICES, ledger=keeper) as rt:
        rt.register("phi", str(file))
        rt.preload("phi")
        phi, errors = registry.find(rt._session, "phi").value, []

        def call():
            try:
                phi.create_completion("hello", max_tokens=300)
            except EngineDied as error:
                errors.append(error)

        with alongside(*[call] * 4):
            until(lambda: len(registry.find(rt._session, "phi").pins) == 4)
            os.kill(phi.pid, signal.SIGKILL)
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

    with alongside(lambda: use(0), lambda: use(1)):
        try:
            for _ in range(kills):
                before = went["answered"]
                pids = [pid for name in names for pid in registry.find(rt._session, name).engines]
                if pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(chance.choice(pids), signal.SIGKILL)
                until(lambda before=before: went["answered"] > before)
        finally:
            ended.set()
    return went


@pytest.mark.parametrize("kills", [6, pytest.param(150, marks=pytest.mark.soak)])
def test_killed_at_random_every_lease_comes_back_and_no_process_and_no_memory_stays(
    keeper, tmp_path, kills
):
    """Only one of the two models fits at a time. So drops, loads and kills happen at the same time."""
    me = psutil.Process()
    with Runtime(devices="sim:10MiB,host:64MiB", ledger=keeper, gpu_memory_max_percent=1.0) as rt:
        names = ["phi", "mini"]
        for name in names:
            rt.register(name, str(tiny_models.gguf_lm(tmp_path / f"{name}.gguf")))
        # first run: everything that is loaded once is loaded now
        _killing_at_random(rt, names, 2, seed=1)
        before, files = me.memory_info().rss, me.num_fds()
        went = _killing_at_random(rt, names, kills, seed=2)
        assert went["answered"] >= kills
        for name in names:
            rt.evict(name, drop=True)
        until(lambda: claims(rt) == {} and rt.probe.used()["sim:0"] == 0)
        workers = lambda: [
            one for one in me.children(recursive=True) if "llama_cpp.worker" in _words(one)
        ]
        until(lambda: not workers())
        assert me.num_fds() <= files + 4 and me.memory_info().rss < before + 64 * 2**20


def _words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
