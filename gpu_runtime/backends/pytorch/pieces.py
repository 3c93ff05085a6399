"""Divides a module into pieces, and assigns the pieces to several cards.

A piece is a part that must stay together: a layer, the embeddings, the head. Pieces have the order
of the module tree, and each card gets consecutive pieces. So a forward pass changes from each card
to the next only once. Parts that share a storage (tied weights, shared buffers) are one piece, at
the place of the first part, because a storage is on one card only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

from torch import Tensor, nn

from .storages import Group

T = TypeVar("T")
_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Piece(NamedTuple):
    """Parts of a module that go to the same card."""

    modules: tuple[str, ...]  # the paths of the parts, in order; the path of the root is empty
    groups: tuple[Group, ...]

    @property
    def bytes(self) -> int:
        """The bytes of its storages."""
        return sum(group.nbytes for group in self.groups)


class _Sets:
    """Disjoint sets of numbers. The name of each set is its smallest number."""

    def __init__(self, count: int) -> None:
        self._parents = list(range(count))

    def first(self, number: int) -> int:
        while self._parents[number] != number:
            number = self._parents[number]
        return number

    def join(self, one: int, other: int) -> None:
        low, high = sorted((self.first(one), self.first(other)))
        self._parents[high] = low


def pieces(module: nn.Module, groups: Sequence[Group], *, runs: bool = True) -> tuple[Piece, ...]:
    """The pieces of `module`, in order, each with its storages of `groups`; one if it cannot be cut.

    With `runs=False`, no code calls the module while its pieces are on different devices. It is then
    also cut where accelerate's hooks could not run it.
    """
    leaves = list(_leaves(module)) if _may_be_cut(module) or not runs else []
    if not leaves:
        leaves = [("", module)]
    sets = _Sets(len(leaves))
    owners: dict[int, int] = {}  # storage -> the first leaf that has it
    for index, (_, leaf) in enumerate(leaves):
        if not any(p is not None for part in leaf.modules() for p in part._parameters.values()):
            sets.join(index, 0)  # rotary angles and the like are needed before the first layer
        for tensor in _tensors(leaf):
            if tensor.nbytes:
                storage = tensor.untyped_storage()._cdata
                sets.join(index, owners.setdefault(storage, index))
    indices = {path: index for index, (path, _) in enumerate(leaves)}
    modules: dict[int, list[str]] = {}
    held: dict[int, list[Group]] = {}
    for path, index in indices.items():
        modules.setdefault(sets.first(index), []).append(path)
        held.setdefault(sets.first(index), [])
    for group in groups:
        leaf_index = owners.get(group.storage._cdata)
        if leaf_index is None:  # a gradient or optimizer state: with its parameter
            leaf_index = holder(group.slots[0].name, indices)
        held[sets.first(leaf_index)].append(group)
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
