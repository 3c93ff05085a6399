"""Compares the wake of a model in a process of its own with its cold start, and a swap of two with bare copies.

Bare copies: the same bytes, between tensors that exist, in this process. All alternate in one run.
"""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from gpu_runtime import samples
from gpu_runtime.backends.processes.model_processes import ProcessBackend
from gpu_runtime.devices.probe import open_probe
from gpu_runtime.facts import HOST, ModelSpec, Share
from gpu_runtime.units import MIB

from .results import Row
from .timing import medians, seconds

DEVICES = "sim:2GiB,host:2GiB"


def rows(mib: int = 400) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as place:
        file = samples.causal_lm(Path(place) / "model", size=f"{mib} MiB")
        yield from _rows(ModelSpec("model", "transformers", str(file)), mib)


def _rows(spec: ModelSpec, mib: int) -> Iterator[Row]:
    backend = ProcessBackend("transformers", DEVICES, open_probe(DEVICES))
    card, host = (Share("sim:0", mib * MIB),), (Share(HOST, mib * MIB),)
    awake, asleep = backend.load(spec, card), backend.load(spec, card)
    backend.move(asleep, host)
    size = backend.measure(awake)[0].bytes
    here, there = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)

    turn = [awake, asleep]

    def start() -> float:
        began = time.perf_counter()
        model = backend.load(spec, card)
        took = time.perf_counter() - began
        backend.drop(model)
        return took

    def wake() -> float:
        backend.move(turn[0], host)
        return seconds(lambda: backend.move(turn[0], card))

    def swap() -> float:
        leaving, returning = turn
        turn.reverse()

        def both() -> None:
            backend.move(leaving, host)
            backend.move(returning, card)

        return seconds(both)

    def copies() -> float:
        return seconds(lambda: (there.copy_(here), here.copy_(there)))

    started, woken = medians(3, start, wake)
    copied, swapped = medians(9, copies, swap, warm=1)
    for model in turn:
        backend.drop(model)
    what = f"wake of a model of {mib} MiB in a process of its own, against its cold start"
    yield Row.against(what, woken, started, 0.1)
    what = f"swap of two such models, against an offload and a restore by bare copies of {mib} MiB"
    yield Row.against(what, swapped, copied, 1.2)
