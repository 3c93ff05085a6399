"""Tool calls are read from the text of a model, in the format of its family."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.serving.api.anthropic import message_of
from gpu_runtime.serving.engines.openai_format import (
    FORMATS,
    ToolCallReader,
    Tools,
    format_of,
    joined_calls,
    tools_of,
    with_whole_arguments,
)
from tests.serving.harness import harness, refusal


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


TOOLS = Tools((tool("weather"), tool("time")))
WEATHER, TIME = ("weather", {"in": "Bern {1}"}), ("time", {})
BERN = '{"name": "weather", "arguments": {"in": "Bern {1}"}}'
NOW = '{"name": "time", "arguments": {}}'
LLAMA_BERN, LLAMA_NOW = (
    BERN.replace("arguments", "parameters"),
    '{"name": "time", "parameters": {}}',
)
OTHER = '{"name": "other", "parameters": {}}'
HERMES = f"Let me see.\n<tool_call>\n{BERN}\n</tool_call>\n<tool_call>{NOW}</tool_call>"
ARGS = '[TOOL_CALLS]weather[ARGS]{"in": "Bern {1}"}[TOOL_CALLS]time{}'
# Each text with the text before the calls, and the calls.
WRITTEN = [
    ("hermes", HERMES, "Let me see.\n", [WEATHER, TIME]),
    ("hermes", "a < b and <tool> are text", "a < b and <tool> are text", []),
    ("hermes", "<tool_call>{no json", "<tool_call>{no json", []),
    ("mistral", f"[TOOL_CALLS][{BERN}, {NOW}]", "", [WEATHER, TIME]),
    ("mistral", f" [{NOW}]", " ", [TIME]),
    ("mistral", ARGS, "", [WEATHER, TIME]),
    ("mistral", "I like [1] and [{", "I like [1] and [{", []),
    ("llama3", f"<|python_tag|>{LLAMA_BERN}; {LLAMA_NOW}", "", [WEATHER, TIME]),
    ("llama3", LLAMA_NOW, "", [TIME]),
    ("llama3", OTHER, OTHER, []),
    ("llama3", '{"a": 1}', '{"a": 1}', []),
    ("llama3", f"It is {LLAMA_NOW}", f"It is {LLAMA_NOW}", []),
]


@pytest.mark.parametrize(("format", "written", "text", "calls"), WRITTEN)
@given(st.lists(st.integers(0, 200), max_size=8))
def test_calls_are_found_however_the_text_is_cut(format, written, text, calls, cuts):
    """Text that is no valid call of a known tool stays text, to the letter."""
    reader = ToolCallReader(FORMATS[format], TOOLS)
    places = sorted({min(cut, len(written)) for cut in cuts})
    parts = [written[a:b] for a, b in zip([0, *places], [*places, len(written)], strict=True)]
    sent = "".join(reader.feed(part) for part in parts)
    rest = reader.end()
    found = joined_calls(reader.take())
    assert sent + rest == text and reader.is_complete == bool(calls)
    functions = [call["function"] for call in found]
    assert [(one["name"], json.loads(one["arguments"])) for one in functions] == calls
    assert len({call["id"] for call in found}) == len(found)
    assert all(len(call["id"]) == 9 and call["type"] == "function" for call in found)


@pytest.mark.parametrize(
    ("format", "written", "text", "calls"),
    [
        ("hermes", 'See: <tool_call>{"na', "See: ", []),
        ("hermes", f'<tool_call>{NOW[:-2]}"zone": "C', "", [("time", '{"zone": "C')]),
        ("hermes", f'<tool_call>{NOW}</tool_call><tool_call>{{"name": "wea', "", [("time", "{}")]),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"in": "}', "", [("weather", '{"in": "}')]),
        ("llama3", '{"a": 1, "b', '{"a": 1, "b', []),  # JSON that is no call stays text
    ],
)
def test_a_call_that_is_cut_off_shows_no_marks(format, written, text, calls):
    """The client gets the arguments as far as they were written, as from OpenAI, and the reason `length`."""
    for size in (1, 7, len(written)):
        reader = ToolCallReader(FORMATS[format], TOOLS)
        sent = "".join(reader.feed(written[at : at + size]) for at in range(0, len(written), size))
        assert sent + reader.end(cut=True) == text
        found = [one["function"] for one in joined_calls(reader.take())]
        assert [(one["name"], one["arguments"]) for one in found] == calls


def test_a_server_gets_no_arguments_that_are_no_json():
    """llama-server answers 500 to them, for ever. Everything else in the messages stays as it is."""
    function = {"name": "time", "arguments": '{"zone": "CE'}
    said = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": function}]}
    messages = [{"role": "user", "content": "hi"}, said, {"role": "tool", "content": "12:00"}]
    [first, changed, last] = with_whole_arguments(messages)
    assert (first, last) == (messages[0], messages[2])
    [call] = changed["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"cut_arguments": '{"zone": "CE'}
    whole = [{**said, "tool_calls": [{"id": "a", "function": {**function, "arguments": "{}"}}]}]
    assert with_whole_arguments(whole) == whole


@pytest.mark.parametrize(("template", "format"), [
    ("… <tool_call> …", "hermes"), ("… [TOOL_CALLS] …", "mistral"),
    ("… <|python_tag|> …", "llama3"), ('… {"name": …, "parameters": …} …', "llama3"),
    ("{{ tools }}", "hermes"),
])  # fmt: skip
def test_the_template_shows_the_format(template, format):
    assert format_of(template) is FORMATS[format]


def test_the_choice_of_tools():
    tools = [tool("weather"), tool("time")]
    assert tools_of({"tools": tools}) == TOOLS
    assert tools_of({"tools": tools, "tool_choice": "none"}) == Tools()
    assert tools_of({"tools": tools, "tool_choice": "required"}).forced == ("time", "weather")
    named = {"type": "function", "function": {"name": "time"}}
    assert tools_of({"tools": tools, "tool_choice": named}).forced == ("time",)
    other = {"function": {"name": "other"}}
    for some, choice in (
        ([{"type": "function"}], None),
        (["weather"], None),
        (tools, other),
        (tools, "any"),
        (None, "required"),
    ):
        with refusal(400, match="tool"):
            tools_of({"tools": some, "tool_choice": choice})


TEMPLATE = "{# tools <tool_call> #}{% for m in messages %}{{ m.content if loop.last }}{% endfor %}"
SAID = 'See: <tool_call>{"name": "time", "arguments": {"zone": "CET"}}</tool_call>'


@pytest.mark.parametrize(
    ("most", "arguments", "end"),
    [(64, '{"zone": "CET"}', "tool_calls"), (5, '{"zone":', "length")],
    ids=["whole", "cut"],
)
async def test_an_answer_has_its_tool_calls_apart_from_its_text(most, arguments, end):
    """A stream has the same calls as a whole answer. No route fails at a part of JSON."""
    function = {"name": "time", "arguments": arguments}
    given = {"tools": [tool("time")], "max_tokens": most}
    async with harness(qwen=4, options={"qwen": {"chat_template": TEMPLATE}}) as k:
        reply = await k.chat("qwen", SAID, **given)
        [choice] = reply.json["choices"]
        message = choice["message"]
        assert (choice["finish_reason"], message["content"]) == (end, "See: ")
        assert [call["function"] for call in message["tool_calls"]] == [function]
        _, block = message_of(reply.json)["content"]
        read = {"zone": "CET"} if end == "tool_calls" else {"cut_arguments": arguments}
        assert block["input"] == read
        stream = await k.chat("qwen", SAID, stream=True, **given)
        deltas = [event["choices"][0] async for event in stream.events]
        assert "".join(d["delta"].get("content") or "" for d in deltas) == "See: "
        parts = [part for d in deltas for part in d["delta"].get("tool_calls", ())]
        assert len(parts) > 1 or end == "length", "the arguments come piece by piece"
        [call] = joined_calls(parts)
        assert call["function"] == function and {part["index"] for part in parts} == {0}
        assert deltas[-1]["finish_reason"] == end
        for more in ({"tool_choice": "none", "tools": [tool("time")]}, {"tools": [tool("other")]}):
            [choice] = (await k.chat("qwen", SAID, **more)).json["choices"]
            assert choice["finish_reason"] == "stop"
            assert choice["message"] == {"role": "assistant", "content": SAID}


async def test_a_conversation_with_a_tool_reaches_the_template():
    """Templates expect arguments as an object and know no role `developer`. Cut arguments stay text."""
    template = (
        "{# tools #}{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls %}{% set a = c.function.arguments %}{{ c.function.name }}"
        "({{ a.zone or a.cut_arguments }}){% endfor %}|{% endfor %}"
    )
    call = {"id": "a", "type": "function"}
    call["function"] = {"name": "time", "arguments": '{"zone": "CET"}'}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Time?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "12:00", "tool_call_id": "a"},
    ]
    async with harness(qwen=4, options={"qwen": {"chat_template": template}}) as k:
        body = {"model": "qwen", "messages": messages, "tools": [tool("time")]}
        reply = await k.gateway.answer("chat", body)
        assert reply.json["choices"][0]["message"]["content"] == (
            "system:Be brief.|user:Time?|assistant:time(CET)|tool:12:00|"
        )
        call["function"]["arguments"] = '{"zone": "CE'
        reply = await k.gateway.answer("chat", body)
        assert '|assistant:time({"zone": "CE)|' in reply.json["choices"][0]["message"]["content"]


async def test_an_operator_may_let_tools_be_left_out():
    """Some clients send tools by default. The answer says that they had no effect; a required call is refused."""
    plain = {"chat_template": "{{ messages[-1].content }}"}
    options = {"qwen": {**plain, "leave_out_tools": True}, "phi": plain}
    async with harness(qwen=4, phi=4, options=options) as k:
        for stream in (False, True):
            given = {"tools": [tool("time")], "tool_choice": "auto", "stream": stream}
            reply = await k.chat("qwen", "hi", **given)
            assert reply.headers["X-GPU-Tools"] == "left out"
            if not stream:
                assert reply.json["choices"][0]["message"]["content"] == "hi"
                assert reply.json["x_gpu"]["tools"] == "left out"
                continue
            events = [event async for event in reply.events]
            assert ["x_gpu" in event for event in events][:2] == [True, False]
        assert "X-GPU-Tools" not in (await k.chat("qwen", "hi")).headers
        for name, choice in (("qwen", "required"), ("phi", "auto")):
            with refusal(400, match="^tools? ?|leave_out_tools"):
                await k.chat(name, "hi", tools=[tool("time")], tool_choice=choice)
