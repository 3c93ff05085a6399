"""The memory of a notebook, and two models that take turns: rows of `make gpu-figures`.

What needs no card is measured with simulated cards in `bench_parking.py`.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from gpu_runtime import Runtime
from gpu_runtime.backends.pytorch import search
from gpu_runtime.backends.pytorch import swap as exchanges
from gpu_runtime.units import show_bytes
from tests.owner.kernels import Quiet

from .bench_parking import Parkable
from .results import MEASURED, Row

if TYPE_CHECKING:
    from .gpu_figures import Bench

SMALL_STORAGES = 10_000
MODELS = 20
CELLS = 50


class _Exchanging:
    """Inside the `with` block, the seconds of each exchange of pointers are appended to `seconds`."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._usual = exchanges.at_once, exchanges.Unchanged.then

    def __enter__(self) -> _Exchanging:
        exchanges.at_once, exchanges.Unchanged.then = map(self._timed, self._usual)  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        exchanges.at_once, exchanges.Unchanged.then = self._usual  # type: ignore[method-assign]

    def _timed(self, exchange: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return exchange(*args)
            finally:
                self.seconds.append(time.perf_counter() - began)

        return timed


def _median(taken: list[float]) -> float:
    return statistics.median(taken[1:])  # the first one touches new pages


def parking(bench: Bench) -> Iterator[Row]:
    """Seconds to park and to return a notebook's own tensors, against pinned copies of as many bytes."""
    from . import gpu_figures as figures

    pieces = max(4, bench.size // figures.LAYER_BYTES)
    kept = [torch.ones(bench.size // pieces // 4, device=bench.torch) for _ in range(pieces)]
    size = sum(one.nbytes for one in kept)
    notebook = Parkable(bench.probe, bench.card)
    taken: dict[str, list[float]] = {"park": [], "return": []}
    for _ in range(figures.ROUNDS + 1):
        taken["park"].append(bench.seconds(notebook.park))
        taken["return"].append(bench.seconds(notebook.unpark))
    assert all(one[0] == 1 for one in kept)
    kept.clear()
    bench.probe.empty_cache()
    copies = {"park": figures.pinned_copy(bench, size, out=True)}
    copies["return"] = figures.pinned_copy(bench, size)
    for what, copy in copies.items():
        bare = _median([bench.seconds(copy) for _ in range(figures.ROUNDS + 1)])
        seconds = _median(taken[what])
        rate = f"{size / seconds / 1e9:.1f} GB/s = {seconds / bare:.2f}×"
        yield Row(
            f"{what} of {show_bytes(size)} of a notebook's own tensors, against a pinned copy",
            rate if bench.real else figures.NOT_RUN,
            "≤ 1.3×",
            seconds <= 1.3 * bare if bench.real else None,
        )


def small(bench: Bench) -> Iterator[Row]:
    """Seconds to park and to return many small storages, and the part in which no code may run."""
    from . import gpu_figures as figures

    usual, search.SIMULATED_BYTES = search.SIMULATED_BYTES, 4096
    try:
        kept = [torch.ones(1024, device=bench.torch) for _ in range(SMALL_STORAGES)]
        notebook = Parkable(bench.probe, bench.card)
        taken: dict[str, list[float]] = {"park": [], "return": []}
        with _Exchanging() as exchanging:
            for _ in range(figures.ROUNDS + 1):
                taken["park"].append(bench.seconds(notebook.park))
                taken["return"].append(bench.seconds(notebook.unpark))
        del kept
    finally:
        search.SIMULATED_BYTES = usual
    away, back = (_median(taken[what]) for what in taken)
    yield Row(
        f"{SMALL_STORAGES:,} storages of 4 KiB, parked and returned",
        f"{away * 1e3:.0f} and {back * 1e3:.0f} ms" if bench.real else figures.NOT_RUN,
        "≤ 200 ms each",
        max(away, back) <= 0.2 if bench.real else None,
    )
    guards, returns = (_median(exchanging.seconds[part::2]) for part in (0, 1))
    yield Row(
        f"the second phase, in which no other code runs: {SMALL_STORAGES:,} guards in place, and removed",
        f"{guards * 1e3:.1f} and {returns * 1e3:.1f} ms" if bench.real else figures.NOT_RUN,
        MEASURED,
        None,
    )


def count(bench: Bench) -> Iterator[Row]:
    """Milliseconds that the hooks of a notebook take for each cell."""
    from . import gpu_figures as figures

    options: dict[str, Any] = {"devices": "cuda"} if bench.real else {"probe": bench.probe}
    with Runtime(ledger="memory:", monitor=False, **options) as rt:
        kept = torch.zeros(4 << 20, dtype=torch.uint8, device=bench.torch)
        for number in range(MODELS):
            layers = [torch.nn.Linear(8, 8, device=bench.torch) for _ in range(10)]
            rt.adopt(f"m{number}", torch.nn.Sequential(*layers).requires_grad_(False))
        kernel = rt.attach_kernel(Quiet())
        taken = [bench.seconds(lambda: (kernel.begin("x = 1"), kernel.end())) for _ in range(CELLS)]
        del kept
    yield Row(
        f"beginning and end of a cell beside {MODELS} models on the card",
        f"{_median(taken) * 1e3:.2f} ms" if bench.real else figures.NOT_RUN,
        "≤ 1 ms",
        _median(taken) <= 1e-3 if bench.real else None,
    )


def swap(bench: Bench) -> Iterator[Row]:
    """Two models that do not fit together, used in turn: the seconds until the wanted one is there."""
    from . import gpu_figures as figures

    with tempfile.TemporaryDirectory() as place:
        ledger = f"keeper://{place}/ledger"
        if bench.real:
            kept = torch.zeros(1, device=bench.torch)
            with Runtime(devices="cuda", ledger=ledger) as rt:
                card = rt.probe.devices[0]
                room = rt.probe.used()[card.id] + 1.5 * bench.size
            options = {"devices": "cuda", "gpu_memory_max_percent": room / card.total_bytes}
        else:
            room = bench.size * 3 // 2
            options = {"devices": f"sim:{room},host:{6 * bench.size}", "gpu_memory_max_percent": 1}
        with Runtime(ledger=ledger, eviction_grace_seconds=0, **options) as rt:
            for name in ("one", "two"):
                rt.register(name, bench.module, size=bench.size)
                rt.preload(name, timeout=60)
            taken = [
                bench.seconds(lambda name=name: rt.preload(name, timeout=60))  # type: ignore[misc]
                for name in ("one", "two") * (figures.ROUNDS // 2 + 2)
            ]
            restored = rt.status().totals["restorations"]
        kept = None  # noqa: F841
    assert restored >= figures.ROUNDS, f"only {restored} of the swaps took place"
    seconds = statistics.median(taken[2:])
    yield Row(
        f"a model of {show_bytes(bench.size)} is wanted whose room another one has: until it can be used",
        f"{seconds * 1e3:.0f} ms, {2 * bench.size / seconds / 1e9:.1f} GB/s out and in"
        if bench.real
        else figures.NOT_RUN,
        MEASURED,
        None,
    )
