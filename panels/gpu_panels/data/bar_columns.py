"""A bar as the columns that a figure is drawn from: places in the unit of its axis, colours and hatches.

Pure. What stands in the bar is `bars.py`'s to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from gpu_runtime.units import GIB, MIB

from ..palette import PLAIN, UNOWNED, Look
from .bars import Bar


class Drawing(NamedTuple):
    """All that a figure needs to show a bar."""

    stretches: dict[str, list[Any]]
    marks: dict[str, list[Any]]
    ground: dict[str, list[Any]]
    length: float  # of the axis
    unit: str


def drawing(bar: Bar, looks: Mapping[str, Look], dark: bool = False) -> Drawing:
    """The bar as columns, for a light or a dark page."""
    unit, name = unit_of(bar.device.total_bytes)
    return Drawing(columns(bar, looks, dark), lines(bar), ground(bar), bar.scale_bytes / unit, name)


def unit_of(total_bytes: int) -> tuple[int, str]:
    """The unit of an axis of that length: GiB, or MiB where a GiB would be too coarse."""
    return (GIB, "GiB") if total_bytes >= 2 * GIB else (MIB, "MiB")


_HATCHES = {
    "arriving": "/",
    "leaving": "\\",
    "residue": "/",
    "strangers": "x",
    "ended": ".",
    "others": PLAIN,
}
_ALPHAS = {
    "arriving": 0.45,
    "leaving": 0.45,
    "residue": 0.30,
    "strangers": 0.30,
    "ended": 0.20,
    "others": 0.55,
}
COLUMNS = (
    "left",
    "right",
    "colour",
    "alpha",
    "hatch",
    "ink",
    "title",
    "who",
    "text",
    "told",
    "bytes",
    "kind",
)


def columns(bar: Bar, looks: Mapping[str, Look], dark: bool = False) -> dict[str, list[Any]]:
    """A source's columns: one row a stretch, from left to right, ends in the unit of the axis."""
    unit, at, plain = unit_of(bar.device.total_bytes)[0], 0, "#ffffff" if dark else "#000000"
    rows: list[tuple[Any, ...]] = []
    for one in bar.stretches:
        look = looks.get(one.label, Look(UNOWNED, plain))
        ink = plain if one.kind in _ALPHAS else look.ink  # the page shines through
        rows.append(
            (
                at / unit,
                (at + one.bytes) / unit,
                look.colour,
                _ALPHAS.get(one.kind, 1.0),
                _HATCHES.get(one.kind, look.texture),
                ink,
                one.title,
                one.who,
                "",
                one.told,
                one.bytes,
                one.kind,
            )
        )
        at += one.bytes
    return {name: [row[n] for row in rows] for n, name in enumerate(COLUMNS)}


def labels(drawn: Iterable[Bar]) -> list[str]:
    """Of all leases in these bars, for the palette: in an order that does not depend on their sizes."""
    return sorted({one.label for bar in drawn for one in bar.stretches if one.label})


LINES = ("x", "dash", "width", "kind", "told")


def lines(bar: Bar) -> dict[str, list[Any]]:
    """A source's columns for the marks of a bar."""
    unit = unit_of(bar.device.total_bytes)[0]
    rows = [
        (
            mark.bytes / unit,
            *(("solid", 2.5) if mark.kind == "budget" else ("dashed", 1.0)),
            mark.kind,
            mark.told,
        )
        for mark in bar.marks
    ]
    return {name: [row[n] for row in rows] for n, name in enumerate(LINES)}


GROUND = ("left", "right", "alpha", "hatch", "told")
_GROUNDS = {"budget": (0.16, PLAIN), "beyond": (0.05, PLAIN), "reserve": (0.0, ".")}


def ground(bar: Bar) -> dict[str, list[Any]]:
    """A source's columns for what a bar lies on."""
    unit = unit_of(bar.device.total_bytes)[0]
    rows = [
        (one.start / unit, one.end / unit, *_GROUNDS[one.kind], one.told) for one in bar.regions
    ]
    return {name: [row[n] for row in rows] for n, name in enumerate(GROUND)}
