"""On torch before 2.12 our own exchange moves memory. Where it does not know the torch, nothing comes apart."""

import ctypes
import gc
import re
import signal
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from gpu_runtime.backends import torch_release
from gpu_runtime.backends.base import NotStill
from gpu_runtime.backends.pytorch import old_torch, swap
from gpu_runtime.backends.registry import open_backend
from gpu_runtime.devices.probe import open_probe
from gpu_runtime.errors import CannotGovern
from gpu_runtime.facts import HOST, ModelSpec, Share
from gpu_runtime.units import MIB
from gpu_runtime.version import OLDEST_TORCH, TORCH_WITH_EXCHANGE
from tests import simgpu
from tests.backends.test_kernel_memory import Kernel

CARD, TO_HOST = (Share("sim:0", 1),), (Share(HOST, 1),)
NET = ModelSpec("net", "torch")
METHOD = "_swap_data_ptr_"


@pytest.fixture
def ours(monkeypatch):
    """The exchange of torch before 2.12. Skips the test if torch has another layout by now."""
    monkeypatch.setattr(torch.UntypedStorage, METHOD, None, raising=False)
    if not swap.can_swap():
        pytest.skip(f"the layout of torch {torch.__version__} is not known")


@pytest.fixture(params=["torch's", "ours"])
def exchange(request):
    """Both ways to exchange the bytes of storages. Skips the way that this torch lacks."""
    if request.param == "ours":
        request.getfixturevalue("ours")
    else:  # not the one of the simulated accelerator, which is Python code
        own = [kind for kind in torch.UntypedStorage.__mro__[1:] if METHOD in vars(kind)]
        if not own:
            pytest.skip("torch is older than 2.12")
        patch = request.getfixturevalue("monkeypatch")
        patch.setattr(torch.UntypedStorage, METHOD, vars(own[0])[METHOD])


@pytest.fixture
def unknown(monkeypatch):
    """A torch whose self-test fails."""
    monkeypatch.setattr(torch.UntypedStorage, METHOD, None, raising=False)
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.9.9"))
    monkeypatch.setattr(old_torch, "exchanged_fields", lambda: None)


WHY = "gpu-console does not know how torch 2.9.9 keeps the memory of tensors"


def test_a_view_sees_the_bytes_that_its_storage_got(exchange):
    one, other = torch.zeros(4), torch.ones(4)
    view = one[1:]
    done = swap.Exchange()
    done.put(one.untyped_storage(), other.untyped_storage())
    swap.at_once(done.calls)
    assert view.tolist() == [1, 1, 1] and other.tolist() == [0, 0, 0, 0]
    done.undo()
    assert view.tolist() == [0, 0, 0] and other.tolist() == [1, 1, 1, 1]


def test_a_mark_moves_with_the_bytes(exchange, mark):
    """After the return every access works again, and the storage can be resized."""
    tensor = torch.arange(4.0)
    storage = tensor.untyped_storage()
    guard = torch._C._construct_storage_from_data_pointer(0, torch.device("cpu"), 16)
    mark(guard._cdata, "away")
    swap.at_once([partial(list, swap._swaps([(storage, guard)]))])
    with pytest.raises(RuntimeError):
        tensor.sum()
    swap.at_once([partial(list, swap._swaps([(storage, guard)]))])
    assert tensor.tolist() == [0, 1, 2, 3]
    assert storage.resizable() and storage.resize_(32).nbytes() == 32


class Pages(bytearray):
    """Memory that is not torch's, and that can be watched."""


def test_memory_that_is_not_torchs_changes_places_with_torchs(exchange):
    """Each storage then has the other's size, allocator and deleter."""
    pages = Pages(b"abcdefgh")
    alive = weakref.ref(pages)
    borrowed, tensor = torch.frombuffer(pages, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    done = swap.Exchange()
    done.put(tensor.untyped_storage(), borrowed.untyped_storage())
    swap.at_once(done.calls)
    assert bytes(tensor.tolist()) == b"abcdefgh" and not tensor.untyped_storage().resizable()
    assert borrowed.untyped_storage().resize_(4096).nbytes() == 4096
    del pages, done
    gc.collect()
    assert alive() is not None
    del tensor
    gc.collect()
    assert alive() is None


def test_no_garbage_is_collected_within_an_exchange(exchange):
    """A finaliser of the user's would see some of the bytes exchanged and others not."""
    prepared = swap.Exchange()
    for _ in range(2000):
        prepared.put(*(torch.zeros(1).untyped_storage() for _ in range(2)))
    calls, phases = prepared.calls, []
    gc.collect()
    gc.callbacks.append(lambda phase, _: phases.append(phase))
    try:
        swap.at_once(calls)
        seen = len(phases)
    finally:
        gc.callbacks.pop()
    assert seen == 0
    prepared.undo()


def test_no_handler_of_a_signal_runs_within_an_exchange(exchange):
    one, other = torch.zeros(4), torch.ones(4)
    seen: list[list[float]] = []
    signals = partial(ctypes.PyDLL(None)["raise"], int(signal.SIGUSR1))
    done = swap.Exchange()
    done.put(one.untyped_storage(), other.untyped_storage())
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(one.tolist() + other.tolist()))
    try:
        swap.at_once([signals, *done.calls])
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [[1, 1, 1, 1, 0, 0, 0, 0]]


class Net(nn.Module):
    """A network with dropout and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 512), nn.BatchNorm1d(512), nn.Dropout(0.3), nn.GELU(), nn.Linear(512, 8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def trained(away=lambda: None, adopt=lambda net, optimizer: None) -> list[torch.Tensor]:
    """All results of six steps with AdamW, a view of a weight and a live graph among them."""
    torch.manual_seed(3)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    view = net.layers[0].weight.detach()[:, :5]
    adopt(net, optimizer)
    x = torch.randn(32, 64)
    results = []
    for _ in range(6):
        loss = net(x).square().mean()
        away()
        loss.backward()
        away()
        optimizer.step()
        view.mul_(0.99)  # a write to the view is a write to the weight
        away()
        results += [loss.detach().clone(), view.clone()]
        optimizer.zero_grad()
    states = [one for state in optimizer.state.values() for one in state.values()]
    return [*results, *net.state_dict().values(), *states, torch.rand(3)]


def test_training_is_equal_to_the_bit_with_moves_at_each_point(exchange):
    expected = trained()
    backend = open_backend("torch", open_probe("sim:1GiB,host:1GiB"))
    models = []

    def away() -> None:
        backend.move(models[0], TO_HOST)
        backend.move(models[0], CARD)

    results = trained(away, lambda net, opt: models.append(backend.adopt(NET, net, opt)))
    assert len(results) == len(expected) and all(map(torch.equal, results, expected))


def test_plain_training_is_equal_to_the_bit_with_parks_at_each_point(exchange):
    expected = trained()
    kernel = Kernel("sim")
    kept = torch.ones(MIB)
    parks = []

    def away() -> None:
        kernel.park()
        parks.append(kernel.bytes[HOST])
        kernel.unpark()

    results = trained(away)
    assert all(map(torch.equal, results, expected)) and min(parks) >= kept.nbytes


def test_what_a_graph_saved_is_found_and_no_unpack_hook_runs():
    """A result of `exp` lives only in the graph. With hooks, what they packed is an object of Python."""
    if hasattr(torch._C._autograd.SavedTensor, "data"):
        pytest.skip("this torch returns what a graph saved")
    x = torch.ones(8, requires_grad=True)
    y = x.exp()
    (found,) = old_torch.saved_in(y.grad_fn, "_raw_saved_result")
    assert found.untyped_storage()._cdata == y.untyped_storage()._cdata
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: 1 / 0):
        hooked = x.exp()
    assert old_torch.saved_in(hooked.grad_fn, "_raw_saved_result") == ()

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, one):
            ctx.save_for_backward(one, None)
            return one * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    double = Double.apply(x)
    saved, nothing = old_torch.saved_in(double.grad_fn, "_raw_saved_tensors")
    assert saved is x and nothing is None


# -- a torch that is not known ---------------------------------------------------------------------
def test_a_module_stays_where_it_is_and_its_views_with_it(unknown):
    backend = open_backend("torch", simgpu.SimProbe())
    net = Net().eval().to("simgpu:0")
    view = net.layers[0].weight.detach()[0]
    model = backend.adopt(NET, net)
    assert not backend.can_move
    with pytest.raises(CannotGovern) as raised:
        backend.move(model, TO_HOST)
    assert str(raised.value) == (
        f"net stays where it is: {WHY}, so its views and graphs would keep the old weights.\n"
        "  Install a newer torch, and restart:  pip install 'torch>=2.12'"
    )
    view.fill_(3)
    assert (net.layers[0].weight[0] == 3).all()
    assert [share.device for share in backend.measure(model)] == ["simgpu:0"]


def test_a_new_model_is_loaded(unknown):
    """Nobody has a view of its weights yet."""
    backend = open_backend("torch", open_probe("sim:1GiB,host:1GiB"))
    model = backend.load(NET, CARD, lambda: Net().eval())
    assert [share.device for share in backend.measure(model)] == ["sim:0"]


def test_a_model_from_disk_is_not_dropped(unknown, llama):
    backend = open_backend("transformers", open_probe("sim:1GiB,host:1GiB"))
    model = backend.load(ModelSpec("m", "transformers", source=str(llama)), CARD)
    assert not backend.droppable(model) and not backend.keeps_shadow(model.spec)


def test_a_kernel_is_counted_and_not_parked(unknown):
    kernel = Kernel("sim")
    kept = torch.ones(MIB)
    assert kernel.bytes["sim:0"] >= kept.nbytes
    with pytest.raises(NotStill, match=WHY):
        kernel.park()
    assert kernel.handle.why_not() == WHY


def test_a_torch_before_the_oldest_is_named_even_if_its_layout_is_known(monkeypatch):
    monkeypatch.setattr(torch.UntypedStorage, METHOD, None, raising=False)
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.3.1+cu121"))
    why = "torch 2.3.1+cu121 is older than 2.4"
    assert not swap.can_swap() and swap.why_not() == why == torch_release.why_torch_moves_nothing()


def test_a_card_needs_a_guard_that_refuses_reads(monkeypatch):
    """torch 2.4 and 2.5 have none. A read of a guard without memory would end the use of the card."""
    monkeypatch.setattr(swap, "_mark", lambda: None)
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.4.1"))
    why = "torch 2.4.1 cannot guard bytes that have left a card"
    assert swap.why_not([torch.device("cuda", 0)]) == why
    assert swap.why_not([torch.device("cpu")]) == ""


@pytest.mark.parametrize(
    "version, why",
    [("2.3.1", "torch 2.3.1 is older than 2.4"), ("2.4.0", ""), ("2.13.0+cpu", ""), ("", "")],
)
def test_the_installed_release_is_judged_without_an_import(monkeypatch, version, why):
    monkeypatch.delitem(torch_release.sys.modules, "torch")
    monkeypatch.setattr(torch_release, "_installed", lambda: version)
    assert torch_release.why_torch_moves_nothing() == why


def test_the_page_on_environments_has_the_row_of_this_torch():
    """The rows are for ranges of releases; the newest one is first."""
    page = (Path(__file__).parents[2] / "docs/guides/environments.md").read_text()
    rows = re.findall(
        r"^\| (\d+\.\d+)(?:, \d.\d| to \d\.\d+| and later) \| (.*) \| (.*)\|$", page, re.M
    )
    assert (rows[0][0], rows[-1][0]) == (TORCH_WITH_EXCHANGE, OLDEST_TORCH)
    assert f"`is older than {OLDEST_TORCH}`" in page
    release = tuple(map(int, torch.__version__.split(".")[:2]))
    how, says = next(row[1:] for row in rows if tuple(map(int, row[0].split("."))) <= release)
    # Another test may have registered the simulated accelerator, whose exchange is Python code.
    is_own = any(METHOD in vars(kind) for kind in torch.UntypedStorage.__mro__[1:])
    assert swap.can_swap() and ("torch's own exchange" in how) == is_own
    if torch.version.cuda:  # a build for CPUs has no guard for cards
        why = swap.why_not([torch.device("cuda")])
        assert ("simulated cards only" in how) == bool(why) and says.strip(" `") in why
