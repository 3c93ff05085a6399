"""Engines that are servers, and clouds. In these tests a server on this machine plays both roles."""

import asyncio
import json
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_runtime.backends.engines import backend
from gpu_runtime.serving.choices import Cloud
from gpu_runtime.serving.engines.openai_http import HttpAdapter, HttpClient
from gpu_runtime.serving.fleet_server import _Place
from gpu_runtime.serving.records import traceparent
from gpu_runtime.serving.requests import Refused
from gpu_runtime.serving.tasks import ServingConfig, Task
from tests.serving.app_client import Exchange
from tests.serving.harness import Guard, answer_text, chat, harness, refusal, stream_text
from tests.serving.loopback import END, Loopback, chunk, completion, loopback
from tests.serving.loops import until


def engine(
    there: Loopback, chat_template: str | None = None, fields: frozenset[str] = frozenset()
) -> Any:
    """A function that makes adapters, as if `rt.use` had yielded the address of the server `there`."""

    def make_adapter(value: Any, spec: Any, http: Any) -> HttpAdapter:
        served = SimpleNamespace(base_url=there.url, model="theirs", chat_template=chat_template)
        served.headers = {"Authorization": "Bearer inside"}
        served.request_fields = {"chat": fields}
        return HttpAdapter(spec.name, served, http, spec)

    return make_adapter


async def test_the_engine_gets_its_own_name_and_the_caller_ours():
    async with loopback() as there, harness(qwen=4, make_adapter=engine(there)) as k:
        there.answers = [completion("hello")]
        reply = await k.chat("qwen", "hi", top_k=40, x_priority="high")
        assert (answer_text(reply), reply.json["model"]) == ("hello", "qwen")
        path, headers, body = there.requests[0]
        assert (path, headers["authorization"]) == ("/v1/chat/completions", "Bearer inside")
        assert body == {**chat("theirs", "hi"), "top_k": 40}


async def test_the_engine_gets_the_callers_trace():
    """For a stream too. A call without a trace gets none of another call."""
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    async with loopback() as there, harness(qwen=4, make_adapter=engine(there)) as k:
        there.answers = [completion("hello"), [chunk("one"), END, "[DONE]"], completion("hello")]
        token = traceparent.set(trace)
        await k.chat("qwen", "hi")
        await stream_text(await k.chat("qwen", stream=True))
        traceparent.reset(token)
        await k.chat("qwen", "hi")
        sent = [headers.get("traceparent") for _, headers, _ in there.requests]
        assert sent == [trace, trace, None]


async def test_a_host_of_a_fleet_has_the_routes_of_tokens_and_cuts_texts_off():
    """Other servers have no such routes, and a call is refused before they are asked. They got no `truncate`, and a
    host neither: in a fleet, a text that should be cut off was refused.
    """
    async with loopback() as there, harness(qwen=4, make_adapter=engine(there)) as k:
        with pytest.raises(Refused, match="no route for tokenize"):
            await k.gateway.answer("tokenize", {"model": "qwen", "prompt": "a"})
        server = SimpleNamespace(url=there.url.removesuffix("/v1"), token="t")
        place = _Place("qwen", "box1", server)
        there.answers = [{"model": "qwen", "tokens": [1], "count": 1}, {"data": []}]
        async with aclosing(HttpClient(proxies=False)) as http:
            adapter = HttpAdapter("qwen", place, http)
            answer = await adapter.answer("tokenize", {"model": "qwen", "prompt": "a"}, None)
            await adapter.answer("embeddings", {"input": "a", "truncate": True}, None)
        assert answer["id"], "Mistral's clients read no vectors without it"
        assert answer["tokens"] == [1] and there.requests[0][0] == "/v1/tokenize"
        assert there.requests[1][2] == {"model": "qwen", "input": "a", "truncate": True}


async def test_a_stream_is_passed_on_event_by_event():
    async with loopback() as there, harness(qwen=4, make_adapter=engine(there)) as k:
        gate = asyncio.Event()
        there.answers = [[chunk("one "), gate, chunk("two"), END, "[DONE]"]]
        reply = await k.chat("qwen", stream=True)
        assert reply.events.first["model"] == "qwen"
        gate.set()
        assert await stream_text(reply) == "one two"


async def test_a_caller_that_leaves_disconnects_from_the_engine():
    async with loopback() as there, harness(qwen=4, make_adapter=engine(there)) as k:
        gate = asyncio.Event()
        there.answers = [[chunk("one "), gate, *[chunk("x" * 4096)] * 10_000], [gate]]
        reply = await k.chat("qwen", stream=True)
        await reply.aclose()
        gate.set()
        await until(lambda: there.hung_up == 1)


async def test_a_call_waits_while_its_engine_restarts():
    """If calls failed, five quick ones would open the breaker for 30 s; a restart takes 2 s."""
    async with loopback() as there, harness(qwen=4) as k:
        server = SimpleNamespace(base_url=there.url, model="theirs", headers={})
        ready = [None]
        served = SimpleNamespace(ready_server=lambda: ready[-1])
        make = lambda value, spec, http: HttpAdapter(spec.name, served, http, spec)
        k.gateway._make_adapter = make
        there.answers = [completion("hello")]
        call = asyncio.ensure_future(k.chat("qwen"))
        await until(lambda: k.gateway.queue.active() == {"qwen": 1})
        assert not there.requests
        ready.append(server)
        assert answer_text(await call) == "hello"
        assert k.gateway.state().breakers["qwen"].failures == 0


async def test_a_restart_that_begins_during_a_call_does_not_block_the_event_loop(monkeypatch):
    """The state was read twice, and the second read waited for the end of the restart in the event loop."""

    class Restarting(SimpleNamespace):
        states = iter([False, True])

        @property
        def starting(self) -> bool:
            return next(self.states, False)

    sleeps: list[float] = []
    monkeypatch.setattr(backend, "time", SimpleNamespace(sleep=sleeps.append))
    async with loopback() as there, aclosing(HttpClient(proxies=False)) as http:
        served = backend.Served("qwen")
        recipe = SimpleNamespace(model=lambda order: "theirs")
        server = Restarting(base_url=there.url, model="theirs", headers={}, request_fields={})
        server.recipe, server.launch_order = recipe, lambda: None
        served._engine = server
        server.require, server.listens = lambda: None, lambda: True
        there.answers = [completion("hello")]
        adapter = HttpAdapter("qwen", served, http)
        assert (await adapter.answer("completions", {"prompt": "hi"}, None))["model"] == "qwen"
    assert not sleeps


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (500, "HTTP 500: status 500, as told"),
        (503, "HTTP 503"),
        (307, "HTTP 307"),
        (None, "did not answer"),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n{"a"', "broke off"),
        (CHUNKED + b"no size\r\n", "malformed answer"),
        (CHUNKED + b'3\r\n{"a\r\n', "broke off"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", "no JSON object"),
        ({"error": {"message": "no card is free", "code": 502}}, "no card is free"),
    ],
)
async def test_an_engines_failure_is_reported(answer, why):
    async with loopback() as there, harness(qwen=4, make_adapter=engine(there)) as k:
        there.answers = [answer, answer]
        with refusal(503, match=why):
            await k.chat("qwen")
        assert k.gateway.state().breakers["qwen"].failures == 1


async def test_a_stream_that_ends_without_done_broke_off():
    """An engine that dies during an answer sends no [DONE], so such a stream counts as broken off."""
    async with loopback() as there, harness(qwen=4, make_adapter=engine(there)) as k:
        there.answers = [
            [chunk("one "), None],
            [chunk("a"), {"error": {"message": "llama_decode returned -3"}}],
        ]
        for why in ("broke off", "llama_decode returned -3"):
            reply = await k.chat("qwen", stream=True)
            assert why in [event async for event in reply.events][-1]["error"]["message"]
        assert k.gateway.state().breakers["qwen"].failures == 2


async def test_an_answer_without_a_finish_reason_was_cut_off():
    """llama-cpp-python's server ended a stream with [DONE] when another call arrived."""
    async with loopback() as there, harness(qwen=4, make_adapter=engine(there)) as k:
        second = {**END["choices"][0], "index": 1}
        unfinished = {"index": 0, "message": {}, "finish_reason": None}
        there.answers = [
            [chunk("one "), "[DONE]"], [chunk("one "), {"choices": [second]}, "[DONE]"], ["[DONE]"],
            {**completion("one"), "choices": [unfinished]}, {**completion("one"), "choices": []},
        ]  # fmt: skip
        for _ in range(2):
            reply = await k.chat("qwen", stream=True)
            last = [event async for event in reply.events][-1]
            assert "it ended without a finish_reason" in last["error"]["message"]
        nothing = "answered with nothing|without a finish_reason"
        for stream, why in ((True, nothing), (False, "no finish_reason"), (False, "no choices")):
            with pytest.raises(Refused, match=why):
                await k.chat("qwen", stream=stream)
        assert k.gateway.state().breakers["qwen"].failures == 5


@pytest.mark.parametrize(("status", "answered"), [(401, 502), (403, 502), (409, 502), (429, 503)])
async def test_a_refusal_that_no_caller_caused_counts_for_nothing(status, answered):
    """A wrong key or too many requests are no fault of the engine. A fallback answers."""
    serving = ServingConfig(fallback={"qwen": ("phi",)})
    async with loopback() as there, harness(qwen=4, make_adapter=engine(there)) as k:
        there.answers = [status]
        with refusal(answered, match=f"HTTP {status}") as refused:
            await k.chat("qwen")
        assert bool(refused.value.headers) == (status == 429)
        assert k.gateway.state().breakers["qwen"].failures == 0
    options = {"serving": serving, "phi": 4}
    async with loopback() as there, harness(qwen=4, make_adapter=engine(there), **options) as k:
        there.answers = [status, completion("from phi")]
        assert answer_text(await k.chat("qwen")) == "from phi"


async def test_an_engines_refusal_is_the_callers_mistake():
    """llama-server answers 500 for a large text. Five such calls opened the breaker for everybody."""
    said = "input (949 tokens) is too large to process. increase the physical batch size"
    body = json.dumps({"error": {"code": 500, "message": said}}).encode()
    head = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with loopback() as there, harness(qwen=4, make_adapter=engine(there)) as k:
        for answer, why in (
            (400, "qwen refused: status 400, as told"),
            (head + body, r"949 tokens.* n_ubatch in the catalogue"),
        ):
            there.answers = [answer]
            with refusal(400, match=why):
                await k.chat("qwen")
            assert k.gateway.state().breakers["qwen"].failures == 0


async def test_thinking_mode_reaches_an_engine_that_makes_its_own_prompt():
    """By `enable_thinking`, if the template reads it or is unknown, or by the word that it reads."""
    knows, knows_not = "{% if enable_thinking %}", "{{ messages[0].content }}"
    reads = "{% if '/no_think' in messages[-1].content %}"
    for own, options, switched, content in (
        (None, {}, True, "hi"),
        (knows, {}, True, "hi"),
        (knows_not, {}, False, "hi"),
        (reads, {}, False, "hi /no_think"),
        (knows, {"chat_template": knows_not}, False, "hi"),
        (knows_not, {"chat_template": knows}, True, "hi"),
    ):
        async with (
            loopback() as there,
            harness(qwen=4, make_adapter=engine(there, own), options={"qwen": options}) as k,
        ):
            there.answers = [completion("a")]
            await k.chat("qwen", "hi", x_thinking=False)
            body = there.requests[0][2]
            switch = {"enable_thinking": False} if switched else None
            assert body.get("chat_template_kwargs") == switch
            assert body["messages"][0]["content"] == content
            assert "chat_template" not in body, "vLLM refuses requests that bring one"


@pytest.mark.parametrize(
    ("template", "think"),
    [("", False), ("", True), ("{{ messages }}", True), ("{{ '<think>' }}", False)],
)
async def test_a_thinking_mode_that_cannot_be_set_is_refused(template, think):
    """The engine would ignore the thinking mode, or the model would read the word for it as a part of the question."""
    async with loopback() as there, harness(qwen=4, make_adapter=engine(there, template)) as k:
        with refusal(400, param="x_thinking", match="no switch for thinking"):
            await k.chat("qwen", "hi", x_thinking=think)
        assert not there.requests


async def test_an_effort_is_the_switch_for_thinking_and_has_no_effect_without_one():
    """Many clients always send `reasoning_effort`, also to models that cannot think."""
    thinks, plain = "{% if enable_thinking %}", "{{ messages }}"
    for template, effort, sent in (
        (thinks, "none", {"enable_thinking": False}),
        (thinks, "medium", {"enable_thinking": True}),
        ("{{ reasoning_effort }}", "low", {"reasoning_effort": "low"}),
        (plain, "high", None),
        (plain, "none", None),
    ):
        async with loopback() as there, harness(qwen=4, make_adapter=engine(there, template)) as k:
            there.answers = [completion("a")]
            await k.chat("qwen", "hi", reasoning_effort=effort)
            assert there.requests[0][2].get("chat_template_kwargs") == sent
    async with loopback() as there, harness(qwen=4, make_adapter=engine(there, thinks)) as k:
        with pytest.raises(Refused, match="one of none, minimal, low, medium, high, xhigh"):
            await k.chat("qwen", "hi", reasoning_effort="much")


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("template", "sent"),
    [("{{ messages }}", False), ("{{ tools }}", True), (None, True), ("", True)],
    ids=["takes none", "takes tools", "unknown", "no template"],
)
async def test_tools_that_the_engine_s_template_would_ignore_are_refused(template, sent):
    """llama-server answered such a call as if it named no tools, even if it required a tool."""
    async with loopback() as there, harness(qwen=4, make_adapter=engine(there, template)) as k:
        there.answers = [completion("a")]
        if sent:
            await k.chat("qwen", "hi", tools=[TOOL])
            assert there.requests[0][2]["tools"] == [TOOL]
            return
        for choice in ("required", "auto"):
            with refusal(400, param="tools", match="its chat template takes no tools"):
                await k.chat("qwen", "hi", tools=[TOOL], tool_choice=choice)
        assert not there.requests
    options = {"qwen": {"leave_out_tools": True}}
    async with (
        loopback() as there,
        harness(qwen=4, make_adapter=engine(there, template), options=options) as k,
    ):
        there.answers = [completion("a")]
        reply = await k.chat("qwen", "hi", tools=[TOOL])
        assert reply.headers["X-GPU-Tools"] == "left out" and "tools" not in there.requests[0][2]


@pytest.mark.parametrize(("field", "sent"), [
    ({"temperature": 0.5}, {"temperature": 0.5}),
    ({"repetition_penalty": 1.1}, {"repeat_penalty": 1.1}),
    ({"max_completion_tokens": 5}, {"max_tokens": 5}),
    ({"user": "ann", "store": False, "n": 1, "top_logprobs": 0}, {}),
    ({"temprature": 1}, "no field 'temprature'; did you mean temperature"),
    ({"top_k": 5}, "its engine has no field 'top_k' in a call for chat"),
])  # fmt: skip
async def test_a_field_that_the_engine_would_ignore_is_refused(field, sent):
    """vLLM, llama-server and Ollama answer as if such a field were missing."""
    known = frozenset(
        ["model", "messages", "temperature", "repeat_penalty", "max_tokens", "stream"]
    )
    async with loopback() as there, harness(qwen=4, make_adapter=engine(there, None, known)) as k:
        there.answers = [completion("a")]
        if isinstance(sent, str):
            with refusal(400, param=next(iter(field)), match=sent):
                await k.chat("qwen", "hi", **field)
            assert not there.requests
            return
        await k.chat("qwen", "hi", **field)
        got = there.requests[0][2]
        assert {name: got[name] for name in got if name not in ("model", "messages")} == sent


async def test_other_kinds_use_their_own_paths():
    options = {"sdxl": {"model_type": "diffusion"}}
    async with (
        loopback() as there,
        harness(qwen=4, sdxl=4, make_adapter=engine(there), options=options) as k,
    ):
        for model, kind, field, path in (
            ("qwen", "embeddings", "input", "/v1/embeddings"),
            ("sdxl", "images", "prompt", "/v1/images/generations"),
            ("qwen", "completions", "prompt", "/v1/completions"),
        ):
            there.answers = [completion("a") if kind == "completions" else {"data": []}]
            await k.gateway.answer(kind, {"model": model, field: "a"})
            assert there.requests[-1][0] == path


def cloudy(there: Loopback) -> dict[str, str]:
    return {"CLAUDE_BASE_URL": there.url, "CLAUDE_API_KEY": "s3cret"}


async def test_a_cloud_answers_last_and_only_if_allowed():
    """Then the call is refused: 507 if no model fits. A cloud takes no memory."""
    serving = ServingConfig(fallback={"huge": ("claude:haiku", "vast")})
    async with (
        loopback() as there,
        harness(serving, huge=30, vast=40, environment=cloudy(there)) as k,
    ):
        there.answers = [completion("from afar")]
        reply = await k.chat("huge", x_client_id="bot")
        assert (reply.model, answer_text(reply)) == ("claude:haiku", "from afar")
        assert reply.json["model"] == "claude:haiku"
        assert "huge could not answer" in reply.because and "vast could not answer" in reply.because
        path, headers, body = there.requests[0]
        assert (path, headers["authorization"]) == ("/v1/chat/completions", "Bearer s3cret")
        assert body["model"] == "haiku" and not [name for name in body if name.startswith("x_")]
        k.gateway.guard.allow(False)
        with refusal(507) as refused:
            await k.chat("huge")
        assert "claude" not in str(refused.value)


async def test_a_cloud_that_was_requested_is_never_blocked():
    """A cloud that the call names, or that is the first candidate of a task, is a deliberate choice."""
    tasks = {"far": Task(("claude:sonnet", "qwen")), "near": Task(("qwen", "claude:sonnet"))}
    options = {"serving": ServingConfig(tasks=tasks), "guard": Guard(False)}
    async with loopback() as there, harness(qwen=4, environment=cloudy(there), **options) as k:
        there.answers = [completion("a"), completion("b")]
        models = [(await k.chat(name)).model for name in ("claude:sonnet", "task:far", "task:near")]
        assert models == ["claude:sonnet", "claude:sonnet", "qwen"]


async def test_a_cloud_without_address_or_key_says_which_variable_is_missing():
    async with harness(qwen=4, environment={"OPENAI_API_KEY": "s3cret"}) as k:
        for model, missing in (
            ("claude:sonnet", "no CLAUDE_API_KEY"),
            ("nobody:x", "NOBODY_BASE_URL=https"),
        ):
            with pytest.raises(Refused, match=missing):
                await k.chat(model)


def test_a_key_is_never_shown():
    assert "s3cret" not in repr(Cloud("claude", "https://x", "s3cret", "sonnet"))


async def test_a_500_for_one_call_alone_is_that_calls_mistake():
    """llama-server answers 500 to a history that it cannot read. It answers the plain call right after it."""
    async with loopback() as there, harness(qwen=4, make_adapter=engine(there)) as k:
        for second, status in ((completion("a"), 400), (500, 503)):
            there.answers = [500, second]
            with refusal(status, match="HTTP 500"):
                await k.chat("qwen")
            assert k.gateway.state().breakers["qwen"].failures == (status == 503)


SAID = (
    "This model's maximum context length is 4096 tokens. However, you requested 128000 output tokens and your "
    "prompt contains at least 1 input tokens, for a total of at least 128001 tokens."
)
TOO_LONG = (
    b"HTTP/1.1 400 no\r\nConnection: close\r\n\r\n"
    + json.dumps({"error": {"message": SAID, "type": "BadRequestError", "code": 400}}).encode()
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_an_engine_that_refuses_a_long_limit_may_write_the_rest_of_the_context(name, stream):
    """vLLM answers 400, and Anthropic's clients must send a limit. What is left is said in a header."""
    async with loopback() as there, harness(qwen=4, make_adapter=engine(there)) as k:
        there.answers = [TOO_LONG, [chunk("hi"), END] if stream else completion("hi")]
        reply = await k.chat("qwen", stream=stream, **{name: 128_000})
        assert (await stream_text(reply) if stream else answer_text(reply)) == "hi"
        first, second = (body for *_, body in there.requests)
        assert (first[name], second[name]) == (128_000, None)
        limit = "the rest of the context" if stream else "4095"
        assert reply.headers["X-GPU-Max-Tokens"] == limit


async def test_a_prompt_that_alone_is_too_long_for_an_engine_has_the_code_for_it():
    """Clients shorten a conversation when they get this code."""
    async with loopback() as there, harness(qwen=4, make_adapter=engine(there)) as k:
        for asked, refusals in (({"max_tokens": 9}, 2), ({}, 1)):
            there.answers = [TOO_LONG] * refusals
            with refusal(400, "context_length_exceeded", match="maximum context length"):
                await k.chat("qwen", **asked)
            assert there.answers == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "path, more",
    [
        ("/v1/chat/completions", {}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"max_tokens": 9}),
        ("/api/chat", {}),
    ],
)
async def test_half_a_surrogate_pair_of_an_engine_is_passed_on_as_it_was_written(
    path, more, stream
):
    """A model that is cut off writes half of an emoji into the arguments of a call. The answer was a 500."""
    half = "a \ud83d"
    async with loopback() as there, harness(qwen=4, make_adapter=engine(there)) as k:
        there.answers = [[chunk(half), END, "[DONE]"] if stream else completion(half)]
        body = {**chat("qwen", "hi"), "stream": stream, **more}
        if "input" in more:
            del body["messages"]
        asked = Exchange(k.rt, k.gateway, path, body)
        await asked.done
        assert asked.status == 200 and b"\\ud83d" in asked.sent
