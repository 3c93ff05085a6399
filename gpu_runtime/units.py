"""Bytes and seconds, as people write them and as we print them.

Inside the house a size is an int of bytes and a time is a float of seconds; words become numbers here, once.
"""

from __future__ import annotations

import functools
import re

from .errors import BadSize

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_SIZES = {
    "": 1,
    "b": 1,
    "k": KIB,
    "kib": KIB,
    "kb": 10**3,
    "m": MIB,
    "mib": MIB,
    "mb": 10**6,
    "g": GIB,
    "gib": GIB,
    "gb": 10**9,
    "t": TIB,
    "tib": TIB,
    "tb": 10**12,
}
_SECONDS = {
    "": 1.0,
    "ms": 0.001,
    "s": 1.0,
    "sec": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
_NUMBER_AND_UNIT = re.compile(r"\s*(\d+(?:[_,]\d{3})*(?:\.\d+)?|\.\d+)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str | int | float) -> int:
    """The bytes that a size names: `GiB` and a bare `G` are binary, `GB` is decimal, a bare number is bytes.

    >>> parse_bytes("14 GiB"), parse_bytes("10GB"), parse_bytes("512")
    (15032385536, 10000000000, 512)

    Raises BadSize for anything negative, empty or unknown.
    """
    if isinstance(text, bool) or not isinstance(text, (str, int, float)):
        raise BadSize(text)
    if isinstance(text, (int, float)):
        if not 0 <= text < 2**63:  # also false for nan
            raise BadSize(text)
        return int(text)
    match = _NUMBER_AND_UNIT.fullmatch(text)
    unit = _SIZES.get(match[2].lower()) if match else None
    if unit is None:
        raise BadSize(text)
    number = re.sub("[_,]", "", match[1])
    size = int(number) * unit if number.isdigit() else int(float(number) * unit)
    if size >= 2**63:
        raise BadSize(text)
    return size


def parse_room(text: str | int | float) -> int:
    """The bytes that a size names, where there must be some. Raises BadSize, also for zero.

    >>> parse_room("8 GiB")
    8589934592
    """
    size = parse_bytes(text)
    if not size:
        raise BadSize(text, what="size above zero")
    return size


def parse_seconds(text: str | int | float) -> float:
    """The seconds that a duration names.

    >>> parse_seconds("10m"), parse_seconds("1.5h"), parse_seconds(30)
    (600.0, 5400.0, 30.0)

    Raises BadSize for anything negative or unknown.
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        if not 0 <= text < float("inf"):
            raise BadSize(text, what="duration", example="30, '10m' or '2h'")
        return float(text)
    match = _NUMBER_AND_UNIT.fullmatch(text) if isinstance(text, str) else None
    unit = _SECONDS.get(match[2].lower()) if match else None
    if unit is None:
        raise BadSize(text, what="duration", example="30, '10m' or '2h'")
    return float(re.sub("[_,]", "", match[1])) * unit


@functools.lru_cache(
    maxsize=4096
)  # a decision says the same few sizes again and again: an eighth of its time
def show_bytes(size: int) -> str:
    """A size for people: three digits or so, binary units.

    >>> show_bytes(15032385536), show_bytes(0), show_bytes(700 * 2**20), show_bytes(10)
    ('14.0 GiB', '0 B', '700 MiB', '10 B')
    """
    sign, size = ("-", -size) if size < 0 else ("", size)
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            number = size / unit
            # 1023.9 MiB would print as "1024 MiB": let the digit go rather than the unit.
            return f"{sign}{number:.1f} {name}" if number < 99.95 else f"{sign}{number:.0f} {name}"
    return f"{sign}{size} B"


def show_seconds(seconds: float) -> str:
    """A duration for people.

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
    return f"{seconds / 3600:.0f} h" if seconds < 172800 else f"{seconds / 86400:.0f} d"


def is_source(name: str) -> bool:
    """Whether this name of a model says where it lies: a path, a hub id, a file of weights.

    >>> is_source("models/writer"), is_source("phi-4-Q4_K_M.gguf"), is_source("qwen3:8b")
    (True, True, False)
    """
    return "/" in name or name.endswith((".gguf", ".safetensors"))
