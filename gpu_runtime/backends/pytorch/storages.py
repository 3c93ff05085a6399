"""The storages under a module's tensors, and how they travel.

What lies on a device is storages, not tensors: tied weights, views and shared buffers are one storage and travel once.
A journey has two phases. First everything is copied; a failure or an interrupt there frees the copies, and nothing has
happened. Then every tensor is rebound to its copy in one call into C, which no signal handler can interrupt. The
Python objects, Parameters included, stay what they are.
"""

from __future__ import annotations

import collections
import operator
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...devices.process_memory import Memory
from ...units import MIB

LEG_BYTES = 64 * MIB  # so often a load reports its progress, and can be interrupted
_set_data = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]
_set_grad = torch._C.TensorBase.grad.__set__  # type: ignore[attr-defined]


class Slot(NamedTuple):
    """A tensor that somebody refers to, and what it is to the model."""

    name: str
    kind: str  # "parameter", "buffer", "grad", or "state" of an optimizer
    tensor: Tensor


class Group(NamedTuple):
    """One storage, and all tensors that lie in it."""

    storage: torch.UntypedStorage
    slots: tuple[Slot, ...]

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes()

    @property
    def bytes(self) -> Tensor:
        """The storage's content, [nbytes], uint8."""
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)

    @property
    def layout(self) -> tuple[tuple[Any, ...], ...]:
        """Which tensors lie where in it, as far as two loads of one source agree."""
        return tuple(
            (
                slot.name,
                slot.kind,
                slot.tensor.dtype,
                slot.tensor.storage_offset(),
                tuple(slot.tensor.size()),
                slot.tensor.stride(),
            )
            for slot in self.slots
        )


def slots(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[Slot]:
    """Every parameter, buffer, gradient and optimizer state of the module, each tensor once."""
    seen: set[int] = set()
    for slot in _every(module, optimizer):
        if id(slot.tensor) not in seen:
            seen.add(id(slot.tensor))
            yield slot


def _every(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[Slot]:
    parameters: list[Slot] = []
    for prefix, part in module.named_modules():
        dot = prefix + "." if prefix else ""
        parameters += (
            Slot(dot + name, "parameter", p)
            for name, p in part._parameters.items()
            if p is not None
        )
        yield from (
            Slot(dot + name, "buffer", b) for name, b in part._buffers.items() if b is not None
        )
    yield from parameters
    for name, _, parameter in parameters:
        if parameter.grad is not None:
            yield Slot(name, "grad", parameter.grad)
        state = optimizer.state.get(parameter) if optimizer is not None else None
        yield from (Slot(f"{name}:{key}", "state", tensor) for key, tensor in _tensors_in(state))


def _tensors_in(value: Any, key: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield key, value
    elif isinstance(value, (dict, list, tuple)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for name, inner in pairs:
            yield from _tensors_in(inner, f"{key}.{name}" if key else str(name))


def grouped(found: Iterable[Slot]) -> list[Group]:
    """The storages that these tensors lie in, in order of first appearance."""
    by_storage: dict[int, tuple[torch.UntypedStorage, list[Slot]]] = {}
    for slot in found:
        storage = slot.tensor.untyped_storage()
        by_storage.setdefault(storage._cdata, (storage, []))[1].append(slot)
    return [Group(storage, tuple(slots)) for storage, slots in by_storage.values()]


def nbytes(groups: Iterable[Group]) -> int:
    return sum(group.nbytes for group in groups)


def copied(
    groups: Sequence[Group],
    memories: Sequence[Memory],
    host: Memory,
    progress: Callable[[int, int], None] | None = None,
) -> list[Tensor]:
    """Phase one: each storage's content in its memory, as a [nbytes] uint8 tensor and a storage of its own.

    Room is taken on every device before the first byte travels.

    Copies are few large calls: against a busy main thread 300 separate copies took 1,785 ms, one call 18. With
    `progress` it is called after every leg with bytes done and in all; what it raises ends the journey.
    Raises the device's out-of-memory error; on any failure the copies are freed before it is seen.
    """
    total, done = nbytes(groups), 0
    targets: list[Tensor] = []
    made: dict[int, Tensor] = {}
    try:
        sources = [group.bytes for group in groups]
        for part in _alike(memories):
            made.update(
                zip(part, _empty([sources[i].nbytes for i in part], memories[part[0]]), strict=True)
            )
        targets += (made.pop(i) for i in range(len(sources)))
        _synchronise(sources, targets)
        if progress:
            progress(0, total)
        for part in _alike(list(zip(memories, (source.device for source in sources), strict=True))):
            for leg in _legs([sources[i] for i in part]) if progress else [range(len(part))]:
                _copy([targets[part[i]] for i in leg], [sources[part[i]] for i in leg], host)
                if progress:
                    done += sum(sources[part[i]].nbytes for i in leg)
                    progress(done, total)
        _synchronise(sources, targets)
        return targets
    except BaseException as error:
        targets.clear()
        made.clear()
        let_go(error)
        raise


def rebinding(groups: Sequence[Group], targets: Sequence[Tensor]) -> list[Callable[[], Any]]:
    """Phase two, prepared: calls into C that make every tensor a view of its new storage, for `at_once`."""
    return [
        _becoming(slot.tensor, _view(slot.tensor, target))
        for group, target in zip(groups, targets, strict=True)
        for slot in group.slots
    ]


def emptying(found: Iterable[Slot]) -> list[Callable[[], Any]]:
    """Calls into C that leave no tensor a byte, and no parameter a gradient."""
    calls: list[Callable[[], Any]] = []
    for slot in found:
        if slot.kind == "parameter" and slot.tensor.grad is not None:
            calls.append(partial(_set_grad, slot.tensor, None))
        with torch.inference_mode(slot.tensor.is_inference()):
            calls.append(_becoming(slot.tensor, torch.empty(0, dtype=slot.tensor.dtype)))
    return calls


def refilling(held: nn.Module, fresh: nn.Module) -> list[Callable[[], Any]] | None:
    """Calls into C that give the held module the fresh one's bytes; None where they no longer have the same tensors."""
    old = {slot.name: slot for slot in slots(held)}
    new = {slot.name: slot for slot in slots(fresh)}
    if old.keys() != new.keys() or any(
        old[name].tensor.dtype != new[name].tensor.dtype for name in new
    ):
        return None
    return [_becoming(old[name].tensor, new[name].tensor.data) for name in new]


def _becoming(tensor: Tensor, other: Tensor) -> Callable[[], Any]:
    """A call into C that gives the tensor the other's bytes, and leaves the object what it is.

    An accelerator that registered itself with torch has tensors of another make than the CPU's. There the two change
    places, as `nn.Module.to` lets them for such; torch refuses that for tensors which an autograd graph still holds.
    """
    if torch._has_compatible_shallow_copy_type(tensor, other):
        return partial(_set_data, tensor, other)
    return partial(torch._C._swap_tensor_impl, tensor, other.requires_grad_(tensor.requires_grad))


def at_once(calls: Iterable[Callable[[], Any]]) -> None:
    """Makes the calls without a Python instruction in between: the stop button comes before all or after all."""
    collections.deque(map(operator.call, calls), maxlen=0)


def let_go(error: BaseException) -> None:
    """Forgets the local variables of our own finished frames, and transformers', in an error's traceback.

    A notebook keeps its last traceback, and with it every tensor in those frames, until the next error.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        pending += [current.__cause__, current.__context__]
        for frame, _ in traceback.walk_tb(current.__traceback__):
            if frame.f_globals.get("__name__", "").split(".")[0] in (
                "gpu_runtime",
                "transformers",
                "safetensors",
            ):
                try:
                    frame.clear()
                except RuntimeError:  # still running: it will let go by itself
                    pass


def _empty(sizes: Sequence[int], memory: Memory) -> list[Tensor]:
    """Uninitialised [size] uint8 tensors on that device, each a storage of its own."""
    if not memory.counted:
        return [torch.empty(size, dtype=torch.uint8, device=memory.torch) for size in sizes]
    blocks = iter(memory.allocate_row([size for size in sizes if size]))
    return [
        torch.frombuffer(next(blocks).buffer(), dtype=torch.uint8)
        if size
        else torch.empty(0, dtype=torch.uint8)
        for size in sizes
    ]


def _copy(targets: list[Tensor], sources: list[Tensor], host: Memory) -> None:
    """Copies, and empties both lists: a traceback through here must not keep what they held."""
    try:
        if (
            targets
            and targets[0].is_cuda
            and sources[0].device.type == "cpu"
            and not _locked(host, sources)
        ):
            _copy_through(host, targets, sources)
        elif targets:
            torch._foreach_copy_(targets, sources, non_blocking=True)
    finally:
        targets.clear()
        sources.clear()


def _copy_through(host: Memory, targets: list[Tensor], sources: list[Tensor]) -> None:
    """By way of locked pages: the card's engine copies from those at the bus, from others at a fifth of it."""
    for leg in _legs(sources):
        locked = _empty([sources[i].nbytes for i in leg], host)
        torch._foreach_copy_(locked, [sources[i] for i in leg])
        torch._foreach_copy_([targets[i] for i in leg], locked, non_blocking=True)
        torch.cuda.synchronize(targets[0].device)


def _locked(host: Memory, tensors: Sequence[Tensor]) -> bool:
    return not host.pinned or all(
        host.contains(tensor.data_ptr()) for tensor in tensors if tensor.nbytes
    )


def _alike(items: Sequence[Hashable]) -> list[list[int]]:
    """The places of equal items."""
    places: dict[Hashable, list[int]] = {}
    for place, item in enumerate(items):
        places.setdefault(item, []).append(place)
    return list(places.values())


def _legs(tensors: Sequence[Tensor]) -> Iterator[range]:
    """Consecutive indices of about LEG_BYTES together."""
    start = size = 0
    for index, tensor in enumerate(tensors):
        size += tensor.nbytes
        if size >= LEG_BYTES:
            yield range(start, index + 1)
            start, size = index + 1, 0
    if start < len(tensors):
        yield range(start, len(tensors))


def _view(tensor: Tensor, target: Tensor) -> Tensor:
    with torch.inference_mode(
        tensor.is_inference()
    ):  # rebound to a normal one it would fail at its first use
        view = torch.empty(0, dtype=tensor.dtype, device=target.device)
        view.set_(target.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        if tensor.is_conj():
            view = view.conj()
        return torch._neg_view(view) if tensor.is_neg() else view


def _synchronise(*tensors: Sequence[Tensor]) -> None:
    """Waits until the cards concerned have done what was asked of them."""
    if torch.cuda.is_initialized():
        for device in {tensor.device for some in tensors for tensor in some if tensor.is_cuda}:
            torch.cuda.synchronize(device)
