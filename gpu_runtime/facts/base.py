"""Constants of the book, and the base class of all facts."""

from __future__ import annotations

import msgspec
from msgspec import Struct

HOST = "host"
SCHEMA = 1
MOST_ENTRIES = 256  # leases and tickets in one page
MOST_EVENTS = 16  # events in one page, which all pay for; older ones live in the journal

NEVER = 0.0  # of a time, or not measured; say it by this name: what *is* the default takes no room in the page

IMPORTANCE = {
    "urgent": 1,
    "high": 5,
    "normal": 10,
    "low": 20,
    "batch": 30,
}  # lower is more important
NORMAL = IMPORTANCE["normal"]


class Value(Struct, frozen=True, omit_defaults=True, gc=False):
    """What all facts are: frozen, compared by value, small as JSON.

    Values cannot refer to each other in a circle, so the collector of garbage need not walk over a page's thousands.
    """


def encode(value: Value) -> bytes:
    """The value as JSON."""
    return _encoder.encode(value)


_encoder = msgspec.json.Encoder()
