"""Two real processes and one book. One process sees the other's allocator map and requests a defragmentation."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator

import pytest

from gpu_runtime import Busy, Runtime
from gpu_runtime.facts import AllocatorMap
from gpu_runtime.units import MIB
from tests.clock import PATIENCE
from tests.stories.test_processes import DEVICES, Kernel, kernel, ledger, redis  # noqa: F401

CACHE = "rt.probe.place('sim:0').allocate(64 << 20).free()"  # leaves 64 MiB of cache, as freed tensors do
ADAPTERS = "; ".join(
    f"rt.register('a{n}', backend='fake', size='3MiB'); rt.preload('a{n}')" for n in range(6)
)


@pytest.fixture
def here(ledger: str) -> Iterator[Runtime]:  # noqa: F811
    rt = Runtime(devices=DEVICES, ledger=ledger, eviction_grace_seconds=0)
    yield rt
    rt.close()


def seen(rt: Runtime, wanted: Callable[[AllocatorMap | None], bool]) -> AllocatorMap | None:
    """The only map, once `wanted` is true for it. After PATIENCE the map is returned as it is then."""
    deadline = time.monotonic() + PATIENCE
    while True:
        map = next(iter(rt.allocator_maps()), None)
        if wanted(map) or time.monotonic() > deadline:
            return map
        time.sleep(0.02)


def test_another_kernels_cache_is_seen_and_given_back(kernel, here):  # noqa: F811
    """Its map is published. The answer has the freed bytes, and a new map follows at once."""
    other = kernel()
    assert other.tell(f"{ADAPTERS}; {CACHE}") == "done"
    before = seen(here, lambda map: map is not None and map.inactive_bytes == 66 * MIB)
    assert (before.allocated_bytes, before.reserved_bytes, before.releasable_bytes) == (
        18 * MIB,
        84 * MIB,
        64 * MIB,
    )
    done = here.defrag(f"a0@{other.process.pid}", timeout=PATIENCE)
    assert (done.done, done.bytes) == (True, 64 * MIB)
    (after,) = here.allocator_maps()
    assert (after.reserved_bytes, after.inactive_bytes, after.releasable_bytes) == (
        20 * MIB,
        2 * MIB,
        0,
    )


def test_what_a_killed_kernel_held_is_drawn_no_longer(kernel, here):  # noqa: F811
    other = kernel()
    assert other.tell(ADAPTERS) == "done"
    assert seen(here, lambda map: map is not None) is not None
    other.signal(signal.SIGKILL)
    other.process.wait(PATIENCE)
    assert here.allocator_maps() == ()


def test_a_stopped_kernel_keeps_its_cache_and_who_asked_is_told(kernel, here):  # noqa: F811
    """Only the owner of the cache can give it back, and the owner is stopped. An error says so."""
    other = kernel()
    assert other.tell(f"{ADAPTERS}; {CACHE}") == "done"
    assert (
        seen(here, lambda map: map is not None and map.reserved_bytes == 84 * MIB).reserved_bytes
        == 84 * MIB
    )
    other.signal(signal.SIGSTOP)
    with pytest.raises(Busy, match="was asked to defrag, and has not answered"):
        here.defrag(str(other.process.pid), timeout=0.5)
    assert here.status().tickets == ()
    assert seen(here, lambda map: True).reserved_bytes == 84 * MIB
    other.signal(signal.SIGCONT)
    assert here.defrag(str(other.process.pid), timeout=PATIENCE).bytes == 64 * MIB
