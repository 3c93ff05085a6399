"""A caller of a stream gets the headers before the answer begins, and then learns what the call waits for."""

import json

import pytest

from gpu_runtime.serving.api import openai
from tests.serving.app_client import Exchange
from tests.serving.harness import chat, harness
from tests.serving.loops import until


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(openai, "HEADERS_SECONDS", 0.0)
    monkeypatch.setattr(openai, "COMMENT_SECONDS", 0.01)


async def test_comments_tell_the_place_and_the_reason_until_the_answer_begins():
    async with harness(a=16, b=16) as k:
        with k.rt.use("a"):
            there = Exchange(k.rt, k.gateway, "/v1/chat/completions", chat("b", "hi", stream=True))
            await until(lambda: there.sent.count(b"b waits for room: ") > 1)
            assert (there.status, there.kind.partition(";")[0]) == (200, "text/event-stream")
            assert b"data:" not in there.sent
        await there.done
    first, *_ = there.sent.decode().split("\n\n")
    assert first.startswith(": place 1 of 1 in the queue") and "\n" not in first
    events = [part for part in there.sent.decode().split("\n\n") if part.startswith("data:")]
    assert any('"content":"hi"' in event for event in events) and events[-1] == "data: [DONE]"


@pytest.mark.parametrize(("path", "body", "said"), [
    ("/v1/chat/completions", chat("b", "hi", stream=True), b'data: {"error"'),
    ("/v1/messages", chat("b", "hi", stream=True, max_tokens=9), b"event: error"),
    ("/v1/responses", {"model": "b", "input": "hi", "stream": True}, b"event: error"),
    ("/api/chat", chat("b", "hi"), b'{"error"'),
])  # fmt: skip
async def test_a_refusal_after_the_headers_is_the_last_event(path, body, said):
    async with harness(a=16, b=16) as k:
        with k.rt.use("a"):
            there = Exchange(k.rt, k.gateway, path, body)
            await until(lambda: there.status == 200 and k.gateway.state().waiting == {"b": 1})
            await k.gateway.close()
            await there.done
    assert said in there.sent and b"the server is ending" in there.sent
    if path == "/api/chat":
        assert json.loads(there.sent), "a line that is no JSON would break Ollama's clients"


async def test_the_headers_come_at_once_if_the_model_is_not_on_its_device(monkeypatch):
    """They came after a second. Some clients and proxies give up a request without headers."""
    monkeypatch.setattr(openai, "HEADERS_SECONDS", 3600.0)
    async with harness(a=16, b=16) as k:
        with k.rt.use("a"):
            there = Exchange(k.rt, k.gateway, "/v1/chat/completions", chat("b", "hi", stream=True))
            await until(lambda: there.status == 200 and b"waits for room" in there.sent)
        await there.done
    assert there.sent.endswith(b"data: [DONE]\n\n")


async def test_a_model_that_never_fits_keeps_its_status_although_it_is_not_loaded(monkeypatch):
    monkeypatch.setattr(openai, "HEADERS_SECONDS", 3600.0)
    monkeypatch.setattr(openai, "LOAD_HEADERS_SECONDS", 3600.0)
    async with harness(huge=100) as k:
        there = Exchange(k.rt, k.gateway, "/v1/chat/completions", chat("huge", "hi", stream=True))
        await there.done
        assert there.status == 507


async def test_a_call_whose_client_leaves_while_it_waits_is_withdrawn():
    async with harness(a=16, b=16) as k:
        with k.rt.use("a"):
            there = Exchange(k.rt, k.gateway, "/v1/chat/completions", chat("b", "hi", stream=True))
            await until(lambda: b"waits for room" in there.sent)
            there.left.set()
            await there.done
            await until(lambda: k.gateway.state().waiting == {})


async def test_what_is_wrong_with_a_call_keeps_its_status(monkeypatch):
    """A mistake is found before the call waits, so its status is sent, and not the headers of a stream."""
    monkeypatch.setattr(openai, "HEADERS_SECONDS", 60.0)
    async with harness(a=16) as k:
        for body, status in (
            (chat("none", stream=True), 404),
            (chat("a", stream=True, n=0), 400),
        ):
            there = Exchange(k.rt, k.gateway, "/v1/chat/completions", body)
            await there.done
            assert there.status == status


async def test_a_server_that_ends_is_alive_and_not_ready():
    """A supervisor sends no more calls there, and does not kill it before its last answers."""
    async with harness(a=16) as k:
        for path in ("/livez", "/readyz"):
            there = Exchange(k.rt, k.gateway, path, None, "GET")
            await there.done
            assert (there.status, json.loads(there.sent)) == (200, {"status": "ok"})
        await k.gateway.drain(0.0)
        for path, status in (("/livez", 200), ("/readyz", 503)):
            there = Exchange(k.rt, k.gateway, path, None, "GET")
            await there.done
            assert there.status == status
