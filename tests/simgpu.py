"""A simulated accelerator for torch: devices `simgpu:0` to `simgpu:3`, each with its own memory and limit.

It runs what CUDA runs: `torch.empty(device=…)`, copies, views, storages, autograd, accelerate's hooks. So a model can
be spread over two cards, moved to two others, or stopped half-way by a full card, on a machine without any card. The
model is really executed. Only tests import this module.

torch 2.13 lets Python register a backend under the dispatch key PrivateUse1 (`torch.utils.backend_registration`,
private and experimental). A tensor here is a plain `torch.Tensor` with that key. Its storage points into the card's
memory (tests/simcard.py), which is ordinary RAM. The tensor is made through DLPack, the only way into torch that
takes a device and a pointer. Every operator falls back to one function. This function runs the CPU's kernel on CPU
tensors over the same bytes (`Operand.alias`), and puts new results on the card (`adopted`). Operands on two cards are
refused with CUDA's error message.

Ordinarily every operator is done at once, and freed memory is given back to the card. Inside `late()` the cards
behave as CUDA's do. An operator is put into the queue of the current stream with the addresses of its operands. It is
done when a caller waits for that stream. Freed blocks are used again (tests/simcard.py). So a program that frees or
reads memory too early computes wrong values. Some operators first wait for their stream: those with a result on the
host, with a shape that depends on values, or with random numbers.

The cards differ from CUDA in three ways. Such a tensor cannot replace a CPU tensor through `.data`
(`torch._has_compatible_shallow_copy_type` returns False). So `backends/pytorch/storages.py` swaps the implementations
of the two tensors, as `nn.Module.to` does for such accelerators. Backward passes run only on `simgpu:0` and on its
default stream, since the autograd engine assumes a single card. A copy with `non_blocking=True` reads and writes any
host memory late; CUDA does so with pinned memory only.
"""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch.utils import backend_registration

from gpu_runtime.devices.probe import Probe
from gpu_runtime.devices.process_memory import Memory
from gpu_runtime.facts import HOST, Device
from gpu_runtime.units import MIB
from tests.simcard import DEFAULT, PRIVATE_POOL, SHARED_POOL, Queue
from tests.simstreams import module
from tests.simtensors import (
    CARD_BYTES,
    CARDS,
    CPU,
    Operand,
    SimOutOfMemory,
    adopted,
    cards,
    content_now,
    is_on_card,
    mode,
    over,
    placed,
    shaped,
)

__all__ = [
    "CARDS", "CARD_BYTES", "MIB", "SimOutOfMemory", "SimProbe", "cards", "content_now", "leftovers",
    "late", "limited", "peak_bytes", "private_pool", "stuck", "used_bytes",
]  # fmt: skip

_is_late = False
MISSING = ""  # why there is no simulated accelerator
if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
    MISSING = f"Python cannot register an accelerator with torch {torch.__version__}"


def used_bytes(card: int) -> int:
    """The bytes that are in use on that card."""
    cards[card].reserved_bytes  # noqa: B018 - notes what was freed
    return cards[card].used_bytes


def peak_bytes(card: int) -> int:
    """The most bytes in use on that card since `limited` began."""
    return cards[card].peak_bytes


def leftovers() -> list[str]:
    """What still holds memory of the cards.

    Returns the bytes of each card, and the tensors with the classes of the objects that refer to them.
    """
    found = [
        f"simgpu:{card}: {used_bytes(card)} bytes" for card in range(CARDS) if used_bytes(card)
    ]
    for one in gc.get_objects() if found else ():
        if issubclass(type(one), torch.Tensor) and one.device.type == "simgpu":
            kinds = {type(above).__name__ for above in gc.get_referrers(one)} - {"list"}
            found.append(f"{one.device}: a {tuple(one.shape)} tensor of {kinds}")
    return found


@contextmanager
def limited(**capacities: int) -> Iterator[None]:
    """Limits cards inside the block, as in `limited(card1=3 * MIB)`. Cards that are not named keep their size."""
    sizes = {int(name.removeprefix("card")): size for name, size in capacities.items()}
    try:
        for index, card in enumerate(cards):
            card.capacity_bytes = sizes.get(index, CARD_BYTES)
            card.peak_bytes = used_bytes(index)
        yield
    finally:
        for card in cards:
            card.capacity_bytes = CARD_BYTES


@contextmanager
def late(segment_bytes: int = 0) -> Iterator[None]:
    """Inside the block the cards do their work late, and their allocators keep freed memory for reuse.

    Segments have at least `segment_bytes`, as far as the card has room. Skips the test if there is
    no simulated accelerator.
    """
    global _is_late
    if MISSING:
        pytest.skip(MISSING)
    try:
        _is_late = True
        for card in cards:
            card.caching, card.segment_bytes = True, segment_bytes
        yield
    finally:
        _is_late = False
        for card in cards:
            card.synchronise()
            card.caching = False
            card.empty_cache()


@contextmanager
def private_pool() -> Iterator[None]:
    """Inside the block this thread allocates from a private pool, as CUDA does for a captured graph."""
    mode.pool = PRIVATE_POOL
    try:
        yield
    finally:
        mode.pool = SHARED_POOL


@contextmanager
def stuck(card: int, stream: int = DEFAULT) -> Iterator[Callable[[], None]]:
    """A stream of that card is blocked until the `with` block ends.

    The caller receives a function that releases the stream earlier.
    """
    released = threading.Event()
    cards[card].queue(stream).launch(lambda: released.wait() and None)
    try:
        yield released.set
    finally:
        released.set()
        cards[card].synchronise()


class SimProbe(Probe):
    """A probe that reports these cards. As on a real card, torch allocates their memory.

    Skips the test if there is no simulated accelerator.
    """

    def __init__(self, host_bytes: int = 256 * MIB) -> None:
        if MISSING:
            pytest.skip(MISSING)
        kind = (CARD_BYTES, "simulated accelerator")
        cards = (
            Device(f"simgpu:{i}", *kind, f"SIMGPU-{i}", i, simulated=True) for i in range(CARDS)
        )
        super().__init__((*cards, Device(HOST, host_bytes, "simulated RAM", simulated=True)))

    def _memory(self, device: Device) -> Memory:
        if device.is_host:
            return super()._memory(device)
        return Memory(device.id, None, simulated=False, torch=device.id)

    def used(self) -> dict[str, int]:
        held = super().used()
        return held | {f"simgpu:{i}": card.reserved_bytes for i, card in enumerate(cards)}


# -- operators -------------------------------------------------------------------------------------


def _run(op: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operator. Its bytes are computed at once, or late by the current stream."""
    leaves: list[Any] = []
    _mapped(leaves.append, (args, kwargs))
    _refuse_several_devices(op, leaves)
    here = [leaf for leaf in leaves if is_on_card(leaf)]
    card, to_card = (here[0].device.index if here else 0), True
    if kwargs.get("device") is not None:
        wanted = torch.device(kwargs["device"])
        to_card = wanted.type == "simgpu"
        card = wanted.index or 0 if to_card else card
        kwargs = {**kwargs, "device": CPU}
    kwargs.pop("pin_memory", None)
    if not _is_late or _only_views(op):
        return _done_now(op, args, kwargs, here, card, to_card)
    waits = not to_card and not kwargs.get("non_blocking")
    planned = None if waits else _planned(op, args, kwargs)
    if planned is None:
        _queue(card).run()
        return _done_now(op, args, kwargs, here, card, to_card)
    return _launched(op, args, kwargs, planned, card, to_card)


def _mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` with each leaf changed. It is `pytree.tree_map`, but quick for the usual containers."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([_mapped(change, part) for part in tree])
    if kind is dict:
        return {key: _mapped(change, part) for key, part in tree.items()}
    if isinstance(tree, (tuple, list, dict)):
        return pytree.tree_map(change, tree)
    return change(tree)


def _refuse_several_devices(op: Any, leaves: list[Any]) -> None:
    """Raises CUDA's error if the operands are on two cards, or on a card and the CPU."""
    on_cards = [leaf for leaf in leaves if is_on_card(leaf)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    on_cpu = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.dim()]
    several_cards = len({tensor.device.index for tensor in on_cards}) > 1
    if several_cards or (on_cards and on_cpu and op not in _MIXED):
        found = sorted({str(tensor.device) for tensor in (*on_cards, *on_cpu)})
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, "
            f"{found[0]} and {found[1]}! ({op})"
        )


def _queue(card: int) -> Queue:
    """The queue of this thread's current stream on that card."""
    return cards[card].queue(mode.streams[card])


def _only_views(op: Any) -> bool:
    """Whether the operator reads no bytes: its results are views of its operands."""
    kinds = [one.alias_info for one in op._schema.returns]
    return bool(kinds) and all(kind is not None and not kind.is_write for kind in kinds)


def _done_now(
    op: Any, args: Any, kwargs: Any, here: list[torch.Tensor], card: int, to_card: bool
) -> Any:
    """The result of an operator that is done at once: the CPU computes it on the same bytes."""
    # id of an alias -> the alias, and its tensor
    aliases: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in here}

    def unwrap(leaf: Any, resizable: bool = False) -> Any:
        if not is_on_card(leaf):
            return leaf
        alias = Operand.of(leaf).alias()
        alias = alias.clone() if resizable else alias
        aliases[id(alias)] = alias, leaf
        return alias

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not to_card:
            return leaf
        if id(leaf) in aliases:
            return _updated(*aliases[id(leaf)], card)
        own = leaf.untyped_storage()
        storage = storages.get(own.data_ptr()) if own.nbytes() else None
        return over(storage, leaf) if storage is not None else adopted(leaf, card)

    cpu_args, cpu_kwargs = _mapped(unwrap, (args, kwargs))
    try:
        result = op(*cpu_args, **cpu_kwargs)
    except RuntimeError as error:
        if "not resizable" not in str(error):
            raise
        aliases.clear()
        enlarging = partial(unwrap, resizable=True)
        cpu_args, cpu_kwargs = _mapped(enlarging, (args, kwargs))
        result = op(*cpu_args, **cpu_kwargs)
    return _mapped(wrap, result)


def _updated(alias: torch.Tensor, tensor: torch.Tensor, card: int) -> torch.Tensor:
    """The card's tensor, after it received the shape and the storage that an operator gave its alias."""
    if alias.untyped_storage().nbytes() > tensor.untyped_storage().nbytes():
        enlarged = adopted(alias, card)  # the operator enlarged out=
        return shaped(tensor, enlarged.untyped_storage(), alias)
    if alias.size() != tensor.size() or alias.stride() != tensor.stride():
        return shaped(tensor, tensor.untyped_storage(), alias)
    return tensor


_WAITS = (  # their results depend on values, or on the state of a generator
    torch.Tag.nondeterministic_seeded,
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
)


def _planned(op: Any, args: Any, kwargs: Any) -> tuple[Any, dict[int, torch.Tensor]] | None:
    """The result of an operator on tensors without bytes, and the operand that each such tensor stands for.

    None if the result can be known only by computing the bytes.
    """
    if any(tag in op.tags for tag in _WAITS):
        return None
    if any("Tensor" not in str(one.type) for one in op._schema.returns):
        return None
    operands: dict[int, torch.Tensor] = {}
    kept = []  # an id is of an object that lives

    def shape(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or (leaf.device.type == "cpu" and not leaf.dim()):
            return leaf
        meta = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
        meta = meta.conj() if leaf.is_conj() else meta
        operands[id(meta)] = leaf
        kept.append(meta)
        return meta

    meta_args, meta_kwargs = _mapped(shape, (args, kwargs))
    if "device" in kwargs:
        meta_kwargs["device"] = torch.device("meta")
    try:
        result = op(*meta_args, **meta_kwargs)
    except Exception:  # no kernel for shapes, or an error that the CPU's kernel raises, too
        return None
    for leaf, meta in ((operands[id(meta)], meta) for meta in kept):
        if leaf.size() != meta.size() or leaf.stride() != meta.stride():
            return None  # it is resized
    return (result, kept), operands


def _launched(op: Any, args: Any, kwargs: Any, planned: Any, card: int, to_card: bool) -> Any:
    """The result of an operator whose bytes the current stream computes later."""
    (shapes, _kept), operands = planned
    results: list[tuple[int, Operand | torch.Tensor]] = []  # place in the result, and its memory
    flat, form = pytree.tree_flatten(shapes)
    for place, leaf in enumerate(flat):
        if not isinstance(leaf, torch.Tensor):
            continue
        if id(leaf) in operands:
            flat[place] = operands[id(leaf)]
        elif to_card:
            base = placed(leaf.untyped_storage().nbytes(), card)
            flat[place] = over(base.untyped_storage(), leaf)
            results.append((place, Operand.of(flat[place])))
        else:
            flat[place] = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype)
            results.append((place, flat[place]))
    if op not in _UNINITIALISED:
        blocking = not kwargs.get("non_blocking")
        frozen = _mapped(partial(_frozen, blocking=blocking), (args, kwargs))
        _queue(card).launch(partial(_compute, op, frozen, results))
    return pytree.tree_unflatten(flat, form)


def _frozen(leaf: Any, blocking: bool) -> Any:
    """An operand in the form that queued work keeps.

    For a card's tensor it is the address. For a tensor of the host it is a copy of the values, if
    the operator is blocking.
    """
    if is_on_card(leaf):
        return Operand.of(leaf)
    return leaf.clone() if isinstance(leaf, torch.Tensor) and blocking else leaf


def _thawed(leaf: Any) -> Any:
    return leaf.alias() if isinstance(leaf, Operand) else leaf


def _is_operand(leaf: Any) -> bool:
    return isinstance(leaf, Operand)


def _compute(op: Any, frozen: Any, results: list[tuple[int, Operand | torch.Tensor]]) -> None:
    """Computes one operator on its operands and writes the results to their memory."""
    # Below autograd and autocast, as where the operator was called.
    with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
        args, kwargs = pytree.tree_map(_thawed, frozen, is_leaf=_is_operand)
        flat, _ = pytree.tree_flatten(op(*args, **kwargs))
        for place, target in results:
            _thawed(target).copy_(flat[place])


def _copy_from(
    source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    """Copies between cards, to a card or from a card. torch's `copy_` calls this function."""
    one, other = (Operand.of(t) if is_on_card(t) else t for t in (source, target))
    copy = partial(_copy, one, other)
    queues = [_queue(t.device.index) for t in (source, target) if is_on_card(t)]
    first, last = queues[0], queues[-1]
    if not _is_late:
        copy()
    elif len(queues) < 2 and not non_blocking:
        first.run()
        copy()
    elif first is last:
        first.launch(copy)
    else:  # the streams of two cards wait for each other
        first.launch(partial(last.run, last.launched))
        last.launch(partial(first.run, first.launch(copy)))
    return target


def _copy(source: Any, target: Any) -> None:
    with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
        _thawed(target).copy_(_thawed(source))


def _record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
    address = tensor.untyped_storage().data_ptr()
    cards[tensor.device.index].record(address, stream.stream_id)


def _set_storage(tensor: torch.Tensor, storage: torch.UntypedStorage, *shape: Any) -> torch.Tensor:
    shape = shape or (0, (storage.nbytes() // tensor.dtype.itemsize,), (1,))
    return torch.ops.aten.set_.source_Storage_storage_offset._op_dk(
        torch._C.DispatchKey.CPU, tensor, storage, *shape
    )


# -- registration with torch -----------------------------------------------------------------------

_aten = torch.ops.aten
_UNINITIALISED = {
    _aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default,
    _aten.new_empty.default, _aten.new_empty_strided.default,
}  # fmt: skip
_MIXED = {_aten.index.Tensor, _aten.index_put_.default}  # CUDA also accepts indices on the CPU
if not MISSING:
    backend_registration._setup_privateuseone_for_python_backend("simgpu", backend_module=module)
    _every, _some = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _every.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")
    for _name in ("empty.memory_format", "empty_strided", "_to_copy"):
        _packet, _, _overload = _name.partition(".")
        _op = getattr(getattr(_aten, _packet), _overload or "default")
        _some.impl(_name, lambda *args, _op=_op, **kwargs: _run(_op, args, kwargs), "PrivateUse1")
    _some.impl("_copy_from", _copy_from, "PrivateUse1")
    _some.impl("set_.source_Storage_storage_offset", _set_storage, "PrivateUse1")
    _some.impl("set_.source_Storage", _set_storage, "PrivateUse1")
    _some.impl("record_stream", _record_stream, "PrivateUse1")
