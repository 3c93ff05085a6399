"""The route `/v1/messages`, in the format of Anthropic's clients: a translation of the chat route.

The functions that translate are pure. A field that cannot be translated is refused with 400, unless it has no effect
on an answer. Source: Anthropic, Messages API.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ..engines.openai_format import arguments_of
from ..requests import Json, Refused, Reply, bad
from .calls import Writer, chat_fields, functions, require_object
from .calls import named_event as _event
from .openai import add_call, answered, body_schema

_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")  # fields of both formats
_OTHER = ("messages", "system", "stop_sequences", "tools", "tool_choice", "thinking")
_IGNORED = ("metadata", "service_tier", "cache_control")  # fields that have no effect on an answer
# A system text and the results of tools are messages of their own in a chat, so the places there are others.
_PATHS = (
    (r"messages\[.*", "messages"),
    (r"tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
    (r"tools\[(\d+)\]\.function", r"tools[\1]"),
    ("stop$", "stop_sequences"),
)
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING: dict[Any, bool | None] = {"enabled": True, "disabled": False, "adaptive": None}
_MESSAGES = {
    "model": {"type": "string"},
    "messages": {"type": "array", "minItems": 1, "items": {"type": "object"}},
}
_LIMIT = {"max_tokens": {"type": "integer", "minimum": 1}}
_STREAM = {"stream": {"type": "boolean"}}


def add_route(routes: APIRouter, gateway: Any) -> None:
    """Adds the routes `/v1/messages` and `/v1/messages/count_tokens`. `gateway()` returns the Gateway."""
    for path, schema, answer, name in (
        ("/messages", body_schema(_MESSAGES | _LIMIT, _STREAM), _answer, "post_message"),
        ("/messages/count_tokens", body_schema(_MESSAGES, {}), _count, "post_count"),
    ):
        words = {"name": name, "description": str(answer.__doc__)}
        add_call(routes, path, gateway, schema, answer, **words)


async def _answer(request: Request, body: Any, gateway: Any, actor: str) -> Response:
    """An answer to a conversation in the format of Anthropic's clients, whole or streamed."""
    return await answered(request, gateway, "chat", chat_of(body), actor, _AnthropicWriter())


async def _count(request: Request, body: Any, gateway: Any, actor: str) -> Response:
    """The tokens of a conversation. The model reads it and writes one token: only its engine can count them."""
    require_object(body)
    chat = chat_of({**body, "max_tokens": 1, "stream": False})
    return await answered(request, gateway, "chat", chat, actor, _CountWriter())


# -- requests


def chat_of(body: Any) -> Json:
    """Translates the `body` of a call of `/v1/messages` into the body of a chat. Raises Refused (400)."""
    chat = chat_fields(body, _SAME)
    for name in body:
        if name not in chat and name not in _OTHER and name not in _IGNORED:
            raise bad(name, body[name], "left out: /v1/messages has no such field here")
    if body.get("max_tokens") is None:
        raise bad("max_tokens", None, "a number of tokens")
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(entry, Mapping) for entry in messages):
        raise bad("messages", messages, "a list of messages")
    system = _text("system", body.get("system") or "")
    chat["messages"] = [{"role": "system", "content": system}] if system else []
    for at, message in enumerate(messages):
        chat["messages"] += _messages(f"messages[{at}]", message)
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    chat |= functions(body.get("tools"), _tool)
    chat |= _tool_choice(body.get("tool_choice"))
    return _thinking(body.get("thinking")) | chat


def _messages(place: str, message: Mapping[str, Any]) -> list[Json]:
    """Translates one `message` into messages of a chat. Each result of a tool becomes a separate message.

    A chat's message of a tool has only text. So the pictures of a result become a part of the user's message after it.
    """
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise bad(f"{place}.role", role, "user or assistant")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    parts: list[Json] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    results: list[Json] = []
    for at, block in enumerate(_blocks(f"{place}.content", content)):
        where, kind = f"{place}.content[{at}]", block.get("type")
        if kind == "text":
            parts.append({"type": "text", "text": _text(where, [block])})
        elif kind == "image" and role == "user":
            parts.append(_picture(where, block))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "tool_use" and role == "assistant":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            inside = f"{where}.content"
            found = block.get("content") or ""
            if not isinstance(found, str):
                pictures = [item for item in _blocks(inside, found) if item.get("type") == "image"]
                found = [item for item in found if item not in pictures]
                parts += [_picture(inside, picture) for picture in pictures]
            text = _text(inside, found)
            id = block.get("tool_use_id")
            results.append({"role": "tool", "tool_call_id": id, "content": text})
        else:
            raise bad(f"{where}.type", kind, "text, image, thinking, tool_use or tool_result")
    if role == "assistant":
        made: Json = {"role": role, "content": parts or None}
        if thoughts:
            made["reasoning_content"] = "".join(thoughts)
        return [{**made, "tool_calls": calls} if calls else made]
    return [*results, {"role": role, "content": parts}] if parts else results


def _blocks(place: str, content: Any) -> list[Mapping[str, Any]]:
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise bad(place, content, "text, or a list of blocks")
    return content


def _text(place: str, content: Any) -> str:
    """The text of `content`, which is a string or a list of text blocks. Raises Refused (400) for other blocks."""
    if isinstance(content, str):
        return content
    texts = []
    for block in _blocks(place, content):
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise bad(place, block, "text, or a list of text blocks")
        texts.append(block["text"])
    return "".join(texts)


def _picture(place: str, block: Mapping[str, Any]) -> Json:
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    if kind not in ("url", "base64"):
        raise bad(f"{place}.source", source, "of type url or base64")
    data = f"data:{source.get('media_type')};base64,{source.get('data')}"
    url = str(source.get("url")) if kind == "url" else data
    return {"type": "image_url", "image_url": {"url": url}}


def _tool(place: str, tool: Any) -> Json:
    """Translates a `tool` into a function of a chat. Raises Refused (400) for tools that Anthropic's servers run."""
    if not isinstance(tool, Mapping) or tool.get("type", "custom") != "custom":
        raise bad(place, tool, "an object with name and input_schema")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {}}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> Json:
    if choice is None:
        return {}
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    fields: Json = {}
    if kind == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in _CHOICES:
        fields["tool_choice"] = _CHOICES[kind]
    else:
        raise bad("tool_choice", choice, 'an object with the type "auto", "any", "tool" or "none"')
    if choice.get("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False
    return fields


def _thinking(thinking: Any) -> Json:
    """Translates the field `thinking` into the field `x_thinking`; with `adaptive`, the model decides as usual."""
    if thinking is None:
        return {}
    kind = thinking.get("type") if isinstance(thinking, Mapping) else None
    if not isinstance(kind, str) or kind not in _THINKING:
        raise bad("thinking", thinking, f"an object with the type {', '.join(_THINKING)}")
    return {} if _THINKING[kind] is None else {"x_thinking": _THINKING[kind]}


# -- answers


def message_of(answer: Json) -> Json:
    """Translates the `answer` to a chat into a message in Anthropic's format."""
    choice = answer["choices"][0]
    said = choice["message"]
    content: list[Json] = []
    if said.get("reasoning_content"):
        content.append({"type": "thinking", "thinking": said["reasoning_content"], "signature": ""})
    if said.get("content"):
        content.append({"type": "text", "text": said["content"]})
    for call in said.get("tool_calls") or ():
        function = call["function"]
        tool = {"type": "tool_use", "id": call["id"], "name": function["name"]}
        content.append({**tool, "input": arguments_of(function["arguments"])})
    return {
        **_message(answer.get("model", "")),
        "content": content,
        "stop_reason": _STOP_REASONS.get(choice["finish_reason"], "end_turn"),
        "usage": _usage(answer.get("usage")),
        "x_gpu": answer.get("x_gpu"),
    }


def error_of(refused: Refused) -> Json:
    """The refusal in the format of Anthropic's errors."""
    kind = _ERRORS.get(refused.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": refused.message}}


class _AnthropicWriter(Writer):
    """Turns the chunks of one chat into Anthropic's events. Each run of thoughts, run of text, and call is a block."""

    paths = _PATHS

    def __init__(self) -> None:
        super().__init__()
        self._blocks = 0

    def whole(self, reply: Reply) -> Json:
        return message_of(super().whole(reply))

    def begin(self, chunk: Json) -> list[bytes]:
        message = {**_message(self.model), "content": [], "stop_reason": None}
        message |= {"usage": _usage(None), "x_gpu": chunk.get("x_gpu")}
        return [_event("message_start", message=message)]

    def error(self, error: Json) -> bytes:
        return _event("error", error={"type": "api_error", "message": error["message"]})

    def end(self, calls: list[Json]) -> list[bytes]:
        found = self.close_run()
        for call in calls:
            function = call["function"]
            block = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
            delta = {"type": "input_json_delta", "partial_json": function["arguments"] or "{}"}
            at = self._blocks
            self._blocks += 1
            found += [
                _event("content_block_start", index=at, content_block=block),
                _event("content_block_delta", index=at, delta=delta),
                _event("content_block_stop", index=at),
            ]
        stop = {"stop_reason": _STOP_REASONS.get(self.finish, "end_turn"), "stop_sequence": None}
        found.append(_event("message_delta", delta=stop, usage=_usage(self.usage)))
        found.append(_event("message_stop"))
        return found

    def begin_run(self) -> list[bytes]:
        kind = self.run  # `thinking` or `text`, as Anthropic names it
        block = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
        return [_event("content_block_start", index=self._blocks, content_block=block)]

    def piece(self, text: str) -> bytes:
        delta = {"type": f"{self.run}_delta", self.run: text}
        return _event("content_block_delta", index=self._blocks, delta=delta)

    def end_run(self) -> list[bytes]:
        self._blocks += 1
        return [_event("content_block_stop", index=self._blocks - 1)]


class _CountWriter(_AnthropicWriter):
    """Writes only the number of tokens that the model has read."""

    def whole(self, reply: Reply) -> Json:
        return {"input_tokens": _usage((reply.json or {}).get("usage"))["input_tokens"]}


def _message(model: str) -> Json:
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "stop_sequence": None,
    }


def _usage(usage: Any) -> dict[str, int]:
    known = usage if isinstance(usage, dict) else {}
    read, written = known.get("prompt_tokens") or 0, known.get("completion_tokens") or 0
    return {"input_tokens": read, "output_tokens": written}
