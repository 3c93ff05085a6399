"""Columns: the data of a chart in the form of Bokeh's data sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Columns = dict[str, list[Any]]  # name -> one value for each row


def as_columns(names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> Columns:
    """The `rows` as columns: name -> list of values. Each row is as long as `names`.

    >>> as_columns(("x", "y"), [(1, 2), (3, 4)])
    {'x': [1, 3], 'y': [2, 4]}
    """
    return {name: [row[n] for row in rows] for n, name in enumerate(names)}
