"""The data of a chart as columns, in the form of Bokeh's data sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpu_runtime.units import GIB, MIB

Columns = dict[str, list[Any]]  # name -> one value for each row


def as_columns(names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> Columns:
    """The `rows` as columns: name -> list of values. Each row has one value for each of the `names`.

    >>> as_columns(("x", "y"), [(1, 2), (3, 4)])
    {'x': [1, 3], 'y': [2, 4]}
    """
    return {name: [row[n] for row in rows] for n, name in enumerate(names)}


def unit_of(total_bytes: int) -> tuple[int, str]:
    """The unit of an axis for `total_bytes`, in bytes and as text: GiB, or MiB for a small device."""
    return (GIB, "GiB") if total_bytes >= 2 * GIB else (MIB, "MiB")


def interval(length: float) -> float:
    """The step between the ticks of an axis with this `length`. The axis then has four to eight ticks.

    The step is a power of two, because memory sizes often are.
    """
    step = 1.0
    while length / step > 8:
        step *= 2
    return step
