"""Measures what parking costs three notebooks: one that is parked, one that waits, and one that is never parked.

All cards are simulated. So a copy "into memory obtained the same way" is a copy into fresh memory of the host. The
work of one thread is measured in its processor time, which other programs on the machine disturb little.
"""

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gpu_runtime.autoload import BLOCK
from gpu_runtime.units import GIB, MIB
from tests.owner.kernels import Quiet

from .bench_crowd import Child, Waits, book, ended, runtime

CELLS = 200
STARTS = 8
OBJECTS = 170_000  # that the garbage collector tracks in an ordinary notebook
MANY_OBJECTS = 1_200_000  # in a large one
SMALL_STORAGES = 20_000
ROUNDS = 8
DEVICES = "sim:1536MiB,host:6GiB"


def _ballast(objects: int) -> list[list[Any]]:
    """Makes so many objects that the garbage collector tracks `objects` in total, and returns the new ones."""
    return [[] for _ in range(max(0, objects - len(gc.get_objects())))]


# -- a notebook that is not parked -----------------------------------------------------------------


def count_milliseconds() -> dict[str, float]:
    """Median processor milliseconds of the hooks before and after a cell, in a process with 20 models."""
    import torch

    from gpu_runtime import Runtime
    from tests import simgpu

    ballast = _ballast(OBJECTS)
    taken = {}
    for where in ("card", "simulated"):
        card = where == "card"
        options = {"probe": simgpu.SimProbe()} if card else {"devices": "sim:24GiB,host:64GiB"}
        with Runtime(ledger="memory:", monitor=False, **options) as rt:
            device = "simgpu:0" if card else "cpu"
            kept = torch.zeros(4 << 20, dtype=torch.uint8, device=device)
            for number in range(20):
                layers = [torch.nn.Linear(8, 8, device=device) for _ in range(10)]
                rt.adopt(f"m{number}", torch.nn.Sequential(*layers).requires_grad_(False))
            kernel = rt.attach_kernel(Quiet())
            kernel.begin("x = 1")
            kernel.end()
            taken[where] = _median(lambda k=kernel: (k.begin("x = 1"), k.end()), CELLS)
            taken[f"{where}, one count"] = _median(kernel.count, 5)
            del kept
    del ballast
    return taken


def _median(act: Callable[[], object], times: int) -> float:
    """The median processor milliseconds of this thread for one call of `act`, which is called `times` times."""
    taken = []
    for _ in range(times):
        began = time.thread_time()
        act()
        taken.append(time.thread_time() - began)
    return statistics.median(taken) * 1e3


def kernel_start_milliseconds() -> dict[str, float]:
    """Median processor milliseconds until a kernel has answered its first request.

    Kernels with and without autoload are started alternately.
    """
    taken: dict[str, list[float]] = {"with": [], "without": []}
    with tempfile.TemporaryDirectory() as directory:
        for which in taken:
            profile = Path(directory, which, "profile_default")
            profile.mkdir(parents=True)
            (profile / "ipython_kernel_config.py").write_text(BLOCK if which == "with" else "")
        for number in range(STARTS + 1):
            for which, times in taken.items():
                spent, loaded = _started_kernel(f"{directory}/{which}")
                assert loaded == (which == "with")
                if number:  # the first start compiles
                    times.append(spent)
    return {which: statistics.median(times) * 1e3 for which, times in taken.items()}


def _started_kernel(ipython: str) -> tuple[float, bool]:
    """The processor seconds of a new kernel until it is ready, and whether it has loaded `gpu`.

    `ipython` is its IPython directory.
    """
    from jupyter_client.manager import KernelManager

    manager = KernelManager(kernel_name="python3")
    env = {**os.environ, "IPYTHONDIR": ipython}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # else each start compiles all modules again
    manager.start_kernel(env=env)
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        asked = {
            "spent": "__import__('time').process_time()",
            "loaded": "'gpu.magics' in __import__('sys').modules",
        }
        reply = client.execute("", user_expressions=asked, reply=True, timeout=60)
        told = reply["content"]["user_expressions"]
        spent, loaded = (told[name]["data"]["text/plain"] for name in asked)
        return float(spent), loaded == "True"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


# -- a notebook that parks -------------------------------------------------------------------------


def search_milliseconds() -> float:
    """Median processor milliseconds of a search in a process with MANY_OBJECTS."""
    import torch

    from gpu_runtime.backends.pytorch import search
    from gpu_runtime.devices.probe import open_probe

    probe = open_probe(DEVICES)
    place = search.counted_on([probe.place(device.id) for device in probe.devices])
    kept, ballast = torch.zeros(1 << 20), _ballast(MANY_OBJECTS)
    taken = _median(lambda: search.search(place), 5)
    del kept, ballast
    return taken


class Parkable:
    """The memory of this process, in the form in which a backend can park it; it returns to `card`."""

    def __init__(self, probe: Any = None, card: str = "sim:0") -> None:
        from gpu_runtime.backends.registry import open_backend
        from gpu_runtime.devices.probe import open_probe

        self._backend = open_backend("kernel", probe or open_probe(DEVICES))
        self._handle = self._backend.open(Quiet(), lambda: ())
        self._card = card

    def park(self) -> None:
        self._move("host")

    def unpark(self) -> None:
        self._move(self._card)

    def _move(self, device: str) -> None:
        from gpu_runtime.facts import Share

        self._backend.move(self._handle, (Share(device, 1),))


def small_seconds() -> dict[str, dict[str, float]]:
    """Median processor seconds for each GiB to park and to return SMALL_STORAGES storages of 4 KiB.

    The same bytes in storages of 1 MiB are measured alternately.
    """
    import torch

    from gpu_runtime.backends.pytorch import search

    usual, search.SIMULATED_BYTES = search.SIMULATED_BYTES, 4096
    total = SMALL_STORAGES * 4096
    taken: dict[str, dict[str, list[float]]] = {}
    try:
        for number in range(ROUNDS + 1):
            for name, size in (("4 KiB", 4096), ("1 MiB", MIB)):
                kept = [torch.ones(size // 4) for _ in range(total // size)]
                kernel = Parkable()
                for way, act in (("park", kernel.park), ("return", kernel.unpark)):
                    began = time.thread_time()
                    act()
                    seconds = (time.thread_time() - began) * GIB / total
                    if number:
                        taken.setdefault(name, {}).setdefault(way, []).append(seconds)
                del kept, kernel
    finally:
        search.SIMULATED_BYTES = usual
    return {
        name: {way: statistics.median(times) for way, times in ways.items()}
        for name, ways in taken.items()
    }


def _held_gib() -> list[Any]:
    import torch

    return [torch.ones(GIB // 4 // 16) for _ in range(16)]


def _bare_copy() -> tuple[float, float]:
    """The seconds to copy 16 storages, 1 GiB in total, into fresh memory in one call.

    The second figure are the seconds to compare both, as at an exchange.
    """
    import torch

    from gpu_runtime.backends.pytorch import swap

    sources = _held_gib()
    began = time.perf_counter()
    fresh = [torch.empty_like(one) for one in sources]
    torch._foreach_copy_(fresh, sources)
    copied = time.perf_counter()
    proof = swap.Unchanged([one.view(torch.uint8) for one in sources])
    proof.compare([one.view(torch.uint8) for one in fresh])
    assert proof.then(())
    return copied - began, time.perf_counter() - copied


def swap_seconds() -> dict[str, float]:
    """Median seconds of a bare copy of 1 GiB, of its comparison, and of parking and returning 1 GiB.

    They are measured alternately.
    """
    taken: dict[str, list[float]] = {"copy": [], "compare": [], "park": [], "return": []}
    for _ in range(ROUNDS):
        for name, seconds in zip(("copy", "compare"), _bare_copy(), strict=True):
            taken[name].append(seconds)
        kept, kernel = _held_gib(), Parkable()
        for name, act in (("park", kernel.park), ("return", kernel.unpark)):
            began = time.perf_counter()
            act()
            taken[name].append(time.perf_counter() - began)
        del kept
    return {name: statistics.median(times[1:]) for name, times in taken.items()}


# -- a notebook that waits -------------------------------------------------------------------------


class Recall(NamedTuple):
    """The seconds of requests for which an idle kernel with 1 GiB must be parked.

    The seconds of bare copies of the same bytes were measured alternately with the requests.
    """

    waits: Waits
    copies: Waits


def recall() -> Recall:
    """Measures the waits for a grant while a kernel of another process is parked. That kernel has MANY_OBJECTS."""

    def idle(told: Iterator[Any], say: Callable[[Any], None]) -> None:
        import torch

        torch.set_num_threads(1)
        rt = runtime(url, DEVICES)
        ballast, kept = _ballast(MANY_OBJECTS), _held_gib()
        kernel = rt.attach_kernel(Quiet())
        kernel.begin()
        kernel.end()
        kernel.catch_up()
        say(_bare_copy()[0])
        for _ in told:
            copy, _ = _bare_copy()
            kernel.begin()
            kernel.end()
            kernel.catch_up()
            say((copy, kernel.refused))
        del ballast, kept

    waits, copies = [], []
    with book() as url, ended([Child(idle)]) as crowd:
        other = crowd[0]
        other.answer()
        rt = runtime(url, DEVICES)
        rt.register("wanted", backend="fake", size="1GiB")
        for _ in range(ROUNDS + 1):
            time.sleep(0.1)
            began = time.monotonic()
            with rt.use("wanted", timeout=60):
                waits.append(time.monotonic() - began)
            rt.evict("wanted")
            other.tell()
            copy, refused = other.answer()
            assert not refused, refused
            copies.append(copy)
        rt.close()
    return Recall(Waits.of(waits[1:]), Waits.of(copies[1:]))
