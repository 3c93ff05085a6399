"""Reads YAML or JSON text as plain values with line numbers. Also writes plain values as YAML.

The values are text, numbers, true, false, null, lists and mappings. A YAML tag never creates an
object, and a timestamp remains text. A field that appears twice is an error. A file is refused if
it is too large, is nested too deep, or has too many values after its YAML aliases are expanded. The
module `fields` gives the values their meaning.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

try:
    import yaml
except ModuleNotFoundError:  # in a kernel of `gpu box install`, see box.py
    if find_spec("gpu_runtime.box_yaml") is None:
        raise
    yaml = import_module("gpu_runtime.box_yaml")

from ..errors import BadDocument
from ..safe_text import quoted

MOST_BYTES = 1 << 20  # limit of one file
MOST_VALUES = 50_000  # limit of one file; the values of an alias are counted at each use
DEEPEST = 32  # levels of nesting

Path = tuple[str | int, ...]  # ("models", 0, "memory"), from the top of a document

# The parser in C, if PyYAML has one. It is ten times as fast.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MERGE, _MAP, _SEQ = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"
_SCALARS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null"))
# JSON has no type for a timestamp, nor for the YAML value `=`. Both are read as text.
_AS_TEXT = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value")
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can write half of a character, UTF-8 cannot
_GAP = re.compile(r"[ \t\r\n,]*")  # between the documents of a JSON file
_TOO_DEEP = f"this is nested deeper than {DEEPEST} levels"


class Document(NamedTuple):
    """One document of a file."""

    value: Any
    lines: dict[Path, int]
    file: str

    def line(self, path: Path) -> int:
        """The line number, from 1, of the value at `path`, or of the nearest value around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def wrong(self, path: Path, problem: str, **facts: Any) -> BadDocument:
        """The error for a `problem` at this `path`. `facts` become attributes of the error."""
        return BadDocument(self.file, self.line(path), dotted(path), problem, **facts)


def dotted(path: Path) -> str:
    """The `path` as people write it.

    >>> dotted(("models", 0, "memory"))
    'models[0].memory'
    """
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in path]
    return "".join(steps).lstrip(".")


def read(data: bytes, file: str) -> tuple[Document, ...]:
    """The documents in the `data` of a `file`. Empty documents are left out. Raises BadDocument."""
    if len(data) > MOST_BYTES:
        raise BadDocument(file, 1, "", f"the file is larger than {MOST_BYTES >> 20} MiB")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise BadDocument(file, line, "", "this is not text in UTF-8") from None
    if file.endswith(".json"):
        return tuple(_json(text, file))
    if text.lstrip()[:1] == "{":
        # This may be JSON, or a YAML mapping in braces. YAML rejects some valid JSON: tabs, some
        # numbers, and several documents in a row. A repeated field is an error in both.
        try:
            return tuple(_json(text, file))
        except BadDocument as refused:
            if "twice" in str(refused):
                raise
    return tuple(_yaml(text, file))


# -- YAML ----------------------------------------------------------------------------------------


def _yaml(text: str, file: str) -> Iterator[Document]:
    builder = _Builder(file)
    try:
        _require_shallow(text, file)  # must be first: composing very deep nodes crashes the process
        loader = _Loader(text)
        try:
            while loader.check_node():
                builder.begin(loader)
                value = builder.value(loader.get_node(), ())
                if value is not None:
                    yield Document(value, builder.lines, file)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(filter(None, (error.context, error.problem)))
        is_deep = "nesting depth" in problem  # the limit of PyYAML 6.0.4 and newer
        words = _TOO_DEEP if is_deep else f"this is not YAML: {problem}"
        raise BadDocument(file, mark.line + 1 if mark else 1, "", words) from None
    except yaml.YAMLError as error:
        problem = str(error.args[-1] if error.args else error)
        words = f"this is not YAML: {problem}".splitlines()[0]
        line = text.count("\n", 0, getattr(error, "position", 0)) + 1  # a ReaderError has it
        raise BadDocument(file, line, "", words) from None


def _require_shallow(text: str, file: str) -> None:
    """Raises BadDocument if the YAML in `text` is nested too deep. The check builds no nodes."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent))
        depth -= isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent))
        if depth > DEEPEST:
            raise BadDocument(file, event.start_mark.line + 1, "", _TOO_DEEP)


class _Builder:
    """Converts YAML nodes to values, and records their lines."""

    def __init__(self, file: str) -> None:
        self.file, self.count, self.merges = file, 0, 0
        self.lines: dict[Path, int] = {}

    def begin(self, loader: Any) -> None:
        self.loader, self.lines = loader, {}

    def value(self, node: Any, path: Path) -> Any:
        """The value of the `node` at this `path`. Raises BadDocument."""
        line = node.start_mark.line + 1
        self.lines.setdefault(path, line)
        self.count += 1
        if self.count > MOST_VALUES:
            many = (
                f"the file has more than {MOST_VALUES} values; those of an alias count at each use"
            )
            raise self._wrong(line, path, many)
        if len(path) > DEEPEST:  # possible if an alias refers to a node that contains it
            raise self._wrong(line, path, _TOO_DEEP)
        if isinstance(node, yaml.MappingNode) and node.tag == _MAP:
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == _SEQ:
            return [self.value(child, (*path, index)) for index, child in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, path)
        raise self._wrong(line, path, _not_plain(node.tag))

    def mapping(self, node: Any, path: Path) -> dict[str, Any]:
        """The fields of the mapping `node` at `path`. They override those that `<<` merges into it."""
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        seen: dict[str, int] = {}
        for key, child in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise self._wrong(line, path, "a field's name must be text")
            if key.value in seen:
                problem = f"this appears here twice; the first time in line {seen[key.value]}"
                raise self._wrong(line, (*path, key.value), problem)
            seen[key.value] = line
            if key.tag == _MERGE:
                merged = {**self._merged(child, path, line), **merged}
                continue
            self.lines[(*path, key.value)] = line
            own[key.value] = self.value(child, (*path, key.value))
        return {**merged, **own}

    def _merged(self, node: Any, path: Path, line: int) -> dict[str, Any]:
        """The fields of `node`, the value of `<<`: a mapping, or a list, whose first mappings count."""
        merged: dict[str, Any] = {}
        self.merges += 1
        if self.merges > DEEPEST:  # possible if a mapping merges itself
            raise self._wrong(line, path, _TOO_DEEP)
        for part in node.value if isinstance(node, yaml.SequenceNode) else (node,):
            fields = self.value(part, path)
            if not isinstance(fields, dict):
                raise self._wrong(line, path, "<< needs a mapping, or a list of them")
            merged = {**fields, **merged}
        self.merges -= 1
        return merged

    def scalar(self, node: Any, path: Path) -> Any:
        """The text, number or truth value of the `node` at `path`."""
        if node.tag in _AS_TEXT:
            return node.value
        line = node.start_mark.line + 1
        if node.tag not in _SCALARS:
            raise self._wrong(line, path, _not_plain(node.tag))
        try:
            value = self.loader.construct_object(node)
        except ValueError:
            raise self._wrong(line, path, f"{_short(node.value)} is not a number") from None
        return _usable(value, lambda problem: self._wrong(line, path, problem))

    def _wrong(self, line: int, path: Path, problem: str) -> BadDocument:
        return BadDocument(self.file, line, dotted(path), problem)


def _not_plain(tag: str) -> str:
    return f"{tag} is not supported: only text, numbers, true, false, lists and mappings are"


def _usable(value: Any, wrong: Callable[[str], BadDocument]) -> Any:
    """Returns `value`. If JSON cannot represent `value`, raises the error that `wrong` makes."""
    if isinstance(value, float) and not math.isfinite(value):
        raise wrong(f"{value} is not a number that can be used")
    if isinstance(value, str) and _SURROGATE.search(value):
        raise wrong(f"{quoted(value)} has half of a character, so it is no text")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise wrong(f"{_short(str(value))} is too large a number")
    return value


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}…"


# -- JSON ----------------------------------------------------------------------------------------


def _json(text: str, file: str) -> Iterator[Document]:
    """Yields the JSON documents in `text`, one or several in a row, as in jq. Raises BadDocument."""
    decoder = json.JSONDecoder(object_pairs_hook=_Pairs, parse_constant=_no_constant)
    count, line, end = itertools.count(1), 1, 0
    while (at := _GAP.match(text, end).end()) < len(text):
        line += text.count("\n", end, at)
        try:
            raw, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise BadDocument(file, error.lineno, "", f"this is not JSON: {error.msg}") from None
        except (ValueError, RecursionError) as error:
            problem = "nested too deep" if isinstance(error, RecursionError) else str(error)
            words = f"this is not JSON that can be used: {problem}"
            raise BadDocument(file, line, "", words) from None
        lines = _json_lines(text[at:end], line - 1)
        document = Document(None, lines, file)
        value = _plain(raw, (), document, count)
        line += text.count("\n", at, end)
        if value is not None:
            yield Document(value, lines, file)


class _Pairs(list):
    """The fields of a JSON object as pairs of name and value, including repeated names."""


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a number that can be used")


def _plain(raw: Any, path: Path, document: Document, count: Iterator[int]) -> Any:
    if next(count) > MOST_VALUES:
        raise document.wrong(path, f"the file has more than {MOST_VALUES} values")
    if len(path) > DEEPEST:
        raise document.wrong(path, _TOO_DEEP)
    if isinstance(raw, _Pairs):
        fields: dict[str, Any] = {}
        for key, child in raw:
            _usable(key, lambda problem: document.wrong(path, problem))
            if key in fields:
                raise document.wrong((*path, key), "this appears here twice")
            fields[key] = _plain(child, (*path, key), document, count)
        return fields
    if isinstance(raw, list):
        return [_plain(child, (*path, index), document, count) for index, child in enumerate(raw)]
    return _usable(raw, lambda problem: document.wrong(path, problem))


def _json_lines(text: str, before: int) -> dict[Path, int]:
    """The line of each value in the valid JSON document `text`, which has `before` lines before it.

    The JSON is read as YAML, with spaces in place of tabs, because YAML's nodes have line numbers.
    With a character that YAML does not allow, only the line of the document itself is known.
    """
    lines: dict[Path, int] = {}
    spaced = text.replace("\t", " ")
    try:
        _require_shallow(spaced, "")
        root = yaml.compose(spaced, Loader=_Loader)
    except (yaml.YAMLError, BadDocument):  # valid JSON that YAML does not allow
        return {(): before + 1}

    def walk(node: Any, path: Path) -> None:
        lines.setdefault(path, before + node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            for key, child in node.value:
                lines[(*path, key.value)] = before + key.start_mark.line + 1
                walk(child, (*path, key.value))
        elif isinstance(node, yaml.SequenceNode):
            for index, child in enumerate(node.value):
                walk(child, (*path, index))

    if root is not None:
        walk(root, ())
    return lines


# -- writing -------------------------------------------------------------------------------------


class _Dumper(yaml.SafeDumper):
    """PyYAML's dumper, which also writes text with unprintable characters as escapes in quotes.

    Else the rare line break U+0085 would be read back as a space.
    """


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    rare = not text.replace("\n", "").isprintable()
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if rare else None)


_Dumper.add_representer(str, _represent_text)


def as_yaml(body: Mapping[str, Any]) -> str:
    """The document `body` as YAML. The fields keep their order."""
    text = yaml.dump(body, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    return text.rstrip("\n")
