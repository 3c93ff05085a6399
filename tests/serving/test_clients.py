"""The records of clients, and the changes that profiles and fields make to a prompt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.serving.engines import chat_template
from gpu_runtime.serving.records import MAX_CLIENTS, MAX_MODELS, Clients, Pattern
from gpu_runtime.serving.requests import read_call
from gpu_runtime.serving.tasks import Profile, apply_profile
from gpu_runtime.stop_text import StopText
from tests.serving.harness import refusal

CHAT = {"model": "qwen", "messages": [{"role": "user", "content": "hi"}]}


def test_a_clients_pattern_has_its_intervals_and_models():
    clients = Clients()
    for now, model in ((0.0, "a"), (10.0, "a"), (15.0, "b")):
        clients.enter("bot", model, now)
    clients.leave("bot", 0.0, 16.0)
    seen = Pattern(calls=3, running=2, last_at=15.0, every_seconds=9.0, models={"a": 2, "b": 1})
    assert clients.patterns() == {"bot": seen}


def test_a_cooldown_begins_at_the_end_of_the_call_for_its_client_only():
    clients = Clients()
    clients.enter("bot", "a", 0.0)
    clients.enter("bot", "a", 1.0)
    clients.leave("bot", 10.0, 5.0)
    with refusal(429, "cooldown", retry_after=2.5):
        clients.enter("bot", "a", 12.5)
    assert clients.patterns()["bot"].refused == 1
    clients.enter("other", "a", 12.5)
    clients.leave("bot", 0.0, 13.0)  # the end of another call does not shorten it
    clients.enter("bot", "a", 15.0)


def test_invented_names_fill_no_memory():
    clients = Clients()
    clients.enter("busy", "a", 0.0)
    for n in range(MAX_CLIENTS + 10):
        clients.enter(f"client{n}", "a", 1.0)
        clients.leave(f"client{n}", 0.0, 1.0)
    for n in range(MAX_MODELS + 10):
        clients.enter("busy", f"model{n}", 2.0)
    known = clients.patterns()
    assert len(known) <= MAX_CLIENTS and len(known["busy"].models) <= MAX_MODELS
    assert "client0" not in known


def test_the_body_overrides_the_profile():
    profile = Profile(
        "Be brief.", importance="batch", thinking=True, stay_warm_s=60.0, cooldown_s=5.0,
        defaults={"temperature": 0.2, "top_p": 0.5},
    )  # fmt: skip
    call = apply_profile(read_call("chat", {**CHAT, "temperature": 1.0}), profile)
    messages = [{"role": "system", "content": "Be brief."}, *CHAT["messages"]]
    assert call.body == {**CHAT, "temperature": 1.0, "top_p": 0.5, "messages": messages}
    assert (call.importance, call.thinking, call.stay_warm, call.cooldown) == (30, True, 60.0, 5.0)
    ours = {"x_priority": 1, "x_thinking": False, "x_stay_warm": 0, "x_cooldown": 9}
    call = apply_profile(read_call("chat", CHAT | ours), profile)
    assert (call.importance, call.thinking, call.stay_warm, call.cooldown) == (1, False, 0.0, 9.0)


def test_the_body_overrides_the_profile_under_the_fields_other_name_too():
    """The profile's `max_completion_tokens` won against the caller's `max_tokens`."""
    profile = Profile(defaults={"max_completion_tokens": 50, "repetition_penalty": 1.2})
    call = apply_profile(read_call("chat", {**CHAT, "max_tokens": 10}), profile)
    assert call.body == {**CHAT, "max_tokens": 10, "repetition_penalty": 1.2}


def test_a_profile_replaces_the_model_default():
    for asked, model in (("default", "phi"), ("qwen", "qwen")):
        call = read_call("chat", {**CHAT, "model": asked})
        assert apply_profile(call, Profile(model="phi")).model == model


def test_a_template_cannot_leave_its_sandbox():
    """A chat template comes with the model, from an unknown author, so it must not reach Python's internals."""
    for evil in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ):
        with pytest.raises(chat_template.BadConversation):
            chat_template.render(evil, CHAT["messages"])


def test_a_template_may_reject_a_conversation():
    with pytest.raises(chat_template.BadConversation, match="roles must alternate"):
        chat_template.render("{{ raise_exception('roles must alternate') }}", CHAT["messages"])


@given(
    st.text("abEND", max_size=30),
    st.lists(st.integers(0, 30), max_size=6),
    st.lists(st.sampled_from(["END", "ab", "a", "DN"]), min_size=1, max_size=3),
)
def test_a_stop_string_is_found_however_the_text_is_cut(text, cuts, stops):
    places = sorted({min(cut, len(text)) for cut in cuts})
    parts = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    stop = StopText(stops)
    sent = "".join(stop.feed(part) for part in parts)
    sent += "" if stop.hit else stop.rest()
    at = min((text.find(word) for word in stops if word in text), default=len(text))
    assert stop.hit == (at < len(text))
    assert sent == text[:at]
