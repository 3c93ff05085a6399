"""Refuses modules that cannot be moved safely, each with the reason.

A module cannot be moved safely if it has state outside its parameters and buffers, or if other code
stores the addresses of its tensors. After a move such a module would no longer work.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor, nn

from ...errors import CannotGovern
from . import swap
from .storages import Group, TensorSlot, grouped

_PLAIN = (Tensor, nn.Parameter)
_HIDDEN_STATE = "which keeps state outside its parameters"
_COMPILED = "it was compiled by torch.compile, and compiled code keeps references to its tensors"
_WRAPPERS = {  # name of the class -> why
    "DistributedDataParallel": "it is wrapped in DistributedDataParallel, whose buckets store its addresses",
    "DataParallel": "it is wrapped in DataParallel, which itself copies it to cards",
    "FullyShardedDataParallel": "it is wrapped in FSDP, which itself moves its shards",
    "FSDPModule": "it is wrapped in FSDP (fully_shard), which itself moves its shards",
    "OptimizedModule": _COMPILED,
    "ScriptModule": "it is TorchScript, whose tensors cannot be rebound from Python",
}


def check(
    name: str,
    module: nn.Module,
    found: list[TensorSlot],
    *,
    device_types: Collection[str] = ("cpu", "cuda"),
    is_ours: Callable[[nn.Module], bool] = lambda part: False,
) -> None:
    """Raises CannotGovern, with the reason, if the model `name` cannot be moved safely.

    `found` are the tensors of `module`. `device_types` are the torch device types that are
    governed. `is_ours(part)` returns whether this package installed the accelerate hook of `part`.
    """
    why = _of_modules(module, is_ours)
    why = why or _of_tensors(found, device_types) or _of_storages(grouped(found))
    if why:
        raise CannotGovern(f"{name} cannot be governed: {why}.", name=name, why=why)


def _of_modules(module: nn.Module, is_ours: Callable[[nn.Module], bool]) -> str | None:
    parts = module.named_modules()
    reasons = (_of_part(part, f" (at {path})" if path else "", is_ours) for path, part in parts)
    return next(filter(None, reasons), None)


def _of_part(part: nn.Module, at: str, is_ours: Callable[[nn.Module], bool]) -> str | None:
    """The reason why the `part` of a module cannot be moved, or None. `at` is its path as text."""
    classes = type(part).__mro__
    for kind in classes:
        if kind.__name__ in _WRAPPERS:
            return _WRAPPERS[kind.__name__] + at
    if part.__dict__.get("_compiled_call_impl") is not None:
        return _COMPILED + at
    if hasattr(part, "_hf_hook") and not is_ours(part):
        return (
            f"accelerate hooks move it already{at}; load it without device_map, or first:\n"
            f"  accelerate.hooks.remove_hook_from_module(module, recurse=True)"
        )
    forward = part.__dict__.get("forward")
    if "make_graphed_callables" in getattr(forward, "__qualname__", ""):
        return f"it was captured in a CUDA graph, which stores its addresses{at}"
    if any(kind.__module__.split(".")[0] == "bitsandbytes" for kind in classes):
        return f"it is quantised by bitsandbytes ({type(part).__name__}{at}), {_HIDDEN_STATE}"
    if type(part).__module__.startswith("torch.ao.nn.quantized"):
        return f"it is quantised by torch.ao ({type(part).__name__}{at}), {_HIDDEN_STATE}"
    return None


def _of_tensors(found: Iterable[TensorSlot], device_types: Collection[str]) -> str | None:
    reasons = (_of_tensor(slot.name, slot.tensor, device_types) for slot in found)
    return next(filter(None, reasons), None)


def _of_tensor(name: str, tensor: Tensor, device_types: Collection[str]) -> str | None:
    """The reason why a module with the tensor called `name` cannot be moved, or None."""
    kind = type(tensor)
    library = kind.__module__.split(".")[0]
    if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
        return f"{name} has no shape yet; call the module once first"
    if library == "bitsandbytes":
        return f"it is quantised by bitsandbytes ({name} is a {kind.__name__}), {_HIDDEN_STATE}"
    if kind not in _PLAIN:
        return f"{name} is a {library} {kind.__name__}, a tensor made of other tensors"
    if tensor.is_meta:
        return f"{name} is on the meta device and has no data; load its weights first"
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return f"{name} is not a plain strided tensor ({tensor.layout})"
    if tensor.device.type not in device_types:
        governed = " and ".join(sorted(device_types))
        return f"{name} is on {tensor.device}; only {governed} are governed here"
    if tensor.device.type == "cpu" and tensor.is_shared():
        return (
            f"{name} is in memory shared with other processes (share_memory_), "
            f"which would not see a move"
        )
    return None


def _of_storages(groups: list[Group]) -> str | None:
    """The reason if two storages of `groups` overlap, as two from_numpy() of one array do.

    Moved separately, a change of one would no longer change the other.
    """
    spans = sorted(
        (
            group.storage.device.index or 0,
            swap.address(group.slots[0].tensor),
            group.nbytes,
            group.slots[0].name,
        )
        for group in groups
        if group.nbytes
    )
    for (card, start, size, one), (next_card, next_start, _, other) in itertools.pairwise(spans):
        if card == next_card and next_start < start + size:
            return f"{one} and {other} overlap in memory, but are not in one storage"
    return None
