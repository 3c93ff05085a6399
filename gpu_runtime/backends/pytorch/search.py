"""Finds every storage that this process has on its devices, and whether each can be moved.

torch has no list of its storages. So the search uses Python's garbage collector and the autograd
graphs. The collector alone finds 3 % of a live LSTM graph. No unpack hook runs, because the hook of
a checkpoint would compute the forward pass again. `holders.py` finds the variables that refer to a
storage.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...devices.process_memory import Memory
from ...facts import HOST
from ...threads import outside_modes
from ...tracked_objects import instances, readable, subclasses
from ...units import MIB
from . import old_torch
from .storages import behind
from .swap import has_lazy_copy, readable_class

Place = Callable[[torch.UntypedStorage], str]  # returns the device of a storage; "" for none

SIMULATED_BYTES = MIB  # smaller CPU storages do not count on a simulated card
SENT = "another process maps it (CUDA IPC)"
COPY_ON_WRITE = "it is a copy-on-write copy, which torch would copy as soon as it is touched"
OVERLAPS = "another storage lies in the same memory"
UNREADABLE = "torch refuses to give its address"
COMPILED = "compiled code holds it (MKL-DNN, packed or frozen weights)"

_functorch = torch._C._functorch
_PLAIN = frozenset((Tensor, nn.Parameter))
_WITHOUT_BYTES = frozenset(("FakeTensor", "FunctionalTensor"))
# Modules whose weights torch has packed for the CPU: module, class.
_PACKED = (
    ("torch.ao.nn.quantized.modules.linear", "LinearPackedParams"),
    ("torch.ao.nn.quantized.modules.conv", "_ConvNd"),
    ("torch.ao.nn.quantized.dynamic.modules.rnn", "PackedParameter"),
)
_PARTS_OF_LAYOUT = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


class Found(NamedTuple):
    """A storage on a device. A Found keeps its storage alive, so keep it only for a short time."""

    # An UntypedStorage; torch makes one Python object for each storage: this one. None if the bytes
    # are in no storage. They stay then.
    storage: Any
    device: str
    bytes: int
    tensors: tuple[Any, ...]  # those in this storage that can be found, or what holds the bytes
    stays: str  # why the storage cannot be moved; empty: it can
    own_bytes: int  # `bytes`, less those that an earlier storage in the list has in the same memory

    @property
    def key(self) -> int:
        """The address of the C++ object, which is equal for all views of one storage."""
        return id(self.tensors[0]) if self.storage is None else self.storage._cdata


class Search(NamedTuple):
    """What a search found."""

    found: tuple[Found, ...]
    streams: tuple[torch.Stream, ...]  # of any device
    whole: bool  # False: the limit ended the search early


class Limit:
    """A time limit in seconds, from its creation on. At its limit, a search returns what it has found."""

    def __init__(
        self,
        seconds: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        """None means no limit. The limit is also reached once `stop` returns True."""
        self._clock, self.began = clock, clock()
        self._stop = stop
        self._seconds = float("inf") if seconds is None else seconds

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since this object was created."""
        return self._clock() - self.began

    @property
    def over(self) -> bool:
        """Whether the limit is reached."""
        stopped = self._stop is not None and self._stop()
        return stopped or self.elapsed_seconds >= self._seconds


# -- the search ------------------------------------------------------------------------------------


@outside_modes
def search(
    place: Place,
    *,
    governed: Collection[int] = (),
    limit: Limit | None = None,
    known: Known | None = None,
) -> Search:
    """Every storage on a device that can be found, each with the reason if it cannot be moved.

    `place(storage)` returns the id of the device on which a storage counts (see `counted_on`), or
    "" if it is left out. Storages whose key (`storage._cdata`) is in `governed` are left out too.
    If `limit` ends the search early, `whole` of the result is false. `known` has results of an
    earlier search, which make the next one faster; see `used_elsewhere`.

    The search holds the interpreter for about 0.15 s for each million objects. It changes no
    tensor. It runs no code of the user: no unpack hook, no `__torch_function__`, no mode of torch.
    An object that `gc.freeze()` hid is found only if it can be reached from a Python module.
    """
    limit = limit or Limit()
    seen = tracked(limit)
    nodes: set[Any] = set()
    references = Counter(map(id, seen.checkpointed))
    everything = list(_with_hidden(seen.tensors, nodes, references, limit))
    scripted, frozen = set(map(id, seen.scripted)), set(map(id, seen.frozen))
    entries, opaque, small = _storages(everything, seen.bare, place, governed, limit)
    exported = frozenset(
        entry.storage._cdata for entry in entries if _is_exported(entry, references, scripted)
    )
    compiled = frozenset(
        entry.storage._cdata
        for entry in entries
        if frozen and any(id(tensor) in frozen for tensor in entry.tensors)
    )
    found = _judged(entries, small, known, exported, compiled)
    found += _without_storage(opaque, seen.packed, place)
    return Search(tuple(found), tuple(seen.streams), seen.whole and not limit.over)


def counted_on(memories: Sequence[Memory]) -> Place:
    """A function that returns the id of the device on which a storage counts.

    `memories` are the governed devices. A storage on a real card counts on this card. If the cards
    are simulated, CPU storages of SIMULATED_BYTES and more count on the first card. Other storages
    count on no device.
    """
    by_torch = {torch.device(card.torch): card.device for card in memories if card.torch != "cpu"}
    on_cpu = (card.device for card in memories if card.torch == "cpu" and card.device != HOST)
    simulated = next(on_cpu, "")
    cpu: dict[torch.device, bool] = {}  # `device.type` takes longer than this look-up

    def place(storage: torch.UntypedStorage) -> str:
        device = storage.device
        if device not in cpu:
            cpu[device] = device.type == "cpu"
        if cpu[device]:
            return simulated if storage.nbytes() >= SIMULATED_BYTES else ""
        return by_torch.get(device, "")

    return place


class Tracked(NamedTuple):
    """The tensors, storages and streams that Python's garbage collector tracks."""

    tensors: list[Tensor]
    bare: list[torch.UntypedStorage]  # the storages that have a Python object
    streams: list[torch.Stream]
    scripted: list[Tensor]  # the parameters and buffers of TorchScript modules, also in `tensors`
    frozen: list[Tensor]  # the tensors that TorchScript has as constants, also in `tensors`
    checkpointed: list[Tensor]  # the inputs that checkpoints have saved, also in `tensors`
    packed: list[nn.Module]  # modules whose weights are packed
    whole: bool  # False: the limit was reached before the search, and nothing was listed


def tracked(limit: Limit) -> Tracked:
    """The objects that the garbage collector tracks, and those of TorchScript modules and checkpoints."""
    kinds, streams = subclasses(Tensor), subclasses(torch.Stream)
    scripted, packed, frames = _scripted_classes(), packed_classes(), _frames_of_checkpoints()
    interesting = kinds | streams | {torch.UntypedStorage} | scripted | packed | frames
    interesting.add(torch._C.ScriptFunction)
    found = Tracked([], [], [], [], [], [], [], not limit.over)
    if limit.over:
        return found
    for instance in instances(interesting):
        kind = type(instance)
        if kind in kinds:
            found.tensors.append(instance)
        elif kind in streams:
            found.streams.append(instance)
        elif kind in packed:
            found.packed.append(instance)
        elif kind is torch.UntypedStorage:
            found.bare.append(instance)
        elif kind in frames:
            saved = vars(instance).get("saved_args", ())
            found.checkpointed.extend(chain.from_iterable(map(in_saved, saved)))
        else:
            if kind in scripted:
                found.scripted.extend(itertools.chain(instance.parameters(), instance.buffers()))
            found.frozen.extend(constants_of(instance))
    found.tensors.extend(found.scripted)
    found.tensors.extend(found.frozen)
    known = set(map(id, found.tensors))
    found.tensors.extend(tensor for tensor in found.checkpointed if id(tensor) not in known)
    return found


def _frames_of_checkpoints() -> set[type]:
    """The class of the objects that keep the inputs of a checkpoint, in objects of C++ (torch 2.13 and later)."""
    kind = getattr(sys.modules.get("torch.utils.checkpoint"), "_CheckpointFrame", None)
    return {kind} if kind is not None else set()


def in_saved(saved: Any) -> list[Tensor]:
    """The tensor that a Python object of torch's class SavedTensor refers to."""
    data = getattr(saved, "data", None) if isinstance(saved, _SavedTensor) else None
    return [data] if isinstance(data, Tensor) else []


# By the ids of TorchScript modules and functions that have no tensors as constants. Their own
# `__eq__` may be the user's code, so they are no keys.
_without_constants: dict[int, weakref.ref[Any]] = {}


def constants_of(script: Any) -> list[Tensor]:
    """The tensors that a TorchScript module or function has as constants, such as frozen weights."""
    known = _without_constants.get(id(script))
    if known is not None and known() is script:
        return []
    try:
        nodes = script.graph.findAllNodes("prim::Constant")
    except (AttributeError, RuntimeError):  # a module without `forward`
        nodes = []
    found = [
        node.t("value")
        for node in nodes
        if node.hasAttribute("value") and node.kindOf("value") == "t"
    ]
    if not found:
        key = id(script)
        _without_constants[key] = weakref.ref(script, lambda _: _without_constants.pop(key, None))
    return found


def packed_classes() -> set[type]:
    """The classes of modules whose weights torch has packed for the CPU."""
    kinds = [getattr(sys.modules.get(module), name, None) for module, name in _PACKED]
    return {below for kind in kinds if kind is not None for below in subclasses(kind)}


class _Bytes(NamedTuple):
    """Bytes on a device that are in no storage, for a `Place`."""

    device: torch.device
    size: int

    def nbytes(self) -> int:
        return self.size


def _without_storage(
    opaque: Iterable[Tensor], packed: Iterable[nn.Module], place: Place
) -> Iterator[Found]:
    """The tensors of MKL-DNN among `opaque`, and the `packed` modules, that are on a device."""
    sizes: dict[int, tuple[Any, _Bytes]] = {}
    for tensor in opaque:
        if tensor.layout is torch._mkldnn:
            sizes[id(tensor)] = tensor, _Bytes(tensor.device, tensor.nbytes)
    for module in packed:
        sizes[id(module)] = module, _Bytes(torch.device("cpu"), _packed_bytes(module))
    for holder, content in sizes.values():
        if content.size and (device := place(content)):  # type: ignore[arg-type]
            yield Found(None, device, content.size, (holder,), COMPILED, content.size)


_packed_sizes: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def _packed_bytes(module: nn.Module) -> int:
    """The bytes of the weights of `module`. The first call unpacks a copy of them."""
    if module not in _packed_sizes:
        _packed_sizes[module] = sum(map(_bytes_in, list(vars(module).values())))
    return _packed_sizes[module]


def _bytes_in(value: Any) -> int:
    """The bytes of the tensors in `value`, which is or contains an object of torch's C++ code."""
    if isinstance(value, torch.ScriptObject):
        return _bytes_in(value.__getstate__())
    if isinstance(value, (tuple, list)):
        return sum(map(_bytes_in, value))
    return value.nbytes if isinstance(value, Tensor) else 0


def optimizer_keys() -> set[int]:
    """The keys of the storages that are state of torch's optimizers, such as Adam's averages."""
    found = set()
    for optimizer in instances(subclasses(torch.optim.Optimizer)):
        for state in dict(vars(optimizer).get("state") or {}).values():
            values = state.values() if isinstance(state, dict) else ()
            plain = [
                value for value in values if type(value) is Tensor and value.layout is torch.strided
            ]
            found |= {tensor.untyped_storage()._cdata for tensor in plain}
    return found


def _scripted_classes() -> set[type]:
    """The classes of TorchScript modules, whose parameters become Python objects when they are read."""
    script = sys.modules.get("torch.jit._script")
    return subclasses(script.RecursiveScriptModule) if script else set()


def _with_hidden(
    tensors: list[Tensor], nodes: set[Any], known: Counter[int], limit: Limit
) -> Iterator[Tensor]:
    """The `tensors`, their gradients, and the tensors that their autograd graphs saved.

    A few tensors are yielded twice. The visited nodes of the graphs are added to `nodes`. For each
    tensor, by its id, the references that are found from views, gradients and graphs are added to
    `known`.
    """
    seen = {id(tensor) for tensor in tensors}
    pending = tensors
    while pending and not limit.over:
        hidden: list[Tensor] = []
        roots: list[Any] = []
        for number, tensor in enumerate(pending):
            yield tensor
            if not number % 1024 and limit.over:
                return
            if type(tensor) in _PLAIN:
                if _functorch.is_functorch_wrapped_tensor(tensor):
                    hidden.append(_functorch.get_unwrapped(tensor))
                if tensor._is_view():
                    known[id(tensor._base)] += 1 + behind(tensor).references
                if not tensor.requires_grad:
                    continue
            hidden += gradient(tensor)
            roots += graph(tensor)
        hidden += (saved for saved in saved_in(roots, nodes, limit) if isinstance(saved, Tensor))
        known.update(map(id, hidden))
        pending = [other for other in hidden if id(other) not in seen]
        seen.update(map(id, pending))


class _Entry(NamedTuple):
    """A storage with its device and tensors, while the search runs."""

    storage: torch.UntypedStorage
    device: str
    tensors: list[Tensor]


def _is_exported(entry: _Entry, references: Mapping[int, int], scripted: Collection[int]) -> bool:
    """Whether something unknown in C++ refers to a tensor of `entry`, such as a DLPack capsule.

    Its taker stores the address: NumPy, JAX, a library that uses torch's C functions for DLPack. A
    tensor has one reference from all of Python, or none. `references` are those that were found in C++, and
    `scripted` the tensors of TorchScript modules, which refer to them without their address.
    """
    unknown: dict[int, int] = {}  # by the id of a tensor: the references that were not found
    for tensor in entry.tensors:
        count = tensor._use_count() - old_torch.owned_by_python(tensor)
        if count > 0 and count > references[id(tensor)] and id(tensor) not in scripted:
            if not _is_plain_view(tensor):
                return True
            unknown[id(tensor)] = count - references[id(tensor)]
    return bool(unknown) and not _are_of_complex_views(unknown, entry)


def _are_of_complex_views(unknown: Mapping[int, int], entry: _Entry) -> bool:
    """Whether the `unknown` references to views of `entry` are those of complex views, and no tensor is hidden.

    A complex view can refer to the view from which it was made. `unknown` has counts by the id of the view.
    """
    tensors = {id(tensor): tensor for tensor in entry.tensors}
    made = [view for key, view in tensors.items() if key not in unknown and _is_plain_view(view)]
    if sum(unknown.values()) != sum([behind(view).tensors for view in made]):
        return False
    return torch._C._storage_Use_Count(entry.storage._cdata) == 1 + len(tensors)


def _is_plain_view(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor._is_view()


def _storages(
    tensors: Iterable[Tensor],
    bare: list[torch.UntypedStorage],
    place: Place,
    governed: Collection[int],
    limit: Limit,
) -> tuple[list[_Entry], list[Tensor], list[torch.UntypedStorage]]:
    """The storages on a device, the `tensors` without a storage, and the CPU storages that are too
    small to count. `bare` are storages that the collector lists; some have no tensor.
    """
    by_key: dict[int, _Entry] = {}
    elsewhere = set(governed)
    opaque: list[Tensor] = []
    small: list[torch.UntypedStorage] = []

    def entry(storage: torch.UntypedStorage) -> _Entry | None:
        """The entry of `storage`, new or known; None if it is left out."""
        key = storage._cdata
        if (known := by_key.get(key)) is not None:
            return known
        if key in elsewhere:
            return None
        device = place(storage) if storage.nbytes() else ""
        if not device:
            elsewhere.add(key)
            if storage.device.type == "cpu":
                small.append(storage)
            return None
        by_key[key] = found = _Entry(storage, device, [])
        return found

    for number, tensor in enumerate(tensors):
        if not number % 1024 and limit.over:
            break
        plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
        for part in (tensor,) if plain else plain_tensors(tensor):
            try:
                storage = part.untyped_storage()
            except Exception:  # an opaque tensor, or code of another library
                opaque.append(part)
                continue
            found = entry(storage)
            if found is not None:
                found.tensors.append(part)
    elsewhere |= only_cut(bare) - by_key.keys()
    for storage in bare:
        entry(storage)
    return list(by_key.values()), opaque, small


# -- what one tensor consists of -------------------------------------------------------------------


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """`tensor` itself, or the strided parts of a sparse or wrapping one; none of a tensor without bytes."""
    kind = type(tensor)
    if kind not in _PLAIN:
        is_lazy = isinstance(tensor, nn.parameter.UninitializedTensorMixin)
        if kind.__name__ in _WITHOUT_BYTES or is_lazy:
            return
        if hasattr(kind, "__tensor_flatten__"):
            yield from _wrapped(tensor)
            return
    names = _PARTS_OF_LAYOUT.get(tensor.layout)
    if names is None:
        yield tensor
        return
    for name in names:
        yield getattr(tensor, name)()


def _wrapped(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors inside `tensor`, which is of a wrapping class."""
    try:
        names = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
        inner = [getattr(tensor, name) for name in names]
    except Exception:  # another library's code; its parts are found by the collector
        return
    for part in inner:
        if isinstance(part, Tensor):
            yield from plain_tensors(part)


def gradient(tensor: Tensor) -> tuple[Tensor, ...]:
    """The gradient of `tensor`, if any. torch may make its Python object only at this read."""
    try:
        if not tensor.requires_grad or not (tensor.is_leaf or tensor.retains_grad):
            return ()
        grad = tensor.grad
    except Exception:  # a tensor class of another library may raise any error
        return ()
    return (grad,) if grad is not None else ()


def graph(tensor: Tensor) -> tuple[Any, ...]:
    """The node of the autograd graph that made `tensor`, if there is one."""
    try:
        node = tensor.grad_fn if tensor.requires_grad else None
    except RuntimeError:  # a view that was changed where autograd does not allow it
        return ()
    return (node,) if node is not None else ()


_SavedTensor = torch._C._autograd.SavedTensor  # type: ignore[attr-defined]
# Maps the class of a node to the names of its attributes with saved tensors and objects.
_saved_names: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


def saved_in(roots: Iterable[Any], nodes: set[Any], limit: Limit) -> Iterator[Any]:
    """The objects that the autograd graphs of `roots` saved: tensors, and results of pack hooks.

    The visited nodes are added to `nodes`; nodes that are already in `nodes` are not visited.
    Unpack hooks do not run.
    """
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        if not len(nodes) % 1024 and limit.over:
            return
        pending += (below for below, _ in node.next_functions)
        yield from saved_by(node)


def saved_by(node: Any) -> Iterator[Any]:
    """The tensors and objects that the `node` of a graph saved. No unpack hook runs."""
    kind = type(node)
    if kind not in _saved_names:
        _saved_names[kind] = tuple(
            name for name in dir(kind) if name == "variable" or name.startswith("_raw_saved_")
        )
    for name in _saved_names[kind]:
        yield from _saved(node, name)


def _saved(node: Any, name: str) -> Iterator[Any]:
    try:
        value = getattr(node, name)
        if name != "variable" and not hasattr(_SavedTensor, "data"):
            value = old_torch.saved_in(node, name)
    except RuntimeError:  # backward() has freed it
        return
    for saved in value if isinstance(value, (tuple, list)) else (value,):
        if saved is None:
            continue
        data = saved if isinstance(saved, Tensor) else getattr(saved, "data", None)
        if data is not None:
            yield data


# -- why a storage stays ---------------------------------------------------------------------------


def _judged(
    entries: list[_Entry],
    small: list[torch.UntypedStorage],
    known: Known | None,
    exported: Collection[int] = (),
    compiled: Collection[int] = (),
) -> list[Found]:
    """The storages in `entries`, each with the reason if it cannot be moved.

    Storages that have no memory yet (address 0) are left out. `small` are further CPU storages,
    which may lie in the same memory. `known` is for `used_elsewhere`. `exported` are the keys of
    storages whose address something in C++ may have, and `compiled` of those that compiled code has.
    """
    sent = _sent_to_others()
    spans: dict[torch.device, list[tuple[int, int, int]]] = {}  # address, bytes, place in the list
    found: list[Found] = []
    not_ours: list[int] = []  # places in the list
    for storage, device, tensors in entries:
        size = storage.nbytes()
        why, address = _reason(storage, tensors, sent)
        if compiled and storage._cdata in compiled:
            why = why or COMPILED
        if exported and storage._cdata in exported:
            why = why or ARRAY
        if why == FOREIGN:
            not_ours.append(len(found))
        if address:
            spans.setdefault(storage.device, []).append((address, size, len(found)))
        if why or address:
            found.append(Found(storage, device, size, tuple(tensors), why, size))
    if not_ours:
        _look_closer(found, not_ours, known)
        if any(not found[number].stays for number in not_ours):
            spans.setdefault(torch.device("cpu"), []).extend(
                (address, other.nbytes(), -1)
                for other in small
                if other.nbytes() and not other.resizable() and (address := _address(other))
            )
    for number, shared_bytes in itertools.chain.from_iterable(map(_overlapping, spans.values())):
        entry = found[number]
        stays = OVERLAPS if entry.stays in ("", FOREIGN, ARRAY) else entry.stays
        found[number] = entry._replace(stays=stays, own_bytes=entry.bytes - shared_bytes)
    return found


def _look_closer(found: list[Found], numbers: list[int], known: Known | None) -> None:
    """Finds the reason of those CPU storages in `found` that torch can no longer resize.

    Some of them can be moved: private mappings of files, and memory whose NumPy array is gone.
    """
    files = None
    candidates: list[int] = []
    for number in numbers:
        storage = found[number].storage
        made_by = of_torch(storage) if storage.device.type == "cpu" else ""
        if made_by == "file":
            files = private_files() if files is None else files
            if is_within(storage.data_ptr(), storage.nbytes(), files):
                candidates.append(number)
            else:
                found[number] = found[number]._replace(stays=SHARED)
        elif made_by == "torch":
            candidates.append(number)
    groups = [(found[number].storage, found[number].tensors) for number in candidates]
    for number, used in zip(candidates, used_elsewhere(groups, known), strict=True):
        found[number] = found[number]._replace(stays=ARRAY if used else "")


def _address(storage: torch.UntypedStorage) -> int | None:
    """The address of `storage`; None if torch refuses to give it."""
    try:
        return storage.data_ptr()
    except RuntimeError:  # for example a storage of the meta device, or a guard
        return None


def _reason(
    storage: torch.UntypedStorage, tensors: list[Tensor], sent: Collection[int]
) -> tuple[str, int]:
    """Why `storage` cannot be moved (empty if it can), and its address (0: none or unknown)."""
    is_plain = _PLAIN.issuperset(map(type, tensors))
    if not is_plain and any(readable_class(tensor) is not type(tensor) for tensor in tensors):
        return "", 0  # the bytes of a dropped model: a guard without memory is in their place
    try:
        content = tensors[0] if tensors else _view(storage)
    except RuntimeError:  # a guard whose tensors are deleted
        return "", 0
    if has_lazy_copy(content):
        return COPY_ON_WRITE, torch._C._data_address(_view(storage, 1))  # data_ptr() would copy it
    address = _address(storage)
    if address is None:
        return UNREADABLE, 0
    if not address:
        return "", 0
    if not storage.resizable():
        return FOREIGN, address
    if storage.device.type == "cpu":
        return (SHARED if storage.is_shared() else ""), address
    # `is_shared()` is true on every CUDA card.
    return (SENT if storage._cdata in sent else ""), address


def _view(storage: torch.UntypedStorage, size: int = 0) -> Tensor:
    """The first `size` bytes of `storage`, without a read of `data_ptr()`."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (size,))


def _sent_to_others() -> frozenset[int]:
    """The keys of the storages that torch has sent to another process, or received from one."""
    reductions = sys.modules.get("torch.multiprocessing.reductions")
    if reductions is None:
        return frozenset()
    return frozenset(ref.cdata for ref in list(reductions.shared_cache.values()))


def _overlapping(spans: list[tuple[int, int, int]]) -> Iterable[tuple[int, int]]:
    """The storages that overlap in memory, as two `from_numpy()` of one array do.

    `spans` has the address, bytes and number of each storage on one device. The result has the
    number of each storage that overlaps another one, and how many of its bytes the storages before
    it have too. Spans of the number -1 are not in the result. torch does not know that two storages
    share bytes, so each would be moved separately. After that, a change of one storage would not
    change the other.
    """
    overlapping: dict[int, int] = {}
    end, last = 0, -1
    for address, size, number in sorted(spans):
        if address < end:
            overlapping.setdefault(last, 0)
            overlapping[number] = min(size, end - address)
        if address + size > end:
            end, last = address + size, number
    overlapping.pop(-1, None)
    return overlapping.items()


# -- the other users of a CPU storage's memory: a file, another process, NumPy, or none
#
# `storage.resizable()` is false for all memory that torch did not allocate, and for ever after one
# call of `Tensor.numpy()`. It does not tell whether a NumPy array still exists. So this part reads
# which of torch's functions will free the memory, and counts the references to the tensors. NumPy's
# arrays are invisible to the garbage collector, but each one holds a reference to its tensor.
#
# What is not understood counts as used by somebody else.

FOREIGN = "NumPy, DLPack, a file or another library uses the same memory"
ARRAY = "a NumPy array, or another library, uses the same memory"
SHARED = "other processes share its memory (share_memory_, or a file that is written)"
FEW = 32  # for so few tensors, a search for their holders is faster than a count of all references
_WORDS = 8  # of a storage's C++ object that are read; the object is larger

Known = dict[int, tuple[frozenset[tuple[int, int]], bool]]  # results of `used_elsewhere`


class _Layout(NamedTuple):
    """Where a storage's C++ object has its address, and the functions that free its memory."""

    place: int  # the word with the address; the freeing function and its argument follow
    torch: int  # frees memory that torch allocated
    file: int  # ends the mapping of a file
    slice: int  # releases the storage of which this one is a slice


def of_torch(storage: torch.UntypedStorage) -> str:
    """Returns "torch" for memory that torch allocated on the CPU, and "file" for a file it mapped.

    A slice of another storage is what that storage is. The result is empty if torch did not make
    the memory, as for `from_numpy`, or if this version of torch is not understood.
    """
    layout = _layout()
    if layout is None:
        return ""
    key = storage._cdata
    for _ in range(2):  # torch.load makes slices of the file
        _, freed_by, argument = _words(key)[layout.place : layout.place + 3]
        if freed_by != layout.slice:
            break
        key = argument
    return {layout.torch: "torch", layout.file: "file"}.get(freed_by, "")


def _words(key: int) -> list[int]:
    return list((ctypes.c_uint64 * _WORDS).from_address(key))


@functools.cache
def _layout() -> _Layout | None:
    """The layout of a storage, learned from storages whose content is known; None if not understood."""
    own = torch.empty(64, dtype=torch.uint8, device="cpu").untyped_storage()
    part = own[8:16]
    try:
        file = torch.UntypedStorage.from_file(sys.executable, False, 64)
    except (OSError, RuntimeError):  # then nothing is understood, and all of it stays
        return None
    address = own.data_ptr()
    words = _words(own._cdata)
    for place in range(_WORDS - 2):
        if words[place] == address == words[place + 2]:
            break
    else:
        return None
    of_part, of_file = _words(part._cdata), _words(file._cdata)
    is_understood = (
        of_part[place] == part.data_ptr()
        and of_part[place + 2] == own._cdata
        and of_file[place] == file.data_ptr()
        and len({words[place + 1], of_part[place + 1], of_file[place + 1]}) == 3
    )
    if not is_understood:
        return None
    return _Layout(place, words[place + 1], of_file[place + 1], of_part[place + 1])


def only_cut(bare: Sequence[torch.UntypedStorage]) -> set[int]:
    """The keys of those storages in the list `bare` that are files, and have no name in Python.

    If such a file has no tensors, only slices of it use its memory: torch.load and safetensors make
    one for each tensor. The caller must hold no other reference to the storages than the list.
    """
    every = [*bare, _Probe()]
    counts = [sys.getrefcount(counted) for counted in every]
    most = counts[-1] + 1 + cpp_keeps_python()  # the list `bare`, and C++
    return {
        storage._cdata
        for storage, count in zip(bare, counts, strict=False)
        if count <= most
        and torch._C._storage_Use_Count(storage._cdata) > 1
        and not storage.resizable()
        and of_torch(storage) == "file"
    }


def private_files() -> list[tuple[int, int]]:
    """The first address, and the one after the last, of each private mapping of a file, if shown."""
    found = []
    try:
        with open("/proc/self/maps", errors="replace") as lines:
            for line in lines:
                span, rights, _, _, inode, *_ = line.split(maxsplit=5)
                if rights.endswith("p") and inode != "0":
                    first, _, end = span.partition("-")
                    found.append((int(first, 16), int(end, 16)))
    except OSError:  # then no mapping counts as private
        return []
    return found


def is_within(address: int, size: int, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether `size` bytes at `address` are in one of `spans`, or in neighbouring ones."""
    end = address + size
    for first, after in spans:  # sorted, as the system lists them
        if first <= address < after:
            address = after
            if address >= end:
                return True
    return False


def used_elsewhere(
    groups: Sequence[tuple[torch.UntypedStorage, Sequence[Tensor]]], known: Known | None = None
) -> list[bool]:
    """Whether something that Python cannot list refers to a tensor of each storage in `groups`.

    Each group has a storage and all its tensors that were found. `known` has the results of an
    earlier call, and is updated. A result is used again while the tensors and their numbers of
    references are the same. Without it, all references of the process are counted: 0.1 s for
    230,000 objects.
    """
    signs = [frozenset((id(item), sys.getrefcount(item)) for item in group[1]) for group in groups]
    results: dict[int, bool] = {}
    if known is not None:
        for (storage, _), sign in zip(groups, signs, strict=True):
            before = known.get(storage._cdata)
            if before is not None and before[0] == sign:
                results[storage._cdata] = before[1]
    unknown = [group for group in groups if group[0]._cdata not in results]
    if unknown:
        results |= _counted(unknown)
    answers = [results[storage._cdata] for storage, _ in groups]
    if known is not None:
        known.clear()
        for (storage, _), sign, answer in zip(groups, signs, answers, strict=True):
            known[storage._cdata] = (sign, answer)
    return answers


def _counted(groups: Sequence[tuple[torch.UntypedStorage, Sequence[Tensor]]]) -> dict[int, bool]:
    """The result of `used_elsewhere` for each storage, by its key."""
    own: dict[int, dict[int, Tensor]] = {}
    for storage, tensors in groups:
        of_views = [tensor._base for tensor in tensors if tensor._is_view()]
        both = [*tensors, *(base for base in of_views if base is not None)]
        own[storage._cdata] = {id(tensor): tensor for tensor in both}
    hidden = hidden_references(tensor for tensors in own.values() for tensor in tensors.values())
    answers = {}
    for storage, _ in groups:
        known = own[storage._cdata]
        # Each tensor holds the storage once, and its Python object once more.
        more = torch._C._storage_Use_Count(storage._cdata) > len(known) + 1
        answers[storage._cdata] = more or any(hidden[key] > 0 for key in known)
    return answers


class _Probe:
    """An object to which only `hidden_references` refers."""


def hidden_references(objects: Iterable[Any]) -> dict[int, int]:
    """For each of `objects`, by its id: the references that Python's garbage collector cannot list.

    NumPy's arrays, C++ objects and functions that run hold them. That of a C++ object to its own
    Python object is left out.
    """
    every = (_Probe(), *{id(value): value for value in objects}.values())
    wanted = {id(value) for value in every}
    holders: Iterable[Any]
    if len(every) <= FEW:
        holders = chain.from_iterable(starmap(gc.get_referrers, (every,)))
    else:
        # The oldest first: a collection in the middle, by another thread, moves objects to an older
        # generation, where they would be counted twice. Those left out here count as hidden.
        generations = reversed(range(len(gc.get_count())))
        holders = chain.from_iterable(map(gc.get_objects, generations))
    held = map(id, chain.from_iterable(map(gc.get_referents, readable(holders))))
    # One call into C, so that no other thread changes the objects meanwhile. Before and after it, a
    # thread can drop a reference that is seen. The larger number of references is the safe one.
    collects = gc.isenabled()
    try:
        gc.disable()
        before = [*map(sys.getrefcount, every)]
        seen = Counter(list(filter(wanted.__contains__, held)))
        after = [*map(sys.getrefcount, every)]
    finally:
        if collects:
            gc.enable()
    hidden = {
        id(value): max(counts) - seen[id(value)] - _from_cpp(value)
        for value, *counts in zip(every, before, after, strict=True)
    }
    usual = hidden[id(every[0])]  # the references of this function's variables
    return {key: count - usual for key, count in hidden.items()}


def _from_cpp(value: Any) -> int:
    """The references to the Python object of `value` that its own C++ object holds."""
    uses = 0
    if isinstance(value, Tensor):
        uses = value._use_count()
    elif type(value) is torch.UntypedStorage:
        uses = torch._C._storage_Use_Count(value._cdata)
    return 1 if uses > 1 and cpp_keeps_python() else 0


@functools.cache
def cpp_keeps_python() -> bool:
    """Whether torch counts a C++ reference as a reference to the Python object (since 2.10)."""
    leaf = torch.ones(1, requires_grad=True, device="cpu")
    before = sys.getrefcount(leaf)
    with torch.enable_grad():
        result = leaf * 2
    return sys.getrefcount(leaf) > before and result is not None
