"""Measures the cost of idle kernels: 64 processes with a model and a running monitor each, on one SQLite book.

    python tests/bench/bench_idle.py [processes] [seconds]

The figure is the processor time of all processes together during some seconds without requests. The operating system
measures it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time

import psutil

KERNEL = """
import sys
from gpu_runtime import Runtime
rt = Runtime(devices="sim:2x100GiB,host:400GiB", ledger=sys.argv[1])
rt.register("m", backend="fake", size="1GiB")
rt.preload("m")
print("ready", flush=True)
sys.stdin.read()
"""


def percent_of_a_core(
    processes: int = 64, seconds: float = 10.0, settle_seconds: float = 8.0
) -> dict[str, float]:
    """The processor time of idle kernels as a percentage of one core, for all together and for the busiest one."""
    with tempfile.TemporaryDirectory() as directory:
        kernels = [_kernel(f"sqlite://{directory}/ledger") for _ in range(processes)]
        try:
            time.sleep(
                settle_seconds
            )  # longer than the grace period, so that the work after the start is done
            before = [_spent(kernel) for kernel in kernels]
            began = time.monotonic()
            time.sleep(seconds)
            spent = [_spent(kernel) - was for kernel, was in zip(kernels, before, strict=True)]
            took = time.monotonic() - began
        finally:
            for kernel in kernels:
                kernel.kill()
                kernel.wait()
    return {"all together": 100 * sum(spent) / took, "the busiest": 100 * max(spent) / took}


def _kernel(ledger: str) -> subprocess.Popen[bytes]:
    kernel = subprocess.Popen(
        [sys.executable, "-c", KERNEL, ledger],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert kernel.stdout and kernel.stdout.readline() == b"ready\n"
    return kernel


def _spent(kernel: subprocess.Popen[bytes]) -> float:
    """The processor seconds of `kernel`, exact to the nanosecond.

    The ticks of /proc/PID/stat are too coarse for so little time.
    """
    spent = 0
    for thread in psutil.Process(kernel.pid).threads():
        with open(f"/proc/{kernel.pid}/task/{thread.id}/schedstat") as file:
            spent += int(file.read().split()[0])
    return spent / 1e9


if __name__ == "__main__":
    given = [float(word) for word in sys.argv[1:3]]
    figures = percent_of_a_core(*([int(given[0])] if given else []), *given[1:])
    print(
        f"{int(given[0]) if given else 64} idle kernels with monitors, processor time as a percentage of one core"
    )
    for name, value in figures.items():
        print(f"{name:>14}  {value:8.2f} %")
