"""Opens files of models and settings, which anybody may have written: it always ends, and in little memory.

Only regular files are read. Their size is checked before, and the depth of their JSON after. Every
error is one sentence with the path.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from .units import MIB, show_bytes

MOST_JSON = 4 * MIB  # of a model's config; the largest known ones have 1 MiB
DEEPEST = 100  # lists and objects in one another
MOST_LAYERS = 10_000
MOST_OTHERS = 1_000_000  # labels, experts, heads
_LAYERS = re.compile(r"(^|_)(layers?|blocks?|depths?|stages?)($|_)")
_OTHERS = re.compile(r"(^|_)(labels|classes|experts|heads|groups|codebooks)($|_)")


class BadFile(OSError):
    """A file that is not read. `strerror` says why, as the end of a sentence about the file."""

    def __init__(self, path: str | os.PathLike[str], why: str) -> None:
        """`why` is the reason, such as `it is a device, not a file`."""
        super().__init__(errno.EINVAL, why, os.fspath(path))

    def __str__(self) -> str:
        return f"{self.filename} cannot be read: {self.strerror}"


def open_regular(path: str | os.PathLike[str], *, to_append: bool = False) -> BinaryIO:
    """The file `path`, opened for unbuffered reading of bytes. Raises BadFile for a pipe or a device.

    If `to_append` is true, the file is opened for writing at its end, and made if it is missing.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT if to_append else os.O_RDONLY
    # Without O_NONBLOCK, opening a pipe would wait for its other end. With O_RDWR it never fails.
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return open(descriptor, "ab" if to_append else "rb", buffering=0)  # type: ignore[return-value]
    os.close(descriptor)
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    raise BadFile(path, f"it is {kinds.get(stat.S_IFMT(mode), 'a device')}, not a file")


def read(path: str | os.PathLike[str], most: int = MOST_JSON) -> bytes:
    """The bytes of the file `path`. Raises BadFile for more than `most` bytes, and OSError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise BadFile(
                path, f"it has {show_bytes(size)}, and at most {show_bytes(most)} are read"
            )
        parts = []
        while part := file.read(most + 1):  # also a file of /proc, whose size is 0
            parts.append(part)
            most -= len(part)
            if most < 0:
                raise BadFile(path, "it grows while it is read")
        return b"".join(parts)


def text(path: str | os.PathLike[str], most: int = MOST_JSON) -> str:
    """The text of the file `path` in UTF-8. Raises BadFile, OSError."""
    try:
        return read(path, most).decode()
    except UnicodeDecodeError:
        raise BadFile(path, "it is no text in UTF-8") from None


def json_object(path: str | os.PathLike[str], most: int = MOST_JSON) -> dict[str, Any]:
    """The JSON object in the file `path`. Raises BadFile, OSError."""
    try:
        value = json.loads(read(path, most))
    except RecursionError:
        raise BadFile(path, _TOO_DEEP) from None
    except ValueError:  # also of a number with too many digits
        raise BadFile(path, "its JSON cannot be read") from None
    if not isinstance(value, dict):
        raise BadFile(path, "its JSON is not an object")
    if _is_deep(value):
        raise BadFile(path, _TOO_DEEP)
    return value


_TOO_DEEP = f"its JSON is nested more than {DEEPEST} levels deep"


def _is_deep(value: Any) -> bool:
    """Whether lists and objects in `value` are nested too deep, without recursion."""
    level = [value]
    for _ in range(DEEPEST):
        below: list[Any] = []
        for one in level:
            inner = one.values() if isinstance(one, dict) else one
            below += [item for item in inner if isinstance(item, (dict, list))]
        if not below:
            return False
        level = below
    return True


def count_fault(config: Mapping[str, Any]) -> str:
    """Why the counts in a model's `config` are impossible, as the end of a sentence; else empty.

    A library would make so many layers or labels before it looks at the weights.

    >>> count_fault({"text_config": {"num_hidden_layers": 10**9}})
    'its num_hidden_layers is 1,000,000,000, and at most 10,000 are loaded'
    """
    pending = [config]
    while pending:
        for key, value in pending.pop().items():
            if isinstance(value, Mapping):
                pending.append(value)
            most = MOST_LAYERS if _LAYERS.search(str(key)) else MOST_OTHERS
            if most is MOST_OTHERS and not _OTHERS.search(str(key)):
                continue
            numbers = value if isinstance(value, list) else [value]
            for number in numbers:
                if isinstance(number, (int, float)) and number > most:
                    return f"its {key} is {number:,}, and at most {most:,} are loaded"
    return ""


def require_regular_files(directory: Path, most: int = 256 * MIB) -> None:
    """Raises BadFile for an entry of the model's `directory` that a library could read for ever.

    That is a device or a pipe, or a text or JSON file of more than `most` bytes.
    """
    for entry in sorted(os.scandir(directory), key=lambda one: one.name):
        try:
            found = entry.stat()
        except OSError:  # a link to nothing: the library does not see it either
            continue
        if stat.S_ISDIR(found.st_mode):
            continue
        if not stat.S_ISREG(found.st_mode):
            open_regular(entry.path).close()
        is_text = entry.name.endswith((".json", ".txt", ".jinja", ".model", ".py", ".yaml"))
        if is_text and found.st_size > most:
            raise BadFile(
                entry.path,
                f"it has {show_bytes(found.st_size)}, and at most {show_bytes(most)} are read",
            )
