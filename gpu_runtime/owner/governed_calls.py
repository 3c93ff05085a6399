"""Calls of a governed module pin it for their length, and restore it first."""

from __future__ import annotations

import contextlib
import copyreg
import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .resident import Resident

_residents: weakref.WeakKeyDictionary[Any, Resident] = weakref.WeakKeyDictionary()


def govern_calls(value: Any, resident: Resident) -> None:
    """Makes a call of a module, its `forward` and its `generate` pin it for the length of the call, and bring it back
    if away.

    The module's class becomes a subclass of itself. An attribute on the instance would be simpler, but a deep copy
    would carry it along and call the original's weights.
    """
    if hasattr(value, "_calls_under"):  # a proxy of ours: it pins by itself
        value._calls_under = resident.calling
        return
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.nn.Module):
        return
    if not hasattr(type(value), "_gpu_base"):
        value.__class__ = _governed_class(type(value))
    _residents[value] = resident


def release_calls(value: Any) -> None:
    """Gives a module that leaves our care its own class back; a proxy of ours governs its calls no more."""
    if hasattr(value, "_calls_under"):
        value._calls_under = contextlib.nullcontext
        return
    base = getattr(type(value), "_gpu_base", None)
    if base is not None:
        value.__class__ = base
        _residents.pop(value, None)


@functools.cache
def _governed_class(base: type) -> type:
    body: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_gpu_base": base,
        "__reduce_ex__": _reduce_as_base,
    }
    # A call as well as its `forward`: what brings inputs to a model's card asks first where that is now.
    for name in ("__call__", "forward", "generate"):
        original = getattr(base, name, None)
        if callable(original):
            body[name] = _pinning(original)
    return type(base.__name__, (base,), body)


def _pinning(original: Callable[..., Any]) -> Callable[..., Any]:
    inner = original.__name__ == "forward"

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        resident = _residents.get(self)
        if resident is None:  # a copy of a governed module is nobody's
            return original(self, *args, **kwargs)
        if inner and resident.pinned_by(
            threading.get_ident()
        ):  # by the call that has led here: it is one use
            return original(self, *args, **kwargs)
        with resident.calling():
            return original(self, *args, **kwargs)

    return call


def _reduce_as_base(self: Any, protocol: int) -> Any:
    """Pickles and copies as the class that the user wrote."""
    governed = type(self)
    made, args, *rest = super(governed, self).__reduce_ex__(protocol)
    if (
        args and args[0] is governed and made is copyreg.__newobj__
    ):  # pickle insists on the object's own class there
        made, args = copyreg._reconstructor, (governed._gpu_base, object, None)
    return made, args, *rest
