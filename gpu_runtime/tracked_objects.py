"""The objects that the garbage collector tracks, listed without disturbing other threads."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Collection
from itertools import chain, compress, tee
from typing import Any


class _Frozen:
    """The results of searches for frozen objects, which are objects that `gc.freeze()` has hidden.

    For each set of classes, weak references to the objects that were found are kept. They are kept
    until more objects are frozen, or until no object is frozen.
    """

    count = 0  # number of frozen objects at the last search; releasing objects reduces it
    found: dict[frozenset[int], list[Callable[[], Any]]] = {}  # noqa: RUF012  # by ids of classes


def instances(classes: Collection[type]) -> list[Any]:
    """The objects that the garbage collector tracks, of exactly these `classes`.

    Objects that `gc.freeze()` hid are included if they can be reached from a module. Frozen objects
    that only local variables of a running function refer to are missing: reading the variables
    would keep the objects alive.

    All objects of a generation are listed and dropped within one call of C code, so that no other
    thread runs during the listing. If another thread ran and was building a tuple, the list could
    refer to the unfinished tuple, and `tuple(generator)` would fail in the other thread with a
    SystemError. The classes are compared by type(), because isinstance() would call the user's
    `__class__` properties.
    """
    collects = gc.isenabled()
    try:
        # A collection would call Python code, and would move objects between generations. An
        # interrupt can take effect just after `gc.disable()`, so the call is inside the `try`.
        gc.disable()
        found = {}
        for generation in range(len(gc.get_count())):  # the youngest first: objects only grow older
            for one in _listed(generation, classes):
                found[id(one)] = one
        for one in _frozen(classes):
            found[id(one)] = one
        return list(found.values())
    finally:
        if collects:
            gc.enable()


def _listed(generation: int, classes: Collection[type]) -> list[Any]:
    """The objects of these `classes` in one `generation` of the garbage collector.

    The list of all objects is read twice: for the objects and for their classes. The list also
    contains the iterators that refer to the list, which is a reference cycle. So the list is
    emptied at the end.
    """
    objects, again, emptied = tee(map(gc.get_objects, (generation,)), 3)
    wanted = map(classes.__contains__, map(type, chain.from_iterable(again)))
    found = compress(chain.from_iterable(objects), wanted)
    return list(chain(found, filter(None, map(list.clear, emptied))))  # `clear` returns None


def _frozen(classes: Collection[type]) -> list[Any]:
    """The objects of these `classes` that modules reach; empty if no object is frozen.

    Python does not list frozen objects. Following all references took 0.5 s for 170,000 objects, so
    the result is kept, with weak references, until more objects are frozen.
    """
    count = gc.get_freeze_count()
    if not count or count > _Frozen.count:
        _Frozen.found.clear()
    _Frozen.count = count
    if not count:
        return []
    key = frozenset(map(id, classes))
    found = _Frozen.found.get(key)
    if found is None:
        found = _Frozen.found[key] = [weakref.ref(one) for one in _reachable(classes)]
    return [one for known in found if (one := known()) is not None]


def _reachable(classes: Collection[type]) -> list[Any]:
    """The objects of these `classes` that can be reached from modules."""
    level: list[Any] = list(sys.modules.values())
    seen = set(map(id, level))
    found: list[Any] = []
    while level:
        below = {id(one): one for one in gc.get_referents(*level) if gc.is_tracked(one)}
        level = [one for key, one in below.items() if key not in seen]
        seen.update(below)
        found += (one for one in level if type(one) in classes)
    return found
