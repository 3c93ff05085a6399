"""Exchanges the data pointers of storages, so that their bytes leave, return or are dropped.

A storage (c10::StorageImpl) is the object that a weight shares with its views, with tied weights,
and with autograd graphs that saved the weight. Only the pointer changes, so all these objects stay
valid. If the bytes leave, a guard replaces them: memory of the same size without content. Shape,
dtype and device stay. An access raises an error; only a plain read on the CPU gets zeros. So the
tensors of a guard on the CPU are replaced by `unreadable` ones where Python could read them.

This module searches and copies nothing. The caller passes the storages, and has copied their bytes.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...compat import call
from ...version import OLDEST_TORCH
from . import old_torch

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.13 names it


def _mark() -> Callable[[int, str], None] | None:
    """torch's function that makes each access to a storage raise a given text; None in CPU builds."""
    return getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)


def can_swap() -> bool:
    """Whether the data pointers of storages can be exchanged: by torch 2.12 and later, else by us."""
    return _native() is not None or (
        torch.__version__ >= OLDEST_TORCH and old_torch.exchanged_fields() is not None
    )


def _native() -> Callable[[torch.UntypedStorage, torch.UntypedStorage], None] | None:
    """torch's method that exchanges the data pointers of two storages; torch 2.12 and later have it."""
    return getattr(torch.UntypedStorage, "_swap_data_ptr_", None)


def why_not(devices: Iterable[torch.device] = ()) -> str:
    """Why no bytes can leave these `devices` unnoticed; empty if they can.

    Without the exchange, tensors of a module could be rebound. Their views, and graphs that saved
    them, would keep the old bytes: a later write would not be seen there.
    """
    if not can_swap():
        if torch.__version__ < OLDEST_TORCH:
            return f"torch {torch.__version__} is older than {OLDEST_TORCH}"
        return (
            f"gpu-console does not know how torch {torch.__version__} keeps the memory of tensors"
        )
    if _mark() is None and any(device.type == "cuda" for device in devices):
        return f"torch {torch.__version__} cannot guard bytes that have left a card"
    return ""


def can_guard(device: torch.device) -> bool:
    """Whether a guard can replace bytes that left `device`."""
    return can_swap() and (device.type == "cpu" or _mark() is not None)


def guard(size: int, device: torch.device, sentence: str) -> torch.UntypedStorage:
    """A storage that claims `size` bytes on `device` and has no memory.

    On an accelerator every access raises RuntimeError with the text `sentence`. On the CPU a write,
    `numpy()`, `data_ptr()` and `torch.save` raise torch's own error, and a plain read gets zeros;
    see `unreadable`. On the CPU the text `sentence` is not used, because such an error would end
    the process in `is_shared()`.
    """
    if device.type != "cpu":
        empty = torch._C._construct_storage_from_data_pointer(0, device, size)
        _mark()(empty._cdata, sentence)
        return empty
    if size == 0:
        return torch.UntypedStorage(0)
    # No code touches these pages, so the system gives them no memory.
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    tensor = torch.frombuffer(pages, dtype=torch.uint8)
    refuse_writes(tensor)
    return tensor.untyped_storage()


def has_lazy_copy(content: Tensor) -> bool:
    """Whether the storage of `content` is copied at its first write. That of a guard is not."""
    try:
        return torch._C._is_cow_tensor(content)
    except RuntimeError:  # torch before 2.12, for a guard
        return False


def refuse_writes(content: Tensor) -> None:
    """From now on, a write into the CPU storage of `content` raises, and reads go on.

    In-place operations, `out=`, `numpy()`, `data_ptr()` and DLPack raise torch's error, whose text
    begins with `fault_texts.WRITE_REFUSED`. The refusal belongs to the bytes: an exchange moves it with them.
    torch has no call that ends it.
    """
    torch._C._set_throw_on_mutable_data_ptr(content)


def refuses_writes(content: Tensor) -> bool:
    """Whether writes into the CPU storage of `content` raise; see `refuse_writes`."""
    if content.device.type != "cpu" or has_lazy_copy(content):
        return False
    try:
        content.untyped_storage().data_ptr()
    except RuntimeError:  # it has no other reason for an ordinary CPU storage
        return True
    return False


def address(content: Tensor) -> int:
    """The address of the first byte of the storage of `content`, also if it refuses writes."""
    return torch._C._data_address(content)  # without the tensor's offset


# -- tensors whose bytes were dropped, on the CPU --------------------------------------------------

# Attributes and methods of a tensor that do not read its bytes.
_WITHOUT_BYTES = frozenset(
    "shape dtype device layout requires_grad requires_grad_ is_leaf grad grad_fn retains_grad ndim "
    "is_cpu is_cuda is_meta is_sparse is_quantized is_nested is_mps is_xpu itemsize nbytes names "
    "_version output_nr _base _is_view size stride numel nelement dim ndimension element_size "
    "storage_offset is_contiguous is_floating_point is_complex is_signed is_inference is_conj "
    "is_neg get_device __len__ __hash__ register_hook".split()
)


@functools.lru_cache(maxsize=256)
def _unreadable_class(base: type, sentence: str) -> type:
    """A subclass of `base` for tensors without bytes: a use of their content raises `sentence`."""

    def __torch_function__(
        cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__
        if name in ("__get__", "__set__"):  # of a property
            name = func.__self__.__name__
        if name not in _WITHOUT_BYTES:
            raise RuntimeError(sentence)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    body = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__torch_function__": classmethod(__torch_function__),
        "_gpu_readable": base,
    }
    return type(base)(base.__name__, (base,), body)


def unreadable(tensor: Tensor, sentence: str) -> Callable[[], Any]:
    """A call for `at_once`, after which every use of the content of `tensor` raises `sentence`.

    `tensor` is a plain tensor or a Parameter on the CPU, whose bytes a guard replaces. Its class
    becomes a subclass, because a guard on the CPU cannot refuse reads. C++ code, such as an
    autograd graph, still reads zeros, so a tensor of a graph must keep its bytes.
    """
    kind = _unreadable_class(readable_class(tensor), sentence)
    return partial(setattr, tensor, "__class__", kind)


def readable_class(tensor: Tensor) -> type:
    """The class that `tensor` has or had before it became unreadable."""
    return vars(type(tensor)).get("_gpu_readable", type(tensor))


def readable(tensor: Tensor) -> Callable[[], Any]:
    """A call for `at_once` that undoes `unreadable`."""
    return partial(setattr, tensor, "__class__", readable_class(tensor))


class Exchange:
    """An exchange of the bytes of several storages, which can be undone.

    The caller prepares it with `put` and `take`, and passes its `calls` to `at_once`. If a call
    fails, `undo` reverts the calls before it. The old bytes are freed with this object.
    """

    def __init__(self) -> None:
        self.pairs: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        self._refusing: list[Tensor] = []
        self._marks: list[Callable[[], Any]] = []
        self._made: list[None] = []  # one entry for each exchange that was made

    def put(
        self,
        storage: torch.UntypedStorage,
        content: torch.UntypedStorage,
        *,
        refuses: Tensor | None = None,
    ) -> None:
        """Prepares the exchange of the bytes of `storage` and `content`.

        If `refuses` is a tensor of `content`, `storage` then refuses writes. Raises ValueError if
        they differ in device or size.
        """
        if storage.device != content.device or storage.nbytes() != content.nbytes():
            raise ValueError(
                f"{storage.nbytes()} bytes on {storage.device} cannot be exchanged with "
                f"{content.nbytes()} on {content.device}"
            )
        self.pairs.append((storage, content))
        if refuses is not None:
            self._refusing.append(refuses)

    def take(self, storage: torch.UntypedStorage, sentence: str) -> None:
        """Prepares to replace the bytes of `storage` by a `guard` with this `sentence`."""
        device = storage.device
        self.put(storage, guard(storage.nbytes(), device, sentence))
        if device.type != "cpu":
            # The text of the error does not move with the guard's pointer, so it is set here again.
            self._marks.append(partial(_mark(), storage._cdata, sentence))

    @property
    def calls(self) -> list[Callable[[], Any]]:
        """The prepared exchanges, as calls for `at_once`. Each call of it does its part for all storages."""
        return [
            partial(
                old_torch.exhaust, map(torch._C._set_throw_on_mutable_data_ptr, self._refusing)
            ),
            partial(old_torch.exhaust, map(self._made.append, _swaps(self.pairs))),
            partial(old_torch.exhaust, map(call, self._marks)),
        ]

    def undo(self) -> None:
        """Reverts the exchanges that were made. A repeated call of `undo` does nothing."""
        made = self.pairs[: len(self._made) // (1 if _native() else old_torch.STEPS)]
        at_once([partial(old_torch.exhaust, _swaps(made[::-1])), self._made.clear])


def _swaps(pairs: Sequence[tuple[torch.UntypedStorage, torch.UntypedStorage]]) -> Iterable[Any]:
    """An iterator that exchanges the bytes of `pairs` one after the other, within C.

    It makes no object that the garbage collector counts. Else a collection, and a finaliser of the user's,
    could run while some of the bytes are exchanged and others are not.
    """
    native = _native()
    if native is not None:
        return itertools.starmap(native, pairs)
    return itertools.chain.from_iterable([old_torch.exchanging(*pair) for pair in pairs])


def at_once(calls: Iterable[Callable[[], Any]]) -> None:
    """Makes all `calls`, with no instruction of Python, and so no interrupt, between two of them."""
    old_torch.exhaust(map(call, calls))


# The C library's function. `PyDLL` keeps the interpreter's lock during the call.
_memcmp = ctypes.PyDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memcmp.restype = ctypes.c_int
_version_of = torch._C.TensorBase._version.__get__  # type: ignore[attr-defined]
_nbytes_of = torch.UntypedStorage.nbytes


class Unchanged:
    """A proof, at an exchange, that the sources are what was copied.

    They must lie where they lay, with as many bytes. In host memory the bytes are compared. On a
    card the version counters of its tensors are compared, because nothing there can be read within
    one call into C: the caller compares digests.
    """

    def __init__(self, sources: Sequence[Tensor] = (), tensors: Iterable[Tensor] = ()) -> None:
        """`sources` are whole storages, [nbytes] uint8. The versions of `tensors` must stay."""
        self._sources = list(sources)
        self._storages = [source.untyped_storage() for source in self._sources]
        self._addresses = [*map(torch._C._data_address, self._sources)]
        self._sizes = [*map(_nbytes_of, self._storages)]
        self._tensors = [tensor for tensor in tensors if not tensor.is_inference()]
        self._versions = [*map(_version_of, self._tensors)]
        self._copies: list[int] = []

    def compare(self, copies: Iterable[Tensor]) -> None:
        """The bytes of the sources, in host memory, must equal those of `copies`."""
        self._copies = [*map(torch._C._data_address, copies)]

    def then(self, calls: Iterable[Callable[[], Any]]) -> bool:
        """Makes all `calls` if nothing has changed, and returns whether it made them.

        Comparison and calls are one call into C, as in `at_once`. Each of `calls` must return None
        or something empty.
        """
        made: list[bool] = []
        differences = itertools.chain(
            map(operator.ne, map(_version_of, self._tensors), self._versions),
            map(operator.or_, *self._elsewhere()),
            self._different(),
            map(call, [*calls, partial(made.append, True)]),
        )
        old_torch.exhaust(itertools.takewhile(operator.not_, differences))
        return bool(made)

    def _elsewhere(self) -> tuple[Iterable[bool], Iterable[bool]]:
        """For each source, whether its address has changed, and whether its size has."""
        addresses = map(torch._C._data_address, self._sources)
        return (
            map(operator.ne, addresses, self._addresses),
            map(operator.ne, map(_nbytes_of, self._storages), self._sizes),
        )

    def _different(self) -> Iterable[int]:
        """For each source with a copy, a number that is not 0 if their bytes differ."""
        return map(_memcmp, self._addresses, self._copies, self._sizes)

    def elsewhere(self) -> bool:
        """Whether a source has another address or size than it had, after `resize_` for example."""
        return any(map(operator.or_, *self._elsewhere()))

    def changed(self) -> list[int]:
        """The numbers of the sources whose bytes differ from their copies now."""
        return [number for number, differs in enumerate(self._different()) if differs]
