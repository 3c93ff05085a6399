"""Frames on the keeper's sockets: the length as four bytes, then a message."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ...files import child_environment

SERVER = "gpu_runtime.ledgers.keeper.server"  # the module that a keeper runs
SOCKET = "keeper.sock"
WANTED = "keeper.wanted"  # a member asks the service for a keeper, by this file
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


def open_log(directory: Path) -> BinaryIO:
    """The file that a keeper prints to. Raises OSError."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(os.open(directory / "keeper.log", flags, 0o600), "ab")


def spawn(arguments: list[str], log: int, **inherited: int) -> subprocess.Popen[bytes]:
    """A new process of `server.py` with these `arguments`. It prints to the descriptor `log`.

    Its environment has a variable GPU_KEEPER_… for each descriptor that is `inherited`. Raises OSError.
    """
    return subprocess.Popen(
        [sys.executable, "-m", SERVER, *arguments],
        # In the notebook's directory, a module of the user could hide a standard module.
        cwd="/",
        env={
            **child_environment(),
            **{f"GPU_KEEPER_{name}": str(descriptor) for name, descriptor in inherited.items()},
        },
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=list(inherited.values()),
        start_new_session=True,  # else the stop button would interrupt the keeper too
    )
