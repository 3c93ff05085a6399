"""A device's bar as the columns of a figure: positions on its axis, colours and hatches.

This module is pure. `bars.py` computes the contents of the bar.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from gpu_runtime.units import GIB, MIB

from ..palette import PLAIN, UNOWNED, LeaseStyle
from .bars import DeviceBar, Stretch
from .columns import Columns, as_columns

STRETCH_COLUMNS = (
    "left",
    "right",
    "colour",
    "alpha",
    "hatch",
    "ink",
    "title",
    "notebook",
    "text",
    "tooltip",
    "bytes",
    "kind",
)
MARK_COLUMNS = ("x", "dash", "width", "kind", "tooltip")
REGION_COLUMNS = ("left", "right", "alpha", "hatch", "tooltip")

# The hatches of the stretches that are not a settled lease.
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
_REGIONS = {"budget": (0.16, PLAIN), "beyond": (0.05, PLAIN), "reserve": (0.0, ".")}


class BarColumns(NamedTuple):
    """The data of a figure that shows a bar."""

    stretches: Columns
    marks: Columns
    regions: Columns
    length: float  # length of the axis, in `unit`
    unit: str  # GiB or MiB


def bar_columns(bar: DeviceBar, styles: Mapping[str, LeaseStyle], dark: bool = False) -> BarColumns:
    """The `bar` as columns.

    `styles` has the style of each lease by its label; `dark` is for a dark page.
    """
    unit_bytes, unit = unit_of(bar.device.total_bytes)
    return BarColumns(
        stretch_columns(bar, styles, dark),
        mark_columns(bar),
        region_columns(bar),
        bar.scale_bytes / unit_bytes,
        unit,
    )


def unit_of(total_bytes: int) -> tuple[int, str]:
    """The unit of an axis for `total_bytes`, in bytes and as text: GiB, or MiB for a small device."""
    return (GIB, "GiB") if total_bytes >= 2 * GIB else (MIB, "MiB")


def stretch_columns(
    bar: DeviceBar, styles: Mapping[str, LeaseStyle], dark: bool = False
) -> Columns:
    """One row for each stretch of `bar`, from left to right; see `bar_columns`.

    The two ends are in the unit of the axis. `styles` are by label; `dark` is for a dark page.
    """
    unit_bytes, _ = unit_of(bar.device.total_bytes)
    page_ink = "#ffffff" if dark else "#000000"
    position = 0
    rows = []
    for stretch in bar.stretches:
        end = position + stretch.bytes
        left, right = position / unit_bytes, end / unit_bytes
        style = styles.get(stretch.label, LeaseStyle(UNOWNED, page_ink))
        rows.append((left, right, *_drawn(stretch, style, page_ink)))
        position = end
    return as_columns(STRETCH_COLUMNS, rows)


def _drawn(stretch: Stretch, style: LeaseStyle, page_ink: str) -> tuple[Any, ...]:
    """The values of a stretch in all columns but the two for its ends."""
    is_translucent = stretch.kind in _ALPHAS
    return (
        style.colour,
        _ALPHAS.get(stretch.kind, 1.0),
        _HATCHES.get(stretch.kind, style.texture),
        page_ink if is_translucent else style.ink,
        stretch.title,
        stretch.notebook,
        "",  # the browser fills in as much of the name as fits
        stretch.tooltip,
        stretch.bytes,
        stretch.kind,
    )


def labels(drawn: Iterable[DeviceBar]) -> list[str]:
    """The labels of all leases in the `drawn` bars, for the palette.

    Their order does not depend on the sizes of the leases.
    """
    found = {stretch.label for bar in drawn for stretch in bar.stretches if stretch.label}
    return sorted(found)


def mark_columns(bar: DeviceBar) -> Columns:
    """One row for each mark of `bar`."""
    unit_bytes, _ = unit_of(bar.device.total_bytes)
    rows = []
    for mark in bar.marks:
        dash, width = ("solid", 2.5) if mark.kind == "budget" else ("dashed", 1.0)
        rows.append((mark.bytes / unit_bytes, dash, width, mark.kind, mark.tooltip))
    return as_columns(MARK_COLUMNS, rows)


def region_columns(bar: DeviceBar) -> Columns:
    """One row for each empty region of `bar`."""
    unit_bytes, _ = unit_of(bar.device.total_bytes)
    rows = [
        (
            region.start / unit_bytes,
            region.end / unit_bytes,
            *_REGIONS[region.kind],
            region.tooltip,
        )
        for region in bar.regions
    ]
    return as_columns(REGION_COLUMNS, rows)
