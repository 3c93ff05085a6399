"""Models outside this process, and their leases when they fail, with the real llama.cpp."""

import os
import signal
import sys
import threading

import psutil
import pytest

from gpu_runtime import BadCall, EngineDied, EngineFault, GpuError, ProcessLost
from gpu_runtime.backends.processes import engine
from gpu_runtime.owner import registry
from gpu_runtime.units import MIB
from tests import tiny_models
from tests.clock import PATIENCE, finished, scaled, until

from .conftest import claims, fakes, where

pytest.importorskip(
    "llama_cpp", reason="llama-cpp-python is not installed: pip install 'gpu-console[llama]'"
)
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tiny_models.gguf_lm(tmp_path_factory.mktemp("gguf") / "phi.gguf")


@pytest.fixture
def rt(runtime, file):
    """A runtime with a card that holds only one of two models of 6.4 MiB."""
    rt = runtime(devices="sim:10MiB,host:64MiB", gpu_memory_max_percent=1.0)
    rt.register("phi", str(file))
    return rt


def actions(rt, name="phi"):
    """The actions that the journal has for the model `name`, in order."""
    return [event.action for event in rt.why(name)[::-1]]


def write(model, tokens=5):
    return model.create_completion("hello", max_tokens=tokens, temperature=0)["choices"][0]["text"]


def test_a_gguf_file_is_a_model_like_any_other(rt):
    with rt.use("phi") as phi:
        told = phi.create_chat_completion(HELLO, max_tokens=4)
        assert (told["model"], told["usage"]["completion_tokens"]) == ("phi", 4)
        parts = list(phi.create_chat_completion(HELLO, max_tokens=4, stream=True))
        assert len(parts) > 4 and parts[0]["object"] == "chat.completion.chunk"
        assert phi.detokenize(phi.tokenize(b"hello")) == b"hello"
        assert claims(rt) == {"sim:0": rt.probe.used()["sim:0"]} and phi.pid != os.getpid()
    assert actions(rt) == ["granted", "loaded"]


@pytest.mark.parametrize("isolated", [True, False])
def test_two_that_do_not_fit_together_take_turns_and_none_is_ended(rt, file, isolated):
    """The worker stays, and its model wakes in it. Code that kept the object continues."""
    rt.forget("phi")
    for name in ("phi", "mini"):
        rt.register(name, str(file), isolated=isolated)
    with rt.use("phi") as phi:
        before, pid = write(phi), phi.pid
    with rt.use("mini") as mini:
        assert write(mini) == before
    assert where(rt) == {"phi": "host", "mini": "sim:0"} and phi.pid is None
    assert repr(phi) == "<llama.cpp phi on host>"
    assert rt.why("phi")[0].action == "asleep"
    worker = registry.find(rt._session, "phi").handle.engine
    if isolated:  # not what this process has, whose memory the worker had before its program began
        assert 0 < worker.bytes_asleep < 2 * psutil.Process(pid).memory_info().rss
    for _ in range(2):
        assert write(phi) == before and phi.pid == pid
        assert where(rt) == {"phi": "sim:0", "mini": "host"}
        assert write(mini) == before
    assert (rt.status().totals["loads"], rt.status().totals["unloads"]) == (2, 0)
    rt.evict("phi", drop=True)
    assert repr(phi) == "<llama.cpp phi on disk>"
    assert where(rt)["phi"] == "disk" and claims(rt)["sim:0"] == rt.probe.used()["sim:0"]


@pytest.mark.parametrize("fault", ["late", "dead", "gone"])
def test_a_worker_that_does_not_wake_is_ended_and_the_model_is_loaded_anew(
    runtime, file, tmp_path, monkeypatch, fault
):
    """Its worker hangs, or died asleep. If its file is gone, the error is that of a load."""
    own = tmp_path / "phi.gguf"
    own.symlink_to(file)
    rt = runtime(devices="sim:10MiB,host:64MiB", gpu_memory_max_percent=1.0)
    rt.register("phi", str(own))
    with rt.use("phi") as phi:
        before, pid = write(phi), phi.pid
    rt.evict("phi")
    assert where(rt) == {"phi": "host"}
    if fault == "late":
        monkeypatch.setattr(engine, "LEAST_CHANGE_SECONDS", 0.2)
        registry.find(rt._session, "phi").handle.engine._load_seconds = 0.1
        os.kill(pid, signal.SIGSTOP)
    elif fault == "dead":
        os.kill(pid, signal.SIGKILL)
        until(lambda: where(rt) == {"phi": "disk"})
    else:
        own.unlink()
        with pytest.raises(GpuError, match="phi.gguf"):
            write(phi)
        assert claims(rt) == {} and not psutil.pid_exists(pid)
        return
    assert write(phi) == before and phi.pid != pid and not psutil.pid_exists(pid)
    said = {"late": "did not wake: it did not answer in time", "dead": "was killed by SIGKILL"}
    assert said[fault] in " ".join(event.because for event in rt.why("phi"))


def test_killed_in_the_middle_it_costs_one_error_and_the_lease_is_free_when_that_is_seen(
    runtime, tmp_path
):
    rt = runtime(devices="sim:256MiB,host:256MiB")
    rt.register("phi", str(tiny_models.gguf_lm(tmp_path / "slow.gguf", size="24 MiB")))
    with rt.use("phi") as phi:
        before, pid = write(phi), phi.pid
        stream = phi.create_completion("hello", max_tokens=400, stream=True)
        next(stream)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(
            EngineDied, match=f"phi .pid {pid}. is gone: it was killed by SIGKILL"
        ) as error:
            list(stream)
        assert claims(rt) == {} and rt.probe.used()["sim:0"] == 0 and not list(rt.status().leases())
        assert (error.value.status, error.value.kind) == (-9, "crash")
        assert os.path.exists(error.value.log)
        assert write(phi) == before and phi.pid != pid
    assert actions(rt) == ["granted", "loaded", "lost", "granted", "loaded"]
    assert rt.why("phi")[2].bytes > MIB
    assert list(rt.evictions()["action"]) == ["lost"], "it has left its device, by whatever way"


def test_killed_while_nobody_uses_it_its_lease_is_returned_too(rt):
    rt.preload("phi")
    lost = threading.Event()
    resident = registry.find(rt._session, "phi")
    tell = resident.report_loss
    resident.report_loss = lambda *said: (tell(*said), lost.set())
    os.kill(resident.engines[0], signal.SIGKILL)
    assert lost.wait(PATIENCE) and claims(rt) == {} and where(rt) == {"phi": "disk"}
    with rt.use("phi") as phi:
        assert write(phi)


def test_a_driver_s_error_puts_the_model_away_and_the_next_call_has_a_fresh_worker(rt):
    """The texts by which such an error is recognised: tests/core/test_fault_texts.py."""
    words = "CUDA error: device-side assert triggered"
    with rt.use("phi") as phi:
        pid = phi.pid
        with pytest.raises(
            EngineFault, match="next use of phi loads it again, in a new worker"
        ) as error:
            phi.drill(words)
        assert error.value.why == words and error.value.reloads and claims(rt) == {}
        assert write(phi) and phi.pid != pid
    assert actions(rt) == ["granted", "loaded", "lost", "granted", "loaded"]


def test_three_decode_failures_in_a_row_are_one_reload(rt):
    with rt.use("phi") as phi:
        pid = phi.pid
        for reloads in (False, False, None, False, False, True):
            if reloads is None:
                write(phi)
                continue
            with pytest.raises(EngineFault, match="llama_decode returned -3") as error:
                phi.drill("llama_decode returned -3")
            assert error.value.reloads is reloads
            assert (claims(rt) == {}) is reloads
        assert write(phi) and phi.pid != pid
    assert actions(rt).count("lost") == 1


def test_a_call_that_is_refused_costs_nobody_anything(rt):
    """Too long, a wrong type, or words that look like a driver's error: the model continues to work."""
    with rt.use("phi") as phi:
        pid = phi.pid
        for call in (
            lambda: phi.create_completion("hello " * 900),
            lambda: phi.create_completion("hello", temprature=1),
            lambda: phi.create_completion("hello", logits_processor=[lambda ids, scores: scores]),
            lambda: phi.create_chat_completion("device-side assert triggered"),
        ):
            with pytest.raises(BadCall):
                call()
        assert write(phi) and phi.pid == pid


def test_a_stream_that_is_closed_ends_the_generation(runtime, tmp_path):
    rt = runtime(devices="sim:256MiB,host:256MiB")
    rt.register("phi", str(tiny_models.gguf_lm(tmp_path / "slow.gguf", size="24 MiB")))
    with rt.use("phi") as phi:
        worker = psutil.Process(phi.pid)

        def spent(work) -> float:
            before = worker.cpu_times()
            work()
            after = worker.cpu_times()
            return after.user + after.system - before.user - before.system

        def closed() -> None:
            stream = phi.create_completion("hello", max_tokens=480, stream=True)
            next(stream)
            stream.close()
            assert phi.n_ctx() == 512  # answered after it

        hundred = spent(lambda: write(phi, 100))
        until(lambda: spent(closed) < hundred, "a busy machine closes the stream late")
    assert not registry.find(rt._session, "phi").pins


def test_a_model_is_pinned_as_long_as_somebody_reads_its_answer(rt):
    rt.preload("phi")
    phi = registry.find(rt._session, "phi").value
    stream = phi.create_completion("hello", max_tokens=50, stream=True)
    next(stream)
    assert registry.find(rt._session, "phi").pins
    list(stream)
    assert not registry.find(rt._session, "phi").pins


def test_a_device_side_assert_in_the_kernel_says_that_the_process_is_lost_and_what_to_do(rt):
    """Its leases are returned, since no later call would work. Models in their own processes continue."""
    fakes(rt, a="1MiB", b="1MiB")
    with rt.use("phi") as phi:
        worker = phi.pid
    phis = claims(rt)
    rt.preload("b")
    with (
        pytest.raises(ProcessLost, match="since a failed:\n  CUDA error: device-side") as error,
        rt.use("a"),
    ):
        raise RuntimeError("CUDA error: device-side assert triggered")
    assert "Restart the kernel" in str(error.value) and error.value.kind == "device-side assert"
    assert claims(rt) == phis and [event.action for event in rt.why("b")][0] == "lost"
    with pytest.raises(ProcessLost, match="Restart the kernel"), rt.use("b"):
        pass
    with rt.use("phi") as phi:
        assert write(phi) and phi.pid == worker


def test_a_reset_driver_in_the_kernel_costs_the_model_that_was_in_use(runtime):
    rt = fakes(runtime(), a="1GiB", b="1GiB")
    rt.preload("b")
    with pytest.raises(EngineFault, match="next use of a loads it again"), rt.use("a"):
        raise RuntimeError("cuBLAS initialization failed")
    assert where(rt) == {"a": "disk", "b": "sim:0"}
    with rt.use("a"):
        assert where(rt)["a"] == "sim:0"


def test_an_error_of_the_user_s_own_is_left_alone(runtime):
    rt = fakes(runtime(), a="1GiB")
    for error in (
        ValueError("device-side assert triggered"),
        RuntimeError("shapes cannot be multiplied"),
    ):
        with pytest.raises(type(error)) as seen, rt.use("a"):
            raise error
        assert seen.value is error and where(rt) == {"a": "sim:0"}


def test_in_process_is_a_choice(rt, file):
    """With `isolated=False` a call can pass Python objects, but a lost context costs the whole process."""
    rt.register("near", str(file), isolated=False)
    with rt.use("near") as near:
        heard = []

        def listen(ids, scores):
            heard.append(len(ids))
            return scores

        from llama_cpp import LogitsProcessorList

        near.create_completion(
            "hello", max_tokens=3, logits_processor=LogitsProcessorList([listen])
        )
        assert near.pid is None and len(heard) == 3
        with pytest.raises(ProcessLost, match="Restart the kernel. With a worker of its own"):
            near.drill("CUDA error: device-side assert triggered")
    assert claims(rt) == {}
    with pytest.raises(ProcessLost), rt.use("near"):
        pass


LIBRARY_AFTERWARDS = """
import gc, sys
import gpu_runtime
from llama_cpp import Llama

file = sys.argv[1]
rt = gpu_runtime.Runtime(ledger="memory:", devices="sim:1GiB,host:1GiB")
rt.register("near", file, isolated=False)
with rt.use("near") as near:
    assert near.n_ctx()
rt.close()
del near, rt
gc.collect()
own = Llama(file, n_ctx=64, verbose=False)
print(len(own.tokenize(b"hello")))
"""


@pytest.mark.processes
def test_a_model_in_this_process_leaves_the_library_usable(file):
    """The library keeps the address of the function for its log, which was gone with its model."""
    ended = finished([sys.executable, "-c", LIBRARY_AFTERWARDS, str(file)], timeout=scaled(120))
    assert ended.returncode == 0 and int(ended.stdout) > 0, ended.stderr[-2000:]


def test_a_model_without_a_layer_on_the_card_takes_nothing_of_it(runtime, file):
    """With `gpu_layers=0` the model runs on the CPU. Its worker sees no card, and its lease claims no bytes."""
    rt = runtime(devices="sim:1MiB,host:64MiB")
    rt.register("slow", str(file), gpu_layers=0)
    with rt.use("slow") as slow:
        assert write(slow) and claims(rt) == {}
