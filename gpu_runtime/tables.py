"""Tables: a pandas DataFrame where pandas can be imported, else a `Table` of plain rows.

pandas is not needed by gpu-console: it takes 0.3 s and 45 MiB, and its newest version replaces the
numpy of an environment. It is imported when the first table is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from .safe_text import lines
from .threads import import_whole


class Table(list[dict[str, Any]]):
    """A list of rows, each a dict of the columns' values. `table["name"]` is a column.

    It has what our code uses of a DataFrame, under the same names: `columns`, `attrs`, `to_dict`.
    """

    def __init__(self, rows: Iterable[Any] = (), columns: Iterable[str] = ()) -> None:
        """`rows` are dicts. If `rows` is a Table, `columns` are by default those of it."""
        super().__init__(rows)
        self.columns = list(columns or getattr(rows, "columns", ()))
        self.attrs: dict[str, Any] = {}

    def __getitem__(self, key: Any) -> Any:
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)

    def to_dict(self, orient: str = "records") -> list[dict[str, Any]]:
        """The rows; `orient` has one value only."""
        return list(self)

    def __repr__(self) -> str:
        cells = [self.columns, *([str(row[name]) for name in self.columns] for row in self)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join(
            "  ".join(map(str.rjust, row, widths)) for row in cells
        )  # fmt: skip

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(name)}</th>" for name in self.columns)
        rows = (
            "".join(f"<td>{escape(str(row[name]))}</td>" for name in self.columns) for row in self
        )
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f'<table class="dataframe"><thead><tr>{head}</tr></thead>{body}</table>'


def table(
    rows: Iterable[Sequence[Any]], columns: Sequence[str], types: Mapping[str, str] | None = None
) -> Any:
    """The `rows` as a DataFrame whose columns have the `types` of pandas, or as a Table.

    Other users write names into the book, and pandas shows text unchanged. So unprintable
    characters are replaced.
    """
    cells = [[lines(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    import_whole("pandas")
    try:
        from pandas import DataFrame
    except Exception:  # it is missing, or its numpy is of another version
        return Table((dict(zip(columns, row, strict=True)) for row in cells), columns)
    return DataFrame(cells, columns=list(columns)).astype(dict(types or {}))
