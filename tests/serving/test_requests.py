"""What a request's body may contain, and the call that is read from it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.serving.requests import KINDS, Call, Refused, read_call

CHAT = {"model": "qwen", "messages": [{"role": "user", "content": "hi"}]}
ASKS = {
    "chat": CHAT,
    "completions": {"model": "qwen", "prompt": "once"},
    "embeddings": {"model": "bge", "input": "text"},
    "images": {"model": "sdxl", "prompt": "a cat"},
    "rerank": {"model": "bge", "query": "a cat", "documents": ["a dog"]},
    "tokenize": {"model": "qwen", "prompt": "a cat"},
    "detokenize": {"model": "qwen", "tokens": [1, 2]},
    "load": {"model": "qwen"},
}
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def refusal(kind: str, body: Any) -> Refused:
    with pytest.raises(Refused) as refused:
        read_call(kind, body)
    return refused.value


def test_mistrals_word_for_a_forced_call_is_that_of_all_engines():
    """Its clients send `any`. No engine knows that word, and the call was refused."""
    assert read_call("chat", CHAT | {"tool_choice": "any"}).body["tool_choice"] == "required"


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_body_reaches_the_engine_as_it_was_sent(kind):
    """Fields that the gateway does not know are passed on, and the engine checks them."""
    body = ASKS[kind] | {"top_k": 40, "nested": {"x_inside": 1}}
    assert read_call(kind, body) == Call(kind, body["model"], body)


def test_our_fields_are_read_and_no_engine_sees_them():
    """The `x_*` fields are removed from the body, because engines refuse fields that they do not know."""
    ours = {
        "x_client_id": "bot", "x_priority": "high", "x_stay_warm": 60, "x_cooldown": 5,
        "x_thinking": False, "x_budget": 2.5,
    }  # fmt: skip
    call = read_call("chat", CHAT | ours, "ann")
    assert call == Call(
        "chat", "qwen", CHAT, client="ann/bot", profile="bot", importance=5, stay_warm=60.0,
        cooldown=5.0, thinking=False, budget=2.5,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["X_PRIORITY", "x-priority", "X-Priority"])
def test_our_fields_are_recognized_in_any_spelling(name):
    """A field such as `X-Priority`, in the spelling of a header, is read as `x_priority`."""
    assert read_call("chat", CHAT | {name: 1}) == Call("chat", "qwen", CHAT, importance=1)


@given(st.dictionaries(st.text(max_size=8).map("x_{}".format) | st.sampled_from([
    "x_client_id", "x_priority", "x_stay_warm", "x_cooldown", "x_thinking", "x_budget",
    "X_Priority",
]), ANYTHING, max_size=4))  # fmt: skip
def test_whatever_our_fields_hold_the_engine_sees_none_of_them(ours):
    """Any value of the `x_*` fields is accepted, or refused with a 400."""
    try:
        call = read_call("chat", CHAT | ours)
    except Refused as refused:
        assert refused.status == 400 and refused.message
    else:
        assert call.body == CHAT
        assert call.importance is None or 1 <= call.importance <= 100


@given(
    st.sampled_from(KINDS),
    ANYTHING
    | st.fixed_dictionaries(
        {},
        optional={
            name: ANYTHING
            for name in (
                "model",
                "messages",
                "prompt",
                "input",
                "stream",
                "max_tokens",
                "n",
                "temperature",
                "stop",
                "size",
                "seed",
                "encoding_format",
            )
        },
    ),
)
def test_every_invalid_body_gets_a_400_with_a_reason(kind, body):
    try:
        read_call(kind, body)
    except Refused as refused:
        assert refused.status == 400
        assert json.dumps(refused.body())


@pytest.mark.parametrize(("kind", "change", "param"), [
    ("chat", {"model": None}, "model"), ("chat", {"model": "q" * 300}, "model"),
    ("chat", {"model": "qwen\n"}, "model"), ("chat", {"messages": []}, "messages"),
    ("chat", {"messages": "hi"}, "messages"),
    ("chat", {"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
    ("chat", {"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    ("chat", {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ("chat", {"stream": "yes"}, "stream"), ("chat", {"max_tokens": 10**12}, "max_tokens"),
    ("chat", {"max_tokens": 0}, "max_tokens"), ("chat", {"max_tokens": True}, "max_tokens"),
    ("chat", {"temperature": float("nan")}, "temperature"),
    ("chat", {"temperature": "hot"}, "temperature"), ("chat", {"stop": [""]}, "stop"),
    ("chat", {"x_priority": "supreme"}, "x_priority"),
    ("chat", {"x_prioritty": "high"}, "x_prioritty"),
    ("chat", {"X-Never-Heard-Of": {"a": [1]}}, "X-Never-Heard-Of"),
    ("chat", {"x_priority": -1}, "x_priority"), ("chat", {"x_priority": True}, "x_priority"),
    ("chat", {"x_cooldown": float("inf")}, "x_cooldown"),
    ("chat", {"x_client_id": "a/b"}, "x_client_id"),
    ("completions", {"prompt": ["a", [1]]}, "prompt"), ("completions", {"prompt": []}, "prompt"),
    ("completions", {"prompt": [1, -1]}, "prompt"),
    ("completions", {"max_tokens": -1}, "max_tokens"), ("embeddings", {"input": []}, "input"),
    ("embeddings", {"input": ["a", [1]]}, "input"), ("embeddings", {"input": [[]]}, "input"),
    ("embeddings", {"input": [1, -1]}, "input"), ("embeddings", {"input": [True]}, "input"),
    ("embeddings", {"dimensions": 0}, "dimensions"),
    ("embeddings", {"encoding_format": "hex"}, "encoding_format"),
    ("embeddings", {"stream": True}, "stream"), ("images", {"size": "9999999x1"}, "size"),
])  # fmt: skip
def test_the_refusal_names_the_field(kind, change, param):
    """The refusal has the name of the invalid field in the caller's own spelling."""
    refused = refusal(kind, ASKS[kind] | change)
    assert (refused.status, refused.facts["param"]) == (400, param)
    assert param in refused.message


def test_half_a_surrogate_pair_is_the_callers_mistake():
    """Half a surrogate pair is valid JSON, but tokenizers fail on it. So it is refused with 400."""
    assert (
        refusal("chat", CHAT | {"messages": [{"role": "user", "content": "\ud800"}]}).status == 400
    )


def test_a_refusal_has_the_shape_that_openai_clients_read():
    """A refusal has the header `Retry-After` in whole seconds if a retry may succeed."""
    refused = Refused(503, "queue_full", "the queue is full", 0.2)
    assert refused.headers == {"Retry-After": "1"}
    assert refused.body() == {
        "error": {
            "message": "the queue is full",
            "type": "server_error",
            "code": "queue_full",
            "param": None,
        }
    }
    assert Refused(400, "bad_field", "no").headers == {}
