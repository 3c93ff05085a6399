"""Reads `tasks.yaml`, and reads it again when it has changed.

A mistake is reported with the file, the line and the name of the task.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from ... import limited_files
from ...catalog import documents
from ...errors import BadDocument
from ...facts import IMPORTANCE
from ...private_paths import config_home
from ..requests import Refused, check_numbers
from .tasks import Profile, ServingConfig, Task

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
    """The content of one file, which is read again after each change. After a mistake, the earlier content stays."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        clock: Callable[[], float],
        doubts: Callable[[ServingConfig], Iterable[str]] = lambda config: (),
    ) -> None:
        """The content of the file `path`. A file that does not exist has no content. `clock` returns seconds.

        `doubts(content)` are sentences on names that may be mistakes. They are logged when the content is first used,
        and after each change. Raises BadDocument.
        """
        self.path = path
        self._clock = clock
        self._doubts = doubts
        self._is_new = True  # whether the doubts have not been logged
        self._stamp = _stamp(path)
        self._checked_at = clock()
        self._content = read_serving_config(path)

    def content(self) -> ServingConfig:
        """The content of the file, checked once a second. If it was removed, it stays until `reload` is called."""
        if self._clock() - self._checked_at >= CHECK_SECONDS:
            self._checked_at = self._clock()
            stamp = _stamp(self.path)
            if stamp is not None and stamp != self._stamp:
                self.reload()
        if self._is_new:
            self._is_new = False
            self._log_doubts()
        return self._content

    def _log_doubts(self) -> None:
        if self._stamp is None and self.path not in (None, default_file()):
            log.warning("there is no file %s; it is read once it exists", self.path)
        for doubt in self._doubts(self._content):
            log.warning("%s, %s", self.path, doubt)

    def reload(self) -> None:
        """Reads the file now, also if it was removed. If the file has a mistake, the earlier content stays."""
        self._stamp = _stamp(self.path)
        try:
            self._content = read_serving_config(self.path)
            self._is_new = True
        except BadDocument as error:
            text = "%s was changed and has a mistake; the earlier content stays: %s"
            log.warning(text, self.path, error)
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
    """The content of the file `path`; empty if there is none. Raises BadDocument, with the line and field."""
    if path is None or not os.path.exists(path):
        return ServingConfig()
    name = os.fspath(path)
    try:
        with limited_files.open_regular(name) as file:
            data = file.read(documents.MOST_BYTES + 1)
    except OSError as error:
        raise BadDocument(name, 0, "", f"it cannot be read ({error.strerror or error})") from None
    found = documents.read(data, name)
    if len(found) > 1:
        raise found[1].wrong((), "the file must have one document; a second one begins here")
    return _TasksReader(found[0]).config() if found else ServingConfig()


class _TasksReader:
    """Converts one document."""

    def __init__(self, document: documents.Document) -> None:
        """`document` has the lines of its values."""
        self._document = document
        self._bad = document.wrong

    def config(self) -> ServingConfig:
        """The document as a ServingConfig. Raises BadDocument."""
        content = self._document.value
        if not isinstance(content, dict):
            raise self._bad((), "the file must have sections such as tasks")
        sections = {}
        for section, entries in content.items():
            if section not in _SECTIONS:
                problem = f"unknown field `{section}`; known: {', '.join(_SECTIONS)}"
                raise BadDocument(self._document.file, self._document.line((section,)), "", problem)
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
            place = (section, name)
            try:
                found[name] = msgspec.convert(entry, _SECTIONS[section])
            except msgspec.ValidationError as error:
                problem, _, field = str(error).partition(" - at ")
                steps = [name or int(index) for name, index in _STEP.findall(field)]
                raise self._bad((*place, *steps), problem) from None
            if section == "clients":
                self._check_profile(found[name], place)
        return found

    def _check_profile(self, profile: Profile, place: tuple[Any, ...]) -> None:
        """Checks the values of a `profile` by the rules for a request's body. Raises BadDocument."""
        importance = profile.importance
        unknown_word = isinstance(importance, str) and importance not in IMPORTANCE
        out_of_range = isinstance(importance, int) and not 1 <= importance <= 100
        if unknown_word or out_of_range:
            names = ", ".join(IMPORTANCE)
            problem = f"{importance!r} is none of {names}, nor a number from 1 to 100"
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
