"""Measures the cost of idle kernels: 64 processes with a model and a running monitor each, on one kept book.

The figure is the processor time of all processes together during some seconds without requests. The operating system
measures it.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import psutil

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
PROCESSES, SECONDS = 64, 20.0
SETTLE_SECONDS = 8.0  # longer than the grace period: the work after the start is done


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
    """The processor seconds of `process`, exact to the nanosecond.

    The ticks of /proc/PID/stat are too coarse for so little time.
    """
    nanoseconds = 0
    for thread in psutil.Process(process.pid).threads():
        with open(f"/proc/{process.pid}/task/{thread.id}/schedstat") as file:
            nanoseconds += int(file.read().split()[0])
    return nanoseconds / 1e9
