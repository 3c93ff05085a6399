"""Notebooks of the frameworks that researchers use: parked after each cell, and all values stay the same.

`make frameworks` makes the environment of the frameworks, runs this file, and writes RESULTS.md.
"""

import pytest

from . import matrix

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        not (matrix.ENVIRONMENT / ".ready").exists(),
        reason="the environment of the frameworks is not made: `make frameworks`",
    ),
]
LEAST_PERCENT = 97.0
runs: dict[str, tuple[matrix.Run, matrix.Run]] = {}


@pytest.mark.parametrize("name", matrix.NOTEBOOKS)
def test_parking_after_each_cell_changes_no_value(name, tmp_path):
    """A notebook prints the same and leaves the same as without gpu-console."""
    plain = matrix.run(matrix.NOTEBOOKS[name], tmp_path, parked=False)
    runs[name] = plain, matrix.run(matrix.NOTEBOOKS[name], tmp_path, parked=True)
    assert not matrix.differences(*runs[name])


def test_the_notebooks_are_parked_when_asked():
    """Nearly every cell of these frameworks leaves its notebook parkable."""
    if runs.keys() != matrix.NOTEBOOKS.keys():
        pytest.skip("only some of the notebooks ran")
    matrix.RESULTS.write_text(matrix.table(runs))
    requests = {name: run.requests for name, (_, run) in runs.items()}
    refused = [
        f"{name}, cell {one.cell}: {one.reason}"
        for name, answers in requests.items()
        for one in answers
        if not one.parked
    ]
    percent = matrix.share(one for answers in requests.values() for one in answers)
    assert percent >= LEAST_PERCENT, "\n".join(refused)
