"""If a client disconnects, its model is released, and a load that only this client needs is stopped."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gpu_runtime.serving import queue
from gpu_runtime.serving.api import memory
from gpu_runtime.serving.engines.openai_format import TextPiece
from gpu_runtime.serving.engines.registry import EchoAdapter
from gpu_runtime.serving.requests import Refused
from gpu_runtime.serving.thread_stream import in_thread_until, stream_from_thread
from tests.serving.app_client import Exchange
from tests.serving.harness import answer_text, chat, harness, stream_text
from tests.serving.loops import settle, until


async def test_a_stream_whose_client_left_before_the_first_event_is_closed():
    """The stream's generator never started, so a `finally` block in the generator would not run."""
    from gpu_runtime.serving.api.openai import OpenAIWriter, Sent

    async with harness(qwen=4) as k:
        reply = await k.chat("qwen", stream=True)
        work = asyncio.get_running_loop().create_future()
        work.set_result(reply)
        sent = Sent(work, str, OpenAIWriter())
        await until(lambda: k.pins() == {"qwen": 1})

        async def receive():
            return {"type": "http.disconnect"}

        async def send(message):
            await asyncio.sleep(3600)  # the connection accepts no more data

        await sent({"type": "http"}, receive, send)
        assert k.gateway.state().running == {}


async def test_a_model_is_released_only_when_the_work_for_a_client_that_left_has_ended():
    """The wait for the thread was cancelled too. So the next call ran beside the one that had not ended."""
    go = threading.Event()

    class Computing(EchoAdapter):
        def pieces(self, *call: Any) -> AsyncGenerator[Any]:
            def work(emit: Any, cancelled: threading.Event) -> None:
                for word in ("one", "two"):
                    emit(TextPiece(word))
                go.wait()

            return stream_from_thread(work)

    make_adapter = lambda value, spec, http: Computing(value, spec)
    async with harness(qwen=4, make_adapter=make_adapter) as k:
        exchange = Exchange(k.rt, k.gateway, "/v1/chat/completions", chat("qwen", stream=True))
        await until(lambda: b"two" in exchange.sent)
        exchange.left.set()
        await settle()
        try:
            assert (k.gateway.state().running, k.pins()) == ({"qwen": 1}, {"qwen": 1})
        finally:
            go.set()
        await exchange.done
        assert k.gateway.state().running == {}


# -- loads


class Slow:
    """The load of a fake model, which ends once `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.began = self.ended = 0

    def __call__(self, verb: str) -> None:
        self.began += 1
        try:
            while not self.go.wait(0.01):
                pass
        finally:
            self.ended += 1


@asynccontextmanager
async def loading(monkeypatch, left_seconds: float, call: Callable[[Any], Awaitable[Any]]):
    """A gateway, the load of `qwen`, and the task `call(gateway)` that began this load."""
    monkeypatch.setattr(queue, "LEFT_SECONDS", left_seconds)
    async with harness() as k:
        load = Slow()
        k.rt.register("qwen", load, backend="fake", size="1GiB", model_type="llm")
        while not load.began:  # on a busy machine a budget may be spent before the load begins
            task = asyncio.ensure_future(call(k))
            await until(lambda task=task: load.began or task.done() and task.exception())
        yield k, load, task
        load.go.set()


def preload(k, *names: str):
    wanted = memory.Preload(models=[{"name": name} for name in names])
    return in_thread_until(lambda cancelled: memory.preload(k.rt, wanted, cancelled))


def claimed(k) -> int:
    return sum(view.claimed_bytes for view in k.rt.status().devices)


async def left(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})


@pytest.mark.parametrize("budget", [None, 0.5])
async def test_a_load_ends_when_its_only_caller_hangs_up_or_its_budget_is_spent(
    monkeypatch, budget
):
    """It went on, and kept the card, although nobody waited for it."""
    more = {} if budget is None else {"x_budget": budget}
    async with loading(monkeypatch, 0.0, lambda k: k.chat("qwen", **more)) as (k, load, task):
        if budget is None:
            await left(task)
        else:
            with pytest.raises(Refused, match="did not answer within its budget"):
                await task
        await until(lambda: load.ended)
        await until(lambda: not claimed(k))


@pytest.mark.parametrize("another", ["call", "preload"])
async def test_a_load_goes_on_for_another_request_that_still_waits(monkeypatch, another):
    """A call waits in the queue of the gateway, and a preload in the ledger."""
    async with loading(monkeypatch, 0.0, lambda k: k.chat("qwen")) as (k, load, task):
        if another == "call":
            second = asyncio.ensure_future(k.chat("qwen"))
            await until(lambda: k.gateway.state().waiting == {"qwen": 2})
        else:
            second = asyncio.ensure_future(asyncio.to_thread(k.rt.preload, "qwen"))
            await until(lambda: k.rt.status().tickets)
        await left(task)
        load.go.set()
        answer = await second
        assert answer.done if another == "preload" else answer_text(answer) == "one two three"
        assert load.began == 1


async def test_a_client_that_tries_again_finds_its_load(monkeypatch):
    """Else a client whose time-out is shorter than the load would begin it again and again."""
    async with loading(monkeypatch, 3600.0, lambda k: k.chat("qwen")) as (k, load, task):
        await left(task)
        again = asyncio.ensure_future(k.chat("qwen", stream=True))
        await until(lambda: k.gateway.state().waiting == {"qwen": 1})
        load.go.set()
        reply = await again
        await until(lambda: k.pins() == {"qwen": 1})
        assert await stream_text(reply) == "one two three"
        await until(lambda: not k.pins())
        assert load.began == 1


async def test_a_preload_over_http_ends_when_its_client_hangs_up(monkeypatch):
    """The models after it in the request are not loaded either."""
    both = lambda k: preload(k, "qwen", "later")
    async with loading(monkeypatch, 0.0, both) as (k, load, task):
        k.rt.register("later", backend="fake", size="1GiB")
        await left(task)
        assert load.ended and not claimed(k)


async def test_a_preload_over_http_that_waits_for_room_ends_when_its_client_hangs_up():
    async with harness(qwen=20, big=20) as k:
        with k.rt.use("qwen"):
            task = asyncio.ensure_future(preload(k, "big"))
            await until(lambda: k.rt.status().tickets)
            await left(task)
        assert not k.rt.status().tickets and not k.rt.here("big")
