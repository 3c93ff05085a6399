"""The running and waiting cells of this notebook. The runtime loads the models of these cells before they run.

The waiting cells are read from the kernel's queue, without taking them out of it. ipykernel 7 reads the shell socket in
a separate thread and passes each message on at once to a function, the receiver of the stream. This module puts another
function, the tap, in front of the receiver. The tap sees every request when the request arrives, also while a cell
runs. ipykernel 6 reads the socket only between cells. With that version, this module calls `flush` of the stream at the
start of a cell. `flush` puts the arrived messages into `msg_queue`, as the stream itself would do a moment later.

Messages are read with `session.unpack`. `session.deserialize` would record the signatures of the messages as used, and
the kernel would then reject the messages.

If the queue is empty, the next cells are read from the notebook's file, because some front ends send the next cell only
when the running cell has ended. For papermill, nbconvert and nbclient the file is always used. For other front ends,
such as VS Code, the file is used only while cells follow each other faster than a person could start them.

The runtime calls this module in a thread of its own. This module loads no model.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

from gpu_runtime.facts import CellModels
from gpu_runtime.upcoming_cells import Governed, upcoming

from .cell_scan import Scan

log = logging.getLogger("gpu_runtime")

MOST_REQUEST_BYTES = 1 << 20  # a longer request is not read
MOST_WAITING = 1000  # cells that are remembered
_RECEIVER = "shell_channel_thread_main"  # the kernel's method that receives every message


class WaitingCell(NamedTuple):
    """A cell that has not begun: a request to run it, or a code cell of the notebook's file."""

    id: str  # of the message, or of the cell
    code: str


class CellQueue:
    """The requests that wait in one kernel, in the order in which they will run."""

    def __init__(self, kernel: Any, changed: Callable[[], None]) -> None:
        """Watches `kernel`. With ipykernel 7, `changed` is called in any thread when a request has arrived."""
        self._kernel, self._changed = kernel, changed
        self._seen: dict[str, WaitingCell] = {}
        self._lock = threading.Lock()
        self._stream = getattr(kernel, "shell_stream", None)
        thread = getattr(kernel, "shell_channel_thread", None)
        self._original = getattr(kernel, _RECEIVER, None)
        self._loop = getattr(thread, "io_loop", None)
        self._taps = None not in (thread, self._stream, self._original, self._loop)
        if self._taps:
            self._begin()

    def waiting(self) -> list[WaitingCell]:
        """The requests that wait now, in the order in which they will run."""
        with self._lock:
            return list(self._seen.values())

    def began(self) -> None:
        """Called when a cell begins. The request of that cell and all earlier requests wait no longer."""
        if not self._taps:
            self._look()
        try:
            current = self._kernel.get_parent("shell")["header"]["msg_id"]
        except (AttributeError, LookupError, TypeError):  # not a kernel of ipykernel
            return
        with self._lock:
            if current in self._seen:
                ids = list(self._seen)
                for id in ids[: ids.index(current) + 1]:
                    del self._seen[id]

    def failed(self) -> None:
        """Called when a cell failed. The kernel then aborts all requests that wait."""
        with self._lock:
            self._seen.clear()

    def remove(self) -> None:
        """Stops watching the kernel, and restores the original receiver of messages."""
        if self._taps:
            vars(self._kernel).pop(_RECEIVER, None)
            if self._stream.receiving():  # type: ignore[union-attr]
                self._receive_by(self._original)
        self.failed()

    def _begin(self) -> None:
        """Puts the tap in front of the receiver of the stream. Before the kernel has started, there is none:
        the tap then replaces the kernel's method that becomes the receiver.
        """
        if self._stream.receiving():  # type: ignore[union-attr]
            self._receive_by(self._tap)
        else:
            vars(self._kernel)[_RECEIVER] = self._tap

    def _receive_by(self, receiver: Any) -> None:
        """The change is made in the thread of the stream."""
        stream = self._stream
        self._loop.add_callback(lambda: stream.on_recv(receiver, copy=False))  # type: ignore[union-attr]

    async def _tap(self, message: Any) -> None:
        is_cell = self._note(message)
        await self._original(message)  # type: ignore[misc]
        if is_cell:
            self._changed()

    def _note(self, message: Any) -> bool:
        """Remembers the request in `message`. Returns whether it is one to run a cell."""
        cell = self._read(message)
        if cell is None:
            return False
        with self._lock:
            self._seen[cell.id] = cell
            while len(self._seen) > MOST_WAITING:
                del self._seen[next(iter(self._seen))]
        return True

    def _look(self) -> None:
        """With ipykernel 6, reads the messages that have arrived, and leaves them in the kernel's queue."""
        import zmq

        if self._stream is None or not hasattr(self._kernel, "msg_queue"):
            return
        self._stream.flush(zmq.POLLIN)
        with self._lock:
            self._seen.clear()
        for entry in list(self._kernel.msg_queue._queue):
            if entry[-1]:
                self._note(entry[-1][0])

    def _read(self, message: Any) -> WaitingCell | None:
        """The request in `message`; None if it is of another kind or cannot be read."""
        try:
            session = self._kernel.session
            _, frames = session.feed_identities(message, copy=False)
            header = session.unpack(frames[1].bytes)
            if header["msg_type"] != "execute_request" or header.get("subshell_id"):
                return None
            if len(frames[4].buffer) > MOST_REQUEST_BYTES:
                return None
            content = session.unpack(frames[4].bytes)
            if content.get("silent") or not content["code"].strip():
                return None
            return WaitingCell(header["msg_id"], content["code"])
        except Exception as error:  # a message of any kind must reach the kernel
            log.debug("a message was not read: %s", error)
            return None


PEOPLE_SECONDS = 0.2  # a person cannot start the next cell sooner than this after a cell's end
MOST_BYTES = 50 << 20  # the largest file of a notebook that is read
EXECUTORS = ("papermill", "nbconvert", "nbclient", "jupyter-execute", "jupyter-nbconvert")


def notebook_file(names: dict[str, Any], parent: int | None = None) -> tuple[str, bool]:
    """The path of this kernel's notebook or "", and whether a program runs its cells one after another.

    `names` are the notebook's variables, in which VS Code stores the path. `parent` is the pid of the kernel's parent.
    """
    arguments = _arguments(os.getppid() if parent is None else parent)
    words = {os.path.basename(word) for word in arguments[:3]}
    if words.intersection(EXECUTORS) or any(word in arguments[:5] for word in EXECUTORS):
        files = [word for word in arguments if word.endswith(".ipynb") and os.path.exists(word)]
        return (files[0], True) if files else ("", False)
    path = names.get("__vsc_ipynb_file__") or os.environ.get("JPY_SESSION_NAME") or ""
    return (path, False) if isinstance(path, str) and os.path.exists(path) else ("", False)


def _arguments(process: int) -> list[str]:
    """The words of a process's command line, with absolute paths of notebooks; none for another user's process."""
    try:
        text = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace")
        folder = os.readlink(f"/proc/{process}/cwd")
    except OSError:  # the process has ended, or is another user's
        return []
    words = text.split("\0")
    return [os.path.join(folder, word) if word.endswith(".ipynb") else word for word in words]


def code_cells(path: str) -> list[WaitingCell]:
    """The code cells of the notebook at `path`, without empty cells; none if it cannot be read."""
    try:
        if os.path.getsize(path) > MOST_BYTES:
            return []
        cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
        found = []
        for cell in cells:
            source = cell["source"]
            code = source if isinstance(source, str) else "".join(source)
            if cell["cell_type"] == "code" and code.strip():
                found.append(WaitingCell(str(cell.get("id") or ""), code))
        return found
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []  # the file cannot be read, or is no notebook


class Position:
    """Follows the running cell's place in a notebook's file, and predicts which cells will run after it."""

    def __init__(self) -> None:
        self._last = -1
        self._ended_at: float | None = None

    def after(
        self, cells: list[WaitingCell], code: str, cell_id: str, now: float, by_program: bool
    ) -> list[WaitingCell]:
        """The cells of the file after the cell with this `code` and `cell_id`; none if it is not in the file.

        If not `by_program`, a person may have started only this cell. Then later cells are expected only if this
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

    def _find(self, cells: list[WaitingCell], code: str, cell_id: str) -> int | None:
        """The index of the cell with this `cell_id`, or without an id, with this `code`; else None.

        Of several cells with this text it is the first after the cell found last, or else the first in the file.
        """
        if cell_id:
            return next((i for i, cell in enumerate(cells) if cell.id == cell_id), None)
        same = [i for i, cell in enumerate(cells) if cell.code.strip() == code.strip()]
        later = [i for i in same if i > self._last]
        return next(iter([*later, *same]), None)


MOST_READ = 50  # cells ahead


class CellSchedule:
    """The running and waiting cells of one shell. The shell reports when each cell begins and ends."""

    def __init__(self, shell: Any, clock: Callable[[], float] = time.monotonic) -> None:
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
        """Called when a cell ended. After an error or an interrupt, no further cell is expected."""
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
        cell_id, now = _sent_cell_id(self._shell.kernel), self._clock()
        cells = code_cells(path)
        return self._position.after(cells, info.raw_cell or "", cell_id, now, by_program)

    def read(self, known: Collection[str], governed: Governed) -> tuple[CellModels, ...]:
        """The running cell and the waiting cells, each with its models; the runtime calls it through `upcoming`.

        If no cell runs, the first cell of the queue is about to begin, and counts as running: it loads its own models.
        `governed(value)` returns the name of the model that `value` is, or "".
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
    """The number that the output of the beginning cell will show.

    Some versions of IPython increase `execution_count` before this function is called, and others after it. Every
    version stores the cell's input after this call, so the stored inputs are counted.
    """
    history = shell.history_manager
    return len(history.input_hist_raw) if history else shell.execution_count


def _has_kernel(shell: Any) -> bool:
    return getattr(shell, "kernel", None) is not None


def _sent_cell_id(kernel: Any) -> str:
    try:
        return kernel.get_parent("shell")["metadata"].get("cellId") or ""
    except (AttributeError, LookupError, TypeError):  # not ipykernel, or an old front end
        return ""
