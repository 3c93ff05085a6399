"""Constants of the book, and the base class of all facts."""

from __future__ import annotations

from typing import Any, dataclass_transform

import msgspec
from msgspec import Struct

from ..safe_text import lines

HOST = "host"
KERNEL = "kernel"  # the name and the kind of the lease of what a notebook's own code holds
SCHEMA = 3
MOST_ENTRIES = 1024  # leases and tickets in one page
MOST_EVENTS = 16  # events in one page; every reader decodes them, so older ones are in the journal

# The value of a time or duration that means "this never happened" or "not measured". It is the
# default of such fields, because a field that equals its default is not written into the book.
NEVER = 0.0


@dataclass_transform(frozen_default=True)
class Value(Struct, frozen=True, omit_defaults=True, gc=False):
    """The base class of all facts: frozen, compared by value, small as JSON.

    Values cannot form reference cycles, so the garbage collector need not track the thousands of
    values in a book (`gc=False`).
    """

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Shows the value in IPython as `print` does. `repr` has every field."""
        printer.text(lines(str(self)))


def encode(value: Value) -> bytes:
    """`value` as JSON."""
    return _encoder.encode(value)


_encoder = msgspec.json.Encoder()
