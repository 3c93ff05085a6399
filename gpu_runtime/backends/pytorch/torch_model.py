"""`TorchModel`: the data that the PyTorch backends keep about one governed `nn.Module`.

A TorchModel records the place of each storage of the model. The code here copies and allocates
nothing; `torch_backend.py` and `storages.py` copy and allocate.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ...devices.process_memory import Block, Memory
from ...errors import CannotGovern
from ...facts import HOST, ModelSpec
from ...torch_modes import outside_modes
from ...units import MIB, show_bytes
from . import storages as st
from .device_hooks import Dispatch
from .pieces import cut, holder, pieces
from .swap import can_guard

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

    @outside_modes
    def groups(self) -> list[st.Group]:
        """The storages that move with this model, each with its tensors, also those of a sharer.

        Step counters and similar tensors, which optimizers keep on the CPU, are left out.
        """
        mine = self._own_groups()
        return [self._with_sharers(group) for group in mine] if self.is_shared else mine

    def _own_groups(self) -> list[st.Group]:
        every = st.grouped(st.slots(self.module, self.optimizer))
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
        """The bytes of the storage of `group`, [nbytes] uint8, wherever they are now."""
        away = self.away.get(group.storage._cdata)
        return group.bytes if away is None else away

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
            yield from (one for one in part._parameters.values() if one is not None)

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
            f"{model.spec.name} cannot be partly in host memory: torch has allocated some of it.",
            name=model.spec.name,
            why="partly in host memory",
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
        name, why = model.spec.name, "partly in host memory"
        raise CannotGovern(
            f"{name} cannot be {why}: no piece of it on {source.device} fits into "
            f"{show_bytes(max(0, left))}.",
            name=name,
            why=why,
        )
    return Destination((cards[0], host), [places[group.storage._cdata] for group in groups], {})
