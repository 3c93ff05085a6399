"""A simulated accelerator for torch: devices `simgpu:0` to `simgpu:3`, each with its own memory and out-of-memory
error.

What runs on it is what would run on CUDA: `torch.empty(device=…)`, copies, views, storages, autograd, accelerate's
hooks. So a model that is spread over two cards, moved to two others, or stopped half-way by a full card is really
executed, on a machine without any card. Only tests import this.

How it works. torch 2.13 lets Python register a backend under the dispatch key PrivateUse1
(`torch.utils.backend_registration`, private and experimental). A tensor here is a plain `torch.Tensor` with that key
whose storage points at ordinary RAM. It is made through DLPack, the one way into torch that takes a device and a
pointer; when the storage dies, its bytes are given back to the card's account. Every operator
falls back to one function, which runs the CPU's kernel on CPU tensors over the same bytes (`_alias`), and gives what is
new a place on the card (`_adopted`). Operands on two cards are refused with CUDA's words, as CUDA refuses them.

What differs from CUDA: such tensors cannot take the place of a CPU tensor through `.data`
(`torch._has_compatible_shallow_copy_type` says no), so `storages.py` swaps their implementations instead, as
`nn.Module.to` does for other people's accelerators. Backward passes run on `simgpu:0` only, since the engine believes
that there is one such card. There are no streams, and nothing is asynchronous.
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
    """What a card raises that has no room; `torch.OutOfMemoryError`, as on CUDA."""


class _Card:
    """The account of one card's memory."""

    def __init__(self) -> None:
        self.capacity_bytes = CARD_BYTES
        self.used_bytes = self.peak_bytes = 0


_cards = [_Card() for _ in range(CARDS)]
_backing: dict[int, torch.Tensor] = {}  # address of a storage -> the CPU bytes it lies in
_lock = threading.RLock()  # a storage may die while another is being made


def used_bytes(card: int) -> int:
    return _cards[card].used_bytes


def peak_bytes(card: int) -> int:
    """The most that was used since `limited` began."""
    return _cards[card].peak_bytes


@contextmanager
def limited(**capacities: int) -> Iterator[None]:
    """Cards of these sizes for a while: `limited(card1=3 * MIB)`; the others keep theirs."""
    sizes = {int(name.removeprefix("card")): size for name, size in capacities.items()}
    try:
        for index, card in enumerate(_cards):
            card.capacity_bytes, card.peak_bytes = sizes.get(index, CARD_BYTES), card.used_bytes
        yield
    finally:
        for card in _cards:
            card.capacity_bytes = CARD_BYTES


class SimProbe(Probe):
    """These cards as the product's probe: torch hands their memory out, as it does a real card's."""

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


# -- tensors whose storage lies on a card -----------------------------------------------------------------------------


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
_letter = (
    _DLTensor()
)  # the one through which all are made: torch reads it once, and later whether it has a deleter
_letter_shape = (ctypes.c_int64 * 1)()
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = (
    ctypes.py_object,
    [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
)


def _storage_died(card: int, raw: torch.Tensor) -> None:
    with _lock:
        _cards[card].used_bytes -= raw.nbytes
        if raw.nbytes:
            del _backing[raw.data_ptr()]


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
        _letter_shape[0] = raw.nbytes // dtype.itemsize
        _letter.data, _letter.device_type, _letter.device_id = (
            raw.data_ptr(),
            _EXTENSION_DEVICE,
            card,
        )
        _letter.ndim, _letter.shape, _letter.lanes = 1, _letter_shape, 1
        _letter.code, _letter.bits = code, bits
        tensor = torch._C._from_dlpack(_new_capsule(ctypes.addressof(_letter), b"dltensor", None))
        # Not DLPack's own deleter: it may run while an error is on its way, and Python must not run then. torch keeps
        # a storage's Python object for as long as the storage lives.
        weakref.finalize(tensor.untyped_storage(), _storage_died, card, raw).atexit = False
        return tensor


def _kind(dtype: torch.dtype) -> tuple[int, int]:
    """DLPack's code for that type, and its bits."""
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
    """A tensor over a card's storage, shaped as the CPU tensor that lies in the same bytes."""
    view = _placed(_nothing, storage.device.index, like.dtype)
    return _shaped(view, storage, like)


def _shaped(
    tensor: torch.Tensor, storage: torch.UntypedStorage, like: torch.Tensor
) -> torch.Tensor:
    # The CPU's kernel only notes storage and shape; it looks at no byte, and at the device only to compare.
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
    """What a CPU kernel made, as a tensor of that card: of a storage there already, or of a new one."""
    raw = torch.empty(0, dtype=torch.uint8).set_(result.untyped_storage())
    base = _placed(raw, card)
    return _over(base.untyped_storage(), result)


def _run(op: Any, args: Any, kwargs: Any) -> Any:
    """The operator, done by the CPU on the same bytes."""
    leaves, _ = pytree.tree_flatten((args, kwargs))
    here = [
        leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.device.type == "simgpu"
    ]
    cards = {tensor.device.index for tensor in here}
    strangers = [
        leaf
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.dim()
    ]
    if len(cards) > 1 or (here and strangers and op not in _MIXED):
        found = sorted({str(t.device) for t in (*here, *strangers)})
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, "
            f"{found[0]} and {found[1]}! ({op})"
        )
    wanted = kwargs.get("device")
    to_card = torch.device(wanted).type == "simgpu" if wanted is not None else True
    card = (
        (torch.device(wanted).index or 0)
        if wanted is not None and to_card
        else next(iter(cards), 0)
    )
    if wanted is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    kwargs.pop("pin_memory", None)
    ours: dict[
        int, tuple[torch.Tensor, torch.Tensor]
    ] = {}  # id of an alias -> it, and the tensor it stands for
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in here}

    def unwrap(leaf: Any) -> Any:
        if not (isinstance(leaf, torch.Tensor) and leaf.device.type == "simgpu"):
            return leaf
        alias = _alias(leaf)
        ours[id(alias)] = alias, leaf
        return alias

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not to_card:
            return leaf
        if id(leaf) in ours:
            alias, tensor = ours[id(leaf)]
            if (
                alias.untyped_storage().nbytes() > tensor.untyped_storage().nbytes()
            ):  # out= was made larger
                fresh = _adopted(alias, card)
                return _shaped(tensor, fresh.untyped_storage(), alias)
            if alias.size() != tensor.size() or alias.stride() != tensor.stride():
                return _shaped(tensor, tensor.untyped_storage(), alias)
            return tensor
        storage = (
            storages.get(leaf.untyped_storage().data_ptr())
            if leaf.untyped_storage().nbytes()
            else None
        )
        return _over(storage, leaf) if storage is not None else _adopted(leaf, card)

    args, kwargs = pytree.tree_map(unwrap, (args, kwargs))
    return pytree.tree_map(wrap, op(*args, **kwargs))


def _copy_from(
    source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    """Between cards, to a card and from one: where `copy_` ends."""
    one, other = (_alias(t) if t.device.type == "simgpu" else t for t in (source, target))
    other.copy_(one)
    return target


def _set_storage(tensor: torch.Tensor, storage: torch.UntypedStorage, *shape: Any) -> torch.Tensor:
    shape = shape or (0, (storage.nbytes() // tensor.dtype.itemsize,), (1,))
    return torch.ops.aten.set_.source_Storage_storage_offset._op_dk(
        torch._C.DispatchKey.CPU, tensor, storage, *shape
    )


# -- torch learns of it -----------------------------------------------------------------------------------------------


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
}  # CUDA too takes indices from the CPU
_every, _some = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
_every.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")
for _name in ("empty.memory_format", "empty_strided", "_to_copy"):
    _packet, _, _overload = _name.partition(".")
    _op = getattr(getattr(torch.ops.aten, _packet), _overload or "default")
    _some.impl(_name, lambda *args, _op=_op, **kwargs: _run(_op, args, kwargs), "PrivateUse1")
_some.impl("_copy_from", _copy_from, "PrivateUse1")
_some.impl("set_.source_Storage_storage_offset", _set_storage, "PrivateUse1")
_some.impl("set_.source_Storage", _set_storage, "PrivateUse1")
