"""Importance: the five named classes, and how people write them."""

from __future__ import annotations

import re

from ..errors import BadSetting

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
