"""Compares the swap of two llama.cpp models with the engine's own start. Also measures the cost of a killed worker.

The card holds only one of the two models. The engine's own start is a bare process that imports llama_cpp and loads
the same file in the same way. In a swap one worker goes to sleep and the other wakes, including the work on leases and
book. Swap and start are measured alternately, so that noise affects both.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

from gpu_runtime import EngineDied, Runtime, samples

from .results import Row
from .timing import medians

BARE = (
    "import llama_cpp; llama_cpp.Llama({!r}, n_ctx=512, n_gpu_layers=-1, verbose=True); "
    "print('ready', flush=True)"
)


def rows(rounds: int = 12) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as place:
        options = {"devices": "sim:10MiB,host:64MiB", "gpu_memory_max_percent": 1.0}
        with Runtime(ledger=f"keeper://{place}/ledger", **options) as rt:
            files = [samples.gguf_lm(Path(place) / f"{name}.gguf") for name in "ab"]
            for name, file in zip("ab", files, strict=True):
                rt.register(name, str(file))
                rt.preload(name)  # the files are then in the page cache, and the model is measured
            names, turns = cycle("ab"), cycle(files)
            bare, swap = lambda: _bare(next(turns)), lambda: _swap(rt, next(names))
            start, swapped = medians(rounds, bare, swap)
            died = statistics.median(_death(rt) for _ in range(5))
    what = "swap of two tiny llama.cpp models, isolated, against the start of the bare engine"
    yield Row.against(what, swapped, start, 0.2)
    what = "from kill -9 of a worker to the error at its caller; the lease is released"
    yield Row(what, f"{died * 1e3:.0f} ms", "≤ 100 ms", died <= 0.1)


def _swap(rt: Runtime, name: str) -> float:
    began = time.perf_counter()
    with rt.use(name):
        return time.perf_counter() - began


def _death(rt: Runtime) -> float:
    """The seconds from the kill of a worker to the error at its caller."""
    with rt.use("a") as model:
        stream = model.create_completion("hello", max_tokens=480, stream=True)
        next(stream)
        began = time.perf_counter()
        os.kill(model.pid, signal.SIGKILL)
        try:
            list(stream)
        except EngineDied:
            assert "a" not in [lease.name for lease in rt.status().leases()]
            return time.perf_counter() - began
    raise AssertionError("the caller got no error")


def _bare(file: Path) -> float:
    """The seconds from the start of a process to a loaded model. The process is then killed."""
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-P", "-c", BARE.format(str(file))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    ) as process:
        process.stdout.readline()
        taken = time.perf_counter() - began
        process.kill()
    return taken
