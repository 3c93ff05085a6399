"""A request's body, read into a `Call`: what it asks of a model, and what it asks of us in its `x_*` fields.

Pure. Every `x_*` field at the top of the body is taken out before an engine sees it, known or not, whatever it holds.
Headers are never looked at: a proxy in between may add some, and a body is its writer's own.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from ..errors import BadSetting
from ..facts import IMPORTANCE, Value, parse_importance

KINDS = ("chat", "completions", "embeddings", "images")
MOST_TOKENS = 1_000_000  # of one answer; beyond that a number is a slip, whatever the model
MOST_MESSAGES = 10_000
MOST_SECONDS = 86_400.0  # of what a client may ask for: a day
LONGEST_NAME = 256
LONGEST_CLIENT = 128
_EXAMPLE = '{"role": "user", "content": "hi"}'
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class Refused(Exception):
    """A call that gets no answer, and why.

    `status` is the HTTP status, `code` a word for programs, `retry_after` seconds until it may be worth trying again
    (None: it would be refused again). `facts` holds the figures that the message was made from.
    """

    def __init__(
        self, status: int, code: str, message: str, retry_after: float | None = None, **facts: Any
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.retry_after, self.facts = retry_after, facts

    @property
    def headers(self) -> dict[str, str]:
        """`Retry-After` in whole seconds, never less than one."""
        return (
            {}
            if self.retry_after is None
            else {"Retry-After": str(max(1, math.ceil(self.retry_after)))}
        )

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        kind = "invalid_request_error" if self.status < 429 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "code": self.code,
                "param": self.facts.get("param"),
            }
        }


class Call(Value):
    """One request: the body for the engine, without any `x_*` field, and what was said in those."""

    kind: str
    model: str  # as asked for: a name, `task:NAME` or `provider:model`
    body: dict[str, Any]
    stream: bool = False
    client: str = ""  # who is asking: the person that the token named, and the name that their program gave itself
    profile: str = ""  # the name that the program gave itself, alone
    importance: int | None = None  # None: its profile's, else the model's own
    stay_warm: float | None = (
        None  # seconds to keep the model on its device after this; None: by its type
    )
    cooldown: float = 0.0  # seconds in which this client wants to be held to no further call
    thinking: bool | None = None
    budget: float | None = None  # seconds in which the whole answer is wanted


class Events(Protocol):
    """A streamed answer, event by event. `aclose` ends it early and lets go of everything; twice is once."""

    def __aiter__(self) -> AsyncIterator[dict[str, Any]]: ...

    async def aclose(self) -> None: ...


@dataclass
class Reply:
    """An answer: `json`, or `events` where it was asked for as a stream. Close it when it was sent, or cannot be."""

    model: str  # that answered
    asked: str  # that was asked for
    because: str  # why it was this one; empty where it is the one asked for
    json: dict[str, Any] | None = None
    events: Events | None = None
    headers: dict[str, str] = field(default_factory=dict)

    async def aclose(self) -> None:
        if self.events is not None:
            await self.events.aclose()


def read_call(kind: str, body: Any, client: str = "") -> Call:
    """The call that a request's body makes. Raises Refused, status 400: the field that is wrong, and what to write."""
    if kind not in KINDS:
        raise bad("kind", kind, f"one of {', '.join(KINDS)}")
    if not isinstance(body, Mapping):
        raise Refused(
            400, "bad_body", f"the body is {_kind_of(body)}; it must be a JSON object", param=None
        )
    ours = {name: value for name, value in body.items() if isinstance(name, str) and _is_ours(name)}
    plain = {name: value for name, value in body.items() if name not in ours}
    _require_utf8(plain)
    model = _text(plain, "model", LONGEST_NAME)
    _CHECKS[kind](plain)
    check_numbers(plain)
    stream = plain.get("stream") or False
    if not isinstance(stream, bool):
        raise bad("stream", stream, "true or false")
    if stream and kind not in ("chat", "completions"):
        raise bad("stream", stream, f"left out: {kind} are not streamed")
    said = {name.lower().replace("-", "_"): value for name, value in ours.items()}
    profile = _client_id(said.get("x_client_id"))
    return Call(
        kind,
        model,
        plain,
        stream,
        client="/".join(filter(None, (client, profile))),
        profile=profile,
        importance=_importance(said.get("x_priority")),
        stay_warm=_seconds("x_stay_warm", said.get("x_stay_warm")),
        cooldown=_seconds("x_cooldown", said.get("x_cooldown")) or 0.0,
        thinking=_flag("x_thinking", said.get("x_thinking")),
        budget=_seconds("x_budget", said.get("x_budget"), least=0.001),
    )


def bad(param: str, value: Any, expected: str) -> Refused:
    """That a field cannot be used, and what it must be."""
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}…"
    return Refused(
        400, "bad_field", f"{param}={shown} cannot be used: it must be {expected}", param=param
    )


def _is_ours(name: str) -> bool:
    """Whether a field is for us: `x_…`, in any case, and `x-…` as headers are written.

    >>> [_is_ours(name) for name in ("x_priority", "X_Priority", "x-priority", "xtc_probability", "max_tokens")]
    [True, True, True, False, False]
    """
    return name[:2].lower() in ("x_", "x-")


def _require_utf8(body: Mapping[str, Any]) -> None:
    """Half of a surrogate pair is valid JSON and no text: tokenizers fail on it, and no engine is to blame for that."""
    try:
        msgspec.json.encode(body)
    except (UnicodeEncodeError, TypeError, RecursionError) as error:
        raise Refused(
            400, "bad_body", f"the body cannot be written as UTF-8 JSON: {error}", param=None
        ) from None


def _text(body: Mapping[str, Any], name: str, longest: int) -> str:
    value = body.get(name)
    if (
        not isinstance(value, str)
        or not value.strip()
        or len(value) > longest
        or not value.isprintable()
    ):
        raise bad(
            name, value, f"the name of a model, at most {longest} letters; see GET /v1/models"
        )
    return value


def _check_chat(body: Mapping[str, Any]) -> None:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or len(messages) > MOST_MESSAGES:
        raise bad(
            "messages", messages, f"a list of 1 to {MOST_MESSAGES} messages, such as [{_EXAMPLE}]"
        )
    for at, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise bad(f"messages[{at}]", message, f"an object such as {_EXAMPLE}")
        if message.get("role") not in ROLES:
            raise bad(f"messages[{at}].role", message.get("role"), f"one of {', '.join(ROLES)}")
        content = message.get("content")
        parts = isinstance(content, list) and all(isinstance(part, Mapping) for part in content)
        if not (
            isinstance(content, str)
            or parts
            or (content is None and message["role"] == "assistant")
        ):
            raise bad(f"messages[{at}].content", content, "text, or a list of parts")


def _check_completions(body: Mapping[str, Any]) -> None:
    if not isinstance(body.get("prompt"), str):
        raise bad("prompt", body.get("prompt"), "text")


def _check_embeddings(body: Mapping[str, Any]) -> None:
    wanted = body.get("input")
    texts = (
        isinstance(wanted, list)
        and 0 < len(wanted) <= 2048
        and all(isinstance(text, str) for text in wanted)
    )
    if not texts and not (isinstance(wanted, str) and wanted):
        raise bad("input", wanted, "text, or a list of 1 to 2048 texts")
    if body.get("encoding_format") not in (None, "float", "base64"):
        raise bad("encoding_format", body["encoding_format"], "float or base64")


def _check_images(body: Mapping[str, Any]) -> None:
    if not isinstance(body.get("prompt"), str) or not body["prompt"]:
        raise bad("prompt", body.get("prompt"), "text")
    size = body.get("size")
    if size is not None and not (isinstance(size, str) and _is_size(size)):
        raise bad("size", size, "WIDTHxHEIGHT in pixels, each at most 4096, such as 1024x1024")


def _is_size(text: str) -> bool:
    width, x, height = text.partition("x")
    return (
        text == "auto"
        or bool(x)
        and all(
            side.isascii() and side.isdigit() and len(side) <= 4 and 0 < int(side) <= 4096
            for side in (width, height)
        )
    )


_CHECKS = {
    "chat": _check_chat,
    "completions": _check_completions,
    "embeddings": _check_embeddings,
    "images": _check_images,
}
_WHOLE = {
    "max_tokens": MOST_TOKENS,
    "max_completion_tokens": MOST_TOKENS,
    "n": 128,
    "seed": 2**63 - 1,
}
_REAL = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}


def check_numbers(body: Mapping[str, Any]) -> None:
    """The numbers that every engine takes, so that no engine has to fail on them."""
    for name, most in _WHOLE.items():
        value, least = body.get(name), 1 if name != "seed" else -(2**63)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most
        ):
            raise bad(name, value, f"a whole number from {least} to {most}")
    for name, (low, high) in _REAL.items():
        value = body.get(name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and low <= value <= high):
            raise bad(name, value, f"a number from {low:g} to {high:g}")
    stop = body.get("stop")
    many = (
        isinstance(stop, list)
        and len(stop) <= 16
        and all(isinstance(text, str) and text for text in stop)
    )
    if stop is not None and not many and not (isinstance(stop, str) and stop):
        raise bad("stop", stop, "text, or a list of at most 16 texts")


def _client_id(value: Any) -> str:
    if value is None:
        return ""
    if (
        not isinstance(value, str)
        or not 0 < len(value) <= LONGEST_CLIENT
        or not value.isprintable()
        or "/" in value
    ):
        raise bad(
            "x_client_id", value, f"a name of at most {LONGEST_CLIENT} letters, without a slash"
        )
    return value


def _importance(value: Any) -> int | None:
    """A class by its name, or a number from 1 to 100; lower is more important."""
    if value is None:
        return None
    try:
        return parse_importance(value, least=1, most=100)
    except BadSetting:
        raise bad(
            "x_priority",
            value,
            f"{', '.join(IMPORTANCE)} or a number from 1 to 100; lower is more important",
        ) from None


def _seconds(name: str, value: Any, least: float = 0.0) -> float | None:
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not least <= value <= MOST_SECONDS
    ):
        raise bad(name, value, f"seconds from {least:g} to {MOST_SECONDS:g}")
    return float(value)


def _flag(name: str, value: Any) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise bad(name, value, "true or false")
    return value


def _kind_of(value: Any) -> str:
    return {list: "a list", str: "text", type(None): "null"}.get(type(value), type(value).__name__)
