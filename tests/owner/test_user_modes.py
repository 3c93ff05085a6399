"""Nothing of this package runs inside a mode of torch that the user has opened."""

from typing import Any

import pytest
import torch
from torch import nn

from gpu_runtime import GpuError
from gpu_runtime.threads import outside_modes, with_own_modes
from tests import tiny_models
from tests.user_modes import MODES, RaisingFunctions, RaisingOperators, default_device

QUICK = ("function mode", "torch.device")  # the two that `make check` tries too


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_models.causal_lm(tmp_path_factory.mktemp("llama") / "model")


def _every_verb(rt: Any, kernel: Any, llama: Any, module: nn.Module) -> dict[str, nn.Module]:
    """Calls every verb that can touch torch, and returns the modules of the models."""
    rt.register("hub", str(llama))
    rt.register("made", lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval())
    rt.adopt("mine", module)
    rt.plan("hub"), rt.plan("made")
    found = {}
    for name in ("hub", "made", "mine"):
        with rt.use(name) as found[name]:
            pass
        rt.evict(name)
        rt.preload(name)
        rt.move(name, "sim:1")
        rt.evict(name, drop=True)
        with rt.use(name) as again:
            assert again is found[name]
        rt.pin(name), rt.unpin(name), rt.why(name)
    kernel.begin("cell")
    kernel.end("cell")
    rt.park()
    kernel.begin("cell")
    kernel.end("cell")
    assert not kernel.away
    with rt.lease("1 MiB", purpose="test"):
        pass
    rt.status(), rt.models(), rt.leases(), rt.who(), rt.fragmentation(), rt.health()
    rt.allocator_maps(), rt.schedule(), rt.doctor(), rt.defrag(), rt.free(), rt.tick()
    return found


@pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, marks=() if mode in QUICK else pytest.mark.thorough) for mode in MODES],
)
def test_every_verb_works_in_each_mode_of_the_user_and_outside_of_it(started, llama, mode):
    """A load in a mode for meta tensors has real weights, and no mode of the user's sees a call."""
    module = nn.Linear(16, 16).eval()
    held = torch.arange(1 << 18, dtype=torch.float32)
    expected = {name: p.clone() for name, p in module.state_dict().items()}
    rt, kernel = started(devices="sim:2x64MiB,host:256MiB")
    with MODES[mode]():
        before = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
        found = _every_verb(rt, kernel, llama, module)
        after = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    assert before == after
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    for one in found.values():
        for p in one.parameters():
            assert p.device.type == "cpu" and not p.is_inference()
    assert found["hub"].dtype == torch.float32
    assert all(torch.equal(expected[name], p) for name, p in module.state_dict().items())
    assert torch.equal(held, torch.arange(1 << 18, dtype=torch.float32))


def test_a_function_runs_outside_and_a_library_in_its_own_modes():
    """Libraries open modes of their own, such as `torch.device("meta")`, and these have an effect."""

    @outside_modes
    def ours() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with with_own_modes():
            plain = torch.ones(2)
            with torch.device("meta"):
                meta = torch.ones(2)
        return torch.ones(2), plain, meta

    with torch.inference_mode(), default_device(), RaisingOperators(), RaisingFunctions():
        found = ours()
    assert [str(one.device) for one in found] == ["cpu", "cpu", "meta"]
    assert not any(one.is_inference() for one in found)

    def in_transform(x: torch.Tensor) -> torch.Tensor:
        assert not any(torch._C._functorch.is_functorch_wrapped_tensor(one) for one in ours())
        return x.sum()

    torch.func.grad(in_transform)(torch.ones(3))
    torch.func.vmap(in_transform)(torch.ones(3, 2))


def test_an_error_leaves_the_modes_as_they_were():
    @outside_modes
    def ours() -> None:
        with with_own_modes(), torch.device("meta"):
            raise GpuError("no")

    with torch.no_grad(), torch.device("meta"):
        with pytest.raises(GpuError):
            ours()
        assert torch.empty(0).is_meta and not torch.is_grad_enabled()
    assert not torch.empty(0).is_meta
