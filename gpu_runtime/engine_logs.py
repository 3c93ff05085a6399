"""The log files of engines that run as processes. The logs are in this user's state directory.

The name of a log contains the model, the id of the process that started the engine, and a number.
"""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

from .private_paths import make_directory, state_home

KEPT_LOGS = 50
_numbers = itertools.count(1)


def new_log(name: str) -> Path:
    """The path of a new, empty log for the model `name`, in the state directory.

    The oldest logs are deleted, so that at most KEPT_LOGS remain.
    """
    directory = _directory()
    make_directory(directory)
    known = sorted(directory.glob("*.log"), key=_modified_ns)
    for old in known[: -KEPT_LOGS + 1]:
        old.unlink(missing_ok=True)
    log = directory / f"{_file_name(name)}-{os.getpid()}-{next(_numbers)}.log"
    flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    os.close(os.open(log, flags, 0o600))
    return log


def newest_log(name: str) -> Path | None:
    """The log of the engine that this process started last for the model `name`, or None."""
    begin = f"{_file_name(name)}-{os.getpid()}-"
    numbers = [
        int(path.stem.removeprefix(begin))
        for path in _directory().glob("*.log")
        if path.stem.startswith(begin) and path.stem.removeprefix(begin).isdigit()
    ]
    return _directory() / f"{begin}{max(numbers)}.log" if numbers else None


def part_of(log: Path, after: int, most: int) -> tuple[str, int]:
    """The text of the file `log` from byte `after` to the end, and the size of the file in bytes.

    If the text has more than `most` bytes, only the last `most` bytes are read. A file that is
    shorter than `after` is read from its beginning. Raises OSError.
    """
    with open(log, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        begin = after if 0 <= after <= size else 0
        file.seek(max(begin, size - most))
        return file.read(most).decode("utf-8", "replace"), size


def _directory() -> Path:
    return state_home() / "engines"


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name)[:60]


def _modified_ns(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0
