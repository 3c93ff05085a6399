"""Which fields of a request each kind of engine can serve. This module is pure.

No field is ignored silently: if a field has an effect that the engine cannot serve, the call is refused with 400.
`requests` checks the ranges of values for all engines. An engine that is a server ignores fields that it does not
read. So a call is checked against the fields that the server reads, if they are known. Clouds check them themselves.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from ..facts import ModelSpec, Value
from .requests import KINDS, Call, Json, Refused, no_field

LLAMA, TORCH = "llama_cpp", "transformers"
CHECKED_BACKENDS = (LLAMA, TORCH)
_TEXT = ("chat", "completions")
_BOTH = (LLAMA, TORCH)
_NOTHING = (None, "", [], {})
# OpenAI's names of fields that decide how the next token is chosen -> the engines' names, which are the same.
SAMPLING = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "typical_p")}


class Field(Value):
    """A field of a request's body: the kinds of calls that have the field, and the backends that serve it."""

    kinds: tuple[str, ...] = _TEXT
    backends: tuple[str, ...] = _BOTH
    neutral: tuple[Any, ...] = ()  # values without an effect, so that every backend accepts them


FIELDS: dict[str, Field] = {
    "model": Field(KINDS),
    "messages": Field(("chat",)),
    "reasoning_effort": Field(("chat",)),  # the chat template serves it, see `with_thinking`
    "prompt": Field(("completions", "images", "tokenize")),
    "tokens": Field(("detokenize",)),
    "add_special_tokens": Field(("tokenize",), neutral=(False,)),
    "query": Field(("rerank",), (TORCH,)),
    "documents": Field(("rerank",), (TORCH,)),
    "top_n": Field(("rerank",), (TORCH,)),
    "return_documents": Field(("rerank",), (TORCH,), neutral=(False,)),
    "input": Field(("embeddings",)),
    "stream": Field(neutral=(False,)),
    **dict.fromkeys(
        """stream_options max_tokens max_completion_tokens stop seed temperature top_p top_k min_p typical_p
        repeat_penalty repetition_penalty presence_penalty frequency_penalty logit_bias""".split(),
        Field(),
    ),
    "mirostat_mode": Field(backends=(LLAMA,), neutral=(0,)),
    "mirostat_tau": Field(backends=(LLAMA,)),
    "mirostat_eta": Field(backends=(LLAMA,)),
    "response_format": Field(("chat",), neutral=({"type": "text"},)),
    "tools": Field(("chat",)),
    "tool_choice": Field(("chat",), neutral=("auto", "none")),
    "functions": Field(("chat",), ()),
    "function_call": Field(("chat",), (), neutral=("auto", "none")),
    "parallel_tool_calls": Field(("chat",), neutral=(True,)),
    "n": Field(neutral=(1,)),
    "best_of": Field(("completions",), (), neutral=(1,)),
    "echo": Field(("completions",), neutral=(False,)),
    "suffix": Field(("completions",), ()),
    "logprobs": Field(neutral=(False,)),
    "top_logprobs": Field(("chat",), neutral=(0,)),
    "encoding_format": Field(("embeddings",)),
    "dimensions": Field(("embeddings",)),
    "truncate": Field(("embeddings",), neutral=(False,)),
}
# These fields label the caller or the call, control OpenAI's prompt cache, or only save time (`prediction`). They have
# no effect on an answer.
WITHOUT_EFFECT = (
    *("user", "metadata", "safety_identifier", "prediction"),
    *("prompt_cache_key", "prompt_cache_retention"),
)
OTHER_NAMES = {"repetition_penalty": "repeat_penalty", "max_completion_tokens": "max_tokens"}
OTHER_NAMES |= {other: name for name, other in OTHER_NAMES.items()}
_FUNCTION = {"name": None, "description": None, "parameters": None, "strict": None}
_CALL = {"id": None, "type": None, "index": None, "function": {"name": None, "arguments": None}}
_PART = {
    **dict.fromkeys(("type", "text", "cache_control", "annotations", "refusal")),
    "image_url": {"url": None, "detail": None},
}
# The fields inside the fields of a chat; None: any value. A template may read a thought under each of its names, and
# clients send back what an answer had: `annotations`, `refusal`, `audio`, and the `index` of a streamed call.
_SHAPES: dict[str, Any] = {
    "messages": [
        {
            **dict.fromkeys(("role", "name", "tool_call_id", "refusal", "annotations")),
            **dict.fromkeys(("reasoning_content", "reasoning", "thinking", "cache_control")),
            "content": [_PART],
            "tool_calls": [_CALL],
        }
    ],
    "tools": [{"type": None, "cache_control": None, "function": _FUNCTION}],
    "tool_choice": {"type": None, "function": {"name": None}},
    "response_format": {
        "type": None,
        "schema": None,
        "json_schema": {"name": None, "description": None, "schema": None, "strict": None},
    },
    "stream_options": {"include_usage": None},
}
# Further fields inside those fields that some engine which is a server reads. Sources: vLLM, entrypoints/openai and
# entrypoints/chat_utils; llama.cpp, tools/server/server-common.cpp.
_READ_BY_SERVERS = frozenset(
    """audio audio_embeds audio_url continuous_usage_stats file format image_embeds image_pil input_audio input_video
    structures thinking tools triggers uuid video_url""".split()
)
_NEUTRAL_ONLY: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
}


def require_fields(call: Call, spec: ModelSpec) -> None:
    """Refuses (400) a `call` with a field that the backend of `spec` cannot serve, or with two values of one field."""
    _require_one_value(call.body)
    is_checked = spec.backend in CHECKED_BACKENDS
    for name, value in call.body.items() if is_checked else ():
        is_idle = _is_empty(value) or name in WITHOUT_EFFECT or _is_neutral(name, value)
        if not is_idle and not serves(spec.backend, call.kind, name):
            raise _refusal(spec, call.kind, name, value)
    more: frozenset[str] = frozenset() if is_checked else _READ_BY_SERVERS
    for name, shape in _SHAPES.items():
        if name in call.body and call.kind in FIELDS[name].kinds:
            _require_shape(call.body[name], shape, name, more)


def _require_shape(value: Any, shape: Any, place: str, more: frozenset[str]) -> None:
    """Refuses (400) a field inside `value`, at `place`, that neither its `shape` nor `more` names.

    A shape is a list with the shape of each item, a dict with the shape of each field, or None for any value. A value
    of another type is left to the checks of values.
    """
    if isinstance(shape, list) and isinstance(value, list):
        for at, item in enumerate(value):
            _require_shape(item, shape[0], f"{place}[{at}]", more)
    if not isinstance(shape, dict) or not isinstance(value, Mapping):
        return
    for name, inner in value.items():
        if name in shape:
            _require_shape(inner, shape[name], f"{place}.{name}", more)
        elif name not in more and not _is_empty(inner):
            where = f"{place}.{name}"[:120]
            close = difflib.get_close_matches(str(name)[:60].lower(), list(shape), n=1)
            advice = f"did you mean {place}.{close[0]}?" if close else "Leave it out"
            text = f"{where}: there is no such field. {advice}"
            raise Refused(400, "bad_field", text, param=where)


def _require_one_value(body: Mapping[str, Any]) -> None:
    for name, other in OTHER_NAMES.items():
        value, second = body.get(name), body.get(other)
        if None not in (value, second) and value != second:
            text = f"{name}={value} and {other}={second} are two names of one field: leave one out"
            raise Refused(400, "bad_field", text, param=name)


def read_by_server(model: str, kind: str, body: Mapping[str, Any], known: frozenset[str]) -> Json:
    """The fields of `body` that a server gets, under its names. Raises Refused for an effect that it would ignore.

    `known` are the fields that the server of the `model` reads in calls of this `kind`.
    """
    read = {}
    for name, value in body.items():
        own = name if name in known else OTHER_NAMES.get(name, name)
        if own in known:
            read[own] = value
        elif (name, kind) == ("reasoning_effort", "chat"):
            continue  # the call has the variables of the chat template instead
        elif not (name in WITHOUT_EFFECT or _is_neutral(name, value) or _is_empty(value)):
            why = f"its engine has no field {name[:60]!r} in a call for {kind}"
            if name not in FIELDS:
                why = no_field(name, known)
            text = f"{name[:60]} cannot be used with {model}: {why}. Leave it out"
            raise Refused(400, "not_supported", text, param=name[:60])
    return read


def serves(backend: str, kind: str, name: str) -> bool:
    """Whether models of this `backend` can serve the field `name` in calls of this `kind`."""
    field = FIELDS.get(name)
    return field is not None and kind in field.kinds and backend in field.backends


def _is_neutral(name: str, value: Any) -> bool:
    neutral = FIELDS[name].neutral if name in FIELDS else _NEUTRAL_ONLY.get(name, ())
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def _is_empty(value: Any) -> bool:
    return any(value is one or (one is not None and value == one) for one in _NOTHING)


def _refusal(spec: ModelSpec, kind: str, name: str, value: Any) -> Refused:
    others = f"nor by other models of the backend {spec.backend}"
    text = f"{name}={repr(value)[:60]} is not supported by {spec.name}, {others}"
    if name in FIELDS and kind not in FIELDS[name].kinds:
        text = f"{name} has no meaning in a call for {kind}"
    if name not in FIELDS and name not in _NEUTRAL_ONLY:
        text = no_field(name, FIELDS)
    return Refused(400, "not_supported", f"{text}. Leave it out", param=name[:60])


def sampling(body: Mapping[str, Any], names: Mapping[str, str]) -> Json:
    """The fields of `body` that decide how the next token is chosen. `names` maps OpenAI's names to the engine's."""
    return {own: body[name] for name, own in names.items() if body.get(name) is not None}
