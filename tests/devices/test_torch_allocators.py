"""torch's allocator on a card: its limit, and what is known if the user has replaced it by another."""

import sys
import threading
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

CARD = Device("cuda:0", 81 * GIB, "H200", "GPU-aaaa", 0)
OTHER = Device("cuda:1", 81 * GIB, "H200", "GPU-bbbb", 1)
TOTAL = 80 * GIB  # of a card as torch counts it; NVML counts what the driver keeps too


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

    def get_device_properties(self, card: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(total_memory=TOTAL)

    memory_reserved = memory_allocated = max_memory_allocated = reset_peak_memory_stats = _figure
    set_per_process_memory_fraction = _figure

    def memory_stats(self, number: int) -> dict[str, int]:
        return {"reserved_bytes.all.current": self._figure()}

    def memory_stats_as_nested_dict(self, device: str) -> dict:
        counts = {"allocated_bytes": self._figure(), "requested_bytes": 0}
        return {name: {"all": {"current": size}} for name, size in counts.items()}


@pytest.fixture(params=["cudaMallocAsync", "pluggable"])
def cuda(request, monkeypatch):
    fake = FakeCuda(request.param)
    internals = types.SimpleNamespace(_cuda_hasPrimaryContext=lambda number: True)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=fake, _C=internals))
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
    assert streams.requested_bytes("cuda:0") == (3 * GIB if counts else 0)
    streams.reset_peak("cuda:0")
    with pytest.raises(NotStill, match="another allocator"):
        streams.segments("cuda:0")


def test_what_is_left_of_a_block_is_no_memory_of_the_notebook_s_own_code(monkeypatch):
    """torch cuts no block whose rest is at most 1 MiB. A model of 300 tensors looked like 100 MiB of a notebook's."""
    counts = {"allocated_bytes": (130, 260), "requested_bytes": (129, 258)}
    stats = {
        name: {"all": dict(zip(("current", "peak"), sizes, strict=True))}
        for name, sizes in counts.items()
    }
    module = types.SimpleNamespace(memory_stats_as_nested_dict=lambda device: stats)
    monkeypatch.setattr(streams, "module_of", lambda device: module)
    assert streams.requested_bytes("cuda:0") == 129
    assert streams.requested_bytes("cuda:0", peak=True) == 258


# -- the limit of a process -----------------------------------------------------------------------


class LimitedCuda:
    """torch.cuda in a process that uses cuda:0 and cuda:1, with the limit of torch 2.4.

    Source: c10/cuda/CUDACachingAllocator.cpp, `setMemoryFraction`: it makes the card the thread's current card,
    creates a context there, and multiplies CUDA's total.
    """

    def __init__(self) -> None:
        self.thread = threading.local()
        self.contexts = {0, 1}
        self.allowed: dict[str, float] = {}

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return getattr(self.thread, "card", 0)

    def get_device_properties(self, card: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(total_memory=TOTAL)

    def memory_reserved(self, card: str) -> int:
        return 3 * GIB

    memory_allocated = max_memory_allocated = reset_peak_memory_stats = memory_reserved

    def set_per_process_memory_fraction(self, fraction: float, card: str) -> None:
        self.thread.card = int(card.partition(":")[2])
        self.contexts.add(self.thread.card)
        self.allowed[card] = fraction * TOTAL


@pytest.fixture
def limited(monkeypatch):
    """torch.cuda of a process, and the probe of two cards, whose driver charges it 4 GiB of each."""
    cuda = LimitedCuda()
    internals = types.SimpleNamespace(_cuda_hasPrimaryContext=lambda card: card in cuda.contexts)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda, _C=internals))
    monkeypatch.setattr(Probe, "_charged", lambda *_: 4 * GIB)
    cards = tuple(Card(device, None, torch=device.id) for device in (CARD, OTHER))
    return cuda, Probe((CARD, OTHER, Device("host", GIB)), Listing(nvml, cards))


def test_torch_may_take_the_bytes_of_the_limit(limited):
    """A limit that was computed from NVML's total let torch take less than its own process had leased."""
    cuda, probe = limited
    assert probe.bound("cuda:1", 40 / 81)
    assert cuda.allowed == {"cuda:1": pytest.approx(40 * GIB, abs=1)}
    probe.bound("cuda:1", 1.0)
    assert cuda.allowed == {"cuda:1": TOTAL}
    assert probe.contexts() == {"cuda:0": GIB, "cuda:1": GIB}
    assert probe.beyond_torch() == {"cuda:0": 2 * GIB, "cuda:1": 2 * GIB}


def test_a_limit_changes_no_current_card_and_creates_no_context(limited):
    """The card of an engine has no context of this process: it would take some 500 MiB there."""
    cuda, probe = limited
    probe.bound("cuda:1", 0.5)
    LeasedBlock(Lease("1.2.3", "b", shares=(Share("cuda:1", GIB),)), OTHER, "cuda:1").end()
    assert cuda.current_device() == 0
    cuda.contexts = {0}
    assert not probe.bound("cuda:1", 0.4) and cuda.contexts == {0}
