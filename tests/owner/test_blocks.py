"""A leased block on a real card, with a stand-in for torch.cuda: the cap, and the measured use."""

import sys
import types

import pytest

from gpu_runtime.devices.allocators import reset_peak
from gpu_runtime.facts import Device, Lease, Share
from gpu_runtime.owner.acquire import LeasedBlock
from gpu_runtime.rendering import answers
from gpu_runtime.units import GIB

TOTAL = 80 * GIB  # as torch counts the card; NVML counts what the driver keeps too
CARD = Device("cuda:3", 81 * GIB, "H200", "GPU-aaaa", 3)


class FakeCuda:
    """What a block needs of torch.cuda (torch/cuda/memory.py), and what CUDACachingAllocator.cpp refuses."""

    def __init__(self, *, started: bool = True, forked: bool = False) -> None:
        self.started, self.forked = started, forked
        self.allocated = self.peak = 0
        self.fractions: list[float] = []

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.started

    def init(self) -> None:
        if self.forked:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")
        self.started = True

    def allocate(self, size: int) -> None:
        """Code of the user takes or frees memory. This starts CUDA."""
        self.init()
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def get_device_properties(self, name: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(total_memory=TOTAL)

    def memory_allocated(self, name: str) -> int:
        return self.allocated

    memory_reserved = memory_allocated

    def max_memory_allocated(self, name: str) -> int:
        return self.peak

    def reset_peak_memory_stats(self, name: str) -> None:
        if not self.started:
            raise RuntimeError("Invalid device argument 0: did you call init?")
        self.peak = self.allocated

    def set_per_process_memory_fraction(self, fraction: float, name: str) -> None:
        if not self.started:
            self.init()
        self.fractions.append(fraction)

    def get_per_process_memory_fraction(self, name: str) -> float:
        return self.fractions[-1] if self.fractions else 1.0


class OldCuda(FakeCuda):
    """A torch that cannot tell the bound."""

    get_per_process_memory_fraction = None


@pytest.fixture
def block(monkeypatch):
    """Makes a block of `size` bytes on a card that torch calls cuda:0, with `cuda` as torch.cuda."""

    def make(cuda: FakeCuda, size: int) -> LeasedBlock:
        monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
        return LeasedBlock(Lease("1.2.3", "b", shares=(Share(CARD.id, size),)), CARD, "cuda:0")

    return make


@pytest.mark.parametrize("started", [True, False])
def test_a_block_is_capped_and_measured(block, started):
    """The block may be the first code of its process that uses the card. torch may take all of its bytes."""
    cuda = FakeCuda(started=started)
    if started:
        cuda.allocate(4 * GIB)
    before = cuda.allocated
    leased = block(cuda, 8 * GIB)
    assert cuda.fractions == [(before + 8 * GIB) / TOTAL]
    cuda.allocate(6 * GIB)
    cuda.allocate(-5 * GIB)
    leased.end()
    assert (leased.peak_bytes, leased.delta_bytes) == (6 * GIB, GIB)
    assert cuda.fractions[1:] == [1.0]


@pytest.mark.parametrize("cuda, bound", [(FakeCuda, 0.5), (OldCuda, 1.0)])
def test_a_block_restores_the_bound_that_the_user_had_set(block, cuda, bound):
    """Law 17. A torch that cannot tell the bound has none afterwards."""
    torch = cuda()
    torch.set_per_process_memory_fraction(0.5, "cuda:0")
    block(torch, 0).end()
    assert torch.fractions == [0.5]
    block(torch, 8 * GIB).end()
    assert torch.fractions == [0.5, 0.1, bound]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_blocks_of_two_threads_leave_the_bound_that_was_before_both(block, order):
    torch = FakeCuda()
    torch.set_per_process_memory_fraction(0.5, "cuda:0")
    blocks = [block(torch, 8 * GIB), block(torch, 16 * GIB)]
    assert torch.fractions == [0.5, 0.1, 0.2]
    blocks[order[0]].end()
    assert torch.fractions[-1] == (0.2, 0.1)[order[0]]
    blocks[order[1]].end()
    assert torch.fractions[-1] == 0.5


def test_a_bound_that_is_set_inside_a_block_stays(block):
    """An operator's enforced cap may come meanwhile."""
    torch = FakeCuda()
    leased = block(torch, 8 * GIB)
    torch.set_per_process_memory_fraction(0.3, "cuda:0")
    leased.end()
    assert torch.fractions[-1] == 0.3


def test_a_model_that_is_loaded_inside_a_block_leaves_the_block_its_peak(block):
    """A load resets torch's only peak of the card, for its own figures."""
    cuda = FakeCuda()
    outer = block(cuda, 8 * GIB)
    cuda.allocate(6 * GIB)
    cuda.allocate(-6 * GIB)
    reset_peak(cuda, "cuda:0")
    assert cuda.peak == 0
    inner = block(cuda, 0)
    cuda.allocate(GIB)
    inner.end()
    outer.end()
    assert (outer.peak_bytes, inner.peak_bytes) == (6 * GIB, GIB)


def test_a_block_that_only_measures_starts_nothing(block):
    """A bare %%gpu in a notebook that imported torch leaves CUDA unused."""
    cuda = FakeCuda(started=False)
    leased = block(cuda, 0)
    leased.end()
    assert not cuda.started and leased.peak_bytes is None


def test_a_block_that_only_measures_counts_what_its_own_code_started(block):
    cuda = FakeCuda(started=False)
    leased = block(cuda, 0)
    cuda.allocate(2 * GIB)
    leased.end()
    assert (leased.peak_bytes, leased.delta_bytes) == (2 * GIB, 2 * GIB)


def test_in_a_forked_child_of_a_process_with_cuda_a_block_is_not_measured(block):
    """torch cannot use the card there, but another library's code in the block may."""
    leased = block(FakeCuda(started=False, forked=True), 8 * GIB)
    leased.end()
    assert leased.peak_bytes is None


def test_a_child_that_is_forked_in_a_block_ends_the_block(block):
    """In the child torch says that CUDA is not initialised, and refuses to initialise it."""
    cuda = FakeCuda()
    leased = block(cuda, 8 * GIB)
    cuda.started, cuda.forked = False, True
    leased.end()
    assert leased.peak_bytes is None


def test_what_a_block_uses_of_its_bytes_is_unknown(runtime):
    """`gpu leases` had all of them as measured; the console says that they are not known."""
    rt = runtime(monitor=False)
    rt.register("m", backend="fake", size="2GiB")
    rt.preload("m")
    with rt.lease("3GiB"):
        rows = answers.for_people(rt.leases()).text.splitlines()[1:]
    assert ["unknown" in row for row in rows] == [False, True]
