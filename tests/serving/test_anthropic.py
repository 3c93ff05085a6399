"""`/v1/messages` is the chat route in the format of Anthropic's clients."""

import json
from typing import Any

import pytest
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter
from starlette.testclient import TestClient

from gpu_runtime.serving.api.anthropic import chat_of, message_of
from gpu_runtime.serving.api.app import application
from gpu_runtime.serving.requests import Refused
from tests.serving.app_client import OPERATOR, with_visitor
from tests.serving.harness import Harness, refusal

HI = {"model": "qwen", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"name": "time", "description": "The time.", "input_schema": {"type": "object"}}
TEMPLATE = (
    "{# tools <tool_call> <think> #}{% for m in messages %}{{ m.content if loop.last }}{% endfor %}"
)
SAID = 'See: <tool_call>{"name": "time", "arguments": {"zone": "CET"}}</tool_call>'


def messages(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_a_conversation_is_translated():
    """The results of tools become separate messages, which come before the text of the same message."""
    user = {"role": "user", "content": [{"type": "text", "text": "Time?"}]}
    thought = {"type": "thinking", "thinking": "The clock.", "signature": ""}
    used = {"type": "tool_use", "id": "a", "name": "time", "input": {"zone": "CET"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "12:00"}
    see, now = {"type": "text", "text": "See:"}, {"type": "text", "text": "And now?"}
    said = {"role": "assistant", "content": [thought, see, used]}
    back = {"role": "user", "content": [result, now]}
    system = [{"type": "text", "text": "Be brief."}]
    function = {"name": "time", "arguments": '{"zone": "CET"}'}
    call = {"id": "a", "type": "function", "function": function}
    assert chat_of({**HI, "system": system, "messages": [user, said, back]})["messages"] == [
        {"role": "system", "content": "Be brief."},
        user,
        {
            "role": "assistant",
            "content": [see],
            "reasoning_content": "The clock.",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "a", "content": "12:00"},
        {"role": "user", "content": [now]},
    ]


FUNCTION = {"name": "time", "description": "The time.", "parameters": {"type": "object"}}
ANY = {"type": "any", "disable_parallel_tool_use": True}


@pytest.mark.parametrize(
    ("field", "becomes"),
    [
        ({"tools": [TOOL]}, {"tools": [{"type": "function", "function": FUNCTION}]}),
        ({"tool_choice": ANY}, {"tool_choice": "required", "parallel_tool_calls": False}),
        ({"stop_sequences": ["END"]}, {"stop": ["END"]}),
        ({"metadata": {"user_id": "ann"}}, {}),
        ({"x_client_id": "bot"}, {"x_client_id": "bot"}),
        ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
        ({"thinking": {"type": "enabled"}}, {"x_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"x_thinking": False}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"thinking": {"type": "disabled"}, "x_thinking": True}, {"x_thinking": True}),
    ],
)
def test_a_field_of_anthropic_is_a_field_of_a_chat(field, becomes):
    """A field of our own decides if both are given."""
    assert chat_of({**HI, **field}) == {**HI, **becomes}


def test_images_are_translated():
    data = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    for source, url in (
        (data, "data:image/png;base64,AAAA"),
        ({"type": "url", "url": "https://a/b"}, "https://a/b"),
    ):
        content = [{"type": "image", "source": source}]
        [message] = chat_of({**HI, "messages": [{"role": "user", "content": content}]})["messages"]
        assert message["content"] == [{"type": "image_url", "image_url": {"url": url}}]


def test_pictures_in_the_result_of_a_tool_follow_it_in_the_users_message():
    """A chat's message of a tool has only text."""
    picture = {"type": "image", "source": {"type": "url", "url": "https://a/b"}}
    text = {"type": "text", "text": "The screen:"}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text, picture]}
    body = {**HI, "messages": [{"role": "user", "content": [result]}]}
    assert chat_of(body)["messages"] == [
        {"role": "tool", "tool_call_id": "a", "content": "The screen:"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://a/b"}}]},
    ]


@pytest.mark.parametrize(("change", "param"), [
    ({"max_tokens": None}, "max_tokens"), ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "system", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0]"),
    ({"system": 7}, "system"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ({"tools": 5}, "tools"), ({"tool_choice": "auto"}, "tool_choice"),
    ({"container": "x"}, "container"), ({"thinking": "on"}, "thinking"),
    ({"thinking": {"type": "between_tools"}}, "thinking"), ({"thinking": {"type": []}}, "thinking"),
])  # fmt: skip
def test_what_a_chat_has_not_is_refused(change, param):
    with refusal(400) as refused:
        chat_of({**HI, **change})
    assert refused.value.facts["param"].startswith(param)
    with pytest.raises(Refused):
        chat_of([])


@pytest.mark.parametrize(
    ("finish", "reason"),
    [("stop", "end_turn"), ("length", "max_tokens"), ("tool_calls", "tool_use")],
)
def test_the_reason_of_the_end_is_translated(finish, reason):
    message = {"role": "assistant", "content": "hi"}
    answer = {"model": "qwen", "choices": [{"message": message, "finish_reason": finish}]}
    assert message_of(answer)["stop_reason"] == reason


@pytest.fixture(scope="module")
def http():
    """A client of the application over a real gateway. Its model repeats the last message."""
    made = Harness(qwen=4, options={"qwen": {"chat_template": TEMPLATE}})
    app = with_visitor(application(made.rt, lambda: made.gateway), OPERATOR)
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client
        client.portal.call(made.gateway.close)
    made.rt.close()


def read(answer: Any) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream: the name and the data of each."""
    found = []
    for event in answer.text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_a_message_with_thoughts_and_a_tool_call_whole_and_streamed(http):
    """The events are those that Anthropic's client builds its message from."""
    body = {**HI, "messages": messages(f"<think>The clock.</think>{SAID}"), "tools": [TOOL]}
    answer = http.post("/v1/messages", json=body)
    message = answer.json()
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "qwen")
    thinking, text, call = message["content"]
    assert thinking == {"type": "thinking", "thinking": "The clock.", "signature": ""}
    assert text == {"type": "text", "text": "See: "}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "time", {"zone": "CET"})
    assert message["stop_reason"] == "tool_use" and message["usage"]["output_tokens"] > 0
    assert answer.headers["X-GPU-Model"] == "qwen"
    events = read(http.post("/v1/messages", json={**body, "stream": True}))
    checked = TypeAdapter(RawMessageStreamEvent)
    assert all(checked.validate_python(data).type == name for name, data in events)
    names = [name for name, _ in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-2:] == ["message_delta", "message_stop"]
    assert names.count("content_block_stop") == names.count("content_block_start") == 3
    begun = [data["content_block"]["type"] for _, data in events if "content_block" in data]
    assert begun == ["thinking", "text", "tool_use"]
    written = ["", "", ""]
    for name, data in events:
        if name == "content_block_delta":
            parts = data["delta"]
            [part] = parts.keys() - {"type"}
            written[data["index"]] += parts[part]
    assert written[:2] == ["The clock.", "See: "] and json.loads(written[2]) == {"zone": "CET"}
    last = dict(events)["message_delta"]
    assert last["delta"]["stop_reason"] == "tool_use" and last["usage"]["input_tokens"] > 0


def test_errors_are_in_the_format_of_anthropic(http):
    for change, status, kind in (
        ({"model": "qwem"}, 404, "not_found_error"),
        ({"top_k": -2}, 400, "invalid_request_error"),
        ({"messages": []}, 400, "invalid_request_error"),
    ):
        answer = http.post("/v1/messages", json={**HI, **change})
        assert answer.status_code == status
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
        assert answer.json()["type"] == "error" and answer.json()["error"]["type"] == kind
    assert http.get("/v1/messages").json()["error"]["type"] == "api_error"


def test_the_tokens_of_a_conversation_are_counted(http):
    """Anthropic's clients count before a call, to shorten the conversation in time. They mark what should be cached."""
    body = {"model": "qwen", "messages": messages("one two three")}
    body |= {"cache_control": {"type": "ephemeral"}}
    answer = http.post("/v1/messages/count_tokens", json=body)
    assert (answer.status_code, answer.json()) == (200, {"input_tokens": 3})
    whole = http.post("/v1/messages", json={**body, "max_tokens": 9}).json()
    assert whole["usage"]["input_tokens"] == 3
    refused = http.post("/v1/messages/count_tokens", json={"model": "qwen"})
    assert refused.status_code == 400 and "messages" in refused.json()["error"]["message"]
