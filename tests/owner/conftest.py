"""Fixtures: runtimes on simulated devices, a clock that the test sets, and what a book claims."""

import gc
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from gpu_runtime import Runtime
from tests.clock import PATIENCE, Clock

from .kernels import Quiet

_books = itertools.count()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def runtime() -> Iterator[Callable[..., Runtime]]:
    """Makes runtimes. One with a book of its own has no monitor thread, which could move a lease during the test."""
    made: list[Runtime] = []

    def make(**settings: Any) -> Runtime:
        settings.setdefault("devices", "sim:24GiB,host:64GiB")
        settings.setdefault("monitor", "ledger" in settings)
        settings.setdefault("ledger", "memory:")
        made.append(Runtime(**settings))
        return made[-1]

    yield make
    for rt in made:
        rt.close()


@pytest.fixture
def quiet():
    return Quiet()


@pytest.fixture
def started(runtime, quiet):
    """Makes a runtime and its kernel. Garbage of earlier tests is collected first, so that no other tensors count.

    What earlier tests imported is frozen: each search for the kernel's memory would read it again. What `keep` gave a
    kernel ends with the test, also if a thread that ends later still has the kernel.
    """
    gc.collect()
    gc.freeze()
    kernels = []

    def start(**settings):
        settings.setdefault("monitor", False)
        rt = runtime(**settings)
        kernels.append(rt.attach_kernel(quiet))
        return rt, kernels[-1]

    yield start
    for kernel in kernels:
        vars(kernel).pop("kept_by_the_test", None)


@pytest.fixture
def shared_book() -> str:
    """The URL of a book that several runtimes of the test share."""
    return f"memory:test-{next(_books)}"


def fakes(rt: Runtime, **sizes: str) -> Runtime:
    """Registers fake models by name and size. Returns `rt`."""
    for name, size in sizes.items():
        rt.register(name, backend="fake", size=size)
    return rt


def loaded(rt: Runtime, **sizes: str) -> Runtime:
    """Registers fake models by name and size, and loads them in this order. Returns `rt`."""
    fakes(rt, **sizes)
    for name in sizes:
        rt.preload(name)
    return rt


@contextmanager
def alongside(*acts: Callable[[], object]) -> Iterator[None]:
    """Each of `acts` runs in a thread of its own beside the `with` block, whose end waits for them."""
    threads = [threading.Thread(target=act, daemon=True) for act in acts]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(2 * PATIENCE)
        assert not thread.is_alive(), "a thread does not end"


def together(*acts: Callable[[], object]) -> None:
    """Runs each of `acts` in a thread of its own until all have ended."""
    with alongside(*acts):
        pass


@contextmanager
def used_elsewhere(rt: Runtime, name: str) -> Iterator[None]:
    """Another thread of the process uses the model while the `with` block runs."""
    inside, done = threading.Event(), threading.Event()

    def hold() -> None:
        with rt.use(name):
            inside.set()
            done.wait(PATIENCE)

    with alongside(hold):
        assert inside.wait(PATIENCE)
        try:
            yield
        finally:
            done.set()


def stopped_at(
    number: int,
    act: Callable[[], object],
    watched: Callable[[FrameType], bool],
    event: str = "opcode",
) -> BaseException | None:
    """Raises KeyboardInterrupt at that event of the watched frames; the error, or None at the end."""
    left = number

    def trace(frame: FrameType, kind: str, _: object) -> Any:
        nonlocal left
        if not watched(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = event == "opcode", False
        if kind == event:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace if event == "opcode" else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    except KeyboardInterrupt as error:
        return error
    finally:
        sys.settrace(before)
    return None if left > 0 else KeyboardInterrupt("in a destructor, which passed over it")


def places(rt: Runtime) -> dict[str, str]:
    """Maps the name of each lease to its place."""
    return {lease.name: lease.where for lease in rt.status().leases()}


def where(rt: Runtime) -> dict[str, str]:
    """Maps the name of each known model to its place. `rt.models()` would take a millisecond for its DataFrame."""
    names = [*rt.catalog_names(), *(spec.name for spec in rt.specs())]
    return dict.fromkeys(names, "disk") | places(rt)


def claims(rt: Runtime) -> dict[str, int]:
    """The bytes that leases claim on each device. Devices without claims are left out."""
    return {
        view.device.id: view.claimed_bytes for view in rt.status().devices if view.claimed_bytes
    }
