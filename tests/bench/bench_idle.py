"""Measures the cost of idle kernels: 64 processes with a model and a running monitor each, on one kept book.

The figure is the processor time of all processes together during some seconds without requests. The operating system
measures it.
"""

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


def percent_of_a_core(processes: int, seconds: float, settle_seconds: float = 8.0) -> float:
    """The processor time of all idle kernels together, as a percentage of one core."""
    with tempfile.TemporaryDirectory() as directory:
        kernels = [_kernel(f"keeper://{directory}/ledger") for _ in range(processes)]
        try:
            time.sleep(
                settle_seconds
            )  # longer than the grace period: the work after the start is done
            before, began = sum(map(_spent, kernels)), time.monotonic()
            time.sleep(seconds)
            return 100 * (sum(map(_spent, kernels)) - before) / (time.monotonic() - began)
        finally:
            for kernel in kernels:
                kernel.kill()
                kernel.wait()


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
