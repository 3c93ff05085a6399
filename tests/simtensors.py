"""Tensors of the simulated accelerator (tests/simgpu.py), their storages, and the form in which
queued work keeps them.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch.utils import backend_registration

from gpu_runtime.backends.pytorch import old_torch
from gpu_runtime.units import MIB
from tests.simcard import DEFAULT, SHARED_POOL, Card, Full

CARDS = 4
CARD_BYTES = 64 * MIB


class SimOutOfMemory(torch.OutOfMemoryError):
    """The error of a full card: a `torch.OutOfMemoryError`, as on CUDA."""


cards = [Card(index, CARD_BYTES, 8 * CARD_BYTES) for index in range(CARDS)]
_lock = threading.RLock()  # one descriptor serves all threads


class Mode(threading.local):
    """Settings of the simulation for the calling thread."""

    def __init__(self) -> None:
        self.streams = [DEFAULT] * CARDS  # the current stream of each card
        self.pool = SHARED_POOL


mode = Mode()

# -- tensors whose storage is on a card ------------------------------------------------------------


class _DLTensor(ctypes.Structure):
    """DLPack 0.8, dlpack.h: DLManagedTensor with its DLTensor flattened into it."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
    ]  # fmt: skip


_EXTENSION_DEVICE = 12  # kDLExtDev, which torch reads as PrivateUse1
_descriptor = _DLTensor()  # used for every tensor: torch reads it once, and later only its deleter
_descriptor_shape = (ctypes.c_int64 * 1)()
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class _Held(NamedTuple):
    """The card's block under a storage."""

    card: int
    address: int
    size: int


_held: dict[int, _Held] = {}  # by the storage's address in C; freed storages are not in it


def _storage_freed(storage: int) -> None:
    held = _held.pop(storage, None)
    if held is not None and held.size:
        cards[held.card].free(held.address)


def _watch(storage: torch.UntypedStorage) -> None:
    # DLPack's own deleter is not used: it may run while an exception is raised, and Python must not
    # run then. torch keeps a storage's Python object for as long as the storage exists.
    weakref.finalize(storage, _storage_freed, storage._cdata).atexit = False


_swap = getattr(torch.UntypedStorage, "_swap_data_ptr_", old_torch.exchange)


def _swap_and_account(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Exchanges the data pointers of two storages, as torch does, and the allocator's blocks that
    are recorded for them.
    """
    with _lock:
        _swap(one, other)
        bytes_of_one, bytes_of_other = _held.pop(one._cdata, None), _held.pop(other._cdata, None)
        for storage, held in ((one, bytes_of_other), (other, bytes_of_one)):
            if held is not None:
                _held[storage._cdata] = held
                _watch(storage)


if hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
    torch.UntypedStorage._swap_data_ptr_ = _swap_and_account
_resizable = torch.UntypedStorage.resizable


def _is_resizable(storage: torch.UntypedStorage) -> bool:
    """Whether a storage can be resized: true for storages of these cards, otherwise torch's answer.

    torch returns False for storages that DLPack made. Storages of CUDA's allocator are resizable.
    """
    return storage._cdata in _held or _resizable(storage)


torch.UntypedStorage.resizable = _is_resizable


def placed(size: int, card: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """A tensor on that card with a new storage of `size` bytes, for the current stream.

    The bytes keep their earlier content. Raises SimOutOfMemory.
    """
    address = _allocated(size, card) if size else 0
    code, bits = _kind(dtype)
    with _lock:
        _descriptor_shape[0] = size // dtype.itemsize
        _descriptor.data, _descriptor.device_type = address, _EXTENSION_DEVICE
        _descriptor.device_id = card
        _descriptor.ndim, _descriptor.shape, _descriptor.lanes = 1, _descriptor_shape, 1
        _descriptor.code, _descriptor.bits = code, bits
        capsule = _new_capsule(ctypes.addressof(_descriptor), b"dltensor", None)
        tensor = torch._C._from_dlpack(capsule)
    storage = tensor.untyped_storage()
    _held[storage._cdata] = _Held(card, address, size)
    _watch(storage)
    return tensor


def _allocated(size: int, card: int) -> int:
    account = cards[card]
    try:
        return account.allocate(size, mode.streams[card], mode.pool)
    except Full:
        raise SimOutOfMemory(
            f"simgpu:{card} out of memory. Tried to allocate {size} bytes; {account.used_bytes} of "
            f"{account.capacity_bytes} are in use."
        ) from None


def _kind(dtype: torch.dtype) -> tuple[int, int]:
    """DLPack's code for a type, and the bits of one value."""
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


def over(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """A tensor over a card's storage, with the shape of the CPU tensor `like` over the same bytes."""
    return shaped(placed(0, storage.device.index, like.dtype), storage, like)


def shaped(tensor: torch.Tensor, storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    # The CPU's kernel only stores storage and shape. It reads no byte, and only compares devices.
    return torch.ops.aten.set_.source_Storage_storage_offset._op_dk(
        torch._C.DispatchKey.CPU, tensor, storage, like.storage_offset(), like.size(), like.stride()
    )


class Operand(NamedTuple):
    """A card's tensor in the form that queued work keeps: an address and a shape. It keeps no object alive."""

    address: int
    size: int  # bytes of the storage
    dtype: torch.dtype
    view: tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, sizes, strides
    conjugated: bool
    negated: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Operand:
        """The operand for the tensor's present address and shape."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()  # raises for a guard
        view = tensor.storage_offset(), tuple(tensor.size()), tuple(tensor.stride())
        size = storage.nbytes() if address else 0
        return cls(address, size, tensor.dtype, view, tensor.is_conj(), tensor.is_neg())

    def alias(self) -> torch.Tensor:
        """A CPU tensor over the bytes at this address."""
        storage = torch._C._construct_storage_from_data_pointer(self.address, CPU, self.size)
        alias = torch.empty(0, dtype=self.dtype).set_(storage, *self.view)
        alias = alias.conj() if self.conjugated else alias
        return torch._neg_view(alias) if self.negated else alias


CPU = torch.device("cpu")


def content_now(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU copy of the present bytes of a card's tensor. It waits for no work."""
    return Operand.of(tensor).alias().clone()


def adopted(result: torch.Tensor, card: int) -> torch.Tensor:
    """A card's tensor with a new storage, filled from the result of a CPU kernel."""
    content = result.untyped_storage()
    base = placed(content.nbytes(), card)
    if content.nbytes():
        ctypes.memmove(base.data_ptr(), content.data_ptr(), content.nbytes())
    return over(base.untyped_storage(), result)


def is_on_card(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "simgpu"
