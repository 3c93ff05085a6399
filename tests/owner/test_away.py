"""Every entry point of a Module whose model is away restores it or raises; none computes with zeros."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save as save_safetensors
from torch import nn

from gpu_runtime import GpuError, NotResident
from gpu_runtime.owner import registry, release
from tests import tiny_models

IDS = torch.arange(3, 20).unsqueeze(0)
X = torch.linspace(-1, 1, 32).view(1, 32)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_models.causal_lm(tmp_path_factory.mktemp("away") / "llm")


def saved(what: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(what, buffer)
    return buffer.getvalue()


def unpickled(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def weights(module: nn.Module) -> list[torch.Tensor]:
    """The values of all weights. They are read without any method of the module."""
    return [
        p.detach().clone()
        for part in module.modules()
        for p in part._parameters.values()
        if p is not None
    ]


def doubled(part: nn.Module) -> None:
    if isinstance(part, nn.Linear):
        part.weight.data.mul_(2)


def replaced(part: nn.Module) -> nn.Module:
    part.weight = nn.Parameter(part.weight * 2)
    return part


def without_weight(part: nn.Module) -> nn.Module:
    del part.weight
    return part


def nothing(_: Any) -> None:
    return None


# What is done with the module `m`, and then compared with a module that nobody governs.
ENTRIES: dict[str, Callable[[Any], Any]] = {
    "__call__": lambda m: m(IDS).logits,
    "forward": lambda m: m.forward(IDS).logits,
    "generate": lambda m: m.generate(IDS, max_new_tokens=3, do_sample=False),
    "call of a part": lambda m: m.model.embed_tokens(IDS),
    "forward of a part": lambda m: m.model.layers[0].mlp.forward(torch.ones(1, 1, m.config.hidden_size)),
    "attribute": lambda m: m.lm_head.weight * 1,
    "attribute of a part": lambda m: m.model.layers[0].mlp.down_proj.weight.sum(),
    "get_parameter": lambda m: m.get_parameter("lm_head.weight").norm(),
    "get_buffer": lambda m: m.get_buffer("model.rotary_emb.inv_freq").sum(),
    "get_submodule": lambda m: m.get_submodule("lm_head")(torch.ones(1, m.config.hidden_size)),
    "set_submodule": lambda m: m.set_submodule("extra", nn.Identity()),
    "get_extra_state": nothing,
    "set_extra_state": nothing,
    "parameters": lambda m: [p.sum() for p in m.parameters()],
    "named_parameters": lambda m: {n: p.sum() for n, p in m.named_parameters()},
    "buffers": lambda m: [b.sum() for b in m.buffers()],
    "named_buffers": lambda m: {n: b.sum() for n, b in m.named_buffers()},
    "children": lambda m: [next(c.parameters()).sum() for c in m.children()],
    "named_children": lambda m: [next(c.parameters()).sum() for _, c in m.named_children()],
    "modules": lambda m: [p.sum() for part in m.modules() for p in part.parameters(recurse=False)],
    "named_modules": lambda m: [p.sum() for _, part in m.named_modules() for p in part.parameters()],
    "state_dict": lambda m: {k: v.clone() for k, v in m.state_dict().items()},
    "load_state_dict": lambda m: m.load_state_dict(m.state_dict()) and weights(m),
    "torch.save": lambda m: unpickled(saved(m))(IDS).logits,
    "torch.save of its state": lambda m: unpickled(saved(m.state_dict())),
    "safetensors": lambda m: save_safetensors({k: v.contiguous() for k, v in m.state_dict().items()}),
    "pickle": lambda m: pickle.loads(pickle.dumps(m))(IDS).logits,
    "deepcopy": lambda m: copy.deepcopy(m)(IDS).logits,
    "deepcopy of a part": lambda m: copy.deepcopy(m.lm_head)(torch.ones(1, m.config.hidden_size)),
    "copy": lambda m: copy.copy(m)(IDS).logits,
    "half": lambda m: weights(m.half()),
    "float": lambda m: weights(m.float()),
    "double": lambda m: weights(m.double()),
    "bfloat16": lambda m: weights(m.bfloat16()),
    "type": lambda m: weights(m.type(torch.float64)),
    "to": lambda m: weights(m.to(torch.bfloat16)),
    "cpu": lambda m: weights(m.cpu()),
    "to_empty": lambda m: [t.shape for t in weights(m.to_empty(device="cpu"))],
    "cuda": nothing, "xpu": nothing, "ipu": nothing, "mtia": nothing,
    "share_memory": lambda m: weights(m.share_memory()),
    "requires_grad_": lambda m: [p.requires_grad for p in m.requires_grad_(False).parameters()],
    "zero_grad": lambda m: m.zero_grad() or weights(m.half()),
    "apply": lambda m: weights(m.apply(doubled)),
    "train": lambda m: m.train()(IDS).logits,
    "eval": lambda m: m.eval()(IDS).logits,
    "add_module": lambda m: m.add_module("extra", nn.Identity()),
    "register_module": lambda m: m.register_module("extra", nn.Identity()),
    "register_buffer": lambda m: m.register_buffer("extra", torch.ones(1)),
    "register_parameter": lambda m: m.register_parameter("extra", nn.Parameter(torch.ones(1))),
    "compile": nothing, "extra_repr": lambda m: m.extra_repr(), "dump_patches": nothing, "call_super_init": nothing,
    "training": lambda m: m.training,
    "repr": repr,
    "iteration": lambda m: [p.sum() for layer in m.model.layers for p in layer.parameters()],
    "a parameter that is replaced": lambda m: (replaced(m.lm_head), m(IDS).logits)[1],
    "a parameter that is deleted": lambda m: [p.sum() for p in (without_weight(m.lm_head), m)[1].parameters()],
    "a part that is replaced": lambda m: (setattr(m, "lm_head", nn.Identity()), m(IDS).logits)[1],
    "functional_call": lambda m: torch.func.functional_call(m, dict(m.named_parameters()), (IDS,)).logits,
    "functional_call with other weights": lambda m: torch.func.functional_call(
        m, {"lm_head.weight": torch.ones(m.config.vocab_size, m.config.hidden_size)}, (IDS,)
    ).logits,
    "parameters_to_vector": lambda m: nn.utils.parameters_to_vector(m.parameters()),
    "clip_grad_norm_": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    "pruning": lambda m: weights((nn.utils.parametrizations.weight_norm(m.lm_head), m)[1].half()),
    "T_destination": nothing,
    "save_pretrained": None,
}  # fmt: skip
HOOKS = [name for name in dir(nn.Module) if name.startswith("register_") and name.endswith("hook")]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        # Not bit for bit: kernels for one row depend on how the weights are aligned in memory.
        return one.dtype == other.dtype and torch.allclose(one, other, rtol=1e-4, atol=1e-6)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.fixture
def governed(runtime, directory):
    """`governed(away)` returns the kept reference to a model that was offloaded or dropped after its use."""

    def make(away: str, **options: Any) -> nn.Module:
        rt = runtime()
        rt.register("llm", directory, **options)
        with rt.use("llm") as module:
            pass
        dropped = away == "dropped"
        resident = registry.find(rt._session, "llm")
        step = release.evict(rt._session, resident, "by the test", drop=dropped)
        assert type(step).__name__ == ("Drop" if dropped else "Move")
        return module

    return make


def plain(directory) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)


def test_every_public_name_of_a_module_is_in_the_table():
    """If a new torch adds an entry point, a developer decides what it does with a model that is away."""
    of_torch = {
        name
        for name in dir(nn.Module)  # other libraries add names of their own, such as `smart_apply`
        if str(getattr(getattr(nn.Module, name), "__module__", "torch")).startswith("torch.nn")
    }
    public = {name for name in of_torch if not name.startswith("_")}
    assert public - {*ENTRIES, *HOOKS} == set()


@pytest.mark.thorough
@pytest.mark.parametrize("away", ["offloaded", "dropped"])
@pytest.mark.parametrize("entry", [name for name in ENTRIES if name != "save_pretrained"])
def test_an_entry_point_of_a_model_that_is_away_gives_what_a_plain_module_gives(
    governed, directory, away, entry
):
    module = governed(away)
    with torch.no_grad():
        expected = ENTRIES[entry](plain(directory))
        assert same(ENTRIES[entry](module), expected)


@pytest.mark.thorough
@pytest.mark.parametrize("away", ["offloaded", "dropped"])
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_that_are_registered_while_it_is_away_run(governed, away, hook):
    module = governed(away)
    assert getattr(module, hook)(lambda *_: None) is not None
    with torch.no_grad():
        assert module(IDS).logits.any()


@pytest.mark.thorough
@pytest.mark.parametrize("away", ["offloaded", "dropped"])
def test_a_model_that_is_away_is_saved_whole_also_over_its_own_source(
    governed, directory, tmp_path, away
):
    """An earlier version wrote 1 KiB over the source file, which had 13.6 MB of weights."""
    module = governed(away)
    expected = plain(directory).state_dict()
    module.save_pretrained(tmp_path / "copy")
    assert same(plain(tmp_path / "copy").state_dict(), expected)


REFUSED = "__call__ state_dict deepcopy pickle half parameters attribute".split()


@pytest.mark.parametrize(
    ("away", "entry"), [("offloaded", "__call__"), *(("dropped", entry) for entry in REFUSED)]
)
def test_a_model_told_not_to_come_back_raises_and_writes_nothing(governed, away, entry):
    module = governed(away, restore_on_call=False)
    with pytest.raises(NotResident, match="rt.use"):
        ENTRIES[entry](module)


@pytest.mark.parametrize("way", [saved, pickle.dumps, lambda t: t.numpy(), lambda t: t.add_(1)])
def test_a_tensor_kept_from_before_a_drop_is_never_written_empty(governed, directory, way):
    """A tensor of a dropped model raises at each access; on real cards with our error (backends/test_swap.py)."""
    module = governed("dropped")
    kept = vars(module.lm_head)["_parameters"]["weight"]
    with pytest.raises((RuntimeError, GpuError)):
        way(kept)
    with torch.no_grad():
        module(IDS)
    assert torch.equal(kept, plain(directory).lm_head.weight), "it has its bytes again"


def test_what_was_set_on_a_model_survives_a_drop_although_nobody_keeps_it(runtime, directory):
    """The runtime keeps the module object itself, with its hooks, train mode, generation settings and attributes."""
    rt = runtime()
    rt.register("llm", directory)
    calls = []
    with rt.use("llm") as module:
        module.train()
        module.generation_config.temperature, module.bias_table = 0.25, torch.ones(3)
        module.register_forward_hook(lambda *_: calls.append(1))
        module.tokenizer.add_tokens(["<new>"])
    del module
    release.evict(rt._session, registry.find(rt._session, "llm"), "by the test", drop=True)
    with rt.use("llm") as module, torch.no_grad():
        module(IDS)
        assert module.training and module.generation_config.temperature == 0.25
        assert module.bias_table.sum() == 3 and "<new>" in module.tokenizer.get_vocab()
    assert calls == [1]


def test_a_refused_write_names_what_is_away_and_what_to_type(started, directory):
    """torch's own error names no model. The sentence is shown under the cell that failed."""
    rt, kernel = started(devices="sim:64MiB,host:64MiB")
    rt.register("llm", directory)
    with rt.use("llm") as model:
        weight = model.lm_head.weight
    rt.evict("llm")
    with pytest.raises(RuntimeError) as raised:
        weight.data.add_(1)
    news = kernel.cell_failed(raised.value)
    assert "weights of llm are in RAM" in news and "rt.use('llm')" in news
    assert kernel.cell_failed(RuntimeError("another error")) == ""
    with rt.use("llm"):
        weight.data.add_(1)
    assert kernel.cell_failed(raised.value) == "", "nothing is away"
    if not hasattr(torch._C, "_cuda_getDeviceCount"):  # a CPU build
        with pytest.raises(AssertionError) as raised:
            torch.zeros(3, device="cuda")
        assert 'Write device="cpu"' in kernel.cell_failed(raised.value)
    held = torch.ones(1 << 20)
    kernel.begin("cell")
    kernel.end("cell")
    assert rt.park().done
    with pytest.raises(RuntimeError) as raised:
        held.add_(1)
    assert "%gpu unpark" in kernel.cell_failed(raised.value)
    assert held.sum() == 1 << 20
