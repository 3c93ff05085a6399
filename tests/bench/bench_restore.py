"""Compares offload and restore of a large module with a preallocated copy of the same number of bytes, in one run."""

import statistics
import time
from collections.abc import Callable

import torch

from gpu_runtime.backends.registry import open_backend
from gpu_runtime.devices.probe import open_probe
from gpu_runtime.facts import ModelSpec, Share
from gpu_runtime.units import GIB


def bytes_a_second(gib: float = 2.0, layers: int = 300, rounds: int = 7) -> dict[str, float]:
    """Medians of a restore and of a plain `copy_`, measured alternately. The first, cold round is left out."""
    width = int((gib * GIB / 4 / layers) ** 0.5)
    probe = open_probe(f"sim:{int(2 * gib * GIB)},host:{int(2 * gib * GIB)}")
    backend, spec = open_backend("torch", probe), ModelSpec("big", "torch")
    device, host = (Share("sim:0", 0),), (Share("host", 0),)

    def load() -> torch.nn.ModuleList:
        linear = torch.nn.utils.skip_init
        return torch.nn.ModuleList(
            linear(torch.nn.Linear, width, width, bias=False) for _ in range(layers)
        )

    model = backend.load(spec, device, load)
    size = backend.measure(model)[0].bytes
    here, there = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    seconds: dict[str, list[float]] = {"copy": [], "restore": []}
    for _ in range(rounds + 1):
        seconds["copy"].append(_timed(lambda: there.copy_(here)))
        backend.move(model, host)
        seconds["restore"].append(_timed(lambda: backend.move(model, device)))
    backend.drop(model)
    return {what: size / statistics.median(taken[1:]) for what, taken in seconds.items()}


def _timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began
