"""Stands between an owner and a server that it started: when the owner is gone, however it ended, so is the server.

A server does not watch its owner, and may start processes in sessions of their own. This small process, the leader of
the server's group, waits for the first of two ends: the server's, which it passes on, or that of the line to its owner,
which the system closes. Then it ends all that descends from it. Run by itself; only the standard library here.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: 0


def descendants(pid: int) -> list[int]:
    """The processes that descend from that one, orphans too: they come to whoever adopts orphans, which we do."""
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                children = [int(word) for word in file.read().split()]
        except OSError:
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


def end_all(patience: float, server: int | None) -> None:
    """Asks the server to end, where it still runs, waits that long, and ends what is left of all it started."""
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
    try:
        os.kill(pid, number)
    except ProcessLookupError:  # it ended by itself meanwhile
        pass


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:  # there are none left
        pass


def main(line: int, owner: int, patience: float, command: list[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # what ends us is the line
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != owner:
        return 1
    me = os.getpid()
    pid = os.fork()
    if pid == 0:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.close(line)
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != me:
            os._exit(1)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            sys.stderr.write(f"{command[0]} cannot be started: {error.strerror}\n")
            os._exit(127)
    running = os.pidfd_open(pid)
    ready, _, _ = select.select([line, running], [], [])
    if running in ready:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        end_all(0.0, None)
    else:
        code = 0
        end_all(patience, pid)
    if code < 0:  # told as it was: by the same signal
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(me, -code)
    return code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]))
