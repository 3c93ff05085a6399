"""Where a module may be cut when it goes over several cards, and which card each piece then lies on.

A piece is what stays together: a layer, the embeddings, the head. Pieces are consecutive in the order of the module
tree, and so is what one card gets of them: then a forward pass crosses from card to card once. What shares a storage
(tied weights, shared buffers) is one piece, at the place of its first part, since a storage lies on one card only.
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
    """Parts of a module that lie on one card."""

    modules: tuple[str, ...]  # their paths, in order; the root's is empty
    groups: tuple[Group, ...]

    @property
    def bytes(self) -> int:
        return sum(group.nbytes for group in self.groups)


def pieces(module: nn.Module, groups: Sequence[Group]) -> tuple[Piece, ...]:
    """The module's pieces, in order, and which of these storages each holds. One piece: it cannot be cut."""
    leaves = list(_leaves(module)) if _may_be_cut(module) else []
    if not leaves:
        leaves = [("", module)]
    joins = list(range(len(leaves)))  # leaf -> the first leaf of its piece
    owner: dict[int, int] = {}  # storage -> a leaf that has it

    def first(leaf: int) -> int:
        while joins[leaf] != leaf:
            leaf = joins[leaf]
        return leaf

    for index, (_, leaf) in enumerate(leaves):
        one = (
            index if any(True for _ in leaf.parameters()) else 0
        )  # angles and the like: needed before the first layer
        for other in (
            one,
            *(
                owner.setdefault(t.untyped_storage()._cdata, index)
                for t in _tensors(leaf)
                if t.nbytes
            ),
        ):
            low, high = sorted((first(index), first(other)))
            joins[high] = low
    paths = {path: index for index, (path, _) in enumerate(leaves)}
    held: dict[int, list[Group]] = {first(index): [] for index in range(len(leaves))}
    for group in groups:
        leaf = owner.get(group.storage._cdata)
        held[first(holder(group.slots[0].name, paths) if leaf is None else leaf)].append(group)
    return tuple(
        Piece(
            tuple(path for index, (path, _) in enumerate(leaves) if first(index) == start),
            tuple(some),
        )
        for start, some in held.items()
    )


def cut(sizes: Sequence[int], shares: Sequence[int]) -> list[int]:
    """For each piece the number of its share: consecutive pieces, cut where the shares' sums are nearest.

    Shares are compared as parts of their sum, so they may count more than the pieces do. Every share gets a piece.
    Raises ValueError where there are fewer pieces than shares.

    >>> cut([4, 2, 2, 2, 2], [60, 60])
    [0, 0, 1, 1, 1]
    >>> cut([10, 1, 1], [1, 1, 1])
    [0, 1, 2]
    """
    if len(sizes) < len(shares):
        raise ValueError(f"{len(sizes)} pieces for {len(shares)} shares")
    ends, total, wanted = list(accumulate(sizes, initial=0)), sum(sizes), sum(shares) or 1
    cuts, start = [], 0
    for number, sum_of_shares in enumerate(accumulate(shares[:-1]), 1):
        last = len(sizes) - (
            len(shares) - number
        )  # as many pieces are left as there are shares after this one
        start = min(
            range(start + 1, last + 1),
            key=lambda at: abs(ends[at] * wanted - sum_of_shares * total),
        )
        cuts.append(start)
    return [sum(at >= cut for cut in cuts) for at in range(len(sizes))]


def holder(name: str, table: Mapping[str, T]) -> T:
    """What the table says of the module that this tensor belongs to, or whose gradient or state it is; of the first
    module for what belongs to none.

    >>> holder("layers.1.norm.weight:exp_avg", {"embed": "cuda:0", "layers.1": "cuda:1"})
    'cuda:1'
    """
    path = name.partition(":")[0]
    while path and path not in table:
        path = path.rpartition(".")[0]
    return table[path] if path in table else next(iter(table.values()))


def _may_be_cut(module: nn.Module) -> bool:
    """Not what holds weights at its root, which no hook carries from card to card; nor a transformers model whose
    authors do not say which of its modules stay whole."""
    own = {
        name
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    }
    return not own - module._non_persistent_buffers_set and bool(
        getattr(module, "_no_split_modules", True)
    )


def _leaves(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """What stays whole, in order: the modules that `_no_split_modules` names, where a model has that; else the root's
    children. Lists of modules are taken apart either way, a module with tensors of its own never."""
    whole = getattr(module, "_no_split_modules", None)
    names = frozenset(whole or ())

    def below(parent: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        for (
            name,
            child,
        ) in (
            parent._modules.items()
        ):  # named_children would tell a module that is used twice only once
            if child is None or next(_tensors(child), None) is None:
                continue
            here = f"{path}.{name}" if path else name
            opens = isinstance(child, _LISTS) or (bool(names) and type(child).__name__ not in names)
            if opens and child._modules and next(_own(child), None) is None:
                yield from below(child, here)
            else:
                yield here, child

    return below(module, "")


def _own(module: nn.Module) -> Iterator[Tensor]:
    yield from (
        t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None
    )


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
