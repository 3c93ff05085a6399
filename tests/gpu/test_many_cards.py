"""Tests that need several real cards: which card's memory grows, and torch's limit per process."""

import sys
from pathlib import Path

import pytest

from gpu_runtime import Runtime
from gpu_runtime.backends.registry import open_backend
from gpu_runtime.devices.probe import open_probe
from gpu_runtime.facts import ModelSpec, Share
from gpu_runtime.units import GIB, MIB
from tests import tiny_models
from tests.clock import finished, scaled

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
torch = pytest.importorskip("torch")
two_cards = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="there are not two CUDA cards here"
)

IDS = torch.tensor([[5, 6, 7, 8]])


def logits(module):
    with torch.no_grad():
        return module(IDS).logits


@two_cards
def test_a_model_over_two_cards_answers_as_on_one_and_each_card_holds_its_share(tmp_path):
    """The logits are bit-equal to those on one card, also after moves to the host and to the swapped cards."""
    probe = open_probe("cuda")
    one, two = [card.id for card in probe.cards][:2]
    backend = open_backend("transformers", probe)
    spec = ModelSpec(
        "llama", "transformers", source=str(tiny_models.causal_lm(tmp_path / "m", size="256 MiB"))
    )
    names = {id: probe.place(id).torch for id in (one, two)}
    model = backend.load(spec, (Share(one, 1),))
    module, size = backend.value(model), backend.measure(model)[0].bytes
    with torch.no_grad():
        expected = module(IDS.to(names[one])).logits.cpu()
    for first, second in ((one, two), (two, one)):
        backend.move(model, (Share("host", size),))
        before = {id: torch.cuda.memory_allocated(names[id]) for id in names}
        backend.move(model, (Share(first, size // 2), Share(second, size - size // 2)))
        measured = {share.device: share.bytes for share in backend.measure(model)}
        assert {
            id: torch.cuda.memory_allocated(names[id]) - before[id] for id in names
        } == pytest.approx(measured, abs=2 * MIB)
        assert torch.equal(logits(module), expected) and backend.elsewhere(model) == ()
    backend.drop(model)


def test_the_first_context_is_created_on_the_model_s_card():
    """In a new process, the model's card is torch's current card after the load. No other card has a context."""
    last = torch.cuda.device_count() - 1
    program = f"""
import torch
from gpu_runtime.backends.registry import open_backend
from gpu_runtime.facts import ModelSpec, Share
from gpu_runtime.devices.probe import open_probe
probe = open_probe("cuda")
card = [card.id for card in probe.cards][{last}]
assert not torch.cuda.is_initialized()
backend = open_backend("torch", probe)
backend.load(ModelSpec("net", "torch"), (Share(card, 0),), lambda: torch.nn.Linear(8, 8).eval())
print(torch.cuda.current_device(), [torch._C._cuda_hasPrimaryContext(i) for i in range({last + 1})])
"""
    done = finished([sys.executable, "-c", program], timeout=scaled(120), cwd=ROOT)
    assert done.stdout.split(maxsplit=1) == [str(last), f"{[False] * last + [True]}\n"], done.stderr


def test_torch_s_limit_excludes_the_leases_of_others_and_ends_with_the_last_model(tmp_path):
    """torch's limit per process is set while a model is on the card.

    A lease of another owner lowers the limit, and the eviction of the last model removes it.
    """
    url = f"keeper://{tmp_path}/ledger"
    rt, neighbour = (Runtime(devices="cuda", ledger=url) for _ in range(2))
    card = rt.probe.devices[0]
    name = rt.probe.place(card.id).torch
    try:
        rt.register(
            "mine", lambda: torch.nn.Linear(1024, 1024).eval(), size="64 MiB", devices=(card.id,)
        )
        rt.preload("mine")
        alone = torch.cuda.get_per_process_memory_fraction(name)
        neighbour.register("theirs", backend="fake", size="4 GiB", devices=(card.id,))
        neighbour.preload("theirs")
        rt.tick()
        beside = torch.cuda.get_per_process_memory_fraction(name)
        assert 0.01 <= beside < alone <= 0.99
        assert alone - beside == pytest.approx(4 * GIB / card.total_bytes, abs=0.02)
        rt.evict("mine")
        assert torch.cuda.get_per_process_memory_fraction(name) == 1.0
    finally:
        rt.close()
        neighbour.close()
