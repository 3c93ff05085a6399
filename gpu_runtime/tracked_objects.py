"""The objects that the garbage collector tracks, listed without disturbing other threads."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Collection
from itertools import chain, compress, tee
from typing import Any


class _Frozen:
    """The objects of some classes that `gc.freeze()` hid, as found by the last search."""

    count = 0  # of all frozen objects: a smaller count means only that some were released
    found: dict[frozenset[int], list[Callable[[], Any]]] = {}  # noqa: RUF012  # by ids of classes


def instances(classes: Collection[type]) -> list[Any]:
    """The objects that the garbage collector tracks, of exactly these `classes`.

    Objects that `gc.freeze()` hid are included if a module leads to them. Those that only the variables
    of a running function lead to are missing: to read the variables would keep them alive.

    All objects of a generation are listed and dropped within one call of C code, so that no other
    thread runs meanwhile. A thread that builds a tuple must be its only holder: with another
    reference to the tuple, `tuple(generator)` fails there with a SystemError. The classes are
    compared by type(), because isinstance() would call the user's `__class__` properties.
    """
    collects = gc.isenabled()
    try:
        # A collection would call Python code, and would move objects between generations. An
        # interrupt takes effect after a call, so the call is inside this block.
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
    """The objects of one generation, of these `classes`.

    The list of all objects is read for the objects and for their classes. It is emptied at the end,
    because it contains the iterators that hold it, and would leave a reference cycle behind.
    """
    objects, again, emptied = tee(map(gc.get_objects, (generation,)), 3)
    wanted = map(classes.__contains__, map(type, chain.from_iterable(again)))
    found = compress(chain.from_iterable(objects), wanted)
    return list(chain(found, filter(None, map(list.clear, emptied))))  # `clear` returns None


def _frozen(classes: Collection[type]) -> list[Any]:
    """The objects of these `classes` to which modules lead; none if none is frozen.

    Python lists no frozen objects. To follow all references took 0.5 s for 170,000 objects, so the
    result is kept, with weak references, until more objects are frozen.
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
    """The objects of these `classes` to which modules lead."""
    level: list[Any] = list(sys.modules.values())
    seen = set(map(id, level))
    found: list[Any] = []
    while level:
        below = {id(one): one for one in gc.get_referents(*level) if gc.is_tracked(one)}
        level = [one for key, one in below.items() if key not in seen]
        seen.update(below)
        found += (one for one in level if type(one) in classes)
    return found
