"""Columns: the data of a chart, as Bokeh's sources take it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Columns = dict[str, list[Any]]  # name -> one value for each row


def as_columns(names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> Columns:
    """The `rows`, each as long as `names`, as a list of values for each name.

    >>> as_columns(("x", "y"), [(1, 2), (3, 4)])
    {'x': [1, 3], 'y': [2, 4]}
    """
    return {name: [row[n] for row in rows] for n, name in enumerate(names)}
