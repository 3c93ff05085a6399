"""Which fields of a request each backend can serve. A field is served or refused, and never ignored."""

import contextlib
import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.facts import ModelSpec
from gpu_runtime.serving.requests import (
    CALL_FIELDS,
    CHECKED_BACKENDS,
    SAMPLING,
    Refused,
    read_by_server,
    read_call,
    require_fields,
    sampling,
    serves,
)
from tests.serving.harness import refusal

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "http.md"
NAMES = {"llama_cpp": "llama.cpp", "transformers": "transformers"}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
    "completions": {"prompt": "hi"},
    "embeddings": {"input": "hi"},
    "rerank": {"query": "hi", "documents": ["hi"]},
    "tokenize": {"prompt": "hi"},
    "detokenize": {"tokens": [1]},
}
# A value of each field that has an effect.
VALUES: dict[str, Any] = {
    "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 2,
    "max_completion_tokens": 2, "stop": ["END"], "seed": 7, "temperature": 1, "top_p": 1,
    "top_k": -1, "min_p": 0.1, "typical_p": 1, "repeat_penalty": 2, "repetition_penalty": 2,
    "presence_penalty": 1, "frequency_penalty": 1, "mirostat_mode": 2, "mirostat_tau": 5,
    "mirostat_eta": 0.1, "logit_bias": {"5": -100}, "response_format": {"type": "json_object"},
    "tools": [{"type": "function", "function": {"name": "now", "parameters": {}}}],
    "tool_choice": "required", "functions": [{"name": "now", "parameters": {}}],
    "function_call": {"name": "now"}, "parallel_tool_calls": False, "n": 2, "best_of": 2,
    "echo": True, "suffix": "end", "logprobs": True, "top_logprobs": 2, "encoding_format": "base64",
    "dimensions": 8, "truncate": True, "add_special_tokens": True, "top_n": 1,
    "return_documents": True, "reasoning_effort": "low",
}  # fmt: skip
_OTHERS = {("completions", "logprobs"): {"logprobs": 3}}  # VALUES has the value for a chat
_TOGETHER = {"top_logprobs": {"logprobs": True}}
NEEDED = ("model", *(name for body in BODIES.values() for name in body))
OPTIONAL = [name for name in CALL_FIELDS if name not in NEEDED]


def fields_for(kind: str, name: str) -> dict[str, Any]:
    """The field `name` with its value for a call of this `kind`, and the fields that it needs."""
    return _OTHERS.get((kind, name)) or {name: VALUES[name], **_TOGETHER.get(name, {})}


def call(kind: str, **fields: Any) -> Any:
    return read_call(kind, {"model": "qwen", **BODIES[kind], **fields})


@pytest.mark.parametrize("name", OPTIONAL)
@pytest.mark.parametrize("backend", CHECKED_BACKENDS)
def test_a_field_is_served_or_refused(backend, name):
    """The refusal names the field and the backend. Null and a value without effect are always accepted."""
    spec = ModelSpec("qwen", backend)
    kinds = [kind for kind in BODIES if kind != "rerank" or backend == "transformers"]
    for kind in kinds:
        has_field = kind in CALL_FIELDS[name].kinds
        require_fields(call(kind, **{name: None}), spec)
        for neutral in CALL_FIELDS[name].neutral if has_field else ():
            require_fields(call(kind, **{name: neutral}), spec)
        if not has_field:
            continue
        why = f"{name}=.* is not supported by .* {backend}"
        refused = refusal(400, param=name, match=why)
        with contextlib.nullcontext() if serves(backend, kind, name) else refused:
            require_fields(call(kind, **fields_for(kind, name)), spec)


def test_an_unknown_field_is_refused_with_the_nearest_name():
    with pytest.raises(Refused, match="no field 'temprature'; did you mean temperature"):
        require_fields(call("chat", temprature=1), ModelSpec("qwen", "llama_cpp"))
    require_fields(call("chat", temprature=1), ModelSpec("qwen", "vllm"))  # once it has started
    spec = ModelSpec("qwen", "transformers")
    prediction = {"type": "content", "content": "hi"}
    sent = {"user": "ann", "store": False, "service_tier": "auto", "verbosity": "medium"}
    require_fields(call("chat", **sent, prediction=prediction), spec)
    for name, value in {"store": True, "service_tier": "flex", "verbosity": "high"}.items():
        with pytest.raises(Refused, match=f"{name}={value!r} is not supported"):
            require_fields(call("chat", **{name: value}), spec)
    with pytest.raises(Refused, match="messages has no meaning in a call for embeddings"):
        require_fields(call("embeddings", messages=["a"]), ModelSpec("e", "transformers"))


FUNCTION = {"name": "now", "parameters": {}}
PARTS = [
    {"type": "text", "text": "hi"},
    {"type": "image_url", "image_url": {"url": "data:", "detail": "low"}},
]
CALLED = {"id": "a", "function": {"name": "now", "arguments": "{}"}}
WHOLE = {
    "messages": [
        {"role": "user", "name": "ann", "content": PARTS},
        {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
    "stream_options": {"include_usage": True},
}


def places(value: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Each object inside `value`, with its place. What is inside a schema or parameters is the user's."""
    items = enumerate(value) if isinstance(value, list) else []
    for name, inner in value.items() if isinstance(value, dict) else items:
        where = f"{place}[{name}]" if isinstance(value, list) else f"{place}.{name}".lstrip(".")
        if name not in ("schema", "parameters"):
            if isinstance(inner, dict):
                yield where, inner
            yield from places(inner, where)


@pytest.mark.parametrize("backend", [*CHECKED_BACKENDS, "vllm", "llama-server", "ollama"])
def test_an_unknown_field_is_refused_at_every_depth(backend):
    """Servers ignore such a field. The message begins with its path, and a hint names a path that could be there."""
    spec, whole = ModelSpec("qwen", backend), copy.deepcopy(WHOLE)
    require_fields(call("chat", **whole), spec)
    found = list(places(whole))
    assert len(found) == 12
    for place, inner in found:
        known = next(name for name in inner if len(name) > 3)
        near = f"did you mean {place}.{known}?"
        for name, advice in ((f"{known}x", near), ("qqq", "Leave it out")):
            inner[name] = {"a": 1}
            with refusal(400, param=f"{place}.{name}") as refused:
                require_fields(call("chat", **whole), spec)
            assert advice in refused.value.message
            inner[name] = None  # an empty one has no effect
            require_fields(call("chat", **whole), spec)
            del inner[name]


def test_a_field_that_only_servers_read_reaches_them():
    part = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    sent = call("chat", messages=[{"role": "user", "content": [part]}])
    require_fields(sent, ModelSpec("qwen", "vllm"))
    with pytest.raises(Refused, match=r"messages\[0\].content\[0\].input_audio"):
        require_fields(sent, ModelSpec("qwen", "llama_cpp"))


@pytest.mark.parametrize("backend", [*CHECKED_BACKENDS, "vllm"])
def test_what_clients_send_back_of_an_answer_is_accepted(backend):
    """A message of an answer has fields that are empty, or that no later answer depends on."""
    said = {"role": "assistant", "content": "hi", "refusal": None, "annotations": [], "audio": None}
    said |= {"tool_calls": [{**CALLED, "type": "function", "index": 0}], "function_call": None}
    messages = [{"role": "user", "content": "hi"}, {**said, "reasoning_content": "hm"}]
    tools = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
    require_fields(call("chat", messages=messages, tools=tools), ModelSpec("qwen", backend))


@pytest.mark.parametrize("backend", [*CHECKED_BACKENDS, "vllm"])
def test_two_values_of_one_field_are_refused(backend):
    """One of them won, without a word."""
    spec = ModelSpec("qwen", backend)
    for kind, fields, names in (
        ("chat", {"max_tokens": 5, "max_completion_tokens": 9}, "tokens=9 and max_tokens=5"),
        ("chat", {"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repe.*penalty=1"),
        ("completions", {"max_tokens": 0, "max_completion_tokens": 9}, "max_tokens=0"),
    ):
        with refusal(400, match=f"{names}.* two names of one field"):
            require_fields(call(kind, **fields), spec)
    require_fields(call("chat", max_tokens=5, max_completion_tokens=5), spec)
    require_fields(call("chat", max_tokens=5, max_completion_tokens=None), spec)


def test_the_documented_table_is_the_table_of_the_code():
    found: dict[str, dict[str, bool]] = {}
    header = re.search(r"\| field \| (.*) \|\n\|[-|]+\|\n((?:\|.*\|\n)+)", DOCS.read_text())
    columns = header[1].split(" | ")
    assert columns == [NAMES[backend] for backend in CHECKED_BACKENDS]
    for line in header[2].splitlines():
        fields, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for name in re.findall(r"`(\w+)`", fields):
            found[name] = dict(zip(columns, (cell == "yes" for cell in cells), strict=True))
    expected = {
        name: {
            NAMES[backend]: any(serves(backend, kind, name) for kind in CALL_FIELDS[name].kinds)
            for backend in CHECKED_BACKENDS
        }
        for name in OPTIONAL
    }
    assert found == expected


@given(st.dictionaries(st.sampled_from([*SAMPLING]), st.sampled_from([None, 0, 0.0, 1, 0.5])))
def test_a_sampling_value_of_zero_is_a_value(body):
    """A temperature of 0 is the most usual one. Null is no value."""
    given = {name: value for name, value in body.items() if value is not None}
    assert sampling({**body, "model": "qwen"}, SAMPLING) == given


@pytest.mark.parametrize("value", [0, False, 0.0])
def test_no_value_but_an_empty_one_is_ignored(value):
    """A zero has an effect where true and false are expected, and the other way round."""
    with pytest.raises(Refused, match="no field"):
        require_fields(call("chat", unheard_of=value), ModelSpec("qwen", "llama_cpp"))
    with pytest.raises(Refused, match="no field"):
        read_by_server("m", "chat", {"unheard_of": value}, frozenset())
    with pytest.raises(Refused, match="its engine has no field 'logprobs'"):
        read_by_server("m", "completions", {"logprobs": 0}, frozenset())
    assert read_by_server("m", "chat", {"logprobs": False, "n": None}, frozenset()) == {}
