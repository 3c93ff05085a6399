"""A busy parent that forks again and again: `python -m tests.stories.forking URL FORKS SEED`.

The threads of the parent read the book and the journal, write and lease without pause. Each child does one thing and
ends. The parent prints the results of its children as JSON.
"""

import faulthandler
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

import gpu_runtime
from tests.clock import PATIENCE

BATCH = 20  # children of one pool


def status(rt: gpu_runtime.Runtime) -> None:
    assert rt.specs() == () and rt.status().devices


def lease(rt: gpu_runtime.Runtime) -> None:
    with rt.lease("1MiB", timeout=PATIENCE):
        pass


def the_one_runtime(rt: gpu_runtime.Runtime) -> None:
    assert gpu_runtime.runtime() is rt, "a fork makes no second runtime"
    rt.events()


ACTS = (None, status, lease, the_one_runtime, gpu_runtime.Runtime.close)


def in_pool(number: int) -> int:
    """The work of a process in a pool: every fourth of them uses the runtime."""
    if number % 4 == 0:
        status(gpu_runtime.runtime())
    return number


def fork_once(rt: gpu_runtime.Runtime, act: Callable[[gpu_runtime.Runtime], None] | None) -> str:
    """Forks a child that calls `act`. Returns how the child ended: `ended`, `hangs` or `fails`."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if act is not None:
                act(rt)
                rt.close()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + PATIENCE
    while True:
        ended, code = os.waitpid(pid, os.WNOHANG)
        if ended:
            return "fails" if code else "ended"
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGUSR1)  # the child then prints where it hangs
            time.sleep(0.5)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "hangs"
        time.sleep(0.0005)


def pool() -> str:
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=BATCH // 4) as workers:
        answers = workers.map_async(in_pool, range(BATCH), chunksize=1)
        try:
            return "ended" if answers.get(PATIENCE) == list(range(BATCH)) else "fails"
        except multiprocessing.TimeoutError:
            return "hangs"


def command() -> str:
    """Runs a command whose `preexec_fn` makes Python call the hooks of a fork."""
    try:
        done = subprocess.run(["true"], preexec_fn=lambda: None, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return "hangs"
    return "fails" if done.returncode else "ended"


def loop(act: Callable[[], object]) -> None:
    while True:
        act()


def main(url: str, forks: int, seed: int) -> None:
    os.environ["GPU_LEDGER"] = url
    os.environ["GPU_DEVICES"] = "sim:2x24GiB,host:64GiB"
    faulthandler.register(signal.SIGUSR1)
    dice = random.Random(seed)
    rt = gpu_runtime.runtime()
    rt.register("held", backend="fake", size="1GiB")
    rt.preload("held")
    # If a thread imports a module at the moment of the fork, the child can never import it. This is
    # a limit of Python. So the modules that the calls below need are imported first.
    acts = (lambda: lease(rt), rt.status, rt.events, lambda: rt.history("1m"))
    for act in acts:
        act()
    # These threads are inside the ledger and the journal nearly all the time.
    for act in acts:
        threading.Thread(target=loop, args=(act,), daemon=True).start()
    found: Counter[str] = Counter()
    while found.total() < forks:
        kind = dice.random()
        if kind < 0.02:
            found[pool()] += BATCH
        elif kind < 0.1:
            found[command()] += 1
        else:
            found[fork_once(rt, dice.choice(ACTS))] += 1
    assert rt.status().devices and rt.here("held")
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
