"""Compares offload and restore of a large module with a preallocated copy of the same number of bytes, in one run.

python -m tests.bench.bench_restore [GiB]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from gpu_runtime.backends.registry import open_backend
from gpu_runtime.devices.probe import open_probe
from gpu_runtime.facts import ModelSpec, Share
from gpu_runtime.units import GIB


class Figures(NamedTuple):
    """Medians, in bytes per second."""

    size: int
    copy: float
    restore: float
    offload: float

    @property
    def restore_ratio(self) -> float:
        return self.restore / self.copy


def measure(gib: float = 2.0, layers: int = 300, rounds: int = 7) -> Figures:
    """Alternately moves and copies a module of `gib` GiB with so many `layers`. The first, cold round is left out."""
    width = int((gib * GIB / 4 / layers) ** 0.5)
    probe = open_probe(f"sim:{int(2 * gib * GIB)},host:{int(2 * gib * GIB)}")
    backend, spec = open_backend("torch", probe), ModelSpec("big", "torch")
    device, host = (Share("sim:0", 0),), (Share("host", 0),)
    model = backend.load(
        spec,
        device,
        lambda: torch.nn.ModuleList(
            torch.nn.utils.skip_init(torch.nn.Linear, width, width, bias=False)
            for _ in range(layers)
        ),
    )
    size = backend.measure(model)[0].bytes
    here, there = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    seconds: dict[str, list[float]] = {"copy": [], "offload": [], "restore": []}
    for _ in range(rounds + 1):
        seconds["copy"].append(_timed(lambda: there.copy_(here)))
        seconds["offload"].append(_timed(lambda: backend.move(model, host)))
        seconds["restore"].append(_timed(lambda: backend.move(model, device)))
    backend.drop(model)
    return Figures(
        size,
        *(size / statistics.median(seconds[what][1:]) for what in ("copy", "restore", "offload")),
    )


def _timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


if __name__ == "__main__":
    figures = measure(float(sys.argv[1]) if len(sys.argv) > 1 else 2.0)
    print(
        f"{figures.size / GIB:.2f} GiB, medians\n"
        f"plain copy_   {figures.copy / 1e9:6.1f} GB/s\n"
        f"restore       {figures.restore / 1e9:6.1f} GB/s   {figures.restore_ratio:.2f} of the copy\n"
        f"offload       {figures.offload / 1e9:6.1f} GB/s   {figures.offload / figures.copy:.2f} of the copy"
    )
