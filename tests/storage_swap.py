"""The method that exchanges the bytes of two storages, for versions of torch before 2.12.

A machine with a card may have an older torch that nobody can replace, because it reaches no package index. Without
this method, models would move in another way there, and the tests of a real card would not test what users run.
"""

import ctypes
from collections.abc import Callable
from functools import partial

import torch

from gpu_runtime.backends.pytorch.swap import can_swap
from tests.storage_mark import library


def install() -> bool:
    """Gives torch the method `_swap_data_ptr_`, if it has none. Returns whether it had none.

    Compiling takes seconds, once for each version of torch. Raises OSError and CalledProcessError if
    the compiler is missing or fails.
    """
    if can_swap():
        return False
    exchange = ctypes.CDLL(str(library("storage_swap"))).exchange
    exchange.argtypes, exchange.restype = [ctypes.c_size_t, ctypes.c_size_t], None
    torch.UntypedStorage._swap_data_ptr_ = lambda one, other: exchange(one._cdata, other._cdata)
    torch._C._is_cow_tensor = partial(_is_cow, torch._C._is_cow_tensor)
    return True


def _is_cow(old: Callable[[torch.Tensor], bool], tensor: torch.Tensor) -> bool:
    """Whether `tensor` has a lazy copy. A guard has none. Newer versions say so, older ones raise."""
    try:
        return old(tensor)
    except RuntimeError:
        return False
