"""Two real processes and one book. One process sees the other's allocator map and requests a defragmentation."""

import signal

import pytest

from gpu_runtime import Busy, Runtime
from gpu_runtime.units import MIB
from tests.clock import PATIENCE, until

CACHE = "rt.probe.place('sim:0').allocate(64 << 20).free()"  # leaves 64 MiB of cache, as freed tensors do
ADAPTERS = "; ".join(
    f"rt.register('a{n}', backend='fake', size='3MiB'); rt.preload('a{n}')" for n in range(6)
)
# The MiB of `sizes` with the cache, and after it was given back.
FULL, TIDY = [(18, 84, 66, 64)], [(18, 20, 2, 0)]


def sizes(rt: Runtime) -> list[tuple[int, ...]]:
    """The MiB that are allocated, reserved, inactive and releasable, of each map."""
    maps = rt.allocator_maps()
    names = ("allocated_bytes", "reserved_bytes", "inactive_bytes", "releasable_bytes")
    return [tuple(getattr(map, name) // MIB for name in names) for map in maps]


def test_another_kernels_cache_is_seen_and_given_back(other, here):
    """Its map is published. The answer has the freed bytes, and a new map follows at once."""
    other.do(ADAPTERS, CACHE)
    until(lambda: sizes(here) == FULL)
    done = here.defrag(f"a0@{other.process.pid}", timeout=PATIENCE)
    assert (done.done, done.bytes, sizes(here)) == (True, 64 * MIB, TIDY)


def test_what_a_killed_kernel_held_is_drawn_no_longer(other, here):
    other.do(ADAPTERS)
    until(lambda: sizes(here))
    other.end()
    until(lambda: not here.allocator_maps())


def test_a_stopped_kernel_keeps_its_cache_and_who_asked_is_told(other, here):
    """Only the owner of the cache can give it back, and the owner is stopped. An error says so."""
    other.do(ADAPTERS, CACHE)
    until(lambda: sizes(here) == FULL)
    other.signal(signal.SIGSTOP)
    with pytest.raises(Busy, match="was asked to defrag, and has not answered"):
        here.defrag(str(other.process.pid), timeout=0.5)
    assert here.status().tickets == () and sizes(here) == FULL
    other.signal(signal.SIGCONT)
    assert here.defrag(str(other.process.pid), timeout=PATIENCE).bytes == 64 * MIB
