"""Predicts the next cells of a notebook from the notebook's file.

Some front ends send the next cell only when the running cell has ended, so the order of the cells is read from the
notebook's file. For papermill, nbconvert and nbclient the file is always used. For other front ends, such as VS Code,
the file is used only while cells follow each other faster than a person could start them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

PEOPLE_SECONDS = 0.2  # a person cannot start the next cell sooner than this after a cell's end
MOST_BYTES = 50 << 20  # the largest file of a notebook that is read
EXECUTORS = ("papermill", "nbconvert", "nbclient", "jupyter-execute", "jupyter-nbconvert")


class FileCell(NamedTuple):
    """A code cell of a notebook's file."""

    id: str
    code: str


def notebook_file(names: dict[str, Any], parent: int | None = None) -> tuple[str, bool]:
    """The path of this kernel's notebook, and whether a program runs the notebook's cells one after another.

    `names` are the notebook's variables, in which VS Code stores the path. `parent` is the process id of this kernel's
    parent. If the path is unknown, the first result is empty.
    """
    arguments = _arguments(os.getppid() if parent is None else parent)
    words = {os.path.basename(word) for word in arguments[:3]}
    if words.intersection(EXECUTORS) or any(word in arguments[:5] for word in EXECUTORS):
        files = [word for word in arguments if word.endswith(".ipynb") and os.path.exists(word)]
        return (files[0], True) if files else ("", False)
    path = names.get("__vsc_ipynb_file__") or os.environ.get("JPY_SESSION_NAME") or ""
    return (path, False) if isinstance(path, str) and os.path.exists(path) else ("", False)


def _arguments(process: int) -> list[str]:
    """The words of a process's command line. The path of each notebook in these words is made absolute.

    The result is empty if the process has ended or belongs to another user.
    """
    try:
        text = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace")
        folder = os.readlink(f"/proc/{process}/cwd")
    except OSError:  # the process has ended, or is another user's
        return []
    words = text.split("\0")
    return [os.path.join(folder, word) if word.endswith(".ipynb") else word for word in words]


def code_cells(path: str) -> list[FileCell]:
    """The code cells of the notebook at `path`, without empty cells.

    The result is empty if the file cannot be read.
    """
    try:
        if os.path.getsize(path) > MOST_BYTES:
            return []
        cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
        found = []
        for cell in cells:
            source = cell["source"]
            code = source if isinstance(source, str) else "".join(source)
            if cell["cell_type"] == "code" and code.strip():
                found.append(FileCell(str(cell.get("id") or ""), code))
        return found
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []  # the file cannot be read, or is no notebook


class Position:
    """Follows the running cell's place in a notebook's file, and predicts which cells will run after it."""

    def __init__(self) -> None:
        self._last = -1
        self._ended_at: float | None = None

    def after(
        self, cells: list[FileCell], code: str, cell_id: str, now: float, by_program: bool
    ) -> list[FileCell]:
        """The cells that will run after the cell with this `code` and `cell_id`.

        `cells` are the notebook's code cells and `now` is the time in seconds. The result has all later cells of the
        file. It is empty if this cell is not in the file.

        If `by_program` is false, a person may have started only this cell. Then later cells are expected only if this
        cell began within PEOPLE_SECONDS after the end of the previous cell, and is the next cell in the file.
        """
        here = self._find(cells, code, cell_id)
        if here is None:
            return []
        at_once = self._ended_at is not None and now - self._ended_at < PEOPLE_SECONDS
        is_next = self._last in (-1, here - 1)
        follows = by_program or (is_next and at_once)
        self._last = here
        return cells[here + 1 :] if follows else []

    def ended(self, now: float) -> None:
        """Records that the running cell ended at the time `now`."""
        self._ended_at = now

    def failed(self) -> None:
        """Called when a cell failed. The next cell then counts as started by a person."""
        self._ended_at = None

    def _find(self, cells: list[FileCell], code: str, cell_id: str) -> int | None:
        """The index in `cells` of the cell with this `cell_id`; None if there is no such cell.

        If `cell_id` is empty, the cell is found by its text `code`. Several cells may have this text. Then the result
        is the first of them after the cell that was found last, or else the first in the file.
        """
        if cell_id:
            return next((i for i, cell in enumerate(cells) if cell.id == cell_id), None)
        same = [i for i, cell in enumerate(cells) if cell.code.strip() == code.strip()]
        later = [i for i in same if i > self._last]
        return next(iter([*later, *same]), None)
