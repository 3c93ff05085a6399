"""The tab Serving shows what a gateway did: calls, clients, jobs and breakers."""

import json
import time
from types import SimpleNamespace

from gpu_panels.console import Console
from gpu_panels.data.serving_rows import client_rows, job_rows, model_rows, summary, usage_rows
from gpu_panels.poller import Poller
from gpu_panels.tabs import ServingTab
from msgspec.structs import replace

from gpu_runtime.files import new_log
from gpu_runtime.serving.api.openai import Job, Jobs
from gpu_runtime.serving.breaker import BreakerState
from gpu_runtime.serving.records import CallFigures, ModelCalls, Pattern, served
from gpu_runtime.web.auth import Visitor
from tests.serving.harness import chat, harness

from . import samples
from .polling import OPERATOR, VIEWER, FixedRuntime


def texts(rows):
    """The texts of the cells of each row, by its first cell."""
    return {row.cells[0].text: [cell.text for cell in row.cells[1:]] for row in rows}


async def test_the_figures_are_those_of_the_calls():
    """A stream has a time to its first token and a rate. In the usage, the largest answers are first."""
    async with harness(qwen=4, phi=1, scripts={"qwen": [], "phi": []}) as k:
        await k.gateway.answer("chat", chat("phi", "one"), "ann")
        await k.gateway.answer("chat", chat("qwen", "one two three", x_client_id="bot"), "bob")
        stream = await k.gateway.answer("chat", chat("qwen", "one two", stream=True), "bob")
        assert [event async for event in stream.events]
        found = served(k.gateway, Jobs(), time.monotonic())
    calls = found.models["qwen"]
    assert (calls.calls, calls.prompt_tokens) == (2, 5)
    assert calls.queue_seconds >= 0 and calls.first_token_seconds >= 0
    clients = texts(client_rows(found))
    assert {cells[0] for cells in clients.values()} == {"1"}, "a program has a name of its own"
    assert summary(found).startswith("3 answered · 2 loads for calls")
    usage = [[cell.text for cell in row.cells[:3]] for row in usage_rows(found)]
    assert usage == [["bob", "qwen", "2"], ["ann", "phi", "1"]]


async def test_trouble_is_shown_and_the_rest_is_calm():
    """An open breaker has its last failure. A client in cooldown has the seconds that are left."""
    async with harness(qwen=4, scripts={"qwen": []}) as k:
        await k.gateway.answer("chat", chat("qwen", "hi"), "ann")
        found = served(k.gateway, Jobs(), 100.0)
    state = found.state
    calls = {"a": 1, "b": 4, "c": 2, "d": 3}
    slow = Pattern(10, 2, 1, every_seconds=7.0, models=calls, cooldown_until=160.0)
    breakers = {
        "qwen": BreakerState("open", 5, 30.0, "CUDA error"),
        "gone": BreakerState("closed", 2, 0.0, "no memory"),
        "calm": BreakerState("closed", 0),
    }
    counts = {"answered": 1000, "failed": 2, "refused_429": 3, "refused_503": 4, "cancelled": 5}
    clients = {"ann": slow, "": Pattern(1, models={"a": 1}, cooldown_until=99.0)}
    state = replace(
        state, breakers=breakers, waiting={"phi": 3}, running={"busy": 2}, clients=clients,
        counts=counts | {"stood_in": 6}, loads=1, allow_cloud=False,
    )  # fmt: skip
    found = replace(found, state=state, models={"qwen": ModelCalls(1, 2.0, 3.0, 40.0, 5, 6)})
    rows = texts(model_rows(found))
    assert rows == {
        "busy": ["2", "0", *"––––––", "closed"],
        "calm": ["0", "0", *"––––––", "closed"],
        "gone": ["0", "0", *"––––––", "closed, 2 failed in a row"],
        "phi": ["0", "3", *"––––––", "closed"],
        "qwen": [*"001", "2.0 s", "3.0 s", "40.0", *"56", "open, tried again in 30 s: CUDA error"],
    }, "a model that only waits, or only failed, has a row too"
    assert [row.id for row in model_rows(found) if "alarm" in row.cells[9].kind] == ["qwen"]
    assert [*texts(client_rows(found)).items()] == [
        ("without a name", ["1", "0", "–", "0", "–", "a 1×"]),
        ("ann", ["10", "1", "7.0 s", "2", "60 s", "b 4×, d 3×, c 2× and 1 more"]),
    ], "the most recent call is first"
    assert summary(found) == (
        "1,000 answered · 2 failed · 7 refused · 5 cancelled · 6 answered by another model · "
        "1 load for calls · clouds are not allowed"
    )


def test_jobs_are_shown_without_their_ids():
    """A visitor who knows the id of a job may fetch its result."""
    old, new = Job("/v1/embeddings", 10.0, "ann"), Job("/v1/chat/completions", 20.0, "bob")
    old.status, old.ended = "succeeded", 12.5
    figures = CallFigures()
    call = {"queue_seconds": 1.0, "prompt_tokens": 9, "completion_tokens": 5}
    figures.add("qwen", {**call, "first_seconds": 0.5, "answer_seconds": 2.5})
    figures.add("qwen", call)
    usage = SimpleNamespace(recent=lambda: [])
    gateway = SimpleNamespace(state=lambda: None, figures=figures, usage=usage)
    found = served(gateway, SimpleNamespace(all=lambda: [old, new]), 0.0)
    assert found.models == {"qwen": ModelCalls(2, 1.0, 1.5, 2.0, 18, 10)}
    first, second = job_rows(found)
    assert [cell.text for cell in first.cells[1:]] == [
        "/v1/chat/completions", "bob", "running", "–",
    ]  # fmt: skip
    assert [cell.text for cell in second.cells[3:]] == ["succeeded", "2.5 s"]
    assert old.id not in str(first) + str(second)


def polled(figures=None):
    """A poller over the busy sample, on a server with these figures."""
    poller = Poller(FixedRuntime(samples.busy), start=lambda run: None)
    poller.serving = figures
    poller.poll()
    poller._answered.set()
    return poller


async def test_only_a_server_that_serves_models_has_the_tab():
    """The figures are read once for each snapshot, for all sessions."""
    asked = []
    async with harness(qwen=4, scripts={"qwen": []}) as k:
        await k.gateway.answer("chat", chat("qwen", "hi"), "ann")
        found = served(k.gateway, Jobs(), 0.0)
    poller = polled(lambda: asked.append(1) or found)
    assert Console(poller, Visitor("eve", False))._titles[-1] == "Serving"
    assert "Serving" not in Console(polled(), Visitor("eve", False))._titles
    for _ in range(2):
        tab = ServingTab(poller, VIEWER)
        tab.update(poller.result.snapshot)
    assert [row[0] for row in json.loads(tab.models.rows)] == ["qwen"] and asked == [1]


async def test_the_log_of_an_engine_is_shown_live_to_operators_only(monkeypatch, tmp_path):
    """A log may contain texts of calls. Its lines are shown as text, whatever they contain."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    log = new_log("qwen")
    log.write_text("loading\n<b>ready</b>\x1b[31m\n")
    async with harness(qwen=4, scripts={"qwen": []}) as k:
        await k.gateway.answer("chat", chat("qwen", "hi"), "ann")
        found = served(k.gateway, Jobs(), 0.0)
    poller = polled(lambda: found)
    tab = ServingTab(poller, OPERATOR)
    tab.update(poller.result.snapshot)
    assert tab.engine.options == ["none", "qwen"] and not tab.log.html
    tab.engine.value = "qwen"
    assert "loading\n&lt;b&gt;ready" in tab.log.html and "\x1b" not in tab.log.html
    log.write_text("".join(f"line {n}\n" for n in range(100)))
    tab.update(poller.result.snapshot)
    assert "line 99" in tab.log.html and "line 50\n" not in tab.log.html
    log.unlink()
    tab.update(poller.result.snapshot)
    assert not tab.log.html
    viewer = ServingTab(poller, VIEWER)
    viewer.update(poller.result.snapshot)
    viewer.engine.value = "qwen"
    assert not viewer.log.html and not viewer.logs.visible
