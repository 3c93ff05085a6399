"""Measures the cost of idle kernels: 64 processes with a model and a running monitor each, on one kept book.

The figure is the processor time of all processes together, with their keeper and the host's helper, during a minute
without requests. The operating system measures it.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import psutil

from gpu_runtime.owner.maintenance import CALM_DOZE_SECONDS, CALM_SECONDS, DOZE_SECONDS

from .results import Row

KERNEL = """
import sys
from gpu_runtime import Runtime
rt = Runtime(devices="sim:2x100GiB,host:400GiB", ledger=sys.argv[1])
rt.register("m", backend="fake", size="1GiB")
rt.preload("m")
print("ready", flush=True)
sys.stdin.read()
"""
PROCESSES, SECONDS = 64, CALM_DOZE_SECONDS  # each kernel looks once
SETTLE_SECONDS = CALM_SECONDS + 2 * DOZE_SECONDS  # all have nothing to do any more


def rows() -> Iterator[Row]:
    kernels: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-c", KERNEL, f"keeper://{directory}/ledger"]
        pipe = subprocess.PIPE
        try:
            for _ in range(PROCESSES):
                kernels.append(
                    subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
                )
                assert kernels[-1].stdout.readline() == b"ready\n"
            time.sleep(SETTLE_SECONDS)
            before, began = sum(map(spent, kernels)), time.monotonic()
            time.sleep(SECONDS)
            percent = 100 * (sum(map(spent, kernels)) - before) / (time.monotonic() - began)
        finally:
            for kernel in kernels:
                kernel.kill()
                kernel.wait()
    yield Row(
        f"{PROCESSES} idle kernels with monitors, the keeper, simulated devices: use of the processor by all of them",
        f"{percent:.2f} % of one core", "≤ 0.2 %", percent <= 0.2
    )  # fmt: skip


def spent(process: subprocess.Popen) -> float:
    """The processor seconds of `process` and of what it has started, exact to the nanosecond.

    The ticks of /proc/PID/stat are too coarse for so little time.
    """
    nanoseconds, here = 0, psutil.Process(process.pid)
    for one in (here, *here.children(recursive=True)):
        for thread in one.threads():
            with open(f"/proc/{one.pid}/task/{thread.id}/schedstat") as file:
                nanoseconds += int(file.read().split()[0])
    return nanoseconds / 1e9
