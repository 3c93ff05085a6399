"""The search for storages: what it finds, why a storage must stay, and that the search changes nothing."""

import _asyncio
import gc
import io
import itertools
import mmap
import os
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from gpu_runtime import tracked_objects
from gpu_runtime.backends.pytorch import search
from gpu_runtime.backends.pytorch import search as se
from gpu_runtime.units import MIB


def every(storage):
    """Counts every CPU storage, however small, as a storage on sim:0."""
    return "sim:0" if storage.device.type == "cpu" else ""


def keys(found=None):
    return {one.key for one in (found or se.search(every)).found}


def storage_of(tensor):
    return tensor.untyped_storage()


def why(tensor):
    """The reason that a search gives for keeping the storage of `tensor` in place."""
    key = tensor.untyped_storage()._cdata
    (reason,) = [one.stays for one in se.search(every).found if one.key == key]
    return reason


class Pair(torch.Tensor):
    """A tensor that wraps another one, as torchao's and DTensor do."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError("the search runs no operator of a wrapping class")


class Loud(torch.Tensor):
    """A tensor whose attributes are all computed by user code."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise AssertionError("the search runs no code of the user")


# -- what is found ---------------------------------------------------------------------------------
@pytest.mark.parametrize(("make", "parts"), [
    (lambda: torch.ones(7), lambda t: [t]),
    (lambda: torch.ones(7).untyped_storage(), lambda t: [torch.empty(0).set_(t)]),
    (lambda: torch.arange(10.0)[3:5], lambda t: [t]),
    (lambda: torch.arange(3.0).expand(4, 3), lambda t: [t]),
    (lambda: torch.randn(3, dtype=torch.cfloat).conj(), lambda t: [t]),
    (lambda: nn.Parameter(torch.ones(7)), lambda t: [t]),
    (lambda: torch.eye(4).to_sparse(), lambda t: [t._indices(), t._values()]),
    (lambda: torch.eye(4).to_sparse_csr(), lambda t: [t.crow_indices(), t.col_indices(), t.values()]),
    (lambda: torch.eye(4).to_sparse_csc(), lambda t: [t.ccol_indices(), t.row_indices(), t.values()]),
    (lambda: Pair(torch.ones(7)), lambda t: [t.inner]),
    (lambda: torch.ones(7).as_subclass(Loud), lambda t: [t.as_subclass(torch.Tensor)]),
    (lambda: torch.quantize_per_tensor(torch.ones(7), 0.1, 0, torch.quint8), lambda t: [t]),
    (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), lambda t: [t]),
], ids=["plain", "storage alone", "view", "expanded", "conj", "parameter", "coo", "csr", "csc", "wrapper",
        "torch_function", "quantised", "nested"])  # fmt: skip
def test_storages_of_every_kind_of_tensor_are_found(make, parts):
    """A sparse or wrapping tensor consists of several storages."""
    tensor = make()
    with torch._C.DisableTorchFunctionSubclass():
        expected = {storage_of(part)._cdata for part in parts(tensor)}
    assert expected <= keys()
    assert tensor is not None


@pytest.mark.thorough
def test_the_parts_of_a_jagged_tensor_are_found():
    jagged = torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)], layout=torch.jagged)
    assert storage_of(jagged._values)._cdata in keys()


def test_a_gradient_that_nobody_has_read_is_found():
    """A gradient that was never read has no Python object, so Python's garbage collector cannot find it."""
    weight = torch.ones(5000, requires_grad=True)
    before = keys()
    (weight * 2).sum().backward()
    fresh = [one for one in se.search(every).found if one.key not in before and one.bytes == 20000]
    assert [one.key for one in fresh] == [storage_of(weight.grad)._cdata]
    out = (torch.ones(5000, requires_grad=True) * 2).sum()
    node = out.grad_fn.next_functions[0][0].next_functions[0][0]
    assert storage_of(node.variable)._cdata in keys()


def test_parameters_of_a_loaded_script_are_found():
    """TorchScript keeps its parameters in C++. A parameter gets a Python object only when it is read."""
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(nn.Linear(100, 1000)), file)
    file.seek(0)
    gc.collect()
    before = keys()
    module = torch.jit.load(file)
    fresh = [one for one in se.search(every).found if one.key not in before]
    assert sorted(one.bytes for one in fresh if one.bytes >= 4000) == [4000, 400000]
    assert module is not None


@pytest.mark.parametrize("net", [
    lambda: nn.LSTM(8, 8, num_layers=2),
    lambda: nn.GRU(8, 8),
    lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.5)),
    lambda: nn.TransformerEncoderLayer(8, 2, 16),
], ids=["lstm", "gru", "mlp", "transformer"])  # fmt: skip
def test_everything_that_an_autograd_graph_saved_is_found(net):
    """torch's pack hook receives every saved tensor. The test compares the search with it."""
    module, inputs = net(), torch.randn(5, 3, 8)
    lasting = {storage_of(t)._cdata for t in (inputs, *module.parameters(), *module.buffers())}
    saved = {}
    with saved_tensors_hooks(lambda t: saved.setdefault(storage_of(t)._cdata, t), lambda t: t):
        kept = module(inputs)
    expected = Counter(storage_of(t).nbytes() for key, t in saved.items() if key not in lasting)
    del kept
    saved.clear()
    gc.collect()
    before = keys()
    out = module(inputs)
    fresh = Counter(one.bytes for one in se.search(every).found if one.key not in before)
    assert expected and expected <= fresh
    assert out is not None


# -- what is not -----------------------------------------------------------------------------------
def test_tensors_without_bytes_and_governed_storages_are_left_out():
    with FakeTensorMode():
        fake = torch.empty(1000)
    lazy = nn.LazyLinear(4)
    meta, empty = torch.empty(1000, device="meta"), torch.empty(0)
    found = keys()
    assert not {storage_of(t)._cdata for t in (meta, empty)} & found
    assert fake is not None and lazy is not None
    model = nn.Linear(3, 3)
    governed = {storage_of(p)._cdata for p in model.parameters()}
    assert not governed & keys(se.search(every, governed=governed))
    assert governed <= keys()


def packed():
    net = nn.Sequential(nn.Linear(64, 64))
    return torch.ao.quantization.quantize_dynamic(net, {nn.Linear})[0]._packed_params


@pytest.mark.parametrize(
    ("make", "size"),
    [(lambda: torch.ones(4, 4).to_mkldnn(), 64), (packed, 64 * 64 + 64 * 4)],
    ids=["mkldnn", "packed"],
)
def test_bytes_that_have_no_storage_stay(make, size):
    """MKL-DNN and quantised modules keep bytes in objects of their own."""
    held = make()
    [found] = [one for one in se.search(every).found if one.tensors and one.tensors[0] is held]
    assert (found.storage, found.bytes, found.stays) == (None, size, se.COMPILED)


def test_frozen_weights_stay_with_their_bytes():
    """Their module has no parameters any more, and the graph may have their addresses."""
    frozen = torch.jit.freeze(torch.jit.script(nn.Sequential(nn.Linear(64, 32)).eval()))
    gc.collect()
    stays = [one.bytes for one in se.search(every).found if one.stays == se.COMPILED]
    assert {64 * 32 * 4, 32 * 4} <= {*stays} and frozen is not None


# -- why a storage stays ---------------------------------------------------------------------------
@pytest.mark.parametrize(("make", "reason"), [
    (lambda: torch.ones(7), ""),
    (lambda: torch.from_numpy(np.arange(7.0)), se.FOREIGN),
    (lambda: torch.frombuffer(bytearray(80), dtype=torch.float64), se.FOREIGN),
    (lambda: torch.from_dlpack(np.arange(7.0)), se.FOREIGN),
    (lambda: torch.ones(7).share_memory_(), se.SHARED),
], ids=["plain", "numpy", "buffer", "dlpack", "shared"])  # fmt: skip
def test_memory_that_others_use_stays(make, reason):
    """After `share_memory_` a storage's flag says that it is resizable, so the flag alone does not decide."""
    tensor = make()
    assert why(tensor) == reason


held: dict[str, torch.Tensor] = {}  # like a notebook's variables, and unlike those of a function


@pytest.fixture
def holding(monkeypatch):
    """Puts tensors into `held`, by name. Since Python 3.14, an empty dict of the module is frozen too."""
    monkeypatch.setitem(globals(), "held", {})
    return lambda **tensors: held.update(tensors)


def reasons():
    """The reason for each tensor in `held`, by name. No variable of a function refers to the tensors."""
    key_of = {name: one.untyped_storage()._cdata for name, one in held.items()}
    found = {one.key: one.stays for one in se.search(every).found}
    return {name: found[key] for name, key in key_of.items()}


@pytest.mark.parametrize("use", [
    lambda tensor: tensor.numpy(),
    lambda tensor: np.asarray(tensor)[1:],
    lambda tensor: tensor.view(7, 1)[2:].numpy(),
    lambda tensor: memoryview(tensor.numpy()),
    lambda tensor: [one.numpy() for one in tensor.unbind()],
], ids=["numpy", "part", "view", "buffer", "many"])  # fmt: skip
@pytest.mark.parametrize("few", [0, 99], ids=["all-references", "referrers"])
def test_a_tensor_stays_as_long_as_a_numpy_array_uses_it(use, few, holding, monkeypatch):
    """torch's mark of a shared storage stays for ever, so the mark alone does not decide."""
    monkeypatch.setattr(search, "FEW", few)
    holding(x=torch.ones(7))
    users = [use(held["x"]), use(held["x"])]
    assert reasons() == {"x": se.ARRAY}
    users.pop()
    assert reasons() == {"x": se.ARRAY}
    users.clear()
    assert reasons() == {"x": ""}
    assert not held["x"].untyped_storage().resizable()


def test_a_collection_in_the_middle_of_the_count_hides_no_array(holding, monkeypatch):
    """Objects that moved to the next generation were counted twice, and two arrays read freed memory."""
    monkeypatch.setattr(search, "FEW", 0)
    holding(x=torch.ones(7))
    users = [memoryview(held["x"].numpy()) for _ in "two"]
    listed = gc.get_objects

    def then_collects(generation):
        found = listed(generation)
        gc.collect(0)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(gc, "get_objects", then_collects)
        assert users and reasons() == {"x": se.ARRAY}


def test_a_search_never_reads_what_asyncio_has_freed(monkeypatch):
    """In Python 3.12, where every process has frozen objects, the second search filled the memory of the machine."""
    read, referents = Counter(), gc.get_referents

    def noted(*objects):
        read[any(one is _asyncio for one in objects)] += 1
        return referents(*objects)

    monkeypatch.setattr(gc, "get_referents", noted)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: tracked_objects.PYTHONS_OWN + 1)
    monkeypatch.setattr(tracked_objects._Frozen, "found", {})
    assert tracked_objects.instances({type(_asyncio)})
    monkeypatch.setattr(search, "FEW", 0)
    search.hidden_references([torch.ones(1)])
    assert read[False] > 100 and not read[True]


def test_a_graph_and_a_gradient_are_no_numpy_array(holding):
    """Autograd's C++ objects hold references to tensors too, which Python cannot list."""
    holding(weight=nn.Parameter(torch.ones(7)))
    holding(view=held["weight"].detach().view(7, 1))
    held["view"].numpy()
    holding(loss=(held["weight"] * held["weight"]).sum())
    assert reasons() == {"weight": "", "view": "", "loss": ""}
    held["loss"].backward()
    assert reasons() == {"weight": "", "view": "", "loss": ""}


def test_a_private_mapping_of_a_file_can_be_moved(holding, tmp_path):
    """Nobody else sees what is written there. A tensor that torch.load has mapped is a slice of its file."""
    path = tmp_path / "weights.pt"
    torch.save({"a": torch.ones(7), "b": torch.ones(3)}, path)
    save_file({"c": torch.ones(7), "d": torch.ones(3)}, tmp_path / "weights.safetensors")
    holding(**torch.load(path, mmap=True), **load_file(tmp_path / "weights.safetensors"))
    holding(e=torch.from_file(str(path), size=7))
    assert not any(one.untyped_storage().resizable() for one in held.values())
    assert reasons() == dict.fromkeys("abcde", "")
    array = held["a"].numpy()
    odd = Path(os.fsdecode(b"%s/caf\xe9" % os.fsencode(tmp_path)))  # a name may be any bytes
    odd.write_bytes(bytes(28))
    with odd.open("r+b") as file, mmap.mmap(file.fileno(), 28, mmap.MAP_PRIVATE):
        assert reasons() == {**dict.fromkeys("abcde", ""), "a": se.ARRAY}
    assert array is not None


def test_a_mapping_that_others_see_stays(holding, tmp_path):
    path = tmp_path / "numbers"
    path.write_bytes(bytes(28))
    holding(shared=torch.from_file(str(path), shared=True, size=7))
    holding(of_numpy=torch.from_numpy(np.memmap(path, dtype="float32", mode="c")))
    assert reasons() == {"shared": se.SHARED, "of_numpy": se.FOREIGN}


def test_a_slice_of_a_file_stays_as_long_as_the_whole_has_a_name(holding, tmp_path):
    path = tmp_path / "numbers"
    path.write_bytes(bytes(28))
    whole = torch.UntypedStorage.from_file(str(path), False, 28)
    holding(part=torch.empty(0).set_(whole[0:8]))
    assert reasons() == {"part": se.OVERLAPS}
    del whole
    assert reasons() == {"part": ""}


def test_memory_in_two_storages_counts_once(holding):
    array = np.zeros(7, dtype="float32")
    holding(one=torch.from_numpy(array), other=torch.from_numpy(array))
    assert reasons() == dict.fromkeys(held, se.OVERLAPS)
    mine = {one.untyped_storage()._cdata for one in held.values()}
    sizes = [one.own_bytes for one in se.search(every).found if one.key in mine]
    assert sorted(sizes) == [0, 28]


def test_a_known_result_is_used_until_a_reference_changes(holding, monkeypatch):
    """To count all references takes longer than the rest of the search."""
    holding(x=torch.ones(7))
    held["x"].numpy()
    counted = []
    count = search._counted
    monkeypatch.setattr(search, "_counted", lambda g: counted.append(1) or count(g))
    known: search.Known = {}
    key = held["x"].untyped_storage()._cdata

    def stays():
        return [one.stays for one in se.search(every, known=known).found if one.key == key]

    assert [stays(), stays(), len(counted)] == [[""], [""], 1]
    array = held["x"].numpy()
    assert [stays(), stays(), len(counted)] == [[se.ARRAY], [se.ARRAY], 2]
    assert array is not None


def test_a_layout_that_is_not_understood_makes_it_stay(holding, monkeypatch):
    """A future torch may lay out its storages in another way."""
    monkeypatch.setattr(search, "_layout", lambda: None)
    holding(x=torch.ones(7))
    held["x"].numpy()
    assert reasons() == {"x": se.FOREIGN}


def test_a_copy_on_write_storage_stays_and_is_not_copied():
    """A copy-on-write storage stays where it is, since reading its address would copy it."""
    source = torch.arange(10.0)
    clone = torch._lazy_clone(source)
    assert (why(source), why(clone)) == (se.COPY_ON_WRITE, se.COPY_ON_WRITE)
    assert torch._C._is_cow_tensor(source) and torch._C._is_cow_tensor(clone)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=9))
def test_overlaps_are_those_of_comparing_every_pair(rows):
    spans = [(start, size, n) for n, (start, size) in enumerate(rows)]
    expected = {
        one[2]
        for one, other in itertools.permutations(spans, 2)
        if one[0] < other[0] + other[1] and other[0] < one[0] + one[1]
    }
    overlapping = dict(se._overlapping(spans))
    assert overlapping.keys() == expected
    covered = {at for start, size, _ in spans for at in range(start, start + size)}
    assert sum(size for _, size, _ in spans) - sum(overlapping.values()) == len(covered)


def test_equal_addresses_on_two_cards_do_not_overlap(monkeypatch):

    class Storage:
        def __init__(self, card):
            self.device = torch.device(card)

        def nbytes(self):
            return 8

    monkeypatch.setattr(se, "_reason", lambda storage, tensors, sent: ("", 4096))
    entries = [se._Entry(Storage(card), card, []) for card in ("cuda:0", "cuda:1", "cuda:0")]
    assert [one.stays for one in se._judged(entries, [], None)] == [se.OVERLAPS, "", se.OVERLAPS]


# -- it changes nothing ----------------------------------------------------------------------------
def test_neither_hooks_nor_modes_of_the_user_run():
    calls = []

    def forward(x):
        calls.append("forward")
        return x.exp().sin()

    with saved_tensors_hooks(lambda t: t * 2, lambda t: calls.append("unpack") or t):
        hooked = torch.ones(3, requires_grad=True).exp()
    checkpointed = checkpoint(forward, torch.ones(3, requires_grad=True), use_reentrant=False)
    se.search(every)
    assert calls == ["forward"]
    assert hooked is not None and checkpointed is not None
    # A TorchDispatchMode of the user may count operators. It must not count those of the search.
    seen = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    sparse = torch.eye(4).to_sparse()
    with Functions(), Operators():
        se.search(every)
    assert seen == [] and sparse is not None


def test_a_search_changes_no_version_and_keeps_nothing_alive():
    weight = torch.ones(1000, requires_grad=True)
    loss = (weight * 3).exp().sum()
    version = weight._version
    gone = weakref.ref(loss)
    found = se.search(every)
    assert weight._version == version and weight.grad is None
    del found
    loss.backward()
    assert torch.equal(weight.grad, 3 * (weight.detach() * 3).exp())
    del loss
    assert gone() is None


def test_a_search_without_time_says_that_it_is_not_whole():
    seconds = itertools.count()
    limit = se.Limit(1, clock=lambda: float(next(seconds)))
    partial = se.search(every, limit=limit)
    assert not partial.whole and partial.found == ()
    assert se.search(every).whole


# -- where a storage counts ------------------------------------------------------------------------
def test_storages_count_on_the_card_where_they_are_or_on_the_first_simulated_one(probe):
    place = se.counted_on([probe.place(device.id) for device in probe.devices])
    assert place(storage_of(torch.empty(MIB, dtype=torch.uint8))) == "sim:0"
    assert place(storage_of(torch.empty(MIB - 1, dtype=torch.uint8))) == ""
    from tests import simgpu

    cards = simgpu.SimProbe()
    place = se.counted_on([cards.place(device.id) for device in cards.devices])
    on_card = torch.empty(1000, device="simgpu:1")
    assert place(storage_of(on_card)) == "simgpu:1"
    assert place(storage_of(torch.empty(2 * MIB, dtype=torch.uint8))) == ""
    found = [one for one in se.search(place).found if one.key == storage_of(on_card)._cdata]
    assert [(one.device, one.bytes) for one in found] == [("simgpu:1", 4000)]


# -- addresses that left torch ---------------------------------------------------------------------
class Taker:
    """A library that takes tensors by torch's C functions for DLPack, as Apache TVM's FFI does."""

    def __init__(self) -> None:
        self.takes = pytest.importorskip(
            "tvm_ffi", reason="apache-tvm-ffi is not installed: pip install apache-tvm-ffi"
        ).from_dlpack

    def __call__(self, tensor: torch.Tensor) -> object:
        return self.takes(tensor)


EXPORTS: dict[str, Callable[[torch.Tensor], object]] = {
    "NumPy by DLPack": np.from_dlpack,
    "NumPy of a view": lambda x: np.from_dlpack(x[5:]),
    "NumPy of a detached tensor": lambda x: np.from_dlpack(x.detach()),
    "to_dlpack": torch.utils.dlpack.to_dlpack,
    "__dlpack__": lambda x: x.__dlpack__(),
    "__dlpack__, versioned": lambda x: x.__dlpack__(max_version=(1, 0)),
    "torch by DLPack": torch.utils.dlpack.from_dlpack,
    "C functions of DLPack": lambda x: Taker()(x),
}


@pytest.mark.parametrize("export", EXPORTS)
def test_exported_memory_stays_until_its_last_user_is_gone(export):
    """The taker reads the address for as long as it lives. A move made it read freed memory."""
    if "versioned" in export and torch.__version__ < "2.9":
        pytest.skip("DLPack has no versions before torch 2.9")
    x = torch.ones(MIB)
    assert why(x) == ""
    taken = EXPORTS[export](x)
    assert why(x) != ""
    del taken
    gc.collect()
    assert why(x) == ""


COMPLEX: dict[str, Callable[[torch.Tensor], object]] = {
    "real": lambda z: z.real,
    "both": lambda z: (z.real, z.imag[3:]),
    "conjugate": torch.conj,
    "as real": torch.view_as_real,
    "as complex": lambda z: torch.view_as_complex(z.real.clone().reshape(-1, 2)),
    "of a part": lambda z: z[5:].real,
    "of a part with a name": lambda z: (part := z[5:], part.real, part.imag),
    "with a graph": lambda z: z.detach().requires_grad_().real.sum(),
}


@pytest.mark.parametrize("view", COMPLEX)
def test_complex_views_can_be_moved_and_hide_no_export(view):
    """torch keeps functions that refer to what such a view was made from. In 0.3 they counted as another library."""
    z = torch.full((MIB,), 2 + 3j)
    views = COMPLEX[view](z)
    assert {one.stays for one in se.search(every).found if one.bytes >= MIB} == {""} and [views]
    for export in (np.from_dlpack, lambda z: np.from_dlpack(z[7:]), lambda z: z.real.__dlpack__()):
        taken = export(z)
        assert why(z) == se.ARRAY
        del taken
        gc.collect()
        assert why(z) == ""


KEPT: dict[str, Callable[[torch.Tensor, nn.Module], object]] = {
    "checkpoint": lambda x, layer: checkpoint(layer, layer(x), use_reentrant=False),
    "reentrant checkpoint": lambda x, layer: checkpoint(layer, layer(x), use_reentrant=True),
    "vjp": lambda x, layer: torch.func.vjp(torch.sin, x)[1],
}


@pytest.mark.parametrize("keep", KEPT)
def test_what_torch_keeps_for_a_later_backward_is_found_and_can_be_moved(keep):
    """Objects of C++ keep it. Checkpoints of torch 2.13 and torch.func hid it, or counted as another library."""
    before, x, layer = keys(), torch.ones(513, 512, requires_grad=True), nn.Linear(512, 512)
    kept = KEPT[keep](x, layer)
    found = [one for one in se.search(every).found if one.key not in before and one.bytes >= MIB]
    assert {one.stays for one in found} == {""}
    assert Counter(one.bytes - MIB for one in found)[2048] == 3 - ("vjp" in keep), (
        "x, input, result"
    )
    taken = np.from_dlpack(x.detach())
    assert why(x) == se.ARRAY and kept is not None and taken is not None


def test_what_torch_itself_refers_to_can_be_moved():
    """Views, gradients, graphs, hooks, optimizers and compiled modules hold no addresses."""
    net = nn.Sequential(nn.Linear(1024, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 512))
    optimizer = torch.optim.AdamW(net.parameters())
    x = torch.randn(600, 1024, requires_grad=True)
    view = x[3:].view(-1)
    kept = []
    x.register_hook(kept.append)
    hidden = net(x)
    hidden.retain_grad()
    lstm = nn.LSTM(512, 256)
    out, state = lstm(hidden[None])
    loss = out.pow(2).mean()
    alive = [view, state, net, lstm]
    assert {one.stays for one in se.search(every).found if one.bytes >= MIB} == {""}
    loss.backward(retain_graph=True)
    assert {one.stays for one in se.search(every).found if one.bytes >= MIB} == {""}
    loss.backward()
    optimizer.step()
    del loss, out
    assert {one.stays for one in se.search(every).found if one.bytes >= MIB} == {""} and alive
