"""The running and waiting cells of this notebook. The runtime loads the models of these cells before they run.

The waiting cells are read from the kernel's queue. If the queue is empty, the next cells are read from
the notebook's file. The runtime calls this module in a thread of its own. This module loads no model.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from gpu_runtime.facts import CellModels
from gpu_runtime.upcoming_cells import Governed, upcoming

from .cell_queue import CellQueue, WaitingCell
from .cell_scan import Scan
from .notebook_cells import Position, code_cells, notebook_file

MOST_READ = 50  # cells ahead


class CellSchedule:
    """The running and waiting cells of one shell. The shell reports when each cell begins and ends."""

    def __init__(self, shell: Any, clock: Callable[[], float] = time.monotonic) -> None:
        """Watches the kernel of `shell`. A shell without a kernel has no cells that wait."""
        self._shell, self._clock = shell, clock
        self._queue = CellQueue(shell.kernel, upcoming.changed) if _has_kernel(shell) else None
        self._position = Position()
        self._running: list[tuple[Any, str]] = []  # the cells that run, each with its text
        self._from_file: list[WaitingCell] = []
        self._number = 0
        self._lock = threading.Lock()  # a cell that begins changes all of these at once
        if self._queue is not None:
            upcoming.read_by(self.read)

    def before_cell(self, info: Any) -> None:
        """Called by IPython with its `info` when a cell begins."""
        if self._queue is None:
            return
        with self._lock:
            self._running.append((info, info.raw_cell or ""))
            if len(self._running) == 1:
                self._number = _number_of_cell(self._shell)
                self._queue.began()
                waits_in_queue = bool(self._queue.waiting())
                self._from_file = [] if waits_in_queue else self._read_file(info)
        upcoming.changed()

    def after_cell(self, result: Any) -> None:
        """Called when a cell ended with IPython's `result`. After an error or an interrupt, no further cell is
        expected.
        """
        if self._queue is None:
            return
        self._running = [one for one in self._running if one[0] is not result.info]
        self._position.ended(self._clock())
        if not result.success:
            self._queue.failed()
            self._position.failed()
            self._from_file = []
        upcoming.changed()

    def remove(self) -> None:
        """Stops watching the cells of the shell."""
        if self._queue is not None:
            self._queue.remove()
            upcoming.read_by(None)

    def _read_file(self, info: Any) -> list[WaitingCell]:
        path, by_program = notebook_file(self._shell.user_ns)
        if not path:
            return []
        cell_id = _sent_cell_id(self._shell.kernel)
        later = self._position.after(
            code_cells(path), info.raw_cell or "", cell_id, self._clock(), by_program
        )
        return [WaitingCell(cell.id, cell.code, cell.id) for cell in later]

    def read(self, known: Collection[str], governed: Governed) -> tuple[CellModels, ...]:
        """The running cell and the waiting cells, each with its models.

        If no cell runs, the first cell of the queue is about to begin, and counts as running: it loads its own models.

        `known` are the names of models. `governed(value)` returns the name of the model that `value` is, or "".
        The runtime calls this method through `upcoming`.
        """
        assert self._queue is not None
        with self._lock:
            number, running = self._number, list(self._running)
            queued = self._queue.waiting()
            waiting = self._after(queued)[:MOST_READ]
        scan = Scan(known, self._shell.user_ns, governed)
        found = [_read(scan, code, f"cell {number}", running=True) for _, code in running]
        begins = bool(queued) and not found
        for place, cell in enumerate(waiting, number + 1):
            found.append(_read(scan, cell.code, f"cell {place}", running=begins))
            begins = False
        return tuple(found)

    def _after(self, queued: list[WaitingCell]) -> list[WaitingCell]:
        """The cells that wait: those of the file if the `queued` ones are the next of them, else the queued ones."""
        expected = self._from_file[: len(queued)]
        follows = [one.code.strip() for one in queued] == [one.code.strip() for one in expected]
        return self._from_file if follows else queued


def _read(scan: Scan, code: str, cell: str, running: bool = False) -> CellModels:
    reading = scan.read(code)
    return CellModels(cell, reading.uses, tuple(sorted(reading.mentions)), running)


def _number_of_cell(shell: Any) -> int:
    """The number of the cell that begins. The output of the cell will show the same number.

    `execution_count` is not used, because some versions of IPython increase it before this function is called, and
    others after it. The stored inputs are counted instead: every version stores the cell's input after this call.
    """
    history = shell.history_manager
    return len(history.input_hist_raw) if history else shell.execution_count


def _has_kernel(shell: Any) -> bool:
    return getattr(shell, "kernel", None) is not None


def _sent_cell_id(kernel: Any) -> str:
    """The id of the running cell in the notebook, or "" if the front end did not send it."""
    try:
        return kernel.get_parent("shell")["metadata"].get("cellId") or ""
    except (AttributeError, LookupError, TypeError):  # not ipykernel, or an old front end
        return ""
