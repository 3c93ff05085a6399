"""Frames on the keeper's sockets: the length as four bytes, then a message."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOCKET = "keeper.sock"
MOST_FRAME_BYTES = 4 << 20
_LENGTH = struct.Struct("<I")


def frame(content: bytes) -> bytes:
    """`content` with its length in front."""
    return _LENGTH.pack(len(content)) + content


def frames_in(received: bytearray) -> Iterator[bytes]:
    """Takes the whole frames out of `received`. Raises ValueError for one that is too long."""
    while len(received) >= _LENGTH.size:
        [size] = _LENGTH.unpack_from(received)
        if size > MOST_FRAME_BYTES:
            raise ValueError(f"a frame of {size} bytes")
        end = _LENGTH.size + size
        if len(received) < end:
            return
        content = bytes(received[_LENGTH.size : end])
        del received[:end]
        yield content


@contextmanager
def socket_path(directory: Path, name: str) -> Iterator[str]:
    """A short path to `name` in `directory`: a socket's path may have only 107 bytes."""
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)
