"""JSON schemas for llama.cpp: what its grammars enforce is enforced, and all else is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.serving.engines.llama_schemas import enforceable, plain_pattern
from gpu_runtime.serving.engines.tool_calls import tools_of
from gpu_runtime.serving.requests import Refused
from tests.serving.harness import answer_text
from tests.serving.loops import in_loop
from tests.serving.test_engines import sources, with_models  # noqa: F401 - a fixture

PLACE = {
    "type": "object",
    "properties": {"name": {"enum": ["Bern", "Zürich"]}},
    "required": ["name"],
}
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
]
REFUSED: list[tuple[Any, str]] = [
    ({"type": "integer", "minimum": 5}, "minimum cannot be enforced"),
    ({"type": "object", "required": ["a"]}, "required cannot be enforced"),
    ({"anyOf": [{"type": "null"}], "type": "null"}, "type cannot be enforced together with anyOf"),
    ({"type": ["string", "null"], "maxLength": 3}, "maxLength cannot be enforced together with type"),
    ({"not": {}}, "not cannot be enforced"),
    ({"allOf": [PLACE]}, "allOf cannot be enforced"),
    ({"enum": []}, "enum must be a list with a value"),
    ({"anyOf": []}, "anyOf must be a list with a value"),
    ({"type": "string", "format": "uri"}, "format must be one of uuid"),
    ({"type": "string", "maxLength": 10**9}, "maxLength must be a whole number from 0 to 1000"),
    ({"type": "array", "minItems": True}, "minItems must be a whole number"),
    ({"type": "array", "items": [{}]}, "/items is no schema"),
    ({"properties": {"a": {"type": 7}}}, "type must be one of .* at /properties/a"),
    ({"anyOf": [{"type": "string", "maxLength": 999}] * 11}, "it repeats more than 10,000 values"),
    ({"enum": ["x" * 50] * 3000}, "more than 120,000 characters"),
    ({"type": "string", "pattern": "^a{1001}$"}, "pattern repeats more than 1000 times"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "why"), REFUSED)
def test_what_a_grammar_cannot_express_is_refused_and_not_ignored(schema, why):
    with pytest.raises(Refused, match=why) as refused:
        enforceable(schema, "qwen")
    assert (refused.value.status, refused.value.facts["param"]) == (400, "response_format")


def test_a_schema_of_many_levels_is_refused():
    deep: dict[str, Any] = {"type": "null"}
    for _ in range(64):
        deep = {"type": "array", "items": deep}
    with pytest.raises(Refused, match="more than 64 levels"):
        enforceable(deep, "qwen")


def test_for_a_hint_the_rest_is_left_out():
    """The parameters of a tool tell the model what to write. A missing bound is no wrong answer."""
    given = {
        "type": "object",
        "properties": {
            "count": {"type": "integer", "minimum": 0},
            "url": {"type": "string", "format": "uri", "pattern": "^(?=h)"},
            "other": {"not": {}},
        },
        "dependentRequired": {},
    }
    assert enforceable(given, "qwen", is_hint=True) == {
        "type": "object",
        "properties": {
            "count": {"type": "integer"},
            "url": {"type": "string"},
            "other": {"type": "value"},
        },
    }


@pytest.mark.parametrize(
    "pattern",
    ["^]$", "^a}$", "^(a)\\1$", "^(?=a)b$", "((", "a)", "^a**$", "^a|$", "^()$", '^"$', "^[^a]$"]
    + ["^[ -~]$", "^[\\d]$", "^\\s$", "^a\n$", "^a{2$", "^*$", "\\", "^$", 7],
)
def test_a_pattern_that_the_library_reads_wrongly_is_refused(pattern):
    """Some would make the library loop for ever (`^]$`), others would allow text that is no JSON (`^[^a]$`)."""
    with pytest.raises(Refused, match="pattern"):
        enforceable({"type": "string", "pattern": pattern}, "qwen")


UNITS = st.sampled_from(["a", "é", "-", "\\.", "\\d", "[a-c]", ".", "(b|c)", "x{2,3}", "z+"])


@given(st.lists(UNITS, min_size=1, max_size=4).map("".join), st.booleans(), st.booleans())
def test_a_plain_pattern_matches_the_same_texts(pattern, begins, ends):
    whole = "^" * begins + pattern + "$" * ends
    ours = re.compile(plain_pattern(whole))
    for text in ("abx", "é.", "-5", "xxz", "azz", "b", "aXc", "..", ""):
        assert bool(ours.search(text)) == bool(re.search(whole, text))


@pytest.mark.processes
@in_loop
async def test_every_answer_matches_its_schema(sources):  # noqa: F811
    """The model writes random words. Schemas that once ended its process are among these."""
    async with with_models(sources, "gguf") as k:
        pids = set()
        for schema in ENFORCED:
            format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            for seed in range(4):
                reply = await k.chat(
                    "gguf", "hi", response_format=format, max_tokens=180, seed=seed, temperature=1
                )
                if reply.json["choices"][0]["finish_reason"] == "stop":
                    jsonschema.validate(json.loads(answer_text(reply)), schema)
            with k.rt.use("gguf") as model:
                pids.add(model.pid)
        assert len(pids) == 1


@pytest.mark.processes
@in_loop
async def test_a_wrong_schema_is_the_callers_mistake(sources):  # noqa: F811
    """It neither ends the process of the model nor opens the breaker."""
    wrong = [schema for schema, _ in REFUSED] + [
        {"$ref": "https://example.com/x.json"},
        {"$ref": "#/none"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"type": "object", "properties": [1]},
        {"type": "object", "properties": {f"p{n}": {"type": "null"} for n in range(2000)}},
        {"type": "object", "properties": {"a": {"type": "null"}}, "required": 7},
    ]
    async with with_models(sources, "gguf") as k:
        for schema in wrong:
            format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            with pytest.raises(Refused) as refused:
                await k.chat("gguf", "hi", response_format=format, max_tokens=9)
            assert refused.value.status == 400, schema
        assert all(one.failures == 0 for one in k.gateway.state().breakers.values())
        with k.rt.use("gguf") as model, pytest.raises(Exception, match="cannot be read"):
            list(model.create_completion("a", grammar="root ::= (", max_tokens=2, stream=True))
        assert answer_text(await k.chat("gguf", "hi", max_tokens=2))


@pytest.mark.parametrize("name", ["writer", pytest.param("gguf", marks=pytest.mark.processes)])
@in_loop
async def test_the_definitions_of_a_tool_are_found_in_a_forced_call(name, sources):  # noqa: F811
    """The schema of the call contains the schemas of the tools, whose references begin at their own root.

    Two tools may have different definitions of the same name.
    """
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"tool{number}",
                "parameters": {
                    "type": "object",
                    "properties": {"at": {"$ref": f"#/{group}/Place"}},
                    "required": ["at"],
                    "additionalProperties": False,
                    group: {"Place": {"const": number}},
                },
            },
        }
        for number, group in enumerate(("$defs", "definitions"))
    ]
    template = "{{ tools | length }}{{ messages[-1]['content'] }}"
    async with with_models(sources, name, chat_template=template) as k:
        for number in range(2):
            choice = {"type": "function", "function": {"name": f"tool{number}"}}
            for wanted in (choice, "required"):
                options = {"max_tokens": 90, "tools": tools, "tool_choice": wanted}
                [answer] = (await k.chat(name, **options)).json["choices"]
                [call] = answer["message"]["tool_calls"]
                which = int(call["function"]["name"][-1])
                assert json.loads(call["function"]["arguments"]) == {"at": which}
                assert wanted == "required" or which == number


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
