"""Models over several cards: our simulated cards on the CPU, and torch's simulated accelerator (tests/simgpu.py)."""

import copy
import gc
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from gpu_runtime.backends.base import is_out_of_memory
from gpu_runtime.backends.pytorch import shadows
from gpu_runtime.backends.pytorch.storages import grouped, slots
from gpu_runtime.backends.pytorch.torch_model import cut, pieces
from gpu_runtime.backends.registry import open_backend
from gpu_runtime.devices.probe import Probe, open_probe
from gpu_runtime.errors import CannotGovern
from gpu_runtime.facts import HOST, ModelSpec, Share, Shares
from tests import simgpu, tiny_models

pytestmark = pytest.mark.thorough

IDS = torch.tensor([[5, 6, 7, 8]])


class Box(NamedTuple):
    """Four cards of one kind, and the bytes that were in use on them before the test."""

    probe: Probe
    kind: str
    before: dict[str, int]

    def card(self, index: int) -> str:
        return f"{self.kind}:{index}"

    def shares(self, *cards: int, sizes: tuple[int, ...] = ()) -> Shares:
        return tuple(
            Share(self.card(card), size)
            for card, size in zip(cards, sizes or (1,) * len(cards), strict=True)
        )

    @property
    def used(self) -> dict[str, int]:
        gc.collect()
        now = {device: size - self.before[device] for device, size in self.probe.used().items()}
        return {device: size for device, size in now.items() if size}


def boxed(kind: str) -> Box:
    gc.collect()  # free what an earlier test left now, not in the middle of this one
    if kind == "sim":
        probe = open_probe("sim:4x64MiB,host:256MiB")
    else:
        probe = simgpu.SimProbe()
        for card in range(simgpu.CARDS):
            # fingerprints need their keys on each card; they stay there
            shadows._keys(torch.device("simgpu", card))
    return Box(probe, kind, probe.used())


@pytest.fixture(params=["sim", "simgpu"])
def box(request) -> Box:
    return boxed(request.param)


@pytest.fixture
def accelerator() -> Box:
    return boxed("simgpu")


def spec(directory: Any, **options: Any) -> ModelSpec:
    return ModelSpec("m", "transformers", source=str(directory), options=options)


def run(module: nn.Module, x: torch.Tensor) -> Any:
    """The answer of the module. On several cards the input may be anywhere, on one card it must be there."""
    devices = {parameter.device for parameter in module.parameters()}
    with torch.no_grad():
        return module(x if len(devices) > 1 else x.to(devices.pop()))


def logits(module: nn.Module) -> torch.Tensor:
    return run(module, IDS).logits.cpu()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.linear(x))


def stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(4))).eval()


LAYER = (32 * 32 + 3 * 32) * 4  # bytes of one layer of the stack
X = torch.linspace(-1, 1, 64).view(2, 32)


def tensor_devices(module: nn.Module) -> dict[str, str]:
    return {slot.name: str(slot.tensor.device) for slot in slots(module)}


# -- loads and moves -------------------------------------------------------------------------------
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_transformers_model_moves_between_cards_and_host(box, tmp_path, tied):
    """Answers on cards are equal to the bit, on the host close. The account has the measured shares."""
    backend = open_backend("transformers", box.probe)
    directory = tiny_models.causal_lm(tmp_path / "m", tied=tied)
    model = backend.load(spec(directory), box.shares(0))
    module, objects = backend.value(model), [id(p) for p in backend.value(model).parameters()]
    expected, size = logits(module), backend.measure(model)[0].bytes
    for cards in ((0, 1), (2, 3, 1), (3,), (1, 2)):
        for shares in (box.shares(*cards), (Share(HOST, size),)):
            backend.move(model, shares)
            measured = backend.measure(model)
            assert [share.device for share in measured] == [share.device for share in shares]
            assert sum(share.bytes for share in measured) == size
            assert box.used == {share.device: share.bytes for share in measured}
            if HOST in box.used and box.kind == "simgpu":  # other kernels than the accelerator's
                torch.testing.assert_close(logits(module), expected)
            else:
                assert torch.equal(logits(module), expected)
            assert backend.elsewhere(model) == ()
    assert backend.unchanged(model)
    assert [id(p) for p in module.parameters()] == objects
    assert not any(
        hasattr(part, "_hf_hook") or "forward" in vars(part) for part in module.modules()
    )
    assert not hasattr(module, "hf_device_map")
    backend.drop(model)
    assert box.used == {}


def test_the_modules_of_sentence_transformers_run_over_two_cards(box, tmp_path):
    """Their weights are the last piece, and each answer is equal to the bit."""
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    own = tiny_models.sentence_embedder(
        tmp_path / "m", modules.Pooling(64, "mean"), modules.Dense(64, 512)
    )
    backend = open_backend("transformers", box.probe)
    model = backend.load(spec(tmp_path / "m", task="feature-extraction"), box.shares(0))
    module = backend.value(model)
    mask = torch.ones_like(IDS)

    def embedded() -> torch.Tensor:
        device = tensor_devices(module.embed_tokens).popitem()[1]
        with torch.no_grad():
            states = module(input_ids=IDS.to(device)).last_hidden_state
            return module.sentence_recipe(states, mask.to(device), False).cpu()

    with torch.no_grad():
        theirs = own({"input_ids": IDS, "attention_mask": mask})["sentence_embedding"]
    expected = embedded()
    torch.testing.assert_close(expected, theirs)
    for cards in ((1, 2), (3,), (2, 0)):
        backend.move(model, box.shares(*cards))
        assert tensor_devices(module)["sentence_recipe.steps.1.linear.weight"] == str(
            box.probe.place(box.card(cards[-1])).torch
        )
        assert torch.equal(embedded(), expected)
    backend.drop(model)
    assert box.used == {}


def test_a_model_generates_over_two_cards(box, llama):
    """While the model generates, both cards hold a part of the key/value cache."""
    backend = open_backend("transformers", box.probe)
    one = backend.load(spec(llama), box.shares(3))
    six = dict(max_new_tokens=6, do_sample=False)
    expected = backend.value(one).generate(IDS.to(backend.value(one).device), **six).cpu()
    backend.drop(one)
    model = backend.load(spec(llama), box.shares(1, 2))
    answer = backend.value(model).generate(IDS, max_new_tokens=6, do_sample=False)
    assert torch.equal(answer.cpu(), expected)
    backend.drop(model)
    assert box.used == {}


def test_weights_are_where_the_shares_put_them_and_a_tied_head_with_the_embeddings(
    accelerator, llama, tmp_path
):
    """The layers to the byte, the embeddings on the first card, and the head on the last."""
    backend = open_backend("transformers", accelerator.probe)
    sizes = backend.pieces(spec(llama))
    front, behind = sum(sizes[:2]), sum(sizes[2:])
    model = backend.load(spec(llama), accelerator.shares(2, 0, sizes=(front, behind)))
    measured = backend.measure(model)
    assert measured[1] == Share("simgpu:0", behind), "the header gives the bytes of the last pieces"
    # … and of the first, without rotary angles
    assert measured[0].device == "simgpu:2" and 0 <= measured[0].bytes - front < 1024
    where = tensor_devices(backend.value(model))
    assert where["model.embed_tokens.weight"] == "simgpu:2"
    assert where["model.layers.0.mlp.up_proj.weight"] == "simgpu:2"
    assert where["model.layers.1.mlp.up_proj.weight"] == where["lm_head.weight"] == "simgpu:0"
    assert backend.value(model).hf_device_map["model.layers.1"] == "simgpu:0"
    backend.drop(model)
    backend = open_backend("transformers", accelerator.probe)
    model = backend.load(
        spec(tiny_models.causal_lm(tmp_path / "m", tied=True)), accelerator.shares(0, 1)
    )
    module = backend.value(model)
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert str(module.lm_head.weight.device) == "simgpu:0"
    assert tensor_devices(module)["model.norm.weight"] == "simgpu:1"
    assert module.hf_device_map["lm_head"] == "simgpu:0"
    logits(module)
    backend.drop(model)


def test_a_module_from_live_python_is_cut_between_its_layers(box):
    backend = open_backend("torch", box.probe)
    net = ModelSpec("net", "torch")
    assert backend.pieces(net, stack) == (LAYER,) * 4
    with torch.no_grad():
        one = backend.load(net, box.shares(0), stack)
        expected = run(backend.value(one), X).cpu()
        backend.drop(one)
        model = backend.load(net, box.shares(1, 2, sizes=(3 * LAYER, LAYER)), stack)
        assert backend.measure(model) == box.shares(1, 2, sizes=(3 * LAYER, LAYER))
        answer = backend.value(model)(X)
    assert answer.device == X.device, "the answer is on the device of the input"
    assert torch.equal(answer, expected)
    backend.drop(model)
    assert box.used == {}


def test_pieces_that_are_there_already_are_not_copied(accelerator):
    """From cards 0 and 1 to cards 0 and 2: card 0 keeps its half and needs no memory for a second copy."""
    backend = open_backend("torch", accelerator.probe)
    model = backend.load(ModelSpec("net", "torch"), accelerator.shares(0, 1), stack)
    held = simgpu.used_bytes(0)
    with simgpu.limited(card0=held):
        backend.move(model, accelerator.shares(0, 2))
        assert simgpu.peak_bytes(0) == held
    assert accelerator.used == {"simgpu:0": 2 * LAYER, "simgpu:2": 2 * LAYER}
    backend.drop(model)


def test_a_tensor_on_another_device_is_named(accelerator):
    """A tensor of the model that is on another device than the model's shares is reported, whatever has moved it."""
    backend = open_backend("torch", accelerator.probe)
    model = backend.load(ModelSpec("net", "torch"), accelerator.shares(0, 1), stack)
    module = backend.value(model)
    module[3].linear.weight = nn.Parameter(torch.ones(32, 32))
    module[0].norm.to("simgpu:2")
    assert set(backend.elsewhere(model)) == {
        "3.linear.weight on cpu",
        "0.norm.weight on simgpu:2",
        "0.norm.bias on simgpu:2",
    }
    backend.drop(model)


# -- failures --------------------------------------------------------------------------------------
def test_out_of_memory_half_way_changes_nothing(accelerator, llama):
    backend = open_backend("transformers", accelerator.probe)
    with simgpu.limited(card1=1024), pytest.raises(Exception) as error:
        backend.load(spec(llama), accelerator.shares(0, 1))
    assert is_out_of_memory(error.value) and "simgpu:1" in str(error.value)
    assert accelerator.used == {}, "while the traceback is still referenced"
    model = backend.load(spec(llama), accelerator.shares(0, 1))
    module, held = backend.value(model), accelerator.used
    where = tensor_devices(module)
    expected = logits(module)
    with simgpu.limited(card3=1024), pytest.raises(Exception) as error:
        backend.move(model, accelerator.shares(2, 3))
    assert is_out_of_memory(error.value) and "simgpu:3" in str(error.value)
    assert accelerator.used == held and tensor_devices(module) == where
    assert torch.equal(logits(module), expected)
    backend.move(model, accelerator.shares(2, 3))
    backend.drop(model)
    again = backend.load(spec(llama), accelerator.shares(3, 2), into=module)
    assert backend.value(again) is module and torch.equal(logits(module), expected)
    backend.drop(again)
    assert accelerator.used == {}


@pytest.mark.parametrize(
    "failure",
    [RuntimeError("a hook would not go on"), KeyboardInterrupt()],
    ids=lambda failure: type(failure).__name__,
)
def test_a_failure_after_the_copies_restores_the_old_bytes(
    accelerator, llama, monkeypatch, failure
):
    import accelerate

    backend = open_backend("transformers", accelerator.probe)
    model = backend.load(spec(llama), accelerator.shares(0, 1))
    module, held = backend.value(model), accelerator.used
    where = tensor_devices(module)
    expected, real = logits(module), accelerate.dispatch_model

    def fails_once(*args: Any, **kwargs: Any) -> None:
        monkeypatch.setattr(accelerate, "dispatch_model", real)
        real(*args, **kwargs)  # some of the hooks may be installed
        raise failure

    monkeypatch.setattr(accelerate, "dispatch_model", fails_once)
    with pytest.raises(type(failure)):
        backend.move(model, accelerator.shares(2, 3))
    assert accelerator.used == held and tensor_devices(module) == where
    assert backend.measure(model) == tuple(Share(device, size) for device, size in held.items())
    assert torch.equal(logits(module), expected)
    backend.drop(model)
    assert accelerator.used == {}


# -- hooks -----------------------------------------------------------------------------------------
def test_foreign_hooks_are_refused_by_name_and_left_alone(accelerator, llama):
    """Hooks of other libraries would be lost, or would move bytes that a lease counts."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    backend = open_backend("transformers", accelerator.probe)
    model = backend.load(spec(llama), accelerator.shares(0, 1))
    module, held = backend.value(model), accelerator.used
    add_hook_to_module(module.model.norm, ModelHook(), append=True)
    with pytest.raises(CannotGovern, match=r"accelerate hooks move it already \(at model.norm\)"):
        backend.move(model, accelerator.shares(2, 3))
    assert accelerator.used == held and hasattr(module.model.norm, "_hf_hook")
    backend.drop(model)


def test_a_deep_copy_over_two_cards_is_independent(accelerator):
    backend = open_backend("torch", accelerator.probe)
    model = backend.load(ModelSpec("net", "torch"), accelerator.shares(0, 1), stack)
    module = backend.value(model)
    with torch.no_grad():
        expected = module(X)
        twin = copy.deepcopy(module)
        backend.drop(model)
        assert torch.equal(twin(X), expected)
    assert {str(p.device) for p in twin.parameters()} == {"simgpu:0", "simgpu:1"}
    del twin, module
    assert accelerator.used == {}


def test_the_users_own_hooks_and_forward_survive(accelerator):
    backend = open_backend("torch", accelerator.probe)
    module, seen = stack(), []
    module.register_forward_hook(lambda module, args, output: seen.append(str(args[0].device)))
    inner = module.forward
    module.forward = lambda x: inner(x) * 2
    with torch.no_grad():
        expected = module(X)
        model = backend.adopt(ModelSpec("net", "torch"), module)
        own = vars(module)["forward"]
        backend.move(model, accelerator.shares(0, 1))
        torch.testing.assert_close(module(X), expected)
        backend.move(model, (Share(HOST, 1),))
        assert torch.equal(module(X), expected)
    assert vars(module)["forward"] is own and seen == ["cpu", "simgpu:0", "cpu"]
    backend.drop(model)


# -- where a module may be cut ---------------------------------------------------------------------
def names(module: nn.Module) -> list[tuple[str, ...]]:
    return [piece.modules for piece in pieces(module, grouped(slots(module)))]


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = (
            nn.Embedding(8, 8),
            nn.ModuleList(nn.Linear(8, 8) for _ in range(3)),
        )
        self.act, self.head = nn.ReLU(), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = self.act(layer(x))
        return self.head(x)


def test_a_module_is_cut_between_its_children_and_the_items_of_its_lists():
    """Modules that share a storage stay together at the first place, and so does one with two names."""
    module = Trunk()
    layers = [("layers.0",), ("layers.1",), ("layers.2",)]
    assert names(module) == [("embed",), *layers, ("head",)]
    module.head.weight = module.embed.weight
    assert names(module) == [("embed", "head"), *layers]
    module.layers[2].weight = module.layers[1].weight
    assert names(module) == [("embed", "head"), ("layers.0",), ("layers.1", "layers.2")]
    shared = nn.Linear(4, 4)
    assert names(nn.Sequential(shared, nn.Linear(4, 4), shared)) == [("0", "2"), ("1",)]


def test_a_module_with_weights_at_its_root_stays_whole(accelerator):
    """No hook would move the weights at the root from card to card."""
    module = Trunk()
    module.scale = nn.Parameter(torch.ones(8))
    assert names(module) == [("",)]
    backend = open_backend("torch", accelerator.probe)
    model = backend.adopt(ModelSpec("net", "torch"), module.eval())
    with pytest.raises(CannotGovern, match="cannot be split over 2 devices: it must stay whole"):
        backend.move(model, accelerator.shares(0, 1))
    with pytest.raises(CannotGovern, match="partly in RAM"):
        backend.move(
            backend.adopt(ModelSpec("net", "torch"), Trunk().eval()),
            (Share("simgpu:0", 1), Share(HOST, 1)),
        )


def test_gradients_and_optimizer_state_are_with_their_parameters(box):
    """Training works only on the product's simulated cards. All of it is counted and moved."""
    if box.kind == "simgpu":
        pytest.skip("the simulated accelerator runs backward passes on its first card only")
    backend, module = open_backend("torch", box.probe), stack().train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    model = backend.adopt(ModelSpec("net", "torch"), module, optimizer)
    backend.move(model, box.shares(0, 1, sizes=(1, 3)))
    module(X).square().sum().backward()
    optimizer.step()
    assert backend.measure(model) == box.shares(0, 1, sizes=(3 * LAYER, 9 * LAYER))
    assert box.used == {"sim:0": 3 * LAYER, "sim:1": 9 * LAYER}
    backend.move(model, box.shares(2, 3))
    assert backend.measure(model) == box.shares(2, 3, sizes=(6 * LAYER, 6 * LAYER))
    assert box.used == {"sim:2": 6 * LAYER, "sim:3": 6 * LAYER}
    module(X).square().sum().backward()
    optimizer.step()
    backend.drop(model)


@pytest.mark.parametrize(
    "sizes, shares, expected",
    [
        ([4, 2, 2, 2, 2], [6, 6], [0, 0, 1, 1, 1]),
        ([4, 2, 2, 2, 2], [600, 600], [0, 0, 1, 1, 1]),
        ([1, 1, 1, 1], [1, 0, 0, 3], [0, 1, 2, 3]),
        ([0, 0], [5, 5], [0, 1]),
        ([3], [7], [0]),
    ],
)
def test_pieces_are_divided_like_the_shares(sizes, shares, expected):
    assert cut(sizes, shares) == expected


SHAPE = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2)
SHAPE |= dict(vocab_size=64)
GPT2 = dict(n_embd=32, n_layer=3, n_head=2, vocab_size=64, n_positions=32)
T5 = dict(d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, vocab_size=64)
ARCHITECTURES = {
    "bert": ("BertConfig", "BertModel", SHAPE | {"max_position_embeddings": 8}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
    "llama": ("LlamaConfig", "LlamaForCausalLM", SHAPE),
    "t5": ("T5Config", "T5ForConditionalGeneration", T5),
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_pieces_before_the_load_are_those_of_the_loaded_model(box, tmp_path, architecture):
    """They are known from the header's names, or from the module without data, and divide the loaded module."""
    import transformers

    config, kind, sizes = ARCHITECTURES[architecture]
    torch.manual_seed(0)
    getattr(transformers, kind)(getattr(transformers, config)(**sizes)).save_pretrained(tmp_path)
    backend = open_backend("transformers", box.probe)
    expected_sizes = backend.pieces(spec(tmp_path))
    model = backend.load(spec(tmp_path), box.shares(0))
    found = backend.pieces(spec(tmp_path), model=model)
    ends = {sum(found[:at]) for at in range(len(found) + 1)}
    slack = 0.01 * sum(found)  # rotary angles and positions are not in a header
    assert len(expected_sizes) > 2
    assert all(
        min(abs(sum(expected_sizes[:at]) - end) for end in ends) <= slack
        for at in range(len(expected_sizes) + 1)
    )
    backend.drop(model)
