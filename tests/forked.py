"""Processes that are forked from one process that has imported the package.

A new interpreter takes half a second of the processor to import the runtime, and many tests start
several. A `Nursery` imports it once. Each of its children is a new process with its own pipes, its
own session and the environment that the caller gives, and ends as any interpreter ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tests.clock import PATIENCE

REPO = Path(__file__).resolve().parents[1]

# The program of the nursery. Each request is a line of JSON with the file descriptors of a child, from 0 on. A child
# leaves the loop, and runs its code as the main module: the interpreter ends as usual after it.
NURSERY = """
import json, os, socket, sys
{imports}
def requests(door):
    while True:
        line, fds, _, _ = socket.recv_fds(door, 1 << 20, 8)
        if not line:
            os._exit(0)
        asked = json.loads(line)
        if "dies" in asked:
            os.waitid(os.P_PID, asked["dies"], os.WEXITED | os.WNOWAIT)
            door.send(b"0")
            continue
        if "ended" in asked:
            try:
                pid, status = os.waitpid(asked["ended"], os.WNOHANG)
                said = os.waitstatus_to_exitcode(status) if pid else None
            except ChildProcessError:
                said = 0
            door.send(json.dumps(said).encode())
            continue
        pid = os.fork()
        if pid:
            for fd in fds:
                os.close(fd)
            door.send(json.dumps(pid).encode())
            continue
        door.close()
        os.setsid()
        for place, fd in enumerate(fds):
            os.dup2(fd, place)
            os.close(fd)
        os.environ.clear()
        os.environ.update(asked["env"])
        os.chdir(asked["cwd"])
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
        sys.argv[1:] = asked["words"]
        return asked["code"]

_code = requests(socket.socket(fileno=int(sys.argv.pop())))
exec(compile(_code, "<child>", "exec"), {{"__name__": "__main__"}})
"""


class Nursery:
    """One process that has made these imports and forks children of itself."""

    def __init__(self, imports: str) -> None:
        """`imports` are the lines of code that all children have in common."""
        self._imports = imports
        self._door: socket.socket | None = None
        self._asking = threading.Lock()

    def start(
        self, code: str, *words: str, env: Mapping[str, str] | None = None, cwd: Path | str = REPO
    ) -> Child:
        """A new process that runs `code` with the arguments `words`.

        `env` is its environment; by default it is that of this process.
        """
        stdin, to_child = os.pipe()
        from_child, stdout = os.pipe()
        try:
            pid = self._fork((stdin, stdout, 2), code, words, env, cwd)
        finally:
            os.close(stdin)
            os.close(stdout)
        return Child(self, pid, open(to_child, "w"), open(from_child))

    def keeper(self, arguments: list[str], log: int, **inherited: int) -> Child:
        """A keeper's process, as `gpu_runtime.ledgers.keeper.wire.spawn` starts it."""
        places = {f"GPU_KEEPER_{name}": str(3 + n) for n, name in enumerate(inherited)}
        with open(os.devnull) as nothing:
            fds = (nothing.fileno(), log, log, *inherited.values())
            pid = self._fork(fds, KEEPER, arguments, {**os.environ, **places}, "/")
        return Child(self, pid, None, None)

    def _fork(
        self,
        fds: Sequence[int],
        code: str,
        words: Sequence[str],
        env: Mapping[str, str] | None,
        cwd: Path | str,
    ) -> int:
        inherited = dict(os.environ if env is None else env)
        return self._ask({"code": code, "words": words, "env": inherited, "cwd": str(cwd)}, fds)

    def status(self, pid: int) -> int | None:
        """The exit status of a child, or None while it runs. A negative one is a signal."""
        return self._ask({"ended": pid}, ())

    def await_death(self, pid: int) -> None:
        """Waits until a child has ended, and leaves its zombie."""
        self._ask({"dies": pid}, ())

    def _ask(self, asked: Mapping[str, object], fds: Sequence[int]) -> int | None:
        with self._asking:
            door = self._opened()
            socket.send_fds(door, [json.dumps(asked).encode()], fds)
            return json.loads(door.recv(1 << 10))

    def _opened(self) -> socket.socket:
        if self._door is None:
            self._door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._door.settimeout(PATIENCE)
            program = NURSERY.format(imports=self._imports)
            path = os.pathsep.join(filter(None, (str(REPO), os.environ.get("PYTHONPATH", ""))))
            with theirs:
                subprocess.Popen(
                    [sys.executable, "-c", program, str(theirs.fileno())], cwd=REPO,
                    env=os.environ | {"PYTHONPATH": path}, stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),), start_new_session=True,
                )  # fmt: skip
        return self._door


KEEPER = (
    "import sys; from gpu_runtime.ledgers.keeper.server import main; sys.exit(main(sys.argv[1:]))"
)
KEEPERS = Nursery("import gpu_runtime.ledgers.keeper.server")
RUNTIME = Nursery(
    """
import pandas
import gpu_runtime.runtime, gpu_runtime.owner.status, gpu_runtime.ledgers.keeper.ledger, gpu_runtime.backends.fake
import tests.ledgers.conftest
"""
)


class Child:
    """A forked process, with the attributes of `subprocess.Popen` that the tests use."""

    def __init__(
        self, nursery: Nursery, pid: int, stdin: IO[str] | None, stdout: IO[str] | None
    ) -> None:
        self._nursery, self.pid, self.stdin, self.stdout = nursery, pid, stdin, stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, or None while the process runs."""
        if self.returncode is None:
            self.returncode = self._nursery.status(self.pid)
        return self.returncode

    def wait(self, timeout: float = PATIENCE) -> int:
        """Waits for the end of the process and returns its exit status."""
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a forked process", timeout)
            time.sleep(0.005)  # the process is a child of another process
        return code

    def await_death(self) -> None:
        """Waits until the process has ended with all its threads, and leaves its zombie."""
        self._nursery.await_death(self.pid)

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the process is known to have ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends the process with SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Answering:
    """A process of `RUNTIME` whose code answers each line that it reads with one line."""

    def __init__(self, code: str) -> None:
        self.process = RUNTIME.start(code)

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        """Waits for the answer to the oldest line that has no answer yet."""
        return self.process.stdout.readline().strip()

    def run(self, line: str) -> str:
        """Sends a line to the process and returns its answer."""
        self.send(line)
        return self.answer()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)

    def end(self) -> None:
        """Kills the process and closes its pipes."""
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()
