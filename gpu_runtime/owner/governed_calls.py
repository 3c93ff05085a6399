"""A call of a governed module pins its model, and first restores the model if it is away.

A governed module is a torch module whose memory this package manages. A resident is the object for
one managed model. The pin ends with the call. Calls of the module's parts also pin the model, and
so do methods that read or replace all weights. Without the pin, a copy or a saved file of a model
that is away would contain no weights.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from ..threads import imported
from .training import Training, watch_steps

_CALLS = ("__call__", "forward", "generate")
# Methods that read or replace weights. `to`, `half`, `cuda` and others call `_apply`. The function
# that `apply` calls usually writes, such as one that initialises weights.
_WHOLE = (
    "state_dict",
    "load_state_dict",
    "save_pretrained",
    "push_to_hub",
    "resize_token_embeddings",
    "_apply",
    "apply",
    "__reduce_ex__",
    "__deepcopy__",
)


class Governed(Protocol):
    """The members of a resident that a call needs."""

    calling: Callable[[], Any]
    training: Training

    def called_by(self, thread: int) -> bool: ...

    def pinned_by(self, thread: int) -> bool: ...

    def is_dropped(self) -> bool: ...

    def forwarded(self, result: Any) -> None: ...


_governed: weakref.WeakKeyDictionary[Any, Governed] = weakref.WeakKeyDictionary()
_loading = threading.local()  # its `resident` is the model that `_load_for_change` is loading


def govern_calls(value: Any, resident: Governed, dropped: bool = False) -> None:
    """From now on, each call of the module `value` or of one of its parts pins `resident`.

    `dropped` is true if the model's tensors hold no bytes. Such a model is loaded by a call, and
    before a tensor or part of it is replaced or deleted. On simulated cards, a read of a tensor
    loads it too.

    The class of the module is replaced by a subclass. A `forward` attribute on the module would be
    simpler. But a deep copy of the module would copy the attribute, and a call of the copy would
    use the original's weights. A part that another resident already governs stays with that
    resident.
    """
    if hasattr(value, "_calls_under"):  # our own proxies pin the model themselves
        value._calls_under = resident.calling
        return
    torch = imported("torch")
    if torch is None or not isinstance(value, torch.nn.Module):
        return
    watch_steps(_trained_by)
    for part in list(value.modules()):
        if part is value or _governed.get(part) in (None, resident):
            _govern(part, resident, dropped)


def _govern(module: Any, resident: Governed, dropped: bool) -> None:
    kind: Any = type(module)
    base = vars(kind).get("_gpu_base", kind)
    try:
        module.__class__ = _dropped_class(base) if dropped else _governed_class(base)
    except TypeError:  # its class allows no subclass, or no other class for its objects
        return
    _governed[module] = resident


def release_calls(value: Any) -> None:
    """Gives the module `value` and its parts their own classes back.

    If `value` is a proxy of this package, calls of the proxy no longer pin the model.
    """
    if hasattr(value, "_calls_under"):
        value._calls_under = contextlib.nullcontext
        return
    resident = _governed.get(value) if hasattr(type(value), "_gpu_base") else None
    if resident is None:
        return
    for module, owner in list(_governed.items()):
        if owner is resident:
            del _governed[module]
            if "_gpu_base" in vars(type(module)):
                module.__class__ = type(module)._gpu_base


def _trained_by(optimizer: Any) -> list[Any]:
    """The residents of the models that have a parameter of `optimizer`."""
    its = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found: dict[int, Any] = {}
    for module, resident in list(_governed.items()):
        if any(id(p) in its for p in module._parameters.values()):
            found[id(resident)] = resident
    return list(found.values())


def _named_like(base: type) -> dict[str, Any]:
    return {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_gpu_base": base,
        "_gpu_reloaded": functools.partial(_move_to_class, base),
    }


def _move_to_class(old: type, new: type) -> None:
    """Makes the governed modules of the class `old` modules of the class `new`.

    `%autoreload` does this with plain modules after their file has changed.
    """
    for module, resident in list(_governed.items()):
        kind = type(module)
        if vars(kind).get("_gpu_base") is old:
            module.__class__ = new
            _govern(module, resident, dropped=kind is _dropped_class(old))


@functools.cache
def _governed_class(base: type) -> type:
    body: dict[str, Any] = {
        **_named_like(base),
        "zero_grad": _clearing(base.zero_grad),  # type: ignore[attr-defined]
    }
    # Both `__call__` and `forward` pin the model. Code may call `forward` directly. And `__call__`
    # runs hooks before `forward`. A hook that moves inputs to the model's card must find the model there.
    for name in _CALLS:
        original = getattr(base, name, None)
        if callable(original):
            body[name] = _pinning(original, noted=True)
    own = {"__reduce_ex__": _reduce_as_base, "__deepcopy__": _copy_as_base}
    for name in _WHOLE:
        original = own.get(name) or getattr(base, name, None)
        if callable(original):
            body[name] = _pinning(original)
    return type(base.__name__, (base,), body)


def _pinning(original: Callable[..., Any], noted: bool = False) -> Callable[..., Any]:
    """A method that runs `original` while the model is on its device.

    If `noted` is true, the result is passed to the resident's `forwarded`, which detects training.
    """

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        resident = _governed.get(self)
        # A copy is not governed and needs no pin. A call inside another call is pinned already.
        if resident is None or resident.called_by(threading.get_ident()):
            return original(self, *args, **kwargs)
        if not noted and resident.pinned_by(threading.get_ident()):
            return original(self, *args, **kwargs)  # a block of this thread pins the model already
        with resident.calling():
            result = original(self, *args, **kwargs)
            if noted:
                resident.forwarded(result)
            return result

    return call


@functools.cache
def _dropped_class(base: type) -> type:
    """The subclass of `base` for a module whose tensors hold no bytes.

    The class is slow, because each access to a tensor runs a check. On simulated cards, the tensors
    are CPU tensors, which would read as zeros without the check. On real cards the check of a read
    does nothing, and the read raises an error; see `backends/pytorch/swap.py`.
    """
    governed: Any = _governed_class(base)

    def getattribute(self: Any, name: str) -> Any:
        if name in self.__dict__["_parameters"] or name in self.__dict__["_buffers"]:
            _load_for_read(self)
        return governed.__getattr__(self, name)

    def named_members(self: Any, *args: Any, **kwargs: Any) -> Any:
        _load_for_read(self)
        return governed._named_members(self, *args, **kwargs)

    def set_attribute(self: Any, name: str, value: Any) -> None:
        _load_for_change(self, name)
        governed.__setattr__(self, name, value)

    def delete_attribute(self: Any, name: str) -> None:
        _load_for_change(self, name)
        governed.__delattr__(self, name)

    body = {
        **_named_like(base),
        "__getattr__": getattribute,
        "__setattr__": set_attribute,
        "__delattr__": delete_attribute,
        "_named_members": named_members,
    }
    return type(base.__name__, (governed,), body)


def _load_for_read(module: Any) -> None:
    """Loads the dropped model of `module` if its tensors are CPU tensors, which read as zeros."""
    resident = _governed.get(module)
    if resident is not None and resident.is_dropped() and _lies_on_cpu(module):
        with resident.calling():
            pass


def _load_for_change(module: Any, name: str) -> None:
    """Loads the dropped model of `module` before its tensor or part `name` is replaced or deleted.

    A load fills the tensors that the module had when its bytes were dropped. If one of these
    tensors were replaced or deleted before the load, its bytes would have no place.
    """
    has = module.__dict__
    kinds = ("_parameters", "_buffers", "_modules")
    if not any(name in has.get(kind, ()) for kind in kinds):
        return
    resident = _governed.get(module)
    is_loading = getattr(_loading, "resident", None)
    if resident is None or resident is is_loading or not resident.is_dropped():
        return
    _loading.resident = resident
    try:
        with resident.calling():
            pass
    finally:
        _loading.resident = is_loading


def _lies_on_cpu(module: Any) -> bool:
    for part in module.modules():
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None:
                return tensor.device.type == "cpu"
    return False


def _clearing(original: Callable[..., Any]) -> Callable[..., Any]:
    """The module's `zero_grad`, changed to report the end of a training step."""

    @functools.wraps(original)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        resident = _governed.get(self)
        if resident is None:
            return original(self, *args, **kwargs)
        pinned = resident.calling() if resident.training.in_script else contextlib.nullcontext()
        with pinned:  # as in `watch_zero_grad`
            result = original(self, *args, **kwargs)
        resident.training.stepped()
        return result

    return zero_grad


def _reduce_as_base(self: Any, protocol: int) -> Any:
    """For pickle and copy: describes the module as an object of the class that the user wrote."""
    kind = type(self)
    # A library may have replaced the class by a subclass of the governed class, as torch does for
    # parametrizations.
    governed: Any = next(base for base in kind.__mro__ if "_gpu_base" in vars(base))
    made, args, *rest = governed._gpu_base.__reduce_ex__(self, protocol)
    if args and args[0] is kind is governed and made is copyreg.__newobj__:  # type: ignore[attr-defined]
        # With `__newobj__`, pickle requires the object's own class, so another constructor is used.
        made = copyreg._reconstructor  # type: ignore[attr-defined]
        args = (governed._gpu_base, object, None)
    return made, args, *rest


def _copy_as_base(self: Any, memo: dict[int, Any]) -> Any:
    """A deep copy of the module, as an object of the class that the user wrote."""
    own = getattr(type(self)._gpu_base, "__deepcopy__", None)
    if own is not None:
        return own(self, memo)
    return copy._reconstruct(self, memo, *self.__reduce_ex__(4))  # type: ignore[attr-defined]
