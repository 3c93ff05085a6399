"""The storages of a module's tensors, and how they move between memories.

A device contains storages, not tensors. Tied weights, views and shared buffers are one storage and
move once.

A move has two phases. The first phase copies everything. If the first phase fails or is
interrupted, the copies are freed and nothing has changed. The second phase is one call into C,
which no signal handler can interrupt. This call makes the copies the content of the tensors: it
exchanges data pointers (`swap.py`). If the pointer of a storage cannot be exchanged, the call
rebinds the tensors of the storage. The Python objects, Parameters included, stay the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...devices.allocators import rounded
from ...devices.process_memory import Memory
from ...names import with_causes
from ...units import MIB
from . import streams, swap
from .swap import Exchange, can_swap

LEG_BYTES = 64 * MIB  # after each part of this size, a load reports progress and can be interrupted
SMALL_BYTES = 64 * 1024
_ITEM_BYTES = 16  # of torch's largest dtype
_PIECE_ITEMS = 24_576  # so few are copied by one thread
_PIECE_BYTES = 32 * 1024  # so few bytes are, too
ALIGNED_BYTES = 64  # torch aligns the memory of a CPU tensor to as many bytes
_LIBRARIES = ("gpu_runtime", "transformers", "safetensors")  # `let_go` clears their frames
_set_data = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]
_set_grad = torch._C.TensorBase.grad.__set__  # type: ignore[attr-defined]


class TensorSlot(NamedTuple):
    """A tensor of a module, and its role there."""

    name: str
    kind: str  # "parameter", "buffer", "grad", or "state" of an optimizer
    tensor: Tensor


class Group(NamedTuple):
    """One storage, and all tensors in it."""

    storage: torch.UntypedStorage
    slots: tuple[TensorSlot, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return self.storage.nbytes()

    @property
    def bytes(self) -> Tensor:
        """The content of the storage, as a tensor [nbytes] of uint8."""
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)

    @property
    def referenced_elsewhere(self) -> bool:
        """Whether an object other than `slots` refers to the storage, such as a view or a live graph."""
        # A tensor has one reference from all of Python, and one from each view of it. A graph that
        # needs a leaf refers to the tensor itself.
        known = references_of_views(slot.tensor for slot in self.slots)
        tensors = self.tensors
        if any(tensor._use_count() > 1 + known[id(tensor)] for tensor in tensors):
            return True
        # each tensor, and the storage's own Python object
        return torch._C._storage_Use_Count(self.storage._cdata) > len(tensors) + 1

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of `slots`, and those of which they are views."""
        every = [slot.tensor for slot in self.slots]
        every += [view._base for view in every if view._is_view() and view._base is not None]
        return list({id(tensor): tensor for tensor in every}.values())

    @property
    def layout(self) -> tuple[tuple[Any, ...], ...]:
        """Name, kind, dtype and place of each tensor. Two loads of one source give equal layouts."""
        return tuple(
            (name, kind, view.dtype, view.storage_offset(), tuple(view.size()), view.stride())
            for name, kind, view in self.slots
        )


def slots(
    module: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Iterator[TensorSlot]:
    """Each parameter, buffer and gradient of `module`, and its state in `optimizer`, once."""
    seen: set[int] = set()
    for slot in _all_slots(module, optimizer):
        if id(slot.tensor) not in seen:
            seen.add(id(slot.tensor))
            yield slot


def _all_slots(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[TensorSlot]:
    parameters: list[TensorSlot] = []
    for path, part in module.named_modules():
        prefix = path + "." if path else ""
        for name, parameter in part._parameters.items():
            if parameter is not None:
                parameters.append(TensorSlot(prefix + name, "parameter", parameter))
        for name, buffer in part._buffers.items():
            if buffer is not None:
                yield TensorSlot(prefix + name, "buffer", buffer)
    yield from parameters
    for name, _, parameter in parameters:
        if parameter.grad is not None:
            yield TensorSlot(name, "grad", parameter.grad)
        state = optimizer.state.get(parameter) if optimizer is not None else None
        for key, tensor in _tensors_in(state):
            yield TensorSlot(f"{name}:{key}", "state", tensor)


def _tensors_in(value: Any, key: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested dicts, lists and tuples, each with its path."""
    if isinstance(value, Tensor):
        yield key, value
    elif isinstance(value, (dict, list, tuple)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for name, inner in pairs:
            yield from _tensors_in(inner, f"{key}.{name}" if key else str(name))


def grouped(found: Iterable[TensorSlot]) -> list[Group]:
    """The storages of the tensors `found`, in the order in which they first appear."""
    by_storage: dict[int, tuple[torch.UntypedStorage, list[TensorSlot]]] = {}
    for slot in found:
        storage = slot.tensor.untyped_storage()
        _, members = by_storage.setdefault(storage._cdata, (storage, []))
        members.append(slot)
    return [Group(storage, tuple(members)) for storage, members in by_storage.values()]


def references_of_views(tensors: Iterable[Tensor]) -> Counter[int]:
    """By the id of a tensor: the references to it from the views of it among `tensors`."""
    known: Counter[int] = Counter()
    for tensor in tensors:
        if tensor._is_view():
            known[id(tensor._base)] += 1 + behind(tensor).references
    return known


class Behind(NamedTuple):
    """What torch's C++ code keeps so that it can make a complex view again."""

    references: int = 0  # more references to the base than the one that each view has
    tensors: int = 0  # made on the way from the base to the view; each is referred to at least once


def behind(view: Tensor) -> Behind:
    """What torch keeps for `view`: functions that refer to its base, or to a tensor on the way, if it is complex.

    So the view is made again from a base without memory, and what refers to this base is counted.
    """
    base: Any = view._base
    if not (view.dtype.is_complex or base.dtype.is_complex):
        return Behind()
    size = base.untyped_storage().nbytes()
    with torch.inference_mode(False), torch.no_grad():
        other = torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage()
        like = torch.empty(0, dtype=base.dtype, device="meta")
        like.set_(other, base.storage_offset(), base.size(), base.stride())
        again = view._view_func_unsafe(like)  # type: ignore[attr-defined]
    # Without `like`, and the storage's Python object.
    views = torch._C._storage_Use_Count(other._cdata) - 2
    references = like._use_count() - 1 - views
    del again
    return Behind(references) if views == 1 else Behind(0, views - 1)


def nbytes(groups: Iterable[Group]) -> int:
    """The bytes of all `groups` together."""
    return sum(group.nbytes for group in groups)


# -- phase one: copies -----------------------------------------------------------------------------


def copied(
    sources: list[Tensor],
    memories: Sequence[Memory],
    host: Memory,
    progress: Callable[[int, int], None] | None = None,
    wait: Callable[[], None] | None = None,
    together: bool = False,
) -> list[Tensor]:
    """The first phase of a move: a copy of each of `sources`, [nbytes] uint8, in its new memory.

    `memories` has the new memory of each source. `host` is the host's memory, whose page-locked
    memory speeds up copies to a card. All copies are allocated, each with a storage of its own,
    before the first byte is copied. They are made by few large calls: while the main thread was
    busy, 300 separate copies took 1,785 ms, and one call took 18.

    The copy of a tensor on the device `meta` gets no content. The caller fills it.

    `progress` is called at the start and after each part, with bytes done and bytes in total. Its
    error ends the move. `wait` is called before and after the copying, until the cards have finished
    their work; the default waits without a limit. If `together` is true, all copies will be freed
    together, so small copies may share a block of memory.

    Raises the device's out-of-memory error. On any failure the copies are freed, and `sources` is
    emptied, before the caller gets the error.
    """
    targets: list[Tensor] = []
    made: dict[int, Tensor] = {}
    try:
        for places in places_of_equal(memories):
            sizes = [sources[i].nbytes for i in places]
            memory = memories[places[0]]
            empty = _empty_together if together and memory.counted else _empty
            made.update(zip(places, empty(sizes, memory), strict=True))
        targets += (made.pop(i) for i in range(len(sources)))
        wait = wait or partial(synchronise, _cards(sources, targets))
        wait()
        _copy_all(sources, targets, memories, host, progress)
        wait()
        return targets
    except BaseException as error:
        targets.clear()
        made.clear()
        sources.clear()
        let_go(error)
        raise


def _copy_all(
    sources: list[Tensor],
    targets: list[Tensor],
    memories: Sequence[Memory],
    host: Memory,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Copies each source to its target, by one call a pair of devices, or with `progress` one for each LEG_BYTES."""
    done, total = 0, sum(source.nbytes for source in sources)
    if progress:
        progress(0, total)
    routes = list(zip(memories, (source.device for source in sources), strict=True))
    for places in places_of_equal(routes):
        if sources[places[0]].is_meta:
            continue
        legs = _legs([sources[i] for i in places]) if progress else [range(len(places))]
        for leg in legs:
            batch = [places[i] for i in leg]
            _copy([targets[i] for i in batch], [sources[i] for i in batch], host)
            if progress:
                done += sum(sources[i].nbytes for i in batch)
                progress(done, total)


def _copy(targets: list[Tensor], sources: list[Tensor], host: Memory) -> None:
    """Copies `sources` to `targets`, and empties both lists, which a traceback would keep alive."""
    try:
        if not targets:
            return
        to_card = targets[0].is_cuda and sources[0].device.type == "cpu"
        if to_card:  # this may be the first use of CUDA since the pages were made
            host.lock([source.data_ptr() for source in sources])
        if to_card and not _locked(host, sources):
            _copy_through(host, targets, sources)
        elif targets[0].device.type == "cpu":
            with streams.copying_out(sources[0].device):
                copy_to(targets, sources)
        else:
            copy_to(targets, sources)
    finally:
        targets.clear()
        sources.clear()


def copy_to(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies `sources` to `targets`, [nbytes] uint8 each, by one call. It may empty both lists."""
    if targets[0].device.type == sources[0].device.type == "cpu":
        targets, sources = _in_pieces(*_joined(targets, sources))
    try:
        if targets:  # else all of them are empty
            torch._foreach_copy_(targets, sources, non_blocking=True)
    finally:  # a traceback would keep the tensors
        targets.clear()
        sources.clear()


def _joined(
    targets: Sequence[Tensor], sources: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The same bytes as fewer tensors: those that follow one another in both places become one.

    The storages of a model do, since each move allocates them in one row. To cut 400 MiB in 320
    tensors into pieces took a seventh of the time of their copy.
    """
    runs: list[tuple[int, int, int]] = []  # the addresses of target and source, and the bytes
    to_end = of_end = 0
    for target, source in zip(targets, sources, strict=True):
        to = torch._C._data_address(target) + target.storage_offset()
        of = torch._C._data_address(source) + source.storage_offset()
        size = source.nbytes
        if runs and to == to_end and of == of_end:
            first_to, first_of, before = runs.pop()
            runs.append((first_to, first_of, before + size))
        elif size:
            runs.append((to, of, size))
        to_end, of_end = to + size, of + size
    return [_at(to, size) for to, _, size in runs], [_at(of, size) for _, of, size in runs]


def _at(address: int, size: int) -> Tensor:
    """The memory at the `address`, [size] uint8. The caller keeps it allocated."""
    return torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)


def _in_pieces(
    targets: Sequence[Tensor], sources: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The same bytes as tensors of which each is copied by one thread, unless it has LEG_BYTES.

    torch copies more than 32,768 elements with several threads, which wait for one another. Beside
    other work on two cores, 400 MiB in 330 tensors took 5.6 s; in these pieces 0.4 s.
    """
    to, of = [], []
    for target, source in zip(targets, sources, strict=True):
        size, whole = source.nbytes, 0
        places = torch._C._data_address(target) | torch._C._data_address(source)
        if _PIECE_BYTES < size < LEG_BYTES and not places % _ITEM_BYTES:
            whole = size // _ITEM_BYTES * _ITEM_BYTES
            to += target[:whole].view(torch.complex128).split(_PIECE_ITEMS)
            of += source[:whole].view(torch.complex128).split(_PIECE_ITEMS)
        if whole < size:
            to.append(target[whole:])
            of.append(source[whole:])
    return to, of


def _copy_through(host: Memory, targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies `sources` to page-locked memory of the host, and from there to `targets` on a card.

    A card copies from other memory at a fifth of the speed of its bus.
    """
    for leg in _legs(sources):
        locked = _empty([sources[i].nbytes for i in leg], host)
        torch._foreach_copy_(locked, [sources[i] for i in leg])
        torch._foreach_copy_([targets[i] for i in leg], locked, non_blocking=True)
        torch.cuda.synchronize(targets[0].device)


def _locked(host: Memory, tensors: Sequence[Tensor]) -> bool:
    """Whether the `tensors` are in page-locked memory already, or `host` has no such memory."""
    if not host.pinned:
        return True
    return all(host.region_at(tensor.data_ptr()) for tensor in tensors if tensor.nbytes)


def _empty(sizes: Sequence[int], memory: Memory) -> list[Tensor]:
    """Uninitialised [size] uint8 tensors on the device of `memory`, each with a storage of its own."""
    if not memory.counted:
        return [torch.empty(size, dtype=torch.uint8, device=memory.torch) for size in sizes]
    blocks = iter(memory.allocate_row([size for size in sizes if size]))
    tensors: list[Tensor] = []
    for size in sizes:
        if size:
            tensors.append(torch.frombuffer(next(blocks).buffer(), dtype=torch.uint8))
        else:
            tensors.append(torch.empty(0, dtype=torch.uint8))
    return tensors


def _empty_together(sizes: Sequence[int], memory: Memory) -> list[Tensor]:
    """Like `_empty`, but small tensors share one block of memory, which is freed with the last.

    With a block for each, 10,000 small tensors took a third longer to leave their card.
    """
    small = [index for index, size in enumerate(sizes) if 0 < size < SMALL_BYTES]
    large = [index for index, size in enumerate(sizes) if not 0 < size < SMALL_BYTES]
    made = dict(zip(large, _empty([sizes[index] for index in large], memory), strict=True))
    steps = [rounded(sizes[index], ALIGNED_BYTES) for index in small]
    if small:
        pages = memory.allocate(sum(steps)).buffer()
        for index, end, step in zip(small, itertools.accumulate(steps), steps, strict=True):
            made[index] = torch.frombuffer(
                pages, dtype=torch.uint8, count=sizes[index], offset=end - step
            )
    return [made[index] for index in range(len(sizes))]


def places_of_equal(items: Sequence[Hashable]) -> list[list[int]]:
    """The indices of each distinct item of `items`."""
    places: dict[Hashable, list[int]] = {}
    for place, item in enumerate(items):
        places.setdefault(item, []).append(place)
    return list(places.values())


def _legs(tensors: Sequence[Tensor]) -> Iterator[range]:
    """Consecutive ranges of the indices of `tensors`, each with about LEG_BYTES of content."""
    start = size = 0
    for index, tensor in enumerate(tensors):
        size += tensor.nbytes
        if size >= LEG_BYTES:
            yield range(start, index + 1)
            start, size = index + 1, 0
    if start < len(tensors):
        yield range(start, len(tensors))


def _cards(*tensors: Sequence[Tensor]) -> set[torch.device]:
    return {
        tensor.device
        for some in tensors
        for tensor in some
        if tensor.device.type not in ("cpu", "meta")
    }


def synchronise(cards: set[torch.device]) -> None:
    """Waits until the `cards` have finished their work."""
    for card in cards:
        module = streams.module_of(card)
        if module is not None:
            module.synchronize(card)


# -- phase two: calls into C -----------------------------------------------------------------------


def rebinding(groups: Sequence[Group], targets: Sequence[Tensor]) -> list[Callable[[], Any]]:
    """Calls for `at_once` that make each tensor of `groups` a view of its new storage in `targets`."""
    calls: list[Callable[[], Any]] = []
    for group, target in zip(groups, targets, strict=True):
        storage = target.untyped_storage()
        calls += [_rebinding(slot.tensor, view(slot.tensor, storage)) for slot in group.slots]
    return calls


def emptying(found: Iterable[TensorSlot]) -> list[Callable[[], Any]]:
    """Calls for `at_once` that leave the tensors `found` without elements and gradients, where no guard is possible."""
    calls: list[Callable[[], Any]] = []
    for slot in found:
        if slot.kind == "parameter" and slot.tensor.grad is not None:
            calls.append(partial(_set_grad, slot.tensor, None))
        with torch.inference_mode(slot.tensor.is_inference()):
            calls.append(_rebinding(slot.tensor, torch.empty(0, dtype=slot.tensor.dtype)))
    return calls


def refilling(
    held: nn.Module, fresh: nn.Module, exchange: Exchange
) -> list[Callable[[], Any]] | None:
    """Calls for `at_once` that give the module `held` the bytes of the module `fresh`.

    Storages of both with the same device and layout are added to `exchange`; for all others, the
    calls rebind the tensors. None if the tensors of the two modules differ in names or dtypes.
    """
    old, new = _weights(held), _weights(fresh)
    if old.keys() != new.keys() or any(old[name].dtype != new[name].dtype for name in new):
        return None
    calls: list[Callable[[], Any]] = []
    content = {group.layout: group for group in grouped(_weight_slots(fresh))}
    for group in grouped(_weight_slots(held)):
        calls += [swap.readable(tensor) for tensor in group.tensors]
        other = content.get(group.layout)
        if other is not None and other.storage.device == group.storage.device and can_swap():
            exchange.put(group.storage, other.storage)
        else:
            calls += [_rebinding(slot.tensor, new[slot.name].data) for slot in group.slots]
    return calls


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {slot.name: slot.tensor for slot in _weight_slots(module)}


def _weight_slots(module: nn.Module) -> Iterator[TensorSlot]:
    return (slot for slot in slots(module) if slot.kind in ("parameter", "buffer"))


def _rebinding(tensor: Tensor, other: Tensor) -> Callable[[], Any]:
    """A call into C that gives `tensor` the bytes of `other`. The Python object stays the same.

    Usually this sets `tensor.data`. torch forbids that if an accelerator of a third party
    implements tensors differently than the CPU. Then the two tensors are swapped, as in
    `nn.Module.to`. torch refuses to swap a tensor that an autograd graph still references.
    """
    if torch._has_compatible_shallow_copy_type(tensor, other):
        return partial(_set_data, tensor, other)
    return partial(torch._C._swap_tensor_impl, tensor, other.requires_grad_(tensor.requires_grad))


def view(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """A view of `storage`, which has the bytes of the storage of `tensor`, with the values of `tensor`."""
    # An inference tensor that is rebound to a normal tensor would fail at its first use.
    with torch.inference_mode(tensor.is_inference()):
        found = torch.empty(0, dtype=tensor.dtype, device=storage.device)
        found.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        if tensor.is_conj():
            found = found.conj()
        return torch._neg_view(found) if tensor.is_neg() else found


def let_go(error: BaseException) -> None:
    """Clears the variables of finished frames of ours, transformers and safetensors in the tracebacks
    of `error`. A notebook keeps its last traceback, which would keep every tensor in these frames.
    """
    for cause in with_causes([error]):
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            if frame.f_globals.get("__name__", "").split(".")[0] not in _LIBRARIES:
                continue
            with contextlib.suppress(RuntimeError):  # it still runs, and frees them at its end
                frame.clear()
