"""A simulated accelerator for torch: devices `simgpu:0` to `simgpu:3`, each with its own memory and limit.

It runs what CUDA runs: `torch.empty(device=…)`, copies, views, storages, autograd, accelerate's hooks. So on
a machine without any card a model can be spread over two cards, moved to two others, or stopped half-way by
a full card, and it is really executed. Only tests import this.

How it works. torch 2.13 lets Python register a backend under the dispatch key PrivateUse1
(`torch.utils.backend_registration`, private and experimental). A tensor here is a plain `torch.Tensor` with
that key whose storage points at ordinary RAM. It is made through DLPack, the only way into torch that takes a
device and a pointer. When the storage is freed, its bytes are subtracted from the card's account. Every
operator falls back to one function. It runs the CPU's kernel on CPU tensors over the same bytes (`_alias`),
and puts new results on the card (`_adopted`). Operands on two cards are refused with CUDA's error message.

What differs from CUDA: such a tensor cannot replace a CPU tensor through `.data`
(`torch._has_compatible_shallow_copy_type` returns False). So `backends/pytorch/storages.py` swaps their
implementations, as `nn.Module.to` does for such accelerators. Backward passes run on `simgpu:0` only, since
the autograd engine assumes a single card. There are no streams, and nothing is asynchronous.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils import backend_registration

from gpu_runtime.devices.probe import Probe
from gpu_runtime.devices.process_memory import Memory
from gpu_runtime.facts import HOST, Device
from gpu_runtime.units import MIB

CARDS = 4
CARD_BYTES = 64 * MIB


class SimOutOfMemory(torch.OutOfMemoryError):
    """The error of a full card: a `torch.OutOfMemoryError`, as on CUDA."""


class _Card:
    """The account of one card's memory."""

    def __init__(self) -> None:
        self.capacity_bytes = CARD_BYTES
        self.used_bytes = self.peak_bytes = 0


_cards = [_Card() for _ in range(CARDS)]
_backing: dict[int, torch.Tensor] = {}  # address of a storage -> the CPU tensor with its bytes
_lock = threading.RLock()  # a storage may be freed while another is made


def used_bytes(card: int) -> int:
    """Bytes in use on that card."""
    return _cards[card].used_bytes


def peak_bytes(card: int) -> int:
    """The most bytes in use on that card since `limited` began."""
    return _cards[card].peak_bytes


@contextmanager
def limited(**capacities: int) -> Iterator[None]:
    """Limits cards inside the block: `limited(card1=3 * MIB)`; the others keep their size."""
    sizes = {int(name.removeprefix("card")): size for name, size in capacities.items()}
    try:
        for index, card in enumerate(_cards):
            card.capacity_bytes, card.peak_bytes = sizes.get(index, CARD_BYTES), card.used_bytes
        yield
    finally:
        for card in _cards:
            card.capacity_bytes = CARD_BYTES


class SimProbe(Probe):
    """A probe with these cards. As on a real card, torch allocates their memory."""

    def __init__(self, host_bytes: int = 256 * MIB) -> None:
        cards = (
            Device(
                f"simgpu:{i}", CARD_BYTES, "simulated accelerator", f"SIMGPU-{i}", i, simulated=True
            )
            for i in range(CARDS)
        )
        super().__init__((*cards, Device(HOST, host_bytes, "simulated RAM", simulated=True)))

    def _memory(self, device: Device) -> Memory:
        return (
            super()._memory(device)
            if device.is_host
            else Memory(device.id, None, simulated=False, torch=device.id)
        )

    def used(self) -> dict[str, int]:
        held = super().used()
        return held | {f"simgpu:{i}": card.used_bytes for i, card in enumerate(_cards)}


# -- tensors whose storage is on a card ------------------------------------------------------------


class _DLTensor(ctypes.Structure):
    """DLPack 0.8, dlpack.h: DLManagedTensor with its DLTensor flattened into it."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_EXTENSION_DEVICE = 12  # kDLExtDev, which torch reads as PrivateUse1
_descriptor = _DLTensor()  # used for every tensor: torch reads it once, and later only its deleter
_descriptor_shape = (ctypes.c_int64 * 1)()
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = (
    ctypes.py_object,
    [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
)


# A storage, by its address in C -> its card and its bytes. Freed storages are not in it.
_held: dict[int, tuple[int, torch.Tensor]] = {}


def _storage_freed(storage: int) -> None:
    with _lock:
        if storage not in _held:
            return
        card, raw = _held.pop(storage)
        _cards[card].used_bytes -= raw.nbytes
        if raw.nbytes:
            del _backing[raw.data_ptr()]


def _watch(storage: torch.UntypedStorage) -> None:
    # Not DLPack's own deleter: it may run while an exception is raised, and Python must not run then.
    # torch keeps a storage's Python object for as long as the storage exists.
    weakref.finalize(storage, _storage_freed, storage._cdata).atexit = False


_swap = torch.UntypedStorage._swap_data_ptr_


def _swap_and_account(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Exchanges two data pointers, as torch does, and what this account knows of the two storages."""
    with _lock:
        _swap(one, other)
        bytes_of_one, bytes_of_other = _held.pop(one._cdata, None), _held.pop(other._cdata, None)
        for storage, held in ((one, bytes_of_other), (other, bytes_of_one)):
            if held is not None:
                _held[storage._cdata] = held
                _watch(storage)


torch.UntypedStorage._swap_data_ptr_ = _swap_and_account


def _placed(raw: torch.Tensor, card: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """A tensor on that card whose storage is the bytes of `raw`, [nbytes] uint8. Raises SimOutOfMemory."""
    code, bits = _kind(dtype)
    with _lock:
        account = _cards[card]
        if account.used_bytes + raw.nbytes > account.capacity_bytes:
            raise SimOutOfMemory(
                f"simgpu:{card} out of memory. Tried to allocate {raw.nbytes} bytes; {account.used_bytes} of "
                f"{account.capacity_bytes} are in use."
            )
        account.used_bytes += raw.nbytes
        account.peak_bytes = max(account.peak_bytes, account.used_bytes)
        if raw.nbytes:
            _backing[raw.data_ptr()] = raw
        _descriptor_shape[0] = raw.nbytes // dtype.itemsize
        _descriptor.data, _descriptor.device_type, _descriptor.device_id = (
            raw.data_ptr(),
            _EXTENSION_DEVICE,
            card,
        )
        _descriptor.ndim, _descriptor.shape, _descriptor.lanes = 1, _descriptor_shape, 1
        _descriptor.code, _descriptor.bits = code, bits
        tensor = torch._C._from_dlpack(
            _new_capsule(ctypes.addressof(_descriptor), b"dltensor", None)
        )
        storage = tensor.untyped_storage()
        _held[storage._cdata] = card, raw
        _watch(storage)
        return tensor


def _kind(dtype: torch.dtype) -> tuple[int, int]:
    """DLPack's code for a type, and its bits."""
    bits = 8 * dtype.itemsize
    if dtype == torch.bool:
        return 6, bits
    if dtype == torch.bfloat16:
        return 4, bits
    if dtype.is_complex:
        return 5, bits
    if dtype.is_floating_point:
        return 2, bits
    return (0 if dtype.is_signed else 1), bits


def _over(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """A tensor over a card's storage, with the shape of the CPU tensor `like` over the same bytes."""
    view = _placed(_nothing, storage.device.index, like.dtype)
    return _shaped(view, storage, like)


def _shaped(
    tensor: torch.Tensor, storage: torch.UntypedStorage, like: torch.Tensor
) -> torch.Tensor:
    # The CPU's kernel only stores storage and shape. It reads no byte, and only compares devices.
    return torch.ops.aten.set_.source_Storage_storage_offset._op_dk(
        torch._C.DispatchKey.CPU, tensor, storage, like.storage_offset(), like.size(), like.stride()
    )


_nothing = torch.empty(0, dtype=torch.uint8)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the bytes of a card's tensor."""
    raw = _backing.get(tensor.untyped_storage().data_ptr(), _nothing)
    alias = torch.empty(0, dtype=tensor.dtype).set_(
        raw.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )
    alias = alias.conj() if tensor.is_conj() else alias
    return torch._neg_view(alias) if tensor.is_neg() else alias


def _adopted(result: torch.Tensor, card: int) -> torch.Tensor:
    """A CPU kernel's new result as a tensor on that card, with a new storage there."""
    raw = torch.empty(0, dtype=torch.uint8).set_(result.untyped_storage())
    base = _placed(raw, card)
    return _over(base.untyped_storage(), result)


def _is_on_card(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "simgpu"


def _refuse_several_devices(op: Any, leaves: list[Any]) -> None:
    """Raises CUDA's error if the operands are on two cards, or on a card and the CPU."""
    on_cards = [leaf for leaf in leaves if _is_on_card(leaf)]
    on_cpu = [
        leaf
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.dim()
    ]
    several_cards = len({tensor.device.index for tensor in on_cards}) > 1
    if several_cards or (on_cards and on_cpu and op not in _MIXED):
        found = sorted({str(tensor.device) for tensor in (*on_cards, *on_cpu)})
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, "
            f"{found[0]} and {found[1]}! ({op})"
        )


def _run(op: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operator, computed by the CPU on the same bytes."""
    leaves, _ = pytree.tree_flatten((args, kwargs))
    _refuse_several_devices(op, leaves)
    here = [leaf for leaf in leaves if _is_on_card(leaf)]
    card, to_card = (here[0].device.index if here else 0), True
    if kwargs.get("device") is not None:
        wanted = torch.device(kwargs["device"])
        to_card = wanted.type == "simgpu"
        card = wanted.index or 0
        kwargs = {**kwargs, "device": torch.device("cpu")}
    kwargs.pop("pin_memory", None)
    # id of an alias -> the alias, and its tensor
    aliases: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in here}

    def unwrap(leaf: Any) -> Any:
        if not _is_on_card(leaf):
            return leaf
        alias = _alias(leaf)
        aliases[id(alias)] = alias, leaf
        return alias

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not to_card:
            return leaf
        if id(leaf) in aliases:
            return _updated(*aliases[id(leaf)], card)
        own = leaf.untyped_storage()
        storage = storages.get(own.data_ptr()) if own.nbytes() else None
        return _over(storage, leaf) if storage is not None else _adopted(leaf, card)

    args, kwargs = pytree.tree_map(unwrap, (args, kwargs))
    return pytree.tree_map(wrap, op(*args, **kwargs))


def _updated(alias: torch.Tensor, tensor: torch.Tensor, card: int) -> torch.Tensor:
    """The card's tensor, with the shape and the storage that an operator gave its alias."""
    if alias.untyped_storage().nbytes() > tensor.untyped_storage().nbytes():
        enlarged = _adopted(alias, card)  # the operator enlarged out=
        return _shaped(tensor, enlarged.untyped_storage(), alias)
    if alias.size() != tensor.size() or alias.stride() != tensor.stride():
        return _shaped(tensor, tensor.untyped_storage(), alias)
    return tensor


def _copy_from(
    source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    """Copies between cards, to a card and from a card; `copy_` calls it."""
    one, other = (_alias(t) if t.device.type == "simgpu" else t for t in (source, target))
    other.copy_(one)
    return target


def _set_storage(tensor: torch.Tensor, storage: torch.UntypedStorage, *shape: Any) -> torch.Tensor:
    shape = shape or (0, (storage.nbytes() // tensor.dtype.itemsize,), (1,))
    return torch.ops.aten.set_.source_Storage_storage_offset._op_dk(
        torch._C.DispatchKey.CPU, tensor, storage, *shape
    )


# -- registration with torch -----------------------------------------------------------------------


class _Module(backend_registration._DummyBackendModule):
    """`torch.simgpu`."""

    def device_count(self) -> int:
        return CARDS

    def set_device(self, card: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def empty_cache(self) -> None:
        pass

    def _lazy_init(self) -> None:
        pass


backend_registration._setup_privateuseone_for_python_backend("simgpu", backend_module=_Module())
_MIXED = {
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put_.default,
}  # CUDA also accepts indices on the CPU
_every, _some = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
_every.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")
for _name in ("empty.memory_format", "empty_strided", "_to_copy"):
    _packet, _, _overload = _name.partition(".")
    _op = getattr(getattr(torch.ops.aten, _packet), _overload or "default")
    _some.impl(_name, lambda *args, _op=_op, **kwargs: _run(_op, args, kwargs), "PrivateUse1")
_some.impl("_copy_from", _copy_from, "PrivateUse1")
_some.impl("set_.source_Storage_storage_offset", _set_storage, "PrivateUse1")
_some.impl("set_.source_Storage", _set_storage, "PrivateUse1")
