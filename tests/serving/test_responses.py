"""`/v1/responses` is the chat route in the format of OpenAI's Responses API."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai.types.responses import Response

from gpu_runtime.serving.api.responses import ResponsesWriter, TextTokens, chat_of
from gpu_runtime.serving.requests import Refused, Reply
from tests.serving.harness import refusal
from tests.serving.loopback import END, chunk

HI = {"model": "qwen", "input": "hi"}
TOOL = {"type": "function", "name": "time", "parameters": {"type": "object"}}


def test_a_conversation_is_translated():
    """The calls of one turn become one message, and thoughts stay with the answer that followed them."""
    call = {"type": "function_call", "name": "time", "arguments": '{"zone": "CET"}'}
    image = {"type": "input_image", "image_url": "https://a/b", "detail": "auto"}
    see = {"type": "output_text", "text": "See:"}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "What?"}, image]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "The clock."}]},
        {"type": "message", "role": "assistant", "content": [see]},
        {**call, "call_id": "a"},
        {**call, "call_id": "b"},
        {"type": "function_call_output", "call_id": "a", "output": "12:00"},
    ]
    chat = chat_of({**HI, "instructions": "Be brief.", "input": items})
    system, user, said, result = chat["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    image = {"type": "image_url", "image_url": {"url": "https://a/b"}}
    assert user == {"role": "user", "content": [{"type": "text", "text": "What?"}, image]}
    function = {"name": "time", "arguments": '{"zone": "CET"}'}
    calls = [{"id": id, "type": "function", "function": function} for id in "ab"]
    assert (said["role"], said["content"], said["tool_calls"]) == ("assistant", "See:", calls)
    assert said["reasoning_content"] == "The clock."
    assert result == {"role": "tool", "tool_call_id": "a", "content": "12:00"}


TOOLS = [{"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}]
NAMED = {"type": "function", "function": {"name": "time"}}
SCHEMA = {"name": "x", "schema": {"type": "object"}}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
SCORED = ["message.output_text.logprobs", "reasoning.encrypted_content"]


@pytest.mark.parametrize(
    ("field", "becomes"),
    [
        ({"tools": [TOOL]}, {"tools": TOOLS}),
        ({"tool_choice": {"type": "function", "name": "time"}}, {"tool_choice": NAMED}),
        ({"max_output_tokens": 9}, {"max_completion_tokens": 9}),
        (
            {"text": {"format": {"type": "json_schema", **SCHEMA}}},
            {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
        ),
        ({"reasoning": {"effort": "none"}}, {"reasoning_effort": "none"}),
        ({"store": False, "client_metadata": {"thread_id": "a"}}, {}),
        ({"x_client_id": "bot", "stream": True}, {"x_client_id": "bot", **STREAM}),
        ({"include": ["reasoning.encrypted_content"], "top_logprobs": 0}, {}),
        ({"include": SCORED}, {"logprobs": True, "top_logprobs": None}),
        ({"include": SCORED, "top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
    ],
)
def test_a_field_of_a_response_is_a_field_of_a_chat(field, becomes):
    assert chat_of({**HI, **field}) == {**chat_of(HI), **becomes}


@pytest.mark.parametrize(("change", "param"), [
    ({"input": 7}, "input"), ({"input": [7]}, "input[0].type"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content"),
    ({"input": [{"type": "function_call_output", "output": 7}]}, "input[0].output"),
    ({"instructions": []}, "instructions"), ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": 7}, "tools"), ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"text": {"verbosity": "low"}}, "text"), ({"text": {"format": "json"}}, "text"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning"), ({"store": True}, "store"),
    ({"background": True}, "background"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"truncation": "auto"}, "truncation"), ({"include": ["file_search_call.results"]}, "include"),
    ({"include": "message.output_text.logprobs"}, "include"), ({"include": [{}]}, "include"),
    ({"top_logprobs": 2}, "top_logprobs"), ({"messages": []}, "messages"), ({"n": 2}, "n"),
])  # fmt: skip
def test_what_a_chat_has_not_is_refused(change, param):
    with refusal(400, param=param):
        chat_of({**HI, **change})
    with pytest.raises(Refused):
        chat_of([])


def scored(word: str | bytes) -> dict[str, Any]:
    """A token of a chat with its probability."""
    data = word.encode() if isinstance(word, str) else word
    text = data.decode("utf-8", "replace")
    return {"token": text, "bytes": list(data), "logprob": -1.0, "top_logprobs": []}


def with_tokens(delta: dict[str, Any], *words: str | bytes) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": {"content": [scored(word) for word in words]}}
    return {**chunk(""), "choices": [choice]}


SAID = (
    with_tokens({"content": ""}, "<think>"),
    with_tokens({"reasoning_content": "k "}, "k "),
    with_tokens({"reasoning_content": "no"}, "no"),
    with_tokens({"content": ""}, "</think>"),
    with_tokens({"content": "k"}, "\n\nk"),  # the spaces at the start of the text are left out
    with_tokens({"content": ""}, b"\xc3"),
    with_tokens({"content": "é"}, b"\xa9"),
    with_tokens({"content": " a"}, " ab"),
    with_tokens({"content": "b<"}, "<", "<tool_call>", "{"),
)


def test_a_text_has_the_probabilities_of_its_own_tokens():
    """Tokens of thoughts, of tags and of tool calls are left out."""
    found = read([*SAID, END])
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    words = [[token["token"] for token in event["logprobs"]] for event in deltas]
    assert words == [["\n\nk"], ["\ufffd", "\ufffd"], [" ab"], ["<"]]
    sent = [token for event in deltas for token in event["logprobs"]]
    [done] = [event for event in found if event["type"] == "response.output_text.done"]
    _, message = found[-1]["response"]["output"]
    assert done["logprobs"] == message["content"][0]["logprobs"] == sent
    assert message["content"][0]["text"] == "ké ab<"


def test_a_whole_text_has_the_same_probabilities_as_a_streamed_one():
    """An engine may leave out the bytes of a token."""
    entries = [entry for part in SAID for entry in part["choices"][0]["logprobs"]["content"]]
    entries[4]["bytes"] = None
    message = {"role": "assistant", "content": "ké ab<", "reasoning_content": "k no"}
    choice = {"message": message, "finish_reason": "stop", "logprobs": {"content": entries}}
    body = {**HI, "top_logprobs": 3}
    reply = Reply("m", "m", "", json={"model": "m", "choices": [choice]})
    response = Response.model_validate(ResponsesWriter(body).whole(reply))
    assert response.top_logprobs == 3
    [part] = response.output[1].content
    assert [token.token for token in part.logprobs] == ["\n\nk", "\ufffd", "\ufffd", " ab", "<"]
    assert bytes(part.logprobs[0].bytes) == b"\n\nk"


def test_tokens_that_do_not_make_the_text_are_kept():
    """If bytes are no valid UTF-8, the text has a replacement character, and is not found among the bytes."""
    tokens = TextTokens()
    tokens.add([scored(b"a\xff")])
    assert len(tokens.take("a\ufffd")) == 1 and tokens.take("b") == []


class Chunks:
    def __init__(self, chunks: list[dict[str, Any]]) -> None:
        self._chunks, self.closed = iter(chunks), False

    def __aiter__(self) -> Chunks:
        return self

    async def __anext__(self) -> dict[str, Any]:
        try:
            return next(self._chunks)
        except StopIteration:
            raise StopAsyncIteration from None

    async def aclose(self) -> None:
        self.closed = True


def read(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events for these chunks of a chat."""
    reply = Reply("qwen", "qwen", "", events=Chunks(chunks))

    async def collect() -> list[bytes]:
        return [event async for event in ResponsesWriter(HI).events(reply)]

    lines = b"".join(asyncio.run(collect())).decode().splitlines()
    assert reply.events.closed
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


def test_parts_of_a_call_are_joined():
    parts = [
        {"index": 0, "id": "a", "function": {"name": "time", "arguments": '{"zo'}},
        {"index": 0, "function": {"arguments": 'ne": 1}'}},
    ]
    chunks = [
        {**chunk(""), "choices": [{"index": 0, "delta": {"tool_calls": [part]}}]} for part in parts
    ]
    found = read([*chunks, END])
    [item] = found[-1]["response"]["output"]
    assert (item["call_id"], item["name"], item["arguments"]) == ("a", "time", '{"zone": 1}')
    done = [event for event in found if event["type"] == "response.function_call_arguments.done"]
    assert done[0]["arguments"] == '{"zone": 1}'


def test_an_error_in_a_started_stream_is_its_last_event():
    error = Refused(500, "broken_off", "the answer broke off").body()
    found = read([chunk("one"), error])
    assert [event["type"] for event in found][-2:] == ["response.output_text.delta", "error"]
    assert (found[-1]["code"], found[-1]["message"]) == ("broken_off", "the answer broke off")
