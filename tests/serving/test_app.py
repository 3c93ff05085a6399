"""Who may, how a body is read, jobs, metrics: the application around the routes."""

from __future__ import annotations

import asyncio
import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpu_runtime.serving.api.app import READS, application
from gpu_runtime.serving.api.jobs import MAX_JOBS, Jobs

from .doors import OPERATOR, VIEWER, Gateway, Words, client, let_in

CHAT = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def rt(runtime):
    return runtime(monitor=False)


def every_call(rt):
    """Method and path of every route: those that the description names, and the description's own."""
    described = client(rt).get("/openapi.json").json()["paths"]
    return [
        (method.upper(), path.replace("{model_type}", "llm").replace("{id}", "job-1"))
        for path, methods in described.items()
        for method in methods
    ] + [("GET", "/openapi.json"), ("GET", "/docs")]


def test_where_no_gate_stands_nobody_is_answered(rt):
    """Every route of the description and of the documentation too."""
    door = client(rt, visitor=None)
    calls = every_call(rt)
    assert {path for _, path in calls} >= {
        "/memory/stats",
        "/v1/chat/completions",
        "/metrics",
        "/health",
    }
    told = {(method, path): door.request(method, path).status_code for method, path in calls}
    assert {call for call, status in told.items() if status != 401} == set()


def test_a_viewer_reads_everything_and_does_nothing(rt):
    door = client(rt, VIEWER)
    for method, path in every_call(rt):
        status = door.request(method, path, json={}).status_code
        assert (status != 403) if method in READS else status == 403, (method, path)


# What is asked of a model


def test_an_answer_comes_whole(rt):
    answer = client(rt).post(
        "/v1/chat/completions", json={**CHAT, "x_client_id": "notes", "x_priority": "high"}
    )
    assert answer.json()["body"] == CHAT and "notes" in answer.json()["client"]
    assert answer.headers["X-Model"] == "echo"


def test_an_answer_comes_word_by_word(rt):
    gateway = Gateway()
    with client(rt, gateway=gateway).stream(
        "POST", "/v1/chat/completions", json={**CHAT, "stream": True}
    ) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines == ['data: {"n":1}', 'data: {"n":2}', 'data: {"n":3}', "data: [DONE]"]
    assert answer.headers["content-type"].startswith("text/event-stream") and gateway.words.closed


@pytest.mark.parametrize(
    "body", [b"", b"{", b"nul", b"\xff\xfe", b'{"model": NaN}', b"[" * 100_000, b"[]", b'"x"', b"7"]
)
def test_what_is_no_json_object_is_a_bad_request(rt, body):
    for path in (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/images/generations",
        "/v1/jobs",
    ):
        answer = client(rt).post(path, content=body)
        assert answer.status_code == 400 and answer.json()["error"]["message"], path


def test_a_model_that_is_not_there_is_not_found(rt):
    answer = client(rt).post("/v1/chat/completions", json={**CHAT, "model": "nobody"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_model")


def asked(app, body, hang_up_after: int = 1):
    """Asks as a client that hangs up after so many parts of the answer; the parts that came."""
    sent = []

    async def talk():
        gone = asyncio.Event()
        told = False

        async def receive():
            nonlocal told
            if not told:
                told = True
                return {
                    "type": "http.request",
                    "body": json.dumps(body).encode(),
                    "more_body": False,
                }
            if hang_up_after:
                await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)
            if len(sent) > hang_up_after:
                gone.set()

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "method": "POST",
            "headers": [],
            "path": "/v1/chat/completions",
            "raw_path": b"",
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "http_version": "1.1",
            "client": ("", 0),
            "server": ("", 0),
        }
        await asyncio.wait_for(app(scope, receive, send), 10)

    asyncio.run(talk())
    return sent


def test_who_hangs_up_while_waiting_lets_go_of_the_model(rt):
    gateway = Gateway()
    asked(
        let_in(application(rt, lambda: gateway, "0"), OPERATOR),
        {**CHAT, "model": "slow"},
        hang_up_after=0,
    )
    assert gateway.let_go


def test_who_hangs_up_in_the_middle_ends_the_stream(rt):
    gateway = Gateway()
    gateway.words = Words(10_000, pause=0.001)
    asked(
        let_in(application(rt, lambda: gateway, "0"), OPERATOR),
        {**CHAT, "stream": True},
        hang_up_after=3,
    )
    assert gateway.words.closed and gateway.words.sent < 1000


# The guard against clouds


def test_the_cloud_guard_is_read_and_changed(rt):
    door = client(rt)
    assert door.get("/api/v1/config").json() == {"allowCloudFallback": True}
    assert door.put("/api/v1/config", json={"allowCloudFallback": False}).json() == {
        "allowCloudFallback": False
    }
    for wrong in ({}, {"allowCloudFallback": "no"}, {"allowCloudFallback": False, "other": 1}):
        assert door.put("/api/v1/config", json=wrong).status_code == 422
    assert door.get("/api/v1/config").json() == {"allowCloudFallback": False}


# Jobs


def test_a_job_outlives_its_caller():
    async def story():
        jobs, gateway = Jobs(), Gateway()
        job = jobs.start(gateway, {"endpoint": "/v1/chat/completions", "body": CHAT}, "ann")
        assert job.as_json()["status"] == "running"
        await job.task
        told = jobs.find(job.id).as_json()
        assert (told["status"], told["result"]["body"]) == ("succeeded", CHAT) and told[
            "ended"
        ] >= told["created"]
        failed = jobs.start(
            gateway,
            {"endpoint": "/v1/chat/completions", "body": {**CHAT, "model": "nobody"}},
            "ann",
        )
        await failed.task
        assert (failed.status, failed.error["code"]) == ("failed", "no_model")

    asyncio.run(story())


def test_a_job_that_is_ended_lets_go():
    async def story():
        jobs, gateway = Jobs(), Gateway()
        job = jobs.start(
            gateway, {"endpoint": "/v1/chat/completions", "body": {**CHAT, "model": "slow"}}, "ann"
        )
        await asyncio.sleep(0)
        assert (await jobs.end(job.id)).status == "cancelled" and gateway.let_go

    asyncio.run(story())


def test_jobs_are_bounded_and_old_results_go_first():
    async def story():
        wall = [1000.0]
        jobs, gateway = Jobs(lambda: wall[0]), Gateway()
        slow = {"endpoint": "/v1/chat/completions", "body": {**CHAT, "model": "slow"}}
        done = jobs.start(gateway, {"endpoint": "/v1/chat/completions", "body": CHAT}, "ann")
        await done.task
        running = [
            jobs.start(gateway, slow, "ann") for _ in range(MAX_JOBS)
        ]  # the last takes the result's place
        with pytest.raises(Exception, match="running already") as refused:
            jobs.start(gateway, slow, "ann")
        assert refused.value.status == 503 and refused.value.retry_after
        with pytest.raises(Exception, match="no job"):
            jobs.find(done.id)
        await jobs.close()
        assert all(job.task.done() for job in running)
        late = jobs.start(gateway, {"endpoint": "/v1/chat/completions", "body": CHAT}, "ann")
        await late.task
        wall[0] += 3601
        await jobs.start(gateway, {"endpoint": "/v1/chat/completions", "body": CHAT}, "ann").task
        with pytest.raises(Exception, match="no job"):
            jobs.find(late.id)

    asyncio.run(story())


@pytest.mark.parametrize(
    "wanted",
    [
        {},
        {"endpoint": "/v1/models", "body": {}},
        {"endpoint": "/v1/embeddings"},
        {"endpoint": "/v1/chat/completions", "body": {**CHAT, "stream": True}},
        7,
    ],
)
def test_what_is_no_job_is_a_bad_request(rt, wanted):
    assert client(rt).post("/v1/jobs", json=wanted).status_code == 400


# Metrics


def samples(text: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_tell_the_devices_the_book_and_the_queue(rt):
    rt.register("a", backend="fake", size="6GiB")
    rt.preload("a")
    told = samples(client(rt).get("/metrics").text)
    assert told["gpu_device_claimed_bytes", "sim:0", "simulated", "true"] == 6 * 2**30
    assert told["gpu_queue_depth", "echo"] == 2 and told["gpu_breaker_state", "echo"] == 2
    assert told["gpu_queue_depth", "idle"] == told["gpu_active_calls", "idle"] == 0, (
        "none is a figure too"
    )
    assert not any(name == "gpu_device_power_watts" for name, *_ in told), (
        "what no driver tells has no sample"
    )


def test_counters_follow_what_happens_between_two_scrapes(rt):
    door = client(rt)
    rt.register("a", backend="fake", size="6GiB")
    before = samples(door.get("/metrics").text)
    for _ in range(30):  # more than the page remembers
        rt.preload("a")
        rt.evict("a")
    after = samples(door.get("/metrics").text)
    assert after["gpu_evictions_by_reason_total", "evict", "offloaded"] == 30
    assert after["gpu_evictions_total",] - before.get(("gpu_evictions_total",), 0) == 30
    assert after["gpu_restore_seconds_count",] <= 29
    again = samples(door.get("/metrics").text)
    assert again["gpu_evictions_by_reason_total", "evict", "offloaded"] == 30, (
        "nothing is counted twice"
    )
