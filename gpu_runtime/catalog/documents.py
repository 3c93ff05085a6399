"""Text of YAML or JSON as plain values, each with the line that it stands on.

What comes out is text, numbers, true or false, lists and mappings: no tag makes an object, and a timestamp stays the
text it was. A field that stands twice is an error, and so is a page that is too large, too deep, or grows through its
aliases. What the values mean is for others to say.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

from ..errors import BadDocument

MOST_BYTES = 1 << 20  # of one file
MOST_VALUES = 50_000  # in one file, whatever its aliases stand for counted each time
DEEPEST = 32

Path = tuple[str | int, ...]  # ("models", 0, "memory"), from the top of a document

# The parser in C, where PyYAML has it: ten times as fast.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MERGE, _MAP, _SEQ = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"
_SCALARS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null"))
_AS_TEXT = (
    "tag:yaml.org,2002:timestamp",
    "tag:yaml.org,2002:value",
)  # JSON has neither, and nobody means them here


class Document(NamedTuple):
    """One document of a file."""

    value: Any
    lines: dict[Path, int]
    file: str

    def line(self, path: Path) -> int:
        """The line, from 1, of that value, or of the nearest thing around it that has one."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def wrong(self, path: Path, problem: str, **facts: Any) -> BadDocument:
        """The error that names this place."""
        return BadDocument(self.file, self.line(path), dotted(path), problem, **facts)


def dotted(path: Path) -> str:
    """As people write it.

    >>> dotted(("models", 0, "memory"))
    'models[0].memory'
    """
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(
        "."
    )


def read(data: bytes, file: str) -> tuple[Document, ...]:
    """The documents in a file's bytes; empty ones are left out. Raises BadDocument."""
    if len(data) > MOST_BYTES:
        raise BadDocument(
            file, 1, "", f"the file is larger than the {MOST_BYTES >> 20} MiB that are read"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadDocument(
            file, data[: error.start].count(b"\n") + 1, "", "this is not text in UTF-8"
        ) from None
    start = text.lstrip()[:1]
    if file.endswith(".json"):
        return tuple(_json(text, file))
    if (
        start == "{"
    ):  # JSON is YAML but for its tabs and a few numbers, and may have several documents in a row
        try:
            return tuple(_json(text, file))
        except BadDocument as refused:
            if "twice" in str(refused):
                raise
    return tuple(_yaml(text, file))


# -- YAML ---------------------------------------------------------------------------------------------------------


def _yaml(text: str, file: str) -> Iterator[Document]:
    builder = _Builder(file)
    try:
        _require_shallow(text, file)  # first: composing what is nested too deep ends the process
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
        said = " ".join(filter(None, (error.context, error.problem)))
        raise BadDocument(
            file, mark.line + 1 if mark else 1, "", f"this is not YAML: {said}"
        ) from None
    except yaml.YAMLError as error:
        raise BadDocument(
            file,
            _line_of(text, error),
            "",
            f"this is not YAML: {error.args[-1] if error.args else error}".splitlines()[0],
        ) from None


def _line_of(text: str, error: Any) -> int:
    position = getattr(error, "position", None)
    return text.count("\n", 0, position) + 1 if isinstance(position, int) else 1


def _require_shallow(text: str, file: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent))
        depth -= isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent))
        if depth > DEEPEST:
            raise BadDocument(
                file, event.start_mark.line + 1, "", f"this is nested deeper than {DEEPEST} levels"
            )


class _Builder:
    """Makes values of nodes, and notes their lines."""

    def __init__(self, file: str) -> None:
        self.file, self.count = file, 0
        self.lines: dict[Path, int] = {}

    def begin(self, loader: Any) -> None:
        self.loader, self.lines = loader, {}

    def value(self, node: Any, path: Path) -> Any:
        line = node.start_mark.line + 1
        self.lines.setdefault(path, line)
        self.count += 1
        if self.count > MOST_VALUES:
            raise BadDocument(
                self.file,
                line,
                dotted(path),
                f"the file holds more than {MOST_VALUES} values, its aliases counted each time",
            )
        if len(path) > DEEPEST:  # an alias to what it lies in
            raise BadDocument(
                self.file, line, dotted(path), f"this is nested deeper than {DEEPEST} levels"
            )
        if isinstance(node, yaml.MappingNode) and node.tag == _MAP:
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == _SEQ:
            return [self.value(child, (*path, index)) for index, child in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, path)
        raise BadDocument(self.file, line, dotted(path), _not_plain(node.tag))

    def mapping(self, node: Any, path: Path) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        seen: dict[str, int] = {}
        for key, child in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise BadDocument(self.file, line, dotted(path), "a field's name must be text")
            if key.value in seen:
                raise BadDocument(
                    self.file,
                    line,
                    dotted((*path, key.value)),
                    f"this stands here twice; the first time in line {seen[key.value]}",
                )
            seen[key.value] = line
            if key.tag == _MERGE:
                for part in child.value if isinstance(child, yaml.SequenceNode) else (child,):
                    before = self.value(part, path)
                    if not isinstance(before, dict):
                        raise BadDocument(
                            self.file, line, dotted(path), "<< takes a mapping, or a list of them"
                        )
                    merged = {**before, **merged}
                continue
            self.lines[(*path, key.value)] = line
            own[key.value] = self.value(child, (*path, key.value))
        return {**merged, **own}

    def scalar(self, node: Any, path: Path) -> Any:
        if node.tag in _AS_TEXT:
            return node.value
        line, at = node.start_mark.line + 1, dotted(path)
        if node.tag not in _SCALARS:
            raise BadDocument(self.file, line, at, _not_plain(node.tag))
        try:
            value = self.loader.construct_object(node)
        except ValueError:
            raise BadDocument(
                self.file, line, at, f"{_short(node.value)} is not a number"
            ) from None
        return _finite(value, lambda problem: BadDocument(self.file, line, at, problem))


def _not_plain(tag: str) -> str:
    return f"{tag} is nothing that is read here: only text, numbers, true, false, lists and mappings are"


def _finite(value: Any, wrong: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise wrong(f"{value} is not a number that can be used")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise wrong(f"{_short(str(value))} is too large a number")
    return value


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}…"


# -- JSON ---------------------------------------------------------------------------------------------------------


def _json(text: str, file: str) -> Iterator[Document]:
    """Documents one after the other, as `jq` reads them."""
    decoder = json.JSONDecoder(object_pairs_hook=_Pairs, parse_constant=_no_constant)
    at = _skip(text, 0)
    while at < len(text):
        line = text.count("\n", 0, at) + 1
        try:
            raw, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise BadDocument(file, error.lineno, "", f"this is not JSON: {error.msg}") from None
        except (ValueError, RecursionError) as error:
            told = "nested too deep" if isinstance(error, RecursionError) else str(error)
            raise BadDocument(
                file, line, "", f"this is not JSON that can be used: {told}"
            ) from None
        lines = _json_lines(text[at:end], line - 1)
        document = Document(None, lines, file)
        value = _plain(raw, (), document, itertools.count(1))
        if value is not None:
            yield Document(value, lines, file)
        at = _skip(text, end)


class _Pairs(list):
    """A JSON object as it was written, its repetitions too."""


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a number that can be used")


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n,":
        at += 1
    return at


def _plain(raw: Any, path: Path, document: Document, count: Iterator[int]) -> Any:
    if next(count) > MOST_VALUES:
        raise document.wrong(path, f"the file holds more than {MOST_VALUES} values")
    if len(path) > DEEPEST:
        raise document.wrong(path, f"this is nested deeper than {DEEPEST} levels")
    if isinstance(raw, _Pairs):
        made: dict[str, Any] = {}
        for key, child in raw:
            if key in made:
                raise document.wrong((*path, key), "this stands here twice")
            made[key] = _plain(child, (*path, key), document, count)
        return made
    if isinstance(raw, list):
        return [_plain(child, (*path, index), document, count) for index, child in enumerate(raw)]
    return _finite(raw, lambda problem: document.wrong(path, problem))


def _json_lines(text: str, before: int) -> dict[Path, int]:
    """The lines of a document that is known to be JSON: its structure is YAML's, once its tabs are spaces."""
    lines: dict[Path, int] = {}
    try:
        _require_shallow(spaced := text.replace("\t", " "), "")
        root = yaml.compose(spaced, Loader=_Loader)
    except (
        yaml.YAMLError,
        BadDocument,
    ):  # a character that YAML does not know: then only its beginning is told
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
