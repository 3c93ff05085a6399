"""`TorchModel`: the data that the PyTorch backends keep about one governed `nn.Module`.

A TorchModel records the place of each storage of the model, also over several cards. The code here
copies and allocates nothing; `torch_backend.py` and `storages.py` copy and allocate.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ...devices.process_memory import Block, Memory
from ...errors import CannotGovern
from ...facts import HOST, ModelSpec
from ...threads import import_whole, outside_modes
from ...units import MIB, show_bytes
from ..base import Damaged
from . import park_file, swap
from . import storages as st
from .storages import Group
from .swap import can_guard

# -- the pieces of a module, and their assignment to several cards
#
# A piece is a part that must stay together: a layer, the embeddings, the head. Pieces have the order
# of the module tree, and each card gets consecutive pieces. So a forward pass changes from each card
# to the next only once. Parts that share a storage (tied weights, shared buffers) are one piece, at
# the place of the first part, because a storage is on one card only.

T = TypeVar("T")
log = logging.getLogger("gpu_runtime")
_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Piece(NamedTuple):
    """Parts of a module that go to the same card."""

    modules: tuple[str, ...]  # the paths of the parts, in order; the path of the root is empty
    groups: tuple[Group, ...]

    @property
    def bytes(self) -> int:
        """The bytes of its storages."""
        return sum(group.nbytes for group in self.groups)


def pieces(module: nn.Module, groups: Sequence[Group], *, runs: bool = True) -> tuple[Piece, ...]:
    """The pieces of `module`, in order, each with its storages of `groups`; one if it cannot be cut.

    With `runs=False`, no code calls the module while its pieces are on different devices. It is then
    also cut where accelerate's hooks could not run it.
    """
    leaves = list(_leaves(module)) if _may_be_cut(module) or not runs else []
    if not leaves:
        leaves = [("", module)]
    firsts = list(range(len(leaves)))  # of each leaf, the first leaf of its piece

    def join(number: int, other: int) -> None:
        low, high = sorted((firsts[number], firsts[other]))
        if low != high:
            firsts[:] = [low if first == high else first for first in firsts]

    owners: dict[int, int] = {}  # storage -> the first leaf that has it
    for index, (_, leaf) in enumerate(leaves):
        if not any(p is not None for part in leaf.modules() for p in part._parameters.values()):
            join(index, 0)  # rotary angles and the like are needed before the first layer
        for tensor in _tensors(leaf):
            if tensor.nbytes:
                storage = tensor.untyped_storage()._cdata
                join(index, owners.setdefault(storage, index))
    indices = {path: index for index, (path, _) in enumerate(leaves)}
    modules: dict[int, list[str]] = {}
    held: dict[int, list[Group]] = {}
    for path, index in indices.items():
        modules.setdefault(firsts[index], []).append(path)
        held.setdefault(firsts[index], [])
    for group in groups:
        leaf_index = owners.get(group.storage._cdata)
        if leaf_index is None:  # a gradient or optimizer state: with its parameter
            leaf_index = holder(group.slots[0].name, indices)
        held[firsts[leaf_index]].append(group)
    return tuple(Piece(tuple(modules[first]), tuple(held[first])) for first in held)


def cut(sizes: Sequence[int], shares: Sequence[int]) -> list[int]:
    """For each piece, the number of the share that gets the piece.

    `sizes` are the bytes of the pieces, and `shares` those of the shares. Each share gets at least
    one piece, and its pieces are consecutive. For example, if the first share has 40 % of the bytes
    of all shares, it gets as nearly as possible 40 % of the bytes of all pieces. Raises ValueError
    if there are fewer pieces than shares.

    >>> cut([4, 2, 2, 2, 2], [60, 60])
    [0, 0, 1, 1, 1]
    >>> cut([10, 1, 1], [1, 1, 1])
    [0, 1, 2]
    """
    if len(sizes) < len(shares):
        raise ValueError(f"{len(sizes)} pieces for {len(shares)} shares")
    ends = list(accumulate(sizes, initial=0))
    total_bytes, share_bytes = sum(sizes), sum(shares) or 1
    cuts: list[int] = []
    start = 0
    for number, running in enumerate(accumulate(shares[:-1]), 1):
        # Leave at least one piece for each share after this one.
        last = len(sizes) - (len(shares) - number)
        start = min(
            range(start + 1, last + 1),
            key=lambda at: abs(ends[at] * share_bytes - running * total_bytes),
        )
        cuts.append(start)
    return [sum(at >= cut for cut in cuts) for at in range(len(sizes))]


def holder(name: str, table: Mapping[str, T]) -> T:
    """The entry of `table`, whose keys are module paths, for the tensor `name`; else the first entry.

    The innermost module with the tensor counts. A gradient or an optimizer state gets the entry of
    its parameter.

    >>> holder("layers.1.norm.weight:exp_avg", {"embed": "cuda:0", "layers.1": "cuda:1"})
    'cuda:1'
    """
    path = name.partition(":")[0]
    while path and path not in table:
        path = path.rpartition(".")[0]
    return table[path] if path in table else next(iter(table.values()))


def _may_be_cut(module: nn.Module) -> bool:
    """Whether hooks can run `module` in pieces.

    Not if the root itself has parameters or persistent buffers, because no hook moves these between
    cards, nor for a transformers model that does not declare which of its modules stay whole.
    """
    tensors = (*module._parameters.items(), *module._buffers.items())
    at_root = {name for name, tensor in tensors if tensor is not None}
    if at_root - module._non_persistent_buffers_set:
        return False
    return bool(getattr(module, "_no_split_modules", True))


def _leaves(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The parts of `module` that stay whole, in order, each with its path.

    `module` is divided into its children. If it has a list `_no_split_modules`, a child whose class
    is not in this list is divided further. A child that is a list of modules is always divided. A
    child with tensors of its own, or without children, is never divided. Modules without tensors
    are left out.
    """
    names = frozenset(getattr(module, "_no_split_modules", None) or ())

    def below(parent: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        # named_children is not used, because it lists each module once, even if it is used twice.
        for name, child in parent._modules.items():
            if child is None or next(_tensors(child), None) is None:
                continue
            child_path = f"{path}.{name}" if path else name
            divisible = bool(names) and type(child).__name__ not in names
            opens = isinstance(child, _LISTS) or divisible
            if opens and child._modules and next(_own_tensors(child), None) is None:
                yield from below(child, child_path)
            else:
                yield child_path, child

    return below(module, "")


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers of the `module` itself, without the tensors of its children."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            yield tensor


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    # `parameters()` is not used, because it may load the model of a governed module.
    for part in module.modules():
        yield from _own_tensors(part)


# -- accelerate's hooks, which run a module over several cards
#
# The weights are already on their cards, so accelerate's `dispatch_model` moves no weights. It
# changes the root module. All these changes except `hf_device_map` are undone, for two reasons. A
# call of the root module must run the module's own `forward`, which pins the model
# (`owner/pins.py`). And a deep copy must not share attributes with the original.


class Dispatch:
    """The hooks of one module while it is on several cards."""

    def __init__(self, module: nn.Module, device_map: Mapping[str, str]) -> None:
        """Installs the hooks: each part of `module` runs on its device in `device_map`.

        `device_map` maps the paths of modules to torch devices; inputs move to the first device.
        The paths must cover all weights, otherwise accelerate raises ValueError. With a complete
        map, accelerate uses no other card and plans no memory.
        """
        import_whole("accelerate")
        from accelerate import dispatch_model

        first_device = next(iter(device_map.values()))
        self.module = module
        self.transfer = _Transfer(first_device, _arguments_left_in_place(module))
        self.hooks: dict[int, tuple[nn.Module, Any]] = {}
        self.handles: list[Any] = []
        own = dict(vars(module))
        try:
            skip = self.transfer.left_in_place
            dispatch_model(module, dict(device_map), main_device=first_device, skip_keys=skip)
            self._restore_root(own)
            self._note_hooks()
            enter, leave = self.transfer.enter, self.transfer.leave
            before = module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
            self.handles.append(before)
            self.handles.append(module.register_forward_hook(leave))
        except BaseException:
            self._restore_root(own)
            self._note_hooks()
            self.remove()
            raise

    def _note_hooks(self) -> None:
        hooked = [part for part in self.module.modules() if hasattr(part, "_hf_hook")]
        self.hooks = {id(part): (part, part._hf_hook) for part in hooked}

    def _restore_root(self, own: Mapping[str, Any]) -> None:
        """Restores the root's attributes to `own`. A new `hf_device_map` stays, because transformers expects it."""
        for name in vars(self.module).keys() - own.keys() - {"hf_device_map"}:
            delattr(self.module, name)
        if "forward" in own:
            self.module.forward = own["forward"]

    def owns(self, part: nn.Module) -> bool:
        """Whether the hook on `part` was installed by this object."""
        known = self.hooks.get(id(part))
        return known is not None and known[1] is vars(part).get("_hf_hook")

    def remove(self) -> None:
        """Removes the hooks. The weights stay on their devices. A repeated call does nothing."""
        import_whole("accelerate.hooks")
        from accelerate.hooks import remove_hook_from_module

        for handle in self.handles:
            handle.remove()
        for part, hook in self.hooks.values():
            if vars(part).get("_hf_hook") is hook:
                remove_hook_from_module(part)
                restored = vars(part).get("forward")
                function = getattr(restored, "__func__", None)
                # A governed class wraps `forward`, see owner/pins.py.
                if function and inspect.unwrap(function) is inspect.unwrap(type(part).forward):
                    del part.forward  # the same function as the class's
        vars(self.module).pop("hf_device_map", None)
        self.hooks, self.handles = {}, []


class _Transfer:
    """Moves inputs to the first card, and outputs back to the device of the inputs."""

    def __init__(self, device: str, left_in_place: list[str] | None) -> None:
        self.device, self.left_in_place = device, left_in_place
        self.call = threading.local()  # several threads may use a model at once

    def __deepcopy__(self, memo: Any) -> _Transfer:
        return _Transfer(self.device, self.left_in_place)

    def __reduce__(self) -> Any:
        return _Transfer, (self.device, self.left_in_place)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Moves the arguments to the first card, and records the device where they were."""
        import_whole("accelerate.utils")
        from accelerate.utils import find_device, send_to_device

        self.call.source = find_device([args, kwargs])
        moved_args = send_to_device(args, self.device)
        moved_kwargs = send_to_device(kwargs, self.device, skip_keys=self.left_in_place)
        return moved_args, moved_kwargs

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Moves the output to the device of the inputs."""
        import_whole("accelerate.utils")
        from accelerate.utils import send_to_device

        source = getattr(self.call, "source", None)
        if source is None:
            return output
        return send_to_device(output, source, skip_keys=self.left_in_place)


def _arguments_left_in_place(module: nn.Module) -> list[str] | None:
    """The names of arguments of `module` that no hook moves, such as a cache with tensors on several cards."""
    names = getattr(module, "_skip_keys_device_placement", None)
    if isinstance(names, str):
        return [names]
    return sorted(names) if names else None


# -- the model

# A smaller model leaves as a whole, because its copy takes less time than the other work of a move.
LEAST_BYTES_IN_PARTS = 256 * MIB


class TorchModel:
    """A module and the places of its bytes: the handle of the PyTorch backends, not of users."""

    def __init__(
        self, spec: ModelSpec, module: nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """The handle of `module`, the model of `spec`. `optimizer` may have state of the module."""
        self.spec, self.module, self.optimizer = spec, module, optimizer
        self.former: Callable[[], nn.Module | None] = weakref.ref(module)
        self.memories: tuple[Memory, ...] = ()  # empty: not placed yet, or dropped
        self.own: dict[int, Memory] = {}  # storage that we allocated -> its memory
        # storage whose bytes left its card -> those bytes in host memory, [nbytes] uint8
        self.away: dict[int, torch.Tensor] = {}
        self.noted: dict[Memory, Block] = {}  # the account of the storages that torch allocated
        self.layout: dict[str, Memory] = {}  # path of a module -> its memory; empty on one device
        # storage on a card -> a copy in host memory of the bytes that it had when it moved there
        self.shadow: dict[int, torch.Tensor] = {}
        self.digests: dict[int, torch.Tensor] = {}  # storage -> the digest of its loaded bytes
        # storage whose bytes moved on from host memory -> their place in a file. On a real card its
        # tensor in `away` is empty then; on a simulated one the storage has a mapping of the file.
        self.stored: dict[int, park_file.Stored] = {}
        self.gate = threading.Lock()  # held while bytes are exchanged, or read for a file
        self.exchanges = 0  # how often bytes have moved; -1: it was dropped
        self.dispatch: Dispatch | None = None  # its hooks while it runs on several torch devices
        # Two models may share storages, such as the parts of one pipeline. A shared storage moves
        # only with the model that was placed first. `bases` are the models that share storages with
        # this model and were placed before it; `sharers` were placed after it.
        self.bases: weakref.WeakSet[TorchModel] = weakref.WeakSet()
        self.sharers: weakref.WeakSet[TorchModel] = weakref.WeakSet()

    @property
    @outside_modes
    def shadow_bytes(self) -> int:
        """The bytes in host memory that are copies of the model's storages on a card."""
        return sum(shadow.nbytes for shadow in self.shadow.values())

    @property
    def disk_bytes(self) -> int:
        """The bytes of the model that are in files, and not in host memory."""
        return sum([stored.bytes for stored in self.stored.values()])

    @outside_modes
    def groups(self, found: Iterable[st.TensorSlot] = ()) -> list[st.Group]:
        """The storages that move with this model, each with its tensors, also those of a sharer.

        Step counters and similar tensors, which optimizers keep on the CPU, are left out. `found` are
        the tensors of the model, if they are known.
        """
        mine = self._own_groups(found)
        return [self._with_sharers(group) for group in mine] if self.is_shared else mine

    def _own_groups(self, found: Iterable[st.TensorSlot] = ()) -> list[st.Group]:
        every = st.grouped(found or st.slots(self.module, self.optimizer))
        of_bases: set[int] = set()
        for base in self.bases:
            if base.memories:
                of_bases.update(group.storage._cdata for group in base._own_groups())
        return [g for g in every if g.storage._cdata not in of_bases and not self._stays(g)]

    @property
    @outside_modes
    def is_shared(self) -> bool:
        """Whether a model that was placed later has some of the storages of this model."""
        return any(sharer.memories for sharer in self.sharers)

    def _with_sharers(self, group: st.Group) -> st.Group:
        more: list[st.TensorSlot] = []
        known = {id(slot.tensor) for slot in group.slots}
        for sharer in self.sharers:
            for slot in st.slots(sharer.module, sharer.optimizer):
                same = slot.tensor.untyped_storage()._cdata == group.storage._cdata
                if same and id(slot.tensor) not in known:
                    known.add(id(slot.tensor))
                    more.append(slot)
        return group._replace(slots=(*group.slots, *more))

    @outside_modes
    def share_with(self, others: Iterable[TorchModel]) -> None:
        """Adds to `bases` each placed model of `others` that has storages of this model."""
        mine = {group.storage._cdata for group in st.grouped(st.slots(self.module, self.optimizer))}
        for other in others:
            if other is self or not other.memories:
                continue
            if any(group.storage._cdata in mine for group in other._own_groups()):
                self.bases.add(other)
                other.sharers.add(self)

    @outside_modes
    def hand_over(self) -> None:
        """Copies the entries of `own` to the `sharers` of the storages, before this model is dropped."""
        for group in self.groups():
            away = self.away.get(group.storage._cdata)
            storage = group.storage if away is None else away.untyped_storage()
            for sharer in self.sharers:
                if storage._cdata in self.own:
                    sharer.own = {**sharer.own, storage._cdata: self.own[storage._cdata]}

    def _stays(self, group: st.Group) -> bool:
        if group.storage.device.type != "cpu" or group.storage._cdata in self.own:
            return False
        if any(slot.kind != "state" for slot in group.slots):
            return False
        on_card = any(memory.torch != "cpu" for memory in self.memories)
        return on_card or all(slot.tensor.dim() == 0 for slot in group.slots)

    def content(self, group: st.Group) -> torch.Tensor:
        """The bytes of the storage of `group`, [nbytes] uint8, on its card or in host memory.

        For bytes in a file the tensor has no content: its device is `meta`.
        """
        if group.storage._cdata in self.stored:
            return torch.empty(group.nbytes, dtype=torch.uint8, device="meta")
        away = self.away.get(group.storage._cdata)
        return group.bytes if away is None else away

    def read(self, groups: Sequence[st.Group], targets: Sequence[Tensor]) -> None:
        """Copies those of `groups` that are in files to their `targets`. Raises Damaged, and then nothing is valid."""
        rows = zip(groups, targets, strict=True)
        keys = [(group.storage._cdata, target) for group, target in rows]
        park_file.read([(key, self.stored[key], to) for key, to in keys if key in self.stored])

    @outside_modes
    def in_ram(self) -> list[st.Group] | None:
        """The storages whose bytes are in host memory, which may move on to a file.

        None if they must stay there: another model uses them, or code could still write them.
        """
        if not self.memories or self.bases or self.is_shared:
            return None
        found = []
        for group in self.groups():
            key = group.storage._cdata
            memory = self.own.get(key) or self.memories[0]
            if memory.device != HOST or key in self.stored or not group.nbytes:
                continue
            if key not in self.away and not swap.refuses_writes(group.bytes):
                return None
            found.append(group)
        return found

    @outside_modes
    def piece_bytes(self) -> int:
        """Bytes of the largest piece of the model that can move without the others.

        0 if the model is on several cards, shares storages with another model, has one piece, or is
        smaller than LEAST_BYTES_IN_PARTS; also in host memory if torch allocated a storage of it.
        """
        cards = [memory for memory in self.memories if memory.device != HOST]
        if len(cards) > 1 or self.bases or self.is_shared:
            return 0
        groups = self.groups()
        if st.nbytes(groups) < LEAST_BYTES_IN_PARTS or (not cards and self._foreign(groups)):
            return 0
        found = pieces(self.module, groups, runs=False)
        return max((piece.bytes for piece in found), default=0) if len(found) > 1 else 0

    def _foreign(self, groups: Sequence[st.Group]) -> bool:
        """Whether torch has allocated one of the storages `groups`.

        It is counted on the device of its module, so it cannot stay while other pieces move.
        """
        return any(group.storage._cdata not in self.own for group in groups)

    @outside_modes
    def has_gradients(self) -> bool:
        """Whether a parameter has a gradient."""
        return any(parameter.grad is not None for parameter in self._parameters())

    def _parameters(self) -> Iterator[torch.Tensor]:
        for part in self.module.modules():
            yield from (weight for weight in part._parameters.values() if weight is not None)

    @outside_modes
    def needed_elsewhere(self) -> bool:
        """Whether something else needs the bytes: a live graph, a view, a state dict."""
        return any(group.referenced_elsewhere for group in self.groups())

    @outside_modes
    def moves_in_training(self) -> bool:
        """Whether the storages can move while a graph refers to them: a guard can replace their bytes."""
        return all(map(can_guard, {parameter.device for parameter in self._parameters()}))

    def is_away(self, tensor: torch.Tensor) -> bool:
        """Whether the bytes of `tensor` have left their card and a guard replaces them."""
        return bool(self.away) and tensor.untyped_storage()._cdata in self.away

    @outside_modes
    def cards_to_return_to(self) -> tuple[str, ...]:
        """The torch devices to which the model must return; empty if it can return to any device.

        A storage to which a view or a live graph refers must return to its device.
        """
        away = [group for group in self.groups() if group.storage._cdata in self.away]
        held = [str(group.storage.device) for group in away if group.referenced_elsewhere]
        return tuple(dict.fromkeys(held))

    def place_of(self, group: st.Group, by_torch_device: Mapping[str, Memory]) -> Memory:
        """The memory of the storage of `group`, one of `by_torch_device` if it is on a card.

        A storage that torch allocated on the CPU is counted on the device of its module.
        """
        known = self.own.get(group.storage._cdata)
        memory = known or by_torch_device.get(str(group.storage.device))
        if memory is not None:
            return memory
        return holder(group.slots[0].name, self.layout) if self.layout else self.memories[0]

    def hooked_by_us(self, part: nn.Module) -> bool:
        """Whether this package installed the accelerate hook on `part`."""
        return self.dispatch is not None and self.dispatch.owns(part)


class Destination(NamedTuple):
    """Where the storages of a module should go."""

    memories: tuple[Memory, ...]
    places: list[Memory]  # the memory of each of its storages
    layout: dict[str, Memory]  # path of a module -> its memory; empty on one device


def destination(
    model: TorchModel,
    groups: Sequence[st.Group],
    wanted: Mapping[Memory, int],
    now: Sequence[Memory],
) -> Destination:
    """Where the storages `groups` of `model` go, which are `now` in these memories.

    `wanted` has the bytes that each memory should get. Raises CannotGovern if the module cannot be
    cut in this way.
    """
    memories = tuple(wanted)
    if len(memories) == 1:
        return Destination(memories, [memories[0]] * len(groups), {})
    if any(memory.device == HOST for memory in memories):
        return _in_parts(model, groups, wanted, now)
    name, found = model.spec.name, pieces(model.module, groups)
    if len(found) < len(memories):
        limit = "it must stay whole"
        if len(found) > 1:
            limit = f"it has {len(found)} pieces that must stay whole"
        raise CannotGovern(
            f"{name} cannot be split over {len(memories)} devices: {limit}.\n"
            f"  Put it on one:  rt.register({name!r}, …, layout='single')",
            name=name,
            why="several devices",
        )
    numbers = cut([piece.bytes for piece in found], list(wanted.values()))
    by_storage: dict[int, Memory] = {}
    layout: dict[str, Memory] = {}
    for number, piece in zip(numbers, found, strict=True):
        layout |= dict.fromkeys(piece.modules, memories[number])
        by_storage |= {group.storage._cdata: memories[number] for group in piece.groups}
    return Destination(memories, [by_storage[group.storage._cdata] for group in groups], layout)


def _in_parts(
    model: TorchModel,
    groups: Sequence[st.Group],
    wanted: Mapping[Memory, int],
    now: Sequence[Memory],
) -> Destination:
    """The destination of a model if some whole pieces move between its card and host memory.

    If `wanted` has more bytes for the card than the model has there now, the first pieces in host
    memory return. Else the last pieces on the card leave. As many pieces move as fit into the
    wanted bytes, and all other pieces stay.
    """
    [host] = [memory for memory in wanted if memory.device == HOST]
    cards = [memory for memory in wanted if memory is not host]
    places = dict(zip((group.storage._cdata for group in groups), now, strict=False))
    sizes = {host: 0, cards[0]: 0}
    for group in groups:
        memory = places.get(group.storage._cdata, cards[0])
        sizes[memory] = sizes.get(memory, 0) + group.nbytes
    returns = wanted[cards[0]] > sizes[cards[0]]
    if returns and model._foreign([g for g in groups if places.get(g.storage._cdata) is host]):
        raise CannotGovern(
            f"{model.spec.name} cannot be partly in RAM: torch has allocated some of it.",
            name=model.spec.name,
            why="partly in RAM",
        )
    source, target = (host, cards[0]) if returns else (cards[0], host)
    left = wanted[target] - sizes[target]
    ordered = pieces(model.module, groups, runs=False)
    moved = False
    for piece in ordered if returns else reversed(ordered):
        going = [group for group in piece.groups if places.get(group.storage._cdata) is source]
        size = sum(group.nbytes for group in going)
        if 0 < size <= left:
            places |= {group.storage._cdata: target for group in going}
            left -= size
            moved = True
    at_home = set(places.values()) <= {host, cards[0]} and len(cards) == 1
    if not (moved and at_home):
        name, why = model.spec.name, "partly in RAM"
        raise CannotGovern(
            f"{name} cannot be {why}: no piece of it on {source.device} fits into "
            f"{show_bytes(max(0, left))}.",
            name=name,
            why=why,
        )
    return Destination((cards[0], host), [places[group.storage._cdata] for group in groups], {})


# -- the second phase of a move: the storages of a model get the bytes that the first phase copied
#
# The whole second phase is prepared as calls into C for `swap.at_once`. In the first phase,
# `storages.copied` makes the copies.

# Set when the interpreter ends. A drop then compares no weights and copies none for forked children:
# it would take seconds for nothing.
ending = threading.Event()
atexit.register(ending.set)


class TwoPhaseMove:
    """The calls of the second phase of one move, and a way to undo them.

    There are three cases. If a storage is on the same device as its copy, the two exchange their
    bytes; bytes that leave a simulated card refuse writes. If the bytes of a storage leave a card
    for host memory, a guard replaces them, and the copy is recorded in `away`. In all other cases,
    and if this torch cannot exchange data pointers, the storage keeps its bytes, and its tensors
    are rebound to the copy.
    """

    def __init__(
        self,
        model: TorchModel,
        groups: Sequence[st.Group],
        going: Sequence[st.Group],
        places: Sequence[Memory],
        targets: list[Tensor],
    ) -> None:
        """Prepares the calls for a move of the storages `going`, of all `groups`, to `places`.

        `targets` are the copies for `going`. This list is emptied, because a traceback with the
        caller's frame would keep the copies alive.
        """
        self.exchange = swap.Exchange()
        self.rebound: list[st.Group] = []
        self.own = _staying(model.own, groups, going)
        self.away = _staying(model.away, groups, going)
        self.stored = _staying(model.stored, groups, going)
        copies: list[Tensor] = []
        can_swap = swap.can_swap()
        for group, memory, target in zip(going, places, targets, strict=True):
            storage, content = group.storage, target.untyped_storage()
            if can_swap and storage.device == content.device:
                was_on_card = bool(model.memories) and model.place_of(group, {}).device != HOST
                leaves = memory.device == HOST and was_on_card
                self.exchange.put(storage, content, refuses=target if leaves else None)
                self.own[storage._cdata] = memory
            elif memory.device == HOST and swap.can_guard(storage.device):
                self.exchange.take(storage, away_sentence(model.spec.name))
                self.own[storage._cdata], self.away[storage._cdata] = memory, target
            else:
                self._require_returnable(model, group, memory)
                self.rebound.append(group)
                copies.append(target)
                self.own[content._cdata] = memory
        self.calls = [*self.exchange.calls, *st.rebinding(self.rebound, copies)]
        targets.clear()

    def _require_returnable(self, model: TorchModel, group: st.Group, memory: Memory) -> None:
        """Raises CannotGovern if a graph or a view needs the bytes of `group` on their old card."""
        if group.storage._cdata not in model.away or not group.referenced_elsewhere:
            return
        name, card = model.spec.name, str(group.storage.device)
        why = f"an autograd graph or a view of {group.slots[0].name} waits for it on {card}"
        raise CannotGovern(
            f"{name} cannot return to {memory.device}: {why}.\n"
            f"  Delete what holds it, for example the loss of an unfinished step, or free {card}.",
            name=name,
            why=why,
        )

    def undo(self) -> None:
        """Gives every storage and tensor its old bytes again. A repeated call does nothing."""
        self.exchange.undo()
        self.calls[:] = st.rebinding(self.rebound, [group.bytes for group in self.rebound])
        while self.calls:
            # If torch refuses to rebind a tensor here, it has also refused the first change of this
            # tensor. So this tensor has nothing to undo.
            with contextlib.suppress(RuntimeError):
                self.calls.pop()()


def _staying(
    table: Mapping[int, T], groups: Sequence[st.Group], going: Sequence[st.Group]
) -> dict[int, T]:
    """The entries of `table` for the storages of `groups` that are not in `going`."""
    staying = {group.storage._cdata for group in groups}
    staying -= {group.storage._cdata for group in going}
    return {storage: table[storage] for storage in staying & table.keys()}


def handing_over(model: TorchModel, host: Memory) -> list[Callable[[], Any]]:
    """Calls for `at_once` that give the module of `model`, which keeps them, its bytes in `host`.

    Bytes in files are read. Tensors whose bytes are damaged there become empty, and a warning names them.
    """
    away, lost = [], []
    for group in model.groups():
        if group.storage._cdata in model.stored and ending.is_set():
            continue
        if group.storage._cdata in model.away or swap.refuses_writes(group.bytes):
            away.append(group)
    while True:
        contents = [model.content(group) for group in away]
        contents = [torch.empty_like(old, device="cpu") if old.is_meta else old for old in contents]
        try:
            model.read(away, contents)
            break
        except Damaged as error:
            lost += [group for group in away if group.storage._cdata in error.keys]
            away = [group for group in away if group.storage._cdata not in error.keys]
            log.warning(
                "%s of %s is lost: %s.", show_bytes(error.bytes), model.spec.name, error.sentence
            )
    calls = st.rebinding(away, [_ordinary(content, host) for content in contents])
    return [*calls, *st.emptying([slot for group in lost for slot in group.slots])]


def _ordinary(content: Tensor, host: Memory) -> Tensor:
    """The tensor `content`, in ordinary memory of this process: a copy if it is not there.

    A write into pages that other processes share would end the process. A read of pages that forks
    leave out would end a forked child, such as a worker of a DataLoader. Bytes that left a simulated
    card refuse writes.
    """
    if swap.refuses_writes(content):
        return content if ending.is_set() else content.clone()
    pages = host.region_at(content.data_ptr())
    if pages is not None and (not pages.writable or (pages.left_out and not ending.is_set())):
        return content.clone()
    return content


def away_sentence(name: str) -> str:
    """The text of the error for an access to tensors of the model `name` that are in host memory."""
    return (
        f"the weights of {name} are in RAM (gpu-console). "
        f"Bring them back:  with rt.use({name!r}) as model:"
    )


def dropped_sentence(name: str) -> str:
    """The text of the error for an access to tensors of the model `name` after it was unloaded."""
    return (
        f"{name} is unloaded (gpu-console), and its weights are in its source. "
        f"Load them again:  with rt.use({name!r}) as model:"
    )


def nowhere() -> dict[str, Any]:
    """New attributes of a model's handle while the model is on no device."""
    tables = ("own", "away", "noted", "layout", "shadow", "digests", "stored")
    return {"memories": (), "dispatch": None, "exchanges": -1, **{name: {} for name in tables}}


def assignments(model: TorchModel, **values: Any) -> list[Callable[[], Any]]:
    """Calls for `at_once` that set the attributes `values` of `model`."""
    return [partial(setattr, model, name, value) for name, value in values.items()]
