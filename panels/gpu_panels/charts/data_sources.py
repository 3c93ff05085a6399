"""Bringing a chart's data up to date with as little as was changed."""

from __future__ import annotations

from typing import Any

Columns = dict[str, list[Any]]


def bring(source: Any, columns: Columns, keep: tuple[str, ...] = ()) -> bool:
    """Puts these columns in a Bokeh source; whether anything differed.

    Of as many rows as before only the cells that differ are sent; else all of them. Columns named in `keep` are the
    browser's to fill, and are sent only with new rows.
    """
    old = source.data
    rows = len(next(iter(columns.values()), ()))
    if old.keys() != columns.keys() or any(len(column) != rows for column in old.values()):
        source.data = _copied(columns)
        return True
    patches = {
        name: [
            (n, new)
            for n, (was, new) in enumerate(zip(old[name], column, strict=True))
            if was != new
        ]
        for name, column in columns.items()
        if name not in keep
    }
    patches = {name: cells for name, cells in patches.items() if cells}
    if sum(map(len, patches.values())) > rows * len(columns) / 2:
        source.data = _copied(columns)
    elif patches:
        source.patch(patches)
    return bool(patches)


def _copied(columns: Columns) -> Columns:
    """Lists of this source's own: a patch changes them in place, and other sessions may hold those that were given."""
    return {name: list(column) for name, column in columns.items()}
