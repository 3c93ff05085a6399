"""Two models with one set of weights: counted once, moved together, never during a call, never lost."""

import contextlib

import pytest
import torch
from torch import nn

from gpu_runtime import StillInUse
from gpu_runtime.owner import registry
from tests import tiny_models

from .conftest import claims, where

X = torch.linspace(-1, 1, 64).view(2, 32)


def backbone() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)).eval()


class Head(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body, self.head = body, nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def answer(module: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return module(X).clone()


def size(*modules: nn.Module) -> int:
    return sum(p.nbytes for p in {p for module in modules for p in module.parameters()})


@pytest.mark.parametrize("end", ["forget", "close"])
@pytest.mark.parametrize("place", ["on the card", "in RAM"])
def test_a_factory_that_returns_the_users_own_module_never_costs_its_weights(runtime, end, place):
    rt, mine = runtime(), backbone()
    before = answer(mine)
    rt.register("m", lambda: mine)
    rt.preload("m")
    if place == "in RAM":
        rt.evict("m")
    rt.forget("m") if end == "forget" else rt.close()
    assert type(mine) is nn.Sequential and torch.equal(answer(mine), before)


def test_two_factories_of_one_module_are_two_names_of_its_weights(runtime):
    """If one name is forgotten, a call of the other model still restores the module."""
    rt, mine = runtime(), backbone()
    before = answer(mine)
    for name in ("one", "two"):
        rt.register(name, lambda: mine)
        rt.preload(name)
    assert claims(rt) == {"sim:0": size(mine)}
    rt.forget("two")
    rt.evict("one")
    assert where(rt) == {"one": "host"}
    assert torch.equal(answer(mine), before) and where(rt) == {"one": "sim:0"}


@pytest.fixture
def heads(runtime):
    """A runtime with two loaded models over one backbone, and the results that they compute."""
    rt, body = runtime(), backbone()
    one, two = Head(body).eval(), Head(body).eval()
    expected = answer(one), answer(two)
    rt.register("one", lambda: one, size="1MiB")
    rt.register("two", lambda: two, size="1MiB")
    rt.preload("one")
    rt.preload("two")
    return rt, one, two, expected


def test_a_shared_backbone_does_not_move_while_either_model_runs(heads):
    rt, _, two, expected = heads
    with rt.use("two"):
        with pytest.raises(StillInUse):
            rt.evict("one")
        assert torch.equal(answer(two), expected[1])
    rt.evict("one")
    assert where(rt)["one"] == "host"


def test_a_model_brings_the_backbone_of_the_other_back(heads):
    rt, one, two, expected = heads
    for gone in (("one",), ("two",), ("one", "two"), ("two", "one")):
        for name in gone:
            rt.evict(name)
        assert torch.equal(answer(two), expected[1])
        assert where(rt) == {"one": "sim:0" if "one" in gone else where(rt)["one"], "two": "sim:0"}
        assert torch.equal(answer(one), expected[0])
    assert claims(rt) == {"sim:0": size(one, two)} and rt.probe.used()["sim:0"] == size(one, two)


@pytest.mark.parametrize("first, second", [("one", "two"), ("two", "one")])
def test_after_one_is_forgotten_the_other_has_all_its_weights(heads, first, second):
    rt, one, two, expected = heads
    rt.forget(first)
    left, before = (two, expected[1]) if first == "one" else (one, expected[0])
    rt.evict(second)
    assert torch.equal(answer(left), before)
    assert claims(rt) == {"sim:0": size(left)}
    with rt.use(second):
        with pytest.raises(StillInUse):
            rt.evict(second)


@pytest.mark.parametrize("order", ["part first", "whole first"])
def test_a_part_adopted_beside_its_whole_counts_once_and_does_not_move_under_it(runtime, order):
    rt, whole = runtime(), Head(backbone()).eval()
    part = whole.body
    expected = answer(whole), answer(part)
    names = [("part", part), ("whole", whole)]
    for name, module in names if order == "part first" else reversed(names):
        rt.adopt(name, module)
    assert sum(claims(rt).values()) == size(whole)
    for name, other in (("part", "whole"), ("whole", "part")):
        with rt.use(name) as running:
            here = [p.data_ptr() for p in running.parameters()]
            with contextlib.suppress(StillInUse):  # what holds no weights of `running` may leave
                rt.evict(other)
            assert [p.data_ptr() for p in running.parameters()] == here
            assert torch.equal(answer(running), expected[name == "part"])
    for name, _ in names:
        rt.evict(name)
    assert torch.equal(answer(part), expected[1]) and torch.equal(answer(whole), expected[0])
    rt.forget("whole")
    assert torch.equal(answer(part), expected[1]) and sum(claims(rt).values()) == size(part)


def test_a_model_from_disk_whose_weights_another_uses_is_not_dropped(runtime, tmp_path):
    rt = runtime()
    rt.register("llm", tiny_models.causal_lm(tmp_path / "llm"))
    with rt.use("llm") as llm:
        before = llm.lm_head.weight.detach().clone()
        rt.adopt("head", nn.Sequential(llm.lm_head).eval())
    resident = registry.find(rt._session, "llm")
    assert not resident.droppable()
    rt.forget("llm")
    with rt.use("head") as head:
        assert torch.equal(head[0].weight, before)


def test_a_part_of_a_model_in_use_runs_although_its_card_was_drained(runtime):
    """It needs no bytes. A drain in the middle of a `with` block made the next call of the whole fail."""
    rt = runtime()
    whole = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval()
    rt.adopt("whole", whole)
    rt.adopt("part", whole[0])
    with rt.use("whole") as used, torch.no_grad():
        expected = used(torch.ones(1, 64))
        for card in [view.device.id for view in rt.status().cards]:
            rt.drain(card)
        rt.tick()
        assert torch.equal(used(torch.ones(1, 64)), expected)
