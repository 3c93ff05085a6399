"""The guard: a small process that ends a server once the server's owner has ended.

A server does not notice the end of its owner. It may also start processes in other sessions, which
a signal to its process group does not reach. So the guard starts the server, and all these
processes are descendants of the guard. The guard waits until the server ends, the owner dies, or
the socket to the owner closes. Then it ends all its descendants. If the server ended by itself, the
guard returns the server's exit status.

The guard runs as a separate program and uses only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: 0


def descendants(pid: int) -> list[int]:
    """The process ids of all descendants of the process `pid`.

    Orphans are included if `pid` is a subreaper, as a guard is: it becomes their parent.
    """
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:  # the process has ended
        return found
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                children = [int(word) for word in file.read().split()]
        except OSError:  # the thread has ended
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


def end_all(patience: float, server: int | None) -> None:
    """Ends all descendants of this process: the `server`, if it still runs, first gets SIGTERM.

    After at most `patience` seconds every remaining process is killed.
    """
    if server is not None:
        _signal(server, signal.SIGTERM)
    until = time.monotonic() + patience
    while time.monotonic() < until and descendants(os.getpid()):
        _reap()
        time.sleep(0.02)
    while left := descendants(os.getpid()):
        for pid in left:
            _signal(pid, signal.SIGKILL)
        _reap()
        time.sleep(0.005)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended by itself meanwhile
        os.kill(pid, number)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):  # there are no children left
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main(line: int, owner: int, patience: float, command: list[str]) -> int:
    """Starts `command` as the server, guards the server, and returns its exit code.

    `line` is the file descriptor of the socket to the process `owner`. When it closes or the owner dies, the
    server gets `patience` seconds to end normally, and the result is 0. If a signal killed the
    server, this process ends by the same signal.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with the server, or when the socket closes
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != owner:  # the owner died before this line
        return 1
    # A child that the owner forked keeps the other end of `line` open.
    guard, ended = os.getpid(), os.pidfd_open(owner)
    pid = os.fork()
    if pid == 0:
        _become(command, line, guard)
    running = os.pidfd_open(pid)
    poll = select.poll()  # `select` takes no descriptor above 1,023, and the owner may have more
    for descriptor in (line, ended, running):
        poll.register(descriptor, select.POLLIN)
    if running in dict(poll.poll()):
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        end_all(0.0, None)
    else:
        code = 0
        end_all(patience, pid)
    if code < 0:  # the server died of a signal: end by the same signal, so that the owner sees it
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(guard, -code)
    return code


def _become(command: list[str], line: int, guard: int) -> None:
    """Replaces the forked child by `command`, which is killed when the `guard` dies. Never returns."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.close(line)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:  # the guard died before prctl took effect
        os._exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be started: {error.strerror}\n")
        os._exit(127)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]))
