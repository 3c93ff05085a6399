"""Finds the tool calls in the text that a model writes.

Each family of models writes tool calls in a different format. The chat template shows which format it is.
This module is pure. To add a format, add an entry to FORMATS with its parser.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ...facts import Value
from ...stop_text import held_back
from ..requests import Json, bad

MOST_LEVELS = 200  # of the parameters of a tool
ID_LETTERS = 9  # Mistral's templates accept no other length
_SPACE = re.compile(r"[\s;,]*")
_MISTRAL_NAME = re.compile(r"([\w.-]+)\s*(?:\[ARGS\])?\s*(?=\{)")
# What precedes the arguments of a call, in each format: marks, brackets, and the name of the tool.
_CALL_HEAD = re.compile(
    r"""(?: [\s;,\[\]}] | </?tool_call> | \[TOOL_CALLS\] | <\|python_tag\|> )*
    (?: \{ \s* "name" \s* : \s* "(?P<name>[^"\\]+)" \s* , \s* "(?:arguments|parameters)" \s* : \s*
      | (?P<bare>[\w.-]+) \s* (?:\[ARGS\])? \s* )
    (?=\{)""",
    re.VERBOSE,
)
_LLAMA = "<|python_tag|>"
_decoder = json.JSONDecoder()
_GROUPS = ("$defs", "definitions")  # where a schema has its definitions
_DEFINITION = re.compile(r"^/(?:\$defs|definitions)/")


class Tools(Value):
    """The tools of one call, and whether the model must call one."""

    tools: tuple[Json, ...] = ()
    forced: tuple[str, ...] = ()  # one of these must be called; empty: text is an answer too
    only_one: bool = False  # at most one call in an answer

    @property
    def names(self) -> frozenset[str]:
        """The names of all tools."""
        return frozenset(tool["function"]["name"] for tool in self.tools)

    def schema(self) -> Json:
        """The JSON schema of an answer that is a call of one of the tools in `forced`."""
        choices, definitions = [], {}
        closed = {"required": ["name", "arguments"], "additionalProperties": False}
        for number, function in enumerate(tool["function"] for tool in self.tools):
            if function["name"] in self.forced:
                parameters = {"type": "object", **(function.get("parameters") or {})}
                arguments, more = embedded(parameters, f"tool{number}")
                definitions |= more
                properties = {"name": {"const": function["name"]}, "arguments": arguments}
                choices.append({"type": "object", "properties": properties, **closed})
        whole = choices[0] if len(choices) == 1 else {"anyOf": choices}
        return {**whole, "$defs": definitions} if definitions else whole


def embedded(schema: Json, name: str) -> tuple[Json, Json]:
    """The `schema` as a part of a larger one, and the definitions that the larger one needs for its references.

    The definitions begin with `name`, which is unique in the larger schema.

    >>> place = {"type": "string"}
    >>> embedded({"properties": {"in": {"$ref": "#/$defs/Place"}}, "$defs": {"Place": place}}, "tool0")
    ({'properties': {'in': {'$ref': '#/$defs/tool0-Place'}}}, {'tool0-Place': {'type': 'string'}})
    """
    is_recursive = False

    def moved(node: Any) -> Any:
        """The `node` with references that are valid in the larger schema."""
        nonlocal is_recursive
        if isinstance(node, list):
            return [moved(one) for one in node]
        if not isinstance(node, dict):
            return node
        made = {key: moved(value) for key, value in node.items()}
        reference = node.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            path = _DEFINITION.sub("-", reference[1:])
            is_recursive = is_recursive or not path.startswith("-")
            made["$ref"] = f"#/$defs/{name}{path}"
        return made

    plain = {key: value for key, value in schema.items() if key not in _GROUPS}
    found = moved(plain)
    definitions = {
        f"{name}-{key}": moved(value)
        for group in _GROUPS
        for key, value in (schema.get(group) or {}).items()
    }
    if not is_recursive:
        return found, definitions
    return {"$ref": f"#/$defs/{name}"}, {name: found, **definitions}


def tools_of(body: Json) -> Tools:
    """The tools of the chat in `body`; none if `tool_choice` is "none". Raises Refused (400) if either is not valid."""
    tools = tuple(body.get("tools") or ())
    for at, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        is_function = isinstance(function, dict) and isinstance(function.get("name"), str)
        if not is_function or tool.get("type", "function") != "function":
            raise bad(f"tools[{at}]", tool, 'an object with "type": "function" and a "function"')
        _check_parameters(f"tools[{at}].function.parameters", function.get("parameters"))
    choice = body.get("tool_choice") or "auto"
    if choice == "none":
        return Tools()
    known = Tools(tools, only_one=body.get("parallel_tool_calls") is False)
    if choice == "auto":
        return known
    forced = tuple(sorted(known.names))
    if choice != "required":
        function = choice.get("function") if isinstance(choice, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        forced = (name,) if isinstance(name, str) else ()
    if not forced or not known.names.issuperset(forced):
        raise bad("tool_choice", choice, "none, auto, required, or the name of one of the tools")
    return Tools(tools, forced, known.only_one)


def _check_parameters(place: str, parameters: Any) -> None:
    if parameters is None:
        return
    is_schema = isinstance(parameters, dict) and all(
        isinstance(parameters.get(name) or {}, dict) for name in _GROUPS
    )
    if not is_schema or _levels(parameters) > MOST_LEVELS:
        expected = f"a JSON schema, which is an object of at most {MOST_LEVELS} levels"
        raise bad(place, parameters, expected)


def _levels(value: Any) -> int:
    """How deeply lists and objects are nested in `value`; at most one more than MOST_LEVELS."""
    found, inner = 0, [value]
    while inner and found <= MOST_LEVELS:
        found += 1
        values = [list(one.values()) if isinstance(one, dict) else one for one in inner]
        inner = [one for many in values for one in many if isinstance(one, (dict, list))]
    return found


class Format(Value):
    """How a family of models writes tool calls."""

    in_template: str  # a part of every chat template of the family
    begins: tuple[str, ...]  # texts with which calls begin, anywhere in the answer
    begins_answer: tuple[str, ...]  # texts with which calls begin at the start of the answer only
    # Yields the name and the arguments of each call. Raises ValueError.
    parse: Callable[[str], Iterator[tuple[str, Any]]]


def _objects(text: str) -> Iterator[tuple[str, Any]]:
    """Yields the calls in `text`, which has one JSON object after another. Llama 3 names the arguments `parameters`."""
    at = _SPACE.match(text).end()  # type: ignore[union-attr]
    while at < len(text):
        found, at = _decoder.raw_decode(text, at)
        for call in found if isinstance(found, list) else [found]:
            if not isinstance(call, dict):
                raise ValueError("no object")
            yield str(call.get("name")), call.get("arguments", call.get("parameters", {}))
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]


def _hermes(text: str) -> Iterator[tuple[str, Any]]:
    for part in text.split("<tool_call>")[1:]:
        yield from _objects(part.partition("</tool_call>")[0])


def _mistral(text: str) -> Iterator[tuple[str, Any]]:
    for part in text.split("[TOOL_CALLS]"):
        named = _MISTRAL_NAME.match(part.strip())
        if named:  # newer models write NAME{ARGUMENTS}
            yield named[1], json.loads(part.strip()[named.end() :])
        else:
            yield from _objects(part)


FORMATS = {
    "hermes": Format("<tool_call>", ("<tool_call>",), (), _hermes),  # Qwen uses the same format
    # An engine may leave special tokens out of the text. A call then begins with its JSON.
    "mistral": Format("[TOOL_CALLS]", ("[TOOL_CALLS]",), ("[{",), _mistral),
    "llama3": Format(_LLAMA, (_LLAMA,), ("{",), lambda text: _objects(text.replace(_LLAMA, ""))),
}
FORCED = Format("", (), ("{",), _objects)  # of an answer that a JSON schema forces to be a call


def format_of(template: str) -> Format:
    """The format that `template` shows; without one, Llama 3's if it has `"parameters"`, else that of Hermes."""
    usual = FORMATS["llama3"] if '"parameters"' in template else FORMATS["hermes"]
    return next((one for one in FORMATS.values() if one.in_template in template), usual)


class ToolCallReader:
    """Separates the text of an answer, which arrives in pieces, from its tool calls.

    The arguments of a call are given as they come, as in OpenAI's streams. A call that is cut off keeps those that it
    has.
    """

    def __init__(self, format: Format, tools: Tools) -> None:
        """Reads an answer whose tool calls are written in `format` and call one of `tools`."""
        self._format = format
        self._tools = tools
        self._held = ""
        self._calling = False
        self._at_start = True  # whether `feed` has returned nothing but white space until now
        self._parts: list[Json] = []  # of calls, in OpenAI's format for streams
        self._unread = ""  # what follows the last known part of a call
        self._begun = 0  # calls
        self._open: _Arguments | None = None  # of the call that is being written
        self._is_over = False  # no further call is read

    def feed(self, text: str) -> str:
        """Adds `text`, and returns the new part of the answer that cannot belong to a tool call."""
        if self._calling:
            self._read(text)
            return ""
        self._held += text
        places = [at for at in map(self._held.find, self._format.begins) if at >= 0]
        start = len(self._held) - len(self._held.lstrip())
        if self._at_start and self._held.startswith(self._format.begins_answer, start):
            places.append(start)
        self._calling = bool(places)
        safe = min(places) if places else len(self._held) - self._possible_beginning(start)
        ready, self._held = self._held[:safe], self._held[safe:]
        self._at_start = self._at_start and not ready.strip()
        if self._calling:
            held, self._held = self._held, ""
            self._read(held)
        return ready

    def take(self) -> tuple[Json, ...]:
        """Removes and returns the parts of calls that are known now."""
        taken, self._parts = tuple(self._parts), []
        return taken

    @property
    def is_complete(self) -> bool:
        """Whether there are calls, and the last one has all its arguments."""
        return self._begun > 0 and self._open is None

    def end(self, cut: bool = False) -> str:
        """The text that was held back. If no call was found in it, it is searched once more as a whole.

        Call this when no more text follows. `cut` is whether the limit of tokens has cut the answer off. The marks of a
        call that was cut off before its name are no text.
        """
        if self._begun or not self._calling:
            return "" if self._begun else self._held
        try:
            found = list(self._format.parse(self._held))
        except ValueError:  # the call is not valid: the client gets its text
            found = []
        if not all(name in self._tools.names and isinstance(args, dict) for name, args in found):
            found = []
        for name, arguments in found[: 1 if self._tools.only_one else None]:
            self._begin(name)
            self._add(json.dumps(arguments, ensure_ascii=False))
        is_mark = cut and self._held.startswith(self._format.begins)
        return "" if found or is_mark else self._held

    def _read(self, text: str) -> None:
        """Finds the parts of calls in `text`, the next part of the answer. Everything is also held back."""
        self._held += text
        self._unread += text
        while self._unread and not self._is_over:
            if self._open is None:
                head = _CALL_HEAD.match(self._unread)
                name = head and (head["name"] or head["bare"])
                if not head or name not in self._tools.names:
                    self._is_over = bool(head)
                    return
                self._begin(str(name))
                self._open = _Arguments()
                self._unread = self._unread[head.end() :]
                continue
            size, is_whole = self._open.feed(self._unread)
            self._add(self._unread[:size])
            self._unread = self._unread[size:]
            if is_whole:
                self._open = None
                self._is_over = self._tools.only_one

    def _begin(self, name: str) -> None:
        function = {"name": name, "arguments": ""}
        part = {"index": self._begun, "id": uuid.uuid4().hex[:ID_LETTERS], "type": "function"}
        self._parts.append({**part, "function": function})
        self._begun += 1

    def _add(self, arguments: str) -> None:
        """Adds the next part of the `arguments` of the newest call."""
        if self._parts and self._parts[-1]["index"] == self._begun - 1:
            self._parts[-1]["function"]["arguments"] += arguments
        else:
            self._parts.append({"index": self._begun - 1, "function": {"arguments": arguments}})

    def _possible_beginning(self, start: int) -> int:
        """The length of the end of the held text that may be the beginning of tool calls."""
        longest = held_back(self._held, self._format.begins)
        if self._at_start:
            rest = self._held[start:]
            if not rest or any(word.startswith(rest) for word in self._format.begins_answer):
                longest = len(self._held)
        return longest


class _Arguments:
    """Finds the end of a JSON object that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_text = self._is_escaped = False

    def feed(self, text: str) -> tuple[int, bool]:
        """How many letters of `text`, which comes next, belong to the object, and whether it is complete."""
        for at, letter in enumerate(text):
            if self._in_text:
                ends = letter == '"' and not self._is_escaped
                self._is_escaped = letter == "\\" and not self._is_escaped
                self._in_text = not ends
            elif letter == '"':
                self._in_text = True
            elif letter in "{}":
                self._depth += 1 if letter == "{" else -1
                if not self._depth:
                    return at + 1, True
        return len(text), False


def joined_calls(parts: Iterable[Json]) -> tuple[Json, ...]:
    """The whole calls of these `parts`, which are parts of calls in OpenAI's format for streams.

    An engine may send a call in one part or in many, and may leave out what a part does not change.
    """
    calls: dict[int, Json] = {}
    for part in parts:
        new = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        known = calls.setdefault(part.get("index", 0), new)
        known["id"] = known["id"] or part.get("id") or ""
        for name in ("name", "arguments"):
            known["function"][name] += (part.get("function") or {}).get(name) or ""
    return tuple(calls.values())


def arguments_of(text: str | None) -> Json:
    """The arguments of a call as an object. Those that a limit of tokens has cut off, in this answer or in the history
    that a client sends back, keep their text.

    >>> arguments_of('{"in": "Bern"}'), arguments_of('{"in": "Be')
    ({'in': 'Bern'}, {'cut_arguments': '{"in": "Be'})
    """
    try:
        found = json.loads(text or "{}")
    except ValueError:  # they are cut off
        found = None
    return found if isinstance(found, dict) else {"cut_arguments": text}


def with_whole_arguments(messages: list[Any]) -> list[Any]:
    """The `messages` of a chat, in which the arguments of calls are JSON objects, as servers require."""

    def whole(call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        text = function.get("arguments") if isinstance(function, dict) else None
        if not isinstance(text, str):
            return call
        found = arguments_of(text)
        if "cut_arguments" not in found:
            return call
        return {**call, "function": {**function, "arguments": json.dumps(found)}}

    return [
        {**message, "tool_calls": [whole(call) for call in message["tool_calls"]]}
        if isinstance(message, dict) and isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]
