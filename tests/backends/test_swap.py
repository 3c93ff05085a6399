"""Storages that leave a card (tests/simgpu.py), return or are dropped. A guard raises at each access meanwhile."""

import gc
import io
import mmap
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from safetensors.torch import save as save_safetensors
from torch import nn

from gpu_runtime.backends.pytorch import swap, transformers_backend
from gpu_runtime.backends.registry import open_backend
from gpu_runtime.errors import CannotGovern, LoadFailed
from gpu_runtime.facts import ModelSpec, Share
from tests import simgpu, storage_mark
from tests.backends.test_interrupts import interrupted_at

CARD, OTHER, HOST = (Share("simgpu:0", 1),), (Share("simgpu:1", 1),), (Share("host", 1),)
NET = ModelSpec("net", "torch")
AWAY = "the weights of net are in RAM"


@pytest.fixture
def probe():
    gc.collect()
    return simgpu.SimProbe()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))


def storages(*values: float) -> list[torch.UntypedStorage]:
    return [torch.full((4,), float(value)).untyped_storage() for value in values]


def content(storage: torch.UntypedStorage) -> list[float]:
    return torch.empty(0).set_(storage, 0, (4,), (1,)).tolist()


# -- the exchange ----------------------------------------------------------------------------------
@given(some.integers(1, 6), some.integers(0, 6))
def test_an_exchange_happens_completely_or_can_be_undone(count, fails_at):
    """If one of its calls fails, the earlier calls are reverted."""
    here, there = storages(*range(count)), storages(*range(10, 10 + count))
    exchange = swap.Exchange()
    for storage, other in zip(here, there, strict=True):
        exchange.put(storage, other)
    if fails_at < count:
        exchange.pairs[fails_at] = (here[fails_at], None)
        with pytest.raises((RuntimeError, AttributeError)):
            swap.at_once(exchange.calls)
        exchange.undo()
        exchange.undo()
        assert [content(s) for s in here] == [[float(i)] * 4 for i in range(count)]
    else:
        swap.at_once(exchange.calls)
        assert [content(s) for s in here] == [[10.0 + i] * 4 for i in range(count)]


def test_only_storages_of_one_size_on_one_device_are_exchanged():
    (small,), large = storages(1.0), torch.ones(9).untyped_storage()
    with pytest.raises(ValueError, match="16 bytes on cpu cannot be exchanged with 36 on cpu"):
        swap.Exchange().put(small, large)


ACCESSES: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda t: t.sum(),
    "item": lambda t: t[0, 0].item(),
    "repr": repr,
    "tolist": lambda t: t.tolist(),
    "data_ptr": lambda t: t.data_ptr(),
    "cpu": lambda t: t.cpu(),
    "clone": lambda t: t.clone(),
    "half": lambda t: t.half(),
    "add_": lambda t: t.detach().add_(1),
    "copy_": lambda t: t.detach().copy_(torch.ones(16, 8)),
    "out=": lambda t: torch.add(t.detach(), 1, out=t.detach()),
    "save": lambda t: torch.save(t, io.BytesIO()),
    "pickle": pickle.dumps,
    "safetensors": lambda t: save_safetensors({"t": t.detach()}),
    "numpy": lambda t: np.asarray(t.detach()),
    "storage": lambda t: t.untyped_storage().tolist(),
}


@pytest.mark.parametrize("access", ACCESSES)
def test_every_access_to_weights_that_left_their_card_raises_our_sentence(guards, probe, access):
    """No access returns zeros, writes a file or ends the process. After the return all accesses work."""
    backend = open_backend("torch", probe)
    model = backend.load(NET, CARD, lambda: network().eval())
    weight = backend.value(model)[0].weight
    view = weight.detach()[:, :4]
    before = view.cpu().clone()
    backend.move(model, HOST)
    assert (weight.shape, weight.dtype, str(weight.device)) == ((16, 8), torch.float32, "simgpu:0")
    for tensor in (weight, view):
        with pytest.raises((RuntimeError, TypeError), match=None) as raised:
            ACCESSES[access](tensor)
        if access != "numpy":  # numpy refuses any tensor that is not on the CPU
            assert AWAY in str(raised.value)
    assert backend.measure(model)[0].device == "host"
    backend.move(model, CARD)
    assert torch.equal(view.cpu(), before)


def test_a_guard_on_the_cpu_costs_no_memory_and_refuses_writes_and_files():
    """Simulated cards have CPU storages. A plain read of the guard sees zeros, as the docs say."""
    size = 512 << 20
    before = _resident_bytes()
    guard = swap.guard(size, torch.device("cpu"), "never seen")
    tensor = torch.empty(0).set_(guard)
    assert _resident_bytes() - before < 64 << 20
    assert tensor[-1].item() == 0.0 and not tensor.is_shared()
    for act in (torch.Tensor.data_ptr, torch.Tensor.numpy, lambda t: t.add_(1), pickle.dumps):
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            act(tensor)


def _resident_bytes() -> int:
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * mmap.PAGESIZE


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="this system copies all pages")
def test_a_forked_child_reads_the_weights_of_a_module_that_was_forgotten_while_away(guards, probe):
    """Forks leave out the pages that a card may write. A worker process may read the module's weights."""
    host = probe.place("host")
    host.pinned = True
    backend = open_backend("torch", probe)
    module = network().eval()
    before = module(torch.ones(1, 8))
    model = backend.load(NET, CARD, lambda: module)
    backend.move(model, HOST)
    backend.drop(model)
    assert torch.equal(module(torch.ones(1, 8)), before)
    assert ended_in_child(lambda: torch.equal(module[0].weight, module[0].weight.clone())) == 0
    assert host.held_bytes() == 0


def ended_in_child(check: Callable[[], bool]) -> int:
    """The exit status of a forked child: 0 if `check` returns true there; negative for a signal."""
    pid = os.fork()
    if not pid:
        os._exit(0 if check() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# -- moves -----------------------------------------------------------------------------------------
def trained(module: nn.Module, optimizer: torch.optim.Optimizer, away: Callable[[], None]) -> list:
    """The losses of five training steps. `away` is called at every point where a kernel may be idle."""
    x = torch.linspace(-1, 1, 64).view(8, 8).to("simgpu:0")
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        away()
        loss = module(x).square().mean()
        away()
        loss.backward()
        away()
        optimizer.step()
        losses.append(loss.detach().cpu())
        away()
    return losses


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_training_with_a_live_graph_goes_on_after_each_journey(guards, probe, kind):
    """Weights, gradients, optimizer state and saved tensors are those of a copy that was never moved."""
    backend = open_backend("torch", probe)
    options = {"momentum": 0.9} if kind == "SGD" else {}
    twin, module = network().to("simgpu:0"), network().to("simgpu:0")
    optimizers = [
        getattr(torch.optim, kind)(m.parameters(), lr=0.1, **options) for m in (twin, module)
    ]
    expected = trained(twin, optimizers[0], lambda: None)
    model = backend.adopt(NET, module, optimizers[1])

    def away() -> None:
        backend.move(model, HOST)
        backend.move(model, CARD)

    assert model.moves_in_training()
    losses = trained(module, optimizers[1], away)
    assert all(torch.equal(*pair) for pair in zip(losses, expected, strict=True))
    for mine, other in zip(module.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(mine.cpu(), other.cpu())


def test_what_a_live_graph_holds_returns_only_to_its_own_card(guards, probe):
    backend = open_backend("torch", probe)
    model = backend.load(NET, CARD, lambda: network().eval())
    module, x = backend.value(model), torch.ones(2, 8).to("simgpu:0")
    loss = module(x).sum()
    backend.move(model, HOST)
    assert backend.must_return_to(model) == {"simgpu:0": 0}
    with pytest.raises(
        CannotGovern, match=r"(?s)cannot return to simgpu:1.*waits for it on simgpu:0"
    ):
        backend.move(model, OTHER)
    with pytest.raises(RuntimeError, match=AWAY):
        loss.backward()
    backend.move(model, CARD)
    assert backend.must_return_to(model) == {}
    del loss
    # The card's thread of autograd lets go of the failed pass before it begins another.
    torch.ones(1, device="simgpu:0", requires_grad=True).sum().backward()
    backend.move(model, HOST)
    assert backend.must_return_to(model) == {}
    backend.move(model, OTHER)
    assert str(module[0].weight.device) == "simgpu:1"


def test_without_guards_a_module_in_training_is_not_movable(probe):
    model = open_backend("torch", probe).load(NET, CARD, lambda: network().eval())
    if hasattr(torch._C, storage_mark.NAME):
        pytest.skip("this torch has guards")
    assert not model.moves_in_training()


@pytest.mark.thorough
def test_a_journey_stopped_at_any_line_is_complete_or_did_not_happen(guards, probe):
    """After the interrupt, the values, the account and the device agree, and the next move works."""
    backend, line, target = open_backend("torch", probe), 0, HOST
    model = backend.load(NET, CARD, lambda: network().eval().requires_grad_(False))
    module, x = backend.value(model), torch.ones(2, 8).to("simgpu:0")
    expected, (card,) = module(x).cpu(), backend.measure(model)
    while interrupted_at(line := line + 1, partial(backend.move, model, target)):
        (share,) = backend.measure(model)
        assert share.bytes == card.bytes
        assert probe.used()["host"] == (card.bytes if share.device == "host" else 0), line
        if share.device == "simgpu:0":
            assert torch.equal(module(x).cpu(), expected), line
        else:
            with pytest.raises(RuntimeError, match=AWAY):
                module(x)
        if share.device == target[0].device:
            target = CARD if target is HOST else HOST
    assert line > 100


# -- drops and reloads -----------------------------------------------------------------------------
@pytest.mark.thorough
@pytest.mark.parametrize("cards", ["guarded", "unguarded"])
def test_a_dropped_model_is_loaded_into_its_object_with_all_that_was_set_on_it(
    request, probe, llama, cards
):
    """Hooks, train mode, settings and attributes stay. Tensors that the user kept have their bytes again."""
    if cards == "guarded":
        request.getfixturevalue("guards")
    backend, spec = (
        open_backend("transformers", probe),
        ModelSpec("m", "transformers", source=str(llama)),
    )
    model = backend.load(spec, CARD)
    module, calls = backend.value(model), []
    module.train()
    module.register_forward_hook(lambda *_: calls.append(1))
    module.generation_config.temperature, module.note = 0.25, torch.ones(3)
    kept = module.lm_head.weight
    before = kept.detach().cpu().clone()
    assert backend.unchanged(model)
    backend.drop(model)
    assert backend.measure(model) == ()
    if cards == "guarded":
        with pytest.raises(RuntimeError, match="m is unloaded"):
            torch.save(kept, io.BytesIO())
    again = backend.load(spec, CARD, into=module)
    assert backend.value(again) is module and module.training
    assert module.generation_config.temperature == 0.25 and module.note.sum() == 3
    assert torch.equal(module.lm_head.weight.cpu(), before)
    if cards == "guarded":
        assert torch.equal(kept.cpu(), before)
    module(torch.tensor([[3, 4]]).to("simgpu:0"))
    assert calls == [1] and backend.droppable(again)


@pytest.mark.thorough
def test_a_reload_refuses_a_source_with_other_weights(probe, llama, tmp_path):
    """The source has the same size, time of modification and inode as before. Only its bytes differ."""
    source = tmp_path / "model"
    shutil.copytree(llama, source)
    backend, spec = (
        open_backend("transformers", probe),
        ModelSpec("m", "transformers", source=str(source)),
    )
    model = backend.load(spec, CARD)
    module, weights = backend.value(model), source / "model.safetensors"
    stat, data = weights.stat(), bytearray(weights.read_bytes())
    assert backend.unchanged(model)
    backend.drop(model)
    data[-4:] = b"\x00\x00\x40\x40"
    weights.write_bytes(data)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(LoadFailed, match=r"(?s)its source has other weights now.*rt.forget\('m'\)"):
        backend.load(spec, CARD, into=module)
    assert backend.measure(backend.load(spec, CARD)) != (), "a new object may have the new weights"


@pytest.mark.thorough
def test_the_end_of_the_interpreter_compares_no_weights(probe, llama, monkeypatch):
    """At the end of the process no weights are compared. For tens of gigabytes that would take seconds."""
    backend = open_backend("transformers", probe)
    model = backend.load(ModelSpec("m", "transformers", source=str(llama)), CARD)
    ending = threading.Event()
    ending.set()
    monkeypatch.setattr(transformers_backend, "ending", ending)
    monkeypatch.setattr(transformers_backend, "_digests", lambda model: 1 / 0)
    backend.drop(model)
    assert backend.measure(model) == ()
