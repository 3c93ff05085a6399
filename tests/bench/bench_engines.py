"""Compares the swap of two llama.cpp models with the engine's own start. Also measures the cost of a killed worker.

The card holds only one of the two models. The engine's own start is a bare process that imports llama_cpp and loads
the same file in the same way. A swap ends the process of one model and starts a process for the other, including the
work on leases and book. Swap and start are measured alternately, so that noise affects both.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpu_runtime import EngineDied, Runtime, samples

BARE = (
    "import llama_cpp; llama_cpp.Llama({!r}, n_ctx=512, n_gpu_layers=-1, verbose=True); "
    "print('ready', flush=True)"
)


def figures(rounds: int = 12) -> dict[str, float]:
    """Median seconds: `start` of a bare engine, `swap` of two models, and `died`, from a kill to the error."""
    with (
        tempfile.TemporaryDirectory() as directory,
        Runtime(
            devices="sim:10MiB,host:64MiB",
            ledger=f"keeper://{directory}/ledger",
            gpu_memory_max_percent=1.0,
        ) as rt,
    ):
        files = {name: samples.gguf_lm(Path(directory) / f"{name}.gguf") for name in ("a", "b")}
        for name, file in files.items():
            rt.register(name, str(file))
            rt.preload(
                name
            )  # from now on the files are in the page cache, and the model has been measured
        starts, swaps, died = [], [], []
        for turn in range(rounds):
            starts.append(_bare(files["ab"[turn % 2]]))
            began = time.perf_counter()
            with rt.use("ab"[turn % 2]):
                swaps.append(time.perf_counter() - began)
        for _ in range(5):
            with rt.use("a") as model:
                stream = model.create_completion("hello", max_tokens=480, stream=True)
                next(stream)
                began = time.perf_counter()
                os.kill(model.pid, signal.SIGKILL)
                try:
                    list(stream)
                except EngineDied:
                    assert not list(rt.status().leases())
                    died.append(time.perf_counter() - began)
    return {
        "start": statistics.median(starts),
        "swap": statistics.median(swaps),
        "died": statistics.median(died),
    }


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
