"""Models in processes of their own: calls, moves, restarts under the same lease, and the loss."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy
import psutil
import pytest
import torch

from gpu_runtime import EngineDied, Runtime, samples, threads
from gpu_runtime.backends.processes import engine, model_program
from gpu_runtime.backends.processes.engine import MOST_RESTARTS, Child
from gpu_runtime.backends.processes.model_processes import ModelProcess, ProcessBackend
from gpu_runtime.backends.processes.remote_calls import pack, unpack
from gpu_runtime.errors import LoadFailed, NotResident, StillInUse
from gpu_runtime.facts import HOST, ModelSpec, Share
from gpu_runtime.web.connections import raise_file_limit
from tests.clock import PATIENCE, scaled, until

DEVICES = "sim:1x24GiB,host:48GiB"
GIB = 1 << 30


@pytest.fixture
def rt(tmp_path) -> Iterator[Runtime]:
    """A runtime whose fake models run in processes of their own."""
    with Runtime(devices=DEVICES, ledger=f"keeper://{tmp_path}") as found:
        found._session.backends["fake"] = ProcessBackend("fake", DEVICES, found.probe)
        found.register("qwen", backend="fake", size="14GiB")
        yield found


def ask(model: Any, path: tuple[str, ...], *args: object) -> Any:
    return unpack(model.run_there(path, pack((args, {}))))


def kill(model: Any) -> None:
    """Kills the process of the model, and waits until its successor answers or the model is lost."""
    process: ModelProcess = model._engine
    before = process._program
    os.kill(process.pids[-1], signal.SIGKILL)
    until(lambda: process.error or process._program not in (None, before), "its new start")


def test_a_call_runs_in_the_process_of_the_model(rt):
    with rt.use("qwen") as model:
        guard, program = model._engine.pids
        assert program not in (os.getpid(), guard)
        assert ask(model, (), "words") == "words"
        assert ask(model, ("name", "upper")) == "QWEN"
        with pytest.raises(AttributeError) as raised:
            ask(model, ("nothing",))
        assert "remote_calls.py" in raised.value.__notes__[0], "where it happened there"
        assert model._engine.restarts == 0


def test_the_output_of_an_earlier_child_explains_no_later_end(tmp_path):
    """A restart appends to the log. A kill was reported as the assert of the process before."""
    for said in ("CUDA error: device-side assert", ""):
        child = Child(["echo", "-n", said], log=tmp_path / "log", env={**os.environ}, fds=())
        child.wait()
        assert (child.end(), child.tail()) == (0, said)


def test_an_ended_process_keeps_no_descriptor_open_whoever_still_refers_to_it(tmp_path):
    """A server under load kept one for each engine that was killed, until Python collected its garbage."""
    child = Child(["sleep", "600"], log=tmp_path / "log", env={**os.environ}, fds=())
    opened = len(os.listdir("/proc/self/fd"))
    assert not child.ended and child.end() == -signal.SIGKILL
    assert len(os.listdir("/proc/self/fd")) == opened - 1
    assert child.ended and child.wait() and child.end() == -signal.SIGKILL


def test_a_process_that_the_driver_keeps_from_ending_is_not_waited_for(tmp_path, monkeypatch):
    """A process that waits in the driver can be unkillable. Whoever ended it waited for ever."""
    child = Child(["sleep", "600"], log=tmp_path / "log", env={**os.environ}, fds=())
    with monkeypatch.context() as blocked:
        blocked.setattr(engine, "KILL_SECONDS", 0.01)
        blocked.setattr(os, "killpg", lambda *_: None)
        assert child.end() == -signal.SIGKILL and not child.ended
    assert child.end() == -signal.SIGKILL and child.ended


def test_a_program_starts_although_its_owner_has_more_than_1023_descriptors(tmp_path):
    """A server with a thousand connections could start no engine: the guard ended with an error, and the engine too."""
    raise_file_limit()
    with contextlib.ExitStack() as held:
        while held.enter_context(open(os.devnull)).fileno() < 1024:
            pass
        child, line = engine.guarded(["true"], tmp_path / "log", {**os.environ}, ())
        held.enter_context(line)
        assert line.fileno() > 1023
        child.wait()
        assert child.end() == 0, child.tail()


def test_a_model_moves_to_host_memory_and_back_in_the_same_process(rt):
    with rt.use("qwen") as model:
        pids = model._engine.pids
    rt.evict("qwen")
    assert [lease.where for lease in rt.status().leases()] == [HOST]
    with rt.use("qwen") as again:
        assert (again, again._engine.pids) == (model, pids)
        assert ask(again, (), 1) == 1
    assert rt.probe.place("sim:0").held_bytes() == 14 * GIB
    rt.forget("qwen")
    assert (model._engine, rt.probe.place("sim:0").held_bytes()) == (None, 0)
    with pytest.raises(NotResident):
        ask(model, (), 1)


def fail(value: Any) -> Iterator[None]:
    raise RuntimeError("CUDA error: device-side assert triggered")
    yield


def test_a_lost_context_is_that_of_the_model_s_process_alone(rt):
    """This process counted as lost with it, and unloaded every model of a host of a fleet."""
    rt.register("other", backend="fake", size="2GiB")
    with rt.use("other") as other:
        pids = other._engine.pids
    with pytest.raises(RuntimeError, match="device-side assert"), rt.use("qwen") as model:
        list(model.stream(fail))

    def answers() -> bool:
        """Whether the process of qwen answers. The one that failed may have taken the call before its end."""
        with contextlib.suppress(EngineDied), rt.use("qwen") as model:
            return ask(model, (), 1) == 1
        return False

    until(answers, "its process is started again")
    with rt.use("other") as again:
        assert again._engine.pids == pids


def test_a_killed_process_keeps_its_lease_three_times_and_then_a_waiting_rival_has_the_card(
    rt, tmp_path
):
    """A restart under the same lease keeps the memory. Without it, a waiting request had the card after 0.02 s."""
    got = threading.Event()
    with Runtime(devices=DEVICES, ledger=f"keeper://{tmp_path}") as rival:

        def wait_for_the_card() -> None:
            """Waits for bytes that are free only once the model is lost."""
            with rival.lease("20GiB", purpose="training", timeout=scaled(120)):
                got.set()

        with rt.use("qwen") as model:
            waiting = threading.Thread(target=wait_for_the_card)
            waiting.start()
            until(lambda: rt.status().tickets, "the rival waits")
            for count in range(1, MOST_RESTARTS + 1):
                kill(model)
                assert model._engine.restarts == count
                assert ask(model, (), count) == count
                assert not got.is_set(), "the card was never free"
                [lease] = [lease for lease in rt.status().leases() if lease.name == "qwen"]
                assert (lease.where, lease.pins) == ("sim:0", 1)
            lost = model._engine
            kill(model)
            assert isinstance(lost.error, EngineDied) and "restarted 3 times" in str(lost.error)
            waiting.join(scaled(120))
            assert got.is_set(), "the fourth time the model is lost, and the rival has the card"


def test_a_call_that_is_cut_off_raises_and_the_next_one_waits_for_the_restart(rt):
    """The call may have run, so it is not repeated."""
    with rt.use("qwen") as model:
        os.kill(model._engine.pids[-1], signal.SIGSTOP)  # the call is sent, and not answered
        stopped = psutil.Process(model._engine.pids[-1])
        until(lambda: stopped.status() == psutil.STATUS_STOPPED, "the process is stopped")
        outcome: list[BaseException] = []

        def call() -> None:
            """Notes the error of the call."""
            try:
                ask(model, (), 1)
            except BaseException as error:  # noqa: BLE001 - checked below
                outcome.append(error)

        calling = threading.Thread(target=call)
        calling.start()
        until(lambda: model._engine._program._pending, "the call is sent")
        kill(model)
        calling.join(PATIENCE)
        assert [type(error) for error in outcome] == [EngineDied]
        assert ask(model, (), 2) == 2


def test_a_stream_comes_item_by_item_beside_other_calls_and_ends_with_its_reader(rt):
    with rt.use("qwen") as model:
        program = model._engine.pids[-1]
        stream = model.stream(count_up, "words")
        assert [next(stream), next(stream)] == [f"qwen {program}", "words"]
        assert ask(model, (), numpy.ones(3)).sum() == 3, "the stream goes on"
        stream.close()
        assert model._engine._program._pending == {}
        assert ask(model, (), 1) == 1


def count_up(model: Any, words: str) -> Iterator[str]:
    """An endless stream: the process runs it, and its module is imported there."""
    yield f"{model.name} {os.getpid()}"
    while True:
        yield words


# -- a load that hangs

HANGS = """
import ctypes, signal, sys

if sys.orig_argv[2:3] == ["-m"]:  # the program, not its guard
    {ignores}
    while True:
        ctypes.CDLL(None).pause()
"""


def commands() -> Iterator[str]:
    """The words of the commands of this process's children that have not ended."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            yield from child.cmdline()


@pytest.mark.parametrize("ignores", ["", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"])
def test_a_process_whose_load_hangs_in_c_code_is_killed_at_the_time_out(
    rt, tmp_path, monkeypatch, ignores
):
    """Its lease ends with it, and the next load begins a new process."""
    (tmp_path / "sitecustomize.py").write_text(HANGS.format(ignores=ignores))
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        with pytest.raises(LoadFailed, match="qwen was not loaded: its time is over"):
            rt.preload("qwen", timeout=2)
        until(lambda: not list(rt.status().leases()), "the end of its lease")
        until(lambda: not rt._session.loads, "the end of its load")
        until(lambda: "model_program" not in " ".join(commands()), "the end of its process")
    assert rt.preload("qwen", timeout=PATIENCE).done


def test_the_bytes_of_a_model_are_compared_at_a_move_where_other_code_may_write_them(
    tmp_path, monkeypatch
):
    """In its process nothing runs but calls, which wait for the end of the move. A call under way writes here."""
    from gpu_runtime.backends.pytorch import storages, swap

    monkeypatch.setattr(model_program, "only_ours", lambda: alone)
    copied, compare = storages.copied, swap.Unchanged.compare
    compared: list[int] = []

    def counted(proof: swap.Unchanged, copies: list[torch.Tensor]) -> None:
        compared.append(len(copies))
        compare(proof, copies)

    monkeypatch.setattr(swap.Unchanged, "compare", counted)
    alone, card, host = True, (Share("sim:0", GIB),), (Share(HOST, GIB),)
    model = model_program.Model(lambda done, total: None)
    source = samples.causal_lm(tmp_path / "model")
    spec = ModelSpec("net", "transformers", str(source))
    model.load("transformers", DEVICES, ("sim:0", HOST), spec, card)
    model.move(host)
    model.move(card)
    assert not any(compared)
    alone = False
    model.move(host)
    model.move(card)
    assert any(compared), "a thread of the model's code may write"
    alone = True

    def items(value: Any) -> Iterator[torch.Tensor]:
        yield value.lm_head.weight

    stream = model.stream(items)
    weight = next(stream).detach()
    before = weight.clone()

    def while_copied(*args: Any, **named: Any) -> Any:
        found = copied(*args, **named)
        weight.data.add_(1)  # which changes no version
        return found

    with monkeypatch.context() as patch:
        patch.setattr(storages, "copied", while_copied)
        with pytest.raises(StillInUse, match="its weights are written while they are copied"):
            model.move(host)
    assert torch.equal(weight, before + 1), "no write is lost"
    stream.close()
    compared.clear()
    called: list[threads.Running] = []

    def calls_meanwhile(*args: Any, **named: Any) -> Any:
        called.append(
            threads.start(lambda: model.call(("lm_head", "weight", "sum"), pack(((), {}))))
        )
        assert not called[0].wait(0.05), "it waits"
        return copied(*args, **named)

    monkeypatch.setattr(storages, "copied", calls_meanwhile)
    model.move(host)
    assert not compared and called[0].wait(PATIENCE)
