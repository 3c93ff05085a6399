"""The application around the routes. The tests check roles, request bodies, jobs and metrics."""

import asyncio
import os
import re
import socket
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpu_runtime.errors import DoesNotFit
from gpu_runtime.facts import AllocatorMap, ProblemKind
from gpu_runtime.files import new_log
from gpu_runtime.serving.api.openai import MAX_JOBS, Jobs
from gpu_runtime.serving.metrics import card_labels
from gpu_runtime.serving.records import CallRecord
from tests.serving.loops import until

from .app_client import VIEWER, Exchange, Gateway, Words, client

CHAT = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}
QUICK = {"endpoint": "/v1/chat/completions", "body": CHAT}
SLOW = {**QUICK, "body": {**CHAT, "model": "slow"}}

READS = ("GET", "HEAD", "OPTIONS")


@pytest.fixture
def rt(runtime):
    return runtime(monitor=False)


def every_call(rt):
    """Yields the method and path of every route, including the routes that serve the API's description."""
    described = client(rt).get("/openapi.json").json()["paths"]
    return [
        (method.upper(), path.replace("{model_type}", "llm").replace("{id}", "job-1"))
        for path, methods in described.items()
        for method in methods
    ] + [("GET", "/openapi.json"), ("GET", "/docs")]


def test_without_a_gate_every_request_is_refused(rt):
    http = client(rt, visitor=None)
    calls = every_call(rt)
    assert len(calls) > 40
    assert [call for call in calls if http.request(*call).status_code != 401] == []


def test_a_viewer_may_read_every_route_but_logs_and_act_on_none(rt):
    http = client(rt, VIEWER)
    for method, path in every_call(rt):
        status = http.request(method, path, json={}).status_code
        may = method in READS and not path.endswith("/log")
        assert (status != 403) if may else status == 403, (method, path)


def test_the_log_of_an_engine_is_read_while_it_grows(rt, tmp_path, monkeypatch):
    """The log is that of the engine which this process started last for the model."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    http = client(rt)
    assert http.get("/v1/engines/org/qwen:4b/log").json()["error"]["code"] == "no_log"
    new_log("org/qwen:4b").write_text("the first engine\n")
    new_log("org/qwen").write_text("of another model\n")
    log = new_log("org/qwen:4b")
    log.write_text("loading\n")
    first = http.get("/v1/engines/org/qwen:4b/log")
    assert first.text == "loading\n"
    with open(log, "a") as file:
        file.write("ready\n")
    end = first.headers["X-GPU-Log-Next"]
    assert http.get(f"/v1/engines/org/qwen:4b/log?after={end}").text == "ready\n"
    log.write_bytes(b"x" * 100_000 + b"end")
    assert len(http.get("/v1/engines/org/qwen:4b/log").text) == 1 << 16
    assert http.get("/v1/engines/org/qwen:4b/log?after=999999").text.endswith("end")


# Calls


def test_a_whole_answer(rt):
    answer = client(rt).post(
        "/v1/chat/completions", json={**CHAT, "x_client_id": "notes", "x_priority": "high"}
    )
    assert answer.json()["body"] == CHAT and "notes" in answer.json()["client"]
    assert answer.headers["X-Model"] == "echo"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"nul", b"\xff\xfe", b'{"model": NaN}', b"[" * 100_000, b"[]", b'"x"', b"7"]
)
def test_a_body_that_is_no_json_object_is_a_bad_request(rt, body):
    server = client(rt)
    for path in ("chat/completions", "completions", "embeddings", "images/generations", "jobs"):
        answer = server.post(f"/v1/{path}", content=body)
        assert answer.status_code == 400 and answer.json()["error"]["message"], path


async def test_a_client_that_disconnects_while_it_waits_releases_the_model(rt):
    gateway = Gateway()
    there = Exchange(rt, gateway, "/v1/chat/completions", SLOW["body"])
    there.left.set()
    await there.done
    assert gateway.let_go


async def test_a_client_that_disconnects_during_a_stream_ends_it(rt):
    gateway = Gateway()
    gateway.words = Words(10_000, pause=0.001)
    there = Exchange(rt, gateway, "/v1/chat/completions", {**CHAT, "stream": True})
    await until(lambda: there.sent.count(b"data:") > 2)
    there.left.set()
    await there.done
    assert there.kind.startswith("text/event-stream")
    assert gateway.words.closed and gateway.words.sent < 10_000


# Other reads


def test_one_model_is_described_by_its_id(rt):
    """An id may contain slashes and colons, as the names of clouds' models and of tasks do."""
    gateway = Gateway()
    rows = [{"id": id, "object": "model"} for id in ("echo", "task:write", "org/name:8b")]
    gateway.models = lambda client: rows
    http = client(rt, gateway=gateway)
    for row in rows:
        assert http.get(f"/v1/models/{row['id']}").json() == row
    answer = http.get("/v1/models/nobody")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_a_head_is_a_get_without_a_body(rt):
    """Some clients and load balancers check a server with HEAD. A route that only acts has none."""
    http = client(rt)
    for path in ("/v1/models", "/health", "/v1/models/echo", "/metrics"):
        answer = http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["content-type"] == http.get(path).headers["content-type"]
    assert http.head("/v1/chat/completions").status_code == 405
    assert http.head("/v1/models/nobody").status_code == 404


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/v1/chat/completions", "/api/v1/models"])
def test_a_base_url_without_v1_or_with_two_is_a_404_with_the_right_path(rt, path):
    """The base URL of OpenAI's clients ends in /v1. People forget it, and got only "Not Found"."""
    meant = "/v1/models" if path.endswith("models") else "/v1/chat/completions"
    answer = client(rt).post(path, json=CHAT)
    assert answer.status_code == 404
    assert f"there is no {path}; did you mean {meant}?" in answer.json()["error"]["message"]
    other = client(rt).get("/v1/nothing").json()["error"]["message"]
    assert other == "there is no /v1/nothing; GET /docs shows all paths", "without a guess"


def test_routes_that_other_servers_have_outside_v1_are_served_there_too(rt):
    """vLLM and llama-server have those for tokens there. Cohere's client posts to /v2/rerank."""
    http = client(rt)
    for path in ("/tokenize", "/detokenize", "/v2/rerank"):
        wrong = {"model": "echo"}  # the text, the tokens or the documents are missing
        meant = f"/v1{path.removeprefix('/v2')}"
        here, there = http.post(path, json=wrong), http.post(meant, json=wrong)
        assert (here.status_code, here.json()) == (there.status_code, there.json())
        assert here.status_code == 400


def test_a_visitor_lists_its_own_jobs(rt):
    http = client(rt)
    assert http.get("/v1/jobs").json() == {"object": "list", "data": []}
    ids = [http.post("/v1/jobs", json=QUICK).json()["id"] for _ in range(2)]
    rows = http.get("/v1/jobs").json()["data"]
    assert [row["id"] for row in rows] == ids[::-1]
    assert all("result" not in row for row in rows)


def test_every_answer_names_its_request(rt):
    http = client(rt)
    sent = http.get("/health", headers={"X-Request-Id": "run-7:a"})
    assert sent.headers["x-request-id"] == "run-7:a"
    made = [http.get("/health", headers={"X-Request-Id": bad}) for bad in ("", "a b", "x" * 200)]
    ids = {answer.headers["x-request-id"] for answer in made}
    assert len(ids) == 3 and all(id.startswith("req-") for id in ids)
    assert client(rt, visitor=None).get("/health").headers["x-request-id"].startswith("req-")
    assert http.post("/v1/jobs", content=b"{").headers["x-request-id"].startswith("req-")


# The cloud guard


def test_the_cloud_guard_is_read_and_changed(rt):
    http = client(rt)
    assert http.get("/api/v1/config").json() == {"allowCloudFallback": True}
    changed = http.put("/api/v1/config", json={"allowCloudFallback": False}).json()
    assert changed == {"allowCloudFallback": False}
    for wrong in ({}, {"allowCloudFallback": "no"}, {"allowCloudFallback": False, "other": 1}):
        assert http.put("/api/v1/config", json=wrong).status_code == 422
    assert http.get("/api/v1/config").json() == {"allowCloudFallback": False}


# Jobs


async def test_a_job_outlives_its_caller():
    jobs, gateway = Jobs(), Gateway()
    job = jobs.start(gateway, QUICK, "ann")
    assert job.as_json()["status"] == "running"
    await job.task
    finished = jobs.find(job.id).as_json()
    assert (finished["status"], finished["result"]["body"]) == ("succeeded", CHAT)
    assert finished["ended"] >= finished["created"]
    failed = jobs.start(gateway, {**QUICK, "body": {**CHAT, "model": "nobody"}}, "ann")
    await failed.task
    assert (failed.status, failed.error["code"]) == ("failed", "no_model")


async def test_a_job_that_is_ended_releases_its_model():
    jobs, gateway = Jobs(), Gateway()
    job = jobs.start(gateway, SLOW, "ann")
    await asyncio.sleep(0)
    assert (await jobs.end(job.id)).status == "cancelled" and gateway.let_go


async def test_jobs_are_bounded_and_old_results_go_first():
    wall = [1000.0]
    jobs, gateway = Jobs(lambda: wall[0]), Gateway()
    done = jobs.start(gateway, QUICK, "ann")
    await done.task
    assert jobs.fetch(done.id)["result"]
    # The last one replaces the result that was fetched.
    running = [jobs.start(gateway, SLOW, "ann") for _ in range(MAX_JOBS)]
    with pytest.raises(Exception, match="256 jobs run") as refused:
        jobs.start(gateway, SLOW, "ann")
    assert refused.value.status == 503 and refused.value.retry_after
    with pytest.raises(Exception, match="no job"):
        jobs.find(done.id)
    await jobs.close()
    assert all(job.task.done() for job in running)
    late = jobs.start(gateway, QUICK, "ann")
    await late.task
    wall[0] += 3601
    await jobs.start(gateway, QUICK, "ann").task
    with pytest.raises(Exception, match="no job"):
        jobs.find(late.id)


async def test_a_result_is_not_lost_before_its_client_has_fetched_it():
    """Of 400 short jobs, 144 results were gone. A client that fetches nothing keeps nobody out."""
    jobs, gateway = Jobs(lambda: 1000.0), Gateway()
    started = [jobs.start(gateway, QUICK, "ann") for _ in range(MAX_JOBS)]
    await asyncio.gather(*(job.task for job in started))
    with pytest.raises(Exception, match="Fetch or delete results") as refused:
        jobs.start(gateway, QUICK, "ann")
    assert refused.value.status == 503 and all(jobs.find(job.id) for job in started)
    bob = jobs.start(gateway, QUICK, "bob")
    await bob.task
    with pytest.raises(Exception, match="no job"):
        jobs.find(started[0].id)
    assert jobs.fetch(started[5].id)["status"] == "succeeded"
    await jobs.start(gateway, QUICK, "ann").task
    with pytest.raises(Exception, match="no job"):
        jobs.find(started[5].id)
    assert jobs.find(bob.id) and jobs.find(started[1].id)
    await jobs.close()


@pytest.mark.parametrize("wanted", [
    {}, {"endpoint": "/v1/models", "body": {}}, {"endpoint": "/v1/embeddings"},
    {"endpoint": "/v1/chat/completions", "body": {**CHAT, "stream": True}},
    {"endpoint": "/v1/chat/completions", "body": CHAT, "webhook": "http://127.0.0.1/"}, 7,
])  # fmt: skip
def test_an_invalid_job_is_a_bad_request(rt, wanted):
    assert client(rt).post("/v1/jobs", json=wanted).status_code == 400


TRACE = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.mark.parametrize(
    ("sent", "noted"),
    [
        (TRACE, TRACE), (TRACE.upper(), None), (f"ff{TRACE[2:]}", None), (f"{TRACE}-x", None),
        (f"00-{'0' * 32}-{'b' * 16}-01", None), ("", None), ("é", None),
    ],
)  # fmt: skip
def test_a_valid_trace_is_a_fact_of_the_call(rt, monkeypatch, sent, noted):
    """The header is that of W3C's Trace Context."""
    gateway, made = Gateway(), []
    plain = gateway.answer

    async def answer(*args, **more):
        made.append(CallRecord(time.monotonic, "chat", "ann").facts.get("traceparent"))
        return await plain(*args, **more)

    monkeypatch.setattr(gateway, "answer", answer)
    headers = {"traceparent": sent.encode("utf-8")}
    client(rt, gateway=gateway).post("/v1/chat/completions", json=CHAT, headers=headers)
    assert made == [noted]


# Metrics


def samples(text: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_contain_devices_book_and_queue(rt):
    rt.register("a", backend="fake", size="6GiB")
    rt.preload("a")
    figures = samples(client(rt).get("/metrics").text)
    card = sorted(card_labels(rt.status().devices[0].device, socket.gethostname()))
    assert figures[("gpuconsole_device_claimed_bytes", *card)] == 6 * 2**30
    assert (
        figures["gpuconsole_queue_depth", "echo"] == 2
        and figures["gpuconsole_breaker_state", "echo"] == 2
    )
    idle = [figures[name, "idle"] for name in ("gpuconsole_queue_depth", "gpuconsole_active_calls")]
    assert idle == [0, 0], "none is a figure too"
    for name in ("cpu_seconds_total", "resident_memory_bytes", "open_fds", "start_time_seconds"):
        assert figures[f"process_{name}",] > 0
    ends = {key: count for key, count in figures.items() if key[0] == "gpuconsole_calls_total"}
    assert ends == {("gpuconsole_calls_total", "answered"): 3}, "each call counts once"
    assert figures["gpuconsole_streamed_total",] == 2 and figures["gpuconsole_stood_in_total",] == 0
    assert "gpuconsole_device_power_watts" not in {name for name, *_ in figures}, (
        "no driver tells it"
    )


def test_the_page_has_all_metrics_with_their_kinds_and_labels(rt):
    page = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()
    page = page.partition("## Fleet")[0]
    rows = re.findall(r"^\| `(gpuconsole_\w+)` \| (\w+) \| (.*?) \|", page, re.MULTILINE)
    listed = {
        name.removesuffix("_total"): (kind, re.findall(r"`(\w+)`", labels))
        for name, kind, labels in rows
    }
    rt.register("a", backend="fake", size="6GiB")
    rt.preload("a")
    gateway = Gateway()
    gateway.figures.add("qwen", {"queue_seconds": 1.0, "prompt_tokens": 9, "completion_tokens": 5})
    families = text_string_to_metric_families(client(rt, gateway=gateway).get("/metrics").text)
    found = {family.name: family for family in families if family.name.startswith("gpuconsole_")}
    assert found.keys() == listed.keys()
    for name, family in found.items():
        kind, labels = listed[name]
        assert family.type == kind, name
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == set(labels), name


def test_metrics_have_histograms_of_the_calls_of_each_model(rt):
    """The first token is counted from the arrival of the call, with its time in the queue."""
    gateway = Gateway()
    facts = {"queue_seconds": 1.0, "prompt_tokens": 9, "completion_tokens": 5}
    gateway.figures.add("qwen", {**facts, "first_seconds": 0.5, "answer_seconds": 2.5})
    gateway.figures.add("qwen", facts)
    figures = samples(client(rt, gateway=gateway).get("/metrics").text)
    for name, count, total in (
        ("queue_seconds", 2, 2.0),
        ("first_token_seconds", 1, 1.5),
        ("token_seconds", 1, 0.5),
        ("prompt_tokens", 2, 18),
        ("answer_tokens", 2, 10),
    ):
        found = [figures[f"gpuconsole_call_{name}_{what}", "qwen"] for what in ("count", "sum")]
        assert found == [count, total], name


def test_metrics_count_the_problems_of_each_kind(rt):
    """The problems are those of `/memory/health` and of the console. A kind without a problem is 0."""
    http = client(rt)
    assert samples(http.get("/metrics").text)["gpuconsole_problems", "refused"] == 0
    rt.register("kept", backend="fake", size="14GiB", keep=True)
    rt.register("giant", backend="fake", size="20GiB")
    rt.preload("kept")
    with pytest.raises(DoesNotFit):
        rt.preload("giant")
    figures = samples(http.get("/metrics").text)
    assert figures["gpuconsole_problems", "refused"] == 1
    assert figures["gpuconsole_problem_bytes", "refused"] == 20 * 2**30
    assert {labels[0] for name, *labels in figures if name == "gpuconsole_problems"} == set(
        ProblemKind
    )
    assert http.get("/memory/health").json()["healthy"] is False


def test_metrics_count_allocator_retries_and_out_of_memory_errors(rt, monkeypatch):
    """For each process and card, because a sum over processes would fall when a process ends."""
    rt.register("a", backend="fake", size="1GiB")
    rt.preload("a")
    found = [
        AllocatorMap(owner, "sim:0", 0.0, 5, 9, alloc_retries=3, ooms=2)
        for owner in (rt.status().owner.id, "gone")
    ]
    monkeypatch.setattr(type(rt), "allocator_maps", lambda self: found)
    figures = samples(client(rt).get("/metrics").text)
    card = card_labels(rt.status().devices[0].device, socket.gethostname())
    labels = sorted((str(os.getpid()), *card))
    mine = {name: value for (name, *of), value in figures.items() if of == labels}
    assert mine["gpuconsole_allocator_retries_total"] == 3
    assert mine["gpuconsole_allocator_out_of_memory_total"] == 2
    assert sum(name == "gpuconsole_allocator_retries_total" for name, *_ in figures) == 1


@pytest.mark.parametrize("pause", [0.0, 7200.0])
def test_counters_include_all_events_between_two_scrapes(rt, monkeypatch, pause):
    """Also after a pause, in which a fixed period of one hour would end."""
    began = time.time() - pause
    monkeypatch.setattr(rt._session, "wall", lambda: began)
    http = client(rt)
    monkeypatch.setattr(rt._session, "wall", lambda: began + 1)
    rt.register("a", backend="fake", size="6GiB")
    before = samples(http.get("/metrics").text)
    for _ in range(30):  # more than a status contains
        rt.preload("a")
        rt.evict("a")
    monkeypatch.undo()
    after = samples(http.get("/metrics").text)
    assert after["gpuconsole_evictions_by_reason_total", "evict", "offloaded"] == 30
    assert (
        after["gpuconsole_evictions_total",] - before.get(("gpuconsole_evictions_total",), 0) == 30
    )
    assert after["gpuconsole_restore_seconds_count",] == 29, "short ones count too"
    again = samples(http.get("/metrics").text)
    assert again["gpuconsole_evictions_by_reason_total", "evict", "offloaded"] == 30, "counted once"


def test_after_a_boot_the_counters_start_at_zero(runtime, monkeypatch, tmp_path):
    """The journal still has the events from before the boot. The new server has not seen them."""
    settings = {"monitor": False, "ledger": f"keeper://{tmp_path}"}
    before = runtime(**settings)
    before.register("a", backend="fake", size="6GiB")
    before.preload("a")
    before.evict("a")
    before.close()
    boot = "13570074-f799-4d7e-a08f-84fbbe7bb98d"
    monkeypatch.setattr("gpu_runtime.ledgers.keeper.ledger.boot_id", lambda: boot)
    after = runtime(**settings)
    assert any(event.action == "offloaded" for event in after.history("1h").events)
    figures = samples(client(after).get("/metrics").text)
    assert not any(name == "gpuconsole_evictions_by_reason_total" for name, *_ in figures)
