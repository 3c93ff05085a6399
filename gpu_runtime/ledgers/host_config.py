"""The machine-wide configuration: the shared ledger, and the caps on each user.

The operator writes the configuration as a TOML file. A runtime reads the file when it opens. A
machine without the file has no shared ledger and no caps. An example:

    ledger = "keeper:///var/lib/gpu-console"

    [operators]                       # root, and these: may pin, load and defragment anywhere
    users = ["ops"]
    groups = ["gpu-admins"]

    [users.ann]                       # a user's own table overrides those of groups
    bytes_per_device = "20 GiB"       # on each card, all of ann's processes together
    enforce = true                    # torch itself refuses more; without it, more leaves first
    importance = "normal"             # the highest importance that her requests may have
    keep = false                      # nothing of hers is pinned to a card
    longest_lease = "4h"              # of `rt.lease` and `%%gpu`
    card_hours_per_week = 40          # whole cards in the last seven days, as in `gpu report`
    after_quota = "lower"             # beyond: "lower" (all of hers is batch), or "refuse"

    [groups.students]                 # for each member; the most generous of their groups counts
    bytes_per_device = "8 GiB"
"""

from __future__ import annotations

import difflib
import grp
import math
import os
import pwd
from collections.abc import Iterable, Mapping
from typing import Any

from .. import compat, files
from ..arguments import IMPORTANCE, TRUTH, Rule
from ..errors import BadSetting
from ..facts import IMPORTANCE as CLASSES
from ..facts import Cap, Value
from ..units import parse_bytes, parse_seconds

CONFIG_FILE = "/etc/gpu-console/config.toml"


class Machine(Value):
    """The machine-wide configuration, as values.

    `users` and `groups` map a name to its caps. The keys of the caps are the fields of Cap.
    """

    file: str = CONFIG_FILE
    ledger: str = ""
    operators: tuple[str, ...] = ("root",)
    operator_groups: tuple[str, ...] = ()
    users: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}

    def is_operator(self, user: str, groups: Iterable[str] = ()) -> bool:
        """Whether `user`, a member of `groups`, is an operator."""
        return user in self.operators or any(group in self.operator_groups for group in groups)

    def cap(self, user: str, groups: Iterable[str] = ()) -> Cap | None:
        """The cap on `user`, a member of `groups`; None if no cap is configured for this user."""
        fields: dict[str, Any] = {}
        tables: dict[str, str] = {}  # key -> the table that sets it
        for group in groups:
            for field, value in self.groups.get(group, {}).items():
                if field in fields and not _more_generous(field, value, fields[field]):
                    continue
                fields[field] = value
                tables[_KEYS[field]] = f"groups.{group}"
        for field, value in self.users.get(user, {}).items():
            fields[field] = value
            tables[_KEYS[field]] = f"users.{user}"
        return Cap(user, self.file, tables=tables, **fields) if fields else None


def _more_generous(field: str, value: Any, than: Any) -> bool:
    if field in ("importance", "enforce", "after_quota"):
        # A lower number is more important, `false` enforces nothing, "lower" refuses nothing.
        return value < than
    return value > than


def groups_of(user: str) -> tuple[str, ...]:
    """The names of the groups of this machine's `user`; empty for a user without an entry."""
    try:
        ids = os.getgrouplist(user, pwd.getpwnam(user).pw_gid)
    except KeyError:  # as in containers
        return ()
    names = []
    for id in ids:
        try:
            names.append(grp.getgrgid(id).gr_name)
        except KeyError:  # a group with a number and no name cannot be configured either
            continue
    return tuple(names)


def read(file: str = CONFIG_FILE) -> Machine:
    """The configuration in `file`; an empty configuration if the file does not exist.

    Raises BadSetting, which names the file and the key.
    """
    try:
        text = files.read_text(file)
    except FileNotFoundError:  # most machines have none
        return Machine(file)
    except OSError as error:
        expected = f"a text file that everybody may read ({error.strerror or error})"
        raise BadSetting("GPU_CONFIG_FILE", file, expected) from None
    return parse(text, file)


def parse(text: str, file: str = CONFIG_FILE) -> Machine:
    """The configuration in `text`. Error messages name `file` as its source.

    >>> parse('[users.ann]\\nkeep = false').cap("ann").named("keep")
    'cap [users.ann] keep in /etc/gpu-console/config.toml'

    Raises BadSetting.
    """
    reader = compat.toml()
    try:
        tables = reader.loads(text)
    except reader.TOMLDecodeError as error:
        raise BadSetting("GPU_CONFIG_FILE", file, f"TOML; here: {error}") from None
    checker = _ConfigChecker(file)
    checker.require_known("", tables, ("ledger", "operators", "users", "groups"))
    operators = checker.table("operators", tables.get("operators", {}))
    checker.require_known("operators", operators, ("users", "groups"))
    return Machine(
        file,
        ledger=checker.text("ledger", tables.get("ledger", "")),
        operators=("root", *checker.names("operators.users", operators.get("users", []))),
        operator_groups=checker.names("operators.groups", operators.get("groups", [])),
        users=checker.caps("users", tables.get("users", {})),
        groups=checker.caps("groups", tables.get("groups", {})),
    )


class _ConfigChecker:
    """Checks the values of a configuration file.

    Each method returns the checked value, or raises BadSetting with the file and the key.
    """

    def __init__(self, file: str) -> None:
        self.file = file

    def wrong(self, key: str, value: Any, expected: str) -> BadSetting:
        return BadSetting(f"{self.file}: {key}", value, expected)

    def require_known(self, table: str, given: Mapping[str, Any], keys: tuple[str, ...]) -> None:
        """Raises BadSetting for a key that is not in `keys`."""
        for key in given:
            if key not in keys:
                nearest = difflib.get_close_matches(key, keys, n=1, cutoff=0.0)[0]
                path = f"{table}.{key}".lstrip(".")
                raise self.wrong(path, given[key], f"under a key that is known, such as {nearest}")

    def table(self, key: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.wrong(key, value, f"a table, written [{key}]")
        return value

    def text(self, key: str, value: Any) -> str:
        if not isinstance(value, str):
            raise self.wrong(key, value, "text in quotes")
        return value

    def names(self, key: str, value: Any) -> tuple[str, ...]:
        is_list = isinstance(value, list)
        if not is_list or not all(isinstance(name, str) for name in value):
            raise self.wrong(key, value, 'a list of names, such as ["ann"]')
        return tuple(value)

    def caps(self, key: str, value: Any) -> dict[str, dict[str, Any]]:
        """The caps of each name in the table `key`, by the fields of Cap."""
        caps = {}
        for name, given in self.table(key, value).items():
            path = f"{key}.{name}"
            self.require_known(path, self.table(path, given), tuple(_CAP_KEYS))
            fields = {}
            for word, setting in given.items():
                field, rule = _CAP_KEYS[word]
                try:
                    fields[field] = rule.read(setting)
                except Exception:
                    raise self.wrong(f"{path}.{word}", setting, rule.expected) from None
            caps[name] = fields
        return caps


def _hours(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError
    return float(value)


def _after_quota(value: Any) -> str:
    if value not in ("lower", "refuse"):
        raise ValueError
    return str(value)


_YES_OR_NO = Rule("true or false", TRUTH.read)
_CAP_KEYS: dict[str, tuple[str, Rule]] = {  # key in the file -> the field of Cap, and its values
    "bytes_per_device": ("bytes_per_device", Rule("a size, such as '20 GiB'", parse_bytes)),
    "enforce": ("enforce", _YES_OR_NO),
    "importance": (
        "importance",
        Rule(f"a number above 0, or one of {', '.join(CLASSES)}", IMPORTANCE.in_file),
    ),
    "keep": ("keep", _YES_OR_NO),
    "longest_lease": (
        "longest_lease_seconds",
        Rule("seconds, such as 3600 or '4h'", parse_seconds),
    ),
    "card_hours_per_week": ("card_hours_per_week", Rule("a number of hours above 0", _hours)),
    "after_quota": ("after_quota", Rule("'lower' or 'refuse'", _after_quota)),
}
_KEYS = {field: name for name, (field, _) in _CAP_KEYS.items()}
