"""The queue of calls decides which call may use its model next. Nothing may remain of a cancelled call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.facts import IMPORTANCE, ModelSpec
from gpu_runtime.serving.queue import Hold, LoadShared, Queue, calls_at_once
from tests.clock import Clock
from tests.serving.harness import refusal
from tests.serving.loops import in_loop, settle


class Shelf:
    """A card with room for `room` models, a queue of calls, and the `log` of loads and started calls."""

    def __init__(self, *warm: str, room: int = 1, concurrency: int = 1, limit: int = 256) -> None:
        self.warm, self.room, self.many = list(warm), room, concurrency
        self.holds: list[Hold] = []
        self.log: list[str] = []
        self.clock = Clock(0.0)
        self.queue = Queue(
            self.take, lambda model: model in self.warm, lambda model: self.many, clock=self.clock,
            limit=limit, load_seconds={"slow": 14.0}.get,
        )  # fmt: skip

    def take(self, model: str, importance: int) -> Hold:
        hold = Hold(model, importance, asyncio.get_running_loop())
        self.holds.append(hold)
        if model in self.warm:
            hold.ready.set_result(f"<{model}>")
        else:
            self.log.append(f"load {model}")
        return hold

    def pinned(self) -> list[str]:
        kept = [hold for hold in self.holds if hold.ready.done() and not hold.released]
        return [hold.model for hold in kept if not hold.ready.exception()]

    def arrive(self) -> None:
        """Completes all pending loads that fit after idle models were evicted."""
        for hold in self.holds:
            if hold.ready.done() or hold.released:
                continue
            idle = [model for model in self.warm if model not in self.pinned()]
            while len(self.warm) >= self.room and idle:
                self.warm.remove(idle.pop(0))
            if len(self.warm) < self.room:
                self.warm.append(hold.model)
                hold.ready.set_result(f"<{hold.model}>")
            else:
                hold.waits = hold.waited = True
                hold.waits_for = frozenset(self.pinned())
        self.queue.advance()

    def call(self, model: str, importance: str = "normal", name: str = "") -> Answer:
        return Answer(self, model, IMPORTANCE[importance], name or model)


class Answer:
    """A call that waits until it may start, and then runs until the test ends it."""

    def __init__(self, shelf: Shelf, model: str, importance: int, name: str) -> None:
        self._end = asyncio.Event()
        self.name = name
        self.task = asyncio.ensure_future(self._run(shelf, model, importance))
        # Marks the error as read.
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _run(self, shelf: Shelf, model: str, importance: int) -> None:
        async with shelf.queue.turn(model, importance) as turn:
            assert turn.value == f"<{model}>"
            shelf.log.append(self.name)
            await self._end.wait()

    async def end(self) -> None:
        self._end.set()
        await settle()


@asynccontextmanager
async def done(shelf: Shelf) -> AsyncIterator[None]:
    """At the end of the `with` block no call may wait or run, and no model may be pinned."""
    yield
    await settle()
    assert (shelf.queue.depth(), shelf.queue.active(), shelf.pinned()) == ({}, {}, [])
    assert all(hold.released or hold.ready.exception() for hold in shelf.holds)


async def test_a_warm_model_is_pinned_at_once_and_until_its_last_call():
    """Also between successive calls, so that no other model can take the memory."""
    shelf = Shelf("a", concurrency=2)
    async with done(shelf):
        one, two = shelf.call("a"), shelf.call("a")
        await settle()
        assert (shelf.queue.active(), len(shelf.holds)) == ({"a": 2}, 1)
        await one.end()
        assert shelf.pinned() == ["a"]
        await two.end()
    shelf = Shelf("a")
    async with done(shelf):
        first, second = shelf.call("a"), shelf.call("a")
        await settle()
        await first.end()
        assert len(shelf.holds) == 1
        await second.end()


async def test_calls_start_by_importance_when_a_place_is_free():
    shelf = Shelf("a")
    async with done(shelf):
        answers = [
            shelf.call("a", importance, importance)
            for importance in ("normal", "batch", "low", "urgent")
        ]
        for _ in answers:
            await settle()
            await next(answer for answer in answers if answer.name == shelf.log[-1]).end()
        assert shelf.log == ["normal", "urgent", "low", "batch"]


async def test_models_change_when_their_calls_are_done_not_after_each():
    shelf = Shelf()
    async with done(shelf):
        answers = [shelf.call(model, name=f"{model}{n}") for n in range(4) for model in "ab"]
        for _ in range(12):
            await settle()
            shelf.arrive()
            await settle()
            for answer in answers:
                if answer.name in shelf.log:
                    await answer.end()
        assert shelf.log == ["load a", "load b", "a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3"]


async def test_a_waiting_load_blocks_neither_other_models_nor_earlier_calls():
    shelf = Shelf("a", "c", room=2)
    async with done(shelf):
        running = [shelf.call("a"), shelf.call("c")]
        await settle()
        waiting = shelf.call("b")
        await settle()
        shelf.arrive()
        more = [shelf.call("c", name="c2"), shelf.call("a", name="a2")]
        for answer in [*running, *more]:
            await answer.end()
        assert shelf.log[:3] == ["a", "c", "load b"] and sorted(shelf.log[3:]) == ["a2", "c2"]
        shelf.arrive()
        await settle()
        await waiting.end()


async def test_a_steady_stream_of_a_warm_model_does_not_keep_a_cold_one_out():
    """Once the call of b has waited 30 s longer than new calls of a, a starts no more and is evicted."""
    shelf = Shelf("a")
    async with done(shelf):
        running = shelf.call("a", name="a0")
        await settle()
        cold = shelf.call("b")
        for n in range(1, 20):
            following = shelf.call("a", name=f"a{n}")
            shelf.clock.now += 5.0
            await settle()
            await running.end()
            shelf.arrive()
            await settle()
            if "b" in shelf.log:
                break
            running = following
        assert (shelf.log[-1], shelf.clock.now) == ("b", 35.0)
        await cold.end()
        for _ in range(3):
            shelf.arrive()
            await settle()
        await following.end()


async def test_a_failed_load_fails_all_waiting_calls_and_counts_once():
    shelf = Shelf()
    answers = [shelf.call("a") for _ in range(3)]
    await settle()
    shelf.holds[0].ready.set_exception(RuntimeError("no such file"))
    results = await asyncio.gather(*(answer.task for answer in answers), return_exceptions=True)
    assert [type(error) for error in results] == [RuntimeError, LoadShared, LoadShared]
    assert (shelf.queue.depth(), shelf.queue.active()) == ({}, {})


async def test_a_model_whose_engine_failed_is_pinned_again():
    """A steady stream of calls would keep the pin of a dead object for ever."""
    shelf = Shelf("a", concurrency=2)
    async with done(shelf):
        one, two = shelf.call("a"), shelf.call("a")
        await settle()
        shelf.queue.renew("a")
        await one.end()
        three = shelf.call("a")
        await settle()
        assert (len(shelf.holds), shelf.queue.depth()) == (1, {"a": 1})
        await two.end()
        assert [hold.released for hold in shelf.holds] == [True, False]
        await three.end()


async def test_a_more_important_call_requests_the_model_again():
    """Its load waited with the importance of a batch call, behind all notebooks."""
    shelf = Shelf("a")
    async with done(shelf):
        running = shelf.call("a")
        lesser = shelf.call("b", "batch")
        await settle()
        shelf.arrive()
        better = shelf.call("b", "high")
        await settle()
        asked = [(hold.model, hold.importance, hold.released) for hold in shelf.holds[1:]]
        assert asked == [("b", 30, True), ("b", 5, False)]
        await running.end()
        shelf.arrive()
        await settle()
        await better.end()
        await lesser.end()


async def test_a_full_queue_gives_a_retry_time():
    shelf = Shelf("a", limit=2)
    async with done(shelf):
        answers = []
        for _ in range(3):
            answers.append(shelf.call("a"))
            await settle()
            shelf.clock.now += 4.0
            await answers[-1].end()
        answers = [shelf.call("a") for _ in range(3)]
        await settle()
        with refusal(503, "queue_full", retry_after=8.0):
            async with shelf.queue.turn("a"):
                pass
        for answer in answers:
            await answer.end()


KINDS = st.sampled_from(["call", "end", "cancel", "arrive", "fail", "later"])
actions = st.lists(st.tuples(KINDS, st.integers(0, 7)), max_size=40)


@given(actions, st.integers(1, 2))
def test_nothing_remains_of_any_call_however_it_ends(actions, concurrency):

    @in_loop
    async def play() -> None:
        shelf = Shelf(concurrency=concurrency)
        answers: list[Answer] = []
        async with done(shelf):
            for what, n in actions:
                if what == "call":
                    answers.append(shelf.call("abc"[n % 3], sorted(IMPORTANCE)[n % 5]))
                elif what == "end" and answers:
                    answers[n % len(answers)]._end.set()
                elif what == "cancel" and answers:
                    answers[n % len(answers)].task.cancel()
                elif what == "arrive":
                    shelf.arrive()
                elif what == "fail":
                    loading = [hold for hold in shelf.holds if not hold.ready.done()]
                    if loading:
                        loading[n % len(loading)].ready.set_exception(RuntimeError("failed"))
                elif what == "later":
                    shelf.clock.now += 11.0 * n
                for _ in range(n % 3):  # the ledger may lag behind
                    await asyncio.sleep(0)
                if not any(what == "fail" for what, _ in actions):  # else calls are about to end
                    assert all(count <= concurrency for count in shelf.queue.active().values())
                assert len(shelf.warm) <= shelf.room
            for answer in answers:
                answer._end.set()
            for _ in range(2 * len(answers) + 2):
                await settle()
                shelf.arrive()
            state = (shelf.queue.depth(), shelf.log, shelf.warm)
            assert all(answer.task.done() for answer in answers), state
            await asyncio.gather(*(answer.task for answer in answers), return_exceptions=True)

    play()


async def test_a_waiting_caller_learns_its_place_and_what_its_model_does():
    """A stream that waits sends these words as comments. Without them a caller sees nothing for minutes."""
    shelf = Shelf("warm")
    turns: dict[str, Any] = {}

    async def call(name: str, model: str) -> None:
        async with shelf.queue.turn(model, 10, "", lambda turn: turns.update({name: turn})):
            await asyncio.Event().wait()

    named = (("a", "warm"), ("b", "warm"), ("c", "slow"))
    calls = [asyncio.ensure_future(call(*one)) for one in named]
    await settle()
    shelf.clock.now += 12
    words = {name: shelf.queue.state_of(turn) for name, turn in turns.items()}
    assert words == {
        "a": "warm runs 1 calls",
        "b": "place 1 of 2 in the queue; warm runs 1 calls",
        "c": "place 2 of 2 in the queue; loading slow, 12 of 14 s",
    }
    assert shelf.queue.retry_after() == 2.0, "no call has ended: the load is what is known"
    shelf.holds[-1].waits, shelf.holds[-1].because = True, "warm is in use"
    assert shelf.queue.state_of(turns["c"]).endswith("; slow waits for room: warm is in use")
    said, hold = {}, shelf.holds[-1]
    for away in ("asleep", "in RAM", ""):
        hold.waits, hold.returns_from = False, away
        said[away] = shelf.queue.state_of(turns["c"]).partition("; ")[2].partition(",")[0]
    assert said == {"asleep": "waking slow", "in RAM": "restoring slow", "": "loading slow"}
    for one in calls:
        one.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


# -- how many calls a model runs at once -----------------------------------------------------------
@pytest.mark.parametrize(("backend", "sequences", "calls"), [
    ("vllm", None, 256), ("vllm", 8, 8), ("transformers", None, 1), ("transformers", 2, 1),
    ("llama_cpp", 4, 1), ("ollama", 4, 4),
])  # fmt: skip
def test_the_option_sequences_counts_where_the_engine_computes_them_together(
    backend, sequences, calls
):
    options = {"sequences": sequences} if sequences else {}
    assert calls_at_once(ModelSpec("qwen", backend, options=options)) == calls


def test_llama_cpp_pythons_server_runs_one_call_at_a_time(tmp_path, monkeypatch):
    """If two streams ran at once, it would cut the first one off."""
    spec = ModelSpec("qwen", "llama-server", options={"sequences": 4})
    monkeypatch.setenv("PATH", str(tmp_path))
    assert calls_at_once(spec) == 1
    command = tmp_path / "bin" / "llama-server"
    command.parent.mkdir()
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent))
    assert calls_at_once(spec) == 4
