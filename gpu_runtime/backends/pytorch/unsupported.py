"""Which modules cannot be moved safely, and why: each kind is refused by its name.

A module whose state hides outside its parameters, or whose addresses others have noted, would come back broken.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor, nn

from ...errors import CannotGovern
from .storages import Group, Slot, grouped

_PLAIN = (Tensor, nn.Parameter)
_OUTSIDE = "which keeps state outside its parameters"
_WRAPPERS = {
    "DistributedDataParallel": "it is wrapped in DistributedDataParallel, whose buckets hold its addresses",
    "DataParallel": "it is wrapped in DataParallel, which copies it to cards by itself",
    "FullyShardedDataParallel": "it is wrapped in FSDP, which moves its shards by itself",
    "FSDPModule": "it is wrapped in FSDP (fully_shard), which moves its shards by itself",
    "OptimizedModule": "it was compiled by torch.compile, and compiled code holds on to its tensors",
    "ScriptModule": "it is TorchScript, which holds its tensors out of Python's sight",
}


def check(
    name: str,
    module: nn.Module,
    found: list[Slot],
    *,
    known: Collection[str] = ("cpu", "cuda"),
    ours: Callable[[nn.Module], bool] = lambda part: False,
) -> None:
    """Raises CannotGovern, with the reason and what to do, for a module that cannot be moved safely.

    `known` are the types of torch devices that we govern; `ours` tells accelerate hooks that we put on ourselves.
    """
    why = _of_modules(module, ours) or _of_tensors(found, known) or _of_storages(grouped(found))
    if why:
        raise CannotGovern(f"{name} cannot be governed: {why}.", name=name, why=why)


def _of_modules(module: nn.Module, ours: Callable[[nn.Module], bool]) -> str | None:
    for path, part in module.named_modules():
        at = f" (at {path})" if path else ""
        kinds = {kind.__name__: kind for kind in type(part).__mro__}
        wrapper = next((kind for kind in _WRAPPERS if kind in kinds), None)
        if wrapper:
            return _WRAPPERS[wrapper] + at
        if part.__dict__.get("_compiled_call_impl") is not None:
            return (
                f"it was compiled by torch.compile, and compiled code holds on to its tensors{at}"
            )
        if hasattr(part, "_hf_hook") and not ours(part):
            return (
                f"accelerate hooks move it already{at}; load it without device_map, or first:\n"
                f"  accelerate.hooks.remove_hook_from_module(module, recurse=True)"
            )
        if "make_graphed_callables" in getattr(part.__dict__.get("forward"), "__qualname__", ""):
            return f"it was captured in a CUDA graph, which has noted its addresses{at}"
        if any(kind.__module__.split(".")[0] == "bitsandbytes" for kind in kinds.values()):
            return f"it is quantised by bitsandbytes ({type(part).__name__}{at}), {_OUTSIDE}"
        if type(part).__module__.startswith("torch.ao.nn.quantized"):
            return f"it is quantised by torch.ao ({type(part).__name__}{at}), {_OUTSIDE}"
    return None


def _of_tensors(found: Iterable[Slot], known: Collection[str]) -> str | None:
    for slot in found:
        tensor, kind = slot.tensor, type(slot.tensor)
        if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
            return f"{slot.name} has no shape yet; call the module once first"
        if kind.__module__.split(".")[0] == "bitsandbytes":
            return f"it is quantised by bitsandbytes ({slot.name} is a {kind.__name__}), {_OUTSIDE}"
        if kind not in _PLAIN:
            return f"{slot.name} is a {kind.__module__.split('.')[0]} {kind.__name__}, a tensor made of other tensors"
        if tensor.is_meta:
            return f"{slot.name} is on the meta device and has no data; load its weights first"
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            return f"{slot.name} is not a plain strided tensor ({tensor.layout})"
        if tensor.device.type not in known:
            return f"{slot.name} lies on {tensor.device}; only {' and '.join(sorted(known))} are known here"
        if tensor.device.type == "cpu" and tensor.is_shared():
            return f"{slot.name} lies in memory shared with other processes (share_memory_), who would not follow"
    return None


def _of_storages(groups: list[Group]) -> str | None:
    """Storages that overlap unknown to each other, as two from_numpy() of one array do: they would part ways."""
    spans = sorted(
        (
            group.storage.device.index or 0,
            group.storage.data_ptr(),
            group.nbytes,
            group.slots[0].name,
        )
        for group in groups
        if group.nbytes
    )
    for (card, start, size, one), (next_card, next_start, _, other) in itertools.pairwise(spans):
        if card == next_card and next_start < start + size:
            return f"{one} and {other} lie in the same memory, but not in one storage"
    return None
