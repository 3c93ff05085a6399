"""Constants of the book, the named classes of importance, and the base class of all facts."""

from __future__ import annotations

import re
from typing import Any, dataclass_transform

import msgspec
from msgspec import Struct

from ..errors import BadSetting
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


# A lower number is more important.
IMPORTANCE = {
    "urgent": 1,
    "high": 5,
    "normal": 10,
    "low": 20,
    "batch": 30,
}
NORMAL = IMPORTANCE["normal"]
_NUMBER = re.compile("-?[0-9]{1,9}")
_MOST = 999_999_999
# In the book: the importance of leases of a user who holds more than the cap. Nobody can type it.
OVER_CAP = _MOST + 1
_NAMES = {**{number: name for name, number in IMPORTANCE.items()}, OVER_CAP: "above the cap"}


def parse_importance(value: str | int, *, least: int | None = None, most: int | None = None) -> int:
    """The number that an importance stands for; lower is more important.

    `value` is the name of a class, a whole number, or a whole number as text. The number must be
    from `least` to `most`. A limit that is None does not apply.

    >>> parse_importance("high"), parse_importance(3), parse_importance("20")
    (5, 3, 20)

    Raises BadSetting for any other `value`.
    """
    number: int | None = None
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MOST:
        number = value
    elif isinstance(value, str) and _NUMBER.fullmatch(value):
        number = int(value)
    elif isinstance(value, str):
        number = IMPORTANCE.get(value)
    too_low = number is not None and least is not None and number < least
    too_high = number is not None and most is not None and number > most
    if number is None or too_low or too_high:
        raise BadSetting("importance", value, f"a number or one of {', '.join(IMPORTANCE)}")
    return number


def importance_name(number: int) -> str:
    """The name of the class with this `number`; `importance 7` for a number that is no class.

    >>> importance_name(5), importance_name(7)
    ('high', 'importance 7')
    """
    return _NAMES.get(number, f"importance {number}")
