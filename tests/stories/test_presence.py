"""The status shows what each process does. It never names a dead process as a living holder."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from gpu_runtime import Busy, GpuError, NotAllowed, Runtime, StillInUse
from gpu_runtime.facts import ProcessState, problems
from gpu_runtime.rendering import text
from tests.clock import PATIENCE, until
from tests.stories.test_processes import DEVICES, Kernel

CORE_MIB = 1024  # of memory in a core dump: written in about a second
PATTERN = Path("/proc/sys/kernel/core_pattern")


@pytest.fixture
def kernel(tmp_path):
    one = Kernel(f"keeper://{tmp_path}/ledger")
    one.tell("rt.register('qwen', backend='fake', size='14GiB'); rt.preload('qwen')")
    yield one
    if one.process.poll() is None:
        one.signal(signal.SIGCONT)
    one.end()


@pytest.fixture
def console(tmp_path):
    """A runtime without a monitor, so only its status looks at the other processes."""
    with Runtime(
        devices=DEVICES,
        ledger=f"keeper://{tmp_path}/ledger",
        monitor=False,
        eviction_grace_seconds=0,
    ) as rt:
        yield rt


def state(console: Runtime, kernel: Kernel) -> ProcessState:
    seen = console.status()
    [id] = [id for id, one in seen.sections.items() if one.owner.pid == kernel.process.pid]
    return seen.presences[id].state


def test_a_killed_process_is_shown_as_ended_at_once(kernel, console):
    """A killed process is shown as ended at once. In an earlier version it was shown as a living holder for 10 s."""
    assert state(console, kernel) is ProcessState.RUNNING
    kernel.process.kill()
    kernel.process.await_death()  # a zombie is dead too
    assert state(console, kernel) is ProcessState.ENDED
    assert f"pid {kernel.process.pid}, ended" in text.status(console.status()).replace(")", "")


def test_a_stopped_process_is_shown_as_stopped_until_it_goes_on(kernel, console):
    """The status notices that a process is stopped, without any request of another process."""
    kernel.signal(signal.SIGSTOP)
    until(lambda: state(console, kernel) is ProcessState.STOPPED)
    assert ", stopped" in text.status(console.status())
    kernel.signal(signal.SIGCONT)
    until(lambda: state(console, kernel) is ProcessState.RUNNING)
    assert ", stopped" not in text.status(console.status())


def test_who_waits_for_a_stopped_process_learns_why(kernel, console):
    kernel.tell("held = rt.use('qwen'); held.__enter__()")
    kernel.signal(signal.SIGSTOP)
    until(lambda: state(console, kernel) is ProcessState.STOPPED)
    console.register("llama", backend="fake", size="14GiB")
    with pytest.raises(Busy, match=rf"pid {kernel.process.pid} is stopped, and keeps its memory"):
        console.preload("llama", timeout=0.1)


def test_an_eviction_from_a_stopped_process_says_what_to_type(kernel, console):
    """The model is in use and never leaves by itself, because the process does not run."""
    kernel.tell("held = rt.use('qwen'); held.__enter__()")
    pid = kernel.process.pid
    until(lambda: any(lease.pins for lease in console.status().leases()))
    with pytest.raises(StillInUse) as running:
        console.evict("qwen", timeout=5)
    assert "stopped" not in str(running.value)
    kernel.signal(signal.SIGSTOP)
    until(lambda: state(console, kernel) is ProcessState.STOPPED)
    with pytest.raises(StillInUse, match=rf"pid {pid} is stopped.\n  Let .* kill -CONT {pid}"):
        console.evict("qwen", timeout=5)


def test_a_stopped_process_can_be_continued(kernel, console):
    """The problem offers it. The signal goes to the process that the ledger knows."""
    pid = kernel.process.pid
    assert console.resume(str(pid)).because == f"pid {pid} is not stopped"
    kernel.signal(signal.SIGSTOP)
    until(lambda: state(console, kernel) is ProcessState.STOPPED)
    [problem] = problems(console.status())
    [(verb, target)] = problem.actions
    assert (verb, f"kill -9 {pid}" in problem.text) == ("resume", True)
    done = console.resume(target.removesuffix("/"))
    assert done.done and done.because == f"pid {pid} runs again"
    assert state(console, kernel) is ProcessState.RUNNING and not problems(console.status())
    [event] = [event for event in console.status().events if event.action == "resume"]
    assert event.because == done.because
    with pytest.raises(GpuError, match="no process '99999999' shares this ledger"):
        console.resume("99999999")


def test_a_process_of_another_user_is_not_continued(kernel, console, monkeypatch):
    """The operating system decides. The error names who may do it, and the command."""
    kernel.signal(signal.SIGSTOP)
    until(lambda: state(console, kernel) is ProcessState.STOPPED)

    def forbidden(fd: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(signal, "pidfd_send_signal", forbidden)
    with pytest.raises(NotAllowed, match=rf"and root may .*\n.* kill -CONT {kernel.process.pid}"):
        console.resume(str(kernel.process.pid))
    assert state(console, kernel) is ProcessState.STOPPED


@pytest.mark.soak
def test_who_waits_for_a_process_that_writes_its_core_dump_learns_why(kernel, console, tmp_path):
    """The caller is told so, and gets the memory once the dump is written."""
    if "/" in PATTERN.read_text() or PATTERN.read_text().startswith("|"):
        pytest.skip("needs a kernel that writes core dumps into the working directory")
    kernel.tell("held = rt.use('qwen'); held.__enter__(); import os, resource")
    kernel.tell("resource.setrlimit(resource.RLIMIT_CORE, (-1, -1))")
    kernel.tell(f"os.chdir({str(tmp_path)!r}); kept = os.urandom(1 << 20) * {CORE_MIB}")
    console.register("llama", backend="fake", size="14GiB")
    told: list[str] = []
    console._session.on_wait = lambda name, wait: told.append(wait.because if wait else "")
    granted: list[bool] = []

    def wait() -> None:
        granted.append(console.preload("llama", timeout=PATIENCE).done)

    waiter = threading.Thread(target=wait)
    waiter.start()
    until(lambda: told)
    kernel.signal(signal.SIGABRT)
    until(lambda: state(console, kernel) is ProcessState.DUMPING)
    assert "writing a core dump" in text.status(console.status())
    until(lambda: any("while it writes a core dump" in one for one in told))
    assert not granted, "it still holds its memory"
    kernel.process.wait(PATIENCE)
    waiter.join(PATIENCE)
    assert granted == [True]
