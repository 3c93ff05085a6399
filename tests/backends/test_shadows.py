"""Shadows: an unchanged storage leaves its card without a new copy, and no weights are ever wrong."""

import gc
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_runtime.backends.pytorch import shadows
from gpu_runtime.backends.pytorch import storages as storages_module
from gpu_runtime.backends.pytorch.transformers_backend import TransformersBackend
from gpu_runtime.devices.probe import open_probe
from gpu_runtime.facts import HOST, ModelSpec, Share
from tests import simgpu

pytestmark = pytest.mark.thorough

CARD, OTHER = "sim:0", "sim:1"


@pytest.fixture
def copied(monkeypatch):
    """The bytes of each call that copies storages."""
    sizes = []
    copy_all = storages_module._copy_all

    def counted(sources, *rest):
        sizes.append(sum(source.nbytes for source in sources))
        return copy_all(sources, *rest)

    monkeypatch.setattr(storages_module, "_copy_all", counted)
    return sizes


def loaded(probe, llama, **more):
    backend = TransformersBackend(probe)
    spec = ModelSpec("llama", backend="transformers", source=str(llama))
    return backend, backend.load(spec, (Share(CARD, 0),), shadow=True, **more)


def move(backend, model, device, shadow=True):
    size = sum(share.bytes for share in backend.measure(model))
    backend.move(model, (Share(device, size),), shadow=shadow and device != HOST)


def held(probe):
    return probe.place(HOST).held_bytes()


def content(model):
    """All weights and buffers, also those that are not in the model's files."""
    tensors = [*model.module.named_parameters(), *model.module.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in tensors}


def same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)), name


def test_an_unchanged_model_leaves_and_returns_without_a_copy_out(probe, llama, copied):
    backend, model = loaded(probe, llama)
    size = sum(share.bytes for share in backend.measure(model))
    before = content(model)
    assert model.shadow_bytes == size and held(probe) >= size
    for _ in range(2):
        copied.clear()
        move(backend, model, HOST)
        assert sum(copied) == 0 and model.shadow_bytes == 0
        assert (probe.place(CARD).held_bytes(), held(probe)) == (0, size)
        move(backend, model, CARD)
        assert sum(copied) == size and model.shadow_bytes == size and held(probe) == size
        same(content(model), before)


def test_only_the_changed_storage_is_copied(probe, llama, copied):
    backend, model = loaded(probe, llama)
    parameter = next(iter(model.module.parameters()))
    original = parameter.data.flatten()[7].clone()
    parameter.data.view(-1)[7] += 1
    changed = content(model)
    copied.clear()
    move(backend, model, HOST)
    assert sum(copied) == parameter.untyped_storage().nbytes()
    move(backend, model, CARD)
    same(content(model), changed)
    # The bytes of the load again: the copy in host memory has the changed bytes, and must not be used.
    parameter.data.view(-1)[7] = original
    again = content(model)
    move(backend, model, HOST)
    move(backend, model, CARD)
    same(content(model), again)


def test_a_freed_copy_is_not_used_and_one_is_made_again_with_the_load(probe, llama, copied):
    backend, model = loaded(probe, llama)
    before = content(model)
    backend.free_shadow(model)
    assert held(probe) == 0
    copied.clear()
    move(backend, model, HOST)
    assert sum(copied) > 0
    move(backend, model, CARD)
    assert model.shadow_bytes == 0  # nobody knows whether these bytes are those of the load
    same(content(model), before)
    backend, model = loaded(probe, llama)
    before, module = content(model), model.module
    backend.drop(model)
    assert held(probe) == 0
    _, again = loaded(probe, llama, into=module)
    assert again.module is module and again.shadow_bytes
    copied.clear()
    move(backend, again, HOST)
    assert sum(copied) == 0
    move(backend, again, CARD)
    same(content(again), before)


def test_without_memory_for_the_digest_the_storages_are_copied(probe, llama, copied, monkeypatch):
    backend, model = loaded(probe, llama)
    before = content(model)

    def full(_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(shadows, "digest", full)
    copied.clear()
    move(backend, model, HOST)
    assert sum(copied) == sum(share.bytes for share in backend.measure(model))
    move(backend, model, CARD)
    same(content(model), before)


def test_a_full_host_does_not_stop_the_load(llama):
    probe = open_probe("sim:64MiB,host:1MiB")
    probe.place(HOST).squeeze(1 << 20)
    backend, model = loaded(probe, llama)
    assert (model.shadow_bytes, held(probe)) == (0, 0)
    model.module(torch.tensor([[1, 2]]))


def test_a_failed_move_leaves_the_bytes_and_the_copy(probe, llama, monkeypatch):
    backend, model = loaded(probe, llama)
    before, copy = content(model), model.shadow_bytes

    def broken(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shadows, "new_bytes", broken)
        with pytest.raises(KeyboardInterrupt):
            move(backend, model, HOST)
    same(content(model), before)
    assert model.shadow_bytes == copy
    move(backend, model, HOST)
    move(backend, model, CARD)
    same(content(model), before)


STEPS = st.one_of(
    st.tuples(st.just("change"), st.integers(0, 30), st.integers(0, 63)),
    st.tuples(st.just("revert"), st.integers(0, 30), st.just(0)),
    st.tuples(st.sampled_from(["free", "gradients", "load_state_dict"]), st.just(0), st.just(0)),
    st.tuples(st.just("away"), st.just(0), st.integers(0, 1)),
    st.tuples(st.just("other"), st.just(0), st.integers(0, 1)),
)


@settings(max_examples=settings().max_examples * 5 // 8)  # each example loads a model
@given(st.lists(STEPS, max_size=8))
def test_the_weights_are_right_after_any_journey(llama, steps):
    probe = open_probe("sim:2x64MiB,host:64MiB")
    backend, model = loaded(probe, llama)
    original = content(model)
    parameters = list(model.module.parameters())
    for step, which, number in steps:
        parameter = parameters[which % len(parameters)]
        if step == "change":
            parameter.data.view(-1)[number % parameter.numel()] += 1
        elif step == "revert":
            name = next(n for n, p in model.module.named_parameters() if p is parameter)
            parameter.data.copy_(original[name])
        elif step == "free":
            backend.free_shadow(model)
        elif step == "load_state_dict":
            model.module.load_state_dict(original, strict=False)
        elif step == "gradients":
            parameter.grad = torch.ones_like(parameter)
        else:
            before = content(model)
            move(backend, model, HOST if step == "away" else OTHER, bool(number))
            move(backend, model, CARD, bool(number))
            same(content(model), before)
        assert model.shadow_bytes <= sum(share.bytes for share in backend.measure(model))
    size = sum(share.bytes for share in backend.measure(model))
    assert probe.place(CARD).held_bytes() == size and held(probe) == model.shadow_bytes


def test_the_first_copy_to_a_card_locks_the_pages_that_are_older_than_cuda(monkeypatch):
    """A shadow is made before its model is on a card, often before the process uses CUDA."""
    steps = []
    host = types.SimpleNamespace(
        pinned=True,
        region_at=lambda address: address,
        lock=lambda addresses: steps.append(addresses),
    )
    source = torch.ones(8, dtype=torch.uint8)
    target = types.SimpleNamespace(is_cuda=True, device=torch.device("cuda:0"))
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *_, **__: steps.append("copy"))
    storages_module._copy([target], [source], host)
    assert steps == [[source.data_ptr()], "copy"]


def test_work_of_a_side_stream_that_is_not_done_yet_is_a_change(llama, guards):
    """A digest's stream does not wait for others: read too early, the change would be lost."""
    with simgpu.late():
        backend = TransformersBackend(simgpu.SimProbe())
        spec = ModelSpec("llama", backend="transformers", source=str(llama))
        model = backend.load(spec, (Share("simgpu:0", 0),))
        assert backend.unchanged(model)
        with torch.simgpu.stream(torch.simgpu.Stream(0)), torch.no_grad():
            model.module.lm_head.weight.add_(1)
        assert not backend.unchanged(model)
        backend.drop(model)
        del model
        gc.collect()
