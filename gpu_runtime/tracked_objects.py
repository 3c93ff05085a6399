"""The objects that the garbage collector tracks, listed without disturbing other threads."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Collection
from typing import Any

_KEPT_BY_TEE = 256  # more than the items that an exhausted `tee` still holds


def instances(classes: Collection[type]) -> list[Any]:
    """The objects that the garbage collector tracks, of exactly these `classes`.

    All objects are listed and dropped within one call of C code, so that no other thread runs
    meanwhile. A thread that builds a tuple may be its only holder: with another reference to it,
    `tuple(generator)` fails there with a SystemError. This uses type(), because isinstance() would
    call the user's `__class__` properties.
    """
    collects = gc.isenabled()
    gc.disable()  # a collection in between could call Python code
    try:
        return _listed(classes)
    finally:
        if collects:
            gc.enable()


def _listed(classes: Collection[type]) -> list[Any]:
    listed = itertools.chain.from_iterable(map(gc.get_objects, (None,)))
    # `tee` keeps its last items until it is deleted, so these are no objects of the user.
    every, again = itertools.tee(itertools.chain(listed, itertools.repeat(None, _KEPT_BY_TEE)))
    return list(itertools.compress(every, map(classes.__contains__, map(type, again))))
