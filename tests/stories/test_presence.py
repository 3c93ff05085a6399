"""The status shows what each process does. It never names a dead process as a living holder."""

import signal
from pathlib import Path
from unittest.mock import Mock

import pytest

from gpu_runtime import Busy, GpuError, NotAllowed, Runtime, StillInUse
from gpu_runtime.facts import ProcessState, problems
from gpu_runtime.facts.problems import ProblemKind
from gpu_runtime.owner import requests
from gpu_runtime.rendering import answers
from tests.clock import PATIENCE, until
from tests.owner.conftest import alongside, fakes

from .kernels import DEVICES, LOADED, ONLY_KEEPER, USED, Kernel

pytestmark = ONLY_KEEPER
CORE_MIB = 1024  # of memory in a core dump: written in about a second
PATTERN = Path("/proc/sys/kernel/core_pattern")


@pytest.fixture
def kernel(other):
    other.do(LOADED)
    return other


@pytest.fixture
def console(ledger):
    """A runtime without a monitor, so only its status looks at the other processes."""
    with Runtime(devices=DEVICES, ledger=ledger, monitor=False, eviction_grace_seconds=0) as rt:
        yield rt


def state(console: Runtime, kernel: Kernel) -> ProcessState:
    seen = console.status()
    [id] = [id for id, one in seen.sections.items() if one.owner.pid == kernel.process.pid]
    return seen.presences[id].state


def stop(console: Runtime, kernel: Kernel) -> None:
    """Stops the process. The status notices it without any request of another process."""
    kernel.signal(signal.SIGSTOP)
    until(lambda: state(console, kernel) is ProcessState.STOPPED)
    assert ", stopped" in answers.status(console.status()).text


def test_a_killed_process_is_shown_as_ended_at_once(kernel, console):
    """In an earlier version it was shown as a living holder for 10 s."""
    assert state(console, kernel) is ProcessState.RUNNING
    kernel.process.kill()
    kernel.process.await_death()  # a zombie is dead too
    assert state(console, kernel) is ProcessState.ENDED
    assert f"pid {kernel.process.pid}, ended" in answers.status(console.status()).text.replace(
        ")", ""
    )


def test_who_needs_a_stopped_process_learns_why_and_what_to_type(kernel, console):
    """The model is in use and never leaves by itself, because the process does not run."""
    kernel.do(USED)
    pid = kernel.process.pid
    until(lambda: any(lease.pins for lease in console.status().leases()))
    with pytest.raises(StillInUse) as running:
        console.evict("qwen", timeout=PATIENCE)
    assert "stopped" not in str(running.value)
    stop(console, kernel)
    with pytest.raises(StillInUse, match=rf"pid {pid} is stopped.\n  Let .* kill -CONT {pid}"):
        console.evict("qwen", timeout=PATIENCE)
    fakes(console, llama="14GiB")
    with pytest.raises(Busy, match=rf"pid {pid} is stopped, and keeps its memory"):
        console.preload("llama", timeout=0.1)


def test_a_stopped_process_is_shown_as_stopped_until_it_is_continued(kernel, console, monkeypatch):
    """The problem offers it. The signal goes to the process that the ledger knows, if its user may send it."""
    pid = kernel.process.pid
    assert console.resume(str(pid)).because == f"pid {pid} is not stopped"
    stop(console, kernel)
    [problem] = problems(console.status())
    [(verb, target)] = problem.actions
    assert (verb, f"kill -9 {pid}" in problem.text) == ("resume", True)

    with monkeypatch.context() as another_user:
        another_user.setattr(signal, "pidfd_send_signal", Mock(side_effect=PermissionError))
        with pytest.raises(NotAllowed, match=rf"and root may .*\n.* kill -CONT {pid}"):
            console.resume(str(pid))
    assert state(console, kernel) is ProcessState.STOPPED
    done = console.resume(target.removesuffix("/"))
    assert done.done and done.because == f"pid {pid} runs again"
    until(lambda: state(console, kernel) is ProcessState.RUNNING)
    assert ", stopped" not in answers.status(console.status()).text and not problems(
        console.status()
    )
    [event] = [event for event in console.status().events if event.action == "resume"]
    assert event.because == done.because
    with pytest.raises(GpuError, match="no process '99999999' shares this ledger"):
        console.resume("99999999")


def test_a_running_cell_is_interrupted_and_a_process_ended_by_its_user(
    kernel, console, monkeypatch
):
    pid = str(kernel.process.pid)
    kernel.send("import time; print('runs', flush=True); time.sleep(3600)")
    assert kernel.answer() == "runs"

    with monkeypatch.context() as another_user:
        another_user.setattr(signal, "pidfd_send_signal", Mock(side_effect=PermissionError))
        with pytest.raises(NotAllowed, match=rf"and root may interrupt .*\n.* kill -INT {pid}"):
            console.interrupt(pid)
    with console.on_behalf_of("ann"):
        assert console.interrupt(pid).done
    assert kernel.answer() == "KeyboardInterrupt:"
    assert console.interrupt(pid, end=True).because == f"pid {pid} got SIGTERM: it ends"
    assert kernel.process.wait(PATIENCE) == -signal.SIGTERM
    verbs = [event for event in console.status().events if event.action == "interrupt"]
    assert [event.reason for event in verbs] == ["interrupt", "end"] and "ann" in verbs[0].by


def test_a_stopped_process_is_named_with_since_when_until_it_answers(kernel, console):
    """It carries out the request of another process when it runs again."""
    kernel.signal(signal.SIGSTOP)
    before = console.status().now
    with console.on_behalf_of("ann"):
        assert not console.evict("qwen", wait=False).done
    after = console.status().now
    [one] = until(lambda: console.status().unanswered)
    said = (one.owner.pid, one.ticket.verb, one.ticket.said_by)
    assert said == (kernel.process.pid, "evict", "ann")
    assert before - 0.1 <= one.since <= after + 0.1, "the book has tenths of a second"
    kernel.signal(signal.SIGCONT)
    until(lambda: not console.status().unanswered)
    until(lambda: console.leases()["device"].tolist() == ["host"])


def test_a_process_that_blocks_while_it_makes_room_is_silent(kernel, console, monkeypatch):
    """Its lease is marked as leaving, so it has answered, and no cell of it runs."""
    monkeypatch.setattr(requests, "HUNG_SECONDS", 1.0)
    monkeypatch.setattr(requests, "MOVE_FACTOR", 1.0)
    blocks = "lambda what: what == 'move' and ctypes.PyDLL(None).sleep(3600)"
    kernel.do("import ctypes", f"rt.register('stuck', {blocks}, backend='fake', size='4GiB')")
    kernel.do("rt.preload('stuck')")
    console.evict("stuck", wait=False)
    until(lambda: state(console, kernel) is ProcessState.SILENT)
    assert not console.status().unanswered
    [problem] = problems(console.status())
    assert problem.kind is ProblemKind.SILENT and f"kill -INT {kernel.pid}" in problem.text


@pytest.mark.soak
def test_who_waits_for_a_process_that_writes_its_core_dump_learns_why(kernel, console, tmp_path):
    """The caller is told so, and gets the memory once the dump is written."""
    if "/" in PATTERN.read_text() or PATTERN.read_text().startswith("|"):
        pytest.skip("needs a kernel that writes core dumps into the working directory")
    kernel.do(USED, "import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (-1, -1))")
    kernel.do(f"os.chdir({str(tmp_path)!r}); kept = os.urandom(1 << 20) * {CORE_MIB}")
    fakes(console, llama="14GiB")
    told: list[str] = []
    console._session.on_wait = lambda name, wait: told.append(wait.because if wait else "")
    granted: list[bool] = []
    with alongside(lambda: granted.append(console.preload("llama", timeout=PATIENCE).done)):
        until(lambda: told)
        kernel.signal(signal.SIGABRT)
        until(lambda: state(console, kernel) is ProcessState.DUMPING)
        assert "writing a core dump" in answers.status(console.status()).text
        until(lambda: any("while it writes a core dump" in one for one in told))
        assert not granted, "it still holds its memory"
        kernel.process.wait(PATIENCE)
    assert granted == [True]
