"""The gateway over a real runtime.

The tests check which model answers, which calls are refused, and that nothing remains of a call that ended.
"""

import asyncio
import contextlib
import threading

import pytest

from gpu_runtime import Runtime
from gpu_runtime.errors import BadSetting, DoesNotFit, EngineDied, LoadFailed, NotAModel, StillInUse
from gpu_runtime.facts import IMPORTANCE, Evidence, ModelSpec
from gpu_runtime.owner import maintenance
from gpu_runtime.serving import queue
from gpu_runtime.serving.breaker import PLAIN_TEXT
from gpu_runtime.serving.choices import ModelFacts
from gpu_runtime.serving.engines.base import EngineFailed
from gpu_runtime.serving.requests import Refused
from gpu_runtime.serving.tasks import Profile, ServingConfig, Task
from gpu_runtime.serving.thread_stream import in_thread
from tests.clock import PATIENCE
from tests.serving.harness import Guard, answer_text, chat, harness, refusal, stream_text
from tests.serving.loops import settle, until

ALONE = {"sequences": 1, "context_length": 64}  # one call at a time
DIED = EngineDied("the engine of qwen (pid 7) is gone: killed.", name="qwen", pid=7)
FAILED = EngineFailed("qwen failed: HTTP 500", name="qwen", why="HTTP 500")


async def test_an_answer_and_the_first_event_of_a_stream_name_their_model():
    async with harness(qwen=4) as k:
        reply = await k.chat("qwen", "hello there", x_client_id="bot", x_priority="high")
        assert (answer_text(reply), reply.json["model"]) == ("hello there", "qwen")
        assert reply.json["x_gpu"] == {"asked": "qwen", "model": "qwen"}
        assert reply.headers == {"X-GPU-Asked": "qwen", "X-GPU-Model": "qwen"}
        assert k.gateway.state().counts == {"answered": 1}
        stream = await k.chat("qwen", "hello there", stream=True)
        assert stream.events.first["x_gpu"] == reply.json["x_gpu"]
        await until(lambda: k.pins() == {"qwen": 1})
        assert await stream_text(stream) == "hello there"


async def test_a_call_of_a_model_on_its_device_pins_it_without_a_thread(monkeypatch):
    """The pin lasts as long as the call. Starting a thread at each call took an eighth of the gateway's time."""
    async with harness(qwen=4) as k:
        await k.chat("qwen")
        await until(lambda: not k.pins())  # the thread of the load releases the model
        monkeypatch.setattr(queue, "start_short", None)
        reply = await k.chat("qwen", stream=True)
        with pytest.raises(StillInUse):
            await in_thread(lambda: k.rt.evict("qwen", timeout=0.0))
        assert await stream_text(reply) == "one two three"
        await until(lambda: not k.pins())
        assert k.rt.evict("qwen", timeout=0.0).done, "an idle model can be evicted at once"


async def test_a_model_that_leaves_while_its_call_starts_is_loaded_again(monkeypatch):
    """The model may leave after the queue has found it on its device, and before the call pins it."""
    async with harness(qwen=4) as k:
        await k.chat("qwen")
        await until(lambda: not k.pins())  # the thread of the load releases the model
        k.rt.evict("qwen")
        monkeypatch.setattr(Runtime, "here", lambda rt, name: True)
        assert answer_text(await k.chat("qwen")) == "one two three"


async def test_nothing_remains_of_a_cancelled_call():
    async with harness(
        qwen=4, scripts={"qwen": [asyncio.Event(), asyncio.Event()]}, options={"qwen": ALONE}
    ) as k:
        running = asyncio.ensure_future(k.chat("qwen"))
        await until(lambda: k.log)
        waiting = asyncio.ensure_future(k.chat("qwen"))
        await settle()
        assert k.gateway.state().waiting == {"qwen": 1}
        for call in (waiting, running):
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert k.log[-1] == "qwen ended"
        reply = await k.chat("qwen", stream=True)
        await anext(reply.events)
        await reply.aclose()
        assert k.log[-1] == "qwen ended" and k.gateway.state().counts["cancelled"] == 2


@pytest.mark.thorough
async def test_an_urgent_call_is_urgent_among_other_processes_too():
    """After the answer the model has its own importance again."""
    book = "memory:urgent-call"
    with Runtime(devices="sim:24GiB,host:64GiB", ledger=book, eviction_grace_seconds=0) as other:
        other.register("theirs", backend="fake", size="14 GiB", importance="high")
        other.preload("theirs")
        async with harness(ledger=book, ours=14) as k:
            with pytest.raises(Refused, match="within its budget"):
                await k.chat("ours", x_budget=0.5)
            await k.chat("ours", x_priority="urgent")
            shown = {IMPORTANCE["high"], IMPORTANCE["normal"]}
            await until(lambda: {one.importance for one in k.rt.status().leases()} == shown)


class SlowLoad:
    """The origin of a fake model whose load takes until `go` is set."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self, step: str) -> None:
        self.begun.set()
        assert self.go.wait(PATIENCE)


async def test_a_load_that_has_begun_is_not_requested_again():
    """A batch call waits for the memory of another process. Once its load has begun, an urgent call shares the load."""
    load, requested, book = SlowLoad(), [], "memory:test-gateway-begun"
    async with harness(ledger=book) as k:
        use = k.rt.use
        k.rt.use = lambda name, **more: requested.append(name) or use(name, **more)
        k.rt.register("big", load, backend="fake", size="13 GiB", model_type="llm")
        with Runtime(devices="sim:24GiB,host:64GiB", ledger=book) as other:
            other.register("train", backend="fake", size="10 GiB")
            with other.use("train"):
                batch = asyncio.ensure_future(k.chat("big", x_priority="batch"))
                await until(lambda: k.rt.status().tickets)
        await until(load.begun.is_set)
        urgent = asyncio.ensure_future(k.chat("big", x_priority="urgent"))
        await settle()
        load.go.set()
        await asyncio.gather(batch, urgent)
        assert requested == ["big"]


async def test_a_model_that_need_not_leave_serves_calls_while_another_loads():
    """c waits until a or b is idle. It gets the room of a, so calls of b start again, although c is more important."""
    load, scripts = SlowLoad(), {name: [asyncio.Event()] for name in "ab"}
    ends = {name: script[0] for name, script in scripts.items()}
    async with harness(a=8, b=8, scripts=scripts) as k:
        k.rt.register("c", load, backend="fake", size="13 GiB", model_type="llm")
        running = {name: asyncio.ensure_future(k.chat(name)) for name in "ab"}
        await until(lambda: len(k.log) == 2)
        c = asyncio.ensure_future(k.chat("c", x_priority="urgent"))
        await settle()
        await until(lambda: k.gateway.queue._engines()["c"].waits_for == {"a", "b"})
        ends["a"].set()
        await until(load.begun.is_set)
        assert answer_text(await k.chat("b", "meanwhile")) == "meanwhile"
        load.go.set()
        ends["b"].set()
        await asyncio.gather(c, *running.values())


async def test_an_unknown_model_is_a_404_with_the_nearest_name(monkeypatch):
    """Ollama names models like `qwen:8b`. A name with a colon is a cloud only if its provider is known.

    For the names, no file of a model is read: the event loop stood still meanwhile.
    """
    async with harness(qwen=4) as k:
        monkeypatch.setattr(k.rt, "_source_facts", None)
        for name in ("qwem", "qwen:8b", "nobody:x", "task:qwem", "task:"):
            with refusal(404, "model_not_found"):
                await k.chat(name)
        with pytest.raises(Refused, match="Did you mean qwen"):
            await k.chat("qwem")
        assert k.gateway.state().breakers == {} and k.where() == {"qwen": "disk"}


async def test_a_fallback_answers_only_if_configured():
    fallbacks = ServingConfig(fallback={"qwen": ("phi",)})
    async with harness(fallbacks, qwen=4, phi=4, scripts={"qwen": [DIED]}) as k:
        reply = await k.chat("qwen", "hello")
        assert (reply.model, answer_text(reply), reply.json["model"]) == ("phi", "hello", "phi")
        told = reply.json["x_gpu"]
        assert (told["asked"], told["model"]) == ("qwen", "phi") and "is gone" in told["because"]
        assert reply.headers["X-GPU-Because"] == told["because"]
        k.scripts["qwen"] = [DIED]  # before its first event another model may answer
        stream = await k.chat("qwen", "hello", stream=True)
        assert (stream.model, stream.events.first["x_gpu"]["model"]) == ("phi", "phi")
        assert await stream_text(stream) == "hello"
    async with harness(qwen=4, phi=4, scripts={"qwen": [FAILED]}) as k:
        with refusal(503, match="qwen could not be answered. qwen: qwen failed: HTTP 500"):
            await k.chat("qwen", "hello")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_whose_engine_died_before_its_answer_is_repeated_once(stream):
    """The engine may have died before the call. A second death ends the call, because the call may be its cause."""
    async with harness(qwen=4, scripts={"qwen": [DIED]}) as k:
        reply = await k.chat("qwen", "hello", stream=stream)
        text = await stream_text(reply) if stream else answer_text(reply)
        assert (reply.model, text, reply.because) == ("qwen", "hello", "")
        assert k.gateway.state().breakers["qwen"].failures == 0
        assert k.gateway.queue.active() == {}
        k.scripts["qwen"] = [DIED, DIED]
        with pytest.raises(Refused, match="the engine .* is gone"):
            await k.chat("qwen", "hello", stream=stream)
        assert k.gateway.state().breakers["qwen"].failures == 2
        assert k.scripts["qwen"] == []


async def test_a_fallback_answers_before_a_dead_engine_is_tried_again():
    """The fallback needs no reload. If the fallback fails too, the requested model is tried once more."""
    fallbacks = ServingConfig(fallback={"qwen": ("phi",)})
    scripts = {"qwen": [DIED], "phi": [FAILED]}
    async with harness(fallbacks, qwen=4, phi=4, scripts=scripts) as k:
        reply = await k.chat("qwen", "hello")
        assert (reply.model, answer_text(reply)) == ("qwen", "hello")
        assert scripts == {"qwen": [], "phi": []}
        assert k.gateway.state().counts.get("stood_in", 0) == 0, "the requested model answered"


async def test_a_call_that_kills_every_engine_is_tried_once_more_on_the_first_alone():
    fallbacks = ServingConfig(fallback={"qwen": ("phi",)})
    scripts = {"qwen": [DIED, DIED], "phi": [DIED]}
    async with harness(fallbacks, qwen=4, phi=4, scripts=scripts) as k:
        with refusal(503):
            await k.chat("qwen", "hello")
        begun = [line for line in k.log if not line.endswith("ended")]
        assert begun == ["qwen: hello", "phi: hello", "qwen: hello"]
        counts = k.gateway.state().counts
        assert counts == {"refused_503": 1}, "each call counts once"


async def test_a_fallback_that_cannot_read_the_prompt_is_passed_over():
    """A mistake in the call ends it only at the model that was requested."""
    serving = ServingConfig(fallback={"qwen": ("short", "long")})
    options = {"short": {"context_length": 8}, "long": {"context_length": 32768}}
    scripts = {"qwen": [FAILED]}
    async with harness(serving, qwen=4, short=4, long=4, options=options, scripts=scripts) as k:
        reply = await k.chat("qwen", "x" * 10_000)
        assert reply.model == "long" and k.gateway.state().counts["stood_in"] == 1


@pytest.mark.parametrize(("options", "config", "length"), [
    ({"context_length": 8}, {"context_at_load": 16}, 8),
    ({}, {"context_at_load": 16, "max_position_embeddings": 32}, 16),
    ({}, {"max_position_embeddings": 32, "text_config": {"max_position_embeddings": 64}}, 32),
    ({}, {"text_config": {"max_position_embeddings": 64}}, 64), ({}, {}, None),
])  # fmt: skip
def test_the_context_of_a_model_is_that_of_its_load_else_of_its_config(options, config, length):
    spec = ModelSpec("qwen", "fake", size=3, options=options)
    assert ModelFacts(spec, Evidence(config=config)).context_length == length
    sizes = ((9, 5), (0, 5), (0, 0))
    known = [ModelFacts(spec, Evidence(file_bytes=f, weight_bytes=w)).file_bytes for f, w in sizes]
    assert known == [9, 5, 3], "of the files, else of the weights, else as declared"


async def test_what_is_known_of_a_model_is_that_of_its_present_specification():
    """Under its own name and under an alias. A task has no facts of its own."""
    serving = ServingConfig(aliases={"gpt": "qwen"}, tasks={"t": Task(("qwen",))})
    async with harness(serving, qwen=4, options={"qwen": {"context_length": 64}}) as k:
        assert [k.gateway.facts(name).context_length for name in ("gpt", "qwen")] == [64, 64]
        k.rt.forget("qwen")
        k.rt.register("qwen", backend="fake", size="1 GiB", model_type="llm", context_length=128)
        assert k.gateway.facts("gpt").context_length == 128
        assert k.gateway.facts("task:t") is k.gateway.facts("nobody") is None


async def test_a_fallback_answers_for_a_model_that_does_not_fit():
    """The fallback with the smaller context is tried first. The reason in the answer has the figures."""
    serving = ServingConfig(fallback={"huge": ("long", "short")})
    options = {"long": {"context_length": 32768}, "short": {"context_length": 4096}}
    async with harness(serving, huge=30, long=4, short=4, options=options) as k:
        reply = await k.chat("huge")
        assert reply.model == "short" and "huge needs 30.0 GiB on one device" in reply.because


@pytest.mark.parametrize(("model_type", "backend", "kind", "body"), [
    ("llm", "fake", "images", {"prompt": "a fox"}),
    ("diffusion", "fake", "chat", {"messages": chat("x")["messages"]}),
    ("reranker", "fake", "completions", {"prompt": "a"}),
    ("diffusion", "fake", "embeddings", {"input": "a"}),
    ("llm", "llama_cpp", "embeddings", {"input": "a"}),
])  # fmt: skip
async def test_a_model_is_not_loaded_for_a_call_that_its_type_cannot_serve(
    model_type, backend, kind, body
):
    async with harness() as k:
        source = "" if backend == "fake" else "m.gguf"
        k.rt.register("m", backend=backend, size="4GiB", model_type=model_type, source=source)
        with refusal(400, match="model=m cannot be used here: it is of type"):
            await k.gateway.answer(kind, {"model": "m", **body})
        assert k.gateway.queue.loads == 0


async def test_a_callers_mistake_is_not_tried_on_other_models():
    serving = ServingConfig(fallback={"qwen": ("phi",)})
    async with harness(serving, qwen=4, phi=4) as k:
        for _ in range(6):
            with refusal(400):
                await k.chat("qwen", tools=[{"function": {"name": "no template takes it"}}])
        assert k.gateway.state().breakers["qwen"].failures == 0
        assert k.where()["phi"] == "disk"


async def test_closing_refuses_running_and_new_calls():
    """A stream must not look complete. These errors are no failures of the model."""
    held, read = asyncio.Event(), asyncio.Event()
    async with harness(qwen=12, phi=12, scripts={"qwen": [read, held]}) as k:
        stream = await k.chat("qwen", "one two", stream=True)
        calls = [asyncio.ensure_future(k.chat(model)) for model in ("qwen", "phi")]
        await until(lambda: k.gateway.queue.depth() == {"phi": 1})
        await until(lambda: k.gateway.queue.active() == {"qwen": 2})
        rest = asyncio.ensure_future(_errors(stream))
        await settle()
        loads = k.gateway.queue.loads
        await k.gateway.close()
        for call in calls:
            with pytest.raises(Refused, match="the server is ending") as refused:
                await call
            assert (refused.value.status, refused.value.headers) == (503, {"Retry-After": "5"})
        assert await rest == ["ending"]
        with pytest.raises(Refused, match="the server is ending"):
            await k.chat("phi")
        assert k.gateway.queue.loads == loads and k.gateway.queue.active() == {}
        assert k.gateway.state().breakers["qwen"].failures == 0


async def _errors(reply) -> list[str]:
    return [event["error"]["code"] async for event in reply.events if "error" in event]


async def test_what_a_caller_does_wrong_never_closes_a_model():
    """An engine may answer with 500 to a call that it cannot read. A plain call after it shows whose fault it is."""
    text = "qwen failed: HTTP 500: cannot parse the tool"
    wrong = EngineFailed(text, name="qwen", why="HTTP 500", status=500)
    wrong.only_this_call = True
    async with harness(qwen=4, scripts={"qwen": [wrong, None] * 6}) as k:
        for stream in (False, True) * 3:
            with refusal(400, "engine_refused", match="the cause is in this one") as refused:
                await k.chat("qwen", stream=stream)
            assert refused.value.headers == {}, "a client does not repeat it"
            assert k.gateway.state().breakers["qwen"].failures == 0
        assert answer_text(await k.chat("qwen", "hi")) == "hi"


async def test_a_client_whose_calls_kill_the_engine_does_not_close_it_for_others():
    """A call that ends the engine cannot be judged by a plain call. So another client's call is the next probe."""
    async with harness(qwen=4, scripts={"qwen": [DIED] * 5}) as k:
        body = chat("qwen", "one")
        for _ in range(3):
            with pytest.raises(Refused):
                await k.gateway.answer("chat", body, "ana")
        with pytest.raises(Refused, match="left alone"):
            await k.gateway.answer("chat", body, "ana")
        assert answer_text(await k.gateway.answer("chat", body, "ben")) == "one"
        assert k.gateway.state().breakers["qwen"].state == "closed"


async def test_five_failures_open_the_breaker_and_one_probe_closes_it():
    """If a cancelled probe blocked the next probe, the model would never get calls again."""
    async with harness(qwen=4, scripts={"qwen": [FAILED] * 5}) as k:
        for _ in range(5):
            with pytest.raises(Refused):
                await k.chat("qwen")
        begun = len(k.log)
        with refusal(503, "breaker_open", retry_after=30.0):
            await k.chat("qwen")
        assert len(k.log) == begun, "it fails at once"
        k.clock.now += 30.0
        gate = asyncio.Event()
        k.scripts["qwen"] = [gate, gate]
        for ends in (asyncio.Task.cancel, lambda probe: gate.set()):
            begun = len(k.log)
            probe = asyncio.ensure_future(k.chat("qwen"))
            await until(lambda begun=begun: len(k.log) > begun)
            with pytest.raises(Refused, match="left alone"):
                await k.chat("qwen")
            ends(probe)
            await asyncio.gather(probe, return_exceptions=True)
        assert answer_text(await probe) == answer_text(await k.chat("qwen")) == "one two three"


async def test_calls_that_waited_while_the_breaker_opened_fail_at_once():
    async with harness(qwen=4, scripts={"qwen": [FAILED] * 20}, options={"qwen": ALONE}) as k:
        results = await asyncio.gather(*(k.chat("qwen") for _ in range(12)), return_exceptions=True)
        assert all(isinstance(error, Refused) for error in results)
        assert sum("left alone" in str(error) for error in results) == 7


async def test_a_failed_load_counts_once_however_many_wait_for_it():
    async with harness(qwen=4, options={"qwen": {"fails": True}}) as k:
        results = await asyncio.gather(*(k.chat("qwen") for _ in range(8)), return_exceptions=True)
        assert all("fails to load because its options say so" in str(error) for error in results)
        assert k.gateway.state().breakers["qwen"].failures == 1


async def test_three_decode_failures_in_a_row_reload_the_model_once():
    failed = RuntimeError("llama_decode returned -3")
    async with harness(qwen=4, scripts={"qwen": [failed, failed, None, *[failed] * 4]}) as k:
        for number in range(6):
            with contextlib.suppress(Refused):
                await k.chat("qwen")
            await settle()
            reloads = k.gateway.state().counts.get("reloads", 0)
            assert reloads == (number == 5), "an answer ends the row of failures"
        await until(lambda: k.where()["qwen"] != "sim:0")
        assert k.gateway.state().counts["reloads"] == 1
        with pytest.raises(Refused):
            await k.chat("qwen")
        assert answer_text(await k.chat("qwen")) == "one two three"
        assert k.gateway.state().counts["reloads"] == 1


async def test_a_client_profile_changes_the_prompt_that_the_engine_receives():
    reads = "{# reads /think and /no_think #}"
    written = reads + "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}|{% endfor %}"
    profile = Profile(system="Be brief.", thinking=False, defaults={"max_tokens": 100})
    serving = ServingConfig(clients={"bot": profile})

    async def prompt(**more):
        return answer_text(await k.chat("qwen", "hi", **more))

    async with harness(serving, qwen=4, options={"qwen": {"chat_template": written}}) as k:
        assert await prompt() == "user:hi|"
        bot = "system:Be brief.|user:hi"
        assert await prompt(x_client_id="bot") == f"{bot} /no_think|"
        assert await prompt(x_client_id="bot", x_thinking=True) == f"{bot} /think|"
    switch = "{% if enable_thinking is defined %}<think={{ enable_thinking }}>{% endif %}"
    knows = {"chat_template": "{{ messages[0]['content'] }} " + switch, "thinking": True}
    async with harness(serving, qwen=4, options={"qwen": knows}) as k:
        assert await prompt() == "hi <think=True>"
        assert await prompt(x_thinking=False) == "hi <think=False>"


async def test_a_client_in_cooldown_gets_retry_after():
    async with harness(qwen=4) as k:
        await k.chat("qwen", x_client_id="bot", x_cooldown=10)
        k.clock.now += 4
        with refusal(429, retry_after=6.0):
            await k.chat("qwen", x_client_id="bot")
        await k.chat("qwen", x_client_id="other")
        k.clock.now += 6
        await k.chat("qwen", x_client_id="bot")


async def test_a_task_is_served_by_its_first_candidate_unless_another_is_warm():
    tasks = {"free": Task(("a", "b")), "pinned": Task(("a", "b"), pin_primary=True)}
    async with harness(ServingConfig(tasks=tasks), a=12, b=12) as k:
        await k.chat("b")
        reply = await k.chat("task:free")
        assert (reply.model, reply.because) == ("b", "task:free: it is warm and a is not")
        assert (await k.chat("task:pinned")).model == "a"
        assert (await k.chat("task:free")).model == "a"
        assert k.gateway.state().counts["stood_in"] == 0, "a candidate is no fallback"


async def test_a_task_leaves_out_a_model_that_is_slower_than_its_budget():
    tasks = {"quick": Task(("a",), budget_s=10.0)}
    async with harness(ServingConfig(tasks=tasks), a=12) as k:
        k.gateway.costs.add_load("a", 47.0)
        with refusal(504, "budget_too_short") as refused:
            await k.chat("task:quick")
        assert refused.value.facts["expected_seconds"] == 47.0 and k.where() == {"a": "disk"}
        await k.chat("a")
        assert (await k.chat("task:quick")).model == "a", "it is warm now"


async def evicted(k, name: str) -> None:
    """Evicts a model, as soon as the thread of the last call has ended its use."""
    await k.gateway._holds.ended(name)
    k.rt.evict(name)


async def test_one_slow_load_refuses_calls_with_a_budget_not_for_ever():
    """A refusal must not prevent the measurement that would lift it."""
    async with harness(a=12) as k:
        k.gateway.costs.add_load("a", 60.0)
        refused = 0
        for _ in range(12):
            try:
                await k.chat("a", x_budget=20.0)
            except Refused as error:
                assert error.code == "budget_too_short"
                refused += 1
            await evicted(k, "a")
        assert refused == 3
        assert k.gateway.costs.load_seconds("a") < 60.0


async def test_the_first_import_of_a_library_is_no_load(monkeypatch):
    """It takes seconds, once in the life of the server, and would refuse calls with a budget."""
    seen = iter([(False,), (True,), (True,), (True,)])
    monkeypatch.setattr(queue, "_imported", lambda: next(seen))
    async with harness(a=12) as k:
        await k.chat("a")
        assert "a" not in dict(k.gateway.costs._loads.keys())
        await evicted(k, "a")
        await k.chat("a")
        assert "a" in dict(k.gateway.costs._loads.keys())


async def test_a_model_that_never_fits_is_507_and_not_repeated():
    """SDKs repeat a 503. With a fallback that only fails for now, the answer is still 503."""
    async with harness(giant=4000) as k:
        with refusal(507, "does_not_fit") as refused:
            await k.chat("giant")
        assert refused.value.facts["failures"]


async def test_a_budget_that_is_spent_ends_the_call():
    """The budget of a call counts before that of its task."""
    tasks = {"slow": Task(("a",), budget_s=3000.0), "quick": Task(("a",), budget_s=0.01)}
    scripts = {"a": [asyncio.Event()] * 2}
    async with harness(ServingConfig(tasks=tasks), a=4, scripts=scripts) as k:
        with refusal(504, "budget_spent") as refused:
            await k.chat("task:slow", x_budget=0.05)
        assert refused.value.facts["budget_seconds"] == 0.05
        assert k.gateway.state().counts["refused_504"] == 1
        # One second is enough for the first event even on a busy machine.
        reply = await k.chat("a", x_budget=1.0, stream=True)
        assert [event async for event in reply.events][-1]["error"]["code"] == "budget_spent"
        assert f"a: {PLAIN_TEXT}" not in k.log, "no call is made to find whose fault it is"
        assert (await k.chat("task:quick", x_budget=600)).model == "a"


async def test_a_task_that_is_removed_during_its_call_loses_no_answer():
    """The time to stay warm was read at the end of the call, which then was a 404."""
    end = asyncio.Event()
    config = ServingConfig(tasks={"classify": Task(("a",), keep_alive_s=20)})
    async with harness(config, a=4, scripts={"a": [end]}) as k:
        call = asyncio.ensure_future(k.chat("task:classify"))
        await until(lambda: k.log)
        k.gateway._tasks.content = ServingConfig
        end.set()
        assert answer_text(await call) == "one two three"
        assert k.gateway.warm_seconds("a") == 20


async def test_a_model_is_evicted_after_the_idle_time_of_its_type():
    """A language model is evicted after 300 s without calls, as in Model Boss. `x_stay_warm` overrides this time."""
    async with harness(llm=4, eyes=4, options={"eyes": {"model_type": "vision"}}) as k:
        await k.chat("llm")
        await k.chat("eyes")
        for after, where in (
            (59, {"llm": "sim:0", "eyes": "sim:0"}),
            (1, {"llm": "sim:0", "eyes": "host"}),
            (240, {"llm": "host", "eyes": "host"}),
        ):
            k.clock.now += after
            k.gateway.keep_warm.evict_due()
            await until(lambda where=where: k.where() == where)
        await k.chat("llm", x_stay_warm=0)
        await until(lambda: k.where()["llm"] == "host")


async def test_the_catalogues_keep_alive_counts_in_serving():
    """It replaces the idle time of the model's type. A task's own time and `x_stay_warm` override it."""
    stays = {name: {"keep_alive": 1000} for name in ("long", "short", "task", "both")}
    tasks = {name: Task((name,), keep_alive_s=20) for name in ("task", "both")}
    async with harness(ServingConfig(tasks=tasks), **dict.fromkeys(stays, 4), options=stays) as k:
        await k.chat("long")
        await k.chat("short")
        await k.chat("short", x_stay_warm=5)
        await k.chat("task:task")
        await k.chat("task:both", x_stay_warm=5)
        seconds = {name: k.gateway.keep_warm.until(name) - k.clock.now for name in stays}
        assert seconds == {"long": 1000, "short": 5, "task": 20, "both": 5}


async def test_a_full_queue_has_a_place_for_a_client_with_few_calls():
    gate = asyncio.Event()
    scripts, settings = {"qwen": [gate] * 9}, {"gpu_serve_queue": 2}
    async with harness(qwen=4, scripts=scripts, options={"qwen": ALONE}, settings=settings) as k:
        greedy = [asyncio.ensure_future(k.chat("qwen", x_client_id="greedy"))]
        await until(lambda: k.log)
        for _ in range(2):
            greedy.append(asyncio.ensure_future(k.chat("qwen", x_client_id="greedy")))
            await settle()
        polite = asyncio.ensure_future(k.chat("qwen", x_client_id="polite"))
        await until(lambda: greedy[2].done())
        with pytest.raises(Refused) as refused:
            await greedy[2]
        assert (refused.value.code, bool(refused.value.headers)) == ("queue_full", True)
        assert k.gateway.state().waiting == {"qwen": 2}
        gate.set()
        await asyncio.gather(polite, *greedy[:2])


async def test_models_and_tasks_are_listed_and_the_state_has_the_cloud_guard():
    serving = ServingConfig(tasks={"sum": Task(("qwen",))})
    async with harness(serving, qwen=4, guard=Guard(False)) as k:
        rows = {row["id"]: row["x_gpu"] for row in k.gateway.models()}
        qwen = {"model_type": "llm", "backend": "fake", "warm": False}
        assert rows == {"qwen": qwen, "task:sum": {"candidates": ["qwen"]}}
        assert k.gateway.state().allow_cloud is False


NO_FAULTS = (
    ValueError("top_k has to be positive"),
    NotAModel("it is no model", name="qwen", source="/m"),
    LoadFailed("the file is damaged", name="qwen", source="/m", mistake=True),
    DoesNotFit("it does not fit"),
    BadSetting("gpu_layers", "x", "a number"),
)
FAULTS = (
    DIED,
    RuntimeError("cuBLAS failed"),
    LoadFailed("its process ended", name="qwen", source="/m", log="/tmp/log"),
)


@pytest.mark.parametrize("error", (*NO_FAULTS, *FAULTS), ids=lambda error: str(error)[:20])
async def test_only_faults_of_an_engine_open_a_breaker(error):
    """Mistakes of a caller or of the catalogue, and a lack of memory, would otherwise lock a model for everybody."""
    settings = {"gpu_serve_breaker_failures": 2, "gpu_serve_breaker_seconds": 7}
    scripts = {"qwen": [error] * 2}
    async with harness(qwen=4, scripts=scripts, settings=settings) as k:
        for _ in range(2):
            with pytest.raises(Refused):
                await k.chat("qwen")
        state = k.gateway.state().breakers["qwen"]
        assert state.state == ("open" if error in FAULTS else "closed")
        assert state.retry_after == (7.0 if error in FAULTS else 0.0)


async def test_a_cold_model_waits_no_longer_than_gpu_most_wait():
    """The bound of the operator reaches the queue. Without it, five times the measured load counts, at least 3 s."""
    for given, loads, bound in ((7.0, [], 7.0), (None, [], 3.0), (None, [2.0], 10.0)):
        async with harness(qwen=4, settings={"gpu_most_wait": given}) as k:
            for seconds in loads:
                k.gateway.costs.add_load("qwen", seconds)
            assert k.gateway.queue._most_wait("qwen") == bound


async def test_calls_that_overlap_keep_no_model_from_another_process(monkeypatch):
    """Each new call used the pin of the running calls, so the model was never idle."""
    monkeypatch.setattr(maintenance, "pause_uses", lambda *_: None)  # no other process asks here
    first, second = asyncio.Event(), asyncio.Event()
    async with harness(qwen=14, scripts={"qwen": [first, second]}) as k:
        k.gateway.queue._concurrency = lambda _: 2
        running = asyncio.ensure_future(k.chat("qwen"))
        await until(lambda: k.gateway.state().running == {"qwen": 1})
        k.rt._session.residents["qwen"].pauses = True
        later = asyncio.ensure_future(k.chat("qwen"))
        await until(lambda: k.gateway.state().waiting == {"qwen": 1})
        assert k.pins() == {"qwen": 1}
        first.set()
        await running
        await until(lambda: k.pins() == {})
        k.rt._session.residents["qwen"].pauses = False
        second.set()
        assert answer_text(await later)


@pytest.mark.parametrize("of_the_call", [True, False])
async def test_a_fault_after_the_first_event_counts_unless_the_model_answers_a_plain_call(
    of_the_call,
):
    """It counted always, so the streams of one caller could close the model for everybody."""
    wrong = RuntimeError("the template failed at the fifth token")
    if of_the_call:
        wrong.only_this_call = True  # type: ignore[attr-defined]
    settings = {"gpu_serve_breaker_failures": 2, "gpu_serve_breaker_seconds": 7}
    script = [(wrong,), None] * 2 if of_the_call else [(wrong,)] * 2
    options = {"scripts": {"qwen": script}, "settings": settings}
    async with harness(ServingConfig(fallback={"qwen": ("phi",)}), qwen=4, phi=4, **options) as k:
        for _ in range(2):
            reply = await k.chat("qwen", stream=True)
            events = [event async for event in reply.events]
            assert events[-1]["error"]["code"] == "broken_off", "no other model goes on with it"
        state = k.gateway.state().breakers["qwen"].state
        assert state == ("closed" if of_the_call else "open")
        await until(lambda: k.pins() == {})
