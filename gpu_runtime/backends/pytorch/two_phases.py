"""The second phase of a move: the storages of a model get the bytes that the first phase copied.

This module prepares the whole second phase as calls into C for `swap.at_once`. In the first phase,
`storages.copied` makes the copies.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from ...devices.process_memory import Memory
from ...errors import CannotGovern
from ...facts import HOST
from . import storages as st
from . import swap
from .torch_model import TorchModel

# Set when the interpreter ends. A drop then compares no weights and copies none for forked children:
# it would take seconds for nothing.
ending = threading.Event()
atexit.register(ending.set)

T = TypeVar("T")


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
        copies: list[Tensor] = []
        for group, memory, target in zip(going, places, targets, strict=True):
            storage, content = group.storage, target.untyped_storage()
            if swap.can_swap() and storage.device == content.device:
                leaves = memory.device == HOST and _was_on_card(model, group)
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


def _was_on_card(model: TorchModel, group: st.Group) -> bool:
    """Whether the CPU storage of `group` was on a simulated card."""
    return bool(model.memories) and model.place_of(group, {}).device != HOST


def _staying(
    table: Mapping[int, T], groups: Sequence[st.Group], going: Sequence[st.Group]
) -> dict[int, T]:
    """The entries of `table` for the storages of `groups` that are not in `going`."""
    staying = {group.storage._cdata for group in groups}
    staying -= {group.storage._cdata for group in going}
    return {storage: table[storage] for storage in staying & table.keys()}


def handing_over(model: TorchModel, host: Memory) -> list[Callable[[], Any]]:
    """Calls for `at_once` that give the module of `model`, which keeps them, its bytes in `host`."""
    away = [
        group
        for group in model.groups()
        if group.storage._cdata in model.away or swap.refuses_writes(group.bytes)
    ]
    return st.rebinding(away, [_ordinary(model.content(group), host) for group in away])


def _ordinary(content: Tensor, host: Memory) -> Tensor:
    """The tensor `content`, in ordinary memory of this process: a copy if it is not there.

    A write into pages that other processes share would end the process. A read of pages that forks
    leave out would end a forked child, such as a worker of a DataLoader. Bytes that left a simulated
    card refuse writes.
    """
    if swap.refuses_writes(content):
        return content if ending.is_set() else content.clone()
    address = content.data_ptr()
    left_out = host.is_left_out_of_forks(address) and not ending.is_set()
    return content.clone() if left_out or host.is_read_only(address) else content


def away_sentence(name: str) -> str:
    """The text of the error for an access to tensors of the model `name` that are in host memory."""
    return (
        f"the weights of {name} are in host memory (gpu-console). "
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
    tables = ("own", "away", "noted", "layout", "shadow", "digests")
    return {"memories": (), "dispatch": None, **{name: {} for name in tables}}


def assignments(model: TorchModel, **values: Any) -> list[Callable[[], Any]]:
    """Calls for `at_once` that set the attributes `values` of `model`."""
    return [partial(setattr, model, name, value) for name, value in values.items()]
