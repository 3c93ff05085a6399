"""Reads a request's body into a `Call`: the fields for the engine, and our own `x_*` fields.

This module is pure. No engine sees an `x_*` field of the top level of the body. An unknown one is refused. Headers are
not read, because a proxy between the caller and this server may add headers. The last part finds too long prompts.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..errors import BadSetting
from ..facts import IMPORTANCE, ModelSpec, Value, parse_importance

Json = dict[str, Any]  # an object of JSON
LOAD = "load"  # a call that only brings its model to a device
KINDS = ("chat", "completions", "embeddings", "images", "rerank", "tokenize", "detokenize", LOAD)
MAX_TOKENS = 1_000_000  # a larger number for one answer is a mistake for any model
MAX_MESSAGES = 10_000
MAX_TEXTS = 2048  # the most texts of one call for embeddings
MAX_PROMPTS = 128  # the most prompts of one call for completions
MOST_LOGPROBS = 20  # the most tokens whose probabilities are given in place of one token
MAX_SECONDS = 86_400.0  # largest duration that a client may set: a day
MAX_NAME_LENGTH = 256
MAX_CLIENT_LENGTH = 128
OWN_FIELDS = ("x_client_id", "x_priority", "x_stay_warm", "x_cooldown", "x_thinking", "x_budget")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_EXAMPLE_MESSAGE = '{"role": "user", "content": "hi"}'


class Refused(Exception):
    """Raised when a call gets no answer.

    `status` is the HTTP status, `code` a word for programs (None: there is none), and `message` is for people. After
    `retry_after` seconds a retry may succeed; None: it would be refused too. `facts` has the figures of the message.
    Its entry `param` names the field of the body that is wrong.
    """

    def __init__(
        self,
        status: int,
        code: str | None,
        message: str,
        retry_after: float | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(status, code, message)  # from these, pickle makes it in another process
        self.status = status
        self.code = code
        self.message = message
        self.retry_after = retry_after
        self.facts = facts

    def __str__(self) -> str:
        return self.message

    @property
    def headers(self) -> dict[str, str]:
        """The header `Retry-After` in whole seconds, at least one; empty if no retry would help."""
        if self.retry_after is None:
            return {}
        return {"Retry-After": str(max(1, math.ceil(self.retry_after)))}

    def body(self) -> Json:
        """The error in the format that OpenAI's clients read."""
        kind = "invalid_request_error" if self.status < 429 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        facts = {"code": self.code, "param": self.facts.get("param")}
        return {"error": {"message": self.message, "type": kind, **facts}}


class Call(Value):
    """One request: the body for the engine, without the `x_*` fields, and the values of the `x_*` fields."""

    kind: str
    model: str  # as requested: a name, `task:NAME` or `provider:model`
    body: Json
    stream: bool = False
    client: str = ""  # the visitor of the token, then "/" and the program's own name
    profile: str = ""  # the program's own name alone (x_client_id)
    importance: int | None = None  # None: the profile's, else the model's
    highest: int = 1  # the highest importance that the visitor's key allows; a lower number is a higher importance
    stay_warm: float | None = None  # seconds that the model stays on its device; None: a default
    cooldown: float = 0.0  # seconds after this call in which this client's calls are refused
    thinking: bool | None = None  # on or off; None: the profile, the model or its template decides
    budget: float | None = None  # seconds for the whole answer


@dataclass
class Reply:
    """An answer: `json`, or `events` for a stream. The sender must close the answer, even if it cannot be sent."""

    model: str  # the model that answered
    asked: str  # the model that was requested
    because: str  # why another model answered; empty if the requested model answered
    json: Json | None = None
    events: Any = None  # `gateway.Streamed`
    headers: dict[str, str] = field(default_factory=dict)
    # The facts of the call in the request log. The last ones are added when a stream ends.
    facts: Mapping[str, Any] = field(default_factory=dict)

    async def aclose(self) -> None:
        """Frees everything that a streamed answer holds."""
        if self.events is not None:
            await self.events.aclose()


def read_call(kind: str, body: Any, client: str = "") -> Call:
    """The call of this `kind`, one of KINDS, that is described by a request's `body`. `client` is the visitor's name.

    Raises Refused with 400 for an invalid field, which the message names, and with 413 if the prompt is too long.
    """
    if kind not in KINDS:
        raise bad("kind", kind, f"one of {', '.join(KINDS)}")
    if not isinstance(body, Mapping):
        names = {list: "a list", str: "text", type(None): "null"}
        kind_of_body = names.get(type(body), type(body).__name__)
        text = f"the body is {kind_of_body}; it must be a JSON object"
        raise Refused(400, "bad_body", text, param=None)
    own, plain = _split(body)
    _require_utf8(plain)
    model = _model_name(plain)
    _CHECKS[kind](plain)
    count = characters(plain)
    if count > MOST_CHARACTERS:
        text = f"the prompt has {count:,} characters; at most {MOST_CHARACTERS:,} are accepted"
        raise Refused(413, "prompt_too_long", text, characters=count)
    check_numbers(plain, kind)
    stream = _stream(kind, plain)
    if plain.get("tool_choice") == "any":  # the word of Mistral's clients, which no engine knows
        plain["tool_choice"] = "required"
    profile = _client_id(own.get("x_client_id"))
    return Call(
        kind,
        model,
        plain,
        stream,
        client="/".join(filter(None, (client, profile))),
        profile=profile,
        importance=_importance(own.get("x_priority")),
        stay_warm=_seconds("x_stay_warm", own.get("x_stay_warm")),
        cooldown=_seconds("x_cooldown", own.get("x_cooldown")) or 0.0,
        thinking=_thinking(own.get("x_thinking"), plain),
        budget=_seconds("x_budget", own.get("x_budget"), least=0.001),
    )


def bad(param: str, value: Any, expected: str) -> Refused:
    """The refusal (400) of an invalid field `param`. Its message has the shortened `value` and what is `expected`."""
    shown = repr(value)
    if len(shown) > 60:
        shown = f"{shown[:57]}…"
    text = f"{param}={shown} cannot be used: it must be {expected}"
    return Refused(400, "bad_field", text, param=param)


def no_field(name: str, known: Iterable[str]) -> str:
    """The sentence that there is no field `name`, with the nearest of the `known` names."""
    close = difflib.get_close_matches(name[:60].lower(), list(known), n=1)
    return f"there is no field {name[:60]!r}" + (f"; did you mean {close[0]}?" if close else "")


def _split(body: Mapping[str, Any]) -> tuple[Json, Json]:
    """Two dicts: our own fields of `body`, and all other fields. Raises Refused for an unknown field of ours."""
    own = {}
    plain = {}
    for name, value in body.items():
        if isinstance(name, str) and name[:2].lower() in ("x_", "x-"):  # with - as in a header
            known = name.lower().replace("-", "_")
            if known not in OWN_FIELDS:
                raise Refused(400, "bad_field", no_field(name, OWN_FIELDS), param=name[:60])
            own[known] = value
        else:
            plain[name] = value
    return own, plain


def _require_utf8(body: Mapping[str, Any]) -> None:
    """Refuses a body with half of a surrogate pair. Such a body is valid JSON, but a tokenizer would fail on it."""
    try:
        msgspec.json.encode(body)
    except (UnicodeEncodeError, TypeError, RecursionError) as error:
        text = f"the body cannot be written as UTF-8 JSON: {error}"
        raise Refused(400, "bad_body", text, param=None) from None


def _stream(kind: str, body: Mapping[str, Any]) -> bool:
    stream = body.get("stream") or False
    if not isinstance(stream, bool):
        raise bad("stream", stream, "true or false")
    if stream and kind not in ("chat", "completions"):
        raise bad("stream", stream, f"left out: {kind} are not streamed")
    return stream


def _model_name(body: Mapping[str, Any]) -> str:
    name = body.get("model")
    is_name = isinstance(name, str) and name.strip() and name.isprintable()
    if not is_name or len(name) > MAX_NAME_LENGTH:
        expected = f"the name of a model, at most {MAX_NAME_LENGTH} letters; see GET /v1/models"
        raise bad("model", name, expected)
    return name


def _check_chat(body: Mapping[str, Any]) -> None:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or len(messages) > MAX_MESSAGES:
        expected = f"a list of 1 to {MAX_MESSAGES} messages, such as [{_EXAMPLE_MESSAGE}]"
        raise bad("messages", messages, expected)
    for at, message in enumerate(messages):
        _check_message(f"messages[{at}]", message)
    wants_logprobs = body.get("logprobs")
    if wants_logprobs is not None and not isinstance(wants_logprobs, bool):
        raise bad("logprobs", wants_logprobs, "true or false; top_logprobs has the number")
    if body.get("top_logprobs") and not wants_logprobs:
        raise bad("top_logprobs", body["top_logprobs"], "used together with logprobs: true")


def _check_message(place: str, message: Any) -> None:
    if not isinstance(message, Mapping):
        raise bad(place, message, f"an object such as {_EXAMPLE_MESSAGE}")
    role = message.get("role")
    if role not in ROLES:
        raise bad(f"{place}.role", role, f"one of {', '.join(ROLES)}")
    content = message.get("content")
    is_parts = isinstance(content, list) and all(isinstance(part, Mapping) for part in content)
    may_be_empty = content is None and role == "assistant"
    if not (isinstance(content, str) or is_parts or may_be_empty):
        raise bad(f"{place}.content", content, "text, or a list of parts")


def _check_completions(body: Mapping[str, Any]) -> None:
    prompts_of(body)
    count = body.get("logprobs")
    is_count = type(count) is int and 0 <= count <= MOST_LOGPROBS
    if count is not None and count is not False and not is_count:
        raise bad("logprobs", count, f"a whole number from 0 to {MOST_LOGPROBS}")


def _check_tokenize(body: Mapping[str, Any]) -> None:
    if not isinstance(body.get("prompt"), str):
        raise bad("prompt", body.get("prompt"), "text")


def prompts_of(body: Mapping[str, Any]) -> list[str | list[int]]:
    """The prompts in the `prompt` of a call for completions; each is a text or a list of tokens. Raises Refused (400).

    >>> prompts_of({"prompt": ["a", "b"]}), prompts_of({"prompt": [1, 2]})
    (['a', 'b'], [[1, 2]])
    """
    return [""] if body.get("prompt") == "" else _texts(body, "prompt", MAX_PROMPTS)


def _check_embeddings(body: Mapping[str, Any]) -> None:
    texts_of_embeddings(body)
    if body.get("encoding_format") not in (None, "float", "base64"):
        raise bad("encoding_format", body["encoding_format"], "float or base64")
    _flag("truncate", body.get("truncate"))


def texts_of_embeddings(body: Mapping[str, Any]) -> list[str | list[int]]:
    """The texts in the `input` of a call for embeddings; each is a text or a list of tokens. Raises Refused (400).

    >>> texts_of_embeddings({"input": "a"}), texts_of_embeddings({"input": [1, 2]})
    (['a'], [[1, 2]])
    """
    return _texts(body, "input", MAX_TEXTS)


def _texts(body: Mapping[str, Any], name: str, most: int) -> list[str | list[int]]:
    """The texts or lists of tokens in the field `name`, which is one of them or a list of at most `most`."""
    given = body.get(name)
    if isinstance(given, str) and given or _is_tokens(given):
        return [given]
    if isinstance(given, list) and 0 < len(given) <= most:
        if all(isinstance(text, str) for text in given) or all(map(_is_tokens, given)):
            return list(given)
    text = "text" if name == "prompt" else "text that is not empty"
    raise bad(name, given, f"{text}, or a list of 1 to {most} texts, or of lists of token numbers")


def _is_tokens(value: Any) -> bool:
    is_list = isinstance(value, list) and 0 < len(value) <= MAX_TOKENS
    return is_list and all(type(token) is int and 0 <= token < 2**31 for token in value)


def documents_of(body: Mapping[str, Any]) -> list[str]:
    """The texts of the `documents` of a call for reranking. Raises Refused (400)."""
    given = body.get("documents")
    if isinstance(given, list) and 0 < len(given) <= MAX_TEXTS:
        texts = [entry.get("text") if isinstance(entry, Mapping) else entry for entry in given]
        if all(isinstance(text, str) for text in texts):
            return texts
    raise bad("documents", given, f'a list of 1 to {MAX_TEXTS} texts or objects with "text"')


def _check_rerank(body: Mapping[str, Any]) -> None:
    if not isinstance(body.get("query"), str) or not body["query"]:
        raise bad("query", body.get("query"), "text that is not empty")
    documents_of(body)


def _check_detokenize(body: Mapping[str, Any]) -> None:
    if not _is_tokens(body.get("tokens")):
        raise bad("tokens", body.get("tokens"), "a list of token numbers")


def _check_images(body: Mapping[str, Any]) -> None:
    if not isinstance(body.get("prompt"), str) or not body["prompt"]:
        raise bad("prompt", body.get("prompt"), "text that is not empty")
    size = body.get("size")
    if size is not None and not (isinstance(size, str) and _is_size(size)):
        raise bad("size", size, "WIDTHxHEIGHT in pixels, each at most 4096, such as 1024x1024")


def _is_size(text: str) -> bool:
    found = re.fullmatch(r"([0-9]{1,4})x([0-9]{1,4})", text)
    sides = map(int, found.groups()) if found else [0]
    return text == "auto" or all(0 < side <= 4096 for side in sides)


_CHECKS = {
    "chat": _check_chat,
    "completions": _check_completions,
    "embeddings": _check_embeddings,
    "images": _check_images,
    "rerank": _check_rerank,
    "tokenize": _check_tokenize,
    "detokenize": _check_detokenize,
    LOAD: lambda body: None,
}
_RANGES: dict[str, tuple[float, float]] = {  # bounds without a point are those of whole numbers
    "max_tokens": (1, MAX_TOKENS),
    "max_completion_tokens": (1, MAX_TOKENS),
    "n": (1, 128),
    "best_of": (1, 128),
    "seed": (-(2**63), 2**63 - 1),
    "top_k": (-1, MAX_TOKENS),  # -1 and 0: all tokens
    "top_logprobs": (0, MOST_LOGPROBS),
    "mirostat_mode": (0, 2),
    "dimensions": (1, 65_536),
    "top_n": (1, MAX_TEXTS),
    "temperature": (0.0, 2.0),
    **dict.fromkeys(("top_p", "min_p", "typical_p", "mirostat_eta"), (0.0, 1.0)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (-2.0, 2.0)),
    **dict.fromkeys(("repeat_penalty", "repetition_penalty"), (0.01, 10.0)),
    "mirostat_tau": (0.0, 100.0),
}
_FLAGS = ("echo", "parallel_tool_calls", "return_documents", "add_special_tokens")
_OBJECTS = ("stream_options", "response_format", "logit_bias")
_LISTS = ("tools", "functions")
_PLAIN_TYPES: dict[str, tuple[type, str]] = {
    **dict.fromkeys(_FLAGS, (bool, "true or false")),
    **dict.fromkeys(_OBJECTS, (dict, "an object")),
    **dict.fromkeys(_LISTS, (list, "a list")),
}


def check_numbers(body: Mapping[str, Any], kind: str = "chat") -> None:
    """Refuses (400) values of `body`, of a call of this `kind`, at which an engine would fail."""
    for name, value in body.items():
        if value is None:
            continue
        if name in _RANGES:
            _check_range(name, value, kind)
        elif name in _PLAIN_TYPES and not isinstance(value, _PLAIN_TYPES[name][0]):
            raise bad(name, value, _PLAIN_TYPES[name][1])
    _check_stop(body.get("stop"))
    _check_logit_bias(body.get("logit_bias"))


def _check_range(name: str, value: Any, kind: str) -> None:
    least, most = _RANGES[name]
    if kind == "completions" and "max_" in name:
        least = 0  # with echo, a call may ask for the prompt's probabilities alone
    is_whole = isinstance(least, int)
    is_right = _is_number(value) and (isinstance(value, int) or not is_whole)
    if not (is_right and least <= value <= most):
        words = f"from {least} to {most}" if is_whole else f"from {least:g} to {most:g}"
        raise bad(name, value, f"a whole number {words}" if is_whole else f"a number {words}")


def _check_logit_bias(biases: Any) -> None:
    for token, bias in (biases or {}).items():
        is_id = isinstance(token, str) and token.isascii() and token.isdigit()
        if not is_id or not _is_number(bias) or not -100 <= bias <= 100:
            expected = "an object of token numbers and biases from -100 to 100"
            raise bad("logit_bias", {token: bias}, expected)


def _check_stop(stop: Any) -> None:
    stops = stop if isinstance(stop, list) else [stop]
    if stop is not None and (len(stops) > 16 or not all(isinstance(s, str) and s for s in stops)):
        raise bad("stop", stop, "text, or a list of at most 16 texts")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _client_id(value: Any) -> str:
    if value is None:
        return ""
    is_name = isinstance(value, str) and value.isprintable() and "/" not in value
    if not is_name or not 0 < len(value) <= MAX_CLIENT_LENGTH:
        expected = f"a name of at most {MAX_CLIENT_LENGTH} letters, without a slash"
        raise bad("x_client_id", value, expected)
    return value


def _importance(value: Any) -> int | None:
    """The importance in `value`: the name of a class, or a number from 1 to 100, where lower is more important."""
    if value is None:
        return None
    try:
        return parse_importance(value, least=1, most=100)
    except BadSetting:
        expected = f"{', '.join(IMPORTANCE)} or a number from 1 to 100; lower is more important"
        raise bad("x_priority", value, expected) from None


def _seconds(name: str, value: Any, least: float = 0.0) -> float | None:
    if value is None:
        return None
    if not _is_number(value) or not least <= value <= MAX_SECONDS:
        raise bad(name, value, f"seconds from {least:g} to {MAX_SECONDS:g}")
    return float(value)


def _flag(name: str, value: Any) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise bad(name, value, "true or false")
    return value


def _thinking(own: Any, body: Mapping[str, Any]) -> bool | None:
    """Whether the model thinks: our own field `x_thinking`, else any `reasoning_effort` but `none`."""
    effort = body.get("reasoning_effort")
    if effort is not None and effort not in EFFORTS:
        raise bad("reasoning_effort", effort, f"one of {', '.join(EFFORTS)}")
    if own is None and effort is not None:
        return bool(effort != "none")
    return _flag("x_thinking", own)


# -- sizes of prompts
#
# Tokenising a body of 32 MiB takes many seconds and cannot be interrupted. During that time the model answers no other
# call. So a limit of characters is checked before the call waits for its model. Later, the tokens of the prompt are
# counted piece by piece, until the prompt ends or is too long.

MOST_CHARACTERS = 4_000_000  # of all texts of one request: about a million tokens
LONGEST_TOKEN = 256  # characters; in usual vocabularies, the longest is a run of 128 spaces
PIECE_CHARACTERS = 32_768
CUT_TOKENS = 16  # a cut inside a token (also a special one) adds fewer tokens to the count


def characters(body: Mapping[str, Any]) -> int:
    """The number of characters in the texts of a request's `body`.

    >>> characters({"messages": [{"role": "user", "content": [{"type": "text", "text": "four"}]}]})
    4
    >>> characters({"input": ["a", "bc"], "model": "qwen"})
    3
    """
    return sum(map(len, texts(body)))


def given_tokens(body: Mapping[str, Any]) -> int:
    """The number of tokens in the prompt or input of a request's `body` that are given as numbers.

    >>> given_tokens({"prompt": [[1, 2], [3]]}), given_tokens({"prompt": "a"})
    (3, 0)
    """
    lists = [value for name in ("prompt", "input") if isinstance(value := body.get(name), list)]
    parts = [part for given in lists for part in given]
    return sum(len(part) if isinstance(part, list) else isinstance(part, int) for part in parts)


def texts(body: Mapping[str, Any]) -> Iterator[str]:
    """The texts in the prompt, input, query, documents and messages of a request's `body`."""
    values = [body.get(name) for name in ("prompt", "input", "query", "documents")]
    messages = body.get("messages")
    known = messages if isinstance(messages, list) else ()
    values += [message.get("content") for message in known if isinstance(message, Mapping)]
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            for part in value:
                text = part.get("text") if isinstance(part, Mapping) else part
                if isinstance(text, str):
                    yield text


def tokens_if_too_many(
    text: str, most: int, count: Callable[[str], int], cancelled: Callable[[], bool] = lambda: False
) -> int:
    """A lower bound of the number of tokens in `text` if that number is more than `most`, otherwise 0.

    `count` returns the number of tokens of a piece of text. Counting ends as soon as the result is known, or when
    `cancelled()` is true, with the result 0.
    """
    counted = 0
    for number, at in enumerate(range(0, len(text), PIECE_CHARACTERS)):
        if cancelled():
            return 0
        counted += count(text[at : at + PIECE_CHARACTERS])
        at_least = counted - number * CUT_TOKENS
        if at_least > most:
            return at_least
    return 0


# -- which fields of a request each kind of engine can serve. This module is pure ------------------
#
# No field is ignored silently: if a field has an effect that the engine cannot serve, the call is refused with 400.
# `requests` checks the ranges of values for all engines. An engine that is a server ignores fields that it does not
# read. So a call is checked against the fields that the server reads, if they are known. Clouds check them themselves.


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


CALL_FIELDS: dict[str, Field] = {
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
        if name in call.body and call.kind in CALL_FIELDS[name].kinds:
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
            if name not in CALL_FIELDS:
                why = no_field(name, known)
            text = f"{name[:60]} cannot be used with {model}: {why}. Leave it out"
            raise Refused(400, "not_supported", text, param=name[:60])
    return read


def serves(backend: str, kind: str, name: str) -> bool:
    """Whether models of this `backend` can serve the field `name` in calls of this `kind`."""
    field = CALL_FIELDS.get(name)
    return field is not None and kind in field.kinds and backend in field.backends


def _is_neutral(name: str, value: Any) -> bool:
    neutral = CALL_FIELDS[name].neutral if name in CALL_FIELDS else _NEUTRAL_ONLY.get(name, ())
    return any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in neutral)


def _is_empty(value: Any) -> bool:
    return any(value is empty or (empty is not None and value == empty) for empty in _NOTHING)


def _refusal(spec: ModelSpec, kind: str, name: str, value: Any) -> Refused:
    others = f"nor by other models of the backend {spec.backend}"
    text = f"{name}={repr(value)[:60]} is not supported by {spec.name}, {others}"
    if name in CALL_FIELDS and kind not in CALL_FIELDS[name].kinds:
        text = f"{name} has no meaning in a call for {kind}"
    if name not in CALL_FIELDS and name not in _NEUTRAL_ONLY:
        text = no_field(name, CALL_FIELDS)
    return Refused(400, "not_supported", f"{text}. Leave it out", param=name[:60])


def sampling(body: Mapping[str, Any], names: Mapping[str, str]) -> Json:
    """The fields of `body` that decide how the next token is chosen. `names` maps OpenAI's names to the engine's."""
    return {own: body[name] for name, own in names.items() if body.get(name) is not None}
