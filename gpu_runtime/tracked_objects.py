"""The objects that the garbage collector tracks, listed without disturbing other threads."""

from __future__ import annotations

import gc
import operator
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import chain, compress, tee
from typing import Any

# Python 3.12 freezes objects of its own, such as the bases of built-in classes: 375 in 3.12.1. `gc.freeze()` freezes
# all objects that are tracked then: more than 5,000 in any process.
PYTHONS_OWN = 1_000 if sys.version_info[:2] == (3, 12) else 0


class _Frozen:
    """The results of earlier searches for frozen objects: objects that `gc.freeze()` has hidden.

    A result is a list of weak references to the objects of some classes. It is kept until more
    objects are frozen, or until no object is frozen.
    """

    count = 0  # number of frozen objects at the last search; releasing objects reduces it
    found: dict[frozenset[int], list[Callable[[], Any]]] = {}  # noqa: RUF012  # by ids of classes


def instances(classes: Collection[type]) -> list[Any]:
    """The objects that the garbage collector tracks, of exactly these `classes`.

    Objects that `gc.freeze()` hid are included if they can be reached from a module. Frozen objects
    that only the local variables of a running function refer to are missing. Reading these
    variables would keep the objects alive.

    All objects of a generation are listed and released within one call of C code, so that no other
    thread runs meanwhile. Otherwise the list could refer to a tuple that another thread is still
    building, and `tuple(generator)` in that thread would raise a SystemError. The classes are
    compared by type(), because isinstance() would call the user's `__class__` properties.
    """
    collects = gc.isenabled()
    try:
        # A collection would call Python code, and would move objects between generations. An
        # interrupt can take effect just after `gc.disable()`, so the call is inside the `try`.
        gc.disable()
        found = {}
        for generation in range(len(gc.get_count())):  # the youngest first: objects only grow older
            for instance in _listed(generation, classes):
                found[id(instance)] = instance
        for instance in _frozen(classes):
            found[id(instance)] = instance
        return list(found.values())
    finally:
        if collects:
            gc.enable()


def frozen() -> int:
    """The number of objects that `gc.freeze()` has hidden. 0 if only Python itself has frozen objects."""
    count = gc.get_freeze_count()
    return count if count > PYTHONS_OWN else 0


def readable(objects: Iterable[Any]) -> Iterator[Any]:
    """The `objects` that `gc.get_referents` may read: all but asyncio's C module. No Python code runs.

    In Python 3.12 that module also lists objects that it has freed and keeps for later. The list of
    `gc.get_referents` frees them again. They form a ring then, which the next call follows until
    the memory of the machine is full.
    """
    return filter(partial(operator.is_not, sys.modules.get("_asyncio")), objects)


def subclasses(kind: type) -> set[type]:
    """The class `kind` and all its direct and indirect subclasses."""
    known, pending = {kind}, [kind]
    while pending:
        for below in type.__subclasses__(pending.pop()):
            if below not in known:
                known.add(below)
                pending.append(below)
    return known


def _listed(generation: int, classes: Collection[type]) -> list[Any]:
    """The objects of these `classes` in one `generation` of the garbage collector.

    The list of all objects is read twice: for the objects and for their classes. It also contains
    the iterators of this function, which refer to the list. This is a reference cycle, so the last
    step empties the list.
    """
    objects, again, emptied = tee(map(gc.get_objects, (generation,)), 3)
    wanted = map(classes.__contains__, map(type, chain.from_iterable(again)))
    found = compress(chain.from_iterable(objects), wanted)
    return list(chain(found, filter(None, map(list.clear, emptied))))  # `clear` returns None


def _frozen(classes: Collection[type]) -> list[Any]:
    """The objects of these `classes` that modules reach; empty if no object is frozen.

    Python does not list frozen objects, so all references from modules are followed. This took 0.5
    s for 170,000 objects. So the result is kept until more objects are frozen; see `_Frozen`.
    """
    count = frozen()
    if not count or count > _Frozen.count:
        _Frozen.found.clear()
    _Frozen.count = count
    if not count:
        return []
    key = frozenset(map(id, classes))
    found = _Frozen.found.get(key)
    if found is None:
        found = _Frozen.found[key] = [weakref.ref(instance) for instance in _reachable(classes)]
    return [instance for known in found if (instance := known()) is not None]


def _reachable(classes: Collection[type]) -> list[Any]:
    """The objects of these `classes` that can be reached from modules."""
    level: list[Any] = list(sys.modules.values())
    seen = set(map(id, level))
    found: list[Any] = []
    while level:
        below = {
            id(value): value for value in gc.get_referents(*readable(level)) if gc.is_tracked(value)
        }
        level = [value for key, value in below.items() if key not in seen]
        seen.update(below)
        found += (value for value in level if type(value) in classes)
    return found
