"""Processes that engines run in: each is started in a session of its own, keeps a log, and is ended with all it
started.

The kernel's stop button does not reach them, since Jupyter signals a kernel's whole process group. They end with their
owner by two ways: a socket that the system closes, and a signal at their parent's death. The latter comes when the
*thread* ends that started them; so one thread that never ends starts them all.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ... import threads

KEPT_LOGS = 50
TAIL_BYTES = 8192
_numbers = itertools.count(1)
_lock = threading.Lock()
_orders: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] | None = None


def _forget() -> None:
    global _orders, _lock
    _orders, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)  # the thread stays behind


def _by_the_starter(work: Callable[[], Any]) -> Any:
    """Does it in the thread that never ends; raises what it raises."""
    global _orders
    with _lock:
        if _orders is None:
            _orders = queue.SimpleQueue()
            threads.start(lambda orders=_orders: _serve(orders))
    answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
    _orders.put((work, answer))
    result, error = answer.get()
    if error is not None:
        raise error
    return result


def _serve(orders: queue.SimpleQueue[Any]) -> None:
    while True:
        work, answer = orders.get()
        try:
            answer.put((work(), None))
        except BaseException as error:  # noqa: BLE001 - raised where it was asked for
            answer.put((None, error))


class Child:
    """A process that was started here, the leader of its own group."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        env: dict[str, str] | None = None,
        fds: Sequence[int] = (),
    ) -> None:
        self.log = log
        with open(log, "ab") as file:
            self._popen: subprocess.Popen[bytes] = _by_the_starter(
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
        """Whether it has ended. It is not reaped before `end`, so its number stays its own."""
        if self._popen.returncode is not None:
            return True
        if seconds is None:
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            return True
        until = threading.Event()
        for _ in range(max(1, int(seconds / 0.01))):
            if self.ended:
                return True
            until.wait(0.01)
        return self.ended

    @property
    def ended(self) -> bool:
        if self._popen.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def end(self, patience: float = 0.0) -> int:
        """Ends its whole group, after `patience` seconds for an orderly end; how it ended, as subprocess tells it."""
        with self._ending:
            if self._popen.returncode is None:
                if patience and not self.ended:
                    self._signal(signal.SIGTERM)
                    self.wait(patience)
                self._signal(signal.SIGKILL)
                self._popen.wait()
            return self._popen.returncode

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def tail(self) -> str:
        """The end of its log."""
        return tail(self.log)


def tail(log: Path) -> str:
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        return file.read().decode("utf-8", "replace")
    return ""


def in_words(status: int) -> str:
    """How a process ended.

    >>> in_words(-9), in_words(3)
    ('it was killed by SIGKILL', 'it ended with code 3')
    """
    if status >= 0:
        return f"it ended with code {status}"
    try:
        return f"it was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"it was killed by signal {-status}"


def new_log(name: str) -> Path:
    """A file for an engine's log, in the state directory. The oldest go, so that KEPT_LOGS remain."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    directory = Path(home) / "gpu-console" / "engines"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    known = sorted(
        directory.glob("*.log"), key=lambda path: path.stat().st_mtime_ns if path.exists() else 0
    )
    for old in known[: -KEPT_LOGS + 1]:
        old.unlink(missing_ok=True)
    plain = re.sub(r"[^\w.-]+", "_", name)[:60]
    log = directory / f"{plain}-{os.getpid()}-{next(_numbers)}.log"
    os.close(
        os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    )
    return log


def python_file(file: Path) -> list[str]:
    """The command that runs a file of this package by itself, without what the package imports.

    `-P` keeps the file's directory off `sys.path`: modules beside it may have the names of libraries.
    """
    return [sys.executable, "-P", str(file)]
