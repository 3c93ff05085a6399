"""Measures what parking costs three notebooks: one that is parked, one that waits, and one that is never parked.

All cards are simulated. So a copy "into memory obtained the same way" is a copy into fresh memory of the host. The
work of one thread is measured in its processor time, which other programs on the machine disturb little.
"""

import fcntl
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from gpu_runtime.autoload import BLOCK
from gpu_runtime.units import GIB, MIB
from tests.owner.kernels import Quiet

from .bench_crowd import Child, Say, Told, book, ended, runtime
from .results import Row
from .timing import Waits, medians, seconds

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


def count() -> Iterator[Row]:
    """Median processor milliseconds of the hooks before and after a cell, in a process with 20 models."""
    import torch

    from gpu_runtime import Runtime
    from tests import simgpu

    ballast = _ballast(OBJECTS)
    for where, device in (("card", "simgpu:0"), ("simulated", "cpu")):
        card = where == "card"
        options = {"probe": simgpu.SimProbe()} if card else {"devices": "sim:24GiB,host:64GiB"}
        with Runtime(ledger="memory:", monitor=False, **options) as rt:
            kept = torch.zeros(4 << 20, dtype=torch.uint8, device=device)
            for number in range(20):
                layers = [torch.nn.Linear(8, 8, device=device) for _ in range(10)]
                rt.adopt(f"m{number}", torch.nn.Sequential(*layers).requires_grad_(False))
            kernel = rt.attach_kernel(Quiet())
            both = lambda kernel=kernel: (kernel.begin("x = 1"), kernel.end())
            cell = _processor_ms(both, CELLS, warm=1)
            one_count = _processor_ms(kernel.count, 5)
            del kept, both
        if card:
            yield Row(
                "counting what a kernel holds, beginning and end of a cell together, beside 20 models on the card",
                f"{cell:.2f} ms", "≤ 1 ms", cell <= 1
            )  # fmt: skip
            continue
        yield Row(
            f"counting on a simulated card, by a search of {OBJECTS:,} objects; a slow search waits until "
            "it costs a twentieth of the time",
            f"{cell:.2f} ms a cell, {one_count:.0f} ms a search", "≤ 1 ms, ≤ 50 ms", cell <= 1 and one_count <= 50
        )  # fmt: skip
    del ballast


def _processor_ms(act: Any, times: int, **options: int) -> float:
    """The median processor milliseconds of this thread for one call of `act`, which is called `times` times."""
    return medians(times, act, clock=time.thread_time, **options)[0] * 1e3


def kernel_start() -> Row:
    """Processor time until a kernel has answered its first request. The two kinds are started alternately."""
    with tempfile.TemporaryDirectory() as directory:
        for which, text in (("with", BLOCK), ("without", "")):
            profile = Path(directory, which, "profile_default")
            profile.mkdir(parents=True)
            (profile / "ipython_kernel_config.py").write_text(text)

        def start(which: str) -> float:
            spent, loaded = _started_kernel(f"{directory}/{which}")
            assert loaded == (which == "with")
            return spent * 1e3

        ways = (lambda: start("with"), lambda: start("without"))
        autoload, plain = medians(STARTS, *ways, warm=1)  # the first start compiles
    return Row(
        "start of a kernel with `gpu autoload`, against one without, in processor time",
        f"{autoload - plain:+.0f} ms ({autoload:.0f} against {plain:.0f})", "≤ +50 ms", autoload - plain <= 50
    )  # fmt: skip


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


def search_before_park() -> Row:
    """Median processor milliseconds of a search in a process with MANY_OBJECTS."""
    import torch

    from gpu_runtime.backends.pytorch import search
    from gpu_runtime.devices.probe import open_probe

    probe = open_probe(DEVICES)
    place = search.counted_on([probe.place(device.id) for device in probe.devices])
    kept, ballast = torch.zeros(1 << 20), _ballast(MANY_OBJECTS)
    taken = _processor_ms(lambda: search.search(place), 5)
    del kept, ballast
    what = f"the search before a park, {MANY_OBJECTS:,} objects, in processor time"
    return Row(what, f"{taken:.0f} ms", "≤ 500 ms", taken <= 500)


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

    def to_disk(self, directory: Path) -> None:
        """Moves the parked bytes on to a file in `directory`."""
        self._backend.move_on(self._handle, self._backend.write(self._handle, directory))

    def _move(self, device: str) -> None:
        from gpu_runtime.facts import Share

        self._backend.move(self._handle, (Share(device, 1),))


def small_storages() -> Row:
    """Processor seconds for each GiB to park and to return storages of 4 KiB, and the same bytes in 1 MiB each."""
    import torch

    from gpu_runtime.backends.pytorch import search

    usual, search.SIMULATED_BYTES = search.SIMULATED_BYTES, 4096
    total = SMALL_STORAGES * 4096
    kept: list[Any] = []

    def hold(size: int) -> float:
        kept.clear()
        kept[:] = [Parkable(), [torch.ones(size // 4) for _ in range(total // size)]]
        return 0.0

    def park() -> float:
        return seconds(kept[0].park, time.thread_time) * GIB / total

    def unpark() -> float:
        return seconds(kept[0].unpark, time.thread_time) * GIB / total

    try:
        ways = (lambda: hold(4096), park, unpark, lambda: hold(MIB), park, unpark)
        _, parked, back, _, few_parked, few_back = medians(ROUNDS, *ways, warm=1)
    finally:
        search.SIMULATED_BYTES = usual
    return Row(
        f"{SMALL_STORAGES:,} storages of 4 KiB, away and back, in processor time for each GiB, against "
        "storages of 1 MiB", f"{parked:.1f} of {few_parked:.2f} s = {parked / few_parked:.0f}×; "
        f"{back:.1f} of {few_back:.2f} s = {back / few_back:.0f}×", "≤ 4 s each", max(parked, back) <= 4
    )  # fmt: skip


def _held_gib() -> list[Any]:
    import torch

    return [torch.ones(GIB // 4 // 16) for _ in range(16)]


def _bare_copy() -> tuple[float, float]:
    """The seconds to copy 16 storages, 1 GiB in total, into fresh memory in one call.

    The second figure are the seconds to compare both, as at an exchange.
    """
    import torch

    from gpu_runtime.backends.pytorch.swap import Unchanged

    sources = _held_gib()
    began = time.perf_counter()
    fresh = [torch.empty_like(one) for one in sources]
    torch._foreach_copy_(fresh, sources)
    copied = time.perf_counter()
    proof = Unchanged([one.view(torch.uint8) for one in sources])
    proof.compare([one.view(torch.uint8) for one in fresh])
    assert proof.then(())
    return copied - began, time.perf_counter() - copied


def swap() -> Iterator[Row]:
    """The return of 1 GiB and its comparison, against a bare copy. They are measured alternately."""
    copies, compared, returns = [], [], []
    for _ in range(ROUNDS):
        copy, comparison = _bare_copy()
        kept, kernel = _held_gib(), Parkable()
        kernel.park()
        copies.append(copy)
        compared.append(comparison)
        returns.append(seconds(kernel.unpark))
        del kept
    copy, comparison, back = (statistics.median(some[1:]) for some in (copies, compared, returns))
    yield Row.against("return of 1 GiB, against a bare copy into fresh memory", back, copy, 1.3)
    yield Row.against(
        "the comparison of 1 GiB in RAM at the exchange, against a bare copy into fresh memory",
        comparison, copy, 0.1
    )  # fmt: skip


class BareFile:
    """A new file of 1 GiB without a name. It is written and read past the page cache, 16 MiB at a time.

    The pages are huge, because small ones halve the rate of the disk.
    """

    def __init__(self, directory: Path) -> None:
        import torch

        from gpu_runtime.backends.pytorch import park_file

        self._directory, self._digest = directory, park_file._digest
        self._pages = park_file._pages(16 * MIB)
        self._source = os.urandom(len(self._pages))
        self._pages.write(self._source)
        self._buffer = torch.frombuffer(self._pages, dtype=torch.uint8)
        self._fresh: list[bytes] = []

    def write(self, act: Callable[[], object] = lambda: None) -> None:
        """Writes the file. `act` is called before each piece is written."""
        self._file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115
        fd = self._file.fileno()
        os.posix_fallocate(fd, 0, GIB)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        for start in range(0, GIB, len(self._pages)):
            act()
            os.pwrite(fd, self._pages, start)
        os.fsync(fd)

    def read(self, act: Callable[[], object] = lambda: None) -> None:
        """Reads the file. `act` is called after each piece was read."""
        for start in range(0, GIB, len(self._pages)):
            os.preadv(self._file.fileno(), [self._pages], start)
            act()

    def end(self) -> None:
        self._file.close()
        self._fresh.clear()

    def digest(self) -> None:
        self._digest(self._pages, self._buffer)

    def fill(self) -> None:
        """What a piece costs before it is written: a copy and a digest."""
        self._pages.seek(0)
        self._pages.write(self._source)
        self.digest()

    def restore(self) -> None:
        """What a piece costs after it was read: a digest, and a copy into fresh memory."""
        self.digest()
        self._fresh.append(self._pages[:])


def disk() -> Iterator[Row]:
    """1 GiB to a disk and back, against the same bytes written, synced and read back without a copy or a digest.

    Also against the same copies and digests, made by the thread that writes or reads.
    """
    directory = Path(os.environ.get("GPU_PARK_DIR", "/var/tmp"))
    kept, kernel = _held_gib(), Parkable()
    bare = BareFile(directory)
    kernel.park()

    def worked() -> None:
        bare.write(bare.fill)
        bare.read(bare.digest)

    taken = medians(
        6,
        bare.write,
        bare.read,
        bare.end,
        worked,
        bare.end,
        bare.write,
        lambda: bare.read(bare.restore),
        bare.end,
        lambda: kernel.to_disk(directory),
        kernel.unpark,
        kernel.park,
        warm=1,
    )
    del kept
    written, read, _, out, _, _, back, _, away, returned, _ = taken
    yield from _rates("parked memory to a disk, read back and compared", away, written + read, out)
    yield from _rates("its return from the disk", returned, read, back)


def _rates(what: str, mine: float, bare: float, worked: float) -> Iterator[Row]:
    yield Row(
        f"{what}, as a part of the disk's own sequential rate (1 GiB)",
        f"{mine:.2f} s, the disk alone {bare:.2f} s = {bare / mine:.2f}", "≥ 0.8", bare / mine >= 0.8
    )  # fmt: skip
    yield Row.against(
        f"{what}, against the same copies and digests one after the other with the disk",
        mine,
        worked,
        1.25,
        "s",
        2,
    )


def encrypted() -> Iterator[Row]:
    """An encrypted file of 1 GiB against a plain one. They are measured alternately."""
    import torch

    from gpu_runtime.backends.pytorch.park_file import ParkFile

    directory = Path(os.environ.get("GPU_PARK_DIR", "/var/tmp"))
    source = torch.randint(0, 256, (GIB,), dtype=torch.uint8)
    files: dict[bool, ParkFile] = {}

    def write(secret: bool) -> None:
        files[secret] = ParkFile(directory, GIB, encrypted=secret)
        files[secret].write(lambda at, buffer: buffer.copy_(source[at : at + len(buffer)]))

    def read(secret: bool) -> None:
        files.pop(secret).read(lambda at, buffer: None)

    acts = [partial(act, secret) for secret in (False, True) for act in (write, read)]
    plain_out, plain_back, out, back = medians(6, *acts, warm=1)
    what = "an encrypted file of 1 GiB, {}, against a plain one"
    yield Row.against(what.format("written, read back and compared"), out, plain_out, 1.25, "s", 2)
    yield Row.against(what.format("read and compared"), back, plain_back, 1.25, "s", 2)


# -- a notebook that waits -------------------------------------------------------------------------


def recall() -> Row:
    """The waits for a grant while an idle kernel with 1 GiB and MANY_OBJECTS is parked in another process.

    Bare copies of the same bytes are measured alternately with the requests.
    """

    def idle(told: Told, say: Say) -> None:
        import torch

        torch.set_num_threads(1)
        rt = runtime(url, DEVICES)
        _kept = _ballast(MANY_OBJECTS), _held_gib()
        kernel = rt.attach_kernel(Quiet())
        while True:
            copy, _ = _bare_copy()
            kernel.begin()
            kernel.end()
            kernel.catch_up()
            say((copy, str(kernel.refusal or "")))
            next(told)

    waits, copies = [], []
    with book() as url, ended([Child(idle)]) as [other]:
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
    waited, bare = Waits.of(waits[1:]), Waits.of(copies[1:])
    return Row(
        f"request to grant while an idle 1 GiB kernel of {MANY_OBJECTS:,} objects parks",
        f"{waited}; bare copies into fresh memory {bare}", "p99 of a bare copy + 0.5 s", waited.p99 <= bare.p99 + 0.5
    )  # fmt: skip


def rows() -> Iterator[Row]:
    yield from count()
    yield kernel_start()
    yield search_before_park()
    yield small_storages()
    yield from swap()
    yield from disk()
    yield from encrypted()
    yield recall()
