"""What torch before 2.12 has no calls for: the exchange of storages, and the tensors that a graph saved.

Both are read and written where the C++ objects of torch keep them. A layout is used only after it was
proven, once a process, on objects made here. If it is not as expected, nothing is written.
"""

from __future__ import annotations

import collections
import ctypes
import functools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ...threads import outside_modes

WORD = 8  # bytes
POINTER, SIZE = 16, 48  # c10::StorageImpl: at these offsets it has its data pointer and its size
ALLOCATORS = (64, 72)  # its allocator; since 2.13 a materializer is before it
HOOKS = (56, 64)  # SavedVariable: the pointer to its pack and unpack hooks, or 0; 64 in 2.4
VALUE = 16  # a Python object of pybind11: the pointer to its C++ object

# The C library's function. `PyDLL` keeps the interpreter's lock during the call.
_memmove = ctypes.PyDLL(None).memmove
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove.restype = None
exhaust = partial(collections.deque, maxlen=0)  # takes all items of an iterator, within C


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


# -- the exchange of two storages ------------------------------------------------------------------


@functools.cache
@outside_modes
def exchanged_fields() -> range | None:
    """The offsets in a c10::StorageImpl of all that belongs to its bytes; None if they are not known.

    That is the pointer with its deleter, the device, the size, the flags and the allocator.
    """
    ours = [torch.full((size,), size, dtype=torch.uint8) for size in (40, 96)]
    pages = bytearray(64)
    borrowed = torch.frombuffer(pages, dtype=torch.uint8)
    own, other, foreign = (tensor.untyped_storage() for tensor in (*ours, borrowed))
    for storage in (own, other, foreign):
        here = storage._cdata
        if (_word(here + POINTER), _word(here + SIZE)) != (storage.data_ptr(), storage.nbytes()):
            return None
    for offset in ALLOCATORS:
        first, second, none = (_word(each._cdata + offset) for each in (own, other, foreign))
        if first == second and first and not none:
            fields = range(POINTER, offset + WORD)
            return fields if _is_exchanged(fields, own, foreign) else None
    return None


def _is_exchanged(fields: range, ours: torch.UntypedStorage, foreign: torch.UntypedStorage) -> bool:
    """Whether `ours` and memory that is not torch's change places, and nothing else changes."""

    def seen(storage: torch.UntypedStorage) -> tuple[Any, ...]:
        return storage.data_ptr(), storage.resizable(), bytes(storage.tolist())

    before = seen(ours), seen(foreign)
    exhaust(exchanging(ours, foreign, fields))
    after = seen(foreign), seen(ours)
    refusing = torch.empty(0, dtype=torch.uint8).set_(ours)
    torch._C._set_throw_on_mutable_data_ptr(refusing)
    exhaust(exchanging(ours, foreign, fields))
    try:
        foreign.data_ptr()
    except RuntimeError:  # the refusal has moved with the bytes
        refused = True
    else:
        refused = False
    return refused and before == after and seen(ours) == before[0] and ours.resizable()


STEPS = 3  # items of `exchanging`


def exchanging(
    storage: torch.UntypedStorage, other: torch.UntypedStorage, fields: range | None = None
) -> Iterator[None]:
    """An iterator whose three items exchange the bytes of two storages, like `_swap_data_ptr_`.

    Each item is a call into C, and there is no error. The interpreter runs no code between two items
    that C takes. A garbage collection needs a new object: none is made, since the first call leaves
    the tuple of its arguments for the others.
    """
    fields = fields or exchanged_fields()
    assert fields is not None
    here, there, size = storage._cdata + fields.start, other._cdata + fields.start, len(fields)
    kept = ctypes.create_string_buffer(size)
    return map(_memmove, (kept, here, there), (here, there, kept), (size,) * 3)


def exchange(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Exchanges the bytes of two storages."""
    exhaust(exchanging(storage, other))


# -- who owns a tensor -----------------------------------------------------------------------------


def owned_by_python(tensor: torch.Tensor) -> bool:
    """Whether Python has a reference to the C++ object of `tensor`. Else C++ owns the Python object.

    The latter is so in torch before 2.12, once only C++ refers to the tensor. Its Python object is
    still listed by the garbage collector.
    """
    return not (_owners_change() and _is_borrowed(id(tensor)))


def _is_borrowed(key: int) -> int:
    return ctypes.c_uint8.from_address(key + VALUE).value


@functools.cache
@outside_modes
def _owners_change() -> bool:
    """Whether the Python object of a tensor begins with a byte that is 1 if C++ owns it, else 0."""
    base = torch.ones(2)
    view, key = base[1:], id(base)
    before = _is_borrowed(key)
    del base  # now only its view refers to it
    return (before, _is_borrowed(id(view)), _is_borrowed(key)) == (0, 0, 1)


# -- the tensors that a graph saved ----------------------------------------------------------------


def saved_in(node: Any, raw_name: str) -> tuple[Any, ...]:
    """The tensors that the `node` of a graph saved under `raw_name`, such as `_raw_saved_self`.

    Empty where torch would run an unpack hook to return them. What the pack hook made is an object
    of Python, which the garbage collector knows.
    """
    raw = getattr(node, raw_name)
    hooks = _hooks()
    some = raw if isinstance(raw, tuple) else (raw,)
    if hooks is None or any(_pointer(saved, hooks) for saved in some if saved is not None):
        return ()
    name = raw_name.removeprefix("_raw")
    value = getattr(node, name if hasattr(type(node), name) else name.removeprefix("_"))
    return value if isinstance(value, tuple) else (value,)


def _pointer(saved: Any, offset: int) -> int:
    """The pointer at `offset` in the SavedVariable of a `SavedTensor`."""
    return _word(_word(id(saved) + VALUE) + offset)


@functools.cache
@outside_modes
def _hooks() -> int | None:
    """The offset in a SavedVariable of the pointer to its hooks; None if it is not known."""
    with torch.enable_grad():
        weight = torch.ones(1, requires_grad=True)
        results = [weight.exp(), weight * weight]
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            results.append(weight * weight)
    names = ("_raw_saved_result", "_raw_saved_self", "_raw_saved_self")
    saved = [getattr(value.grad_fn, name, None) for value, name in zip(results, names, strict=True)]
    if None in saved:
        return None
    # SavedVariable begins with its tensor. With hooks it has none there, but one that is undefined.
    _, plain, hooked = (_pointer(raw, 0) for raw in saved)
    if not plain == weight._cdata != hooked:
        return None
    for offset in HOOKS:
        if [bool(_pointer(raw, offset)) for raw in saved] == [False, False, True]:
            return offset
    return None
