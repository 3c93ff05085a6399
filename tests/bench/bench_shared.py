"""Loads the same saved model in two processes: the bytes read from its files, and the seconds.

The card has room for one model, so the model of the first process is evicted. It has no grace period. With the usual
5 s, the second process waited for the end of this period.
"""

import ctypes
import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gpu_runtime.units import GIB

from .results import Row

PAGE_BYTES = mmap.PAGESIZE
HEADER_BYTES = 128 << 10  # of a file with a short header: the system reads that much ahead
KERNEL = """
import json, os, sys, time
from gpu_runtime import Runtime
import transformers
from transformers import LlamaForCausalLM
from tests.bench.bench_shared import emptied, read_bytes
place, ledger, size = sys.argv[1:]
rt = Runtime(
    devices=f"sim:{size},host:{size}",
    cpu_memory_max_percent=1.0,
    ledger=ledger,
    eviction_grace_seconds=0,
)
rt.register("model", place)
emptied(place)
began = time.perf_counter()
rt.preload("model")
print(json.dumps({"seconds": time.perf_counter() - began, "read": read_bytes(place)}), flush=True)
sys.stdin.readline()
"""


def _weights(place: str) -> Iterator[Path]:
    return Path(place).glob("*.safetensors")


def emptied(place: str) -> None:
    """Removes the weights of a saved model from the system's page cache."""
    for path in _weights(place):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_bytes(place: str) -> int:
    """The bytes of the weights that are in the system's page cache, since they were read."""
    libc, total = ctypes.CDLL(None), 0
    for path in _weights(place):
        with path.open("rb") as file:
            pages = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
            start = ctypes.addressof(ctypes.c_ubyte.from_buffer(pages))
            marks = (ctypes.c_ubyte * -(-len(pages) // PAGE_BYTES))()
            libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(pages)), marks)
            total += PAGE_BYTES * sum(mark & 1 for mark in marks)
    return total


def save(place: str, size: int) -> None:
    """Writes a transformers model of about `size` bytes into the directory `place`."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    hidden, heads = (2048, 16) if size >= GIB else (256, 4)
    layer = 4 * (4 * hidden * hidden + 3 * hidden * 2 * hidden)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_attention_heads=heads,
        num_hidden_layers=max(2, size // layer),
        vocab_size=256,
    )
    LlamaForCausalLM(config).save_pretrained(place)


def rows(gib: int = 2) -> Iterator[Row]:
    size = gib * GIB
    kernels, found = [], []
    with tempfile.TemporaryDirectory() as place:
        save(f"{place}/model", size)
        words = [f"{place}/model", f"keeper://{place}/ledger", str(size + size // 4)]
        command, pipe = [sys.executable, "-c", KERNEL, *words], subprocess.PIPE
        try:
            for _ in range(2):
                kernels.append(subprocess.Popen(command, stdin=pipe, stdout=pipe))
                found.append(json.loads(kernels[-1].stdout.readline()))
        finally:
            for kernel in kernels:
                kernel.kill()
                kernel.wait()
    first, second = found
    ratio = second["seconds"] / first["seconds"]
    yield Row(
        f"a second kernel loads the same {gib} GB model, against the first, which reads the weights from disk",
        f"{second['seconds']:.1f} of {first['seconds']:.1f} s = {ratio:.2f}×, {second['read'] / 1024:.0f} KiB read, "
        "with the header", "≤ 0.5×, no weights", ratio <= 0.5 and second["read"] <= HEADER_BYTES
    )  # fmt: skip
