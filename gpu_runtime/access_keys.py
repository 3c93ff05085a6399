"""The file of the keys with which programs call `gpu serve`: names, hashes and rights of the keys.

A key has 256 random bits, so its SHA-256 reveals nothing, and no slow hash is needed. The file
contains the hash of each key and never the key itself. Only the file's owner may read it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from .errors import BadDocument, GpuError
from .facts import Value, parse_importance
from .files import config_home, locked, make_directory, replace_file, stamp, weak_step
from .safe_text import printable

BEGIN = "gpu-"  # of each key, so that people and scanners recognise one
MOST_KEYS = 10_000
MOST_BYTES = 8 << 20
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
Limit = Annotated[int, Meta(ge=1, le=10**12)]


class AccessKey(Value, forbid_unknown_fields=True):
    """The rights of one key. A key with the role `user` can call models; a `viewer` only reads."""

    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    role: Literal["user", "viewer"] = "user"
    models: tuple[str, ...] = ("*",)  # the names that it may call; * and ? as in the shell
    importance: str | int | None = None  # the highest that its calls can have; None: no limit
    requests_a_minute: Limit | None = None
    tokens_a_minute: Limit | None = None  # of prompts and answers

    def may_call(self, model: str) -> bool:
        """Whether the key may call the model, the task or the cloud model with the name `model`.

        >>> key = AccessKey("0" * 64, models=("qwen*",))
        >>> key.may_call("qwen-4b"), key.may_call("phi")
        (True, False)
        """
        return any(fnmatchcase(model, pattern) for pattern in self.models)


Keys = dict[str, AccessKey]


def default_file() -> Path:
    """The path of the keys' file if GPU_SERVE_KEYS is not set."""
    return config_home() / "keys.json"


def read(path: Path) -> Keys:
    """The keys in the file `path`, by name; empty if the file does not exist.

    Raises BadDocument for a mistake in the file, and as `read_private`.
    """
    data = read_private(path)
    return {} if data is None else _parsed(path, data)


def read_private(path: Path) -> bytes | None:
    """The content of the file `path`, which has secrets; None if the file does not exist.

    Raises BadDocument for a file that cannot be read or is too large, and if another user may read
    or replace the file.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:  # nothing was written yet
        return None
    except OSError as error:
        raise _bad(path, f"it cannot be read ({error.strerror or error})") from None
    try:
        _require_private(path, os.fstat(handle))
        parts = []
        while part := os.read(handle, MOST_BYTES + 1):
            parts.append(part)
    finally:
        os.close(handle)
    return b"".join(parts)


def _require_private(path: Path, found: os.stat_result) -> None:
    """Raises BadDocument if another user may read or replace the file `path` of the status `found`.

    BadDocument is also raised if the file has more than MOST_BYTES.
    """
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise _bad(path, "it is not a file of this user")
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise _bad(path, f"other users may use it (mode {mode:o}). Type:  chmod 600 {path}")
    if found.st_size > MOST_BYTES:
        raise _bad(path, f"it is larger than {MOST_BYTES >> 20} MiB")
    weak = weak_step(path.parent)
    if weak:
        raise _bad(path, f"another user could replace it: {weak}")


def add(path: Path, name: str, key: AccessKey) -> None:
    """Writes `key` under the `name` into the file `path`. Raises GpuError if the name exists or is not valid."""
    if not _NAME.fullmatch(name):
        raise GpuError("the name of a key has at most 64 letters, digits and ._-", name=name)
    if key.importance is not None:
        parse_importance(key.importance, least=1, most=100)
    with _changing(path) as keys:
        if name in keys:
            raise GpuError(f"a key {name} exists already.\n  Remove it:  gpu keys remove {name}")
        keys[name] = key


def remove(path: Path, name: str) -> None:
    """Removes the key called `name` from the file `path`. Raises GpuError for an unknown name."""
    with _changing(path) as keys:
        if name not in keys:
            raise GpuError(f"there is no key {name!r}; see them:  gpu keys list", name=name)
        del keys[name]


def table(keys: Keys) -> str:
    """The `keys` as a table for people."""
    if not keys:
        return "There are no keys. Make one:  gpu keys add NAME"
    rows = [("NAME", "ROLE", "MODELS", "IMPORTANCE", "REQUESTS/MIN", "TOKENS/MIN")]
    for name, key in sorted(keys.items()):
        limits = (key.importance, key.requests_a_minute, key.tokens_a_minute)
        shown = ("-" if limit is None else str(limit) for limit in limits)
        rows.append((name, key.role, printable(",".join(key.models), 60), *shown))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def new_key() -> tuple[str, str]:
    """A new random key, and its SHA-256."""
    key = BEGIN + secrets.token_urlsafe(32)
    return key, digest(key)


def digest(key: str) -> str:
    """The SHA-256 of a `key`, as hexadecimal text."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def name_of(keys: Keys, offered: str) -> str:
    """The name of the key with the text `offered`, or "". Each comparison takes constant time."""
    sha256 = digest(offered)
    found = ""
    for name, key in keys.items():
        if hmac.compare_digest(sha256, key.sha256):
            found = name
    return found


class KeysFile:
    """The keys of one file, which is read again after a change. After a mistake, the old keys stay valid."""

    def __init__(
        self, path: Path, clock: Callable[[], float], report: Callable[[str], None]
    ) -> None:
        """Reads the keys in the file `path`. Raises BadDocument.

        `clock` returns seconds. `report` is called with a sentence on each later mistake.
        """
        self._path = path
        self._clock = clock
        self._report = report
        self._stamp = stamp(path)
        self._checked_at = clock()
        self._keys = read(path)

    def keys(self) -> Keys:
        """The keys, by name. At most once a second, checks whether the file has changed."""
        if self._clock() - self._checked_at >= 1.0:
            self._checked_at = self._clock()
            found = stamp(self._path)
            if found != self._stamp:
                self._stamp = found
                try:
                    self._keys = read(self._path)
                except BadDocument as error:
                    self._report(f"the earlier keys stay: {error}")
        return self._keys


@contextmanager
def _changing(path: Path) -> Iterator[Keys]:
    """Yields the keys of the file `path`, which the `with` block may change.

    At the end of the `with` block the keys replace the file in one step, with mode 0600.
    """
    make_directory(path.parent)
    with locked(path.with_name(f".{path.name}.lock")):
        keys = read(path)
        yield keys
        replace_file(path, msgspec.json.format(msgspec.json.encode({"keys": keys})) + b"\n")


def _parsed(path: Path, data: bytes) -> Keys:
    try:
        keys = msgspec.json.decode(data, type=dict[Literal["keys"], Keys])["keys"]
        for name, key in keys.items():
            if not _NAME.fullmatch(name):
                raise ValueError(f"the name {name[:80]!r} has other letters than A-Z, 0-9 and ._-")
            if key.importance is not None:
                parse_importance(key.importance, least=1, most=100)
    except (ValueError, KeyError) as error:  # also of msgspec
        raise _bad(path, f"it is no file of keys: {error}") from None
    if len(keys) > MOST_KEYS:
        raise _bad(path, f"it has more than {MOST_KEYS} keys")
    return keys


def _bad(path: Path, problem: str) -> BadDocument:
    return BadDocument(str(path), 0, "", problem)
