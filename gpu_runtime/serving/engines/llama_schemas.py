"""Which JSON schemas llama.cpp can enforce. This module is pure.

The library makes a grammar of a schema, and leaves out what a grammar cannot express. Here a schema with such a keyword
is refused. The parameters of a tool are only a hint for the model, so there the keyword is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from ..requests import Refused
from .base import cannot

MOST_REPEATED = (
    1000  # llama.cpp reads no grammar with 2000 nested repetitions, and 20,000 end its process
)
MOST_REPEATED_IN_ALL = 10_000
MOST_LEVELS = 64
MOST_CHARACTERS = 120_000
ANYTHING = {"type": "value"}  # the library's own name of any JSON value
# Keywords that say nothing about which JSON matches.
_NOTES = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly")
) | frozenset(("$schema", "$id", "$comment", "$anchor", "$defs", "definitions", "discriminator"))
# The first of these keywords that a schema has decides which rule the library makes. With it, the library reads only
# the keywords beside it here.
_FORMS: dict[str, tuple[str, ...]] = {
    "$ref": (),
    "oneOf": (),
    "anyOf": (),
    "const": ("type",),
    "enum": ("type",),
    "properties": ("type", "required", "additionalProperties"),
    "additionalProperties": ("type",),
    "prefixItems": ("type",),
    "items": ("type", "minItems", "maxItems"),
    "pattern": ("type",),
    "format": ("type",),
    "minLength": ("type", "maxLength"),
    "maxLength": ("type",),
    "type": (),
}
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_FORMATS = ("uuid", "date", "time", "date-time")
_BOUNDS = ("minItems", "maxItems", "minLength", "maxLength")
_CHILD_LISTS = ("anyOf", "oneOf", "prefixItems")
_CHILD_MAPS = ("properties", "$defs", "definitions")


def enforceable(schema: Any, model: str, *, is_hint: bool = False) -> dict[str, Any]:
    """The `schema` in a form that the library enforces. Raises Refused (400), which names the `model`.

    If `is_hint` is true, what the library cannot enforce is left out.

    >>> enforceable({"type": "string", "maxLength": 9}, "qwen")
    {'type': 'string', 'maxLength': 9}
    >>> enforceable({"type": "integer", "minimum": 0}, "qwen", is_hint=True)
    {'type': 'integer'}
    """
    reader = _SchemaReader(model, is_hint)
    if len(json.dumps(schema)) > MOST_CHARACTERS:
        raise reader.refused(f"it has more than {MOST_CHARACTERS:,} characters")
    return reader.read(schema, "", 1)


class _SchemaReader:
    def __init__(self, model: str, is_hint: bool) -> None:
        self._model = model
        self._is_hint = is_hint
        self._repeated = 0

    def read(self, schema: Any, place: str, level: int) -> dict[str, Any]:
        """The `schema` at this `place` and `level` of the whole schema, in a form that the library enforces."""
        if level > MOST_LEVELS:
            raise self.refused(f"it has more than {MOST_LEVELS} levels")
        if schema is True or schema == {} and level > 1:
            return ANYTHING
        if not isinstance(schema, dict):
            raise self.refused(f"{place or 'it'} is no schema")
        found = self._with_known_keywords(schema, place)
        for name in _CHILD_LISTS:
            if isinstance(found.get(name), list):
                children = enumerate(found[name])
                found[name] = [
                    self.read(one, f"{place}/{name}/{at}", level + 1) for at, one in children
                ]
        for name in _CHILD_MAPS:
            if isinstance(found.get(name), dict):
                found[name] = {
                    key: self.read(one, f"{place}/{name}/{key}", level + 1)
                    for key, one in found[name].items()
                }
        for name in ("items", "additionalProperties"):
            if name in found and found[name] is not False:
                found[name] = self.read(found[name], f"{place}/{name}", level + 1)
        return found

    def _with_known_keywords(self, schema: dict[str, Any], place: str) -> dict[str, Any]:
        if ("minItems" in schema or "maxItems" in schema) and "prefixItems" not in schema:
            schema = {"items": True, **schema}
        form = next((name for name in _FORMS if name in schema), "type")
        if isinstance(schema.get("type"), list):
            form = "type"
        known = {form, *_FORMS[form]}
        found = {}
        for name, value in schema.items():
            if name in _NOTES:
                found[name] = value
                continue
            try:
                if name not in known:
                    raise ValueError(f"{name} cannot be enforced" + _beside(name, form))
                found[name] = self._value(name, value)
            except ValueError as error:
                if not self._is_hint:
                    raise self.refused(f"{error}, at {place or '/'}") from None
        return found or (ANYTHING if self._is_hint else found)

    def _value(self, name: str, value: Any) -> Any:
        """The `value` of the keyword `name` as the library reads it. Raises ValueError."""
        if name in _BOUNDS:
            if type(value) is not int or not 0 <= value <= MOST_REPEATED:
                raise ValueError(f"{name} must be a whole number from 0 to {MOST_REPEATED}")
            self._count(value)
        elif name == "pattern":
            return plain_pattern(value, self._count)
        elif name == "format" and value not in _FORMATS:
            raise ValueError(f"format must be one of {', '.join(_FORMATS)}")
        elif name == "type":
            types = value if isinstance(value, list) else [value]
            if not types or any(one not in _TYPES for one in types):
                raise ValueError(f"type must be one of {', '.join(_TYPES)}")
        elif name in (*_CHILD_LISTS, "enum") and not (isinstance(value, list) and value):
            raise ValueError(f"{name} must be a list with a value")
        return value

    def _count(self, repeated: int) -> None:
        self._repeated += repeated
        if self._repeated > MOST_REPEATED_IN_ALL:
            raise self.refused(f"it repeats more than {MOST_REPEATED_IN_ALL:,} values")

    def refused(self, why: str) -> Refused:
        """The refusal of the schema; `why` is the reason."""
        param = "tools" if self._is_hint else "response_format"
        return cannot(self._model, f"its JSON schema cannot be enforced: {why}", param)


def _beside(name: str, form: str) -> str:
    return f" together with {form}" if name in {*_FORMS, *sum(_FORMS.values(), ())} else ""


# -- patterns

# Text inside a JSON string: no quote, no backslash, no control character.
_ANY = r'[^"\\\x00-\x1F]'
_UNIT = re.compile(
    r"""
    (?P<set> \[ (?!\^) (?: [^\]\[\\"\x00-\x1f] | \\[-\][.^/] )+ \] )
    | (?P<short> \\[dw] )
    | (?P<escaped> \\[-.^$*+?()\[\]{}|/] )
    | (?P<times> [*+?] | \{ [0-9]+ (?: ,[0-9]* )? \} )
    | (?P<sign> [()|] )
    | (?P<any> \. )
    | (?P<letter> [^\\"\[\]{}^$\x00-\x1f] )
    """,
    re.VERBOSE,
)
_SHORT = {r"\d": "[0-9]", r"\w": "[A-Za-z0-9_]"}


def plain_pattern(pattern: Any, count: Callable[[int], None] = lambda times: None) -> str:
    r"""The regular expression `pattern` in the form that the library reads. Raises ValueError for any other.

    `count` is called with the number of each repetition.

    >>> print(plain_pattern(r"^\d{3}$"))
    ^([0-9]{3})$
    >>> print(plain_pattern("a|b"))
    ^([^"\\\x00-\x1F]*(a|b)[^"\\\x00-\x1F]*)$
    """
    if not isinstance(pattern, str):
        raise ValueError("pattern must be a text")
    body = pattern.removeprefix("^")
    ends = body.endswith("$") and not body.endswith(r"\$")
    body = body[:-1] if ends else body
    units = _units(body, count)
    if pattern.startswith("^") and ends:
        return f"^({units})$"
    before, after = ("" if pattern.startswith("^") else f"{_ANY}*"), ("" if ends else f"{_ANY}*")
    return f"^({before}({units}){after})$"


def _units(body: str, count: Callable[[int], None]) -> str:
    made, at, depth, last = [], 0, 0, "("
    while at < len(body):
        found = _UNIT.match(body, at)
        kind = found.lastgroup if found else ""
        text = found[0] if found else body[at]
        may_repeat = last not in ("(", "|", "times")
        if kind == "times" and may_repeat:
            count(_most_times(text))
        elif kind == "times" or not kind or (text == ")" and (not depth or last in "(|")):
            raise ValueError(f"pattern cannot be enforced from its character {at + 1} on")
        depth += {"(": 1, ")": -1}.get(text, 0) if kind == "sign" else 0
        made.append(_written(str(kind), text))
        at += len(text)
        last = "times" if kind == "times" else text if text in "(|" and kind == "sign" else "unit"
    if depth or last in ("(", "|"):
        raise ValueError("pattern has an open group or an empty choice")
    return "".join(made)


def _written(kind: str, text: str) -> str:
    if kind == "short":
        return _SHORT[text]
    if kind == "escaped":
        return f"[\\x{ord(text[1]):02X}]"
    if kind == "any":
        return _ANY
    return _set(text) if kind == "set" else text


def _set(text: str) -> str:
    """A set of characters. A range that contains a quote or a backslash would allow text that is no JSON."""
    for first, last in re.findall(r"([^\\])-([^\]])", text[1:-1]):
        if any(ord(first) <= ord(one) <= ord(last) for one in '"\\'):
            raise ValueError(f"pattern cannot be enforced: its set {text} contains a quote")
    return re.sub(r"\\(.)", lambda found: f"\\x{ord(found[1]):02X}", text)


def _most_times(text: str) -> int:
    """The largest number in a repetition such as `{2,5}`. Raises ValueError if it is too large."""
    most = max(map(int, re.findall("[0-9]+", text)), default=0)
    if most > MOST_REPEATED:
        raise ValueError(f"pattern repeats more than {MOST_REPEATED} times")
    return most
