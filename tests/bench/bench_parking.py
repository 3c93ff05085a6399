"""Measures what the feature of parking costs a notebook that is not parked.

The costs are the count of bytes after each cell, and the longer start of the kernel.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

from gpu_runtime.autoload import BLOCK

CELLS = 200
STARTS = 7
OBJECTS = 170_000  # that the garbage collector tracks in an ordinary notebook


class _Quiet:
    """A kernel in which nothing runs."""

    def why_not(self) -> str:
        return ""

    def mark(self) -> object:
        return 0

    def change(self, mark: object, act) -> str:
        act()
        return ""


def count_milliseconds() -> dict[str, float]:
    """Median milliseconds of the hooks before and after a cell, with 20 models on a card and on a simulated card."""
    import gc

    import torch

    from gpu_runtime import Runtime
    from tests import simgpu

    ballast = [[] for _ in range(max(0, OBJECTS - len(gc.get_objects())))]
    taken = {}
    for where in ("card", "simulated"):
        card = where == "card"
        options = {"probe": simgpu.SimProbe()} if card else {"devices": "sim:24GiB,host:64GiB"}
        with Runtime(ledger="memory:", monitor=False, **options) as rt:
            device = "simgpu:0" if card else "cpu"
            kept = torch.zeros(4 << 20, dtype=torch.uint8, device=device)
            for number in range(20):
                layers = [torch.nn.Linear(8, 8, device=device) for _ in range(10)]
                rt.adopt(f"m{number}", torch.nn.Sequential(*layers).requires_grad_(False))
            kernel = rt.attach_kernel(_Quiet())
            taken[where] = _median_of_cells(kernel, 1.0 if card else 0.1)
            kernel.count()
            began = time.perf_counter()
            kernel.count()
            taken[f"{where}, one count"] = (time.perf_counter() - began) * 1e3
            del kept
    del ballast
    return taken


def _median_of_cells(kernel, share: float) -> float:
    times = []
    for _ in range(int(CELLS * share)):
        began = time.perf_counter()
        kernel.begin("x = 1")
        kernel.end()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def kernel_start_milliseconds() -> dict[str, float]:
    """Median milliseconds until a kernel answers, with and without autoload. The two are measured alternately."""
    from jupyter_client.manager import KernelManager

    taken: dict[str, list[float]] = {"with": [], "without": []}
    with tempfile.TemporaryDirectory() as directory:
        for which in taken:
            profile = Path(directory, which, "profile_default")
            profile.mkdir(parents=True)
            (profile / "ipython_kernel_config.py").write_text(BLOCK if which == "with" else "")
        for _ in range(STARTS):
            for which, times in taken.items():
                manager = KernelManager(kernel_name="python3")
                began = time.perf_counter()
                manager.start_kernel(env={**os.environ, "IPYTHONDIR": f"{directory}/{which}"})
                client = manager.blocking_client()
                client.start_channels()
                client.wait_for_ready(timeout=60)
                times.append(time.perf_counter() - began)
                client.stop_channels()
                manager.shutdown_kernel(now=True)
    return {which: statistics.median(times) * 1e3 for which, times in taken.items()}


if __name__ == "__main__":
    for name, value in {**count_milliseconds(), **kernel_start_milliseconds()}.items():
        print(f"{name:>24}  {value:8.2f} ms")
