"""The gateway over a real runtime: who answers, who is told why not, and that nothing is left of any call."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from gpu_runtime import Runtime
from gpu_runtime.errors import EngineDied
from gpu_runtime.facts import IMPORTANCE
from gpu_runtime.serving.requests import Refused
from gpu_runtime.serving.routing.fallback import CloudGuard
from gpu_runtime.serving.routing.tasks import Profile, ServingConfig, Task
from tests.serving.kitchen import chat, heard, kitchen, said
from tests.serving.loops import in_loop, settle, until

ALONE = {"sequences": 1, "context_length": 64}  # one call at a time
DIED = EngineDied("the engine of qwen (pid 7) is gone: killed.", name="qwen", pid=7)


@in_loop
async def test_an_answer_says_which_model_gave_it():
    """In its body and in its headers; and the model is let go of."""
    async with kitchen(qwen=4) as k:
        reply = await k.chat("qwen", "hello there", x_client_id="bot", x_priority="high")
        assert said(reply) == "hello there"
        assert reply.json["model"] == "qwen" and reply.json["x_gpu"] == {
            "asked": "qwen",
            "model": "qwen",
        }
        assert reply.headers == {"X-GPU-Asked": "qwen", "X-GPU-Model": "qwen"}
        assert k.gateway.state().counts == {"answered": 1}


@in_loop
async def test_a_stream_says_the_same_piece_by_piece():
    """Its model stays pinned until its last event."""
    async with kitchen(qwen=4) as k:
        reply = await k.chat("qwen", "hello there", stream=True)
        assert reply.events.first["x_gpu"] == {"asked": "qwen", "model": "qwen"}
        await until(lambda: k.pins() == {"qwen": 1})
        assert await heard(reply) == "hello there"


@in_loop
async def test_a_stream_that_nobody_reads_lets_go_when_it_is_closed():
    """A client may be gone before the first event is sent."""
    async with kitchen(qwen=4) as k:
        reply = await k.chat("qwen", stream=True)
        await reply.aclose()
        await reply.aclose()


@in_loop
async def test_whoever_goes_away_leaves_nothing_behind():
    """While waiting, while the answer is made, and in the middle of a stream."""
    async with kitchen(
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


@in_loop
async def test_whoever_goes_away_while_the_ledger_has_no_room_takes_the_ticket_along():
    """Another process holds the card."""
    other = Runtime(devices="sim:24GiB,host:64GiB", ledger="memory:test-gateway-ticket")
    other.register("train", backend="fake", size="20 GiB")
    try:
        with other.use("train"):
            async with kitchen(qwen=4, ledger="memory:test-gateway-ticket") as k:
                waiting = asyncio.ensure_future(k.chat("qwen"))
                await until(lambda: k.rt.status().tickets)
                waiting.cancel()
                await until(lambda: not k.rt.status().tickets)
    finally:
        other.close()


@in_loop
async def test_an_urgent_call_goes_before_other_processes_too():
    """As `rt.use` with that importance would; and when it is answered its model is what it was."""
    book = "memory:urgent-call"
    with Runtime(devices="sim:24GiB,host:64GiB", ledger=book, eviction_grace_seconds=0) as other:
        other.register("theirs", backend="fake", size="14 GiB", importance="high")
        other.preload("theirs")
        async with kitchen(ledger=book, ours=14) as k:
            with pytest.raises(
                Refused, match="within its budget"
            ):  # theirs is more important, and stays
                await k.chat("ours", x_budget=0.5)
            await k.chat("ours", x_priority="urgent")
            await until(
                lambda: (
                    {lease.importance for lease in k.rt.status().leases()}
                    == {5, IMPORTANCE["normal"]}
                )
            )


@in_loop
async def test_a_model_without_room_waits_and_others_go_on():
    """What another process holds is no reason to hold up what fits."""
    other = Runtime(devices="sim:24GiB,host:64GiB", ledger="memory:test-gateway-room")
    other.register("train", backend="fake", size="10 GiB")
    try:
        async with kitchen(qwen=4, big=16, ledger="memory:test-gateway-room") as k:
            with other.use("train"):
                waiting = asyncio.ensure_future(k.chat("big", "at last", x_priority="urgent"))
                await until(lambda: k.rt.status().tickets)
                assert [said(await k.chat("qwen", str(n))) for n in range(5)] == list("01234")
                assert not waiting.done()
            assert said(await waiting) == "at last"
    finally:
        other.close()


@in_loop
async def test_two_models_that_do_not_fit_together_answer_32_clients_each_as_itself():
    """None is lost, none answered by the other; and the card changes hands seldom."""
    async with kitchen(a=16, b=16) as k:
        replies = await asyncio.gather(*(k.chat("ab"[n % 2], f"call {n}") for n in range(32)))
        assert [(reply.model, said(reply)) for reply in replies] == [
            ("ab"[n % 2], f"call {n}") for n in range(32)
        ]
        assert k.gateway.state().loads <= 3


@in_loop
async def test_an_unknown_model_is_a_404_with_the_nearest_name():
    """Nothing is loaded for it, and nothing remembered."""
    async with kitchen(qwen=4) as k:
        for name in ("qwem", "task:qwem", "task:"):
            with pytest.raises(Refused) as refused:
                await k.chat(name)
            assert (refused.value.status, refused.value.code) == (404, "model_not_found")
        with pytest.raises(Refused, match="Did you mean qwen"):
            await k.chat("qwem")
        assert k.gateway.state().breakers == {} and k.where() == {"qwen": "disk"}


@in_loop
async def test_a_model_that_fails_is_answered_for_only_where_that_was_configured():
    """And the answer says who gave it, and why."""
    stand_ins = ServingConfig(fallback={"qwen": ("phi",)})
    async with kitchen(stand_ins, qwen=4, phi=4, scripts={"qwen": [DIED]}) as k:
        reply = await k.chat("qwen", "hello")
        because = "qwen could not answer: the engine of qwen (pid 7) is gone: killed."
        assert (reply.model, said(reply), reply.json["model"]) == ("phi", "hello", "phi")
        assert reply.json["x_gpu"] == {"asked": "qwen", "model": "phi", "because": because}
        assert reply.headers["X-GPU-Because"] == because
        k.scripts["qwen"] = [DIED]
        stream = await k.chat(
            "qwen", "hello", stream=True
        )  # before its first word it may be answered by another
        assert (stream.model, stream.events.first["x_gpu"]["model"], await heard(stream)) == (
            "phi",
            "phi",
            "hello",
        )
    async with kitchen(qwen=4, phi=4, scripts={"qwen": [DIED]}) as k:
        with pytest.raises(
            Refused, match="qwen could not be answered. qwen: the engine of qwen .* is gone"
        ) as refused:
            await k.chat("qwen", "hello")
        assert refused.value.status == 503


@in_loop
async def test_a_model_that_cannot_be_loaded_is_told_with_its_figures_and_stood_in_for():
    """It would need more than the card has; the smaller context is tried first."""
    serving = ServingConfig(fallback={"huge": ("long", "short")})
    async with kitchen(
        serving,
        huge=30,
        long=4,
        short=4,
        options={"long": {"context_length": 32768}, "short": {"context_length": 4096}},
    ) as k:
        reply = await k.chat("huge")
        assert reply.model == "short" and "huge needs 30.0 GiB on one device" in reply.because


@pytest.mark.parametrize(
    ("model_type", "backend", "kind", "body"),
    [
        ("llm", "fake", "images", {"prompt": "a fox"}),
        ("diffusion", "fake", "chat", {"messages": chat("x")["messages"]}),
        ("reranker", "fake", "completions", {"prompt": "a"}),
        ("diffusion", "fake", "embeddings", {"input": "a"}),
        ("llm", "llama_cpp", "embeddings", {"input": "a"}),
    ],
)
@in_loop
async def test_what_a_model_s_type_cannot_do_it_is_not_loaded_for(model_type, backend, kind, body):
    """Others would have to leave for an answer that is settled."""
    async with kitchen() as k:
        source = "" if backend == "fake" else "m.gguf"
        k.rt.register("m", backend=backend, size="4GiB", model_type=model_type, source=source)
        with pytest.raises(Refused, match="m cannot be asked this: it is of type") as refused:
            await k.gateway.answer(kind, {"model": "m", **body})
        assert refused.value.status == 400 and k.gateway.queue.loads == 0


@in_loop
async def test_what_the_caller_does_wrong_nobody_else_is_asked():
    """And the model is not blamed: five such calls open no breaker."""
    serving = ServingConfig(fallback={"qwen": ("phi",)})
    async with kitchen(serving, qwen=4, phi=4) as k:
        for _ in range(6):
            with pytest.raises(Refused) as refused:
                await k.chat("qwen", n=3)
            assert refused.value.status == 400
        assert k.gateway.state().breakers["qwen"].failures == 0
        assert k.where()["phi"] == "disk"


@in_loop
async def test_whoever_is_being_answered_when_it_closes_is_told_and_nothing_begins_any_more():
    """Who waits, who is answered, and who reads a stream, which would else look whole; no breaker hears of it."""
    held, read = asyncio.Event(), asyncio.Event()
    async with kitchen(qwen=12, phi=12, scripts={"qwen": [read, held]}) as k:
        stream = await k.chat("qwen", "one two", stream=True)
        calls = [asyncio.ensure_future(k.chat(model)) for model in ("qwen", "phi")]
        await until(
            lambda: (
                k.gateway.queue.active() == {"qwen": 2} and k.gateway.queue.depth() == {"phi": 1}
            )
        )
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


@asynccontextmanager
async def broken():
    """A kitchen whose one model has failed five times in a row."""
    async with kitchen(qwen=4, scripts={"qwen": [DIED] * 5}) as k:
        for _ in range(5):
            with pytest.raises(Refused):
                await k.chat("qwen")
        yield k


@in_loop
async def test_five_failures_open_the_breaker_and_one_probe_closes_it():
    """Meanwhile calls fail at once, with `Retry-After`; the probe's success lets all in again."""
    async with broken() as k:
        asked = len(k.log)
        with pytest.raises(Refused) as refused:
            await k.chat("qwen")
        assert (refused.value.status, refused.value.code, refused.value.retry_after) == (
            503,
            "breaker_open",
            30.0,
        )
        assert len(k.log) == asked
        k.clock.now += 30.0
        gate = asyncio.Event()
        k.scripts["qwen"] = [gate]
        probe = asyncio.ensure_future(k.chat("qwen"))
        await until(lambda: len(k.log) > asked)
        with pytest.raises(Refused, match="left alone"):
            await k.chat("qwen")
        gate.set()
        assert said(await probe) == said(await k.chat("qwen")) == "one two three"


@in_loop
async def test_a_probe_whose_caller_went_away_leaves_the_probing_to_the_next():
    """Else the model would be left alone for ever."""
    async with broken() as k:
        k.clock.now += 30.0
        k.scripts["qwen"] = [asyncio.Event()]
        probe = asyncio.ensure_future(k.chat("qwen"))
        await until(lambda: k.log[-1] != "qwen ended")
        probe.cancel()
        await asyncio.gather(probe, return_exceptions=True)
        assert said(await k.chat("qwen")) == "one two three"


@in_loop
async def test_calls_that_waited_while_the_breaker_opened_fail_fast_too():
    """They need not find out one by one."""
    async with kitchen(qwen=4, scripts={"qwen": [DIED] * 20}, options={"qwen": ALONE}) as k:
        results = await asyncio.gather(*(k.chat("qwen") for _ in range(12)), return_exceptions=True)
        assert all(isinstance(error, Refused) for error in results)
        assert sum("left alone" in str(error) for error in results) == 7


@in_loop
async def test_a_failed_load_counts_once_however_many_wait_for_it():
    """Else one slow disk would open the breaker at once."""
    async with kitchen(qwen=4, options={"qwen": {"fails": True}}) as k:
        results = await asyncio.gather(*(k.chat("qwen") for _ in range(8)), return_exceptions=True)
        assert all("fails to load because its options say so" in str(error) for error in results)
        assert k.gateway.state().breakers["qwen"].failures == 1


@in_loop
async def test_a_stream_that_breaks_off_ends_with_the_error_and_counts():
    """What was said is said: no other model goes on in the middle of a sentence."""
    serving = ServingConfig(fallback={"qwen": ("phi",)})
    async with kitchen(serving, qwen=4, phi=4, scripts={"qwen": [(DIED,)]}) as k:
        reply = await k.chat("qwen", stream=True)
        events = [event async for event in reply.events]
        assert (
            events[-1]["error"]["code"] == "broken_off"
            and "is gone" in events[-1]["error"]["message"]
        )
        assert k.gateway.state().breakers["qwen"].failures == 1


@in_loop
async def test_three_decode_failures_in_a_row_load_the_model_anew_once():
    """A context that went wrong does not mend itself; two failures may pass."""
    failed = RuntimeError("llama_decode returned -3")
    async with kitchen(
        qwen=4, scripts={"qwen": [failed, failed, None, failed, failed, failed, failed]}
    ) as k:
        for _ in range(6):
            try:
                await k.chat("qwen")
            except Refused:
                pass
            await settle()
        await until(lambda: k.where()["qwen"] != "sim:0")
        assert k.gateway.state().counts["reloads"] == 1
        with pytest.raises(Refused):
            await k.chat("qwen")
        assert (
            said(await k.chat("qwen")) == "one two three"
            and k.gateway.state().counts["reloads"] == 1
        )


@in_loop
async def test_a_client_profile_changes_the_prompt_that_the_engine_receives():
    """As does thinking mode; the caller's own word wins."""
    written = {
        "chat_template": "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}|{% endfor %}"
    }
    serving = ServingConfig(
        clients={
            "bot": Profile(
                system="Be brief.", thinking=False, importance="low", defaults={"max_tokens": 100}
            )
        }
    )
    async with kitchen(serving, qwen=4, options={"qwen": written}) as k:
        assert said(await k.chat("qwen", "hi")) == "user:hi|"
        assert (
            said(await k.chat("qwen", "hi", x_client_id="bot"))
            == "system:Be brief.|user:hi /no_think|"
        )
        assert (
            said(await k.chat("qwen", "hi", x_client_id="bot", x_thinking=True))
            == "system:Be brief.|user:hi /think|"
        )
    knows = {
        "chat_template": "{{ messages[0]['content'] }} {% if enable_thinking is defined %}"
        "<think={{ enable_thinking }}>{% endif %}",
        "thinking": True,
    }
    async with kitchen(serving, qwen=4, options={"qwen": knows}) as k:
        assert said(await k.chat("qwen", "hi")) == "hi <think=True>"
        assert said(await k.chat("qwen", "hi", x_thinking=False)) == "hi <think=False>"


@in_loop
async def test_a_client_in_cooldown_is_told_when_to_come_back():
    """As it asked for itself; others are not concerned."""
    async with kitchen(qwen=4) as k:
        await k.chat("qwen", x_client_id="bot", x_cooldown=10)
        k.clock.now += 4
        with pytest.raises(Refused) as refused:
            await k.chat("qwen", x_client_id="bot")
        assert (refused.value.status, refused.value.retry_after) == (429, 6.0)
        await k.chat("qwen", x_client_id="other")
        k.clock.now += 6
        await k.chat("qwen", x_client_id="bot")


@in_loop
async def test_a_task_is_served_by_its_first_candidate_unless_another_is_warm():
    """`pin_primary` keeps to the first."""
    tasks = {"free": Task(("a", "b")), "pinned": Task(("a", "b"), pin_primary=True)}
    async with kitchen(ServingConfig(tasks=tasks), a=12, b=12) as k:
        await k.chat("b")
        reply = await k.chat("task:free")
        assert (reply.model, reply.because) == ("b", "task:free: it is warm and a is not")
        assert (await k.chat("task:pinned")).model == "a"
        assert (await k.chat("task:free")).model == "a"


@in_loop
async def test_a_budget_that_is_too_short_is_told_at_once_with_both_numbers():
    """Not after the time is lost."""
    tasks = {"quick": Task(("a",), budget_s=10.0)}
    async with kitchen(ServingConfig(tasks=tasks), a=12, b=12) as k:
        k.gateway.costs.add_load("a", 47.0)
        k.gateway.costs.add_answer("a", 2.0)
        with pytest.raises(Refused) as refused:
            await k.chat("task:quick")
        assert (refused.value.status, refused.value.code) == (504, "budget_too_short")
        assert "has a budget of 10 s" in str(
            refused.value
        ) and "47.0 s to load, 2.0 s to answer" in str(refused.value)
        assert (refused.value.facts["budget_seconds"], refused.value.facts["expected_seconds"]) == (
            10.0,
            49.0,
        )
        assert k.where()["a"] == "disk"
        await k.chat("a")  # without a budget it may take its time; and now it is warm
        assert (await k.chat("task:quick")).model == "a"


@in_loop
async def test_a_budget_that_is_spent_ends_the_call():
    """Where nothing told beforehand that it would be."""
    async with kitchen(a=4, scripts={"a": [asyncio.Event(), asyncio.Event()]}) as k:
        with pytest.raises(Refused) as refused:
            await k.chat("a", x_budget=0.05)
        assert (refused.value.status, refused.value.code) == (504, "budget_spent")
        reply = await k.chat(
            "a", x_budget=1.0, stream=True
        )  # in which even a busy machine says its first word
        assert [event async for event in reply.events][-1]["error"]["code"] == "budget_spent"


@in_loop
async def test_a_model_steps_aside_when_it_has_been_idle_for_its_types_time():
    """300 s for a language model, as Model Boss has it; `x_stay_warm` says otherwise."""
    async with kitchen(llm=4, eyes=4, options={"eyes": {"model_type": "vision"}}) as k:
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


@in_loop
async def test_a_full_queue_is_a_503_with_retry_after():
    """GPU_SERVE_QUEUE says how many may wait."""
    gate = asyncio.Event()
    async with kitchen(
        qwen=4,
        scripts={"qwen": [gate, gate]},
        options={"qwen": ALONE},
        settings={"gpu_serve_queue": 1},
    ) as k:
        calls = [asyncio.ensure_future(k.chat("qwen"))]
        await until(lambda: k.log)
        calls.append(asyncio.ensure_future(k.chat("qwen")))
        await settle()
        with pytest.raises(Refused) as refused:
            await k.chat("qwen")
        assert (refused.value.status, refused.value.code) == (
            503,
            "queue_full",
        ) and refused.value.headers
        gate.set()
        await asyncio.gather(*calls)


@in_loop
async def test_what_can_be_asked_for_is_listed():
    """Models, and tasks under the name that they are addressed by."""
    async with kitchen(ServingConfig(tasks={"sum": Task(("qwen",))}), qwen=4) as k:
        rows = {row["id"]: row["x_gpu"] for row in k.gateway.models()}
        assert rows == {
            "qwen": {"model_type": "llm", "backend": "fake", "warm": False},
            "task:sum": {"candidates": ["qwen"]},
        }


@in_loop
async def test_the_guard_is_what_the_state_says():
    """As `/api/v1/config` shows it."""
    async with kitchen(qwen=4, guard=CloudGuard(None, False)) as k:
        assert k.gateway.state().allow_cloud is False
