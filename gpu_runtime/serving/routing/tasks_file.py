"""Reads `tasks.yaml`, and reads it again when it has changed.

A mistake is reported with the file, the line and the name of the task. If a changed file has a mistake, the earlier
content stays.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from ...errors import BadDocument
from ...facts import IMPORTANCE
from ...private_paths import config_home
from ..requests import Refused, check_numbers
from .tasks import Profile, ServingConfig, Task

MAX_FILE_BYTES = 1 << 20
CHECK_SECONDS = 1.0  # the time between two checks of the file
FIELDS_OF_CALLS = ("model", "messages", "prompt", "input", "stream")  # a profile may not set them
_SECTIONS: dict[str, Any] = {
    "tasks": Task,
    "clients": Profile,
    "fallback": tuple[str, ...],
    "aliases": str,
    "preload": tuple[str, ...],  # one list, without names
}
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
log = logging.getLogger("gpu_runtime")


def default_file() -> Path:
    """The path of `tasks.yaml` if GPU_TASKS is not set."""
    return config_home() / "tasks.yaml"


class TasksFile:
    """The content of one file, which is read again after each change of the file.

    After a change with a mistake, the earlier content stays.
    """

    def __init__(self, path: str | os.PathLike[str] | None, clock: Callable[[], float]) -> None:
        """The content of the file `path`. A file that does not exist has no content. `clock` returns seconds.

        Raises BadDocument.
        """
        self.path = path
        self._clock = clock
        self._stamp = _stamp(path)
        self._checked_at = clock()
        self._content = read_serving_config(path)

    def content(self) -> ServingConfig:
        """The content of the file, which is checked for a change at most once a second.

        After the file was removed, the content stays until `reload` is called.
        """
        if self._clock() - self._checked_at >= CHECK_SECONDS:
            self._checked_at = self._clock()
            stamp = _stamp(self.path)
            if stamp is not None and stamp != self._stamp:
                self.reload()
        return self._content

    def reload(self) -> None:
        """Reads the file now, also if it was removed. If the file has a mistake, the earlier content stays."""
        self._stamp = _stamp(self.path)
        try:
            self._content = read_serving_config(self.path)
        except BadDocument as error:
            log.warning(
                "%s was changed and has a mistake; the earlier content stays: %s", self.path, error
            )
        else:
            log.info("%s was read again", self.path)


def _stamp(path: str | os.PathLike[str] | None) -> tuple[int, int, int] | None:
    """A value that differs after each change of the file `path`; None if there is no file."""
    try:
        found = os.stat(path or "")
    except OSError:  # the file is missing; `read_serving_config` reports all other errors
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def read_serving_config(path: str | os.PathLike[str] | None) -> ServingConfig:
    """The content of the file `path`. If the file does not exist, the result is empty.

    Raises BadDocument, which names the file, the line and the field.
    """
    if path is None or not os.path.exists(path):
        return ServingConfig()
    name = os.fspath(path)
    try:
        text = _read(name)
        content = yaml.safe_load(text)
        lines = yaml.compose(text, yaml.SafeLoader)
    except OSError as error:
        raise BadDocument(name, 0, "", f"it cannot be read ({error.strerror or error})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 0
        problem = getattr(error, "problem", error)
        raise BadDocument(name, line, "", f"it is no YAML: {problem}") from None
    return _TasksReader(name, lines).config(content or {})


def _read(name: str) -> bytes:
    data = Path(name).read_bytes()[: MAX_FILE_BYTES + 1]
    if len(data) > MAX_FILE_BYTES:
        raise BadDocument(name, 0, "", f"it is larger than {MAX_FILE_BYTES >> 20} MiB")
    return data


class _TasksReader:
    """Converts the content of one file, and finds the line of each mistake."""

    def __init__(self, name: str, lines: Any) -> None:
        """`lines` is the file's content as nodes of PyYAML, which have the numbers of their lines."""
        self._name = name
        self._lines = lines

    def config(self, content: Any) -> ServingConfig:
        """The `content` of the file as a ServingConfig. Raises BadDocument."""
        if not isinstance(content, dict):
            raise self._bad((), "the file must have sections such as tasks")
        sections = {}
        for section, entries in content.items():
            if section not in _SECTIONS:
                expected = ", ".join(_SECTIONS)
                raise self._bad((section,), f"unknown field `{section}`; known: {expected}", "")
            sections[section] = self._section(section, entries)
        self._check_aliases(sections.get("aliases", {}))
        return ServingConfig(**sections)

    def _check_aliases(self, aliases: dict[str, str]) -> None:
        for name, model in aliases.items():
            if model in aliases:
                raise self._bad(("aliases", name), f"{model} is an alias too; name its model")

    def _section(self, section: str, entries: Any) -> Any:
        if entries is None:
            return {}
        if section == "preload":
            try:
                return msgspec.convert(entries, _SECTIONS[section])
            except msgspec.ValidationError:
                raise self._bad((section,), "it must be a list of models") from None
        if not isinstance(entries, dict):
            raise self._bad((section,), "it must have one entry for each name")
        found = {}
        for name, entry in entries.items():
            place = (section, str(name))
            try:
                found[str(name)] = msgspec.convert(entry, _SECTIONS[section])
            except msgspec.ValidationError as error:
                problem, _, field = str(error).partition(" - at ")
                steps = [name or int(index) for name, index in _STEP.findall(field)]
                raise self._bad((*place, *steps), problem) from None
            if section == "clients":
                self._check_profile(found[str(name)], place)
        return found

    def _check_profile(self, profile: Profile, place: tuple[Any, ...]) -> None:
        """Checks the values of a `profile` by the rules for a request's body. Raises BadDocument."""
        importance = profile.importance
        unknown_word = isinstance(importance, str) and importance not in IMPORTANCE
        out_of_range = isinstance(importance, int) and not 1 <= importance <= 100
        if unknown_word or out_of_range:
            problem = (
                f"{importance!r} is none of {', '.join(IMPORTANCE)}, nor a number from 1 to 100"
            )
            raise self._bad((*place, "importance"), problem)
        for field in profile.defaults:
            if field in FIELDS_OF_CALLS or field.startswith("x_"):
                problem = "only a call can set it, not a profile"
                raise self._bad((*place, "defaults", field), problem)
        try:
            check_numbers(profile.defaults)
        except Refused as refused:
            field = refused.facts["param"]
            raise self._bad((*place, "defaults", field), refused.message) from None

    def _bad(self, place: tuple[Any, ...], problem: str, shown: str | None = None) -> BadDocument:
        """The error for a `problem` at this `place`, with its line. `shown` replaces the name of the place."""
        if shown is None:
            shown = ""
            for step in place:
                shown += f"[{step}]" if isinstance(step, int) else f".{step}"
        return BadDocument(self._name, self._line(place), shown.lstrip("."), problem)

    def _line(self, place: tuple[Any, ...]) -> int:
        """The line of `place` in the file, counted from 1.

        If the file has no such place, the result is the line of the innermost existing place that should contain it.
        """
        node = self._lines
        line = node.start_mark.line if node else 0
        for step in place:
            found = None
            if isinstance(node, yaml.MappingNode):
                found = next(((k, v) for k, v in node.value if k.value == str(step)), None)
            elif isinstance(node, yaml.SequenceNode) and isinstance(step, int):
                found = next(((v, v) for v in node.value[step : step + 1]), None)
            if found is None:
                break
            line = found[0].start_mark.line
            node = found[1]
        return line + 1
