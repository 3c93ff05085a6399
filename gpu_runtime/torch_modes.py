"""Runs code of this package outside the modes of torch that the user's code has opened.

A mode changes what torch's functions do in a thread: `torch.set_default_device`, a
`TorchFunctionMode`, a `TorchDispatchMode`, `inference_mode`, `no_grad`, `autocast`, a transform of
`torch.func`. In a mode, a load could put weights on another card, and a search could raise.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)


def outside_modes(function: F) -> F:
    """The `function`, which runs outside the user's modes of torch.

    Within it, torch works as in a new thread, but no mode that it opens has an effect. Code that
    opens modes needs `with_own_modes` too. If torch is not imported, the function is only called.
    """

    @functools.wraps(function)
    def run(*args: Any, **named: Any) -> Any:
        c = getattr(sys.modules.get("torch"), "_C", None)
        if not hasattr(c, "_DisableFuncTorch"):  # torch is not imported, or not yet completely
            return function(*args, **named)
        # Each of these guards is entered and left in C, where no interrupt can take effect.
        with (
            c.DisableTorchFunction(),
            c._DisableFuncTorch(),
            c._InferenceMode(False),
            c._DisableAutocast(),
        ):
            if not c._dispatch_tls_is_dispatch_key_included(c.DispatchKey.Python):
                return function(*args, **named)
            from torch.utils._python_dispatch import _disable_current_modes

            with _disable_current_modes():
                return function(*args, **named)

    return run  # type: ignore[return-value]


def all_outside_modes(kind: C) -> C:
    """The class `kind`, whose public methods and properties run outside the user's modes; see `outside_modes`."""
    for name, value in list(vars(kind).items()):
        if name.startswith("_"):
            continue
        if isinstance(value, FunctionType):
            setattr(kind, name, outside_modes(value))
        elif isinstance(value, property) and value.fget is not None:
            setattr(kind, name, value.getter(outside_modes(value.fget)))
    return kind


@contextlib.contextmanager
def with_own_modes() -> Iterator[None]:
    """A context manager in which modes have an effect, but not those that the user has opened.

    Factories of modules and libraries open modes, such as `torch.device("meta")`.
    """
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    c = torch._C
    opened: list[Any] = []
    try:
        while c._len_torch_function_stack():
            opened.append(c._pop_torch_function_stack())
        with (
            c._InferenceMode(False),
            c._DisableAutocast(),
            _disable_current_modes(),
            c._EnableTorchFunction(),
        ):
            yield
    finally:
        while opened:
            c._push_on_torch_function_stack(opened.pop())
