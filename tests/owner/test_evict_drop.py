"""`evict` with `drop` empties host memory too, and `*` names every idle model."""

import pytest

from gpu_runtime import GpuError
from gpu_runtime.units import GIB
from tests import tiny_models
from tests.clock import PATIENCE

from .conftest import fakes, places

pytestmark = pytest.mark.thorough


def test_a_model_that_exists_nowhere_else_stays_in_host_memory(runtime):
    """The weights of this model have no source, so `drop` only moves them to host memory."""
    torch = pytest.importorskip("torch")
    rt = runtime()
    rt.adopt("mine", torch.nn.Linear(4, 4).eval())
    rt.preload("mine")
    for _ in range(2):
        rt.evict("mine", drop=True)
        assert places(rt) == {"mine": "host"}


def test_all_idle_models_of_all_processes_leave(runtime, shared_book):
    first, second = runtime(ledger=shared_book), runtime(ledger=shared_book)
    fakes(first, a="4GiB", used="4GiB", kept="4GiB")
    fakes(second, b="4GiB")
    for rt, name in ((first, "a"), (first, "kept"), (second, "b")):
        rt.preload(name)
    first.pin("kept")
    with first.use("used"):
        second.evict("*")
        assert places(first) == {"a": "host", "used": "sim:0", "kept": "sim:0", "b": "host"}
        second.evict("*", drop=True)
        assert places(first) == {"used": "sim:0", "kept": "sim:0"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    pytest.importorskip("transformers")
    return str(tiny_models.causal_lm(tmp_path_factory.mktemp("llama") / "model"))


@pytest.mark.parametrize("room", ["64MiB", "64KiB"])
def test_a_live_graph_keeps_the_weights_that_it_needs(runtime, llama, room):
    """With room in host memory the model leaves, without it stays. Backward and the next use work either way."""
    import torch

    rt = runtime(devices=f"sim:64MiB,host:{room}")
    rt.register("w", llama)
    ids = torch.arange(8)[None]
    with rt.use("w") as model:
        expected = torch.autograd.grad(model(ids).logits.pow(2).sum(), list(model.parameters()))
        out = model(ids).logits
    before = {name: one.clone() for name, one in model.state_dict().items()}
    if room == "64KiB":
        with pytest.raises(GpuError, match="is needed by an autograd graph or a view"):
            rt.evict("w", drop=True)
    else:
        assert rt.evict("w", drop=True).where == "host"
    assert places(rt) == {"w": "sim:0" if room == "64KiB" else "host"}
    out.pow(2).sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
        parameter.grad = None
    del out
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    for _ in range(2):
        with rt.use("w") as again, torch.no_grad():
            assert again is model and torch.isfinite(again(ids).logits).all()
    rt.tick()
    rt.evict("w", drop=True)
    assert places(rt) == {}, "nothing needs its bytes any more"
    with rt.use("w") as again:
        assert all(torch.equal(one, before[name]) for name, one in again.state_dict().items())


def test_an_eviction_for_another_process_first_makes_room_in_host_memory(runtime, shared_book):
    """Its two steps need no second wake-up: the requester may wait without a word."""
    devices = "sim:2GiB,host:1GiB"
    holder, other = (
        runtime(ledger=shared_book, devices=devices, monitor=False, cpu_memory_max_percent=1.0)
        for _ in "ab"
    )
    fakes(holder, old="1GiB", new="1GiB")
    holder.preload("old"), holder.preload("new")
    holder.evict("old")
    assert places(holder) == {"old": "host", "new": "sim:0"}
    other.evict("new", wait=False)
    holder.tick()
    assert places(holder) == {"new": "host"}


def test_a_person_evicts_and_drains_a_model_of_any_importance(runtime):
    """One of an importance below -1, which may be typed, never left: it was more important than a person."""
    rt = runtime()
    rt.register("m", backend="fake", size="1GiB", importance=-999_999_999)
    rt.preload("m")
    assert rt.evict("m").bytes == GIB
    rt.preload("m")
    assert rt.drain("sim:0", timeout=PATIENCE).bytes == GIB
