"""The objects that the garbage collector tracks, listed without disturbing other threads."""

from __future__ import annotations

import gc
from collections.abc import Collection
from itertools import chain, compress, tee
from typing import Any


def instances(classes: Collection[type]) -> list[Any]:
    """The objects that the garbage collector tracks, of exactly these `classes`.

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
