"""Messages between two processes over a socket. Each message is a pickled object.

Large buffers of a message are sent after its pickle, so they are not copied into the pickle. A
pickle can run any code. So use this module only between two processes that trust each other.
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from typing import Any

READ_BYTES = 1 << 16  # read at once, so that a small message needs one system call


class MessageSocket:
    """One end of the connection. Several threads may send at once; only one thread may receive."""

    def __init__(self, connected: socket.socket) -> None:
        """Takes over the `connected` socket."""
        self._socket = connected
        self._file = connected.makefile("rb", READ_BYTES)
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        """Sends the `message`. Raises OSError. Errors of pickle are raised before any byte is sent.

        A `pickle.PickleBuffer` in the message is sent without a copy. The receiver gets a bytearray
        in its place.
        """
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(message, 5, buffer_callback=buffers.append)
        raw = [buffer.raw() for buffer in buffers]
        sizes = [len(data), *(part.nbytes for part in raw)]
        head = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        with self._sending:
            self._socket.sendall(head + data)
            for part in raw:
                self._socket.sendall(part)

    def receive(self) -> Any:
        """Waits for a message, and returns it.

        Raises OSError, and EOFError once the other end is closed.
        """
        [count] = struct.unpack("<I", self._read(4))
        size, *others = struct.unpack(f"<{count}Q", self._read(8 * count))
        data = self._read(size)
        return pickle.loads(data, buffers=[self._read(other) for other in others])

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        if self._file.readinto(data) < size:
            raise EOFError
        return data

    def close(self) -> None:
        """Waits until no thread sends, then closes this end. A repeated call does nothing."""
        with self._sending:
            self._file.close()
            self._socket.close()
