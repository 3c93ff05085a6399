"""Lists the cells that wait in this kernel, without taking them out of the kernel's queue.

ipykernel 7 reads the shell socket in a separate thread and passes each message on at once to a
function, the receiver of the stream. This module puts another function, the tap, in front of the
receiver. The tap sees every request when the request arrives, also while a cell runs.

ipykernel 6 reads the socket only between cells. With that version, this module calls `flush` of the stream at the start
of a cell. `flush` puts the arrived messages into `msg_queue`, as the stream itself would do a moment later.

Messages are read with `session.unpack`. `session.deserialize` would record the signatures of the messages as used, and
the kernel would then reject the messages.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

log = logging.getLogger("gpu_runtime")

MOST_BYTES = 1 << 20  # a longer request is not read
MOST_WAITING = 1000  # cells that are remembered
_RECEIVER = "shell_channel_thread_main"  # the kernel's method that receives every message


class WaitingCell(NamedTuple):
    """A request to run a cell. The cell has not begun."""

    id: str  # the id of the message
    code: str
    cell_id: str = ""  # the cell in the notebook; empty if the front end does not send it


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
        """Puts the tap in front of the receiver of the kernel's stream.

        Before the kernel has started, the stream has no receiver yet. In this case the tap replaces the kernel's
        method that receives messages. When the kernel starts, it makes this method the receiver.
        """
        if self._stream.receiving():  # type: ignore[union-attr]
            self._receive_by(self._tap)
        else:
            vars(self._kernel)[_RECEIVER] = self._tap

    def _receive_by(self, receiver: Any) -> None:
        """Makes `receiver` the receiver of all further messages. The change is made in the thread of the stream."""
        stream = self._stream
        self._loop.add_callback(lambda: stream.on_recv(receiver, copy=False))  # type: ignore[union-attr]

    async def _tap(self, message: Any) -> None:
        is_cell = self._note(message)
        await self._original(message)  # type: ignore[misc]
        if is_cell:
            self._changed()

    def _note(self, message: Any) -> bool:
        """Remembers the request in `message`. Returns False if the message is no request to run a cell."""
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
        """The request in `message`. None if `message` is of another kind or cannot be read."""
        try:
            session = self._kernel.session
            _, frames = session.feed_identities(message, copy=False)
            header = session.unpack(frames[1].bytes)
            if header["msg_type"] != "execute_request" or header.get("subshell_id"):
                return None
            if len(frames[4].buffer) > MOST_BYTES:
                return None
            content = session.unpack(frames[4].bytes)
            if content.get("silent") or not content["code"].strip():
                return None
            metadata = session.unpack(frames[3].bytes)
            return WaitingCell(header["msg_id"], content["code"], metadata.get("cellId") or "")
        except Exception as error:  # a message of any kind must reach the kernel
            log.debug("a message was not read: %s", error)
            return None
