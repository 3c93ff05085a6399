"""Bytes and seconds: converts the text that people write, and formats values for display.

Inside the package a size is an int of bytes and a time is a float of seconds. Only this module converts
text to such numbers.
"""

from __future__ import annotations

import functools
import re

from .errors import BadSize

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_SIZES = {"": 1, "b": 1} | {
    f"{letter}{end}": base**power
    for power, letter in enumerate("kmgt", 1)
    for end, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
_SECONDS = {
    "ms": 0.001,
    **dict.fromkeys(("", "s", "sec"), 1.0),
    **dict.fromkeys(("m", "min"), 60.0),
    "h": 3600.0,
    "d": 86400.0,
}
_NUMBER_AND_UNIT = re.compile(r"\s*(\d+(?:[_,]\d{3})*(?:\.\d+)?|\.\d+)\s*([a-zA-Z]*)\s*")
_MOST_BYTES = 2**63
_MOST_SECONDS = 100 * 365 * 86400.0  # longer time-outs overflow in the C library
_LAST_WALL = 2.0**32  # a date that every library has
_LEAST_RATED_SECONDS = 0.1  # a shorter time gives no meaningful rate
_LONGEST = 64  # characters of a size or a duration


def parse_bytes(text: str | int | float) -> int:
    """The bytes of the size `text`. `GiB` and a bare `G` are binary, `GB` is decimal.

    A number without a unit is a number of bytes.

    >>> parse_bytes("14 GiB"), parse_bytes("10GB"), parse_bytes("512")
    (15032385536, 10000000000, 512)

    Raises BadSize if `text` is negative, empty or no size.
    """
    if isinstance(text, bool) or not isinstance(text, (str, int, float)):
        raise BadSize(text)
    if isinstance(text, (int, float)):
        if not 0 <= text < _MOST_BYTES:  # also true for nan
            raise BadSize(text)
        return int(text)
    match = _NUMBER_AND_UNIT.fullmatch(text) if len(text) <= _LONGEST else None
    unit = _SIZES.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise BadSize(text)
    number = match[1].replace("_", "").replace(",", "")
    size = int(number) * unit if number.isdigit() else int(float(number) * unit)
    if size >= _MOST_BYTES:
        raise BadSize(text)
    return size


def parse_room(text: str | int | float) -> int:
    """The bytes of the size `text`, which must be above zero. Raises BadSize.

    Text without a unit is refused if it means less than 1 MiB. A user who types `14` wants 14 GiB,
    and the error suggests this.

    >>> parse_room("8 GiB")
    8589934592
    """
    size = parse_bytes(text)
    number = text.strip() if isinstance(text, str) else ""
    if size < MIB and number[-1:].isdigit() and number.strip("0."):
        raise BadSize(
            text,
            what="size: its unit is missing",
            example=f"'{number} B' if you mean bytes",
            meant=f"{number} GiB",
        )
    if not size:
        raise BadSize(text, what="size above zero")
    return size


def parse_seconds(text: str | int | float) -> float:
    """The seconds of the duration `text`. A number without a unit is a number of seconds.

    >>> parse_seconds("10m"), parse_seconds("1.5h"), parse_seconds(30)
    (600.0, 5400.0, 30.0)

    Raises BadSize if `text` is negative or no duration.
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        if not 0 <= text <= _MOST_SECONDS:  # also true for nan
            raise _bad_duration(text)
        return float(text)
    is_short = isinstance(text, str) and len(text) <= _LONGEST
    match = _NUMBER_AND_UNIT.fullmatch(text) if is_short else None
    unit = _SECONDS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise _bad_duration(text)
    seconds = float(re.sub("[_,]", "", match[1])) * unit
    if seconds > _MOST_SECONDS:
        raise _bad_duration(text)
    return seconds


def _bad_duration(text: object) -> BadSize:
    return BadSize(text, what="duration", example="30, '10m' or '2h'")


def in_calendar(wall: float) -> float:
    """The epoch seconds `wall` within 1970 to 2106. A book or a journal of another process may have any number.

    >>> in_calendar(12.5), in_calendar(-1.0), in_calendar(1e300) == in_calendar(2.0**32)
    (12.5, 0.0, True)
    """
    return min(max(0.0, wall), _LAST_WALL)  # 0.0 for nan, which is not above 0.0


def counted(number: int, noun: str) -> str:
    """The `number` and the `noun`, with its plural.

    >>> counted(1, "model"), counted(0, "model")
    ('1 model', '0 models')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


# A decision formats the same few sizes again and again. Without this cache the formatting takes
# 1/8 of the decision's time.
@functools.lru_cache(maxsize=4096)
def show_bytes(size: int) -> str:
    """The `size` for people, with about three digits and binary units.

    >>> show_bytes(15032385536), show_bytes(0), show_bytes(700 * 2**20), show_bytes(10)
    ('14.0 GiB', '0 B', '700 MiB', '10 B')
    """
    sign = "-" if size < 0 else ""
    size = abs(size)
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size < unit:
            continue
        number = size / unit
        # From 100 on there is no decimal. So 1023.9 MiB is shown as "1024 MiB", not as 1.0 GiB.
        digits = 1 if number < 99.95 else 0
        return f"{sign}{number:.{digits}f} {name}"
    return f"{sign}{size} B"


def show_seconds(seconds: float) -> str:
    """The duration `seconds` for people.

    >>> show_seconds(0.012), show_seconds(3.4), show_seconds(200), show_seconds(7260)
    ('12 ms', '3.4 s', '3 min', '2 h')
    """
    if seconds < 1:
        return f"{max(seconds, 0) * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    if seconds < 172800:
        return f"{seconds / 3600:.0f} h"
    return f"{seconds / 86400:.0f} d"


def show_rate(size: int, seconds: float) -> str:
    """The rate of `size` bytes in `seconds` for people, in decimal units.

    Empty if `size` is 0, or if `seconds` are too short to compute a rate.

    >>> show_rate(42 * 10**9, 20.0), show_rate(3 * 10**6, 0.5), show_rate(5, 0.01)
    ('2.1 GB/s', '6 MB/s', '')
    """
    if size <= 0 or seconds < _LEAST_RATED_SECONDS:
        return ""
    rate = size / seconds
    return f"{rate / 10**9:.1f} GB/s" if rate >= 10**9 else f"{rate / 10**6:.0f} MB/s"


def is_source(name: str) -> bool:
    """Whether `name` is a source of a model: a path, a hub id, or a file of weights.

    >>> is_source("models/writer"), is_source("phi-4-Q4_K_M.gguf"), is_source("qwen3:8b")
    (True, True, False)
    """
    return "/" in name or name.endswith((".gguf", ".safetensors"))
