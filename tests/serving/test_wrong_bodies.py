"""Every value in a body is replaced by values of other types. No call fails on the server's side, or counts against the
model.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.testclient import TestClient

from gpu_runtime.serving.api.app import application
from tests.serving.app_client import OPERATOR, with_visitor
from tests.serving.harness import Harness

TEMPLATE = "{# tools <tool_call> <think> #}{% for m in messages %}{{ m.content }}{% endfor %}"
TOOL = {"type": "function", "function": {"name": "t", "parameters": {"type": "object"}}}
CALL = {"id": "a", "type": "function", "function": {"name": "t", "arguments": "{}"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "auto"}}
CHAT = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "a", "content": "x"},
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "t"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
    "stream_options": {"include_usage": True},
    "logit_bias": {"1": 1},
    "stop": ["a"],
    "x_priority": "high",
}
RESPONSE = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]},
        {"type": "function_call", "call_id": "a", "name": "t", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "x"},
    ],
    "tools": [{"type": "function", "name": "t", "parameters": {"type": "object"}}],
    "tool_choice": {"type": "function", "name": "t"},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 1,
}
MESSAGE = {
    "max_tokens": 2,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "t", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}]},
    ],
    "tools": [{"name": "t", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 10},
    "stop_sequences": ["a"],
}  # fmt: skip
OLLAMA = {
    "messages": [
        {"role": "user", "content": "a", "images": ["AA"]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "t", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "x"},
    ],
    "tools": [TOOL],
    "options": {"num_predict": 2, "stop": ["a"]},
    "format": {"type": "object"},
    "keep_alive": "5m",
    "stream": False,
}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSE,
    "/v1/messages": MESSAGE,
    "/api/chat": OLLAMA,
    "/api/generate": {"prompt": "a", "system": "s", "options": {"seed": 1}, "stream": False},
    "/v1/embeddings": {"input": ["a"], "encoding_format": "base64", "dimensions": 4},
    "/v1/rerank": {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1},
    "/v1/jobs": {"endpoint": "/v1/completions", "body": {"model": "qwen", "prompt": "a"}},
}
WRONG: tuple[Any, ...] = (None, 7, -1, "x", [], {}, [[]], [{}], {"type": []}, 10**40)


def variants(body: Any) -> Iterator[Any]:
    """Copies of `body` in which one value is another one, or is missing."""
    yield from WRONG
    keys = list(body) if isinstance(body, dict) else []
    for key in range(len(body)) if isinstance(body, list) else keys:
        for one in variants(body[key]):
            changed = copy.copy(body)
            changed[key] = one
            yield changed
        shorter = copy.copy(body)
        del shorter[key]
        yield shorter


@contextmanager
def served(**options: Any) -> Iterator[tuple[TestClient, Any]]:
    """A client of a server with the model qwen, and the server's gateway."""
    made = Harness(qwen=4, options={"qwen": options})
    app = with_visitor(application(made.rt, lambda: made.gateway), OPERATOR)
    with TestClient(app, raise_server_exceptions=False) as http:
        yield http, made.gateway
        http.portal.call(made.gateway.close)
    made.rt.close()


@pytest.mark.thorough
@pytest.mark.parametrize("path", BODIES)
def test_a_value_of_another_type_is_refused_or_answered(path):
    with served(chat_template=TEMPLATE) as (http, gateway):
        for body in variants({"model": "qwen", **BODIES[path]}):
            answer = http.post(path, json=body)
            assert answer.status_code < 500, (body, answer.text)
        assert all(one.failures == 0 for one in gateway.state().breakers.values())


HI = [{"role": "user", "content": "hi"}]
PATHS = [
    ("/v1/responses", {"input": "hi", "max_output_tokens": -1}, "max_output_tokens"),
    (
        "/v1/responses",
        {"input": "hi", "tools": [{**TOOL["function"], "type": "function"}]},
        "tools",
    ),
    ("/v1/responses", {"input": "hi " * 2_000_000}, "the prompt has"),
    ("/v1/messages", {"messages": HI, "max_tokens": 2, "stop_sequences": [1]}, "stop_sequences"),
    ("/api/chat", {"messages": HI, "options": {"num_predict": 10**9}}, "options.num_predict"),
    ("/api/chat", {"messages": HI, "options": {"temperature": 9}}, "options.temperature"),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": -1}, "max_tokens"),
]


@pytest.mark.parametrize(("path", "body", "field"), PATHS)
def test_the_message_names_a_field_that_is_in_the_body(path, body, field):
    with served() as (http, _):
        answer = http.post(path, json={"model": "qwen", **body})
        error = answer.json()["error"]
        text = error if isinstance(error, str) else error["message"]
        assert answer.status_code in (400, 413) and text.startswith(field), text
        if isinstance(error, dict) and error.get("param"):
            assert error["param"].startswith(field)
