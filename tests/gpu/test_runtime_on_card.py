"""The runtime on a real card. Bytes are measured before and after each step."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gpu_runtime import DoesNotFit, Runtime
from gpu_runtime.units import GIB, MIB
from tests import tiny_models

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")


@pytest.fixture
def card(tmp_path):
    """A runtime whose budget on the card has room for the CUDA context and one of two models."""
    torch.zeros(1, device="cuda")  # creates the CUDA context before the first measurement
    total = torch.cuda.get_device_properties(0).total_memory
    rt = Runtime(devices="cuda", ledger=f"sqlite://{tmp_path}/ledger")
    used = sum(size for device, size in rt.probe.used().items() if device == "cuda:0")
    rt.close()
    percent = (used + 700 * MIB) / total
    rt = Runtime(
        devices="cuda", ledger=f"sqlite://{tmp_path}/ledger", gpu_memory_max_percent=percent
    )
    for name, seed in (("one", 1), ("two", 2)):
        rt.register(name, tiny_models.causal_lm(tmp_path / name, size="480 MiB", seed=seed))
    yield rt
    rt.close()


def answer(module):
    words = torch.arange(3, 20, device=module.device).unsqueeze(0)
    with torch.no_grad():
        return module(words).logits.cpu()


def test_two_models_that_do_not_fit_together_take_turns_on_the_card(card):
    expected = {}
    for name in ("one", "two"):
        with card.use(name) as module:
            assert next(module.parameters()).is_cuda
            expected[name] = answer(module)
    before = torch.cuda.memory_allocated()
    for name in ("one", "two", "one"):
        with card.use(name) as module:
            assert torch.equal(answer(module), expected[name])
            assert abs(torch.cuda.memory_allocated() - before) < 32 * MIB, (
                "one of them is on the card, not both"
            )
    assert card.status().totals["restorations"] >= 3


def test_a_claim_is_the_measured_size(card):
    allocated = torch.cuda.memory_allocated()
    with card.use("one"):
        grown = torch.cuda.memory_allocated() - allocated
        lease = next(card.status().leases())
        assert abs(lease.bytes - grown) <= 0.02 * grown
    card.evict("one")
    assert torch.cuda.memory_allocated() - allocated < 2 * MIB


def test_a_leased_block_is_capped_and_measured(card):
    with card.lease("200 MiB", purpose="test") as block:
        held = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")
        del held
    assert 100 * MIB <= block.peak_bytes < 140 * MIB and block.delta_bytes < 2 * MIB
    torch.empty(GIB, dtype=torch.uint8, device="cuda")


def test_memory_without_a_lease_is_measured_and_not_granted(card):
    """Another process allocates memory without a lease. The runtime grants only memory that is really free."""
    program = (
        "import sys, torch; held = torch.empty(1024, dtype=torch.uint8, device='cuda'); "
        "free = torch.cuda.mem_get_info()[0]; held = torch.empty(free - 300 * 2**20, dtype=torch.uint8, "
        "device='cuda'); print('held', flush=True); sys.stdin.readline()"
    )
    stranger = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert stranger.stdout.readline().strip() == "held"
        with pytest.raises(Exception, match="outside our leases|no room"):
            card.preload("one", timeout=3)
    finally:
        stranger.kill()
        stranger.wait(20)
    assert card.preload("one", timeout=20).done


def test_a_request_that_can_never_fit_is_refused(card):
    with pytest.raises(DoesNotFit):
        card.lease("100 TiB", purpose="test").__enter__()
