"""The figures that need a real card: `make gpu-figures` prints them with date, driver and clock.

The same code runs on the simulated accelerator where there is no card. Its table then has the bytes, and says "not run"
for each figure that only a card can give.

    python -m tests.bench.gpu_figures --gib 0.25 duplex part    # smaller models, and only these figures
    python -m tests.bench.gpu_figures --out figures.md          # also writes the table to a file
    python -m tests.bench.gpu_figures --put figures.md          # measures nothing: puts the file into RESULTS.md
"""

import argparse
import contextlib
import gc
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpu_runtime import Runtime
from gpu_runtime.backends.pytorch import search, storages
from gpu_runtime.backends.pytorch import swap as exchanges
from gpu_runtime.backends.pytorch.transformers_backend import TransformersBackend
from gpu_runtime.backends.registry import open_backend
from gpu_runtime.devices.drivers import Listing
from gpu_runtime.devices.probe import Probe, open_probe
from gpu_runtime.facts import HOST, ModelSpec, Share
from gpu_runtime.units import GIB, MIB, show_bytes
from tests.owner.kernels import Quiet

from .bench_parking import Parkable
from .bench_shared import save
from .results import HEAD, MEASURED, RESULTS, Row, merged

ROUNDS = 5
LAYER_BYTES = 32 * MIB
SMALL_STORAGES, MODELS, CELLS = 10_000, 20, 50
NOT_RUN = "not run: no card"


class Bench:
    """The card under test, real or simulated, and models of `size` bytes on it."""

    def __init__(self, size: int) -> None:
        self.real = torch.cuda.is_available()
        self.size = size
        host = f"sim:{6 * size},host:{6 * size}"
        self.probe: Probe = open_probe("cuda" if self.real else host)
        self.card = next(device.id for device in self.probe.cards)
        self.torch = self.probe.place(self.card).torch
        self.backend = open_backend("torch", self.probe)

    def on(self, device: str) -> tuple[Share, ...]:
        return (Share(device, 0),)

    def settle(self) -> None:
        """Waits until the card has finished its work."""
        if self.real:
            torch.cuda.synchronize()

    def seconds(self, act: Callable[[], object]) -> float:
        self.settle()
        began = time.perf_counter()
        act()
        self.settle()
        return time.perf_counter() - began

    def module(self) -> torch.nn.Module:
        """A module of about `size` bytes, in layers of 32 MiB or less. All weights are equal.

        Random weights would take 4 s for each GiB, because one processor makes them.
        """
        layers = max(4, self.size // LAYER_BYTES)
        width = int((self.size / 4 / layers) ** 0.5)
        parts = [
            torch.nn.utils.skip_init(torch.nn.Linear, width, width, bias=False)
            for _ in range(layers)
        ]
        for part in parts:
            torch.nn.init.constant_(part.weight, 1 / width)
        return torch.nn.Sequential(*parts).eval().requires_grad_(False)

    def row(self, what: str, figure: str, target: str, reached: bool | None) -> Row:
        """The row of a figure that only a real card can give."""
        return Row(what, figure, target, reached) if self.real else Row(what, NOT_RUN, target, None)

    def model(self, name: str) -> Any:
        return self.backend.load(ModelSpec(name, "torch"), self.on(self.card), self.module)

    def bytes_of(self, model: Any) -> int:
        return sum(share.bytes for share in self.backend.measure(model))


def machine(bench: Bench) -> str:
    """The card, its driver and its clocks; or that the accelerator is simulated."""
    version = f"torch {torch.__version__}"
    if not hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
        version += " with our exchange of storages"
    if not bench.real:
        return f"simulated accelerator, {version}, no driver, no clock"
    listing = bench.probe.listing
    assert listing is not None
    driver = listing.source.versions().get("driver", "unknown")
    name = torch.cuda.get_device_name(bench.torch)
    parts = (name, f"driver {driver}", f"CUDA {torch.version.cuda}", version, clocks(listing))
    return ", ".join(parts)


def clocks(listing: Listing) -> str:
    """The clocks of the first card of the `listing`, which is the card under test.

    NVML's first card can be another one: CUDA has its own order, and may show only some cards.
    """
    if listing.source.NAME != "NVML":
        return "clocks unknown"
    import pynvml

    card = listing.cards[0].handle.whole  # an instance of a partitioned card has no clocks
    try:
        now = pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_SM)
        most = pynvml.nvmlDeviceGetMaxClockInfo(card, pynvml.NVML_CLOCK_SM)
        memory = pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_MEM)
    except pynvml.NVMLError as error:
        return f"clocks unknown ({error})"
    return f"SM {now} of {most} MHz, memory {memory} MHz"


def _median(taken: list[float]) -> float:
    return statistics.median(taken[1:])  # the first one touches new pages


def restore_and_pinned(bench: Bench) -> Iterator[Row]:
    """Restore against the peak of the bus, and the pinned bytes of a model in host memory."""
    model = bench.model("net")
    size = bench.bytes_of(model)
    copy = pinned_copy(bench, size)
    back = lambda: bench.backend.move(model, bench.on(bench.card))
    copies, taken = [], []
    for _ in range(ROUNDS + 1):  # in turn, because the speed of a busy machine changes
        copies.append(bench.seconds(copy))
        bench.backend.move(model, bench.on(HOST))
        taken.append(bench.seconds(back))
    del copy
    peak, restore = size / _median(copies), size / _median(taken)
    ratio = restore / peak
    reference = "pinned `cudaMemcpyAsync`" if bench.real else "a preallocated copy"
    yield Row(
        f"restore of {show_bytes(size)}, against {reference}",
        f"{restore / 1e9:.1f} of {peak / 1e9:.1f} GB/s = {ratio:.2f}×", "≥ 0.90×", ratio >= 0.90
    )  # fmt: skip
    bench.backend.move(model, bench.on(HOST))
    bench.probe.place(HOST).empty_cache()
    regions = list(bench.probe.place(HOST)._regions.values())
    mapped = sum(len(region) for region in regions) / size
    pinned = sum(len(region) for region in regions if region.pinned) / size
    figure = f"{pinned:.3f}×" if bench.real else f"{NOT_RUN} (mapped: {mapped:.3f}×)"
    reached = 0 < pinned <= 1.02 if bench.real else None
    yield Row("pinned bytes, against the weights", figure, "≤ 1.02×", reached)
    bench.backend.drop(model)


def pinned_copy(bench: Bench, size: int, out: bool = False) -> Callable[[], object]:
    """A copy from host memory to the card, or `out` of it, between buffers that exist already."""
    host = bench.probe.place(HOST)
    [block] = host.allocate_row([size])
    here = torch.frombuffer(block.buffer(), dtype=torch.uint8)
    here.fill_(1)
    there = torch.ones(size, dtype=torch.uint8, device=bench.torch)
    target, source = (here, there) if out else (there, here)
    return lambda: target.copy_(source, non_blocking=True)


def duplex(bench: Bench) -> Iterator[Row]:
    """A copy-out and a copy-in at once, against the longer of the two."""
    one, other = bench.model("one"), bench.model("other")
    bench.backend.move(other, bench.on(HOST))
    outs, backs, both = [], [], []
    for _ in range(ROUNDS + 1):
        out = partial(bench.backend.move, one, bench.on(HOST))
        outs.append(bench.seconds(out))
        backs.append(bench.seconds(partial(bench.backend.move, one, bench.on(bench.card))))
        into = partial(bench.backend.move, other, bench.on(bench.card))
        both.append(bench.seconds(partial(_together, out, into)))
        one, other = other, one
    ratio = _median(both) / max(_median(outs), _median(backs))
    what = "duplex: one model out and another in at once, against the longer of the two"
    yield bench.row(what, f"{ratio:.2f}×", "≤ 1.15×", ratio <= 1.15)
    bench.backend.drop(one)
    bench.backend.drop(other)


def _together(*acts: Callable[[], object]) -> None:
    threads = [threading.Thread(target=act) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def clean_offload(bench: Bench) -> Iterator[Row]:
    """The offload of an unchanged model that has a shadow, against `module.to("cpu")`."""
    with tempfile.TemporaryDirectory() as place:
        save(place, bench.size)
        backend = TransformersBackend(bench.probe)
        spec = ModelSpec("saved", "transformers", source=place)
        model = backend.load(spec, bench.on(bench.card), shadow=True)
        with _counting() as copied:
            taken = bench.seconds(lambda: backend.move(model, bench.on(HOST)))
        size = sum(share.bytes for share in backend.measure(model))
        backend.drop(model)
    what = f'clean offload of {show_bytes(size)} with a shadow, against `module.to("cpu")`'
    yield Row(f"{what}: bytes copied", f"{sum(copied)}", "0", not sum(copied))
    ratio = 0.0
    if bench.real:
        plain = bench.module().to(bench.torch)
        ratio = taken / bench.seconds(lambda: plain.to("cpu"))
    yield bench.row(f"{what}: seconds", f"{ratio:.3f}×", "≤ 0.02×", ratio <= 0.02)


@contextlib.contextmanager
def _counting() -> Iterator[list[int]]:
    """Inside the `with` block, the bytes of each copy of storages are appended to the list."""
    sizes: list[int] = []
    usual = storages._copy_all

    def counted(sources: list[torch.Tensor], *rest: Any) -> None:
        sizes.append(sum(source.nbytes for source in sources))
        usual(sources, *rest)

    storages._copy_all = counted
    try:
        yield sizes
    finally:
        storages._copy_all = usual


def part(bench: Bench) -> Iterator[Row]:
    """A part of an idle model that leaves and returns: the bytes moved each way."""
    model = bench.model("large")
    size, piece = bench.bytes_of(model), next(model.module.parameters()).nbytes
    wanted = max(piece, size * 3 // 40 // piece * piece)
    with _counting() as copied:
        shares = (Share(bench.card, size - wanted), Share(HOST, wanted))
        bench.backend.move(model, shares)
        bench.backend.move(model, bench.on(bench.card))
    most = max(copied, default=0)
    yield Row(
        f"{show_bytes(wanted)} taken from an idle model of {show_bytes(size)} and given back: bytes moved each way",
        show_bytes(most), f"≤ {show_bytes(wanted + piece)}: these bytes and one piece", 0 < most <= wanted + piece
    )  # fmt: skip
    bench.backend.drop(model)


# -- the memory of a notebook, and two models that take turns. bench_parking.py has what needs no card --------------


@contextlib.contextmanager
def _exchanging() -> Iterator[list[float]]:
    """Inside the `with` block, the seconds of each exchange of pointers are appended to the list."""
    seconds: list[float] = []
    usual = exchanges.at_once, exchanges.Unchanged.then

    def timed(exchange: Callable[..., Any]) -> Callable[..., Any]:
        def one(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return exchange(*args)
            finally:
                seconds.append(time.perf_counter() - began)

        return one

    exchanges.at_once, exchanges.Unchanged.then = map(timed, usual)  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        exchanges.at_once, exchanges.Unchanged.then = usual  # type: ignore[method-assign]


def _parked(bench: Bench) -> tuple[float, float]:
    """The median seconds to park this process, as a notebook, and to return it."""
    notebook = Parkable(bench.probe, bench.card)
    moves = [
        (bench.seconds(notebook.park), bench.seconds(notebook.unpark)) for _ in range(ROUNDS + 1)
    ]
    away, back = (_median(list(taken)) for taken in zip(*moves, strict=True))
    return away, back


def parking(bench: Bench) -> Iterator[Row]:
    """Seconds to park and to return a notebook's own tensors, against pinned copies of as many bytes."""
    pieces = max(4, bench.size // LAYER_BYTES)
    kept = [torch.ones(bench.size // pieces // 4, device=bench.torch) for _ in range(pieces)]
    size = sum(one.nbytes for one in kept)
    taken = _parked(bench)
    assert all(one[0] == 1 for one in kept)
    kept.clear()
    bench.probe.empty_cache()
    copies = pinned_copy(bench, size, out=True), pinned_copy(bench, size)
    for name, seconds, copy in zip(("park", "return"), taken, copies, strict=True):
        bare = _median([bench.seconds(copy) for _ in range(ROUNDS + 1)])
        what = f"{name} of {show_bytes(size)} of a notebook's own tensors, against a pinned copy"
        rate = f"{size / seconds / 1e9:.1f} GB/s = {seconds / bare:.2f}×"
        yield bench.row(what, rate, "≤ 1.3×", seconds <= 1.3 * bare)


def small(bench: Bench) -> Iterator[Row]:
    """Seconds to park and to return many small storages, and the part in which no code may run."""
    usual, search.SIMULATED_BYTES = search.SIMULATED_BYTES, 4096
    try:
        kept = [torch.ones(1024, device=bench.torch) for _ in range(SMALL_STORAGES)]
        with _exchanging() as seconds:
            away, back = _parked(bench)
        del kept
    finally:
        search.SIMULATED_BYTES = usual
    what = f"{SMALL_STORAGES:,} storages of 4 KiB, parked and returned"
    figure = f"{away * 1e3:.0f} and {back * 1e3:.0f} ms"
    yield bench.row(what, figure, "≤ 200 ms each", max(away, back) <= 0.2)
    guards, returns = _median(seconds[::2]), _median(seconds[1::2])
    yield bench.row(
        f"the second phase, in which no other code runs: {SMALL_STORAGES:,} guards in place, and removed",
        f"{guards * 1e3:.1f} and {returns * 1e3:.1f} ms", MEASURED, None
    )  # fmt: skip


def count(bench: Bench) -> Iterator[Row]:
    """Milliseconds that the hooks of a notebook take for each cell."""
    options: dict[str, Any] = {"devices": "cuda"} if bench.real else {"probe": bench.probe}
    with Runtime(ledger="memory:", monitor=False, **options) as rt:
        kept = torch.zeros(4 << 20, dtype=torch.uint8, device=bench.torch)
        for number in range(MODELS):
            layers = [torch.nn.Linear(8, 8, device=bench.torch) for _ in range(10)]
            rt.adopt(f"m{number}", torch.nn.Sequential(*layers).requires_grad_(False))
        kernel = rt.attach_kernel(Quiet())
        both = lambda: (kernel.begin("x = 1"), kernel.end())
        taken = _median([bench.seconds(both) for _ in range(CELLS)])
        del kept
    what = f"beginning and end of a cell beside {MODELS} models on the card"
    yield bench.row(what, f"{taken * 1e3:.2f} ms", "≤ 1 ms", taken <= 1e-3)


def swap(bench: Bench) -> Iterator[Row]:
    """Two models that do not fit together, used in turn: the seconds until the wanted one is there."""
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
                bench.seconds(partial(rt.preload, name, timeout=60))
                for name in ("one", "two") * (ROUNDS // 2 + 2)
            ]
            restored = rt.status().totals["restorations"]
        kept = None  # noqa: F841
    assert restored >= ROUNDS, f"only {restored} of the swaps took place"
    seconds = statistics.median(taken[2:])
    yield bench.row(
        f"a model of {show_bytes(bench.size)} is wanted whose room another one has: until it can be used",
        f"{seconds * 1e3:.0f} ms, {2 * bench.size / seconds / 1e9:.1f} GB/s out and in", MEASURED, None
    )  # fmt: skip


FIGURES = {
    "restore": restore_and_pinned, "duplex": duplex, "clean": clean_offload, "part": part,
    "parking": parking, "small": small, "count": count, "swap": swap,
}  # fmt: skip


def measured(bench: Bench, wanted: list[str]) -> Iterator[Row]:
    """The rows of the figures called `wanted`. If a figure fails, its row has the error."""
    for name in wanted or FIGURES:
        try:
            yield from FIGURES[name](bench)
        except Exception as error:  # the other figures are measured all the same
            traceback.print_exc()
            text = (str(error).strip().splitlines() or [""])[0].replace("|", "/")
            yield Row(name, f"**failed**: {type(error).__name__}: {text[:200]}", "", False)
        gc.collect()
        bench.settle()
        bench.probe.empty_cache()


def main(words: list[str] | None = None) -> int:
    """Prints the table. Returns the exit status: 1 if a figure failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("only", nargs="*", choices=[[], *FIGURES], help="only these figures")
    parser.add_argument("--gib", type=float, default=2.0, help="bytes of a model, in GiB (2)")
    parser.add_argument("--out", type=Path, help="a file that gets the table too")
    parser.add_argument("--put", type=Path, help="a file whose rows go into RESULTS.md")
    given = parser.parse_args(words)
    if given.put:
        table = given.put.read_text().splitlines()[len(HEAD.splitlines()) :]
        RESULTS.write_text(merged(RESULTS.read_text(), table))
        return 0
    bench = Bench(int(given.gib * GIB))
    lines, failed = HEAD.splitlines(), False
    print("\n".join(lines), flush=True)
    for row in measured(bench, given.only):
        lines.append(row.line(machine(bench)))
        failed |= row.figure.startswith("**failed**")
        print(lines[-1], flush=True)  # if the time is up, the rows until then are known
        if given.out:
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text("\n".join(lines) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
