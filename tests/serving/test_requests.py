"""What a request's body may contain, and the call that is read from it."""

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.serving import requests
from gpu_runtime.serving.requests import KINDS, MOST_CHARACTERS, Call, Refused, read_call

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


def test_a_refusal_leaves_the_process_of_a_model_as_it_is():
    """A host of a fleet answered a caller's mistake with the error that its refusal cannot be sent."""
    refused = Refused(400, "not_supported", "n cannot be used", 2.0, param="n")
    again = pickle.loads(pickle.dumps(refused))
    assert vars(again) == vars(refused) and str(again) == "n cannot be used"


def test_mistrals_word_for_a_forced_call_is_that_of_all_engines():
    """Its clients send `any`. No engine knows that word, and the call was refused."""
    assert read_call("chat", CHAT | {"tool_choice": "any"}).body["tool_choice"] == "required"


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_body_reaches_the_engine_as_it_was_sent(kind):
    """Fields that the gateway does not know are passed on, and the engine checks them."""
    body = ASKS[kind] | {"top_k": 40, "nested": {"x_inside": 1}}
    assert read_call(kind, body) == Call(kind, body["model"], body)


def test_our_fields_are_read_and_no_engine_sees_them():
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
    assert read_call("chat", CHAT | {name: 1}) == Call("chat", "qwen", CHAT, importance=1)


@given(st.dictionaries(st.text(max_size=8).map("x_{}".format) | st.sampled_from([
    "x_client_id", "x_priority", "x_stay_warm", "x_cooldown", "x_thinking", "x_budget",
    "X_Priority",
]), ANYTHING, max_size=4))  # fmt: skip
def test_whatever_our_fields_hold_the_engine_sees_none_of_them(ours):
    try:
        call = read_call("chat", CHAT | ours)
    except Refused as refused:
        assert refused.status == 400 and refused.message
    else:
        assert call.body == CHAT
        assert call.importance is None or 1 <= call.importance <= 100


FIELDS = (
    "model messages prompt input stream max_tokens n temperature stop size seed encoding_format"
).split()


@given(
    st.sampled_from(KINDS),
    ANYTHING | st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, ANYTHING)),
)
def test_every_invalid_body_gets_a_400_with_a_reason(kind, body):
    try:
        read_call(kind, body)
    except Refused as refused:
        assert refused.status == 400
        assert json.dumps(refused.body())


def said(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


# The kind of a call, a field that is made from a number, and the least and the largest number that is accepted.
LIMITS: list[tuple[str, Any, int | None, int]] = [
    ("chat", lambda n: {"messages": CHAT["messages"] * n}, 1, requests.MAX_MESSAGES),
    ("chat", lambda n: said("x" * n), 0, MOST_CHARACTERS),
    ("completions", lambda n: {"prompt": "x" * n}, 0, MOST_CHARACTERS),
    ("completions", lambda n: {"prompt": ["a"] * n}, 1, requests.MAX_PROMPTS),
    ("embeddings", lambda n: {"input": ["a"] * n}, 1, requests.MAX_TEXTS),
    ("embeddings", lambda n: {"input": ["x" * n, ""]}, 0, MOST_CHARACTERS),
    ("embeddings", lambda n: {"input": [n]}, 0, 2**31 - 1),
    ("embeddings", lambda n: {"dimensions": n}, 1, 65_536),
    ("rerank", lambda n: {"documents": ["a"] * n}, 1, requests.MAX_TEXTS),
    ("rerank", lambda n: {"query": "x" * n, "documents": [""]}, 1, MOST_CHARACTERS),
    ("detokenize", lambda n: {"tokens": [1] * n}, 1, requests.MAX_TOKENS),
    ("chat", lambda n: {"model": "q" * n}, 1, requests.MAX_NAME_LENGTH),
    ("chat", lambda n: {"x_client_id": "q" * n}, 1, requests.MAX_CLIENT_LENGTH),
    ("chat", lambda n: {"x_priority": n}, 1, 100),
    ("chat", lambda n: {"x_stay_warm": n}, 0, 86_400),
    ("chat", lambda n: {"x_cooldown": n}, 0, 86_400),
    ("chat", lambda n: {"x_budget": n}, 1, 86_400),
    ("chat", lambda n: {"max_tokens": n}, 1, requests.MAX_TOKENS),
    ("completions", lambda n: {"max_tokens": n}, 0, requests.MAX_TOKENS),
    ("chat", lambda n: {"n": n}, 1, 128),
    ("chat", lambda n: {"seed": n}, -(2**63), 2**63 - 1),
    ("chat", lambda n: {"top_k": n}, -1, requests.MAX_TOKENS),
    ("chat", lambda n: {"logprobs": True, "top_logprobs": n}, 0, 20),
    ("completions", lambda n: {"logprobs": n}, 0, 20),
    ("chat", lambda n: {"temperature": n}, 0, 2),
    ("chat", lambda n: {"top_p": n}, 0, 1),
    ("chat", lambda n: {"presence_penalty": n}, -2, 2),
    ("chat", lambda n: {"repetition_penalty": n}, 1, 10),
    ("chat", lambda n: {"mirostat_mode": n}, 0, 2),
    ("chat", lambda n: {"logit_bias": {"5": n}}, -100, 100),
    ("chat", lambda n: {"stop": ["a"] * n}, 0, 16),
    ("images", lambda n: {"size": f"{n}x1"}, 1, 4096),
    ("images", lambda n: {"size": f"1x{n}"}, 1, 4096),
]


@pytest.mark.parametrize(("kind", "field", "least", "most"), LIMITS)
def test_a_value_at_its_limit_is_accepted_and_one_beyond_is_refused(kind, field, least, most):
    for number in (least, most):
        assert read_call(kind, ASKS[kind] | field(number))
    for number in (least - 1, most + 1):
        if number >= 0 or isinstance(next(iter(field(-1).values())), int):
            refused = refusal(kind, ASKS[kind] | field(number))
            too_long = number > most == MOST_CHARACTERS
            assert refused.status == (413 if too_long else 400)


@pytest.mark.parametrize(("more", "thinks"), [
    ({}, None), ({"reasoning_effort": "none"}, False), ({"reasoning_effort": "low"}, True),
    ({"x_thinking": False, "reasoning_effort": "low"}, False),
    ({"x_thinking": True, "reasoning_effort": "none"}, True),
])  # fmt: skip
def test_our_own_word_on_thinking_counts_before_an_effort(more, thinks):
    assert read_call("chat", CHAT | more).thinking is thinks


@pytest.mark.parametrize(("kind", "change", "param"), [
    ("chat", {"model": None}, "model"),
    ("chat", {"model": "qwen\n"}, "model"), ("chat", {"x_budget": 0.0009}, "x_budget"),
    ("chat", {"messages": "hi"}, "messages"),
    ("chat", {"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
    ("chat", {"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    ("chat", {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ("chat", {"stream": "yes"}, "stream"), ("chat", {"max_tokens": True}, "max_tokens"),
    ("chat", {"top_k": 1.5}, "top_k"), ("chat", {"min_p": 1.01}, "min_p"),
    ("chat", {"logit_bias": {"the": 1}}, "logit_bias"), ("chat", {"logit_bias": []}, "logit_bias"),
    ("chat", {"tools": {}}, "tools"), ("chat", {"response_format": "json"}, "response_format"),
    ("chat", {"stream_options": True}, "stream_options"), ("chat", {"echo": 1}, "echo"),
    ("chat", {"temperature": float("nan")}, "temperature"),
    ("chat", {"temperature": "hot"}, "temperature"), ("chat", {"stop": [""]}, "stop"),
    ("chat", {"x_priority": "supreme"}, "x_priority"),
    ("chat", {"x_prioritty": "high"}, "x_prioritty"),
    ("chat", {"X-Never-Heard-Of": {"a": [1]}}, "X-Never-Heard-Of"),
    ("chat", {"x_priority": True}, "x_priority"),
    ("chat", {"x_cooldown": float("inf")}, "x_cooldown"),
    ("chat", {"x_client_id": "a/b"}, "x_client_id"),
    ("completions", {"prompt": ["a", [1]]}, "prompt"),
    ("embeddings", {"input": ["a", [1]]}, "input"), ("embeddings", {"input": [[]]}, "input"),
    ("embeddings", {"input": [True]}, "input"),
    ("embeddings", {"encoding_format": "hex"}, "encoding_format"),
    ("embeddings", {"stream": True}, "stream"),
])  # fmt: skip
def test_the_refusal_names_the_field(kind, change, param):
    refused = refusal(kind, ASKS[kind] | change)
    assert (refused.status, refused.facts["param"]) == (400, param)
    assert param in refused.message


def test_half_a_surrogate_pair_is_the_callers_mistake():
    """Half a surrogate pair is valid JSON, but tokenizers fail on it."""
    assert refusal("chat", CHAT | said("\ud800")).status == 400


def test_a_refusal_has_the_shape_that_openai_clients_read():
    """A refusal has the header `Retry-After` in whole seconds if a retry may succeed, and not too early."""
    for seconds, header in ((0.0, "1"), (0.2, "1"), (1.0, "1"), (1.2, "2"), (59.5, "60")):
        refused = Refused(503, "queue_full", "the queue is full", seconds)
        assert refused.headers == {"Retry-After": header}
    error = {"message": "the queue is full", "code": "queue_full", "param": None}
    assert refused.body() == {"error": {**error, "type": "server_error"}}
    kinds = {400: "invalid_request", 404: "invalid_request", 413: "invalid_request"}
    for status, kind in {**kinds, 429: "rate_limit", 500: "server"}.items():
        refused = Refused(status, "bad_field", "no", param="n")
        assert refused.body()["error"]["type"] == f"{kind}_error" and refused.headers == {}
        assert refused.body()["error"]["param"] == "n"
