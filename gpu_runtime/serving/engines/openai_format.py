"""OpenAI's response format, made from the pieces that an engine writes, and the tool calls in these pieces.

This module is pure. The names of fields and objects are from OpenAI's API reference: Chat, Completions, Embeddings.
"""

from __future__ import annotations

import base64
import json
import re
import struct
import uuid
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from typing import Any

from msgspec.structs import replace

from ...facts import Value
from ...stop_text import held_back
from ..requests import Json, bad


class TextPiece(Value):
    """A piece of an answer's text. The last piece has `finish` and the token counts."""

    text: str = ""
    thought: str = ""  # what the model thinks before its answer
    finish: str = ""  # stop, length or tool_calls
    prompt_tokens: int = 0
    completion_tokens: int = 0
    calls: tuple[Json, ...] = ()  # parts of tool calls, in OpenAI's format for streams
    tokens: tuple[Token, ...] = ()  # of text and thought, if the call requests probabilities
    room: int = 0  # the most tokens of the answer, if the context has room for fewer than requested


class Header(Value):
    """The fields that all chunks of one answer share."""

    id: str
    created: int
    model: str
    chat: bool

    def chunk(self, choices: list[Json], **more: Any) -> Json:
        """One chunk of a stream with these `choices` and `more` fields."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._fields(kind, choices), **more}

    def part(
        self,
        text: str | None,
        finish: str | None = None,
        *,
        index: int = 0,
        first: bool = False,
        thought: str = "",
        calls: Sequence[Json] = (),
        scores: Json | None = None,
    ) -> Json:
        """One chunk of choice `index`; the `first` of a chat has the role, the last `finish`. `scores`: `logprobs`."""
        end = {"finish_reason": finish, "logprobs": scores}
        if not self.chat:
            return self.chunk([{"index": index, "text": text or "", **end}])
        delta: Json = {"role": "assistant"} if first else {}
        if text is not None:
            delta["content"] = text
        if thought:
            delta["reasoning_content"] = thought
        if calls:
            delta["tool_calls"] = list(calls)
        return self.chunk([{"index": index, "delta": delta, **end}])

    def whole(self, answers: Sequence[tuple[str, TextPiece, Json | None]], n: int) -> Json:
        """The whole answer, with one choice for each of the `answers`, of which each prompt has `n`.

        An answer is its text, its last piece, which has all thoughts, and the field `logprobs`.
        """
        choices = []
        for index, (text, last, scores) in enumerate(answers):
            content: Json = {"text": text}
            if self.chat:
                message: Json = {"role": "assistant", "content": text}
                if last.thought:
                    message["reasoning_content"] = last.thought
                if last.calls:
                    message |= {"content": text or None, "tool_calls": list(last.calls)}
                content = {"message": message}
            end = {"finish_reason": last.finish, "logprobs": scores}
            choices.append({"index": index, **content, **end})
        kind = "chat.completion" if self.chat else "text_completion"
        counts = usage([last for _, last, _ in answers], n)
        return {**self._fields(kind, choices), "usage": counts}

    def _fields(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def usage(lasts: Sequence[TextPiece], n: int = 1) -> dict[str, int]:
    """OpenAI's `usage` from the last piece of each choice. A prompt is counted once for its `n` choices."""
    prompt = sum(last.prompt_tokens for last in lasts[::n])
    completion = sum(last.completion_tokens for last in lasts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


Pieces = AsyncGenerator[TextPiece]


async def stream_chunks(
    choices: Sequence[Callable[[], Pieces]], header: Header, body: Json
) -> AsyncIterator[Json]:
    """Yields the chunks of a streamed answer. Each of the `choices` is a function that returns the choice's pieces.

    All chunks have the fields of `header`. The choices are written one after the other. With
    `stream_options.include_usage` in `body` the last chunk has the usage and no choice. No chunk is sent before the
    first piece, so an error before it can become an HTTP status, or another model can answer. A chunk has `x_gpu` if
    the answer is limited to fewer tokens than requested.
    """
    lasts = []
    for index, choice in enumerate(choices):
        last = TextPiece()  # if no piece has `finish`, the gateway reports a cut-off answer
        begun = False
        writer = LogprobsWriter(header.chat)
        async with aclosing(choice()) as pieces:
            async for piece in pieces:
                if not begun and (header.chat or piece.room):
                    first = header.part("", index=index, first=True)
                    yield {**first, **_limit(piece)}
                begun = True
                scores = writer.field(piece.tokens, piece.text)
                if piece.thought:
                    yield header.part(None, index=index, thought=piece.thought, scores=scores)
                    scores = None
                if piece.text or scores:
                    yield header.part(piece.text, index=index, scores=scores)
                if piece.calls:
                    yield header.part(None, index=index, calls=piece.calls)
                if piece.finish:
                    last = piece
        yield header.part(None, last.finish, index=index)
        lasts.append(last)
    if asks_usage(body):
        yield header.chunk([], usage=usage(lasts, body.get("n") or 1))


def _limit(piece: TextPiece) -> Json:
    return {"x_gpu": {"max_tokens": piece.room}} if piece.room else {}


async def whole_answer(choices: Sequence[Callable[[], Pieces]], header: Header, body: Json) -> Json:
    """The whole answer, made from the pieces of each choice. `stream_chunks` describes the arguments."""
    answers, limit = [], {}
    for choice in choices:
        writer, scores = LogprobsWriter(header.chat), None
        texts, thoughts, calls = [], [], []
        last = TextPiece()  # if no piece has `finish`, the gateway reports a cut-off answer
        async with aclosing(choice()) as pieces:
            async for piece in pieces:
                texts.append(piece.text)
                thoughts.append(piece.thought)
                scores = joined(scores, writer.field(piece.tokens, piece.text))
                calls += piece.calls
                limit |= _limit(piece)
                if piece.finish:
                    last = piece
        last = replace(last, thought="".join(thoughts), calls=joined_calls(calls))
        answers.append(("".join(texts), last, scores))
    return {**header.whole(answers, body.get("n") or 1), **limit}


def embeddings(
    vectors: Sequence[Sequence[float]], model: str, tokens: int, encoding: str | None
) -> Json:
    """The answer with these `vectors` of `model`; `tokens` is the number of tokens that were read.

    With the `encoding` "base64", as OpenAI's own client requests it, a vector is the base64 of little-endian float32s,
    else a list of numbers.
    """

    def encoded(vector: Sequence[float]) -> Any:
        if encoding != "base64":
            return list(vector)
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()

    data = [
        {"object": "embedding", "index": at, "embedding": encoded(vector)}
        for at, vector in enumerate(vectors)
    ]
    return {
        "id": f"embd-{uuid.uuid4().hex}",  # Mistral's clients read no answer without it
        "object": "list",
        "data": data,
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def rerank_answer(scores: Sequence[float], model: str, tokens: int, body: Json) -> Json:
    """The answer with `scores` of the documents in `body`, the best first, as Cohere's and Jina's clients read it."""
    best = sorted(range(len(scores)), key=lambda index: -scores[index])
    results = []
    for index in best[: body.get("top_n")]:
        row: Json = {"index": index, "relevance_score": scores[index]}
        if body.get("return_documents"):
            document = body["documents"][index]
            row["document"] = {"text": document} if isinstance(document, str) else document
        results.append(row)
    return {
        "id": f"rerank-{uuid.uuid4().hex}",
        "object": "list",
        "model": model,
        "results": results,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def stops_of(body: Json) -> list[str]:
    """The stop strings of `body`."""
    stop = body.get("stop")
    return [stop] if isinstance(stop, str) else list(stop or ())


def max_tokens_of(body: Json) -> int | None:
    """The most tokens that the answer to `body` may have, or None if `body` sets no limit."""
    given = body.get("max_completion_tokens")
    return body.get("max_tokens") if given is None else given


def wants_json(body: Json) -> bool:
    """Whether the answer to the chat in `body` must be JSON."""
    format = body.get("response_format")
    return isinstance(format, dict) and format.get("type") not in (None, "text")


def asks_usage(body: Json) -> bool:
    """Whether the caller asks in `body` that the stream ends with the usage."""
    options = body.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))


# -- the probabilities of an answer's tokens, in the formats of Chat and Completions
#
# A probability is what the model computed for a token, before temperature, penalties, biases and grammars change it. It
# is given as its natural logarithm.

LEAST = -9999.0  # stands for a probability of zero, because JSON has no infinity
Scored = tuple[bytes, float]  # the bytes of a token, and the logarithm of its probability


class Token(Value):
    """A token that the model wrote. Its bytes may be only a part of a character."""

    data: bytes
    logprob: float | None  # None for the first token of a prompt
    top: tuple[Scored, ...] = ()  # the most probable tokens in its place, in order


def count_of(body: Mapping[str, Any]) -> int | None:
    """How many of the most probable tokens `body` requests for each token; None if it requests no probabilities.

    >>> count_of({"logprobs": True}), count_of({"logprobs": True, "top_logprobs": 2})  # Chat
    (0, 2)
    >>> count_of({"logprobs": 3}), count_of({}), count_of({"logprobs": False})  # the first: Completions
    (3, None, None)
    """
    wanted = body.get("logprobs")
    if wanted is None or wanted is False:
        return None
    return (body.get("top_logprobs") or 0) if wanted is True else wanted


class Unsent:
    """Holds each token that the model wrote until the text with the token's first byte is sent to the caller.

    The text may be sent later than its tokens are written, because the beginning of a stop string is held back.

    >>> unsent = Unsent()
    >>> for data in (b"Hel", b"lo", b" EN", b"D"):
    ...     unsent.add(Token(data, -0.5))
    >>> [token.data for token in unsent.take("Hello")]
    [b'Hel', b'lo']
    >>> [token.data for token in unsent.take_rest()]
    [b' EN', b'D']
    """

    def __init__(self) -> None:
        """There are no tokens and no text yet."""
        self._tokens: deque[Token] = deque()
        self._begin = 0  # where the first of the tokens begins, in bytes of the answer
        self._sent = 0  # bytes of the answer

    def add(self, token: Token) -> None:
        """Adds the next `token` that the model wrote."""
        self._tokens.append(token)

    def take(self, text: str) -> tuple[Token, ...]:
        """Removes and returns the tokens that begin in `text`, which is the next part of the answer."""
        self._sent += len(text.encode())
        taken = []
        while self._tokens and self._begin < self._sent:
            token = self._tokens.popleft()
            self._begin += len(token.data)
            taken.append(token)
        return tuple(taken)

    def take_rest(self) -> tuple[Token, ...]:
        """Removes and returns all tokens. Call this at the end of a text that no stop string has cut."""
        rest = tuple(self._tokens)
        self._tokens.clear()
        return rest


class LogprobsWriter:
    """Writes the field `logprobs` of one choice, whole or chunk by chunk."""

    def __init__(self, chat: bool) -> None:
        """Writes the format of Chat if `chat` is true, else the format of Completions."""
        self._chat = chat
        self._offset = 0  # in characters of the text of Completions

    def field(self, tokens: Iterable[Token], text: str) -> Json | None:
        """The field for the next `tokens`, which begin in `text`; None if there are none."""
        found = list(tokens)
        if not found:
            return None
        if self._chat:
            return {"content": [_entry(token) for token in found], "refusal": None}
        if found[0].logprob is None:  # a prompt may have tokens before its text, such as <s>
            self._offset = len(text) - sum(len(_text(token.data)) for token in found)
        offsets = []
        for token in found:
            offsets.append(max(0, self._offset))
            self._offset += len(_text(token.data))
        return {
            "tokens": [_name(token.data) for token in found],
            "token_logprobs": [_finite(token.logprob) for token in found],
            "top_logprobs": [_top(token) for token in found],
            "text_offset": offsets,
        }


def _entry(token: Token) -> Json:
    top = [_described(data, logprob) for data, logprob in token.top]
    return {**_described(token.data, token.logprob), "top_logprobs": top}


def _described(data: bytes, logprob: float) -> Json:
    return {"token": _text(data), "logprob": _finite(logprob), "bytes": list(data)}


def joined(first: Json | None, next: Json | None) -> Json | None:
    """The fields `first` and `next` of one choice, as one field.

    >>> joined({"content": [1], "refusal": None}, {"content": [2], "refusal": None})
    {'content': [1, 2], 'refusal': None}
    """
    if first is None or next is None:
        return first or next
    return {name: value and value + next[name] for name, value in first.items()}


def _top(token: Token) -> dict[str, float | None] | None:
    """The most probable tokens and the written `token`, with the logarithms of their probabilities."""
    if token.logprob is None:
        return None
    pairs = (*token.top, (token.data, token.logprob))
    return {_name(data): _finite(logprob) for data, logprob in pairs}


def _name(data: bytes) -> str:
    r"""The text of a token; for a part of a character its bytes, as in OpenAI's Completions.

    >>> _name(b"fox"), _name(b"\xe2\x80")
    ('fox', 'bytes:\\xe2\\x80')
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST)


# -- finds the tool calls in the text that a model writes ------------------------------------------
#
# Each family of models writes tool calls in a different format. The chat template shows which format it is.
# This module is pure. To add a format, add an entry to FORMATS with its parser.


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
            return [moved(item) for item in node]
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
        values = [list(item.values()) if isinstance(item, dict) else item for item in inner]
        inner = [item for many in values for item in many if isinstance(item, (dict, list))]
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
    return next((format for format in FORMATS.values() if format.in_template in template), usual)


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
