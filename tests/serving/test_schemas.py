"""JSON schemas: what the library llguidance enforces is enforced by both engines, and all else is refused."""

import json
from typing import Any

import jsonschema
import pytest

from gpu_runtime.serving.engines.base import grammar_of
from gpu_runtime.serving.engines.openai_format import tools_of
from gpu_runtime.serving.requests import Refused
from tests.serving.harness import answer_text, refusal, stream_text
from tests.serving.test_engines import forcing, sources, with_models  # noqa: F401 - a fixture

pytestmark = pytest.mark.thorough

NAMED = {"name": {"enum": ["Bern", "Zürich"]}}
PLACE = {"type": "object", "properties": NAMED, "required": ["name"]}
TREE = {
    "$defs": {"node": {"type": "object", "properties": {"a": {"$ref": "#/$defs/node"}}}},
    "$ref": "#/$defs/node",
}
ENFORCED = [
    {"enum": ['a"b', "c\\d", "\n", "é", "😀", 7, None, {"a": ["\u0000"]}]},
    {"const": '"]}\n::= root'},
    {"type": "object", "properties": {"\u0000": {"type": "null"}, "": {}, "root": {"const": 1}}},
    {"type": ["string", "null"]},
    {
        "anyOf": [
            {"type": "integer"},
            {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        ]
    },
    {"type": "array", "minItems": 2, "maxItems": 2},
    {"type": "array", "prefixItems": [{"const": 1}, {"type": "null"}]},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "format": "date"},
    {"type": "string", "pattern": r"^\d{3}-[A-F]+$", "description": "a number"},
    {"type": "string", "pattern": "cat|do."},
    {"type": "object", "additionalProperties": {"type": "null"}},
    {"type": "object", "properties": {"a": True}, "required": ["a"], "additionalProperties": False},
    TREE,
    # A property and a definition of the same name have different rules.
    {
        "$defs": {"place": PLACE},
        "type": "object",
        "properties": {"place": {"enum": ["x"]}, "b": {"$ref": "#/$defs/place"}},
        "required": ["place", "b"],
    },
    {"type": "integer", "minimum": 5},
    {"type": "integer", "minimum": -3, "exclusiveMaximum": 12, "multipleOf": 2},
    {"type": "number", "minimum": 0.5, "maximum": 0.75},
    {"type": "object", "required": ["a"]},
    {"type": ["string", "null"], "maxLength": 3},
    {"allOf": [PLACE, {"properties": {"name": {"minLength": 5}}}]},
    {"type": "string", "format": "uri", "maxLength": 30},
    {"type": "string", "pattern": "^[^a]{2}[ -~]$"},
    {"type": "string", "pattern": "^a{1001}$"},
    {"type": "object", "properties": {f"p{n}": {"type": "null"} for n in range(200)}},
]
REFUSED: list[tuple[Any, str]] = [
    ({"not": {}}, "not"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"if": {}}, "if"),
    ({"enum": []}, "empty"),
    ({"anyOf": []}, "empty"),
    ({"type": "string", "format": "date-tme"}, "date-tme"),
    ({"type": "array", "minItems": True}, "minItems"),
    ({"properties": {"a": {"type": 7}}}, "type must be"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
    ({"$ref": "https://example.com/x.json"}, "example.com"),
    ({"$ref": "#/none"}, "none"),
    ({"type": "object", "properties": [1]}, "properties"),
    ({"type": "object", "required": 7}, "required"),
    ({"enum": ["x" * 50] * 3000}, "more than 120,000 characters"),
]


@pytest.mark.parametrize(("schema", "why"), REFUSED)
def test_what_the_library_cannot_enforce_is_refused_and_not_ignored(schema, why):
    """An answer that does not match its schema would be worse than a refusal."""
    with refusal(400, param="response_format", match=why):
        grammar_of(schema, "qwen")


def test_for_a_hint_the_rest_is_left_out():
    """The parameters of a tool tell the model what to write. A missing bound is no wrong answer."""
    assert grammar_of({"type": "array", "uniqueItems": True, "not": {}}, "qwen", is_hint=True)


@forcing
async def test_every_answer_matches_its_schema(name, sources):  # noqa: F811
    """The model writes random words. Schemas that once ended the process of llama.cpp are among these."""
    async with with_models(sources, name) as k:
        complete = 0
        for schema in ENFORCED:
            format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            for seed in range(2):
                options = {"response_format": format, "max_tokens": 60, "seed": seed}
                reply = await k.chat(name, "hi", temperature=1, **options)
                if reply.json["choices"][0]["finish_reason"] == "stop":
                    complete += 1
                    jsonschema.validate(json.loads(answer_text(reply)), schema)
        assert complete > len(ENFORCED) // 2
        format = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "b"}}}
        stream = await k.chat(name, "hi", max_tokens=60, response_format=format, stream=True)
        assert json.loads(await stream_text(stream)) == "b"
        if name == "gguf":
            with k.rt.use(name) as model, pytest.raises(Exception, match="cannot be read"):
                list(model.create_completion("a", grammar="root ::= (", max_tokens=2, stream=True))


@forcing
async def test_a_wrong_schema_is_the_callers_mistake(name, sources):  # noqa: F811
    """It ends no process and opens no breaker. Only the first token shows that a schema has no answer."""
    endless = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    large = {"type": "object", "properties": {f"p{n}": {"type": "null"} for n in range(2000)}}
    async with with_models(sources, name) as k:
        for schema in [*(schema for schema, _ in REFUSED), endless, large]:
            format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            with pytest.raises(Refused) as refused:
                await k.chat(name, "hi", response_format=format, max_tokens=9)
            assert refused.value.status == 400, schema
        wanted = {"type": "json_schema", "json_schema": {"schema": REFUSED[0][0]}}
        with pytest.raises(Refused):  # also where a stream would first say how long it may be
            await k.chat(name, "hi", response_format=wanted, max_tokens=128_000, stream=True)
        assert all(one.failures == 0 for one in k.gateway.state().breakers.values())
        assert answer_text(await k.chat(name, "hi", max_tokens=2))


@pytest.mark.parametrize("name", ["writer", pytest.param("gguf", marks=pytest.mark.processes)])
async def test_the_definitions_of_a_tool_are_found_in_a_forced_call(name, sources):  # noqa: F811
    """Their references begin at the root of the tool. Two tools may define the same name."""
    tools = []
    for number, group in enumerate(("$defs", "definitions")):
        properties = {"at": {"$ref": f"#/{group}/Place"}}
        schema = {"type": "object", "properties": properties, "required": ["at"]}
        schema |= {"additionalProperties": False, group: {"Place": {"const": number}}}
        function = {"name": f"tool{number}", "parameters": schema}
        tools.append({"type": "function", "function": function})
    template = "{{ tools | length }}{{ messages[-1]['content'] }}"
    async with with_models(sources, name, chat_template=template) as k:
        for number in range(2):
            choice = {"type": "function", "function": {"name": f"tool{number}"}}
            for wanted in (choice, "required"):
                options = {"max_tokens": 90, "tools": tools, "tool_choice": wanted}
                [answer] = (await k.chat(name, **options)).json["choices"]
                [call] = answer["message"]["tool_calls"]
                assert answer["finish_reason"] == "tool_calls"
                assert answer["message"]["content"] is None
                which = int(call["function"]["name"][-1])
                assert json.loads(call["function"]["arguments"]) == {"at": which}
                assert wanted == "required" or which == number
    async with with_models(sources, name) as k:
        with pytest.raises(Refused, match="its chat template takes no tools"):
            await k.chat(name, tools=tools)


def test_a_schema_that_refers_to_itself_is_embedded_whole():
    node = {"type": "object", "properties": {"next": {"$ref": "#"}}}
    tool = {"type": "function", "function": {"name": "t", "parameters": node}}
    schema = tools_of({"tools": [tool], "tool_choice": "required"}).schema()
    assert schema["properties"]["arguments"] == {"$ref": "#/$defs/tool0"}
    moved = {"type": "object", "properties": {"next": {"$ref": "#/$defs/tool0"}}}
    assert schema["$defs"] == {"tool0": moved}
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"items": deep}
    for wrong in ([], {"$defs": [1]}, deep):
        tool["function"]["parameters"] = wrong
        with pytest.raises(Refused) as refused:
            tools_of({"tools": [tool]})
        assert refused.value.facts["param"] == "tools[0].function.parameters"
