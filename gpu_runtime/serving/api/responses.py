"""The route `/v1/responses`, in the format of OpenAI's newer clients: a translation of the chat route.

The functions that translate are pure. Answers are not stored, so a field that needs a stored answer is refused with
400. Source: OpenAI, Responses API.
"""

from __future__ import annotations

import re
import time
import uuid
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ..engines.chat_template import TAGS
from ..requests import Json, Reply, bad
from .calls import Writer, chat_fields, functions, named_event
from .openai import add_call, answered, body_schema

# Fields of both formats.
_SAME = (
    *("model", "stream", "temperature", "top_p", "parallel_tool_calls"),
    *("top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("user", "metadata", "safety_identifier", "service_tier"),
    *("prompt_cache_key", "prompt_cache_retention"),
)
_OTHER = (
    *("input", "instructions", "max_output_tokens", "tools", "tool_choice", "text", "reasoning"),
    *("include", "top_logprobs"),
    "client_metadata",  # names of the caller's conversation, without an effect
)
# `reasoning.encrypted_content` has no effect: thoughts are sent and accepted as plain text.
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (_LOGPROBS, "reasoning.encrypted_content")
# Fields for which only these values can be served.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "background": (False,),
    "truncation": ("disabled",),
    "stream_options": ({}, {"include_obfuscation": False}),
}
_IN_ANSWER = ("instructions", "max_output_tokens", "temperature", "top_p", "metadata", "user")
_PATHS = (  # of a chat's fields, in a body of this route
    (r"messages.*", "input"),
    (r"max_(?:completion_)?tokens", "max_output_tokens"),
    (r"response_format(?:\.json_schema)?", "text.format"),
    (r"tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"tool_choice\.function", "tool_choice"),
)
_INPUT = {
    "model": {"type": "string"},
    "input": {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
}


def add_route(routes: APIRouter, gateway: Any) -> None:
    """Adds the route `/v1/responses`. `gateway()` returns the Gateway."""
    words = {"name": "post_response", "description": str(_answer.__doc__)}
    schema = body_schema(_INPUT, {"stream": {"type": "boolean"}})
    add_call(routes, "/responses", gateway, schema, _answer, **words)


async def _answer(request: Request, body: Any, gateway: Any, actor: str) -> Response:
    """An answer in the format of OpenAI's Responses API, whole or streamed. It is not stored."""
    return await answered(request, gateway, "chat", chat_of(body), actor, ResponsesWriter(body))


# -- requests


def chat_of(body: Any) -> Json:
    """Translates the `body` of a call of `/v1/responses` into the body of a chat. Raises Refused (400)."""
    chat = chat_fields(body, _SAME)
    for name, value in body.items():
        if name in chat or name in _OTHER or value is None or value in _NEUTRAL.get(name, ()):
            continue
        raise bad(name, value, "left out: answers are not stored, and there is no such field here")
    instructions = body.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise bad("instructions", instructions, "text")
    chat["messages"] = [{"role": "system", "content": instructions}] if instructions else []
    chat["messages"] += _messages(body.get("input"))
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    chat |= functions(body.get("tools"), _tool)
    if body.get("tool_choice") is not None:
        chat["tool_choice"] = _tool_choice(body["tool_choice"])
    chat |= _format(body.get("text") or {})
    chat |= _thinking(body.get("reasoning") or {})
    return chat | _probabilities(body.get("include") or [], body.get("top_logprobs"))


def _messages(given: Any) -> list[Json]:
    """Translates `given`, the field `input` of a call, into the messages of a chat."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise bad("input", given, "text, or a list of items")
    made: list[Json] = []
    thought = ""
    for at, item in enumerate(given):
        place = f"input[{at}]"
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "reasoning":
            thought += _text_of(f"{place}.content", item.get("content") or [], "reasoning_text")
            continue
        if kind == "message":
            content = _content(f"{place}.content", item.get("content"))
            made.append({"role": item.get("role"), "content": content})
        elif kind == "function_call":
            _add_call(made, item)
        elif kind == "function_call_output":
            output = _text_of(f"{place}.output", item.get("output"), "input_text")
            made.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        else:
            expected = "message, function_call, function_call_output or reasoning"
            raise bad(f"{place}.type", kind, expected)
        if thought and made[-1]["role"] == "assistant":
            made[-1]["reasoning_content"] = thought
        thought = ""
    return made


def _add_call(messages: list[Json], item: Mapping[str, Any]) -> None:
    """Adds the function call `item` to the last of `messages`, or to a new one if that is not of the assistant."""
    function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    messages[-1].setdefault("tool_calls", []).append(call)


def _content(place: str, content: Any) -> Any:
    """The content of a message. Images stay parts; anything else becomes a text. Raises Refused (400)."""
    if not isinstance(content, list):
        return content  # the chat route checks it
    if not any(isinstance(part, Mapping) and part.get("type") == "input_image" for part in content):
        return _text_of(place, content, "input_text", "output_text")
    parts: list[Json] = []
    for at, part in enumerate(content):
        if isinstance(part, Mapping) and part.get("type") == "input_image":
            url = part.get("image_url")
            if not isinstance(url, str):
                raise bad(f"{place}[{at}].image_url", url, "the URL of an image")
            parts.append({"type": "image_url", "image_url": {"url": url}})
        else:
            text = _text_of(f"{place}[{at}]", [part], "input_text", "output_text")
            parts.append({"type": "text", "text": text})
    return parts


def _text_of(place: str, content: Any, *kinds: str) -> str:
    """The text of `content`: a string, or parts of these `kinds`. Raises Refused (400) for other parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        known = isinstance(part, Mapping) and part.get("type") in kinds
        if not known or not isinstance(part.get("text"), str):
            raise bad(place, part, f"text, or a list of parts of type {' or '.join(kinds)}")
    return "".join(part["text"] for part in parts)


def _tool(place: str, tool: Any) -> Json:
    """Translates a `tool` into a function of a chat. Raises Refused (400) for tools that OpenAI's servers run."""
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise bad(place, tool, 'an object of the type "function"')
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, Mapping):
        if choice.get("type") != "function":
            raise bad("tool_choice", choice, "auto, none, required, or a function")
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(text: Any) -> Json:
    """Translates the field `text` of a call into the field `response_format` of a chat."""
    format = text.get("format") if isinstance(text, Mapping) else None
    known = isinstance(text, Mapping) and text.get("verbosity") in (None, "medium")
    if not known or not isinstance(format, Mapping | None):
        raise bad("text", text, "an object with a format, and no verbosity but medium")
    if format is None or format.get("type") == "text":
        return {}
    if format.get("type") != "json_schema":
        return {"response_format": dict(format)}
    schema = {name: value for name, value in format.items() if name != "type"}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _thinking(reasoning: Any) -> Json:
    """Translates the field `reasoning` of a call into the field `reasoning_effort` of a chat."""
    known = isinstance(reasoning, Mapping) and set(reasoning) <= {"effort", "summary"}
    if not known or reasoning.get("summary") not in (None, "auto"):
        raise bad("reasoning", reasoning, "an object with an effort, and no summary but auto")
    effort = reasoning.get("effort")
    return {} if effort is None else {"reasoning_effort": effort}


def _probabilities(include: Any, count: Any) -> Json:
    """Translates the fields `include` and `top_logprobs` (`count`) of a call into the fields of a chat."""
    if not isinstance(include, list) or not all(name in _INCLUDABLE for name in include):
        raise bad("include", include, f"a list of {' or '.join(_INCLUDABLE)}")
    if _LOGPROBS in include:
        return {"logprobs": True, "top_logprobs": count}
    if count:
        raise bad("top_logprobs", count, f'used together with include: ["{_LOGPROBS}"]')
    return {}


# -- answers


class ResponsesWriter(Writer):
    """Turns the chunks of one chat into events. Each run of thoughts, run of text, and call is an item."""

    paths = _PATHS

    def __init__(self, body: Mapping[str, Any]) -> None:
        super().__init__()
        self._body = body
        self._response: Json = {}
        self._output: list[Json] = []  # the items that have ended
        self._item: Json = {}
        self._texts: list[str] = []
        self._tokens = TextTokens()  # those that are not sent yet
        self._logprobs: list[Json] = []  # of the open item
        self._events = 0

    def whole(self, reply: Reply) -> Json:
        """Reads the whole answer as a stream of one chunk."""
        answer = reply.json or {}
        choices = [{**choice, "delta": choice["message"]} for choice in answer["choices"]]
        list(self._read({**answer, "choices": choices}))
        self.end(list(self._calls))
        return _ended(self._response, self._output, self.finish, self.usage)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._events += 1
        return named_event(kind, sequence_number=self._events - 1, **fields)

    def begin(self, chunk: Json) -> list[bytes]:
        self._response = _response(chunk, self._body)
        names = ("created", "in_progress")
        return [self._event(f"response.{name}", response=self._response) for name in names]

    def tokens(self, entries: list[Json]) -> None:
        self._tokens.add(entries)

    def error(self, error: Json) -> bytes:
        fields = {"message": error["message"], "code": error["code"], "param": None}
        return self._event("error", error=error, **fields)

    def end(self, calls: list[Json]) -> list[bytes]:
        found = self.close_run()
        for call in calls:
            found += self._call(_call_item(call))
        made = _ended(self._response, self._output, self.finish, self.usage)
        return [*found, self._event(f"response.{made['status']}", response=made)]

    @property
    def _kind(self) -> str:
        """The type of the open item."""
        return "reasoning" if self.run == "thinking" else "message"

    def begin_run(self) -> list[bytes]:
        kind = self._kind
        self._texts, self._logprobs = [], []
        self._item = {**_item(kind, ""), "content": []}
        if kind == "message":
            self._item["status"] = "in_progress"
        return [
            self._of_item("output_item.added", item=self._item),
            self._of_part("content_part.added", part=_part(kind, "")),
        ]

    def piece(self, text: str) -> bytes:
        self._texts.append(text)
        if self.run == "thinking":
            self._tokens.skip(text)
            return self._of_part("reasoning_text.delta", delta=text)
        logprobs = self._tokens.take(text)
        self._logprobs += logprobs
        return self._of_part("output_text.delta", delta=text, logprobs=logprobs)

    def end_run(self) -> list[bytes]:
        kind, text = self._kind, "".join(self._texts)
        part = _part(kind, text, self._logprobs)
        item = {**_item(kind, text, self._logprobs), "id": self._item["id"]}
        more = {"logprobs": self._logprobs} if kind == "message" else {}
        found = [
            self._of_part(f"{part['type']}.done", text=text, **more),
            self._of_part("content_part.done", part=part),
            self._of_item("output_item.done", item=item),
        ]
        self._output.append(item)
        return found

    def _call(self, item: Json) -> list[bytes]:
        begun = {**item, "arguments": "", "status": "in_progress"}
        id, arguments = item["id"], item["arguments"]
        done = {"item_id": id, "arguments": arguments, "name": item["name"]}
        found = [
            self._of_item("output_item.added", item=begun),
            self._of_item("function_call_arguments.delta", item_id=id, delta=arguments),
            self._of_item("function_call_arguments.done", **done),
            self._of_item("output_item.done", item=item),
        ]
        self._output.append(item)
        return found

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        return self._event(f"response.{kind}", output_index=len(self._output), **fields)

    def _of_part(self, kind: str, **fields: Any) -> bytes:
        return self._of_item(kind, item_id=self._item["id"], content_index=0, **fields)


def _response(answer: Mapping[str, Any], body: Mapping[str, Any]) -> Json:
    """A response that has begun. Some fields of `body` are repeated in the response."""
    given = {name: body.get(name) for name in _IN_ANSWER}
    return {
        **given,
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "model": answer.get("model", ""),
        "output": [],
        "error": None,
        "incomplete_details": None,
        "metadata": body.get("metadata") or {},
        "tools": body.get("tools") or [],
        "tool_choice": body.get("tool_choice") or "auto",
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "top_logprobs": body.get("top_logprobs") or 0,
        "store": False,
        "usage": None,
        "x_gpu": answer.get("x_gpu"),
    }


def _ended(response: Json, output: list[Json], finish: str, usage: Any) -> Json:
    """The `response` with its `output`. An answer that reached its limit of tokens is marked as incomplete."""
    known = usage if isinstance(usage, dict) else {}
    read, written = known.get("prompt_tokens") or 0, known.get("completion_tokens") or 0
    cut = finish == "length"
    return {
        **response,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output,
        "usage": {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + written,
        },
    }


def _part(kind: str, text: str, logprobs: Sequence[Json] = ()) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _item(kind: str, text: str, logprobs: Sequence[Json] = ()) -> Json:
    """An item with thoughts (`reasoning`) or with the text of the answer (`message`) and its `logprobs`."""
    part = _part(kind, text, logprobs)
    item = {"id": f"item_{uuid.uuid4().hex}", "type": kind, "content": [part]}
    if kind == "reasoning":
        return {**item, "summary": []}
    return {**item, "role": "assistant", "status": "completed"}


def _call_item(call: Mapping[str, Any]) -> Json:
    return {
        "id": f"item_{uuid.uuid4().hex}",
        "type": "function_call",
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": call["function"]["arguments"] or "{}",
        "status": "completed",
    }


_TAGS = "|".join(re.escape(tag) for pair in TAGS for tag in pair)
# What the model writes between its thoughts and its text.
_BETWEEN = re.compile(rf"\s*(?:{_TAGS})?\s*".encode())


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")  # a server may write half of a pair


class _Placed(NamedTuple):
    entry: Json
    begin: int  # in bytes of all that the model wrote
    end: int


class TextTokens:
    """The tokens that the model wrote, until the text that they belong to is known.

    A chat lists all tokens: those of thoughts, of the tags around them, of the text, and of tool calls. The Responses
    API lists only those of a text.

    The tokens are dicts in the format of a chat. Their bytes are compared with the thoughts and the text.

    >>> tokens = TextTokens()
    >>> tokens.add({"token": word, "logprob": -1.0} for word in ("<think>", "Hm", "</think>", "\\n\\nOne", " two"))
    >>> tokens.skip("Hm")
    >>> [token["token"] for token in tokens.take("One two")]
    ['\\n\\nOne', ' two']
    """

    def __init__(self) -> None:
        self._placed: deque[_Placed] = deque()
        self._data = b""  # of the tokens, from `_begin` on
        self._begin = 0

    def add(self, entries: Iterable[Json]) -> None:
        """Adds the next tokens that the model wrote."""
        end, parts = self._begin + len(self._data), []
        for entry in entries:
            known = entry.get("bytes")  # some engines send none
            data = _bytes(str(entry.get("token", ""))) if known is None else bytes(known)
            begin, end = end, end + len(data)
            self._placed.append(_Placed({**entry, "bytes": list(data)}, begin, end))
            parts.append(data)
        self._data += b"".join(parts)

    def skip(self, text: str) -> None:
        """Removes the tokens up to the end of `text`, which is no part of the answer's text, such as a thought."""
        self._remove_until(self._place(text)[1])

    def take(self, text: str) -> list[Json]:
        """Removes and returns the tokens of `text`, which is the next part of the answer's text."""
        begin, end = self._place(text)
        self._remove_until(begin)
        taken = []
        while self._placed and self._placed[0].begin < end:
            taken.append(self._placed.popleft().entry)
        self._remove_until(end)
        return taken

    def _place(self, text: str) -> tuple[int, int]:
        """Where `text` begins and ends. If it is not found, it is everything that the tokens have written.

        That is so if a token is no valid UTF-8, because the text then has a replacement character instead.
        """
        data = _bytes(text)
        after_tags = _BETWEEN.match(self._data).end()  # type: ignore[union-attr]
        places = (at for at in (0, after_tags) if self._data.startswith(data, at))
        at = next(places, self._data.find(data))
        if at < 0:
            return self._begin, self._begin + len(self._data)
        return self._begin + at, self._begin + at + len(data)

    def _remove_until(self, end: int) -> None:
        """Removes the tokens before `end`. A token of which a part follows `end` stays."""
        self._data = self._data[end - self._begin :]
        self._begin = end
        while self._placed and self._placed[0].end <= end:
            self._placed.popleft()
