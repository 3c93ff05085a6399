"""A notebook is parked (its memory is moved to RAM) while it is interrupted, killed, or used by a
thread. No value is wrong, and nothing leaks.

Each storm runs in a process of its own, since interrupts and threads would disturb other tests.

    python -m tests.stories.test_parking_storms interrupts URL COUNT
"""

import gc
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests import soak
from tests.clock import PATIENCE

from .kernels import counted

DEVICES = "sim:64MiB,host:1GiB"
FLOATS = 2**18  # of a storage of 1 MiB
SETTINGS: dict[str, Any] = {
    "devices": DEVICES,
    "gpu_memory_max_percent": 1.0,
    "cpu_memory_max_percent": 1.0,
    "eviction_grace_seconds": 0,
}


# -- interrupts ------------------------------------------------------------------------------------
def interrupts(url: str, wanted: int) -> dict[str, int]:
    """Interrupts the hooks of cells and parks of a kernel `wanted` times. Raises AssertionError for each fault."""
    import torch

    from gpu_runtime import GpuError, Runtime
    from tests.clock import until
    from tests.owner.kernels import Quiet

    torch.set_num_threads(1)
    dice = random.Random(1)
    done = {"interrupts": 0, "cells": 0, "parks": 0, "looks": 0}
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    rt = Runtime(ledger=url, **SETTINGS)
    kernel = rt.attach_kernel(quiet := Quiet())
    kept = [torch.zeros(FLOATS) for _ in range(4)]

    def interrupted(act: Callable[[], object]) -> None:
        """Calls `act`, as IPython calls a hook: an interrupt ends the hook and nothing else."""
        try:
            signal.setitimer(signal.ITIMER_REAL, dice.uniform(0.00005, 0.004))
            act()
        except KeyboardInterrupt:
            done["interrupts"] += 1
        except GpuError:  # it is in use: an earlier move has not ended yet
            pass
        finally:
            while True:
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    break
                except KeyboardInterrupt:
                    done["interrupts"] += 1

    def look() -> None:
        """Without interrupts, a park and a cell work, and the ledger says where the bytes are."""
        done["looks"] += 1
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                kernel.begin()
                assert not kernel.refusal, kernel.refusal
                kernel.end()
                kernel.count()
                rt.park()
                break
            except GpuError as error:
                assert time.monotonic() < deadline, error
                time.sleep(0.01)
        places = {share.device: share.bytes for share in kernel.resident.lease.shares}
        assert places == {"host": 4 * 2**20}, places
        kernel.begin()
        assert not kernel.refusal, kernel.refusal
        kernel.end()
        assert gc.isenabled() and gc.get_threshold()[0] < 10**6
        book = rt._session.ledger.read()
        found = [(one.name, one.shares, one.target, one.pins) for one in book.leases()]
        assert not book.tickets and len(found) == 1 and not found[0][2], (book.tickets, found)
        until(nothing_is_left)  # a count of the monitor refers to all objects while it searches

    def nothing_is_left() -> bool:
        """The card has the bytes of the tensors, and host memory has none."""
        gc.collect()
        used = rt.probe.used()
        return used["sim:0"] == 4 * 2**20 and not used["host"]

    while done["interrupts"] < wanted:
        quiet.used += 1  # the message of a cell: a copy that was begun before is abandoned
        interrupted(kernel.begin)
        if not kernel.refusal and kernel.resident is not None and kernel.resident.pins:
            quiet.reason = "a cell runs"
            for number, tensor in enumerate(kept):
                tensor.add_(number + 1)
            done["cells"] += 1
            quiet.reason = ""
        interrupted(kernel.end)
        if dice.random() < 0.7:
            interrupted(rt.park)
            done["parks"] += 1
        if not done["cells"] % 250:
            look()
    look()
    for number, tensor in enumerate(kept):
        assert bool((tensor == (number + 1) * done["cells"]).all()), "a value is wrong"
    rt.close()
    return done


# -- kills -----------------------------------------------------------------------------------------
def kills(url: str, wanted: int) -> dict[str, int]:
    """Kills kernels that are parked and return without pause. Their memory is granted to the next request."""
    import torch

    from gpu_runtime import GpuError, Runtime
    from tests.owner.kernels import Quiet

    torch.set_num_threads(1)
    dice, done = random.Random(2), {"kills": 0, "cycles_before_kills": 0}

    def parks(out: int) -> None:
        """The work of a process that will be killed. It writes a byte for each cycle, and x for a wrong value."""
        rt = Runtime(ledger=url, **SETTINGS)
        kernel, kept = rt.attach_kernel(Quiet()), torch.zeros(40 * FLOATS)
        for cycle in range(1, 10**6):
            kernel.begin()
            if not kernel.refusal:
                kept.add_(1)
            right = kernel.refusal or bool((kept == cycle).all())
            kernel.end()
            os.write(out, b"." if right else b"x")
            try:
                rt.park()
            except GpuError:
                pass

    for _ in range(wanted):
        get, put = os.pipe()
        pid = os.fork()  # this process has no runtime, and one thread
        if not pid:
            try:
                parks(put)
            finally:
                os._exit(3)
        os.close(put)
        first = os.read(get, 1)
        time.sleep(dice.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        cycles = first + b"".join(iter(lambda: os.read(get, 4096), b""))  # noqa: B023
        os.close(get)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
        assert cycles and b"x" not in cycles, cycles
        done["kills"] += 1
        done["cycles_before_kills"] += len(cycles)
    with Runtime(ledger=url, **SETTINGS) as rt:
        rt.register("wanted", backend="fake", size="64MiB")
        rt.preload("wanted", timeout=PATIENCE)
        [lease] = rt._session.ledger.read().leases()
        assert lease.name == "wanted"
    return done


# -- a thread that hammers -------------------------------------------------------------------------
def hammered(url: str, wanted: int) -> dict[str, int]:
    """Parks a storage `wanted` times while a user's thread reads it; it is exchanged only while that waits."""
    import torch
    from gpu.obstacles import not_at_rest

    from gpu_runtime.backends.registry import open_backend
    from gpu_runtime.devices.probe import open_probe
    from gpu_runtime.facts import HOST, Share
    from gpu_runtime.threads import undisturbed
    from tests.owner.kernels import Quiet

    torch.set_num_threads(1)
    done = {"hammered_cycles": 0, "reads_of_the_hammer": 0, "refused_exchanges": 0}
    kept, wrong, over, rest = torch.ones(FLOATS), [], threading.Event(), threading.Event()

    def hammer() -> None:
        while not over.is_set():
            if kept.sum().item() != FLOATS:
                wrong.append(done["hammered_cycles"])
            done["reads_of_the_hammer"] += 1
            if not done["reads_of_the_hammer"] % 3:
                rest.wait(0.0002)

    class Guarded(Quiet):
        def change(self, mark: object, act: Callable[[], None]) -> str:
            with undisturbed:
                if why := not_at_rest({threading.get_ident()}):
                    return why
                act()
            return ""

    backend = open_backend("kernel", open_probe(DEVICES))
    handle = backend.open(Guarded(), lambda: ())
    thread = threading.Thread(target=hammer)
    thread.start()
    try:
        while done["hammered_cycles"] < wanted:
            for place in (HOST, "sim:0"):
                while bool(handle.away) != (place == HOST):
                    try:
                        backend.move(handle, (Share(place, 1),))
                    except Exception as error:
                        assert type(error).__name__ == "NotStill", error
                        done["refused_exchanges"] += 1
            done["hammered_cycles"] += 1
    finally:
        over.set()
        thread.join(PATIENCE)
    assert not wrong and bool((kept == 1).all()), wrong
    return done


STORMS = {"interrupts": interrupts, "kills": kills, "hammered": hammered}


# -- the tests -------------------------------------------------------------------------------------
@pytest.mark.timeout(900)
@pytest.mark.parametrize("storm, count", [("kills", 3), ("hammered", 20)])
def test_a_notebook_that_is_parked_in_a_storm_keeps_its_values(keeper, storm, count):
    done = counted("test_parking_storms", storm, keeper, count)
    assert next(iter(done.values())) >= count


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "storm, count", [("interrupts", 10_000), ("kills", 1_000), ("hammered", 300)]
)
def test_a_notebook_that_is_parked_in_a_long_storm_keeps_its_values(keeper, storm, count):
    done = counted("test_parking_storms", storm, keeper, count)
    soak.add("keeper", **{f"parking: {name}": number for name, number in done.items()})


if __name__ == "__main__":
    gc.collect()
    print(json.dumps(STORMS[sys.argv[1]](sys.argv[2], int(sys.argv[3]))))
