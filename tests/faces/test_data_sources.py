"""The data of a chart are sent to the browser only where they differ."""

from __future__ import annotations

from copy import deepcopy

from bokeh.models import ColumnDataSource
from gpu_panels.charts.data_sources import bring
from hypothesis import given
from hypothesis import strategies as st

ROWS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc")), max_size=6)


@given(ROWS, ROWS)
def test_an_updated_source_holds_the_new_columns(before, after):
    """The source is updated by patches or as a whole.

    The function returns whether the data differed. The given lists are not changed.
    """
    first, second = (
        {"n": [n for n, _ in rows], "s": [s for _, s in rows]} for rows in (before, after)
    )
    given, source = deepcopy(first), ColumnDataSource({"n": [], "s": []})
    assert bring(source, first) == bool(before)
    assert bring(source, second) == (first != second)
    assert dict(source.data) == second and first == given
    assert not bring(source, second)
