"""Calls of a governed module pin it while they run, and restore it first if it is away."""

from __future__ import annotations

import contextlib
import copyreg
import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol


class Governed(Protocol):
    """What a call needs of the model: the block to run in, and whether a thread pins it."""

    calling: Callable[[], Any]

    def pinned_by(self, thread: int) -> bool: ...


_governed: weakref.WeakKeyDictionary[Any, Governed] = weakref.WeakKeyDictionary()


def govern_calls(value: Any, resident: Governed) -> None:
    """Makes a call of the module `value`, its `forward` and its `generate` pin `resident`.

    The module's class becomes a subclass of itself. An attribute on the instance would be simpler,
    but a deep copy would carry it along and call the original's weights.
    """
    if hasattr(value, "_calls_under"):  # a proxy of ours pins by itself
        value._calls_under = resident.calling
        return
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.nn.Module):
        return
    if not hasattr(type(value), "_gpu_base"):
        value.__class__ = _governed_class(type(value))  # type: ignore[arg-type]
    _governed[value] = resident


def release_calls(value: Any) -> None:
    """Gives the module `value` its own class back; a proxy of ours no longer pins."""
    if hasattr(value, "_calls_under"):
        value._calls_under = contextlib.nullcontext
        return
    base = getattr(type(value), "_gpu_base", None)
    if base is not None:
        value.__class__ = base
        _governed.pop(value, None)


@functools.cache
def _governed_class(base: type) -> type:
    body: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_gpu_base": base,
        "__reduce_ex__": _reduce_as_base,
    }
    # `__call__` as well as `forward`: hooks that move inputs to the model's card first look where
    # the model is.
    for name in ("__call__", "forward", "generate"):
        original = getattr(base, name, None)
        if callable(original):
            body[name] = _pinning(original)
    return type(base.__name__, (base,), body)


def _pinning(original: Callable[..., Any]) -> Callable[..., Any]:
    is_forward = original.__name__ == "forward"

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        resident = _governed.get(self)
        if resident is None:  # a copy of a governed module is not governed
            return original(self, *args, **kwargs)
        if is_forward and resident.pinned_by(threading.get_ident()):
            # The call that led here has pinned it: both are one use.
            return original(self, *args, **kwargs)
        with resident.calling():
            return original(self, *args, **kwargs)

    return call


def _reduce_as_base(self: Any, protocol: int) -> Any:
    """Pickles and copies the module as the class that the user wrote."""
    governed = type(self)
    made, args, *rest = super(governed, self).__reduce_ex__(protocol)
    if args and args[0] is governed and made is copyreg.__newobj__:  # type: ignore[attr-defined]
        # pickle requires the object's own class there, so rebuild without `__newobj__`.
        made = copyreg._reconstructor  # type: ignore[attr-defined]
        args = (governed._gpu_base, object, None)
    return made, args, *rest
