"""Bytes on a real card, measured by torch and by the driver before and after each step."""

import os

import pytest

from gpu_runtime.backends.base import is_out_of_memory
from gpu_runtime.backends.registry import open_backend
from gpu_runtime.devices.probe import open_probe
from gpu_runtime.facts import ModelSpec, Share
from gpu_runtime.units import MIB
from tests import tiny_models

pytestmark = pytest.mark.gpu
CARD, HOST = (Share("cuda:0", 0),), (Share("host", 0),)


@pytest.fixture
def torch(settle):
    import torch

    return torch


@pytest.fixture
def probe(torch):
    return open_probe("cuda")


def network(torch, megabytes=256):
    width = 1024
    return torch.nn.Sequential(
        *(torch.nn.Linear(width, width, bias=False) for _ in range(megabytes // 4))
    ).eval()


def test_the_probe_names_the_cards_as_cuda_does(torch, probe):
    """The probe names the cards by UUID, and lists them in CUDA's order."""
    mine = {
        f"cuda:{i}": str(torch.cuda.get_device_properties(i).uuid)
        for i in range(torch.cuda.device_count())
    }
    cards = probe.cards
    assert {probe.place(c.id).torch: c.uuid.removeprefix("GPU-") for c in cards} == mine
    sample = probe.samples(0.0)["cuda:0"]
    assert sample.free_bytes is None or 0 < sample.free_bytes <= probe.devices[0].total_bytes


def test_load_offload_restore_and_drop_on_a_card(torch, probe, settle):
    """After each step, torch and the driver measure the expected bytes. The model's answers stay bit-equal."""
    backend, spec = open_backend("torch", probe), ModelSpec("net", "torch")
    torch.manual_seed(0)
    x = torch.randn(4, 1024, device="cuda")
    with torch.no_grad():
        network(torch, 8).cuda()(x)  # loads the kernels, which stay on the card
    settle()
    before, free_before = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    model = backend.load(spec, CARD, lambda: network(torch))
    module, size = backend.value(model), backend.measure(model)[0].bytes
    assert size == 256 * MIB and torch.cuda.memory_allocated() - before == size
    with torch.no_grad():
        expected = module(x)
    held_on_card = torch.cuda.memory_allocated()
    for _ in range(3):
        backend.move(model, HOST)
        assert held_on_card - torch.cuda.memory_allocated() == size
        assert (
            backend.measure(model) == (Share("host", size),)
            and probe.place("host").held_bytes() >= size
        )
        assert all(p.is_cuda for p in module.parameters())
        for access in (torch.Tensor.sum, torch.Tensor.cpu, torch.Tensor.data_ptr, repr):
            with pytest.raises(RuntimeError, match="the weights of net are in RAM"):
                access(next(module.parameters()))
        backend.move(model, CARD)
        with torch.no_grad():
            assert torch.equal(module(x), expected)
    backend.drop(model)
    del expected, x, module
    settle()
    assert torch.cuda.memory_allocated() <= before
    assert free_before - torch.cuda.mem_get_info()[0] < 64 * MIB  # the code of a new kernel


def test_pieces_leave_and_return_on_a_card(torch, probe):
    """The card frees exactly the bytes of the pieces that left, and their weights cannot be read."""
    backend = open_backend("torch", probe)
    torch.manual_seed(0)
    x = torch.randn(4, 1024, device="cuda")
    model = backend.load(ModelSpec("net", "torch"), CARD, lambda: network(torch))
    module, size = backend.value(model), backend.measure(model)[0].bytes
    assert backend.piece_bytes(model) == 4 * MIB
    with torch.no_grad():
        expected = module(x)
    held_on_card = torch.cuda.memory_allocated()
    for part in (12 * MIB, 100 * MIB):
        backend.move(model, (Share("cuda:0", size - part), Share("host", part)))
        assert backend.measure(model) == (Share("cuda:0", size - part), Share("host", part))
        assert held_on_card - torch.cuda.memory_allocated() == part
        with pytest.raises(RuntimeError, match="the weights of net are in RAM"):
            module[-1].weight.sum()
        assert module[0].weight.sum().isfinite()
    backend.move(model, CARD)
    with torch.no_grad():
        assert torch.equal(module(x), expected)
    backend.drop(model)


def test_offloaded_pages_are_locked_for_the_copy_engine(torch, probe):
    backend = open_backend("torch", probe)
    model = backend.load(ModelSpec("net", "torch"), CARD, lambda: network(torch, 64))
    backend.move(model, HOST)
    assert model.away and all(copy.is_pinned() for copy in model.away.values())
    backend.drop(model)
    assert probe.empty_cache() >= 64 * MIB


def test_training_continues_after_a_round_trip(torch, probe):
    """AdamW's state moves with the model, and its step counters stay on the CPU.

    The result is bit-equal to that of a copy of the model that never moved.
    """
    import copy

    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 8)
    ).cuda()
    twin = copy.deepcopy(module)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (module, twin)]
    backend = open_backend("torch", probe)
    batches = [torch.randn(8, 64, device="cuda") for _ in range(4)]

    def step(m, optimizer, batch):
        optimizer.zero_grad()
        m(batch).square().mean().backward()
        optimizer.step()

    model = None
    for batch in batches:
        for m, optimizer in zip((module, twin), optimizers, strict=True):
            step(m, optimizer, batch)
        model = model or backend.adopt(ModelSpec("net", "torch"), module, optimizers[0])
        loss = module(batch).square().mean()
        backend.move(model, HOST)
        with pytest.raises(RuntimeError, match="the weights of net are in RAM"):
            loss.backward(retain_graph=True)
        backend.move(model, CARD)
        loss.backward()
        twin(batch).square().mean().backward()
    for mine, theirs in zip(module.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_transformers_model_on_a_card(torch, probe, tmp_path):
    """The logits stay bit-equal after moves to the card, the host and the disk.

    The digest of the weights is computed on the device where the bytes are.
    """
    backend = open_backend("transformers", probe)
    spec = ModelSpec("llama", "transformers", source=str(tiny_models.causal_lm(tmp_path / "m")))
    model = backend.load(spec, CARD)
    module, ids = backend.value(model), torch.tensor([[5, 6, 7]], device="cuda")
    with torch.no_grad():
        expected = module(ids).logits
    assert backend.unchanged(model)
    backend.move(model, HOST)
    assert backend.unchanged(model), "the fingerprint is the same on the card and on the host"
    backend.move(model, CARD)
    with torch.no_grad():
        assert torch.equal(module(ids).logits, expected)
    backend.drop(model)
    backend.load(spec, CARD, into=module)
    with torch.no_grad():
        assert torch.equal(module(ids).logits, expected)
        module.lm_head.weight[0, 0] += 1


def test_out_of_memory_on_a_card_changes_nothing(torch, probe):
    backend = open_backend("torch", probe)
    module = network(torch, 256)
    model = backend.adopt(ModelSpec("net", "torch"), module)
    free, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(100 * MIB / total)
    before = torch.cuda.memory_allocated()
    try:
        with pytest.raises(Exception) as error:
            backend.move(model, CARD)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert is_out_of_memory(error.value)
    assert torch.cuda.memory_allocated() == before
    assert backend.measure(model)[0].device == "host"


def test_the_driver_charges_this_process_for_its_memory(torch, probe):
    """The used bytes include torch's reserved bytes, and this process's bytes if the driver reports them.

    In a container the driver sees other process ids, so it may not report this process.
    """
    used = probe.used()["cuda:0"]
    assert used >= torch.cuda.memory_reserved()
    processes = probe.samples(0.0)["cuda:0"].processes
    if processes.get(os.getpid()) is not None:
        assert used >= processes[os.getpid()]
