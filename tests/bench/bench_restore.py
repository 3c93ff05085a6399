"""Compares the restore of a large module with a preallocated copy of the same number of bytes, in one run."""

from collections.abc import Iterator

import torch

from gpu_runtime.backends.registry import open_backend
from gpu_runtime.devices.probe import open_probe
from gpu_runtime.facts import ModelSpec, Share
from gpu_runtime.units import GIB

from .results import Row
from .timing import medians, seconds


def rows(gib: int = 2, layers: int = 300) -> Iterator[Row]:
    width = int((gib * GIB / 4 / layers) ** 0.5)
    probe = open_probe(f"sim:{2 * gib}GiB,host:{2 * gib}GiB")
    backend, spec = open_backend("torch", probe), ModelSpec("big", "torch")
    device, host = (Share("sim:0", 0),), (Share("host", 0),)

    def load() -> torch.nn.ModuleList:
        linear = torch.nn.utils.skip_init
        parts = (linear(torch.nn.Linear, width, width, bias=False) for _ in range(layers))
        return torch.nn.ModuleList(parts)

    model = backend.load(spec, device, load)
    size = backend.measure(model)[0].bytes
    here, there = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)

    def restore() -> float:
        backend.move(model, host)
        return seconds(lambda: backend.move(model, device))

    copied, restored = medians(7, lambda: there.copy_(here), restore, warm=1)
    backend.drop(model)
    yield Row(
        f"host → device restore of a {gib} GB module, simulated device, against a plain preallocated `copy_`",
        f"{size / restored / 1e9:.1f} of {size / copied / 1e9:.1f} GB/s = {copied / restored:.2f}×", "≥ 0.9×",
        copied / restored >= 0.9
    )  # fmt: skip
