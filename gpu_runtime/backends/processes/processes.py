"""Child processes for engines. Each child has its own session and process group, and a log.

The kernel's stop button does not reach these processes. Jupyter signals the kernel's whole process
group, and the child processes are in other groups. Two things end a child process when its owner
dies: its socket to the owner closes, and the system sends it a signal because its parent has died.
The system sends this signal even if only the *thread* that started the child ends. So one thread
that never ends starts all child processes.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ... import threads
from ...devices.probe import Probe
from ...facts import Shares
from . import orphan_guard

MOST_RESTARTS = 3  # of a process that ended by itself; then its model is lost
TAIL_BYTES = 32768
STOP_SECONDS = 3.0  # that a guarded process has to end after SIGTERM
_POLL_SECONDS = 0.01
_lock = threading.Lock()
_jobs: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] | None = None


def _forget_starter() -> None:
    global _jobs, _lock
    _jobs, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_starter)  # a forked child has no starter thread


def _in_starter_thread(work: Callable[[], Any]) -> Any:
    """Runs `work()` in the thread that never ends, and returns its result or raises its error."""
    global _jobs
    with _lock:
        if _jobs is None:
            _jobs = queue.SimpleQueue()
            threads.start(lambda jobs=_jobs: _run_jobs(jobs))
    answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
    _jobs.put((work, answer))
    result, error = answer.get()
    try:
        if error is not None:
            raise error
        return result
    finally:
        del error  # else error and traceback keep each other alive until the next collection


def _run_jobs(jobs: queue.SimpleQueue[Any]) -> None:
    while True:
        work, answer = jobs.get()
        try:
            answer.put((work(), None))
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            answer.put((None, error))


class Child:
    """A child process that leads its own process group."""

    def __init__(
        self, command: Sequence[str], *, log: Path, env: dict[str, str], fds: Sequence[int]
    ) -> None:
        """Starts `command` with the environment `env` and the inherited file descriptors `fds`.

        The output of the process is appended to the file `log`.
        """
        self.log = log
        with open(log, "ab") as file:
            self._log_began = file.tell()  # a log may begin with the output of an earlier child
            self._popen: subprocess.Popen[bytes] = _in_starter_thread(
                lambda: subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    env=env,
                    pass_fds=fds,
                    start_new_session=True,
                )
            )
        self.pid = self._popen.pid
        self._ending = threading.Lock()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits up to `seconds` (None: no limit) for the end of the process: whether it has ended.

        The process is not reaped, so that no other process can get its id before `end`.
        """
        if self._popen.returncode is not None:
            return True
        if seconds is None:
            with contextlib.suppress(ChildProcessError):  # it was reaped already
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            return True
        never = threading.Event()
        for _ in range(max(1, int(seconds / _POLL_SECONDS))):
            if self.ended:
                return True
            never.wait(_POLL_SECONDS)
        return self.ended

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        if self._popen.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # it was reaped already
            return True

    def end(self) -> int:
        """Kills the whole process group. Returns the exit status in the form of `subprocess`."""
        with self._ending:
            if self._popen.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
                    os.killpg(self.pid, signal.SIGKILL)
                self._popen.wait()
            return self._popen.returncode

    def tail(self) -> str:
        """The last TAIL_BYTES of the child's output; empty if the log cannot be read."""
        # An unreadable log is ignored: its text only explains an error that is raised anyway.
        with contextlib.suppress(OSError), open(self.log, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(self._log_began, size - TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
        return ""


def in_words(status: int) -> str:
    """How a process with the exit `status` ended. The text is part of an error message.

    >>> in_words(-9), in_words(3)
    ('it was killed by SIGKILL', 'it ended with code 3')
    """
    if status >= 0:
        return f"it ended with code {status}"
    try:
        return f"it was killed by {signal.Signals(-status).name}"
    except ValueError:  # Python has no name for this signal
        return f"it was killed by signal {-status}"


def python_file(file: Path) -> list[str]:
    """The command that runs the Python `file` as a program, without importing its package.

    `-P` keeps its directory off `sys.path`: modules there may have the names of libraries.
    """
    return [sys.executable, "-P", str(file)]


def guarded(
    words: Sequence[str], log: Path, env: dict[str, str], fds: Sequence[int]
) -> tuple[Child, socket.socket]:
    """Starts a guard, which starts the command `words`. Returns the guard and a socket to it.

    When the socket closes, the guard ends the command. The other arguments are as for `Child`.
    """
    line, guard_end = socket.socketpair()
    guard = python_file(Path(orphan_guard.__file__))
    arguments = [str(guard_end.fileno()), str(os.getpid()), str(STOP_SECONDS)]
    command, inherited = [*guard, *arguments, *words], (guard_end.fileno(), *fds)
    try:
        with guard_end:
            return Child(command, log=log, env=env, fds=inherited), line
    except BaseException:
        line.close()
        raise


def card_environment(probe: Probe, shares: Shares) -> dict[str, str]:
    """Environment variables with which a process sees only the cards of `shares`, in their order.

    `probe` knows the devices. A CUDA card is named by UUID if the driver reports one, because the
    number of a card differs between processes that see different cards. If all cards of `shares`
    are simulated, the process sees no card.
    """
    devices = {device.id: device for device in probe.devices}
    visible: dict[str, list[str]] = {"cuda": [], "rocm": []}
    for share in shares:
        device = devices[share.device]
        kind = device.id.partition(":")[0]
        if kind in visible:
            by_uuid = kind == "cuda" and device.uuid
            visible[kind].append(device.uuid if by_uuid else str(device.index))
    cuda, rocm = (",".join(names) for names in visible.values())
    return {"CUDA_VISIBLE_DEVICES": cuda, "HIP_VISIBLE_DEVICES": rocm}
