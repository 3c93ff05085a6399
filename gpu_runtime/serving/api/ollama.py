"""The routes `/api/*`, in the format of Ollama's clients: translations of the routes for chats and embeddings.

The functions that translate are pure. A field that cannot be translated is refused with 400, unless its value is empty.
A field with the value null counts as left out. Source: Ollama, docs/api.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from ...facts import HOST, Evidence, Lease
from ...version import VERSION
from ...web import json_body
from ..choices import ModelFacts
from ..engines.openai_format import arguments_of
from ..requests import LOAD, MAX_SECONDS, SAMPLING, Json, Refused, Reply, bad
from ..thread_stream import in_thread
from .calls import CALLS, StrictRoute, Writer, logprobs_of, require_object
from .openai import (
    REFUSALS,
    add_call,
    answered,
    body_schema,
    request_body,
    unless_gone,
    visitor_name,
)

_SAME = (
    *("repeat_penalty", "presence_penalty", "frequency_penalty"),
    *("mirostat_tau", "mirostat_eta", "seed", "stop"),
)
_OPTIONS = {  # Ollama's name of an option -> OpenAI's name of the field
    **SAMPLING,
    **{name: name for name in _SAME},
    "mirostat": "mirostat_mode",
    "num_predict": "max_tokens",
}
_PATHS = (  # of a chat's fields, in a body of these routes
    *((f"{field}$", f"options.{name}") for name, field in _OPTIONS.items()),
    ("max_completion_tokens", "options.num_predict"),
    (r"response_format.*", "format"),
)
# Durations as Go writes them, such as 1h30m. Source: Go, time.ParseDuration
_UNITS = {"ns": 1e-9, **dict.fromkeys(("us", "µs", "μs"), 1e-6), "ms": 0.001}
_UNITS |= {"s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)")
_DURATION = re.compile(rf"[+-]?({_PART.pattern})+")
# The version of Ollama whose routes are spoken here. Clients refuse older ones: Copilot those before 0.6.4.
OLLAMA_VERSION = "0.11.0"
LATEST = ":latest"  # the tag of a name without a tag
_NEVER = "9999-12-31T23:59:59Z"  # when a model leaves that stays as long as possible
_INFO = {  # Ollama's name of a fact, after the architecture -> Hugging Face's name
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
_FORMATS = {"GGUF header": "gguf", "safetensors header": "safetensors"}
_LOGPROBS = ("logprobs", "top_logprobs")
_REFUSED = ("pull", "push", "create", "copy", "delete")
_SCHEMA = body_schema({"model": {"type": "string"}}, {"stream": {"type": "boolean"}})
# Takes a body in Ollama's format. Returns the kind of the call and the body in OpenAI's format.
Translate = Callable[[Any], tuple[str, Json]]


def router(gateway: Any) -> APIRouter:
    """The routes below `/api`. `gateway()` returns the Gateway."""
    routes = APIRouter(prefix="/api", tags=["models"], route_class=StrictRoute)

    @routes.get("/version")
    def get_version() -> Json:
        """The version of Ollama whose routes are spoken here, and the version of this server."""
        return {"version": OLLAMA_VERSION, "gpu_console": VERSION}

    @routes.get("/tags")
    def get_tags(request: Request) -> Json:
        """The models that this visitor can call."""
        rows = gateway().models(visitor_name(request))
        return {"models": [_row(row, gateway().facts(row["id"])) for row in rows]}

    @routes.get("/ps")
    def get_ps(request: Request) -> Json:
        """The models that this visitor can call and that are on a device."""
        rows = gateway().models(visitor_name(request))
        warm = [row for row in rows if row.get("x_gpu", {}).get("warm")]
        leases = gateway().leases() if warm else {}
        return {"models": [_running(gateway(), row, leases.get(row["id"])) for row in warm]}

    @routes.post("/show", openapi_extra=request_body(_SCHEMA), responses=REFUSALS)
    async def post_show(request: Request, actor: str = CALLS) -> Json:
        """The description of one model."""
        body = await request.json()
        given = body if isinstance(body, Mapping) else {}
        name = given.get("model") or given.get("name")  # older clients send `name`
        if not name:
            raise Refused(400, "bad_field", "model is required", param="model")
        rows = {row["id"]: row for row in await in_thread(lambda: gateway().models(actor))}
        row = rows.get(name) or rows.get(str(name).removesuffix(LATEST))
        if row is None:
            raise _not_found(str(name))
        return _shown(row, await in_thread(lambda: gateway().facts(row["id"])))

    for path, translate, part, finish in (
        ("/chat", chat_of, _chat_part, whole),
        ("/generate", generate_of, _generate_part, whole),
        ("/embed", embed_of, None, embedded),
        ("/embeddings", embedding_of, lambda text, calls: {"embedding": []}, one_embedded),
    ):
        _add_call(routes, gateway, path, translate, part, finish)
    for name in _REFUSED:
        _add_refusal(routes, name)
    return routes


def _add_call(
    routes: APIRouter,
    gateway: Any,
    path: str,
    translate: Translate,
    part: Any,
    finish: Callable[[Json, Any], Json],
) -> None:
    async def answer(request: Request, given: Any, gateway: Any, actor: str) -> Response:
        """Answers one call in the format of Ollama's clients. Chats and texts are streamed unless `stream` is false.

        A chat without messages and a text without a prompt load the model. With `keep_alive: 0` they move it to RAM.
        """
        kind, body = translate(await _fitting(gateway, given))
        if kind == LOAD:
            return JSONResponse(await _loaded(request, gateway, actor, body, part))
        writer = _OllamaWriter(part, finish)
        return await answered(request, gateway, kind, body, actor, writer)

    words = {"name": f"ollama {path}", "description": str(answer.__doc__)}
    add_call(routes, path, gateway, _SCHEMA, answer, **words)


def error_of(refused: Refused) -> Json:
    """The refusal in the format of Ollama's errors."""
    return {"error": refused.message}


async def _fitting(gateway: Any, body: Any) -> Any:
    """The `body` with the model's name as it is known here. Raises Refused (400) for a longer context than it has.

    `NAME:latest` is the model NAME, unless a model has the tag in its name.
    """
    options = body.get("options") if isinstance(body, Mapping) else None
    tokens = options.get("num_ctx") if isinstance(options, Mapping) else None
    name = body.get("model") if isinstance(body, Mapping) else None
    if not isinstance(name, str) or not (tokens or name.endswith(LATEST)):
        return body
    facts = await in_thread(lambda: gateway.facts(name))
    if facts is None and name.endswith(LATEST):
        name = name.removesuffix(LATEST)
        facts = await in_thread(lambda: gateway.facts(name))
    context = facts.context_length if facts else None
    if tokens and context and isinstance(tokens, int) and tokens > context:
        what = f"at most {context}, the context of {name}; context_length in the catalogue sets it"
        raise bad("options.num_ctx", tokens, what)
    return {**body, "model": name}


async def _loaded(request: Request, gateway: Any, actor: str, body: Json, part: Any) -> Json:
    """Loads the model of `body`, or evicts it if it stays warm for 0 s. Returns the answer. Raises Refused.

    A key may load its models, and not evict one, which other callers may use.
    """
    end = {**_head(body["model"]), **part("", ()), "done": True}
    if body.get("x_stay_warm") != 0:
        await unless_gone(request, gateway.answer(LOAD, body, actor))
        return {**end, "done_reason": "load"}
    if not request.scope["state"]["visitor"].may_act:
        text = f"{actor} may call models, and not unload them: that takes the operator's token"
        raise Refused(403, "may_not_act", text, param="keep_alive")
    rows = await in_thread(lambda: gateway.models(actor))
    facts = {row["id"]: row["x_gpu"] for row in rows}
    name = facts.get(str(body["model"]), {}).get("alias_of", str(body["model"]))
    if "warm" not in facts.get(name, {}):
        raise _not_found(name)
    if facts[name]["warm"]:
        gateway.keep_warm.evict_soon(name)
    return {**end, "done_reason": "unload"}


def _not_found(name: str) -> Refused:
    return Refused(404, "model_not_found", f"model {name[:64]!r} not found", param="model")


def _add_refusal(routes: APIRouter, name: str) -> None:
    async def refuse(actor: str = CALLS) -> Json:
        """Refuses the call, because only the operator adds models to this server's catalogue."""
        text = f"{name} is not possible here: the operator adds models to the catalogue (gpu apply)"
        raise Refused(400, "not_supported", text)

    methods = ["DELETE"] if name == "delete" else ["POST"]
    description: dict[int | str, Json] = {400: {"description": "always"}}
    routes.add_api_route(
        f"/{name}", refuse, methods=methods, name=f"ollama {name}", responses=description
    )


# -- requests


def chat_of(body: Any) -> tuple[str, Json]:
    """Translates the `body` of a call of `/api/chat` into the kind and the body of OpenAI's. Raises Refused (400)."""
    made = _common(body, ("messages", "tools", *_LOGPROBS))
    messages = body.get("messages")
    if messages is None or messages == []:
        return _load_of(made)
    if not isinstance(messages, list) or not all(isinstance(entry, Mapping) for entry in messages):
        raise bad("messages", messages, "a list of messages")
    made["messages"] = [_message(f"messages[{at}]", message) for at, message in enumerate(messages)]
    results = 0
    for message in made["messages"]:  # results of tools have no ids, but the order of the calls
        results = results + 1 if message["role"] == "tool" else 0
        if results:
            message["tool_call_id"] = f"call{results - 1}"
    if body.get("tools"):
        made["tools"] = body["tools"]
    return "chat", made


def generate_of(body: Any) -> tuple[str, Json]:
    """Translates the `body` of a call of `/api/generate` into the kind and the body of OpenAI's. Raises Refused (400).

    With `raw` the model gets the prompt as it is. Otherwise the prompt is the user's message of a chat.
    """
    made = _common(body, ("prompt", "system", "images", "raw", "suffix", *_LOGPROBS))
    if body.get("suffix"):
        raise bad("suffix", body["suffix"], "left out: no text can be inserted here")
    prompt = body.get("prompt")
    if not prompt and not body.get("images"):
        return _load_of(made)
    if not isinstance(prompt, str):
        raise bad("prompt", prompt, "text")
    if body.get("raw"):
        for name in ("system", "images"):
            if body.get(name):
                raise bad(name, body[name], "left out: with raw the model gets only the prompt")
        return "completions", {**made, "prompt": prompt}
    system = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    message = _message("images", {"role": "user", "content": prompt, "images": body.get("images")})
    return "chat", {**made, "messages": [*system, message]}


def _load_of(made: Json) -> tuple[str, Json]:
    """The kind and the body of a call that only loads the model, from the fields that `_common` has made."""
    kept = {name: value for name, value in made.items() if name == "model" or name[:2] == "x_"}
    return LOAD, kept


def embed_of(body: Any) -> tuple[str, Json]:
    """Translates the `body` of a call of `/api/embed` into the kind and the body of OpenAI's. Raises Refused (400)."""
    made = _common(body, ("input", "dimensions", "truncate"))
    made = {name: value for name, value in made.items() if not name.startswith("stream")}
    made["truncate"] = True  # unless the caller sets it
    for name in ("input", "dimensions", "truncate"):
        if body.get(name) is not None:
            made[name] = body[name]
    return "embeddings", made


def embedding_of(body: Any) -> tuple[str, Json]:
    """Translates the `body` of a call of `/api/embeddings`, the older route for one text. Raises Refused (400)."""
    made = _common(body, ("prompt",))
    prompt = body.get("prompt")
    if not prompt:
        return _load_of(made)
    if not isinstance(prompt, str):
        raise bad("prompt", prompt, "text")
    rest = {name: value for name, value in body.items() if name != "prompt"}
    return embed_of({**rest, "input": prompt})


def _common(body: Any, own: tuple[str, ...]) -> Json:
    """Translates the fields of `body` that all routes have. `own` are the names of this route's other fields."""
    require_object(body)
    known = ("model", "stream", "options", "format", "keep_alive", "think", *own)
    if "logprobs" in own and body.get("raw"):
        known = tuple(name for name in known if "logprobs" not in name)
    for name, value in body.items():
        if name not in known and name[:2] != "x_" and value not in (None, "", [], {}):
            raise bad(name, value, "left out: there is no such field here")
    made = {name: value for name, value in body.items() if name[:2] == "x_"}
    made |= {"model": body.get("model"), "stream": body.get("stream") is not False}
    if made["stream"]:
        made["stream_options"] = {"include_usage": True}
    made |= {name: body[name] for name in _LOGPROBS if name in own and body.get(name)}
    options = body.get("options") or {}
    if not isinstance(options, Mapping):
        raise bad("options", options, "an object")
    for name, value in options.items():
        to_the_end = name == "num_predict" and value in (-1, -2)  # of the context
        if value is None or to_the_end:
            continue
        if name == "num_ctx":  # `_fitting` compares it with the model's context
            if type(value) is not int or value < 1:
                raise bad("options.num_ctx", value, "a number of tokens")
            continue
        if name not in _OPTIONS:
            raise bad(f"options.{name}", value, "left out: it is set when the model is registered")
        made[_OPTIONS[name]] = value
    if body.get("format"):
        made["response_format"] = _format(body["format"])
    if body.get("keep_alive") is not None:
        made.setdefault("x_stay_warm", _seconds(body["keep_alive"]))
    if isinstance(body.get("think"), str):
        made.setdefault("reasoning_effort", body["think"])
    elif body.get("think") is not None:
        made.setdefault("x_thinking", body["think"])
    return made


def _format(format: Any) -> Json:
    if format == "json":
        return {"type": "json_object"}
    if not isinstance(format, Mapping):
        raise bad("format", format, '"json" or a JSON schema')
    return {"type": "json_schema", "json_schema": {"name": "format", "schema": dict(format)}}


def _seconds(value: Any) -> float:
    """The seconds of the field `keep_alive`, such as 300 or "5m". A negative number means as long as possible.

    >>> _seconds("5m"), _seconds("1h30m"), _seconds(0), _seconds(-1), _seconds("250ms")
    (300.0, 5400.0, 0.0, 86400.0, 0.25)
    """
    seconds = math.nan
    if isinstance(value, str) and _DURATION.fullmatch(value):
        parts = _PART.findall(value)
        seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
        seconds = -seconds if value.startswith("-") else seconds
    elif not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError):  # the text below names what is wrong
            seconds = float(value)
    if math.isnan(seconds):
        raise bad("keep_alive", value, "seconds, or a text such as 5m or 1h30m")
    return MAX_SECONDS if seconds < 0 else min(seconds, MAX_SECONDS)


def _message(place: str, message: Mapping[str, Any]) -> Json:
    """The `message` in OpenAI's format: images are parts, and arguments of tool calls are text."""
    content: Any = message.get("content") or ""
    images, tool_calls = message.get("images") or [], message.get("tool_calls") or []
    for name, found in (("images", images), ("tool_calls", tool_calls)):
        if not isinstance(found, list):
            raise bad(f"{place}.{name}", found, "a list")
    if images:
        parts = [{"type": "text", "text": content}]
        for image in images:
            if not isinstance(image, str):
                raise bad(place, image, "images as base64")
            url = f"data:image/png;base64,{image}"  # engines read the type from the data itself
            parts.append({"type": "image_url", "image_url": {"url": url}})
        content = parts
    made = {"role": message.get("role"), "content": content}
    if message.get("thinking"):
        made["reasoning_content"] = message["thinking"]
    calls = []
    for at, call in enumerate(tool_calls):
        given = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(given, Mapping):
            raise bad(f"{place}.tool_calls[{at}]", call, 'an object with a "function"')
        arguments = json.dumps(given.get("arguments") or {}, ensure_ascii=False)
        function = {"name": given.get("name"), "arguments": arguments}
        calls.append({"id": f"call{at}", "type": "function", "function": function})
    return {**made, "tool_calls": calls} if calls else made


# -- answers


def whole(answer: Json, part: Any) -> Json:
    """Translates the whole `answer` to a call. `part(text, calls, thought)` returns this route's fields for these."""
    choice = answer["choices"][0]
    message = choice.get("message") or {"content": choice.get("text")}
    thought = message.get("reasoning_content") or ""
    head = _head(answer.get("model", ""))
    made = part(message.get("content") or "", message.get("tool_calls") or (), thought)
    end = _end(choice["finish_reason"], answer.get("usage"))
    return {**head, **made, **_with_logprobs(logprobs_of(choice)), **end}


def _with_logprobs(entries: list[Json]) -> Json:
    """The field `logprobs`, whose entries are those of a chat in OpenAI's format; nothing without entries."""
    return {"logprobs": entries} if entries else {}


def embedded(answer: Json, _: Any) -> Json:
    """Translates the `answer` to a call for embeddings into the answer of `/api/embed`."""
    count = (answer.get("usage") or {}).get("prompt_tokens", 0)
    vectors = [row["embedding"] for row in answer["data"]]
    return {"model": answer["model"], "embeddings": vectors, "prompt_eval_count": count}


def one_embedded(answer: Json, _: Any) -> Json:
    """Translates the `answer` to a call for embeddings into the answer of `/api/embeddings`."""
    return {"embedding": answer["data"][0]["embedding"]}


class _OllamaWriter(Writer):
    """Writes the answer to one call. `part` is as in `whole`; `finish(answer, part)` makes a whole answer."""

    paths = _PATHS
    media_type = "application/x-ndjson"

    def __init__(self, part: Any, finish: Callable[[Json, Any], Json]) -> None:
        super().__init__()
        self._part, self._finish = part, finish
        self._facts: Mapping[str, Any] = {}
        self._logprobs: list[Json] = []  # those that are not sent yet

    def whole(self, reply: Reply) -> Json:
        made = self._finish(reply.json or {}, self._part)
        return {**made, **_durations(reply.facts, self._finish)}

    def events(self, reply: Reply) -> AsyncIterator[bytes]:
        self._facts = reply.facts
        return super().events(reply)

    def tokens(self, entries: list[Json]) -> None:
        self._logprobs += entries

    def pieces(self, thought: str, text: str) -> list[bytes]:
        return [self._line(self._part(text, (), thought), done=False)]

    def error(self, error: Json) -> bytes:
        return _line({"error": error["message"]})

    def end(self, calls: list[Json]) -> list[bytes]:
        found = [self._line(self._part("", calls), done=False)] if calls else []
        end = {**_end(self.finish, self.usage), **_durations(self._facts)}
        return [*found, self._line(self._part("", ()), **end)]

    def _line(self, part: Json, **fields: Any) -> bytes:
        new, self._logprobs = _with_logprobs(self._logprobs), []
        return _line({**_head(self.model), **part, **new, **fields})


def _chat_part(text: str, calls: Any, thought: str = "") -> Json:
    message: Json = {"role": "assistant", "content": text}
    if thought:
        message["thinking"] = thought
    for at, call in enumerate(calls):
        function = call["function"]
        arguments = arguments_of(function["arguments"])
        called = {"index": at, "name": function["name"], "arguments": arguments}
        made = message.setdefault("tool_calls", [])
        made.append({"id": call.get("id") or "", "function": called})
    return {"message": message}


def _generate_part(text: str, calls: Any, thought: str = "") -> Json:
    return {"response": text, "thinking": thought} if thought else {"response": text}


def _head(model: str) -> Json:
    return {"model": model, "created_at": datetime.now(timezone.utc).isoformat()}


def _end(finish: str, usage: Any) -> Json:
    known = usage if isinstance(usage, dict) else {}
    return {
        "done": True,
        "done_reason": "length" if finish == "length" else "stop",
        "prompt_eval_count": known.get("prompt_tokens") or 0,
        "eval_count": known.get("completion_tokens") or 0,
    }


def _durations(facts: Mapping[str, Any], finish: Any = whole) -> dict[str, int]:
    """The durations of a call in nanoseconds, from its `facts` in the request log.

    The routes for embeddings, known by `finish`, have fewer. The engine shows how long it read the prompt only if it
    streams, else the whole time counts as writing.

    >>> _durations({"queue_seconds": 1.0, "first_seconds": 0.5, "answer_seconds": 2.0})["eval_duration"]
    1500000000
    """
    waited, answer = facts.get("queue_seconds"), facts.get("answer_seconds")
    if waited is None or answer is None:
        return {}
    first = facts.get("first_seconds") or 0.0
    seconds = {
        "total_duration": waited + answer,
        "load_duration": waited,
        "prompt_eval_duration": first,
        "eval_duration": answer - first,
    }
    names = {embedded: ("total_duration", "load_duration"), one_embedded: ()}.get(finish, seconds)
    return {name: round(seconds[name] * 1e9) for name in names}


def _row(row: Json, facts: ModelFacts | None) -> Json:
    """A row of `/v1/models` as a row of `/api/tags`."""
    created = datetime.fromtimestamp(row.get("created", 0), timezone.utc)
    if facts and facts.spec.source:
        with contextlib.suppress(OSError):  # the source is a hub id, or gone
            changed = os.stat(os.path.expanduser(facts.spec.source)).st_mtime
            created = datetime.fromtimestamp(changed, timezone.utc)
    return {
        "name": row["id"],
        "model": row["id"],
        "modified_at": created.isoformat(),
        "size": facts.file_bytes if facts else 0,
        "digest": facts.evidence.fingerprint if facts else "",
        "details": _details(facts),
    }


def _details(facts: ModelFacts | None) -> Json:
    family = _architecture(facts) if facts else ""
    evidence = facts.evidence if facts else Evidence()
    return {
        "parent_model": "",
        "format": _FORMATS.get(evidence.source, evidence.file_format),
        "family": family,
        "families": [family] if family else [],
        "parameter_size": _count(evidence.parameters),
        "quantization_level": facts.spec.quantization if facts else "",
    }


def _count(number: int) -> str:
    """The `number` as Ollama writes it; empty for 0, which stands for an unknown number.

    >>> [_count(number) for number in (8_030_261_248, 134_515_008, 7_000_000, 512, 0)]
    ['8.0B', '134.52M', '7M', '512', '']
    """
    for size, letter, places in ((10**9, "B", 1), (10**6, "M", 2), (1000, "K", 0)):
        if number >= size:
            return f"{number / size:.{places if number % size else 0}f}{letter}"
    return str(number or "")


def _architecture(facts: ModelFacts) -> str:
    return str(facts.config.get("model_type") or facts.spec.model_type)


def _running(gateway: Any, row: Json, lease: Lease | None) -> Json:
    """A row of `/api/ps`: the row of `/api/tags`, the memory, and until when the model stays."""
    facts = gateway.facts(row["id"])
    found = _row(row, facts)
    if lease is not None:
        on_cards = lease.bytes - lease.bytes_on(HOST)
        found |= {"size": lease.bytes, "size_vram": on_cards}
    seconds = gateway.warm_seconds(row["id"])
    until = datetime.now(timezone.utc) + timedelta(seconds=seconds or 0.0)
    found["expires_at"] = _NEVER if seconds is None else until.isoformat()
    if "context_length" in row:
        found["context_length"] = row["context_length"]
    return found


def _shown(row: Json, facts: ModelFacts | None) -> Json:
    """The answer of `/api/show`."""
    found = _row(row, facts)
    if facts is None:  # a task
        return {**found, "model_info": {}, "capabilities": ["completion"]}
    family = _architecture(facts)
    info: Json = {"general.architecture": family, "general.basename": row["id"]}
    if facts.evidence.parameters:
        info["general.parameter_count"] = facts.evidence.parameters
    for name, own in _INFO.items():
        if isinstance(facts.config.get(own), int):
            info[f"{family}.{name}"] = facts.config[own]
    context = facts.context_length
    if context:
        info[f"{family}.context_length"] = context
    return {
        **found,
        "modelfile": f"FROM {row['id']}\n",
        "parameters": f"num_ctx {context}" if context else "",
        "template": facts.template,
        "license": "",
        "model_info": info,
        "capabilities": facts.capabilities,
    }


def _line(fields: Json) -> bytes:
    return json_body.written(fields) + b"\n"
