"""The modes of torch that a user's code may open, each as a context manager."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class RaisingFunctions(TorchFunctionMode):
    """Refuses every function of torch, `torch.device` too."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} was called in the user's mode")


class RaisingOperators(TorchDispatchMode):
    """Refuses every operator of torch."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} was called in the user's mode")


@contextlib.contextmanager
def default_device():
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def float64():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "function mode": RaisingFunctions, "dispatch mode": RaisingOperators,
    "set_default_device": default_device, "torch.device": lambda: torch.device("meta"),
    "set_default_dtype": float64, "inference_mode": torch.inference_mode, "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu"), "deterministic": deterministic,
}  # fmt: skip
