"""Measures how long a kernel waits until another one's idle model has left the card."""

import random
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from gpu_runtime.units import GIB

from .bench_crowd import Child, Say, Told, book, ended, runtime
from .results import Row
from .timing import Waits, medians


def recall(busy: bool, tensors: int = 8, rounds: int = 30) -> tuple[Waits, float]:
    """The time from a kernel's request to its grant, and the seconds of a plain copy in the other process.

    Before the grant, an idle 1 GiB model of the other kernel must move to host memory. With `busy`, that kernel's main
    thread runs a pure-Python loop meanwhile.
    """

    def idle(told: Told, say: Say) -> None:
        import torch

        torch.set_num_threads(1)
        rt = runtime(url, "sim:1536MiB,host:4GiB")

        def module() -> Any:
            made = torch.nn.Module()
            for n in range(tensors):
                weight = torch.nn.Parameter(torch.ones(GIB // 4 // tensors), requires_grad=False)
                made.register_parameter(f"w{n}", weight)
            return made

        def come_back() -> None:
            for _ in told:
                with rt.use("big", timeout=30):
                    pass
                say("back")

        rt.register("big", module, size="1GiB")
        rt.preload("big")
        here, there = torch.ones(GIB, dtype=torch.uint8), torch.ones(GIB, dtype=torch.uint8)
        say(medians(4, partial(there.copy_, here), warm=1)[0])
        del here, there
        if busy:
            threading.Thread(target=come_back, daemon=True).start()
            n = 0
            while True:
                n += 1
        come_back()

    with book() as url, ended([Child(idle)]) as [other]:
        copy = other.answer()
        rt = runtime(url, "sim:1536MiB,host:4GiB")
        rt.register("wanted", backend="fake", size="1GiB")
        taken = []
        for _ in range(rounds + 1):
            time.sleep(random.uniform(0.01, 0.1))
            began = time.monotonic()
            with rt.use("wanted", timeout=30):
                taken.append(time.monotonic() - began)
            rt.evict("wanted")
            other.tell()
            assert other.answer() == "back"
        rt.close()
    return Waits.of(taken[1:]), copy  # in the cold round the host's pages are touched first


def rows() -> Iterator[Row]:
    waits, copy = recall(busy=False)
    yield Row(
        "recall of another kernel's idle 1 GiB model, request to grant",
        f"{waits}; the copy alone {copy * 1e3:.0f} ms", "p50 ≤ 50 ms + the copy", waits.median <= 0.05 + copy
    )  # fmt: skip
    for tensors in (8, 40):
        waits, copy = recall(busy=True, tensors=tensors)
        further = 5 * (tensors - 8)
        yield Row(
            f"recall of an idle 1 GiB model in {tensors} tensors, its kernel's main thread in a pure-Python loop",
            f"{waits}; the copy alone {copy * 1e3:.0f} ms", "p99 ≤ 100 ms + the copy"
            + (f" + {further} ms for the further tensors" if further else ""),
            waits.p99 <= 0.1 + copy + further / 1e3
        )  # fmt: skip
