"""The figures that need a real card: `make gpu-figures` prints them with date, driver and clock.

The same code runs on the simulated accelerator where there is no card. Its table then has the bytes, and says "not run"
for each figure that only a card can give.

    python -m tests.bench.gpu_figures --gib 0.25 duplex part    # smaller models, and only these figures
    python -m tests.bench.gpu_figures --out figures.md          # also writes the table to a file
    python -m tests.bench.gpu_figures --put figures.md          # measures nothing: puts the file into RESULTS.md
"""

import argparse
import gc
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from gpu_runtime.backends.pytorch import storages
from gpu_runtime.backends.pytorch.transformers_backend import TransformersBackend
from gpu_runtime.backends.registry import open_backend
from gpu_runtime.devices.drivers import Listing
from gpu_runtime.devices.probe import Probe, open_probe
from gpu_runtime.facts import HOST, ModelSpec, Share
from gpu_runtime.units import GIB, MIB, show_bytes
from tests import storage_swap

from .bench_shared import save
from .results import HEAD, RESULTS, Row, merged

ROUNDS = 5
LAYER_BYTES = 32 * MIB
NOT_RUN = "not run: no card"


class Bench:
    """The card under test, real or simulated, and models of `size` bytes on it."""

    def __init__(self, size: int) -> None:
        self.real = torch.cuda.is_available()
        self.stand_in = storage_swap.install()
        self.size = size
        host = f"sim:{6 * size},host:{6 * size}"
        self.probe: Probe = open_probe("cuda" if self.real else host)
        self.card = next(device.id for device in self.probe.devices if not device.is_host)
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

    def model(self, name: str) -> Any:
        return self.backend.load(ModelSpec(name, "torch"), self.on(self.card), self.module)

    def bytes_of(self, model: Any) -> int:
        return sum(share.bytes for share in self.backend.measure(model))


def machine(bench: Bench) -> str:
    """The card, its driver and its clocks; or that the accelerator is simulated."""
    version = f"torch {torch.__version__}"
    if bench.stand_in:
        version += " with a stand-in for the exchange of storages"
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


def restore_and_pinned(bench: Bench) -> Iterator[Row]:
    """Restore against the peak of the bus, and the pinned bytes of a model in host memory."""
    model = bench.model("net")
    size = bench.bytes_of(model)
    copy = pinned_copy(bench, size)
    copies, taken = [], []
    for _ in range(ROUNDS + 1):  # in turn, because the speed of a busy machine changes
        copies.append(bench.seconds(copy))
        bench.backend.move(model, bench.on(HOST))
        taken.append(
            bench.seconds(lambda: bench.backend.move(model, bench.on(bench.card)))  # noqa: B023
        )
    del copy
    peak, restore = (size / statistics.median(seconds[1:]) for seconds in (copies, taken))
    ratio = restore / peak
    reference = "pinned `cudaMemcpyAsync`" if bench.real else "a preallocated copy"
    yield Row(
        f"restore of {show_bytes(size)}, against {reference}",
        f"{restore / 1e9:.1f} of {peak / 1e9:.1f} GB/s = {ratio:.2f}×",
        "≥ 0.90×",
        ratio >= 0.90,
    )
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
    alone: dict[str, list[float]] = {"out": [], "in": []}
    both = []
    for _ in range(ROUNDS + 1):
        out = lambda: bench.backend.move(one, bench.on(HOST))  # noqa: B023, E731
        back = lambda: bench.backend.move(one, bench.on(bench.card))  # noqa: B023, E731
        alone["out"].append(bench.seconds(out))
        alone["in"].append(bench.seconds(back))
        swap = lambda: _together(out, lambda: bench.backend.move(other, bench.on(bench.card)))  # noqa: B023, E731
        both.append(bench.seconds(swap))
        one, other = other, one
    longer = max(statistics.median(taken[1:]) for taken in alone.values())
    ratio = statistics.median(both[1:]) / longer
    yield Row(
        "duplex: one model out and another in at once, against the longer of the two",
        f"{ratio:.2f}×" if bench.real else NOT_RUN,
        "≤ 1.15×",
        ratio <= 1.15 if bench.real else None,
    )
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
        copied: list[int] = []
        with _counting(copied):
            taken = bench.seconds(lambda: backend.move(model, bench.on(HOST)))
        size = sum(share.bytes for share in backend.measure(model))
        backend.drop(model)
    what = f'clean offload of {show_bytes(size)} with a shadow, against `module.to("cpu")`'
    if not bench.real:
        yield Row(f"{what}: bytes copied", f"{sum(copied)}", "0", not sum(copied))
        yield Row(f"{what}: seconds", NOT_RUN, "≤ 0.02×", None)
        return
    plain = bench.module().to(bench.torch)
    ratio = taken / bench.seconds(lambda: plain.to("cpu"))
    yield Row(f"{what}: bytes copied", f"{sum(copied)}", "0", not sum(copied))
    yield Row(f"{what}: seconds", f"{ratio:.3f}×", "≤ 0.02×", ratio <= 0.02)


class _counting:  # noqa: N801
    """Inside the `with` block, the bytes of each copy of storages are appended to the list `sizes`."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.copy_all = sizes, storages._copy_all

    def __enter__(self) -> None:
        def counted(sources: list[torch.Tensor], *rest: Any) -> None:
            self.sizes.append(sum(source.nbytes for source in sources))
            self.copy_all(sources, *rest)

        storages._copy_all = counted

    def __exit__(self, *_: object) -> None:
        storages._copy_all = self.copy_all


def part(bench: Bench) -> Iterator[Row]:
    """A part of an idle model that leaves and returns: the bytes moved each way."""
    model = bench.model("large")
    size, piece = bench.bytes_of(model), next(model.module.parameters()).nbytes
    wanted = max(piece, size * 3 // 40 // piece * piece)
    copied: list[int] = []
    with _counting(copied):
        shares = (Share(bench.card, size - wanted), Share(HOST, wanted))
        bench.backend.move(model, shares)
        bench.backend.move(model, bench.on(bench.card))
    most = max(copied, default=0)
    yield Row(
        f"{show_bytes(wanted)} taken from an idle model of {show_bytes(size)} and given back: bytes moved each way",
        show_bytes(most),
        f"≤ {show_bytes(wanted + piece)}: these bytes and one piece",
        0 < most <= wanted + piece,
    )
    bench.backend.drop(model)


def _figures() -> dict[str, Callable[[Bench], Iterator[Row]]]:
    from .bench_card import count, parking, small, swap

    return {
        "restore": restore_and_pinned, "duplex": duplex, "clean": clean_offload, "part": part,
        "parking": parking, "small": small, "count": count, "swap": swap,
    }  # fmt: skip


def measured(bench: Bench, wanted: list[str]) -> Iterator[Row]:
    """The rows of the figures called `wanted`. If a figure fails, its row has the error."""
    figures = _figures()
    for name in wanted or figures:
        try:
            yield from figures[name](bench)
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
    parser.add_argument("only", nargs="*", choices=[[], *_figures()], help="only these figures")
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
