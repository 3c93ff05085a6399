"""Finds the storages that a name reaches, and those that become free if the name is deleted.

`reached` follows references from a name to objects, also through autograd graphs. Then it counts
the references to each object, as Python's garbage collector does. If an object has more references
than those from the name and from the other reached objects, it stays after a deletion of the name,
with everything to which it refers. The count includes references from C++ that Python does not see.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...threads import outside_modes
from .search import (
    Found,
    Limit,
    constants_of,
    cpp_keeps_python,
    gradient,
    graph,
    hidden_references,
    in_saved,
    packed_classes,
    plain_tensors,
    saved_by,
    saved_in,
    tracked,
)
from .storages import behind, references_of_views
from .torch_model import TorchModel

_LEAVES = frozenset(
    (
        *(str, bytes, bytearray, int, float, complex, bool, type(None), range, slice),
        *(types.ModuleType, types.CodeType, weakref.ref),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    )
)
_LOOK_EVERY = 4096  # objects between two checks of the time limit
_STEPS_UP = 8  # the longest path from a storage that no name reaches to an object with a name
GARBAGE = "garbage in a reference cycle"
CPP = "C++ code, or a function that runs"
UNKNOWN = "something without a name"


class Reach(NamedTuple):
    """The storages that one name reaches, by their keys (`storage._cdata`)."""

    direct: frozenset[int]
    saved: frozenset[int]  # storages that the name reaches only through autograd graphs
    alone: frozenset[int]  # storages that become free if the name is deleted; empty if not whole
    whole: bool  # False: the limit ended the walk early


class Graphs:
    """The nodes of all autograd graphs of this process, each with its number of C++ references.

    For each node, `holders` has the number of tensors that the node made, plus the number of nodes
    that refer to it. This object keeps the nodes alive.
    """

    @outside_modes
    def __init__(self, limit: Limit) -> None:
        tensors = tracked(limit).tensors
        roots = [node for tensor in tensors for node in graph(tensor)]
        nodes: set[Any] = set()
        for _ in saved_in(roots, nodes, limit):
            pass
        self.holders: Counter[Any] = Counter(roots)
        for node in nodes:
            self.holders.update(below for below, _ in node.next_functions if below is not None)


@outside_modes
def reached(
    held: list[Any],
    graphs: Graphs,
    *,
    shared: Collection[int] = (),
    parked: Collection[int] = (),
    limit: Limit | None = None,
) -> Reach:
    """The storages that one name reaches. The search ends early at `limit`.

    `held` has the objects to which the name refers, with one entry for each reference. The call
    empties this list. The caller must keep no other reference to the objects, since it would be
    counted. `shared` are the ids of containers whose content is not followed, such as the
    notebook's namespace. `parked` are the keys of storages to which the record of parked bytes
    refers once; it lets go of a storage that nothing else refers to.
    """
    walk = _Walk(graphs, frozenset(shared), limit or Limit())
    walk.follow(held)
    direct = walk.storages()
    walk.follow(walk.later)
    every = walk.storages()
    alone = walk.freed(parked) & every if walk.whole else set()
    return Reach(frozenset(direct), frozenset(every - direct), frozenset(alone), walk.whole)


@outside_modes
def storages_of(handle: Any) -> frozenset[int]:
    """The keys of the storages of the model with this `handle`; empty if it is no torch model."""
    if not isinstance(handle, TorchModel):
        return frozenset()
    return frozenset(group.storage._cdata for group in handle.groups())


class _Walk:
    """The objects that one name reaches, and the references among them.

    References from nodes of autograd graphs are followed last, in a second step. So an object that
    only this step finds is reached only through graphs.
    """

    def __init__(self, graphs: Graphs, shared: Collection[int], limit: Limit) -> None:
        self._graphs, self._shared, self._limit = graphs, shared, limit
        self._objects: dict[int, Any] = {}
        self._edges: dict[int, list[int]] = {}
        self._given: Counter[int] = Counter()  # references that the name itself holds
        self._kinds = _Kinds()
        self._packed = packed_classes()
        self.later: list[Any] = []
        self.whole = True

    def storages(self) -> set[int]:
        """The keys of the storages that are reached until now."""
        return self._keys(self._objects.values())

    def _keys(self, objects: Iterable[Any]) -> set[int]:
        """The keys of the storages in `objects`, and of what has bytes outside of a storage."""
        found = set()
        for value in objects:
            kind = type(value)
            if kind is torch.UntypedStorage:
                found.add(value._cdata)
            elif kind in self._packed or (kind is Tensor and value.layout is torch._mkldnn):
                found.add(id(value))
        return found

    def follow(self, pending: list[Any]) -> None:
        """Follows all references from the objects in `pending`, and empties this list.

        If a node of an autograd graph is found, it is put into `later` and not followed yet.
        """
        if pending is not self.later:
            self._given.update(map(id, pending))
        while pending:
            parent = pending.pop()
            if id(parent) in self._objects or self._is_leaf(parent):
                continue
            self._objects[id(parent)] = parent
            if not len(self._objects) % _LOOK_EVERY and self._limit.over:
                self.whole = False
                pending.clear()
                return
            edges = self._edges[id(parent)] = []
            for below in self._children(parent):
                edges.append(id(below))
                (self.later if self._kinds.is_node(type(below)) else pending).append(below)

    def _is_leaf(self, value: Any) -> bool:
        kind = type(value)
        if kind in _LEAVES or id(value) in self._shared:
            return True
        if issubclass(kind, type):  # a class: only classes of the notebook are followed
            return getattr(value, "__module__", "") != "__main__"
        return issubclass(kind, types.ModuleType)

    def _children(self, parent: Any) -> list[Any]:
        """The objects to which `parent` refers, in Python and in C++, with an entry per reference."""
        kind = type(parent)
        if kind is torch.UntypedStorage:
            return []
        below = gc.get_referents(parent)
        if (content := self._kinds.content_of(kind)) is not None:
            with contextlib.suppress(Exception):  # a future that ended with an error
                below += content(parent)
        if kind is types.FunctionType:  # all functions of a module share its globals: not followed
            own = (parent.__globals__, parent.__builtins__)
            return [child for child in below if not any(child is names for names in own)]
        if self._kinds.is_node(kind):
            below += (child for child, _ in parent.next_functions if child is not None)
            below += saved_by(parent)
        elif issubclass(kind, Tensor):
            # `gc.get_referents` returns a tensor's node only in some cases; `_of_tensor` always does.
            below = [child for child in below if not self._kinds.is_node(type(child))]
            below += _of_tensor(parent)
        return below

    def freed(self, parked: Collection[int]) -> set[int]:
        """The keys of the storages that a deletion of the name would free. For `parked` see `reached`.

        The method is trial deletion, as in Python's garbage collector: the references from the name
        and among the reached objects are subtracted. Whatever still has references would stay.
        """
        references = _references(self._objects, self._graphs, self._kinds)
        for key, count in self._given.items():
            references[key] = references.get(key, 0) - count
        for edges in self._edges.values():
            for key in edges:
                if key in references:
                    references[key] -= 1
        for key, value in self._objects.items():
            if type(value) is torch.UntypedStorage and value._cdata in parked:
                references[key] -= 1
        pending = [key for key, count in references.items() if count > 0]
        staying = set(pending)
        while pending:
            for key in self._edges.get(pending.pop(), ()):
                if key not in staying:
                    staying.add(key)
                    pending.append(key)
        return self._keys(value for key, value in self._objects.items() if key not in staying)


# The objects of torch's C++ code whose content Python cannot list, by class.
_IN_CPP: dict[type, Callable[[Any], list[Any]]] = {
    torch._C.Future: lambda future: [future.value()] if future.done() else [],
    torch._C._autograd.SavedTensor: in_saved,  # type: ignore[attr-defined]
    torch._C.ScriptList: list,
    torch._C.ScriptDict: lambda table: [part for item in table.items() for part in item],
    torch._C.ScriptFunction: constants_of,
    torch.jit.ScriptModule: lambda root: [*root.parameters(), *root.buffers(), *constants_of(root)],
}


def _of_tensor(tensor: Tensor) -> list[Any]:
    """The objects to which the C++ object of the `tensor` refers."""
    below: list[Any] = [*gradient(tensor), *graph(tensor)]
    try:
        if tensor._is_view():
            below += [tensor._base] * (1 + behind(tensor).references)
        for part in plain_tensors(tensor):
            if part is tensor:
                below.append(part.untyped_storage())
            elif part._use_count() > 1:
                below.append(part)
            else:  # torch made this object for the call above: `tensor` refers to the storage itself
                below += (part, part.untyped_storage())
    except Exception:  # an opaque tensor, or code of another library
        pass
    return below


class _Kinds:
    """Finds out whether the objects of a class are nodes of autograd graphs, or hold objects in C++.

    The results are stored by the ids of the classes. A reference to a class of the notebook would
    keep this class alive.
    """

    def __init__(self) -> None:
        self._known: dict[int, bool] = {}
        self._content: dict[int, Callable[[Any], list[Any]] | None] = {}

    def content_of(self, kind: type) -> Callable[[Any], list[Any]] | None:
        """A function that lists what objects of the class `kind` hold in C++; None for most."""
        if id(kind) not in self._content:
            found = [content for above, content in _IN_CPP.items() if issubclass(kind, above)]
            self._content[id(kind)] = found[0] if found else None
        return self._content[id(kind)]

    def is_node(self, kind: type) -> bool:
        """Whether objects of the class `kind`, which exists now, are nodes."""
        known = self._known.get(id(kind))
        if known is None:
            attribute = getattr(kind, "next_functions", None)
            known = self._known[id(kind)] = isinstance(attribute, types.GetSetDescriptorType)
        return known


# -- counting references ---------------------------------------------------------------------------


def _references(objects: Mapping[int, Any], graphs: Graphs, kinds: _Kinds) -> dict[int, int]:
    """The number of references to each of `objects`, also from C++, without those of this module."""
    ours = _counts({0: object()})[0]
    counts = _counts(objects)
    for key, value in objects.items():
        kind = type(value)
        counts[key] -= ours
        if kind is torch.UntypedStorage:
            counts[key] += _in_cpp(torch._C._storage_Use_Count(value._cdata))
        elif issubclass(kind, Tensor):
            counts[key] += _in_cpp(value._use_count())
        elif kinds.is_node(kind):
            counts[key] = graphs.holders[value] + max(0, counts[key] - _references_to_node())
    return counts


def _counts(objects: Mapping[int, Any]) -> dict[int, int]:
    return {key: sys.getrefcount(value) for key, value in objects.items()}


def _in_cpp(uses: int) -> int:
    """The references among all `uses` of a C++ object that Python's count does not include.

    One is from its Python object, the others from C++. Since torch 2.10, those from C++ together
    hold one reference to the Python object, which Python counts.
    """
    others = uses - 1
    return others - 1 if others > 0 and cpp_keeps_python() else others


@functools.cache
def _references_to_node() -> int:
    """The references to a node's Python object that `Graphs.holders` and torch hold, not the user."""
    with torch.enable_grad():
        result = torch.ones(1, requires_grad=True) * 2
    objects: dict[int, Any] = {0: result.grad_fn}
    holders = Counter(objects.values())
    return _counts(objects)[0] - _counts({0: object()})[0] + (0 if holders else 1)


# -- what no name reaches --------------------------------------------------------------------------


@outside_modes
def referrer(storage: Found, ignored: Collection[int], limit: Limit) -> str:
    """The name of the module, class or cache that refers to a `storage` which no variable reaches.

    Goes from the storage to the objects that refer to it, then to the objects that refer to those,
    and so on. Each step checks all objects of the process. If a step finds no further object, the
    result is GARBAGE, or CPP if something that Python cannot list holds one of the objects. If
    `limit` or _STEPS_UP steps are reached, it is UNKNOWN. `ignored` are the ids of objects of the
    search itself.
    """
    level = [target for target in (storage.storage, *storage.tensors) if target is not None]
    visited = level
    seen = {*ignored, id(storage), id(storage.tensors), *map(id, level), *_running_frames()}
    for _ in range(_STEPS_UP):
        seen |= {id(level), id(visited)}
        if limit.over:
            return UNKNOWN
        above: list[Any] = []
        seen.add(id(above))
        for holder in gc.get_referrers(*level):
            if id(holder) in seen:
                continue
            seen.add(id(holder))
            named = _named(holder)
            if named:
                return named
            above.append(holder)
        if not above:
            return CPP if _is_held(visited) else GARBAGE
        level = above
        visited = [*visited, *above]
    return UNKNOWN


def _running_frames() -> Iterator[int]:
    """The ids of the frames of all functions that run. A frame that has ended belongs to a traceback."""
    for frame in sys._current_frames().values():
        above: types.FrameType | None = frame
        while above is not None:
            yield id(above)
            above = above.f_back


def _is_held(objects: list[Any]) -> bool:
    """Whether anything but listed Python objects holds one of `objects`."""
    tensors = [tensor for tensor in objects if isinstance(tensor, Tensor)]
    views_of = references_of_views(tensors)
    in_cpp = any(tensor._use_count() > 1 + views_of[id(tensor)] for tensor in tensors)
    return in_cpp or any(count > 0 for count in hidden_references(objects).values())


def _named(holder: Any) -> str:
    """The name of the referrer `holder`; empty if it has no name."""
    if isinstance(holder, type):
        return f"class {holder.__module__}.{holder.__qualname__}"
    if isinstance(holder, dict) and "__name__" in holder and "__loader__" in holder:
        return f"module {holder['__name__']}"
    if type(holder) is functools._lru_cache_wrapper:
        return f"functools.cache of {holder.__qualname__}"
    return ""
