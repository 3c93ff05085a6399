"""The runtime on a real card. Bytes are measured before and after each step."""

import subprocess
import sys

import pytest

from gpu_runtime import Busy, DoesNotFit, Runtime
from gpu_runtime.units import GIB, MIB
from tests import tiny_models
from tests.clock import PATIENCE, until

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """The directories of two saved models of 1.5 GiB each."""
    place = tmp_path_factory.mktemp("models")
    names = {"one": 1, "two": 2}
    return {
        name: tiny_models.causal_lm(place / name, size="1.5 GiB", seed=seed)
        for name, seed in names.items()
    }


@pytest.fixture
def card(tmp_path, settle, saved):
    """A runtime whose budget on the card has room for the CUDA context and one of two models.

    The driver may not report the context of this process, as in a container. Then the budget lacks
    its bytes. In both cases the budget is at least 2.1 GiB, and too small for 3 GiB.
    """
    kept = torch.zeros(1, device="cuda")  # this process uses the card: a model needs no new context
    ledger = f"keeper://{tmp_path}/ledger"
    with Runtime(devices="cuda", ledger=ledger) as rt:
        used, total = rt.probe.used()["cuda:0"], rt.probe.devices[0].total_bytes
    percent = (used + 2.1 * GIB) / total
    with Runtime(devices="cuda", ledger=ledger, gpu_memory_max_percent=percent) as rt:
        for name, place in saved.items():
            rt.register(name, place)
        yield rt
    del kept


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


def free_bytes(rt):
    """The free bytes of the card in the newest figures of the driver."""
    return rt.probe.samples(0.0, fresh=True)["cuda:0"].free_bytes


def test_memory_without_a_lease_is_measured_and_not_granted(card):
    """Another process allocates memory without a lease. The runtime grants only memory that is really free."""
    program = (
        "import sys, torch; held = torch.empty(1024, dtype=torch.uint8, device='cuda'); "
        "free = torch.cuda.mem_get_info()[0]; held = torch.empty(free - 2**30, dtype=torch.uint8, "
        "device='cuda'); print('held', flush=True); sys.stdin.readline()"
    )
    stranger = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert stranger.stdout.readline().strip() == "held"
        until(lambda: free_bytes(card) < 1.4 * GIB, "the driver's figures have not changed")
        with pytest.raises(Busy, match="outside our leases"):
            card.preload("one", timeout=3)
    finally:
        stranger.kill()
        stranger.wait(PATIENCE)
    assert card.preload("one", timeout=PATIENCE).done


def test_a_request_that_can_never_fit_is_refused(card):
    with pytest.raises(DoesNotFit):
        card.lease("100 TiB", purpose="test").__enter__()
