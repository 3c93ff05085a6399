"""Real models with real forward passes. A move to RAM or to disk and back must not change their results."""

import gc
from functools import partial

import pytest
import torch
from torch import nn

from gpu_runtime import (
    AlreadyRegistered,
    CannotGovern,
    DoesNotFit,
    LoadFailed,
    NotAModel,
)
from gpu_runtime.owner import maintenance, registry, release
from tests import tiny_models
from tests.clock import PATIENCE

from .conftest import claims, together, where

pytestmark = pytest.mark.thorough

IDS = torch.arange(3, 20).unsqueeze(0)


def logits(module) -> torch.Tensor:
    with torch.no_grad():
        out = module(IDS)
    return (
        out.logits
        if hasattr(out, "logits")
        else out.last_hidden_state
        if hasattr(out, "last_hidden_state")
        else out
    ).clone()


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    home = tmp_path_factory.mktemp("models")
    return {
        "llm": tiny_models.causal_lm(home / "llm"),
        "tied": tiny_models.causal_lm(home / "tied", tied=True, seed=1),
        "embedding": tiny_models.embedder(home / "embedding"),
        "reranker": tiny_models.reranker(home / "reranker"),
    }


@pytest.mark.parametrize("kind", ["llm", "tied", "embedding", "reranker"])
def test_a_model_answers_bit_for_bit_the_same_after_every_journey(runtime, directories, kind):
    rt = runtime()
    rt.register(kind, directories[kind])
    with rt.use(kind) as module:
        before = logits(module)
        assert module.tokenizer("gpu memory")["input_ids"]
    rt.evict(kind)
    assert where(rt) == {kind: "host"} and rt.probe.used()["sim:0"] == 0
    with rt.use(kind) as again:
        assert again is module and torch.equal(logits(again), before)
    release.evict(rt._session, registry.find(rt._session, kind), "to disk", drop=True)
    assert where(rt) == {kind: "disk"}
    assert rt.probe.used().get("sim:0", 0) == rt.probe.used().get("host", 0) == 0
    with rt.use(kind) as reloaded:
        assert reloaded is module, "a reference that was kept is filled again in place"
        assert torch.equal(logits(reloaded), before)


CHANGES = {
    "add_": lambda p: p.add_(1e-3),
    "data.add_": lambda p: p.data.add_(1e-3),
    "numpy view": lambda p: p.detach().numpy().__iadd__(1e-3),
    "sign flips": lambda p: p.data.neg_(),
    "rows swapped": lambda p: p.data.copy_(p.data.flip(0).clone()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_changed_in_place_is_never_lost(runtime, directories, change):
    rt = runtime()
    rt.register("llm", directories["llm"])
    with rt.use("llm") as module, torch.no_grad():
        CHANGES[change](module.lm_head.weight)
        changed = logits(module)
    step = release.evict(rt._session, registry.find(rt._session, "llm"), "to disk", drop=True)
    assert type(step).__name__ == "Move" and where(rt) == {"llm": "host"}
    assert any("differ from their source" in event.because for event in rt.why("llm"))
    with rt.use("llm") as module:
        assert torch.equal(logits(module), changed)


@pytest.mark.parametrize("lasts", [False, True], ids=["a forward pass", "a view that is kept"])
def test_what_a_forward_pass_needs_does_not_outlast_its_use(runtime, clock, directories, lasts):
    """A round of the monitor measures the model during the pass; the use ends before it relieves the card."""
    rt = runtime(devices="sim:610KiB,host:1GiB", gpu_relief="always", monitor=False, clock=clock)
    rt.register("llm", directories["llm"])
    with rt.use("llm") as module:
        views = [module.lm_head.weight.t()]
        maintenance.remeasure(rt._session)
    if lasts:
        maintenance.remeasure(rt._session)
    else:
        views.clear()
    rt._session.truth()  # notes the end of the use
    clock.advance(60)
    maintenance.relieve(rt._session)
    event = rt.why("llm")[0]
    assert "CRITICAL" in event.because
    assert event.action == ("offloaded" if lasts else "unloaded")


def test_where_a_changed_model_can_neither_be_dropped_nor_kept_the_newcomer_is_refused_and_both_are_named(
    runtime, directories
):
    rt = runtime(devices="sim:1MiB,host:100KiB")
    rt.register("llm", directories["llm"])
    rt.register("tied", directories["tied"])
    with rt.use("llm") as module, torch.no_grad():
        module.lm_head.weight.data.add_(1.0)
        changed = logits(module)
    with (
        pytest.raises(DoesNotFit, match=r"(?s)tied.*llm.*exists nowhere else"),
        rt.use("tied", timeout=PATIENCE),
    ):
        pass
    assert torch.equal(logits(module), changed)


# -- modules that exist already -------------------------------------------------------------------------------------
def mlp(seed=0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 8, dtype=torch.float32)
    )


def test_an_adopted_module_is_counted_moved_and_never_dropped(runtime):
    rt = runtime(enable_cpu_offload=True)
    module = mlp().eval()
    rt.adopt("mine", module)
    size = sum(t.numel() * t.element_size() for t in [*module.parameters(), *module.buffers()])
    assert claims(rt) == {"host": size} and where(rt) == {"mine": "host"}
    x = torch.randn(4, 64)
    before = module(x)
    assert where(rt) == {"mine": "sim:0"}, "a call brings it onto the device"
    rt.evict("mine")
    assert where(rt) == {"mine": "host"} and torch.equal(module(x), before)
    rt.adopt("mine", module)
    with pytest.raises(AlreadyRegistered):
        rt.adopt("mine", mlp())
    with pytest.raises(CannotGovern, match="governed already, as 'mine'"):
        rt.adopt("other", module)
    with pytest.raises(CannotGovern, match="int is no torch.nn.Module"):
        rt.adopt("other", 5)
    rt.forget("mine")
    assert torch.equal(module(x), before) and claims(rt) == {} and rt.specs() == ()
    assert type(module) is nn.Sequential


def test_training_goes_on_after_journeys_as_if_there_had_been_none(runtime):
    """Gradients, AdamW's state and BatchNorm's statistics move, too; a copy that never moved has the same."""
    rt = runtime()
    moved, stayed = mlp(), mlp()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (moved, stayed)]
    with pytest.raises(CannotGovern, match="optimizer=opt"):
        rt.adopt("train", moved)
    rt.adopt("train", moved, optimizer=optimizers[0])
    for step in range(6):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
        for module, optimizer in zip((moved, stayed), optimizers, strict=True):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
        rt.evict("train")
    weights = sum(p.numel() * 4 for p in moved.parameters())
    assert claims(rt)["host"] >= 4 * weights, "weights, gradients and two moments are counted"
    for mine, twin in zip(moved.state_dict().values(), stayed.state_dict().values(), strict=True):
        assert torch.equal(mine, twin)


def test_a_factory_is_built_when_first_used_and_its_weights_are_never_dropped(runtime):
    rt = runtime()
    rt.register("made", lambda: mlp(3).eval())
    with rt.use("made") as module:
        before = module(torch.ones(2, 64))
    assert not rt.status().sections[rt._session.me].lease("made").droppable
    rt.evict("made")
    with rt.use("made") as module:
        assert torch.equal(module(torch.ones(2, 64)), before)


@pytest.mark.parametrize(
    "factory, error",
    [(lambda: 1 / 0, "ZeroDivisionError"), (lambda: None, "NoneType"), (lambda: "text", "str")],
)
def test_a_factory_that_raises_or_returns_nothing_is_named(runtime, factory, error):
    rt = runtime()
    with pytest.raises(Exception) as raised:
        rt.register("bad", factory, size="1MiB")
        rt.preload("bad")
    assert "bad" in str(raised.value) and error in str(raised.value)
    assert isinstance(raised.value, LoadFailed) and claims(rt) == {}


def test_a_damaged_model_directory_is_named(runtime, directories, tmp_path):
    import shutil

    rt = runtime()
    broken = tmp_path / "broken"
    shutil.copytree(directories["llm"], broken)
    tiny_models.truncate(broken / "model.safetensors", by=100)
    with pytest.raises(LoadFailed, match="model.safetensors"):
        rt.register("broken", broken)
    with pytest.raises(NotAModel):
        rt.register("empty", tmp_path)
    with pytest.raises(LoadFailed, match="hf download no/such"):
        rt.register("hub", "no/such")
    assert rt.specs() == ()


def test_threads_sharing_one_model_and_swapping_others_get_right_answers(runtime, directories):
    rt = runtime(devices="sim:1MiB,host:1GiB")
    expected, wrong = {}, []
    for name in ("llm", "tied", "reranker"):
        rt.register(name, directories[name])
        with rt.use(name) as module:
            expected[name] = logits(module)

    def work(order):
        for name in order * 5:
            with rt.use(name, timeout=PATIENCE) as module:
                if not torch.equal(logits(module), expected[name]):
                    wrong.append(name)

    orders = (["llm", "tied"], ["tied", "reranker"], ["reranker", "llm"])
    together(*(partial(work, order) for order in orders))
    gc.collect()
    assert wrong == []
