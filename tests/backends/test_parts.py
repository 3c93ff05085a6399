"""Pieces of a module leave its card, and come back: values, objects and training stay the same."""

import copy
import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from gpu_runtime.backends.pytorch import storages, torch_model
from gpu_runtime.backends.registry import open_backend
from gpu_runtime.devices.probe import open_probe
from gpu_runtime.errors import CannotGovern
from gpu_runtime.facts import HOST, ModelSpec, Share
from tests import simgpu

SPEC = ModelSpec("net", "torch")
LAYER = 32 * 32 * 4 + 32 * 4


@pytest.fixture(autouse=True)
def small_models_have_pieces(monkeypatch):
    monkeypatch.setattr(torch_model, "LEAST_BYTES_IN_PARTS", 1)


class Net(nn.Module):
    """Six layers, of which the first and the last share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
        self.layers[5].weight = self.layers[0].weight
        self.register_buffer("offset", torch.randn(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + self.offset


def opened(kind: str) -> tuple[Any, str]:
    if kind == "sim":
        return open_backend("torch", open_probe("sim:2x64MiB,host:64MiB")), "sim"
    return open_backend("torch", simgpu.SimProbe()), "simgpu"


@pytest.fixture(params=["sim", "simgpu"])
def backend(request):
    return opened(request.param)


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.cpu().clone() for name, value in module.state_dict().items()}


def same(module: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(before[name], value) for name, value in values(module).items())


def total(backend: Any, model: Any) -> int:
    return sum(share.bytes for share in backend.measure(model))


def move(backend: Any, model: Any, card: str, in_host: int) -> None:
    """Moves the model to `card`, except for `in_host` bytes of its pieces, which are in host memory."""
    whole = total(backend, model)
    if in_host >= whole:
        backend.move(model, (Share(HOST, whole),))
    elif in_host:
        backend.move(model, (Share(card, whole - in_host), Share(HOST, in_host)))
    else:
        backend.move(model, (Share(card, whole),))


def on(backend: Any, model: Any, device: str) -> int:
    return sum(share.bytes for share in backend.measure(model) if share.device == device)


def test_as_many_pieces_leave_as_fit_and_the_others_stay_where_they_are(backend):
    backend, kind = backend
    card = f"{kind}:0"
    module = Net().eval()
    model = backend.adopt(SPEC, module)
    move(backend, model, card, 0)
    before, held = values(module), total(backend, model)
    assert backend.piece_bytes(model) == LAYER + 2 * 32 * 4, "layers that share storage are one"
    with pytest.raises(CannotGovern, match="partly in RAM"):
        move(backend, model, card, 100)
    assert backend.measure(model) == (Share(card, held),), "100 bytes are less than every piece"
    stays = module.layers[1].weight.untyped_storage().data_ptr()
    move(backend, model, card, 2 * LAYER + 5)
    assert on(backend, model, HOST) == 2 * LAYER and on(backend, model, card) == held - 2 * LAYER
    assert module.layers[1].weight.untyped_storage().data_ptr() == stays, "it was not copied"
    move(backend, model, card, 3 * LAYER)
    assert on(backend, model, HOST) == 3 * LAYER
    move(backend, model, card, 0)
    assert backend.measure(model) == (Share(card, held),)
    assert same(module, before)


def test_as_many_pieces_return_as_fit_and_the_first_come_first(backend):
    """The pieces that leave last return first, so that the pieces on the card are consecutive."""
    backend, kind = backend
    card = f"{kind}:0"
    module = Net().eval()
    model = backend.adopt(SPEC, module)
    move(backend, model, card, 0)
    before, held = values(module), total(backend, model)
    backend.move(model, (Share(HOST, held),))
    first = backend.piece_bytes(model)
    for wanted, here in ((first + 5, first), (first + 2 * LAYER + 5, first + 2 * LAYER)):
        move(backend, model, card, held - wanted)
        assert on(backend, model, card) == here, "never more than was granted"
    stays = module.layers[1].weight.untyped_storage().data_ptr()
    move(backend, model, card, held - first - 3 * LAYER)
    assert module.layers[1].weight.untyped_storage().data_ptr() == stays, "it was not copied again"
    with pytest.raises(CannotGovern, match="partly in RAM"):
        move(backend, model, card, on(backend, model, HOST) - 100)
    move(backend, model, card, 0)
    assert backend.measure(model) == (Share(card, held),)
    assert same(module, before)


def test_a_part_may_leave_for_the_host_or_return_to_another_card(backend):
    backend, kind = backend
    module = Net().eval()
    model = backend.adopt(SPEC, module)
    move(backend, model, f"{kind}:0", 0)
    before = values(module)
    move(backend, model, f"{kind}:0", LAYER)
    move(backend, model, f"{kind}:1", 0)
    assert [share.device for share in backend.measure(model)] == [f"{kind}:1"]
    move(backend, model, f"{kind}:1", LAYER)
    move(backend, model, f"{kind}:1", total(backend, model))
    assert [share.device for share in backend.measure(model)] == [HOST]
    move(backend, model, f"{kind}:0", 0)
    assert same(module, before)


def test_copies_out_have_a_stream_of_their_own(monkeypatch):
    """The bus of a card copies in both directions at once, but the work of one stream is in order."""
    backend, kind = opened("simgpu")
    model = backend.adopt(SPEC, Net().eval())
    module, used = torch.simgpu, {"cpu": set(), kind: set()}
    copy_all = torch._foreach_copy_

    def copied(targets: Any, *rest: Any, **words: Any) -> None:
        used[targets[0].device.type].add(module.current_stream(0).stream_id)
        copy_all(targets, *rest, **words)

    monkeypatch.setattr(torch, "_foreach_copy_", copied)
    before = values(model.module)
    with simgpu.late():
        for _ in range(2):
            move(backend, model, f"{kind}:0", 0)
            move(backend, model, f"{kind}:0", 3 * LAYER)
    current = module.current_stream(0).stream_id
    assert used[kind] == {current} and used["cpu"] and current not in used["cpu"]
    move(backend, model, f"{kind}:0", 0)
    assert same(model.module, before)


def test_a_model_in_parts_is_dropped_whole(backend):
    """The model's bytes exist nowhere else, so the user's module keeps them after the drop."""
    backend, kind = backend
    module = Net().eval()
    model = backend.adopt(SPEC, module)
    move(backend, model, f"{kind}:0", 0)
    before = values(module)
    move(backend, model, f"{kind}:0", 2 * LAYER)
    backend.drop(model)
    assert backend.measure(model) == ()
    assert same(module, before)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["sim", "simgpu"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 12))
def test_random_journeys_of_pieces_change_no_bit(kind, seed, steps):
    """As a copy that never moved. On simulated cards the model is trained between the moves, too."""
    choice = random.Random(seed)
    torch.manual_seed(seed)
    backend, _ = opened(kind)
    module = Net()
    twin = copy.deepcopy(module)
    trains = kind == "sim"
    module.train(trains), twin.train(trains)
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.1) for one in (module, twin)]
    model = backend.adopt(SPEC, module, optimizers[0] if trains else None)
    card = f"{kind}:0"
    move(backend, model, card, 0)
    for _ in range(steps):
        held, piece = total(backend, model), backend.piece_bytes(model)
        part = choice.choice([0, 0, choice.randrange(piece, held + 1)])
        if choice.random() < 0.2:
            card = f"{kind}:{choice.randrange(2)}"
            part = 0
        if abs(part - on(backend, model, HOST)) < piece:  # no piece may fit
            part = 0
        move(backend, model, card, part)
        assert total(backend, model) == held
        if part == 0 and trains:
            x = torch.randn(4, 32)
            for one, optimizer in zip((module, twin), optimizers, strict=True):
                optimizer.zero_grad()
                one(x).square().mean().backward()
                optimizer.step()
    move(backend, model, card, 0)
    assert same(module, values(twin))


@pytest.mark.parametrize("at", ["_copy", "_empty"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_in_the_middle_leaves_every_byte_where_it_was(backend, monkeypatch, at, error):
    backend, kind = backend
    module = Net().eval()
    model = backend.adopt(SPEC, module)
    move(backend, model, f"{kind}:0", 0)
    before = values(module)
    for part in (2 * LAYER, 0):  # on its way out, then on its way back
        held = backend.measure(model)
        with monkeypatch.context() as broken:
            broken.setattr(storages, at, _raising(error))
            with pytest.raises(error):
                move(backend, model, f"{kind}:0", part)
        assert backend.measure(model) == held
        move(backend, model, f"{kind}:0", part)
    assert same(module, before)


def _raising(error: type[BaseException]) -> Any:
    def fail(*_: Any) -> Any:
        raise error("in the middle")

    return fail


def test_a_model_from_disk_in_parts_is_proven_unchanged_and_dropped_whole(probe, llama):
    backend = open_backend("transformers", probe)
    spec = ModelSpec("m", "transformers", source=str(llama))
    model = backend.load(spec, (Share("sim:0", 1),))
    ids = torch.arange(3, 20).unsqueeze(0)
    with torch.no_grad():
        before = backend.value(model)(ids).logits.clone()
    held, piece = total(backend, model), backend.piece_bytes(model)
    assert 0 < piece < held
    move(backend, model, "sim:0", piece)
    assert 0 < on(backend, model, HOST) <= piece and total(backend, model) == held
    assert backend.unchanged(model)
    move(backend, model, "sim:0", 0)
    with torch.no_grad():
        assert torch.equal(backend.value(model)(ids).logits, before)
    move(backend, model, "sim:0", piece)
    backend.drop(model)
    assert probe.place("sim:0").held_bytes() == probe.place(HOST).held_bytes() == 0


def test_the_pieces_of_a_model_with_a_shadow_leave_without_a_copy(probe, llama, monkeypatch):
    """When a piece leaves, its shadow becomes its bytes in host memory; when it returns, they become the shadow."""
    backend = open_backend("transformers", probe)
    spec = ModelSpec("m", "transformers", source=str(llama))
    model = backend.load(spec, (Share("sim:0", 1),), shadow=True)
    module, ids = backend.value(model), torch.arange(3, 20).unsqueeze(0)
    held, piece = total(backend, model), backend.piece_bytes(model)
    assert model.shadow_bytes == probe.place(HOST).held_bytes() == held
    before = weights(module)
    with monkeypatch.context() as broken:
        broken.setattr(storages, "_copy", _raising(RuntimeError))  # nothing is copied
        move(backend, model, "sim:0", piece)
    gone = on(backend, model, HOST)
    assert 0 < gone <= piece and model.shadow_bytes == held - gone
    assert probe.place(HOST).held_bytes() == held
    backend.move(model, (Share("sim:0", held),), shadow=True)
    assert model.shadow_bytes == probe.place(HOST).held_bytes() == held
    assert all(torch.equal(one, other) for one, other in zip(before, weights(module), strict=True))
    move(backend, model, "sim:0", piece)
    move(backend, model, "sim:0", held)
    assert (model.shadow_bytes, probe.place(HOST).held_bytes()) == (0, held)
    backend.move(model, (Share("sim:0", held),))
    with torch.no_grad():
        assert module(ids).logits.isfinite().all()


def weights(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]
