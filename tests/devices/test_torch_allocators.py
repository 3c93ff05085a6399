"""The user has replaced torch's allocator on a card. torch then refuses some or all figures."""

import sys
import types

import pytest

from gpu_runtime.backends.base import NotStill
from gpu_runtime.backends.pytorch import streams
from gpu_runtime.devices import nvml
from gpu_runtime.devices.drivers import Card, Listing
from gpu_runtime.devices.probe import Probe
from gpu_runtime.facts import Device, Lease, Share
from gpu_runtime.owner.acquire import LeasedBlock
from gpu_runtime.units import GIB

CARD = Device("cuda:0", 80 * GIB, "H200", "GPU-aaaa", 0)


class FakeCuda:
    """torch.cuda with another allocator. It refuses what torch refuses.

    Source: torch/csrc/cuda/CUDAPluggableAllocator.cpp; c10/cuda/CUDAMallocAsyncAllocator.cpp.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def get_allocator_backend(self) -> str:
        return self.backend

    def is_initialized(self) -> bool:
        return True

    def memory_snapshot(self, mempool_id=None, include_traces=True):
        raise RuntimeError(f"{self.backend} does not support snapshot")

    def _figure(self, *_: object) -> int:
        if self.backend == "pluggable":
            raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")
        return 3 * GIB

    memory_reserved = memory_allocated = max_memory_allocated = reset_peak_memory_stats = _figure
    set_per_process_memory_fraction = _figure

    def memory_stats(self, number: int) -> dict[str, int]:
        return {"reserved_bytes.all.current": self._figure()}

    def memory_stats_as_nested_dict(self, device: str) -> dict:
        return {"allocated_bytes": {"all": {"current": self._figure()}}}


@pytest.fixture(params=["cudaMallocAsync", "pluggable"])
def cuda(request, monkeypatch):
    fake = FakeCuda(request.param)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=fake))
    return fake


@pytest.fixture
def probe(monkeypatch):
    """A probe of one card, whose driver charges this process 5 GiB."""
    monkeypatch.setattr(Probe, "_charged", lambda *_: 5 * GIB)
    card = Card(CARD, None, torch="cuda:0")
    return Probe((CARD, Device("host", GIB)), Listing(nvml, (card,)))


def test_the_probe_has_the_figures_that_exist(cuda, probe, monkeypatch):
    """No figure raises an error, since the monitor reads all of them each second."""
    counts = cuda.backend == "cudaMallocAsync"
    probe.watch_peaks()
    assert probe.maps() == () and probe.pulse() == probe.pulse()
    assert probe.used() == {"cuda:0": 5 * GIB, "host": 0}
    assert probe.contexts() == {"cuda:0": 2 * GIB if counts else 0}
    assert probe.beyond_now("cuda:0") == (0 if counts else None)
    with monkeypatch.context() as patch:
        patch.setattr(Probe, "_charged", lambda *_: GIB)  # the driver's figure is late
        assert probe.contexts() == {"cuda:0": 0}
    assert probe.bound("cuda:0", 0.5) is counts


def test_a_block_runs_and_is_measured_if_torch_counts(cuda):
    leased = LeasedBlock(Lease("1.2.3", "b", shares=(Share("cuda:0", GIB),)), CARD, "cuda:0")
    leased.end()
    assert leased.peak_bytes == (0 if cuda.backend == "cudaMallocAsync" else None)


def test_a_notebook_stays_whose_blocks_have_no_known_stream(cuda, monkeypatch):
    monkeypatch.setattr(streams, "module_of", lambda device: cuda)
    counts = cuda.backend == "cudaMallocAsync"
    assert streams.allocated_bytes("cuda:0") == (3 * GIB if counts else 0)
    streams.reset_peak("cuda:0")
    with pytest.raises(NotStill, match="another allocator"):
        streams.segments("cuda:0")
