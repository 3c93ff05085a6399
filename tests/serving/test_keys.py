"""Keys of programs: which models and routes they open, and limits that parallel calls cannot pass.

`tests/core/test_access_keys.py` tests their file, GPU_SERVE_KEYS.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from gpu_runtime.access_keys import AccessKey, digest
from gpu_runtime.serving.access import WINDOW_SECONDS, Allowance, KeyRules, visitor_of
from gpu_runtime.serving.api.app import application
from gpu_runtime.serving.records import CallRecord, Usage, prompt_tokens
from gpu_runtime.serving.requests import Refused, read_call
from gpu_runtime.serving.tasks import ServingConfig, Task
from gpu_runtime.web.auth import Visitor
from tests.clock import Clock
from tests.serving.app_client import with_visitor
from tests.serving.harness import Harness, answer_text, chat, harness, refusal
from tests.serving.loops import settle

BOT, LOOK = "gpu-" + "b" * 43, "gpu-" + "v" * 43
KEYS = {
    "bot": AccessKey(digest(BOT), models=("qwen*", "task:chat")),
    "look": AccessKey(digest(LOOK), role="viewer"),
}


async def call(k: Harness, model: str = "qwen", text: str = "one two three", **more: Any) -> Any:
    return await k.gateway.answer("chat", chat(model, text, **more), "key:bot")


def bot(**limits: Any) -> dict[str, AccessKey]:
    return {"bot": AccessKey(digest(BOT), **limits)}


async def test_a_key_calls_its_models_only():
    """It must allow a fallback too. A task that it allows by name has all its candidates."""
    config = ServingConfig(tasks={"chat": Task(("phi",))}, fallback={"qwen": ("phi", "qwen-2")})
    scripts = {"qwen": [RuntimeError("it broke")]}
    options = {"serving": config, "keys": lambda: KEYS, "scripts": scripts}
    async with harness(qwen=4, **{"qwen-2": 4}, phi=4, **options) as k:
        for model in ("phi", "nothing", "claude:sonnet"):
            with refusal(403, "model_not_allowed"):
                await call(k, model)
        with refusal(404) as unknown:
            await call(k, "qwen-9")
        assert "qwen-2" in str(unknown.value) and "phi" not in str(unknown.value)
        assert (await call(k, "qwen")).model == "qwen-2", "phi may not stand in"
        assert (await call(k, "task:chat")).model == "phi"
        listed = [row["id"] for row in k.gateway.models("key:bot")]
        assert sorted(listed) == ["qwen", "qwen-2", "task:chat"]
        assert len(k.gateway.models("ann")) == 4, "the operator has no limits"


async def test_a_key_limits_the_importance():
    """A call that requests more importance than its key allows waits behind the calls of others."""
    gate_open = asyncio.Event()
    keys = bot(importance="low")
    options = {"options": {"qwen": {"sequences": 1, "context_length": 64}}, "keys": lambda: keys}
    async with harness(qwen=4, scripts={"qwen": [gate_open]}, **options) as k:
        first = asyncio.ensure_future(k.chat("qwen", "first"))
        await settle()
        urgent = asyncio.ensure_future(call(k, text="urgent", x_priority="urgent"))
        await settle()
        normal = asyncio.ensure_future(k.chat("qwen", "normal"))
        await settle()
        gate_open.set()
        await asyncio.gather(first, urgent, normal)
        begun = [line for line in k.log if not line.endswith("ended")]
        assert begun == ["qwen: first", "qwen: normal", "qwen: urgent"]


async def test_requests_a_minute_hold_for_calls_at_once():
    keys = bot(requests_a_minute=3)
    async with harness(qwen=4, keys=lambda: keys) as k:
        made = await asyncio.gather(*(call(k) for _ in range(8)), return_exceptions=True)
        refused = [one for one in made if isinstance(one, Refused)]
        assert len(refused) == 5
        assert {(one.status, one.code) for one in refused} == {(429, "rate_limit_exceeded")}
        assert refused[0].headers["Retry-After"] == "60"
        assert (await k.chat("qwen")).model == "qwen", "others have no limit"
        k.clock.now += WINDOW_SECONDS
        assert (await call(k)).model == "qwen"


async def test_tokens_a_minute_hold_for_calls_at_once():
    """A call without a limit of its own gets what is left. The counted tokens replace the reserved ones."""
    keys = bot(tokens_a_minute=100)
    async with harness(qwen=4, keys=lambda: keys) as k:
        text = " ".join(["word"] * 70)
        calls = [call(k, text="a b", max_tokens=40) for _ in range(5)]
        made = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(one, Refused) for one in made] == [False] * 2 + [True] * 3
        k.clock.now += WINDOW_SECONDS
        reply = await call(k, text=text)
        assert reply.json["choices"][0]["finish_reason"] == "length"
        assert len(answer_text(reply).split()) == 100 - 350 // 4
        with refusal(400, "over_limit"):
            await call(k, text="x" * 600)
        k.clock.now += WINDOW_SECONDS
        stream = await call(k, text="a b c", stream=True)
        assert [event async for event in stream.events]
        assert (await call(k, max_tokens=80)).model == "qwen", "the stream used 6, not 100"


@pytest.mark.parametrize(("kind", "body", "texts"), [
    ("chat", {}, 1), ("chat", {"n": 2}, 2), ("completions", {"prompt": "a"}, 1),
    ("completions", {"prompt": ["a", "b"], "n": 2}, 4),
])  # fmt: skip
def test_the_tokens_of_a_minute_are_for_all_texts_of_an_answer_and_its_prompt(kind, body, texts):
    keys, clock = bot(tokens_a_minute=200), Clock()
    rules = KeyRules(lambda: keys, clock, Usage())
    asked = {**(chat("qwen", "hi") if kind == "chat" else {"model": "qwen"}), **body}

    @contextmanager
    def admitted(**more: Any) -> Iterator[Any]:
        call = read_call(kind, asked | more)
        record = CallRecord(clock, kind, "key:bot")
        with record.until_answered(), rules.admitted(call, "key:bot") as limited:
            yield limited.body, record

    prompt = prompt_tokens(read_call(kind, asked))
    with admitted() as (sent, record):
        assert sent["max_tokens"] == (200 - prompt) // texts
        record.note(model="qwen", prompt_tokens=20, completion_tokens=30)
    with admitted() as (sent, record):
        assert sent["max_tokens"] == (200 - 50 - prompt) // texts, "what was really used counts"
        record.note(model="qwen", prompt_tokens=0, completion_tokens=0)
    most = (150 - 2 * prompt) // (2 * texts)
    other = admitted(max_completion_tokens=most)
    with admitted(max_tokens=most) as (first, _), other as (second, _):
        assert first["max_tokens"] == second["max_completion_tokens"] == most
        assert "max_tokens" not in second, "the limit has one name"
        with pytest.raises(Refused), admitted(max_tokens=most):
            pass


async def test_a_refused_call_uses_no_tokens():
    """For an unknown model, or for a budget that is too short: a time-out, but no engine was asked."""
    keys = bot(tokens_a_minute=100)
    async with harness(qwen=4, keys=lambda: keys) as k:
        k.gateway.costs.add_load("qwen", 47.0)
        for _ in range(3):
            with refusal(404, match="nothing"):
                await call(k, "nothing", max_tokens=90)
            with refusal(504, "budget_too_short"):
                await call(k, max_tokens=90, x_budget=3)
        assert (await call(k, max_tokens=90)).model == "qwen"


CALL = st.tuples(st.integers(0, 40), st.integers(0, 60), st.integers(0, 90))


@given(calls=st.lists(CALL, max_size=40))
@settings(deadline=None)
def test_no_minute_has_more_tokens_than_the_limit(calls):
    """Calls begin, overlap and end in any order: running reservations and ended tokens stay below the limit."""
    clock = [0.0]
    allowance, key = Allowance(lambda: clock[0]), AccessKey(digest("a"), tokens_a_minute=100)
    running: list[Any] = []
    ended: list[tuple[float, int]] = []
    for pause, prompt, asked in calls:
        clock[0] += pause
        if running and pause % 3 == 0:
            block, grant = running.pop(0)
            grant.used = grant.reserved // 2
            block.__exit__(None, None, None)
            ended.append((clock[0], grant.used))
        block = allowance.granted("bot", key, prompt, asked or None)
        try:
            grant = block.__enter__()
        except Refused:
            continue
        running.append((block, grant))
        recent = sum(used for at, used in ended if at > clock[0] - WINDOW_SECONDS)
        assert recent + sum(grant.reserved for _, grant in running) <= 100


def test_a_key_acts_on_nothing_else():
    k = Harness(qwen=4, keys=lambda: KEYS)
    visitor = visitor_of(KEYS, BOT, read_only=False)
    assert visitor == Visitor("key:bot", False, may_call=True, api_only=True)
    assert visitor_of(KEYS, BOT, read_only=True).may_call is False
    assert visitor_of(KEYS, LOOK, read_only=False) == Visitor("key:look", False)
    app = application(k.rt, lambda: k.gateway)
    with TestClient(with_visitor(app, visitor), raise_server_exceptions=False) as http:
        assert http.post("/v1/chat/completions", json=chat("qwen")).status_code == 200
        assert http.get("/v1/engines/qwen/log").status_code == 403
        assert http.put("/api/v1/config", json={}).status_code == 403
        for path in ("/memory/evict/*", "/memory/defragment"):
            assert http.post(path, json={}).status_code == 403, path
        job = {"endpoint": "/v1/chat/completions", "body": chat("qwen")}
        own = http.post("/v1/jobs", json=job).json()["id"]
        other = TestClient(with_visitor(app, Visitor("ann", True))).post("/v1/jobs", json=job)
        assert http.delete(f"/v1/jobs/{other.json()['id']}").status_code == 403
        assert http.delete(f"/v1/jobs/{own}").status_code == 200
        http.portal.call(k.gateway.close)
    k.rt.close()


async def test_a_removed_key_is_refused_at_its_next_call():
    keys = dict(KEYS)
    async with harness(qwen=4, keys=lambda: keys) as k:
        await call(k)
        del keys["bot"]
        with refusal(401, match="was removed"):
            await call(k)
