"""The objects that the garbage collector tracks, listed without disturbing other threads."""

from __future__ import annotations

import gc
from collections.abc import Collection
from itertools import chain, compress, repeat
from typing import Any

_MOST_NEW = 256  # more than the objects that the listing itself creates


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

    The generation is listed twice, once for the objects and once for their classes. Between the
    two lists, only objects of the listing itself are added, at the end of the second list. The
    second list is read to its end, because it contains the iterators that hold it: an iterator
    that is not at its end would leave a reference cycle behind.
    """
    every = chain.from_iterable(map(gc.get_objects, (generation,)))
    again = chain.from_iterable(map(gc.get_objects, (generation,)))
    wanted = map(classes.__contains__, map(type, again))
    return list(compress(chain(every, repeat(None, _MOST_NEW)), wanted))
