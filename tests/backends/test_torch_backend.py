"""Modules from live Python: each storage moves once, objects stay; what cannot move safely is refused by name."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gpu_runtime.backends.registry import backend_for, open_backend
from gpu_runtime.errors import BadSetting, CannotGovern, LoadFailed, NotAModel, UnknownSize
from gpu_runtime.facts import ModelSpec, Share
from gpu_runtime.fault_texts import WRITE_REFUSED
from tests.worlds import footprint

CARD, OTHER, HOST = (Share("sim:0", 0),), (Share("sim:1", 0),), (Share("host", 0),)
SPEC = ModelSpec("net", "torch")


@pytest.fixture
def backend(probe):
    return open_backend("torch", probe)


def there_and_back(backend, module):
    """Adopts the module and moves it to a card, to the host, and to the card again. Returns its handle."""
    model = backend.adopt(SPEC, module)
    for shares in (CARD, HOST, CARD):
        backend.move(model, shares)
    return model


class Odd(nn.Module):
    """A module whose storages differ from its tensors in every possible way."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.randn(10, 10)
        self.register_buffer("rows", base[2:4])
        self.register_buffer("turned", base.t(), persistent=False)
        self.register_buffer("nothing", torch.empty(0, 3))
        self.register_buffer("conjugate", torch.randn(3, dtype=torch.complex64).conj())
        self.register_buffer("flags", torch.tensor([True, False]))
        self.image = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.coarse = nn.Parameter(torch.randn(5, 7).to(torch.bfloat16), requires_grad=False)
        self.one = nn.Linear(8, 8, dtype=torch.float64)
        self.two = nn.Linear(8, 8, dtype=torch.float64)
        self.two.weight = self.one.weight
        self.scalar = nn.Parameter(torch.tensor(3.0))


def test_a_model_that_is_dropped_while_it_is_measured_holds_nothing(backend, monkeypatch):
    """A status may read the size of a model in the moment in which another thread drops the model."""
    model = backend.adopt(SPEC, nn.Linear(4, 4).eval())
    backend.move(model, CARD)
    model.module.bias = nn.Parameter(torch.zeros(4))  # a storage that torch allocated
    groups = model.groups

    def dropped_meanwhile():
        found = groups()
        monkeypatch.undo()
        backend.drop(model)
        return found

    monkeypatch.setattr(model, "groups", dropped_meanwhile)
    assert backend.measure(model) == ()
    assert model.noted == {}


def test_tied_shared_strided_mixed_and_empty_tensors_survive_moves(backend):
    """Values, strides, dtypes, flags and object identity stay the same. Each storage is counted once."""
    module = Odd().eval()
    tensors = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers()),
    }
    before = {
        name: (t, t.detach().clone(), t.stride(), t.dtype, t.requires_grad, t.is_conj())
        for name, t in tensors.items()
    }
    model = there_and_back(backend, module)
    for name, (tensor, value, *kind) in before.items():
        is_parameter = isinstance(tensor, nn.Parameter)
        now = module.get_parameter(name) if is_parameter else module.get_buffer(name)
        assert now is tensor, name
        assert torch.equal(tensor, value), name
        assert [tensor.stride(), tensor.dtype, tensor.requires_grad, tensor.is_conj()] == kind, name
    assert module.image.is_contiguous(memory_format=torch.channels_last)
    for tensor in (module.image, module.one.weight, module.one.bias):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, (
            "saved alone, it has its own bytes"
        )
        assert tensor.data_ptr() % 64 == 0
    expected = 400 + 24 + 2 + 2 * 3 * 16 * 4 + 70 + 8 * 8 * 8 + 2 * 8 * 8 + 4
    assert backend.measure(model) == (Share("sim:0", expected),)
    module.rows.add_(1)
    # two views of one storage were separated
    assert torch.equal(module.turned.t()[2:4], module.rows)


def test_modules_created_or_moved_under_inference_mode_still_work(backend):
    x = torch.ones(1, 8)
    for made in (False, True):
        with torch.inference_mode(made):
            module = nn.Linear(8, 8).eval()
        before = module(x)
        model = backend.adopt(SPEC, module)
        with torch.inference_mode(not made):
            backend.move(model, CARD)
        assert torch.equal(module(x), before)
        with torch.no_grad():
            assert torch.equal(module(x), before)
        backend.drop(model)


def train(module, optimizer, steps, seed):
    torch.manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(4, 16)
        optimizer.zero_grad()
        (module(x) - 1).square().mean().backward()
        optimizer.step()


def same_weights(one, other):
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize("how", ["plain", "fused", "amsgrad"])
def test_training_continues_after_moves(backend, probe, how):
    """Frozen and trained weights, BatchNorm, gradients and AdamW's state, equal to the bit to an unmoved copy's."""
    options = {"plain": {}, "fused": {"fused": True}, "amsgrad": {"amsgrad": True}}[how]
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
    module[0].weight.requires_grad_(False)
    twin = copy.deepcopy(module)
    optimizer, other = (
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.01, **options)
        for m in (module, twin)
    )
    train(module, optimizer, 3, seed=2)
    train(twin, other, 3, seed=2)
    model = backend.adopt(SPEC, module, optimizer)
    size = backend.measure(model)[0].bytes
    states = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if t.dim())
    grads = sum(p.grad.nbytes for p in module.parameters() if p.grad is not None)
    assert size == sum(t.nbytes for t in (*module.parameters(), *module.buffers())) + states + grads
    for shares in (CARD, HOST, OTHER):
        backend.move(model, shares)
        assert backend.measure(model) == (Share(shares[0].device, size),)
        assert probe.used() == {"sim:0": 0, "sim:1": 0, "host": 0} | {shares[0].device: size}
        if shares is HOST:
            with pytest.raises(RuntimeError, match=WRITE_REFUSED), torch.no_grad():
                module[2].weight.add_(1)
        else:
            train(module, optimizer, 2, seed=3)
            train(twin, other, 2, seed=3)
        assert same_weights(module, twin)
    for mine, theirs in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


def test_gradients_and_states_created_later_are_counted(backend, probe):
    """The gradients and states are on the card already. So `measure` counts them even beyond the card's capacity."""
    module = nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(module.parameters())
    model = backend.adopt(SPEC, module, optimizer)
    backend.move(model, CARD)
    weights = backend.measure(model)[0].bytes
    train(module, optimizer, 1, seed=0)
    assert backend.measure(model) == (Share("sim:0", 4 * weights),)
    assert probe.used()["sim:0"] == 4 * weights
    optimizer.zero_grad()
    del optimizer.state[module.weight], optimizer.state[module.bias]
    assert backend.measure(model) == (Share("sim:0", weights),)
    assert probe.used()["sim:0"] == weights


def test_backward_after_a_move_gives_the_right_gradients(backend):
    """The tensors that autograd saved keep the old bytes. The gradients go to the parameters on the new device."""
    torch.manual_seed(0)
    module = nn.Linear(8, 8).eval()
    twin, x = copy.deepcopy(module), torch.randn(2, 8)
    model = backend.adopt(SPEC, module)
    loss = module(x).square().sum()
    backend.move(model, CARD)
    loss.backward()
    twin(x).square().sum().backward()
    assert torch.equal(module.weight.grad, twin.weight.grad)


def test_a_kept_view_moves_with_the_module(backend, probe):
    """A detached weight shares the storage of the module before and after a move. It keeps no old bytes alive."""
    module = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100)).eval()
    model = backend.load(SPEC, CARD, lambda: module)
    kept = module[1].bias.detach()
    value = kept.clone()
    backend.move(model, HOST)
    assert probe.used()["sim:0"] == 0
    other = backend.load(ModelSpec("other", "torch"), CARD, lambda: nn.Linear(300, 300))
    assert torch.equal(kept, value), "another model was given a kept tensor's memory"
    backend.drop(other)
    backend.move(model, CARD)
    module[1].bias.data.add_(1)
    assert torch.equal(kept, value + 1)


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_": lambda w: w.add_(1),
    "data": lambda w: w.data.zero_(),
    "view": lambda w: w[1:].mul_(2),
    "out=": lambda w: torch.add(w, 1, out=w),
    "copy_": lambda w: w.copy_(torch.ones(4, 4)),
    "foreach": lambda w: torch._foreach_add_([w], 1),
    "numpy": lambda w: w.numpy(),
    "dlpack": lambda w: torch.utils.dlpack.to_dlpack(w),
    "data_ptr": lambda w: w.data_ptr(),
    "set item": lambda w: w.__setitem__(0, 1.0),
    "storage": lambda w: w.untyped_storage().fill_(0),
}


@pytest.mark.parametrize("write", WRITES)
def test_weights_in_host_memory_are_read_and_refuse_writes(backend, write):
    """It would be lost, or change what the card gets back. It raises as on a real card, until the return."""
    module = nn.Linear(4, 4).eval()
    model = backend.load(SPEC, CARD, lambda: module)
    before, other = module.weight.detach().clone(), module.weight.detach()
    backend.move(model, HOST)
    for weight in (module.weight.detach(), other):
        with pytest.raises(RuntimeError, match=WRITE_REFUSED):
            WRITES[write](weight)
        assert torch.equal(weight, before)
    backend.move(model, CARD)
    WRITES[write](other)


def test_a_dropped_module_keeps_its_weights_for_whoever_holds_it(backend, probe):
    """The weights exist nowhere else. `register("m", lambda: mine)` and `forget` must not empty the user's module."""
    mine = nn.Linear(50, 50)
    mine.weight.grad = torch.ones(50, 50)
    before = mine(torch.ones(1, 50))
    model = backend.load(SPEC, CARD, [mine].pop)
    backend.drop(model)
    assert torch.equal(mine(torch.ones(1, 50)), before) and mine.weight.grad.all()
    assert backend.measure(model) == ()
    del model, mine, before
    gc.collect()
    assert probe.used() == {"sim:0": 0, "sim:1": 0, "host": 0}
    module = nn.Linear(4, 4).eval()
    model = backend.load(SPEC, CARD, lambda: module)
    backend.move(model, HOST)
    backend.drop(model)
    module.weight.data.zero_()
    assert not module.weight.any()


def test_an_adopted_module_counts_where_it_is(backend, probe):
    module = nn.Linear(64, 64).eval()
    model = backend.adopt(SPEC, module)
    assert backend.measure(model) == (Share("host", 64 * 65 * 4),)
    assert probe.used()["host"] == 64 * 65 * 4
    backend.move(model, CARD)
    assert probe.used() == {"sim:0": 64 * 65 * 4, "sim:1": 0, "host": 0}
    assert backend.value(model) is module
    assert not backend.droppable(model) and not backend.unchanged(model)
    del model
    assert module(torch.ones(1, 64)).shape == (1, 64)
    assert probe.used()["sim:0"] == 64 * 65 * 4, "the module still exists, and so do its bytes"
    del module
    gc.collect()
    assert probe.used()["sim:0"] == 0


def test_a_module_in_training_needs_its_optimizer(backend):
    with pytest.raises(
        CannotGovern,
        match=r"rt.adopt\('net', module, optimizer=opt\) .* if it is not trained:  module.eval",
    ):
        backend.adopt(SPEC, nn.Linear(2, 2))
    backend.adopt(SPEC, nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters()))
    backend.adopt(SPEC, nn.Linear(2, 2).eval())
    backend.adopt(SPEC, nn.Linear(2, 2).requires_grad_(False))


# -- refused by name -------------------------------------------------------------------------------
def hooked():
    from accelerate import cpu_offload

    return cpu_offload(nn.Linear(2, 2), execution_device=torch.device("cpu"))


def hooked_in_place():
    from accelerate.hooks import ModelHook, add_hook_to_module

    return add_hook_to_module(nn.Linear(2, 2), ModelHook())


def compiled_in_place():
    module = nn.Linear(2, 2)
    module.compile()
    return module


def quantised_by_bitsandbytes():
    kind = type("Linear8bitLt", (nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})
    return nn.Sequential(kind(2, 2))


def parameter_of_bitsandbytes():
    kind = type("Params4bit", (nn.Parameter,), {"__module__": "bitsandbytes.nn.modules"})
    module = nn.Linear(2, 2)
    module.weight = torch.Tensor._make_subclass(kind, torch.ones(2, 2))
    return module


def tensor_subclass():
    kind = type("AffineQuantizedTensor", (torch.Tensor,), {"__module__": "torchao.dtypes"})
    module = nn.Linear(2, 2)
    module.register_buffer("scale", torch.ones(2).as_subclass(kind))
    return module


def named(name, base=nn.Module):
    """A module of a class that is called `name`. The backend recognises the wrappers of torch.distributed by name."""
    wrapper = type(name, (base,), {})()
    wrapper.module = nn.Linear(2, 2)
    return wrapper


def graphed():
    module = nn.Linear(2, 2)

    def make_graphed_callables():
        def forward(x):
            return x

        return forward

    module.forward = make_graphed_callables()
    return module


def shared():
    return nn.Linear(2, 2).share_memory()


def overlapping():
    array = np.ones(8, dtype=np.float32)
    module = nn.Module()
    module.register_buffer("one", torch.from_numpy(array))
    module.register_buffer("other", torch.from_numpy(array[2:]))
    return module


def sparse():
    module = nn.Module()
    module.register_buffer("adjacency", torch.eye(3).to_sparse())
    return module


def compiled():
    return torch.compile(nn.Linear(2, 2))


FSDP_MODULE = type("FSDPModule", (nn.Module,), {})


@pytest.mark.parametrize(
    "build, why",
    [
        (hooked, "accelerate hooks move it already"),
        (hooked_in_place, "accelerate hooks move it already"),
        (lambda: nn.Linear(2, 2, device="meta"), "weight is on the meta device and has no data"),
        pytest.param(compiled, "compiled by torch.compile", marks=pytest.mark.thorough),
        pytest.param(compiled_in_place, "compiled by torch.compile", marks=pytest.mark.thorough),
        (graphed, "captured in a CUDA graph"),
        (quantised_by_bitsandbytes, r"quantised by bitsandbytes \(Linear8bitLt \(at 0\)\)"),
        (parameter_of_bitsandbytes, "weight is a Params4bit"),
        (tensor_subclass, "scale is a torchao AffineQuantizedTensor"),
        (lambda: named("DistributedDataParallel"), "wrapped in DistributedDataParallel"),
        (lambda: named("FullyShardedDataParallel"), "wrapped in FSDP"),
        (lambda: named("FSDPLinear", FSDP_MODULE), r"wrapped in FSDP \(fully_shard\)"),
        (lambda: nn.DataParallel(nn.Linear(2, 2)), "wrapped in DataParallel"),
        (lambda: torch.jit.script(nn.Linear(2, 2)), "TorchScript"),
        (shared, "shared with other processes"),
        (overlapping, "one and other overlap in memory"),
        (sparse, "adjacency is not a plain strided tensor"),
        (lambda: nn.LazyLinear(2), "has no shape yet; call the module once"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_module_that_cannot_be_moved_safely_is_refused_with_the_reason(
    backend, probe, build, why
):
    module = build().eval()
    for attempt in (
        lambda: backend.adopt(SPEC, module),
        lambda: backend.load(SPEC, CARD, lambda: module),
    ):
        with pytest.raises(CannotGovern, match=why) as error:
            attempt()
        assert error.value.name == "net" and error.value.why
    assert probe.used() == {"sim:0": 0, "sim:1": 0, "host": 0}


@pytest.mark.thorough
def test_a_module_compiled_after_its_adoption_cannot_be_moved(backend):
    module = nn.Linear(2, 2).eval()
    model = backend.adopt(SPEC, module)
    module.compile()
    with pytest.raises(CannotGovern, match="torch.compile"):
        backend.move(model, CARD)


@pytest.mark.thorough
def test_the_refused_names_are_the_wrappers_real_names():
    """The backend refuses wrappers by name. This test notices if torch renames one of them."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    from gpu_runtime.backends.pytorch.torch_backend import _WRAPPERS

    for wrapper in (FSDPModule, FullyShardedDataParallel, DistributedDataParallel):
        assert wrapper.__name__ in _WRAPPERS
    assert type(torch.compile(nn.Linear(1, 1))).__name__ in _WRAPPERS
    assert "make_graphed_callables" in torch.cuda.make_graphed_callables.__name__


# -- factories -------------------------------------------------------------------------------------
def test_a_factory_is_sized_without_data(backend):
    """From the shapes, with tied weights once: no memory is allocated and no random number drawn."""
    state = torch.random.get_rng_state()
    found = footprint(backend, SPEC, lambda: nn.Linear(1000, 1000))
    assert found.bytes == 1001 * 1000 * 4 and found.parts[0].source == "shapes"
    assert torch.equal(state, torch.random.get_rng_state())


def test_what_is_wrong_with_a_factory_reaches_the_caller(backend, probe):
    """If a factory cannot be sized, a size must be declared. The message quotes the error that the factory raised."""

    def factory():
        raise RuntimeError("needs a card")

    with pytest.raises(UnknownSize, match=r"\(RuntimeError: needs a card\)\.\n.*size='8 GiB'"):
        footprint(backend, SPEC, factory)
    with pytest.raises(LoadFailed, match="returned a dict, not an nn.Module"):
        backend.load(SPEC, CARD, dict)

    def factory():
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        backend.load(SPEC, CARD, factory)
    assert not any(probe.used().values())


def test_the_source_decides_the_backend_and_other_sources_are_refused(tmp_path):
    for source in (nn.Linear(1, 1), lambda: nn.Linear(1, 1), nn.Module):
        assert backend_for(source) == "torch"
    assert backend_for("org/absent") == "transformers"
    assert backend_for("org/absent", "fake") == "fake"
    assert backend_for(tmp_path) == backend_for(str(tmp_path)) == "transformers"
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert backend_for(tmp_path) == "llama_cpp", "a directory with only GGUF files"
    for source in (tmp_path / "model.txt", "nowhere", 7, None, ""):
        with pytest.raises(NotAModel, match="Supported: a Hugging Face directory"):
            backend_for(source)
    with pytest.raises(BadSetting, match="torch, transformers"):
        backend_for("org/name", "onnx")
    with pytest.raises(BadSetting):
        open_backend("onnx", None)


def test_a_factory_that_loads_weights_is_sized_without_a_warning_about_weights(backend, recwarn):
    def build():
        module = nn.Linear(4, 4)
        module.load_state_dict({"weight": torch.ones(4, 4), "bias": torch.ones(4)})
        return module

    assert backend.evidence(SPEC, build).weight_bytes == 80
    assert not recwarn.list
