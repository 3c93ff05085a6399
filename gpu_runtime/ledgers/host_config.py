"""What the operator of this machine has written down for everybody: which ledger is shared, and who may hold how much.

One TOML file, read when a runtime opens. A machine without it has no shared ledger and no caps:

    ledger = "sqlite:///var/lib/gpu-console"

    [operators]                       # may pin, load and defragment in other users' processes; root always may
    users = ["ops"]
    groups = ["gpu-admins"]

    [users.ann]                       # what a user's own table says wins
    bytes_per_device = "20 GiB"       # on each card, all of ann's processes together
    importance = "normal"             # the highest that she may ask for
    keep = false                      # nothing of hers is pinned to a card
    longest_lease = "4h"              # of `rt.lease` and `%%gpu`

    [groups.students]                 # the same keys, for each member; of several groups the most generous word holds
    bytes_per_device = "8 GiB"
"""

from __future__ import annotations

import difflib
import grp
import os
import pwd
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import BadSetting, BadSize
from ..facts import IMPORTANCE, Cap, Value, parse_importance
from ..units import parse_bytes, parse_seconds

CONFIG_FILE = "/etc/gpu-console/config.toml"


class Machine(Value):
    """The machine-wide configuration, as values. `users` and `groups`: name -> caps by the fields of Cap."""

    file: str = CONFIG_FILE
    ledger: str = ""
    operators: tuple[str, ...] = ("root",)
    operator_groups: tuple[str, ...] = ()
    users: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}

    def is_operator(self, user: str, groups: Iterable[str] = ()) -> bool:
        return user in self.operators or any(group in self.operator_groups for group in groups)

    def cap(self, user: str, groups: Iterable[str] = ()) -> Cap | None:
        """What that user, being in those groups, may hold; None where nothing is said of them."""
        fields: dict[str, Any] = {}
        tables: dict[str, str] = {}
        for group in groups:
            for field, value in self.groups.get(group, {}).items():
                if field not in fields or _generosity(field, value) > _generosity(
                    field, fields[field]
                ):
                    fields[field], tables[_KEYS[field]] = value, f"groups.{group}"
        for field, value in self.users.get(user, {}).items():
            fields[field], tables[_KEYS[field]] = value, f"users.{user}"
        return Cap(user, self.file, tables=tables, **fields) if fields else None


def _generosity(field: str, value: Any) -> float:
    return -value if field == "importance" else value


def groups_of(user: str) -> tuple[str, ...]:
    """The names of the groups that a user of this machine is in; none for a user without an entry."""
    try:
        ids = os.getgrouplist(user, pwd.getpwnam(user).pw_gid)
    except KeyError:
        return ()
    names = []
    for id in ids:
        try:
            names.append(grp.getgrgid(id).gr_name)
        except KeyError:  # a group with a number and no name cannot be configured either
            continue
    return tuple(names)


def read(file: str = CONFIG_FILE) -> Machine:
    """The configuration in that file; an empty one where there is no file.

    Raises BadSetting, which names the file and the key.
    """
    try:
        text = Path(file).read_text()
    except FileNotFoundError:
        return Machine(file)
    except (OSError, UnicodeDecodeError) as error:
        raise BadSetting(
            "GPU_CONFIG_FILE", file, f"a text file that everybody may read ({error})"
        ) from None
    return parse(text, file)


def parse(text: str, file: str = CONFIG_FILE) -> Machine:
    """The configuration that the text says.

    >>> parse('[users.ann]\\nkeep = false').cap("ann").named("keep")
    'cap [users.ann] keep in /etc/gpu-console/config.toml'

    Raises BadSetting.
    """
    try:
        said = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadSetting("GPU_CONFIG_FILE", file, f"TOML; here: {error}") from None
    page = _Page(file)
    page.known("", said, ("ledger", "operators", "users", "groups"))
    operators = page.table("operators", said.get("operators", {}))
    page.known("operators", operators, ("users", "groups"))
    return Machine(
        file,
        ledger=page.text("ledger", said.get("ledger", "")),
        operators=("root", *page.names("operators.users", operators.get("users", []))),
        operator_groups=page.names("operators.groups", operators.get("groups", [])),
        users=page.caps("users", said.get("users", {})),
        groups=page.caps("groups", said.get("groups", {})),
    )


class _Page:
    """Checks what a file says, and names file and key in every complaint."""

    def __init__(self, file: str) -> None:
        self.file = file

    def wrong(self, key: str, value: Any, expected: str) -> BadSetting:
        return BadSetting(f"{self.file}: {key}", value, expected)

    def known(self, table: str, said: Mapping[str, Any], keys: tuple[str, ...]) -> None:
        for key in said:
            if key not in keys:
                nearest = difflib.get_close_matches(key, keys, n=1, cutoff=0.0)[0]
                at = f"{table}.{key}".lstrip(".")
                raise self.wrong(at, said[key], f"under a key that is known, such as {nearest}")

    def table(self, key: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.wrong(key, value, f"a table, written [{key}]")
        return value

    def text(self, key: str, value: Any) -> str:
        if not isinstance(value, str):
            raise self.wrong(key, value, "text in quotes")
        return value

    def names(self, key: str, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.wrong(key, value, 'a list of names, such as ["ann"]')
        return tuple(value)

    def caps(self, key: str, value: Any) -> dict[str, dict[str, Any]]:
        caps = {}
        for name, said in self.table(key, value).items():
            at = f"{key}.{name}"
            self.known(at, self.table(at, said), tuple(_FIELDS))
            caps[name] = {
                _FIELDS[word][0]: self._cap(f"{at}.{word}", word, given)
                for word, given in said.items()
            }
        return caps

    def _cap(self, key: str, word: str, given: Any) -> Any:
        _, read, expected = _FIELDS[word]
        try:
            return read(given)
        except (BadSize, ValueError, KeyError, TypeError):
            raise self.wrong(key, given, expected) from None


def _importance(given: Any) -> int:
    return parse_importance(given, least=1)


def _yes_or_no(given: Any) -> bool:
    if not isinstance(given, bool):
        raise ValueError(given)
    return given


# A key as it is written -> the field of Cap, how it is read, and what it must be.
_FIELDS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "bytes_per_device": ("bytes_per_device", parse_bytes, "a size, such as '20 GiB'"),
    "importance": (
        "importance",
        _importance,
        f"a number above 0, or one of {', '.join(IMPORTANCE)}",
    ),
    "keep": ("keep", _yes_or_no, "true or false"),
    "longest_lease": ("longest_lease_seconds", parse_seconds, "seconds, such as 3600 or '4h'"),
}
_KEYS = {field: key for key, (field, _, _) in _FIELDS.items()}
